"""Checks before training: the model equals its reference, and packed documents are isolated.

Before the first step the model and its reference are the same, whatever keeps the reference: the model without a new
adapter, a copy of an adapter, a second model, or precomputed log-probabilities. So the same tokens have the same
log-probabilities in both, the loss of DPO is ln 2 and the divergence of GRPO 0. If not, the reference or the trained
model is not the recipe's, and nothing that is logged later would show it.

The log-probabilities of the reference are stored in the run folder. On resume the model has changed, and the reference
is compared with these.

The plan knows by the model's type whether packed documents are isolated. Here that is checked on the model itself, with
its adapter, its attention and the trainer's own batches, so that no new architecture or library version can leak
between documents unnoticed.

tunekit's attention for packed rows is proved as well: as each layer calls it, its outputs and gradients are those of
attention as it is defined, in float64, and the windows of the model's masks are those that its layers pass on.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import send_to_device
from torch.nn import Dropout, Module

from tunekit.errors import RunError
from tunekit.estimates.memory.states import Reference
from tunekit.methods.arguments import COPY
from tunekit.models.attention import packed_attention, watched_calls
from tunekit.models.expansion import bypassed
from tunekit.planner.plan import VARLEN, FlashAttention, Plan
from tunekit.recipe.methods import compares_with_reference, generates
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.runs.available_actions import begin_anew
from tunekit.runs.record import Record
from tunekit.runs.small_files import read_list
from tunekit.training.check_head import in_evaluation, spread_tokens

if TYPE_CHECKING:
    from trl import SFTTrainer

    from tunekit.models.attention import Call


NUMBERS = "reference.json"
"""File of a run folder with what the reference gave before the first step."""

NUM_ROWS = 2
"""Rows of each process that are looked at, one at a time: differences of several could cancel in their mean."""

PROBE_TOKENS, PROBE_SCORED = 24, 12
"""Tokens that are looked at where no answers are there yet, and how many of them are taken for an answer."""

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Nats per token that are rounding, in float32 and in 16 bits.

Mostly both models do the same sums on the same numbers and get the same bits. Log-probabilities that were computed
beforehand come from batches of other lengths, and DoRA divides by a norm that it multiplies by again: sums in another
order, which differ by some of the 2**-23 that float32 resolves, of logits of some tens, and by some of the 2**-8 of
bfloat16. Another adapter, another template or dropout changes a token by a tenth of a nat and more.

For packed documents, the largest change that is rounding, as a share of the largest logit.

Attention, masked or flash, gives each document the same bits whatever the other holds. But a mixture of experts
groups the tokens of all documents by expert, so that the shapes of its products change, and with them the rounding:
by 4e-7 in float32 (`benchmarks/isolation.py`), and by some of the 2**-8 that a bfloat16 resolves. What leaks changes
the logits by a tenth of their size and more."""


@dataclass(frozen=True)
class _Found:
    """Results of the model and its reference for the same answers; the same numbers in all processes."""

    differences: list[float]
    """Log-probability of each answer by the model less that by the reference, in nats."""
    references: list[float]
    """The latter."""
    num_tokens: list[int]
    """Tokens of each answer."""
    loss: float | None
    """Loss of the answers, where it is made of these."""

    def per_token(self, differences: list[float]) -> float:
        """The largest of differences, in nats per token; infinite where one is not a number."""
        shares = [abs(difference) / number for difference, number in zip(differences, self.num_tokens, strict=True)]
        return max((share if math.isfinite(share) else math.inf for share in shares), default=0.0)


