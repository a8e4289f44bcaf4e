"""A last look before training: does the loaded model keep documents apart that lie in one row?

The plan knows it of the model's type. Here it is seen at the model itself, with its adapter, its attention and the
trainer's own batches, so that no new architecture and no change in a library can let documents see each other unsaid.
"""

from typing import TYPE_CHECKING, Any

from tunekit.errors import RunError

if TYPE_CHECKING:
    import torch
    from trl import SFTTrainer

DOCUMENT_TOKENS = 8
"""Length of a probe document: what leaks, leaks into the first tokens behind a boundary."""

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Largest change that is rounding, as a share of the largest logit, in float32 and in 16 bits.

Attention, masked or flash, gives each document the same bits whatever the other holds. But a mixture of experts
groups the tokens of all documents by expert, so that the shapes of its products change, and with them the rounding:
by 4e-7 in float32 (`benchmarks/isolation.py`), and by some of the 2**-8 that a bfloat16 resolves. What leaks changes
the logits by a tenth of their size and more."""


def check_isolation(trainer: "SFTTrainer", *, vocabulary: int, path: str, asked: str) -> None:
    """Take two documents in one row through the trainer's model, and again with another first one.

    The model is as it was afterwards, and no random number is drawn.

    Args:
        trainer: The trainer, before training.
        vocabulary: Number of tokens to make documents of.
        path: The model as the recipe names it.
        asked: The field of the recipe to set to false where documents are not kept apart.

    Raises:
        RunError: The second document changes with the first.
    """
    ids = [vocabulary * place // (3 * DOCUMENT_TOKENS) for place in range(3 * DOCUMENT_TOKENS)]
    first, other, second = (ids[start::3] for start in range(3))
    try:
        change = _change(trainer, first, other, second)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"{path} cannot read documents that lie in one row: {str(error).strip()}", hint=f"set {asked}=false"
        ) from error
    # Written so that what is not a number does not pass.
    if not change <= _tolerance(trainer):
        raise RunError(f"{path}'s attention lets packed documents see each other", hint=f"set {asked}=false")


def _change(trainer: "SFTTrainer", first: list[int], other: list[int], second: list[int]) -> float:
    """How far the logits of `second` change where `other` stands before it instead of `first`."""
    import torch

    model = trainer.model
    was_training = model.training
    # Without dropout, which would draw random numbers.
    model.eval()
    with torch.no_grad(), trainer.accelerator.autocast():
        before, after = (_logits(trainer, [document, second])[len(first) :] for document in (first, other))
    model.train(was_training)
    return ((before - after).abs().max() / before.abs().max()).item()


def _logits(trainer: "SFTTrainer", documents: list[list[int]]) -> "torch.Tensor":
    """Logits of documents as the trainer's collator lays them: `(tokens, vocabulary)`, in float32."""
    from accelerate.utils import send_to_device

    batch: dict[str, Any] = trainer.data_collator([{"input_ids": document} for document in documents])
    del batch["labels"]
    logits: torch.Tensor = trainer.model(**send_to_device(batch, trainer.accelerator.device), use_cache=False).logits
    return logits[0].float()


def _tolerance(trainer: "SFTTrainer") -> float:
    """What is rounding in the type in which the trainer's model computes."""
    half = trainer.args.bf16 or trainer.args.fp16 or trainer.model.dtype.itemsize < 4
    return HALF_TOLERANCE if half else FLOAT32_TOLERANCE
