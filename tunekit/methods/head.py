"""Heads of a trainer's models: tunekit's fused one, or the model's own logits.

tunekit's head in the place of TRL's, on the models that a trainer holds.

TRL gives a model a forward pass that scores tokens in tiles of logits (trl 1.16, `add_fused_lm_head`): called with
`fused_lm_head=True` it returns what is known of each token, and otherwise what the model always did. Ours has the same
contract and the same numbers, by `tunekit.kernels.linear_ce`: fewer products, larger ones, and only of the tokens that
count, which the rows' collator names.

Neither is right where a model does more to its hidden states than both know of. Which head scores is held in a `Head`,
which `tunekit.training.check_head` sets to the model's own logits where it finds them to differ.

Score tokens by the logits that a model's own forward pass gives.

A fused head takes hidden states times one weight for the logits, with a scale and a soft cap known by name. Some
models do more: they transform hidden states before the head (BERT, ModernBERT's decoder), divide them (muP), or cap
logits by a name of their own. Their logits are made whole here, for each token of a micro-batch, and scored as a fused
head scores them.
"""

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from tunekit.errors import DependencyError
from tunekit.kernels.cross_entropy import IGNORED, STATISTICS, Shape
from tunekit.kernels.linear_ce import (
    TokenScores,
    eaft_weights,
    linear_ce,
    linear_logprob,
    next_labels,
    places_of,
)

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import Trainer


HEAD = "fused_head"
"""Name of the attribute of a model that holds its `Head`."""

_FORWARD = "_fused_forward"
_BOUND = (
    "original_forward",
    "text_config",
    "cast_lm_head_to_fp32",
    "temperature",
    "final_logit_softcapping",
    "logit_scale",
    "outputs",
)
"""Objects that TRL's forward pass has bound from the model and from its trainer."""


@dataclass
class HeadOutput(FusedCausalLMOutput):  # type: ignore[misc]
    """TRL's, and the loss without that of routers.

    Where the head learns from the sum of losses, `loss` and `nll` have gradients, and what is said of tokens has none.
    """

    nll: Tensor | None = None


