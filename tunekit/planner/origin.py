"""Origin of training where that is a run or an adapter: its contents and its own origin.

A run gives the next one its model: all weights of a run that trained all, or an adapter on the base that it was trained
on. A new adapter section then either trains that adapter further, with the same matrices, or has it merged into the
base first, if all weights are to be trained.
"""

from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.model import ModelSection

MATRICES = ("rank", "alpha", "target_modules", "use_rslora", "use_dora", "modules_to_save")
"""Fields of an adapter section that say what the trained tensors are and mean: an adapter that is trained further keeps
them."""


class Ancestor(BaseModel):
    """A run that a model came from."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    path: str
    """Its folder."""
    method: str
    adapter: str

    @property
    def words(self) -> str:
        """Its name and how it trained: `my-sft (sft, lora)`."""
        return f"{self.name} ({self.method}, {self.adapter})"


class Origin(BaseModel):
    """A trained model or adapter that training starts from."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    folder: str
    """Folder of its weights, and of its tokenizer if it has one."""
    base: ModelSection
    """Model that transformers loads: the one below the adapter, or that folder."""
    adapter: Annotated[LoraAdapter | QloraAdapter, Field(discriminator="type")] | None
    """Settings of the adapter's training; None where the folder holds a whole model."""
    start: str
    """The model that the first run started from."""
    runs: tuple[Ancestor, ...]
    """The runs that it came from, the first one first; none where it is an adapter that no run is known of."""

    @property
    def name(self) -> str:
        """Its name: that of the last run, or the folder."""
        return self.runs[-1].name if self.runs else self.folder

    @property
    def chain(self) -> str:
        """All that it came from: `pico > my-sft (sft, lora) > my-dpo (dpo, lora)`."""
        return " > ".join([self.start, *(run.words for run in self.runs)] if self.runs else [self.start, self.folder])

    def continues_in(self, adapter: FullAdapter | LoraAdapter) -> bool:
        """Return whether its adapter is trained further."""
        return self.adapter is not None and isinstance(adapter, LoraAdapter)

    def is_merged_for(self, adapter: FullAdapter | LoraAdapter) -> bool:
        """Return whether its adapter is merged into the weights, all of which are trained."""
        return self.adapter is not None and isinstance(adapter, FullAdapter)


def continued_adapter(origin: Origin | None, adapter: FullAdapter | LoraAdapter) -> Origin | None:
    """The origin whose adapter is trained further; None where training starts with a new one, or with none."""
    return origin if origin is not None and origin.continues_in(adapter) else None


class Contradiction(NamedTuple):
    """A field of the adapter section that the adapter to be trained further has otherwise."""

    field: str
    asked: Any
    has: Any


def contradictions(origin: Origin, adapter: FullAdapter | LoraAdapter) -> Iterator[Contradiction]:
    """Yield the recipe's adapter settings that contradict the existing adapter."""
    if origin.adapter is None or not isinstance(adapter, LoraAdapter):
        return
    for field in MATRICES:
        if field in adapter.model_fields_set:
            requested, has = dict(adapter)[field], dict(origin.adapter)[field]
            if _set_of(requested) != _set_of(has):
                yield Contradiction(field, requested, has)


def _set_of(value: Any) -> Any:
    """A list of names whatever their order, where no name is as good as none."""
    return frozenset(value) if isinstance(value, list) else frozenset() if value is None else value


def taken_over(origin: Origin, adapter: FullAdapter | LoraAdapter, *, is_type_asked: bool) -> FullAdapter | LoraAdapter:
    """The adapter section of a recipe, with what it leaves out as in the adapter that is trained further.

    Args:
        origin: Where training starts.
        adapter: The section.
        is_type_asked: Whether the recipe says `lora` or `qlora` itself.
    """
    if origin.adapter is None or not isinstance(adapter, LoraAdapter):
        return adapter
    kind = type(adapter) if is_type_asked else type(origin.adapter)
    explicit = {name: value for name, value in adapter if name in adapter.model_fields_set}
    fields = {name: value for name, value in {**dict(origin.adapter), **explicit}.items() if name in kind.model_fields}
    return kind.model_validate({**fields, "type": kind.model_fields["type"].default})


def start_words(origin: Origin, adapter: FullAdapter | LoraAdapter) -> tuple[str, str]:
    """Return choice and reason of a plan about the start of training."""
    choice = origin.chain
    if origin.adapter is None:
        return choice, f"all weights of {origin.name} are what is started from"
    if isinstance(adapter, FullAdapter):
        return choice, f"the adapter of {origin.name} is merged into {origin.base.path} in float32, and all is trained"
    why = f"the adapter of {origin.name} is trained further, on {origin.base.path}"
    was, is_now = isinstance(origin.adapter, QloraAdapter), isinstance(adapter, QloraAdapter)
    if was != is_now:
        kinds = ("a 4-bit base", "an unquantised one")
        why += f"; it was trained over {kinds[not was]} and goes on over {kinds[not is_now]}, which answers a little "
        why += "differently"
    return choice, why
