"""Reference of a trained model: its kind and its cost.

A new adapter has its reference for nothing: the model without it. An adapter that is trained further has not: without
it the model is another one than training starts from. So a frozen copy of the adapter as it was stays beside it, and
takes its place for the reference's passes.
"""

from typing import Literal, assert_never

from tunekit.planner.origin import Origin, continued_adapter
from tunekit.recipe.methods.spec import MethodSection
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

Reference = Literal["none", "without adapter", "copied adapter", "second model", "beforehand"]
"""Reference of a run: none; the model without its adapter; the adapter as it was, kept frozen beside the trained one; a
second model; or log-probabilities that were computed before training."""


def reference_of(method: MethodSection, adapter: FullAdapter | LoraAdapter, origin: Origin | None) -> Reference:
    """Return the reference of a run."""
    if method.reference_use != "model":
        return method.reference_use
    if isinstance(adapter, FullAdapter):
        return "second model"
    return "without adapter" if continued_adapter(origin, adapter) is None else "copied adapter"


def reference_words(reference: Reference, origin: Origin | None) -> str:
    """Describe the reference of a run."""
    match reference:
        case "none":
            return "no reference"
        case "without adapter":
            return "the reference is the model without its adapters"
        case "beforehand":
            return "log-probabilities of the reference are computed before training"
        case "second model":
            merged = origin is not None and origin.adapter is not None
            return "the reference is a second model" + (f", {origin.name} merged" if merged and origin else "")
        case "copied adapter":
            assert origin is not None
            return f"the reference is the adapter of {origin.name} as it was"
        case _:
            assert_never(reference)