class ScoredPositionsCollator(DataCollatorForLanguageModeling):  # type: ignore[misc]
    """TRL's collator, which also names the positions whose next token counts, so that no accelerator is waited for.

    They are places in the flattened batch, in `scored_positions`: `(tokens that count,)`.
    """

    def torch_call(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of rows."""
        batch: dict[str, Any] = super().torch_call(examples)
        batch["scored_positions"] = places_of(next_labels(batch["labels"]))
        return batch


def name_scored_positions(trainer: "Trainer") -> None:
    """Have a trainer's collator name the positions that count, as our head takes them.

    Raises:
        DependencyError: It is not TRL's collator of tokens.
    """
    collator = trainer.data_collator
    if type(collator) is not DataCollatorForLanguageModeling:
        raise _gone(f"the data collator is {type(collator).__name__}")
    trainer.data_collator = ScoredPositionsCollator(**vars(collator))


@dataclass
class Head:
    """A model's fused head.

    Attributes:
        scorer: What scores tokens: tunekit's head, TRL's, or the model's own logits.
        bound: What TRL's forward pass has taken from the model and from its trainer.
        trl: TRL's forward pass, which serves all calls that are not for scores.
        sums_losses: See `replace_heads`.
        entropy_gradient: See there.
        entropy_top_k: See there.
        entropy_power: See there.
    """

    scorer: Literal["tunekit", "trl", "model"]
    bound: Mapping[str, Any]
    trl: MethodType
    sums_losses: bool
    entropy_gradient: bool
    entropy_top_k: int = 0
    entropy_power: float = 1.0

    def shape(self, *, learns: bool, **of_weight: Any) -> Shape:
        """Return what makes a loss of logits.

        Args:
            learns: Whether it is trained on: evaluations have no weights.
            of_weight: Further fields, of logits that are products with the head's weight.
        """
        num_weighed = self.entropy_top_k if learns else 0
        return Shape(
            temperature=self.bound["temperature"],
            entropy_top_k=num_weighed,
            entropy_power=self.entropy_power,
            **of_weight,
        )

    @property
    def statistics(self) -> list[str]:
        """Statistics of each token that are needed besides its log-probability."""
        return [name for name in self.bound["outputs"] if name != "log_probs"]


def replace_heads(
    trainer: "Trainer",
    *,
    sums_losses: bool = False,
    entropy_gradient: bool = False,
    keeps_trls: bool = False,
    entropy_top_k: int = 0,
    entropy_power: float = 1.0,
) -> None:
    """Put our head in the place of TRL's, on each model of a trainer that has one, before the trainer wraps them.

    Args:
        trainer: The trainer.
        sums_losses: Whether it learns from nothing but the sum of losses, whose gradients the forward pass can compute.
        entropy_gradient: Whether it learns from the entropy too.
        keeps_trls: Whether TRL's head goes on scoring, until it is found not to be the model's.
        entropy_top_k: Number of largest logits of a token whose entropy its loss in the sum is multiplied by, in
            training; 0: none.
        entropy_power: Power of that factor.

    Raises:
        DependencyError: There is no such head, or not as it was when this was written.
    """
    for model in _models(trainer):
        patched = [module for module in model.modules() if "forward" in vars(module)]
        weighting = entropy_top_k, entropy_power
        heads = [_replace(module, sums_losses, entropy_gradient, keeps_trls, weighting, trainer) for module in patched]
        if not any(heads):
            raise _gone(f"{type(model).__name__} has none")


def fused_heads(trainer: "Trainer") -> list[Head]:
    """The heads that `replace_heads` has put into a trainer's models, that of the trained one first."""
    return [vars(module)[HEAD] for model in _models(trainer) for module in model.modules() if HEAD in vars(module)]


def language_model(model: Any) -> PreTrainedModel:
    """Return the model that has the head, below an adapter."""
    base: PreTrainedModel = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    return base


@contextmanager
def trl_head(model: PreTrainedModel, temperature: float = 1.0) -> Iterator[Mapping[str, Any]]:
    """Give a model TRL's head, and yield what that has bound from it; afterwards the model is as before."""
    replaced = vars(model).get("forward")
    add_fused_lm_head(model, temperature)
    try:
        yield inspect.getclosurevars(cast("MethodType", model.forward).__func__).nonlocals
    finally:
        del model.forward
        if replaced is not None:
            model.forward = replaced


def _models(trainer: "Trainer") -> list["Module"]:
    return [model for model in (trainer.model, vars(trainer).get("ref_model")) if model is not None]


def _replace(
    module: "Module",
    sums_losses: bool,
    entropy_gradient: bool,
    keeps_trls: bool,
    weighting: tuple[int, float],
    trainer: "Trainer",
) -> bool:
    """Replace the head of one module, if it has one."""
    # Accelerate has put autocast around that of a reference model, and keeps what was there.
    is_wrapped = "_original_forward" in vars(module)
    trl = cast("MethodType", vars(module)["_original_forward"] if is_wrapped else module.forward)
    is_function = inspect.ismethod(trl) and inspect.isfunction(trl.__func__)
    if not is_function or trl.__func__.__code__.co_name != _FORWARD:
        return False
    bound = inspect.getclosurevars(trl.__func__).nonlocals
    missing = sorted(set(_BOUND) - set(bound))
    if missing:
        raise _gone(f"its forward pass lacks {', '.join(missing)}")
    unknown = set(bound["outputs"]) - {"log_probs", *STATISTICS}
    if unknown:
        raise _gone(f"unknown outputs {', '.join(sorted(unknown))}")
    head = Head("trl" if keeps_trls else "tunekit", bound, trl, sums_losses, entropy_gradient, *weighting)
    vars(module)[HEAD] = head
    forward = _forward_with(head)
    if is_wrapped:
        vars(module)["_original_forward"] = MethodType(forward, module)
        # What the head returns is float32 already.
        forward = trainer.accelerator.autocast()(forward)
    module.forward = MethodType(forward, module)
    return True


def _gone(how: str) -> DependencyError:
    problem = f"TRL's fused head is not as expected: {how}"
    return DependencyError(problem, hint="install the versions that tunekit requires")


def _forward_with(head: Head) -> Any:
    """The forward pass that has the place of TRL's."""

    # With the signature of the original, which `generate` and trainers look at.
    @functools.wraps(head.trl.__func__)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        scored_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        loss_args = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        loss_args = {name: value for name, value in loss_args.items() if value is not None}
        if not fused_lm_head or head.scorer == "trl":
            return head.trl(*args, **({"fused_lm_head": True} if fused_lm_head else {}), **loss_args, **kwargs)
        kwargs["use_cache"] = False
        if vars(head.bound["text_config"]).get("output_router_logits"):
            kwargs.setdefault("output_router_logits", True)
        is_shifted = shift_labels is not None
        targets = next_labels(cast("Tensor", labels)) if shift_labels is None else shift_labels
        score = _score_by_model if head.scorer == "model" else _score_by_weight
        scores, aux_loss = score(head, self, targets, scored_positions, args, kwargs)
        targets = targets.to(scores.log_probs.device)
        mask = targets != IGNORED
        num_items = mask.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        summed = -scores.log_probs.sum() if scores.loss is None else scores.loss
        loss = nll = summed / num_items.to(targets.device).clamp(min=1)
        if aux_loss is not None:
            loss = nll + vars(head.bound["text_config"]).get("router_aux_loss_coef", 0.0) * aux_loss
        end = None if is_shifted else -1
        columns = {
            name: column[:, :end] for name, column in scores._asdict().items() if column is not None and column.dim()
        }
        return HeadOutput(loss=loss, nll=nll, aux_loss=aux_loss, label_mask=mask[:, :end], **columns)

    return forward


def _score_by_weight(
    head: Head, model: Any, wanted: Tensor, index: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TokenScores, Any]:
    """Scores by the last hidden states and the head's weight, and the loss of routers, if it is asked for."""
    bound = head.bound
    # These are looked up at each call: FSDP and PEFT replace them.
    backbone = model.base_model(*args, **kwargs)
    embeddings = model.get_output_embeddings()
    hidden = backbone.last_hidden_state.to(embeddings.weight.device)
    wanted = wanted.to(hidden.device)
    casting: AbstractContextManager[Any] = nullcontext()
    if bound["cast_lm_head_to_fp32"]:
        hidden, casting = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    shape = head.shape(
        learns=model.training, logit_scale=bound["logit_scale"], softcap=bound["final_logit_softcapping"]
    )
    with casting:
        weight = whole(embeddings.weight)
        bias = None if embeddings.bias is None else whole(embeddings.bias)
        common: dict[str, Any] = {"bias": bias, "index": index, "statistics": head.statistics, "shape": shape}
        if head.sums_losses:
            scores = linear_ce(hidden, weight, wanted, **common)
        else:
            scores = linear_logprob(hidden, weight, wanted, entropy_gradient=head.entropy_gradient, **common)
    if not kwargs.get("output_router_logits"):
        return scores, None
    return scores, _balance(model, backbone.router_logits, bound["text_config"], kwargs.get("attention_mask"))


def _score_by_model(
    head: Head, model: Any, wanted: Tensor, index: Tensor | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TokenScores, Any]:
    """Scores by the model's own logits, and its own loss of routers, if it is asked for."""
    output = head.bound["original_forward"](*args, **kwargs)
    labels, statistics = wanted.to(output.logits.device), head.statistics
    places = places_of(labels) if index is None else index
    logits = output.logits.flatten(0, -2).index_select(0, places)
    z = logits.float() / head.bound["temperature"]
    of_tokens = labels.flatten().index_select(0, places)
    log_p = z.log_softmax(-1)

    def spread(column: Tensor) -> Tensor:
        return column.new_zeros(labels.numel()).index_copy(0, places, column).view(labels.shape)

    entropy = None
    if "entropy" in statistics:
        with torch.set_grad_enabled(head.entropy_gradient and torch.is_grad_enabled()):
            # A word that cannot be chosen adds nothing; 0 times -inf would be NaN.
            entropy = spread(-(log_p.exp() * log_p.masked_fill(log_p.isneginf(), 0)).sum(-1))
    with torch.no_grad():
        sums = spread((2 * log_p).logsumexp(-1)) if "log_sum_sq_probs" in statistics else None
        means = spread(z.mean(-1)) if "mean_logits" in statistics else None
        tops = spread(z.argmax(-1) == of_tokens) if "is_top1" in statistics else None
    of_labels = log_p.gather(-1, of_tokens[:, None]).squeeze(-1)
    log_probs, loss = spread(of_labels), None
    shape = head.shape(learns=model.training)
    if shape.entropy_top_k:
        loss = -(of_labels * eaft_weights(logits.detach(), shape)).sum()
    return TokenScores(loss, log_probs, entropy, sums, means, tops), output.get("aux_loss")


def _balance(model: Any, router_logits: Any, text_config: Any, attention_mask: Tensor | None) -> Any:
    """The loss of routers, which is Mixtral's in each of their families."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func(
        router_logits, experts_of_layer(model, text_config), experts_of_token(model, text_config), attention_mask
    )


def experts_of_layer(model: Any, text_config: Any) -> int:
    """Experts of a layer, as the model's own forward pass has them: configurations have several names for them."""
    number: int = vars(model).get("num_experts") or text_config.num_experts
    return number


def experts_of_token(model: Any, text_config: Any) -> int:
    """Experts that a token goes through, likewise."""
    number: int = vars(model).get("num_experts_per_tok") or text_config.num_experts_per_tok
    return number


def whole(weight: Tensor) -> Tensor:
    """A weight of the head, of which FSDP2 may have left a part to each device."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
