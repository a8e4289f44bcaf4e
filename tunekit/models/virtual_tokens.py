"""Rows behind virtual tokens, with inputs and outputs of their own length.

PEFT puts the embeddings of virtual tokens before each row (prompt tuning, arXiv 2104.08691), so that a model returns
more positions than it was given. Here a model takes and returns those of the row's own tokens, as with every other
adapter: what scores, compares or evaluates need not know. PEFT also scores the first token of a row, which the last
virtual one predicts; without them nothing does, so it is left out of the loss, and the count of tokens stays.

PEFT's own `generate` puts virtual tokens before each new token too: it looks for `past_key_values` (peft 0.21.2), which
transformers calls `cache` since 5.24. Here transformers generates from their embeddings and those of the prompt, with
positions that leave padding out.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

WITHOUT_CACHE = "with PEFT 0.21 and Transformers 5.24, generate with `use_cache=False`; a cache repeats virtual tokens"
"""Advice to others that load the adapter."""

_OF_TOKENS = ("logits", "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")
"""Outputs with a value for each position, of models and of fused heads."""


def hide_virtual_tokens(model: "PeftModel") -> None:
    """Have a model with virtual tokens take and return positions of its rows alone, and generate behind them."""
    model.register_forward_pre_hook(_behind, with_kwargs=True)
    model.register_forward_hook(_without)
    cast(Any, model).generate = partial(_generate, model)


def _num_tokens(model: Any) -> int:
    """Number of virtual tokens that the model puts before a row now: none while its adapter is switched off."""
    return 0 if model._adapters_disabled else cast(int, model.active_peft_config.num_virtual_tokens)


def _behind(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Move the places that count behind virtual tokens, and leave a row's first token out of the loss."""
    from tunekit.kernels.cross_entropy import IGNORED

    num = _num_tokens(model)
    if num and kwargs.get("labels") is not None:
        labels = kwargs["labels"].clone()
        labels[:, 0] = IGNORED
        kwargs["labels"] = labels
    if num and kwargs.get("scored_positions") is not None:
        places, length = kwargs["scored_positions"], kwargs["input_ids"].shape[1]
        kwargs["scored_positions"] = places + num * (places // length + 1)
    return args, kwargs


def _without(model: Any, _inputs: Any, output: Any) -> Any:
    """Drop what was computed for virtual tokens."""
    num = _num_tokens(model)
    for name in _OF_TOKENS if num else ():
        if output.get(name) is not None:
            output[name] = output[name][:, num:]
    return output


def _generate(model: Any, input_ids: "Tensor", attention_mask: "Tensor | None" = None, **kwargs: Any) -> Any:
    """Generate behind virtual tokens, as `generate` of transformers does."""
    import torch

    num, base = _num_tokens(model), model.get_base_model()
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if num:
        rows = model.word_embeddings(input_ids)
        before = model.get_prompt(batch_size=len(rows)).to(rows.dtype)
        kwargs["inputs_embeds"] = torch.cat((before, rows), dim=1)
        mask = torch.cat((mask.new_ones(len(mask), num), mask), dim=1)
    return base.generate(input_ids=input_ids, attention_mask=mask, **kwargs)
