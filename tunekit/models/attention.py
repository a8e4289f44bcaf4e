"""Attention for rows that lie one behind the other: each document sees itself alone, and no mask is made.

A mask that keeps documents apart has as many entries as the row has pairs of tokens, and keeps SDPA from its flash
kernels. Here the boundaries are told instead, as the collator makes them once for each micro-batch: `cu_seq_lens_q`,
the first places of documents and the end of the last one, `(documents + 1,)` in int32, and `max_length_q`, the length
of the longest as a Python integer, so that nothing waits for the device.

On CUDA it is torch's attention of sequences of many lengths (`torch.nn.attention.varlen`, FlashAttention 2, or what is
activated in its place); on a CPU, SDPA for one document after another. Both are causal, take a sliding window and fewer
heads of keys and values than of queries, take sinks (`tunekit/models/sinks.py`), and need memory that grows with the
tokens alone.

It is registered in transformers' `AttentionInterface`, its extension point, when a model is loaded that uses it. Rows
with a mask, such as a model gets that answers prompts in the middle of a run, have transformers' SDPA.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tunekit.models import sinks
from tunekit.planner.plan import VARLEN, FlashAttention

TAKES_GROUPED = torch.__version__ >= "2.12"
"""True if torch's varlen attention asks whether there are fewer heads of keys and values; before, it takes them."""

QUERIES_AT_ONCE = 256
"""Queries that share a mask where a window slides on a CPU; at least as many as the window is wide."""


def register_packed_attention() -> None:
    """Make transformers know the attention by its name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(VARLEN, packed_attention)
    AttentionMaskInterface.register(VARLEN, mask_of_padded)


class Call(NamedTuple):
    """Call of attention by a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None


@contextmanager
def watched_calls() -> Iterator[tuple[set[Call], set[int | None]]]:
    """Within it, the calls of layers for the packed attention are noted, and the windows of the masks asked for."""
    from transformers import AttentionInterface, AttentionMaskInterface

    calls: set[Call] = set()
    windows: set[int | None] = set()

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **given: Any) -> Any:
        type_ = torch.get_autocast_dtype(query.device.type) if _is_cast(query) else value.dtype
        sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
        calls.add(Call(*sizes, type_, given.get("sliding_window")))
        return packed_attention(module, query, key, value, *args, **given)

    def mask(**given: Any) -> Any:
        # Qwen 2's experts ask for a mask of no tokens where no layer has a window, and no layer reads it.
        windows.add(given.get("local_size") or None)
        return mask_of_padded(**given)

    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, mask)
    try:
        yield calls, windows
    finally:
        register_packed_attention()


def _is_cast(tensor: Tensor) -> bool:
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def activate(implementation: FlashAttention) -> None:
    """Put a flash attention in the place of torch's own, for all calls in this process.

    Args:
        implementation: `FA3` or `FA4`, whose package is installed; with `FA2` nothing is done.
    """
    if implementation != "FA2":
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl(implementation)


