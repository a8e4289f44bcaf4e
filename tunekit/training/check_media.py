"""Checks before training that rows with media, and rows beside them, are read as each is alone.

A processor gives a batch the features of all its rows. Some models, such as Llama 3.2 Vision, then compute a row
without pictures in another way than where no row of the batch has one (transformers 5.24), so that its loss would
depend on the rows that happen to lie beside it.

Packed documents are compared with themselves alone, padded as rows that are not packed: that attention does not leak
between them, that masks of media and positions begin again with each, and that features come in the order of tokens.
The logits are those of other shapes of products, so more of a difference is rounding than where only tokens change.
"""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import send_to_device

from tunekit.data.media.collate import MEDIA, TEXT, MediaCollator, as_text, documents_of, in_one_row
from tunekit.data.media.expand import marks_of
from tunekit.errors import RunError
from tunekit.models.fusion.proof import ROUNDING
from tunekit.planner.plan import Plan
from tunekit.training.check_head import NUM_LOOKED_AT, in_evaluation


def check_mixed_rows(trainer: Any, plan: Plan) -> None:
    """Compare the logits of a row without media alone and beside a row with some, where both come in a batch.

    Called by all processes together.

    Args:
        trainer: The trainer, once its model is where it is trained.
        plan: The micro-batch, and the type that the model computes in.

    Raises:
        RunError: They differ by more than rounding.
    """
    rows = trainer.train_dataset
    if not isinstance(trainer.data_collator, MediaCollator) or plan.micro_batch_size == 1:
        return
    flags = [bool(media) for media in rows[MEDIA]]
    if all(flags) or not any(flags):
        return
    text, beside_it = (
        _shortest(rows, [i for i, flag in enumerate(flags) if flag is has_media]) for has_media in (False, True)
    )
    num_tokens = len(text["input_ids"])
    with in_evaluation(trainer, trainer.model_wrapped):
        alone, beside = (_logits(trainer, trainer.data_collator.texts(batch)) for batch in ([text], [text, beside_it]))
    if not _worst(trainer, plan, [(beside[:num_tokens], alone)]) <= 1:
        off = (alone - beside[:num_tokens]).abs().amax()
        model = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
        raise RunError(
            f"{model} computes other logits for a row without images in a batch with images than alone: they "
            f"differ by {float(off):.2g}",
            hint="set train.micro_batch_size=1, or add images to all rows or none",
        )


def check_packed_rows(trainer: Any, plan: Plan) -> None:
    """Compare the logits of documents in one row with those of each alone: of one without media and two with some.

    The first one has no media, so that the others begin where none of theirs would in a row of their own.

    Called by all processes together.

    Args:
        trainer: The trainer, once its model is where it is trained.
        plan: The type that the model computes in.

    Raises:
        RunError: They differ by more than rounding, or the model does not compute such a row.
    """
    collate, path = trainer.data_collator.texts, plan.recipe.model.path
    first = trainer.train_dataset.select(range(min(NUM_LOOKED_AT, len(trainer.train_dataset))))
    # A row that fills a step has one token.
    whole = (one for row in first for one in documents_of(row) if len(one["input_ids"]) > 1)
    documents = sorted(whole, key=lambda one: len(one["input_ids"]))
    pictured = [document for document in documents if document[MEDIA]][:2] or documents[:1]
    chosen = [_without_media(pictured[0], trainer.data_collator.processor), pictured[0], pictured[-1]]
    with in_evaluation(trainer, trainer.model_wrapped):
        alone = [_logits(trainer, collate([document])) for document in chosen]
        try:
            together = _logits(trainer, in_one_row(collate(chosen)))
        except (TypeError, ValueError, RuntimeError) as error:
            problem = f"{path} does not support packed documents with images: {str(error).strip()}"
            raise RunError(problem, hint="set data.packing=false") from error
    parts = torch.split(together, [len(document["input_ids"]) for document in chosen])
    if not _worst(trainer, plan, zip(parts, alone, strict=True)) <= 1:
        problem = f"{path}: packed documents with images have other logits than each alone"
        raise RunError(problem, hint="set data.packing=false")


def _without_media(row: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Return a row of the words of another one."""
    words = row[TEXT] or processor.tokenizer.decode(row["input_ids"])
    for token in marks_of(processor):
        words = words.replace(token, "")
    ids = processor.tokenizer(words, add_special_tokens=False)["input_ids"]
    return {"input_ids": ids, "labels": ids, TEXT: words, MEDIA: []}


def _worst(trainer: Any, plan: Plan, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the largest difference of logits from expected ones, in all processes, in those that are rounding."""
    dtype = getattr(torch, plan.dtype)
    allowed = ROUNDING[dtype] * torch.finfo(dtype).eps
    shares = [(own - other).abs().amax().float() / (allowed * other.abs().amax().float()) for own, other in pairs]
    worst: torch.Tensor = trainer.accelerator.gather(torch.stack(shares)).amax()
    return worst


def _shortest(rows: Any, indices: list[int]) -> dict[str, Any]:
    """Return the shortest of the first rows of some."""
    return min(map(as_text, rows.select(indices[:NUM_LOOKED_AT])), key=lambda row: len(row["input_ids"]))


def _logits(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the logits of the first row of a batch, `(tokens, vocabulary)`."""
    inputs = {name: value for name, value in batch.items() if name not in ("labels", "scored_positions")}
    model, device = trainer.model_wrapped, trainer.accelerator.device
    logits: torch.Tensor = model(**send_to_device(inputs, device), use_cache=False).logits
    return logits[0]
