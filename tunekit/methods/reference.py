"""The reference of preference and reinforcement methods where an adapter is trained: the model without it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Module

_COPY = "ref"
"""What TRL calls its copy of the adapter that it was given."""


def refer_to_base(model: "Module") -> None:
    """Let go of the copy that TRL makes of an adapter, to be the reference beside the trained one.

    TRL takes an adapter that it did not attach itself for one that is trained further (trl 1.16,
    `DPOTrainer.__init__`). Where it finds no copy it disables the adapter, which a new one starts from.
    """
    from peft import PeftModel

    if isinstance(model, PeftModel) and _COPY in model.peft_config:
        model.delete_adapter(_COPY)
