"""The result of a run as Hugging Face has it: one model or adapter, written by the main process from every engine."""

from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.planner.plan import Plan
from tunekit.recipe.sections.model import FullAdapter
from tunekit.training.engines import deepspeed, fsdp2

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer


def save_model(trainer: "Trainer", plan: Plan, folder: Path) -> None:
    """Write the trained model or adapter to a folder. Called by all processes together.

    Args:
        trainer: After training.
        plan: How it was spread.
        folder: Where to.
    """
    if plan.layout.tp_size > 1:
        # transformers divided it, and puts it together.
        trainer.model.save_pretrained(folder)
        return
    state = full_state(trainer, plan)
    # An adapter carries no copy of embeddings that it did not train, and none of the one that it was.
    of_adapter = {"save_embedding_layers": False, "selected_adapters": ["default"]}
    how = {} if isinstance(plan.recipe.adapter, FullAdapter) else of_adapter
    if trainer.accelerator.is_main_process:
        trainer.model.save_pretrained(folder, state_dict=state, **how)
    trainer.accelerator.wait_for_everyone()


def full_state(trainer: "Trainer", plan: Plan) -> "dict[str, Tensor] | None":
    """The trained weights as a whole on the CPU of the main process; None where each process has them anyway.

    Called by all processes together.
    """
    if plan.layout.strategy == "fsdp2":
        return fsdp2.full_state(trainer, plan)
    if plan.layout.strategy.startswith("zero"):
        return deepspeed.full_state(trainer, plan)
    return None
