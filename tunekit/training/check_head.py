"""Check before training that the fused head scores as the model does, and the rows of such checks.

A fused head scores tokens by the last hidden states and the head's weight, with a scale and soft cap that TRL knows by
name (trl 1.16, `add_fused_lm_head`). A model that does anything else between the two would silently be trained on
another loss. So a few rows are scored by both, in the model as it is trained, and if they differ by more than rounding,
the model's own logits are used instead.

Rounding: both sides multiply the same hidden states with the same weight, sum in different orders and, in 16 bits,
round logits to steps of the dtype, the model after each of its operations. An error of a log-probability is that of one
logit and of the logarithm of their sum, both below some steps of the token's largest logit (`ROUNDING` of
`tunekit.models.fusion.proof`). Such errors are independent, and their sum over n tokens grows with the root of n alone:
what is systematic, such as a scale, adds up, and is seen in the sum long before it is seen in a token.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from torch.nn import Module
from transformers import Trainer

from tunekit.data.media.collate import MEDIA, MediaCollator, as_text, documents_of
from tunekit.errors import RunError
from tunekit.estimates.models.model_config import num_experts_of
from tunekit.methods.head import Head, experts_of_layer, fused_heads, language_model, trl_head
from tunekit.models.fusion.proof import ROUNDING, whole_shape
from tunekit.planner.plan import Plan
from tunekit.runs.record import Record
from tunekit.training.engines.engine import between_checks

NUM_ROWS, ROW_TOKENS = 2, 32
"""Rows, and the largest number of tokens of each."""

NUM_LOOKED_AT = 100
"""Rows of which the shortest ones with media are taken."""


@contextmanager
def in_evaluation(trainer: Any, model: Module) -> Iterator[None]:
    """Put a model into evaluation mode without gradients, under the trainer's autocast."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            yield
    finally:
        model.train(was_training)


def probe_rows(trainer: Any, vocabulary: int) -> list[list[int]]:
    """Return token ids of `NUM_ROWS` rows of equal length: the first rows of the data, cut to `ROW_TOKENS`.

    Args:
        trainer: The trainer, with its data.
        vocabulary: Number of tokens to draw rows from where the data has none yet: streams and prompts as text.
    """
    tokens = spread_tokens(vocabulary, NUM_ROWS * ROW_TOKENS)
    return _first_tokens(trainer) or [tokens[row::NUM_ROWS] for row in range(NUM_ROWS)]


def _first_tokens(trainer: Any) -> list[list[int]]:
    """Return the first tokens of the first rows, as many of each; nothing where rows are texts or a stream."""
    from datasets import Dataset

    rows = trainer.train_dataset
    if not isinstance(rows, Dataset):
        return []
    names = [name for name in ("input_ids", "prompt_ids", "chosen_ids", "completion_ids") if name in rows.column_names]
    first = rows.select(range(min(NUM_ROWS, len(rows))))
    tokens = [[token for name in names for token in row[name]][:ROW_TOKENS] for row in first]
    length = min(map(len, tokens), default=0)
    return [row[:length] for row in tokens] if length > 1 else []


