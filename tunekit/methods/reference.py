"""The reference of preference and reinforcement methods: without the adapter, with a copy of it, or a second model."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.planner.memory.reference import Reference
from tunekit.recipe.sections.model import ModelSection

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel

COPY = "ref"
"""TRL's name for its copy of the adapter that it was given."""


def loading_arguments(base: ModelSection) -> dict[str, Any]:
    """Return the arguments with which TRL loads a second model itself: from where the first came from."""
    return {"revision": base.revision, "trust_remote_code": base.trust_remote_code, "use_safetensors": True}


def settle_reference(model: "Module", reference: Reference, trained: Path | None) -> None:
    """See to it that TRL's copy of an adapter is the reference that the plan has, or gone, and that both are exact.

    TRL takes every adapter that it did not attach itself for one that is trained further, and copies it (trl 1.16,
    `DPOTrainer.__init__`). Where it finds no copy it disables the adapter. A copy that stays is read from where the
    adapter came from, so that it does not depend on what the trained one holds by now.

    Args:
        model: The trainer's model, which no engine has wrapped yet.
        reference: What training is held to.
        trained: Folder of the adapter that is trained further; None in processes that are given their weights.
    """
    from peft import PeftModel

    from tunekit.models.adapters import read_adapter

    if not isinstance(model, PeftModel):
        return
    if trained is not None:
        # TRL has rounded it to bfloat16 where the base is quantised.
        read_adapter(model, trained)
    if reference != "copied adapter":
        if COPY in model.peft_config:
            model.delete_adapter(COPY)
        return
    for name, parameter in model.named_parameters():
        if f".{COPY}." in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(False)
    if trained is not None:
        read_adapter(model, trained, name=COPY)


def give_weights(reference: "Module", model: "PreTrainedModel") -> None:
    """Give a second model that TRL has loaded, and perhaps wrapped, the weights of another.

    TRL loads it from where the first model's weights came from, which is not all that became part of them.
    """
    from accelerate.utils import extract_model_from_parallel

    extract_model_from_parallel(reference).load_state_dict(model.state_dict())
