"""tunekit's head in the place of TRL's, on the models that a trainer holds.

TRL gives a model a forward pass that scores tokens in tiles of logits (trl 1.16, `add_fused_lm_head`): called with
`fused_lm_head=True` it returns what is known of each token, and otherwise what the model always did. Ours has the same
contract and the same numbers, by `tunekit.kernels.linear_ce`: fewer products, larger ones, and only of the tokens that
count, which the rows' collator names.
"""

import functools
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import FusedCausalLMOutput

from tunekit.errors import DependencyError
from tunekit.kernels.cross_entropy import IGNORED, STATISTICS, Shape
from tunekit.kernels.linear_ce import linear_ce, linear_logprob

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import Trainer

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
"""What TRL's forward pass has taken from the model and from its trainer."""


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
        batch["scored_positions"] = (next_labels(batch["labels"]).flatten() != IGNORED).nonzero().squeeze(1)
        return batch


def name_scored_positions(trainer: "Trainer") -> None:
    """Have a trainer's collator name the positions that count, as our head takes them.

    Raises:
        DependencyError: It is not TRL's collator of tokens.
    """
    collator = trainer.data_collator
    if type(collator) is not DataCollatorForLanguageModeling:
        raise _gone(f"rows are collated by {type(collator).__name__}")
    trainer.data_collator = ScoredPositionsCollator(**vars(collator))


def next_labels(labels: Tensor) -> Tensor:
    """The label of the token behind each, `(batch, seq)`; the last one has none."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def replace_heads(trainer: "Trainer", *, sums_losses: bool = False, entropy_gradient: bool = False) -> None:
    """Put our head in the place of TRL's, on each model of a trainer that has one, before the trainer wraps them.

    Args:
        trainer: The trainer.
        sums_losses: Whether it learns from nothing but the sum of losses, whose gradients the forward pass can compute.
        entropy_gradient: Whether it learns from the entropy too.

    Raises:
        DependencyError: There is no such head, or not as it was when this was written.
    """
    models = [model for model in (trainer.model, vars(trainer).get("ref_model")) if model is not None]
    for model in models:
        patched = [module for module in model.modules() if "forward" in vars(module)]
        if not sum(_replace(module, sums_losses, entropy_gradient, trainer) for module in patched):
            raise _gone(f"{type(model).__name__} has none")


def _replace(module: "Module", sums_losses: bool, entropy_gradient: bool, trainer: "Trainer") -> bool:
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
        raise _gone(f"its forward pass has no {', '.join(missing)}")
    unknown = set(bound["outputs"]) - {"log_probs", *STATISTICS}
    if unknown:
        raise _gone(f"it is asked for {', '.join(sorted(unknown))}")
    forward = _forward_with(bound, trl, sums_losses=sums_losses, entropy_gradient=entropy_gradient)
    if is_wrapped:
        vars(module)["_original_forward"] = MethodType(forward, module)
        forward = _under(trainer, forward)
    module.forward = MethodType(forward, module)
    return True


def _under(trainer: "Trainer", forward: Any) -> Any:
    """A forward pass under the trainer's autocast. What the head returns is float32 already."""

    @functools.wraps(forward)
    def computed(*args: Any, **kwargs: Any) -> Any:
        with trainer.accelerator.autocast():
            return forward(*args, **kwargs)

    return computed


def _gone(how: str) -> DependencyError:
    return DependencyError(
        f"TRL's head is not as tunekit knows it: {how}", hint="install the versions that tunekit asks for"
    )


def _forward_with(bound: Mapping[str, Any], trl: MethodType, *, sums_losses: bool, entropy_gradient: bool) -> Any:
    """The forward pass that has the place of TRL's.

    Args:
        bound: What TRL's had taken from the model and from its trainer.
        trl: TRL's, which goes on serving all other calls.
        sums_losses: See `replace_heads`.
        entropy_gradient: See there.
    """
    text_config = bound["text_config"]
    statistics = [name for name in bound["outputs"] if name != "log_probs"]
    shape = Shape(
        logit_scale=bound["logit_scale"],
        softcap=bound["final_logit_softcapping"],
        temperature=bound["temperature"],
    )

    # With the signature of the original, which `generate` and trainers look at.
    @functools.wraps(trl.__func__)
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
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return trl(*args, **{name: value for name, value in given.items() if value is not None}, **kwargs)
        kwargs["use_cache"] = False
        if vars(text_config).get("output_router_logits"):
            kwargs.setdefault("output_router_logits", True)
        # These are looked up at each call: FSDP and PEFT replace them.
        backbone = self.base_model(*args, **kwargs)
        head = self.get_output_embeddings()
        hidden = backbone.last_hidden_state.to(head.weight.device)
        is_shifted = shift_labels is not None
        wanted = next_labels(cast("Tensor", labels)) if shift_labels is None else shift_labels
        wanted = wanted.to(hidden.device)
        casting: AbstractContextManager[Any] = nullcontext()
        if bound["cast_lm_head_to_fp32"]:
            hidden, casting = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
        with casting:
            common: dict[str, Any] = {
                "bias": None if head.bias is None else _whole(head.bias),
                "index": scored_positions,
                "statistics": statistics,
                "shape": shape,
            }
            if sums_losses:
                scores = linear_ce(hidden, _whole(head.weight), wanted, **common)
            else:
                scores = linear_logprob(
                    hidden, _whole(head.weight), wanted, entropy_gradient=entropy_gradient, **common
                )
        mask = wanted != IGNORED
        num_items = mask.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        summed = -scores.log_probs.sum() if scores.loss is None else scores.loss
        nll = summed / num_items.to(hidden.device).clamp(min=1)
        loss, aux_loss = nll, None
        if kwargs.get("output_router_logits"):
            aux_loss = _balance(backbone.router_logits, text_config, kwargs.get("attention_mask"))
            loss = nll + vars(text_config).get("router_aux_loss_coef", 0.0) * aux_loss
        end = None if is_shifted else -1
        columns = {
            name: column[:, :end] for name, column in scores._asdict().items() if column is not None and column.dim()
        }
        return HeadOutput(loss=loss, nll=nll, aux_loss=aux_loss, label_mask=mask[:, :end], **columns)

    return forward


def _balance(router_logits: Any, text_config: Any, attention_mask: Tensor | None) -> Any:
    """The loss of routers, which is Mixtral's in each of their families."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func(
        router_logits, text_config.num_experts, text_config.num_experts_per_tok, attention_mask
    )


def _whole(weight: Tensor) -> Tensor:
    """A weight of the head, of which FSDP2 may have left a part to each device."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