def mask_of_padded(*, attention_mask: Tensor | None = None, **given: Any) -> Tensor | None:
    """The mask of rows that come with one, as transformers makes it for SDPA; None for others, which need none.

    It is made also where all is seen, so that such rows can be told from others.
    """
    from transformers.masking_utils import sdpa_mask

    if attention_mask is None:
        return None
    given |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor = sdpa_mask(attention_mask=attention_mask, **given)
    return mask


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attention as a layer of transformers calls it: one row of documents, rows with a mask, or rows of one document.

    Args:
        module: The layer; it says whether it is causal.
        query: `(1, heads, tokens, head_dim)`.
        key: `(1, kv_heads, tokens, head_dim)`.
        value: `(1, kv_heads, tokens, value_dim)`.
        attention_mask: What `mask_of_padded` made; with a mask, the rest is as transformers' SDPA takes it.
        dropout: 0; flash attention of such rows has none.
        scaling: What scores are multiplied by; 1 / sqrt(head_dim) where it is None.
        sliding_window: How many tokens a token sees, itself among them; None for all.
        is_causal: Whether a token sees none behind it, which it must not; None asks the layer.
        softcap: None; scores are not squeezed.
        s_aux: Sinks, `(heads,)`; None where there are none.
        position_bias: None; nothing is added to scores.
        cu_seq_lens_q: Where documents begin and the last one ends, `(documents + 1,)`, int32.
        max_length_q: Length of the longest document.

    Returns:
        `(1, tokens, heads, value_dim)`, and no weights.

    Raises:
        ValueError: The layer asks for what this is not.
    """
    unknown = {"softcap": softcap, "position bias": position_bias}
    unsupported = [name for name, argument_value in unknown.items() if argument_value is not None]
    if dropout and attention_mask is None:
        unsupported.append("dropout")
    if not (module.is_causal if is_causal is None else is_causal):
        unsupported.append("non-causal attention")
    if unsupported:
        raise ValueError(f"{VARLEN} does not support {' or '.join(unsupported)}, which {type(module).__name__} uses")
    if attention_mask is not None and s_aux is not None:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return sinks.attend_to_all(query, key, value, s_aux, scale=scaling, visible=visible).transpose(1, 2), None
    if attention_mask is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        attended: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling
        )[0]
        return attended, None
    # A prompt, or its next token, has neither mask nor boundaries. A packed row that lacks them is seen at the start of
    # a run, where documents are looked at.
    if cu_seq_lens_q is None and max_length_q is None:
        return _whole_rows(query, key, value, s_aux, scale=scaling, window=sliding_window), None
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1:
        raise ValueError(f"{VARLEN} supports one row with document boundaries, or rows with a mask")
    window = sliding_window if sliding_window is not None and sliding_window < max_length_q else None
    # Norms and rotary embeddings of a float32 stream leave float32 queries and keys beside 16-bit values.
    if _is_cast(query):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if query.is_cuda or query.is_meta:
        out = _varlen(q, k, v, s_aux, cu_seq_lens_q, max_length_q, scale=scaling, window=window)
    else:
        out = sdpa_by_document(q, k, v, cu_seq_lens_q, s_aux, scale=scaling, window=window)
    return out[None], None


def _whole_rows(
    query: Tensor, key: Tensor, value: Tensor, s_aux: Tensor | None, *, scale: float | None, window: int | None
) -> Tensor:
    """Attention in rows of one document each, as generation has them: all of it, or one more token behind a cache.

    Returns:
        `(rows, tokens, heads, value_dim)`.
    """
    if query.shape[2] == key.shape[2]:
        return torch.cat(_seen(query, key, value, s_aux=s_aux, scale=scale, window=window), dim=1)
    if query.shape[2] != 1:
        raise ValueError(f"{VARLEN} supports several tokens after a cache only with a mask")
    if window is not None:
        key, value = key[:, :, -window:], value[:, :, -window:]
    if s_aux is not None:
        return sinks.attend_to_all(query, key, value, s_aux, scale=scale).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s_aux: Tensor | None,
    cu_seq_lens: Tensor,
    max_length: int,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """The same by torch's varlen attention: `(tokens, heads, value_dim)`."""
    from torch.nn.attention.varlen import varlen_attn

    width, head_dim = v.shape[-1], q.shape[-1]
    # The kernels take heads of equal width, a multiple of 8.
    padded = -(-head_dim // 8) * 8
    if padded > head_dim:
        scale = head_dim**-0.5 if scale is None else scale
        q, k = F.pad(q, (0, padded - head_dim)), F.pad(k, (0, padded - head_dim))
    if width < padded:
        v = F.pad(v, (0, padded - width))
    # The kernels count the tokens to the left without the token itself; -1 stands for all.
    window_left = -1 if window is None else window - 1
    if s_aux is not None:
        return sinks.attend(_varlen_flash(cu_seq_lens, max_length, scale, window_left), q, k, v, s_aux)[..., :width]
    grouped: dict[str, Any] = {"enable_gqa": True} if TAKES_GROUPED else {}
    out = varlen_attn(
        q, k, v, cu_seq_lens, cu_seq_lens, max_length, max_length, scale=scale, window_size=(window_left, 0), **grouped
    )
    assert isinstance(out, Tensor), "varlen_attn returned more than the output"
    return out[..., :width]


def _varlen_flash(cu_seq_lens: Tensor, max_length: int, scale: float | None, window_left: int) -> sinks.Flash:
    """Return the two passes of torch's varlen attention. Through its public function no gradient reaches `lse`."""
    # Registers the operations (torch 2.11 to 2.13).
    import torch.nn.attention.varlen

    lengths, window = (cu_seq_lens, cu_seq_lens, max_length, max_length), [window_left, 0]
    ops, is_causal = torch.ops.torch_attn, window_left == -1

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        grouped = [q.shape[1] != k.shape[1]] if TAKES_GROUPED else []
        output, lse, _ = ops._varlen_attn(q, k, v, *lengths, is_causal, scale, window, *grouped)
        return output, lse

    def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor) -> Any:
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        given = gradient.contiguous(), q, k, v, output, lse
        return ops._varlen_attn_backward(*given, *lengths, is_causal, state, scale, window)

    return sinks.Flash(forward, backward, tokens_first=True)