def check_reference(trainer: Any, plan: Plan, record: Record, *, vocabulary: int, goes_on: bool) -> None:
    """Compare the model with its reference, and record the result. Called by all processes together.

    Args:
        trainer: The trainer, once its model is placed.
        plan: The plan, with the kind of reference.
        record: Record of the run.
        vocabulary: Number of tokens to make probes of.
        goes_on: Whether the model comes from a checkpoint: then the reference is compared with its earlier values.

    Raises:
        RunError: They differ, or the reference has changed.
    """
    generating = generates(plan.recipe.method)
    with _as_it_was(trainer):
        result = _of_probes(trainer, vocabulary) if generating else _of_rows(trainer)
    tolerance = FLOAT32_TOLERANCE if plan.dtype == "float32" else HALF_TOLERANCE
    if goes_on:
        _compare_with_earlier(result, record, tolerance)
        return
    off, method = result.per_token(result.differences), plan.recipe.method
    # The loss of a model that is its reference, where it is made of their difference alone.
    is_plain = compares_with_reference(method) and method.has_plain_loss and not trainer.aux_loss_enabled
    expected = math.log(2) if is_plain else None
    # As far as differences of the answers' log-probabilities can move it.
    far = 1e-6 + tolerance * 2 * max(result.num_tokens)
    is_off = expected is not None and result.loss is not None and not abs(result.loss - expected) <= far
    if off > tolerance or is_off:
        raise RunError(_words(plan.reference, result, off, expected), hint=_causes(trainer, plan.reference))
    largest = max(map(abs, result.differences), default=0.0)
    record.write("reference", kind=plan.reference, max_difference=largest, loss=result.loss)
    if record.place.is_main:
        (record.run.path / NUMBERS).write_text(json.dumps(result.references), encoding="utf-8")


def _compare_with_earlier(found: _Found, record: Record, tolerance: float) -> None:
    file = record.run.path / NUMBERS
    if not file.is_file():
        return
    earlier: list[float] = read_list(file)
    off = found.per_token([now - then for now, then in zip(found.references, earlier, strict=True)])
    if not off <= tolerance:
        raise RunError(
            f"the reference has changed since training began: its log-probabilities differ by {off:.3g} nats per token",
            hint=f"the model that the run started from has changed; start over: {begin_anew(record.run)}",
        )


@contextmanager
def _as_it_was(trainer: Any) -> Iterator[None]:
    """Within it the model is as in training, without gradients; what it has counted by then is forgotten."""
    model = trainer.model
    was_training, saved_state = model.training, (deepcopy(trainer.metrics), trainer.num_trained_tokens)
    model.train()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        trainer.metrics, trainer.num_trained_tokens = saved_state


def _of_rows(trainer: Any) -> _Found:
    """Return the values of TRL's own loss on the first rows: rewards are beta times the differences."""
    differences, references, num_tokens, losses = [], [], [], []
    rows, accelerator = trainer.train_dataset, trainer.accelerator
    for number in range(NUM_ROWS):
        row = rows[(accelerator.process_index * NUM_ROWS + number) % len(rows)]
        batch = send_to_device(trainer.data_collator([row]), accelerator.device)
        trainer.metrics["train"].clear()
        losses.append(trainer.compute_loss(trainer.model, batch).detach().float())
        logged = trainer.metrics["train"]
        length = accelerator.gather(batch["completion_mask"].sum().reshape(1)).max().item()
        for answer in ("chosen", "rejected"):
            if f"rewards/{answer}" in logged:
                difference = logged[f"rewards/{answer}"][-1] / trainer.beta
                differences.append(difference)
                references.append(logged[f"logps/{answer}"][-1] - difference)
                num_tokens.append(max(1, length))
    loss = accelerator.gather(sum(losses[1:], losses[0]).reshape(1) / NUM_ROWS).mean().item()
    return _Found(differences, references, num_tokens, loss)


def _of_probes(trainer: Any, vocabulary: int) -> _Found:
    """The same of made-up tokens, where answers are yet to be generated."""
    accelerator = trainer.accelerator
    tokens = spread_tokens(vocabulary, NUM_ROWS * PROBE_TOKENS)
    ids = torch.tensor(tokens, device=accelerator.device).view(NUM_ROWS, PROBE_TOKENS)
    policy = _scores(trainer, trainer.model, ids)
    if trainer.ref_model is not None:
        reference = _scores(trainer, trainer.ref_model, ids)
    else:
        from trl.trainer.utils import use_adapter

        model = accelerator.unwrap_model(trainer.model)
        with use_adapter(model, adapter_name=COPY if COPY in model.peft_config else None):
            reference = _scores(trainer, trainer.model, ids)
    off = (policy - reference).double()
    # Differences of tokens must not cancel, and the largest is what all processes shall go by.
    differences = accelerator.gather(off.abs().sum(-1, keepdim=True).T.contiguous()).amax(0).tolist()
    references = accelerator.gather(reference.double().sum(-1, keepdim=True).T.contiguous()).mean(0).tolist()
    return _Found(differences, references, [PROBE_SCORED] * NUM_ROWS, None)


