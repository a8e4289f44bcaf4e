"""Check before training that rows without pictures are read alike alone and beside rows with pictures.

A processor gives a batch the pixels of all its rows. Some models, such as Llama 3.2 Vision, then compute a row without
pictures in another way than where no row of the batch has one (transformers 5.24), so that its loss would depend on
the rows that happen to lie beside it.
"""

from typing import Any

import torch
from accelerate.utils import send_to_device

from tunekit.data.images.collate import PICTURES, PictureCollator, as_text
from tunekit.errors import RunError
from tunekit.models.fusion.proof import ROUNDING
from tunekit.planner.plan import Plan
from tunekit.training.check_head import NUM_LOOKED_AT, in_evaluation


def check_mixed_rows(trainer: Any, plan: Plan) -> None:
    """Compare the logits of a row without pictures alone and beside a row with some, where both come in a batch.

    Called by all processes together.

    Args:
        trainer: The trainer, once its model is where it is trained.
        plan: The micro-batch, and the type that the model computes in.

    Raises:
        RunError: They differ by more than rounding.
    """
    rows = trainer.train_dataset
    if not isinstance(trainer.data_collator, PictureCollator) or plan.micro_batch_size == 1:
        return
    flags = [bool(pictures) for pictures in rows[PICTURES]]
    if all(flags) or not any(flags):
        return
    text, pictured = (
        _shortest(rows, [i for i, flag in enumerate(flags) if flag is has_pictures]) for has_pictures in (False, True)
    )
    device, num_tokens = trainer.accelerator.device, len(text["input_ids"])
    with in_evaluation(trainer, trainer.model_wrapped):
        alone, beside = (
            trainer.model_wrapped(**send_to_device(_inputs(trainer, batch), device), use_cache=False).logits[0]
            for batch in ([text], [text, pictured])
        )
    off = (alone - beside[:num_tokens]).abs().amax().float()
    allowed = ROUNDING[getattr(torch, plan.dtype)] * torch.finfo(getattr(torch, plan.dtype)).eps * alone.abs().amax()
    worst = trainer.accelerator.gather((off / allowed.float())[None]).amax()
    if not worst <= 1:
        model = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
        raise RunError(
            f"{model} computes other logits for a row without images in a batch with images than alone: they "
            f"differ by {float(off):.2g}",
            hint="set train.micro_batch_size=1, or add images to all rows or none",
        )


def _shortest(rows: Any, indices: list[int]) -> dict[str, Any]:
    """Return the shortest of the first rows of some."""
    return min(map(as_text, rows.select(indices[:NUM_LOOKED_AT])), key=lambda row: len(row["input_ids"]))


def _inputs(trainer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    batch = trainer.data_collator.texts(rows)
    return {name: value for name, value in batch.items() if name not in ("labels", "scored_positions")}
