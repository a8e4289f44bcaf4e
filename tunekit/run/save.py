"""The result of a run as Hugging Face has it: one model or adapter, written by the main process from every engine."""

from pathlib import Path
from typing import TYPE_CHECKING

from tunekit.planner.plan import Plan
from tunekit.recipe.schema import FullAdapter

if TYPE_CHECKING:
    from transformers import Trainer


def save_model(trainer: "Trainer", plan: Plan, folder: Path) -> None:
    """Write the trained model or adapter to a folder. Called by all processes together.

    Args:
        trainer: After training.
        plan: How it was spread.
        folder: Where to.
    """
    # An adapter carries no copy of embeddings that it did not train.
    how = {} if isinstance(plan.recipe.adapter, FullAdapter) else {"save_embedding_layers": False}
    if trainer.accelerator.is_main_process:
        trainer.model.save_pretrained(folder, **how)
    trainer.accelerator.wait_for_everyone()
