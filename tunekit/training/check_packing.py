"""A last look before training: does the loaded model keep documents apart that lie in one row, and is that right?

The plan knows it of the model's type. Here it is seen at the model itself, with its adapter, its attention and the
trainer's own batches, so that no new architecture and no change in a library can let documents see each other unsaid.

tunekit's attention for packed rows is proved besides: as each layer calls for it, its results and gradients are those
of attention as it is defined, in float64, and the windows that the model's masks would have are those that its layers
hand on.
"""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tunekit.errors import RunError
from tunekit.planner.decisions.isolation import VARLEN, FlashAttention

if TYPE_CHECKING:
    import torch
    from trl import SFTTrainer

    from tunekit.models.attention import Call

DOCUMENT_TOKENS = 8
"""Length of a probe document: what leaks, leaks into the first tokens behind a boundary."""

PROBE_BOUNDARIES = (5, 13, 14, 30)
"""Boundaries of the documents on which attention is verified: short and long ones, and one of a single token."""

PROBE_WINDOW = 4
"""Window that it is proved with, where the model has one."""

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


def prove_attention(trainer: "SFTTrainer", *, vocabulary: int, flash: FlashAttention) -> str:
    """Take tunekit's packed attention through a tiny forward and backward pass, as the trainer's model calls for it.

    Args:
        trainer: The trainer, before training.
        vocabulary: Number of tokens to make documents of.
        flash: What it goes to on CUDA.

    Returns:
        What was seen, in words.

    Raises:
        RunError: It does not run, or is not what it should be.
    """
    from tunekit.models.attention import watched_calls

    device = trainer.accelerator.device
    hint = "set model.attn_implementation=sdpa"
    with watched_calls() as (calls, windows):
        ids = [vocabulary * place // (2 * DOCUMENT_TOKENS) for place in range(2 * DOCUMENT_TOKENS)]
        _change(trainer, ids[::2], ids[::2], ids[1::2])
    handed_on = {call.window for call in calls}
    if windows - {None} != handed_on - {None}:
        raise RunError(f"layers hand on windows {handed_on} and masks would have {windows}", hint=hint)
    errors = []
    for call in calls:
        for window in {None, None if call.window is None else PROBE_WINDOW}:
            try:
                error = _error_of(call, window, device)
            except (RuntimeError, ValueError, TypeError) as problem:
                raise RunError(f"{VARLEN} ({flash}) does not run here: {problem}", hint=hint) from problem
            if not error <= (FLOAT32_TOLERANCE if call.dtype.itemsize == 4 else HALF_TOLERANCE):
                raise RunError(f"{VARLEN} ({flash}) is wrong here, by {error:.1e} of the largest value", hint=hint)
            errors.append(error)
    by = flash if device.type == "cuda" else "sdpa for each document"
    return f"{VARLEN} by {by}: results and gradients are right to {max(errors):.1e} of the largest value"


def _error_of(call: "Call", window: int | None, device: "torch.device") -> float:
    """Return the error of the packed attention's results and gradients against float64, as shares of the largest."""
    import torch

    from tunekit.models.attention import packed_attention

    generator = torch.Generator().manual_seed(0)
    bounds = [0, *PROBE_BOUNDARIES]

    def random(num_heads: int, width: int) -> "torch.Tensor":
        return torch.randn(1, num_heads, bounds[-1], width, generator=generator).to(call.dtype)

    inputs = [
        random(call.num_heads, call.head_dim),
        random(call.num_kv_heads, call.head_dim),
        random(call.num_kv_heads, call.value_dim),
    ]
    change = random(call.num_heads, call.value_dim).transpose(1, 2)
    own = [tensor.to(device).requires_grad_() for tensor in inputs]
    with torch.autocast(device.type, enabled=False), torch.enable_grad():
        query, key, value = own
        out, _ = packed_attention(
            torch.nn.Identity(),
            query,
            key,
            value,
            None,
            is_causal=True,
            sliding_window=window,
            cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32, device=device),
            max_length_q=max(end - start for start, end in pairwise(bounds)),
        )
        actual = [out, *torch.autograd.grad(out, own, change.to(device))]
        exact = [tensor.double().requires_grad_() for tensor in inputs]
        right = _defined(exact, bounds, window)
        expected = [right, *torch.autograd.grad(right, exact, change.double())]
    pairs = zip(actual, expected, strict=True)
    return max(
        float((pair_value.detach().cpu().double() - other.detach()).abs().max() / other.detach().abs().max())
        for pair_value, other in pairs
    )


def _defined(given: "list[torch.Tensor]", bounds: list[int], window: int | None) -> "torch.Tensor":
    """Attention with a score for each pair of tokens, as it is defined: `(1, tokens, heads, value_dim)`."""
    import torch

    q, k, v = given
    at = torch.arange(bounds[-1])
    document = torch.bucketize(at, torch.tensor(bounds[1:]), right=True)
    visible = (document[:, None] == document) & (at[:, None] >= at)
    if window is not None:
        visible &= at[:, None] - at < window
    times = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(times, 1).transpose(-1, -2) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    attended: torch.Tensor = weights @ v.repeat_interleave(times, 1)
    return attended.transpose(1, 2)


def _change(trainer: "SFTTrainer", first: list[int], other: list[int], second: list[int]) -> float:
    """Return the change of `second`'s logits where `other` precedes it instead of `first`."""
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
    """Return the rounding error of the dtype in which the trainer's model computes."""
    half = trainer.args.bf16 or trainer.args.fp16 or trainer.model.dtype.itemsize < 4
    return HALF_TOLERANCE if half else FLOAT32_TOLERANCE
