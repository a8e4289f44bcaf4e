"""Self-attention in fused kernels, recognised by the source of its forward.

Self-attention with its projections in one product, and head norms and rotary embedding in one pass.

What is kept: the attention function is looked up at each call as before and told the same, the cache is updated
between rotation and attention, and modules that cannot be read (see `lora_layers`) are called as before.

Computation of a self-attention's forward, read from its source.

The forwards of transformers' attentions are put together from few parts: three projections or one, norms of the heads
or of whole rows or none, a rotary embedding, the cache, the attention itself with what it is told, the output. Each
part is known here by its lines (`attention.yaml`), as `ast.unparse` writes them. A forward of known parts is
understood, whatever its model is called; of another one, the first line that is not known is told.
"""

import ast
import copy
import functools
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import Module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tunekit.files import read_table
from tunekit.kernels.rope import qk_norm_rope
from tunekit.models.fusion.forms import CACHES, Norm, norm_rule
from tunekit.models.fusion.lora_layers import is_watched, num_outputs, project, random_linear
from tunekit.models.fusion.proof import Fusion, Kept, Trial, is_fused, stand_in
from tunekit.models.fusion.structure import Unreadable

QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Attention:
    """Computation of a self-attention.

    Attributes:
        projections: Names of the modules that give queries, keys and values, or of the one that gives all three.
        norms: Names of the norms of queries and keys, or None.
        norms_rows: Whether those go over all heads of a token together.
        rotates: Whether queries and keys are rotated by their positions.
        rotates_parts: Whether it may be that only the first part of each head is rotated.
        output: Name of the module behind the attention.
        options: What the attention function is told: names and keys of `OPTIONS`.
        attend: The function that attends where the configuration names none that is registered.
        cache_takes_options: Whether the cache is handed what the attention function is told besides.
    """

    projections: tuple[str, ...]
    norms: tuple[str, str] | None
    norms_rows: bool
    rotates: bool
    rotates_parts: bool
    output: str
    options: tuple[tuple[str, str], ...]
    attend: Callable[..., Any]
    cache_takes_options: bool


@functools.cache
def _forms() -> dict[str, dict[tuple[str, ...], str]]:
    """The parts of a forward by name, each with its possible lines and what they mean: `attention.yaml`."""
    table = read_table(Path(__file__).with_suffix(".yaml"))
    return {
        part: {_lines(source): meaning for meaning, sources in forms.items() for source in sources}
        for part, forms in table.items()
    }


def _lines(source: str) -> tuple[str, ...]:
    return tuple(ast.unparse(statement) for statement in ast.parse(source).body)


BEFORE_ATTENDING = ("shapes", "projections", "norms", "rotation", "cache", "look_up")
"""Parts of a forward up to the call of the attention function, in their order."""


def _dropout(module: Any) -> float:
    return float(module.attention_dropout) if module.training else 0.0


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "0.0 if not self.training else self.attention_dropout": _dropout,
    "self.attention_dropout if self.training else 0.0": _dropout,
    "self.scaling": lambda module: module.scaling,
    "self.sliding_window": lambda module: module.sliding_window,
    # As transformers has it: not every configuration of these models has the field.
    "getattr(self.config, 'sliding_window', None)": lambda module: getattr(module.config, "sliding_window", None),
    "self.attn_logit_softcapping": lambda module: module.attn_logit_softcapping,
}
"""Options of an attention function, as the forwards pass them."""


def read_attention(module: Module) -> Attention:
    """Read the computation of an attention module.

    Raises:
        Unreadable: It computes something else as well, which this names.
    """
    forward = inspect.unwrap(type(module).forward)
    parameters = ["self", "hidden_states", "position_embeddings", "attention_mask"]
    if list(inspect.signature(forward).parameters) not in [[*parameters, cache, "kwargs"] for cache in CACHES]:
        raise _unknown(f"forward{inspect.signature(forward)}")
    lines = _statements(forward)
    _, projections, norms, rotation, caching, _ = (_take(lines, part) for part in BEFORE_ATTENDING)
    options = _options(lines.pop(0))
    _take(lines, "rows")
    output = re.fullmatch(r"attn_output = self\.(\w+)\(attn_output\)", lines[0])
    if output is None or lines[1:] != ["return (attn_output, attn_weights)"]:
        raise _unknown(lines[0] if output is None else lines[-1])
    rotates_parts = _rotates_parts(forward.__globals__["apply_rotary_pos_emb"])
    this = cast(Any, module)
    names = None
    if projections in ("heads", "rows") or norms == "q_norm k_norm":
        names = ("q_norm", "k_norm")
    elif norms == "qk_layernorm" and this.qk_layernorm:
        names = ("q_layernorm", "k_layernorm")
    return Attention(
        projections=("qkv_proj",) if projections == "one" else QKV,
        norms=names,
        norms_rows=projections == "rows",
        rotates=rotation != "use_rope" or bool(this.use_rope),
        rotates_parts=rotates_parts or rotation == "rotary_ndims",
        output=output[1],
        options=options,
        attend=forward.__globals__["eager_attention_forward"],
        cache_takes_options=caching == "with options",
    )


def _unknown(line: str) -> Unreadable:
    return Unreadable(f"unknown line in its forward: {line.splitlines()[0]}")


def _statements(function: Callable[..., Any]) -> list[str]:
    """The statements of a function, without docstring, comments and layout."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    return [ast.unparse(statement) for statement in body]


def _take(lines: list[str], part: str) -> str:
    """Take the lines of a part from the front, and say which form of it they are."""
    forms = _forms()[part]
    for form, meaning in forms.items():
        if tuple(lines[: len(form)]) == form:
            del lines[: len(form)]
            return meaning
    # Of the form that fits longest, the first line that is another one.
    same = (takewhile(lambda pair: pair[0] == pair[1], zip(lines, form, strict=False)) for form in forms)
    fitting = max(len(list(pairs)) for pairs in same)
    raise _unknown(lines[fitting] if fitting < len(lines) else "(the end)")


def _options(line: str) -> tuple[tuple[str, str], ...]:
    """Return the options with which an attention function is called."""
    start = (
        "attn_output, attn_weights = attention_interface(self, query_states, key_states, value_states, attention_mask"
    )
    if not line.startswith(start) or not line.endswith(", **kwargs)"):
        raise _unknown(line)
    (statement,) = ast.parse(line).body
    call = cast(ast.Call, cast(ast.Assign, statement).value)
    named = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    unknown = [f"{name}={value}" for name, value in named.items() if value not in OPTIONS]
    if unknown or len(call.args) != 5:
        raise _unknown(unknown[0] if unknown else line)
    return tuple(named.items())


def _rotates_parts(rotary: Any) -> bool:
    """Return whether a rotary embedding, one that rotates halves, leaves part of each head unrotated.

    Raises:
        Unreadable: It is another one.
    """
    # With the `kernels` package installed, functions that it may replace are modules.
    function = inspect.unwrap(type(rotary).forward if isinstance(rotary, Module) else rotary)
    lines = _statements(function)
    rotated = _forms()["rotary_embedding"].get(tuple(lines))
    if rotated is None:
        raise _unknown(f"apply_rotary_pos_emb: {lines[0]}")
    half = _statements(inspect.unwrap(function.__globals__["rotate_half"]))
    if tuple(half) not in _forms()["rotate_half"]:
        raise _unknown(f"rotate_half: {half[0]}")
    return rotated == "parts"


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
        return Kept("its projections are not linear layers")
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
    module: Any, attention: Attention, query: Tensor, key: Tensor, position_embeddings: tuple[Tensor, Tensor] | None
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