def sdpa_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_lens: Tensor,
    s_aux: Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention within each document, by SDPA for one after another.

    Args:
        q: `(tokens, heads, head_dim)`.
        k: `(tokens, kv_heads, head_dim)`.
        v: `(tokens, kv_heads, value_dim)`.
        cu_seq_lens: Where documents begin and the last one ends.
        s_aux: Sinks, `(heads,)`; None where there are none.
        scale: What scores are multiplied by; 1 / sqrt(head_dim) where it is None.
        window: How many tokens a token sees, itself among them; None for all.

    Returns:
        `(tokens, heads, value_dim)`.
    """
    parts = []
    for start, end in pairwise(cu_seq_lens.tolist()):
        document = (tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v))
        parts += _seen(*document, s_aux=s_aux, scale=scale, window=window)
    return torch.cat(parts, dim=1)[0]


def _seen(
    q: Tensor, k: Tensor, v: Tensor, *, s_aux: Tensor | None, scale: float | None, window: int | None
) -> list[Tensor]:
    """Attention within one document, `(1, heads, tokens, head_dim)`, in parts of `(1, tokens, heads, value_dim)`.

    A window takes a mask, which is as wide as the window and some queries, not as the document.
    """
    length, times = q.shape[2], q.shape[1] // k.shape[1]
    # SDPA's flash kernel for CPUs takes no groups of queries, and without it there is a score for each pair of tokens.
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    if window is None or window >= length:
        return [_sdpa(q, k, v, s_aux=s_aux, scale=scale, visible=None).transpose(1, 2)]
    parts = []
    step = max(window, QUERIES_AT_ONCE)
    for first in range(0, length, step):
        last, since = min(first + step, length), max(0, first - window + 1)
        queries, keys = torch.arange(first, last)[:, None], torch.arange(since, last)
        visible = (keys <= queries) & (keys > queries - window)
        tensors = q[:, :, first:last], k[:, :, since:last], v[:, :, since:last]
        parts.append(_sdpa(*tensors, s_aux=s_aux, scale=scale, visible=visible).transpose(1, 2))
    return parts


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, s_aux: Tensor | None, scale: float | None, visible: Tensor | None
) -> Tensor:
    """Return SDPA of what is visible, causal where that is None: `(1, heads, tokens, value_dim)`."""
    causal = visible is None
    if s_aux is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal, scale=scale)
    mask = None if visible is None else q.new_zeros(visible.shape).masked_fill(~visible, -torch.inf)
    aten, width = torch.ops.aten, v.shape[-1]
    if width < q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - width))

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    def backward(*given: Tensor) -> Any:
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(*given, 0.0, causal, attn_mask=mask, scale=scale)

    return sinks.attend(sinks.Flash(forward, backward, tokens_first=False), q, k, v, s_aux)[..., :width]
