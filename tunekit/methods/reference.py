"""The reference of preference and reinforcement methods: the model without its adapter, or a second one."""

from typing import TYPE_CHECKING, Any

from tunekit.recipe.model import ModelSection

if TYPE_CHECKING:
    from torch.nn import Module

_COPY = "ref"
"""What TRL calls its copy of the adapter that it was given."""


def loading_arguments(base: ModelSection) -> dict[str, Any]:
    """How TRL is to load a second model, where it does so itself: from where the first came from."""
    return {"revision": base.revision, "trust_remote_code": base.trust_remote_code, "use_safetensors": True}


def refer_to_base(model: "Module") -> None:
    """Let go of the copy that TRL makes of an adapter, to be the reference beside the trained one.

    TRL takes an adapter that it did not attach itself for one that is trained further (trl 1.16,
    `DPOTrainer.__init__`). Where it finds no copy it disables the adapter, which a new one starts from.
    """
    from peft import PeftModel

    if isinstance(model, PeftModel) and _COPY in model.peft_config:
        model.delete_adapter(_COPY)