def _scores(trainer: Any, model: Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the last tokens of probes: `(rows, tokens)`."""
    scores: torch.Tensor = trainer.token_scores(model, ids, torch.ones_like(ids), PROBE_SCORED)[0]
    return scores


def _words(reference: Reference, found: _Found, off: float, expected: float | None) -> str:
    largest = max(map(abs, found.differences), default=math.inf)
    words = (
        f"before the first step the model differs from its reference ({reference}): log-probabilities of an answer "
        f"differ by {largest:.3g} nats, {off:.3g} per token"
    )
    if expected is not None:
        words += f", and the loss is {found.loss:.6f} instead of ln 2"
    return words


def _causes(trainer: Any, reference: Reference) -> str:
    """Describe the possible cause."""
    dropping = {module.p for module in trainer.model.modules() if isinstance(module, Dropout) and module.p > 0}
    if dropping:
        return f"dropout {max(dropping):g} is on: set adapter.dropout=0, or method.trainer_args.disable_dropout=true"
    if reference == "beforehand":
        return (
            "the log-probabilities belong to other weights, rows or another template: run `tunekit data cache --clear`"
        )
    if reference == "second model":
        return "the second model has other weights: the folder or Hub repository may have changed during loading"
    return "the adapter was not loaded, or was trained with another base model, template or quantization"


DOCUMENT_TOKENS = 8
"""Length of a probe document: what leaks, leaks into the first tokens behind a boundary."""

PROBE_BOUNDARIES = (5, 13, 14, 30)
"""Boundaries of the documents on which attention is verified: short and long ones, and one of a single token."""

PROBE_WINDOW = 4
"""Window that it is proved with, where the model has one."""


def check_isolation(trainer: "SFTTrainer", model: Module, *, vocabulary: int, path: str, asked: str) -> None:
    """Check that the logits of a document do not depend on the one before it in a packed row.

    The model is unchanged afterwards, and no random number is drawn.

    Args:
        trainer: The trainer, before training.
        model: Its model, or a teacher.
        vocabulary: Number of tokens to make documents of.
        path: The model as the recipe names it.
        asked: The recipe's field to set to false if documents are not isolated.

    Raises:
        RunError: The second document changes with the first.
    """
    ids = spread_tokens(vocabulary, 3 * DOCUMENT_TOKENS)
    first, other, second = (ids[start::3] for start in range(3))
    try:
        change = _change(trainer, model, first, other, second)
    except (TypeError, ValueError) as error:
        problem = f"{path} does not support packed documents: {str(error).strip()}"
        raise RunError(problem, hint=f"set {asked}=false") from error
    half = trainer.args.bf16 or trainer.args.fp16 or trainer.model.dtype.itemsize < 4
    # Written so that what is not a number does not pass.
    if not change <= (HALF_TOLERANCE if half else FLOAT32_TOLERANCE):
        raise RunError(f"{path}: attention leaks between packed documents", hint=f"set {asked}=false")


def check_new_layers(trainer: Any, adapter: FullAdapter, *, vocabulary: int) -> None:
    """Check that new layers leave the logits of a model what they were, to the bit.

    Args:
        trainer: The trainer, before training.
        adapter: What is trained: new layers.
        vocabulary: Number of tokens to make a row of.

    Raises:
        RunError: They change them.
    """
    ids = torch.tensor([spread_tokens(vocabulary, DOCUMENT_TOKENS)], device=trainer.accelerator.device)
    with in_evaluation(trainer, trainer.model):
        logits = trainer.model(input_ids=ids, use_cache=False).logits
        with bypassed(trainer.model, adapter):
            before = trainer.model(input_ids=ids, use_cache=False).logits
    if not torch.equal(logits, before):
        problem = f"adapter.new_layers: new layers of {type(trainer.model).__name__} are not identities"
        raise RunError(problem, hint="unset it, or use another model")


def prove_attention(trainer: "SFTTrainer", *, vocabulary: int, flash: FlashAttention) -> str:
    """Check tunekit's packed attention in a tiny forward and backward pass, as the trainer's model calls it.

    Args:
        trainer: The trainer, before training.
        vocabulary: Number of tokens to make documents of.
        flash: Its implementation on CUDA.

    Returns:
        A description of the result.

    Raises:
        RunError: It does not run, or is inaccurate.
    """
    device = trainer.accelerator.device
    hint = "set model.attn_implementation=sdpa"
    with watched_calls() as (calls, windows):
        ids = spread_tokens(vocabulary, 2 * DOCUMENT_TOKENS)
        _change(trainer, trainer.model, ids[::2], ids[::2], ids[1::2])
    handed_on = {call.window for call in calls}
    layer_types = vars(trainer.model.config.get_text_config()).get("layer_types")
    if layer_types is not None and all(name.startswith(("full", "linear")) for name in layer_types):
        # Flint makes a mask for sliding windows that no layer reads.
        windows = {None}
    if windows - {None} != handed_on - {None}:
        raise RunError(f"layers use attention windows {handed_on}, but masks {windows}", hint=hint)
    errors = []
    for call in calls:
        for window in {None, None if call.window is None else PROBE_WINDOW}:
            try:
                error = _error_of(call, window, device)
            except (RuntimeError, ValueError, TypeError) as problem:
                raise RunError(f"{VARLEN} ({flash}) does not run here: {problem}", hint=hint) from problem
            if not error <= (FLOAT32_TOLERANCE if call.dtype.itemsize == 4 else HALF_TOLERANCE):
                raise RunError(f"{VARLEN} ({flash}) is off by {error:.1e} of the largest value here", hint=hint)
            errors.append(error)
    by = flash if device.type == "cuda" else "sdpa per document"
    return f"{VARLEN} by {by}: outputs and gradients correct to {max(errors):.1e} of the largest value"


def _error_of(call: "Call", window: int | None, device: torch.device) -> float:
    """Return the error of the packed attention's results and gradients against float64, as shares of the largest."""
    generator = torch.Generator().manual_seed(0)
    bounds = [0, *PROBE_BOUNDARIES]

    def random(num_heads: int, width: int) -> torch.Tensor:
        return torch.randn(1, num_heads, bounds[-1], width, generator=generator).to(call.dtype)

    key_shape, value_shape = (call.num_kv_heads, call.head_dim), (call.num_kv_heads, call.value_dim)
    inputs = [random(call.num_heads, call.head_dim), random(*key_shape), random(*value_shape)]
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
    pairs = [(own.detach().cpu().double(), other.detach()) for own, other in zip(actual, expected, strict=True)]
    return max(float((own - other).abs().max() / other.abs().max()) for own, other in pairs)


def _defined(given: list[torch.Tensor], bounds: list[int], window: int | None) -> torch.Tensor:
    """Attention with a score for each pair of tokens, as it is defined: `(1, tokens, heads, value_dim)`."""
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


def _change(trainer: "SFTTrainer", model: Module, first: list[int], other: list[int], second: list[int]) -> float:
    """Return the change of `second`'s logits where `other` precedes it instead of `first`."""
    # Without dropout, which would draw random numbers.
    with in_evaluation(trainer, model):
        before, after = (_logits(trainer, model, [document, second])[len(first) :] for document in (first, other))
    return ((before - after).abs().max() / before.abs().max()).item()


def _logits(trainer: "SFTTrainer", model: Module, documents: list[list[int]]) -> torch.Tensor:
    """Logits of documents as the trainer's collator lays them: `(tokens, vocabulary)`, in float32."""
    batch: dict[str, Any] = trainer.data_collator([{"input_ids": document} for document in documents])
    del batch["labels"]
    logits: torch.Tensor = model(**send_to_device(batch, trainer.accelerator.device), use_cache=False).logits
    return logits[0].float()