def spread_tokens(vocabulary: int, num: int) -> list[int]:
    """Return tokens from all over the vocabulary."""
    return [vocabulary * place // num for place in range(num)]


SUM_SHARE = 4
"""A root of the sum of squares is held to a fourth of what a single token is allowed: it is no outlier."""


def check_head(trainer: Trainer, plan: Plan, record: Record, *, vocabulary: int) -> None:
    """Compare a trainer's fused head with the model's logits, and use these where they differ.

    Called by all processes together, which come to the same decision.

    Args:
        trainer: The trainer, once its model is where it is trained.
        plan: The type that the model computes in.
        record: Where a warning goes.
        vocabulary: Number of tokens to make rows of, where there are none yet.

    Raises:
        RunError: They differ, and the run cannot do without the fused head.
    """
    if plan.recipe.method.spec.learns_distributions:
        _check_distillation(trainer, plan, vocabulary)
        return
    heads = fused_heads(trainer)
    if not heads:
        return
    _settle_routers(trainer, plan, vocabulary)
    why = _why_not_trls(trainer, heads[0])
    why = why or _why_not_fused(trainer, trainer.model, heads[0].bound, plan, vocabulary)
    if why is None:
        return
    problem = f"{type(_language_model(trainer, trainer.model)).__name__} {why}"
    _check_own_logits(trainer, heads[0], problem)
    for head in heads:
        head.scorer = "model"
    num_bytes = trainer.args.per_device_train_batch_size * plan.recipe.data.max_length * vocabulary * 4
    record.write(
        "warning",
        message=f"{problem}; using the model's own logits: up to {num_bytes / 2**30:.2g} GiB per micro-batch, several "
        "times, beyond the plan's memory estimate",
        head="model",
    )


def _settle_routers(trainer: Any, plan: Plan, vocabulary: int) -> None:
    """Turn the loss of routers off for a model that computes none.

    TRL goes by two fields of the configuration (trl 1.16, `aux_loss_enabled`), which dense models of a family with
    experts have too (Granite 4), and models that balance their experts by other means (Llama 4).

    Raises:
        RunError: It is asked for.
    """
    if not vars(trainer).get("aux_loss_enabled"):
        return
    model = _language_model(trainer, trainer.model)
    text_config = model.config.get_text_config()
    if num_experts_of(text_config.to_dict()):
        with in_evaluation(trainer, trainer.model):
            batch, _ = _rows(trainer, vocabulary)
            output = trainer.model(**batch, use_cache=False, output_router_logits=True)
        if output.get("aux_loss") is not None:
            return
    if plan.recipe.method.trainer_args.get("router_aux_loss_coef"):
        problem = f"method.trainer_args.router_aux_loss_coef: {type(model).__name__} computes no router loss"
        raise RunError(problem, hint="unset it")
    trainer.aux_loss_enabled, trainer.router_aux_loss_coef = False, 0.0
    text_config.output_router_logits = False


def _why_not_trls(trainer: Any, head: Head) -> str | None:
    """Return why TRL's head cannot compute the loss of a model's routers; None where it can, or need not."""
    text_config = head.bound["text_config"]
    if head.scorer != "trl" or not vars(trainer).get("aux_loss_enabled"):
        return None
    if "num_experts" in text_config.to_dict() or "num_experts" in text_config.attribute_map:
        return None
    return "has no `num_experts` in its configuration, which TRL's head needs for the router loss"


def _check_distillation(trainer: Any, plan: Plan, vocabulary: int) -> None:
    """Check that a model and its teacher, if it is another one, have the logits that TRL's divergence computes.

    Its formula is that of TRL's fused head, which each model has during the check.

    Raises:
        RunError: One of them differs.
    """
    models = {"model": trainer.model, "method.teacher": trainer.teacher_model}
    for field, wrapped in [(field, model) for field, model in models.items() if model is not None]:
        model = _language_model(trainer, wrapped)
        # A teacher may have another vocabulary than the rows, and any of its tokens will do.
        size = min(vocabulary, model.config.get_text_config().vocab_size)
        with trl_head(model, trainer.temperature) as bound:
            why = _why_not_fused(trainer, wrapped, bound, plan, size)
        if why is not None:
            problem = f"{field}: {type(model).__name__} {why}; TRL's distillation only compares logits of a fused head"
            hint = "distill with another model family, or train on the teacher's answers with method.type=sft"
            raise RunError(problem, hint=hint)


def _check_own_logits(trainer: Any, head: Head, problem: str) -> None:
    """Check that no setting requires a fused head.

    Raises:
        RunError: One does.
    """
    if head.bound["cast_lm_head_to_fp32"]:
        what = f"{problem}; the model's own head cannot run in float32"
        raise RunError(what, hint="unset method.trainer_args.cast_lm_head_to_fp32")
    if vars(trainer).get("precompute_ref_logps"):
        what = f"{problem}; the reference log-probabilities were precomputed with a fused head"
        raise RunError(what, hint="set method.precompute_ref_log_probs=false")


def _why_not_fused(trainer: Any, wrapped: Any, bound: Mapping[str, Any], plan: Plan, vocabulary: int) -> str | None:
    """Return why a model needs its own logits, the same in all processes; None where it does not.

    Args:
        trainer: The trainer.
        wrapped: The model, as the trainer calls it.
        bound: What its fused head has taken from it.
        plan: The type that it computes in.
        vocabulary: Number of tokens of the rows.
    """
    model = _language_model(trainer, wrapped)
    why = _why_unknown(model)
    if why is not None:
        return why
    routed = {"output_router_logits": True} if vars(trainer).get("aux_loss_enabled") else {}
    with in_evaluation(trainer, wrapped):
        batch, labels = _rows(trainer, vocabulary)
        output = wrapped(**batch, **routed, use_cache=False)
        logits = output.logits
        if routed:
            # Mixtral's are `(tokens, experts)` for each layer.
            num_experts, routers = experts_of_layer(model, bound["text_config"]), output.router_logits
            if not routers or any(logit.dim() != 2 or logit.shape[-1] != num_experts for logit in routers):
                return "has a router loss other than Mixtral's, which a fused head computes"
        # It gathers the weights of the head in another place, which ZeRO-3 would have fetched where it did before.
        between_checks(trainer, plan)
        try:
            with _hidden_states_checked(model):
                scored = wrapped(**batch, **routed, labels=labels, use_cache=False, fused_lm_head=True)
        except _NotForHeadError as error:
            return str(error)
    dtype = getattr(torch, plan.dtype)
    eps = torch.finfo(dtype).eps
    allowed = ROUNDING[dtype] * eps
    own = (logits[:, :-1].float() / bound["temperature"])[scored.label_mask]
    share, nats = _difference(own, labels[:, 1:][scored.label_mask], scored.log_probs[scored.label_mask], eps)
    balance = abs(float(output.aux_loss) - float(scored.aux_loss)) / abs(float(output.aux_loss)) if routed else 0.0
    errors = torch.tensor([[share, nats, balance]], dtype=torch.float32, device=trainer.accelerator.device)
    share, nats, balance = trainer.accelerator.gather(errors).amax(0).tolist()
    if not balance <= allowed:
        return f"has a router loss that differs from Mixtral's by {balance:.2g} of it (rounding: {allowed:.2g})"
    if share <= allowed:
        return None
    return (
        "has logits that differ from its head's weight times its last hidden states: log-probabilities by up to "
        f"{nats:.2g} nats, {share:.2g} of the largest logit (rounding: {allowed:.2g})"
    )


def _difference(own: torch.Tensor, labels: torch.Tensor, log_probs: torch.Tensor, eps: float) -> tuple[float, float]:
    """Return the distance of log-probabilities from those of the model's logits: as a share of the largest logits, and
    in nats.

    Args:
        own: Logits by the model, `(tokens, vocabulary)`.
        labels: The tokens, `(tokens,)`.
        log_probs: Of the tokens, by the fused head, which are float32 whatever the logits are.
        eps: Step of the type of the logits.
    """
    own = own.double()
    expected = own.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    off = expected - log_probs.double()
    # A word that neither can choose is no difference. Nor is what the model itself does not know: the guard sees it.
    off = off.where((expected != log_probs) & ~expected.isnan(), 0)
    largest = own.masked_fill(~own.isfinite(), 0).abs().amax(-1)
    # A log-probability of small logits is rounded to its own steps.
    largest = largest + expected.where(off != 0, 0).abs().clamp(max=1e3) * (torch.finfo(torch.float32).eps / eps)
    largest = largest.clamp_min(torch.finfo(torch.float32).tiny)
    worst = float((off.abs() / largest).max()) if len(off) else 0.0
    together = float(off.sum().abs() / largest.square().sum().sqrt()) if len(off) else 0.0
    return max(worst, SUM_SHARE * together), float(off.abs().max()) if len(off) else 0.0


def _why_unknown(model: Any) -> str | None:
    """Return why a fused head cannot be tried on a model."""
    embeddings = model.get_output_embeddings()
    if isinstance(embeddings, BaseTunerLayer):
        return "has an adapter on its head, which the head's weight does not include"
    if not isinstance(embeddings, nn.Linear | ModulesToSaveWrapper | TrainableTokensWrapper):
        return f"has {type(embeddings).__name__} instead of a linear layer as its head"
    return None


class _NotForHeadError(Exception):
    """The head's weight cannot be multiplied with what the model below it returned."""


@contextmanager
def _hidden_states_checked(model: Any) -> "Iterator[None]":
    """Within it, the model below the head returns hidden states that its weight takes.

    Raises:
        _NotForHeadError: It does not.
    """
    head_width = whole_shape(model.get_output_embeddings().weight)[-1]

    def check(module: Module, _: Any, output: Any) -> None:
        if "last_hidden_state" not in output:
            below = f"{type(module).__name__}, the model below its head"
            raise _NotForHeadError(f"returns no last hidden states from {below}")
        width = output.last_hidden_state.shape[-1]
        if width != head_width:
            raise _NotForHeadError(f"has last hidden states of width {width}, but a head of width {head_width}")

    handle = model.base_model.register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _language_model(trainer: Any, wrapped: Any) -> Any:
    """The model that has the head, below adapters and wrappers."""
    return language_model(trainer.accelerator.unwrap_model(wrapped))


def _rows_of_media(rows: Any) -> list[dict[str, Any]]:
    """Return the shortest of the first rows with media: whole ones, as media cannot be cut."""
    first = rows.select(range(min(NUM_LOOKED_AT, len(rows))))
    texts = (as_text(document) for row in first for document in documents_of(row))
    chosen = sorted(texts, key=lambda row: (not row[MEDIA], len(row["input_ids"])))
    return chosen


def _rows(trainer: Any, vocabulary: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch of the first rows' tokens, as the trainer gives it to the model, and the labels of all of them."""
    from trl import SFTTrainer

    collator = vars(trainer).get("data_collator")
    if isinstance(collator, MediaCollator):
        # Some processors do not take any two rows together.
        num = NUM_ROWS if collator.packs else min(NUM_ROWS, trainer.args.per_device_train_batch_size)
        batch = collator.texts(_rows_of_media(trainer.train_dataset)[:num])
        labels = batch.pop("labels").where(batch["attention_mask"] == 0, batch["input_ids"])
        batch.pop("scored_positions", None)
        batch, labels = send_to_device((batch, labels), trainer.accelerator.device)
        return batch, labels
    ids = [[token % vocabulary for token in row] for row in probe_rows(trainer, vocabulary)]
    if isinstance(trainer, SFTTrainer):
        batch = dict(trainer.data_collator([{"input_ids": row} for row in ids]))
        labels = batch.pop("labels")
    else:
        tokens = torch.tensor(ids)
        batch, labels = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, tokens
    batch.pop("scored_positions", None)
    batch, labels = send_to_device((batch, labels), trainer.accelerator.device)
    return batch, labels
