"""Self-attention with its projections in one product, and head norms and rotary embedding in one pass.

What is kept: the attention function is looked up at each call as before and told the same, the cache is updated
between rotation and attention, and modules that cannot be read (see `lora_layers`) are called as before.
"""

import copy
import inspect
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tunekit.kernels.rope import qk_norm_rope
from tunekit.models.fusion.attention_forms import OPTIONS, Attention, read_attention
from tunekit.models.fusion.lora_layers import is_watched, num_outputs, project, random_linear
from tunekit.models.fusion.norm_forms import Norm, norm_rule
from tunekit.models.fusion.proof import Trial, stand_in
from tunekit.models.fusion.rules import Fusion, Kept, is_fused
from tunekit.models.fusion.structure import Unreadable


def attention_rule(module: nn.Module) -> Fusion | Kept | None:
    """The rule for self-attentions."""
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.unwrap(type(module).forward).__code__.co_names:
        return None
    try:
        attention = read_attention(module)
    except Unreadable as unreadable:
        return Kept(str(unreadable))
    norms = {name: module.get_submodule(name) for name in attention.norms or ()}
    rules = {name: norm_rule(norm) for name, norm in norms.items() if is_fused(norm)}
    parts = tuple((name, fusion) for name, fusion in rules.items() if isinstance(fusion, Fusion))
    widths = tuple(num_outputs(module.get_submodule(name)) for name in (*attention.projections, attention.output))
    if None in widths:
        return Kept("its projections are no linear layers")
    sizes = (*widths, *((type(norms[name]), fusion.settings, fusion.sizes) for name, fusion in parts))
    return Fusion("self-attention", forward, attention, partial(_trial, module, attention), sizes, parts)


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output of a self-attention, and its weights where the attention function returns them.

    Args:
        self: The attention.
        hidden_states: (batch, seq, hidden).
        position_embeddings: cos and sin of the positions, each (batch or 1, seq, rotary_dim).
        attention_mask: For the attention function.
        past_key_values: Cache of keys and values, to be updated.
        cache: The same by the name that it has since transformers 5.24.
        kwargs: For the attention function.
    """
    attention: Attention = self.fused_as
    query, key, value = _heads(self, attention, hidden_states)
    query, key = _rotated(self, attention, query, key, position_embeddings)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    cache = past_key_values if cache is None else cache
    if cache is not None:
        options = {"kwargs": kwargs} if attention.cache_takes_options else {}
        key, value = cache.update(key, value, self.layer_idx, **options)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attention.attend)
    options = {name: OPTIONS[option](self) for name, option in attention.options}
    attended, weights = attend(self, query, key, value, attention_mask, **options, **kwargs)
    attended = attended.reshape(*hidden_states.shape[:-1], -1).contiguous()
    (output,) = project(attended, [self.get_submodule(attention.output)])
    return output, weights


def _heads(module: Any, attention: Attention, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, each (batch, seq, heads, head_dim)."""
    products = project(hidden_states, [module.get_submodule(name) for name in attention.projections])
    if len(products) == 1:
        width = module.config.num_key_value_heads * module.head_dim
        products = torch.split(products[0], [products[0].shape[-1] - 2 * width, width, width], dim=-1)
    query, key, value = products
    if attention.norms is not None and attention.norms_rows:
        query, key = (
            module.get_submodule(name)(rows) for name, rows in zip(attention.norms, (query, key), strict=True)
        )
    query, key, value = (rows.view(*rows.shape[:-1], -1, module.head_dim) for rows in (query, key, value))
    return query, key, value


def _rotated(
    module: Any,
    attention: Attention,
    query: Tensor,
    key: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Queries and keys with the norms of their heads, rotated."""
    weights: dict[str, Any] = {}
    if attention.norms is not None and not attention.norms_rows:
        norms = [module.get_submodule(name) for name in attention.norms]
        weights = _fused_norms(*norms) if attention.rotates else {}
        if not weights:
            query, key = norms[0](query), norms[1](key)
    if not attention.rotates:
        return query, key
    cos, sin = cast("tuple[Tensor, Tensor]", position_embeddings)
    return qk_norm_rope(query, key, cos, sin, **weights)


def _fused_norms(query_norm: nn.Module, key_norm: nn.Module) -> dict[str, Any]:
    """The norms of heads as the kernel takes them; nothing where they are to be called."""
    if any(not is_fused(norm) or is_watched(norm) for norm in (query_norm, key_norm)):
        return {}
    how, other = cast(Any, query_norm).fused_as, cast(Any, key_norm).fused_as
    if not isinstance(how, Norm) or how != other or how.weight is None:
        return {}
    weights = {"q_weight": query_norm.get_parameter(how.weight), "k_weight": key_norm.get_parameter(how.weight)}
    return {**weights, "eps": how.eps, "offset": how.offset, "casting": how.casting}


def _trial(
    module: Any, attention: Attention, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Trial:
    """An attention of the same heads with few features around them, and what it is called with."""
    features = 64
    parts: dict[str, nn.Module] = {}
    for name in attention.projections:
        width = num_outputs(module.get_submodule(name))
        assert width is not None
        parts[name] = random_linear(features, width, generator, device, dtype)
    width = module.config.num_attention_heads * module.head_dim
    parts[attention.output] = random_linear(width, features, generator, device, dtype)
    for name in attention.norms or ():
        parts[name] = stand_in(module.get_submodule(name), generator=generator).to(device, dtype)
    attempt = stand_in(module, generator=generator, **parts)
    # The function that attends is the same for both, so the one that runs everywhere.
    config = copy.deepcopy(module.config)
    config._attn_implementation = "eager"
    cast(Any, attempt).config = config
    x = torch.randn(2, 5, features, generator=generator).to(device, dtype).requires_grad_()
    angles = torch.randn(1, 5, _num_rotated(module, attention) // 2, generator=generator).repeat(1, 1, 2)
    positions = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
    return Trial(attempt, (x,), {"position_embeddings": positions, "attention_mask": None})


def _num_rotated(module: Any, attention: Attention) -> int:
    """Return how many values of a head to rotate in a trial: all, or as many as the module says, or some."""
    if not attention.rotates_parts:
        return int(module.head_dim)
    return int(vars(module).get("rotary_ndims", module.head_dim // 4 * 2))
