"""Layers that carry a state along a row, or a whole decoder, run once for each document of a row.

State-space layers, linear attention and short convolutions read a row from its beginning to its end, whatever the masks
of attention are. Their fast kernels take boundaries of documents; transformers' own code does not. Where rows hold
several documents, each such layer is given one after the other here, as if it stood alone. All other layers work on
single tokens, but for attention, which keeps documents apart by itself.

Such layers are known by a causal convolution of their own, which all of these families have before their recurrence
(Mamba, gated delta rule, RG-LRU, LFM2's short convolution).

Other models attend across documents: their masks take no notice of positions (BERT, BLOOM), or they choose tokens from
the whole row (the indexers of DeepSeek-V3.2). Their decoder is given one document after the other, as a row without
padding, with positions of its own making.

Decoders within models of pictures may have positions of several kinds for a token, of which the first says where
documents begin, and masks in which the tokens of a picture see each other.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import ModelOutput

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keywords that tell of the whole row, and that a layer is not given with one document."""

CACHES = ("past_key_values", "cache_params", "mems", "state")
"""Fields of outputs that continue a row."""


@dataclass
class Documents:
    """The rows that a model computes now.

    Attributes:
        spans: Of each row, where documents begin and end; None where each row is one document.
        noted: Whether the model around the decoder runs now, which has noted them.
    """

    spans: list[list[tuple[int, int]]] | None = None
    noted: bool = False

    def note(self, position_ids: Tensor | None) -> None:
        """Read where documents begin: where positions, of shape (batch, tokens), begin again at 0.

        Of positions of several kinds, (4, batch, tokens), those of text come first; three kinds are of rows that are
        one document each.
        """
        self.spans = None
        if position_ids is not None and position_ids.ndim == 3:
            position_ids = position_ids[0] if len(position_ids) == 4 else None
        if position_ids is None:
            return
        length = position_ids.shape[1]
        starts: list[set[int]] = [{0} for _ in position_ids]
        for row, token in (position_ids == 0).nonzero().tolist():
            starts[row].add(token)
        if any(len(row) > 1 for row in starts):
            self.spans = [list(pairwise([*sorted(row), length])) for row in starts]


def run_by_document(model: nn.Module) -> int:
    """Have each layer of a model that carries a state run once for each document, and return how many there are.

    Args:
        model: The model, with or without adapters, neither divided nor compiled.
    """
    decoder, documents = _noting(model, hides=False)
    layers = list(layers_with_state(decoder))
    for layer in layers:
        vars(layer)["documents"], vars(layer)["forward_of_one"] = documents, layer.forward
        vars(layer)["forward"] = MethodType(_forward, layer)
    return len(layers)


def run_decoder_by_document(model: nn.Module) -> None:
    """Have the decoder of a model run once for each document.

    Args:
        model: As for `run_by_document`.
    """
    decoder, documents = _noting(model, hides=True)
    vars(decoder)["documents"], vars(decoder)["forward_of_one"] = documents, decoder.forward
    vars(decoder)["forward"] = MethodType(_decoder_forward, decoder)


def _noting(model: nn.Module, *, hides: bool) -> tuple[nn.Module, Documents]:
    """Return the decoder of a model, and the documents that each forward pass will note.

    Args:
        model: The model.
        hides: Whether the model sees rows without padding instead of positions and boundaries.
    """
    from transformers import PreTrainedModel

    base = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    decoder, documents = base.get_decoder(), Documents()

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # A head of its own may call the decoder past the model around it.
        if module is base or not documents.noted:
            positions = kwargs.get("position_ids")
            documents.note(positions)
            # Also where rows are one document each: RoBERTa's own positions do not begin at 0.
            if hides and positions is not None and kwargs.get("attention_mask") is None:
                kwargs = {key: value for key, value in kwargs.items() if key not in ("position_ids", *BOUNDARIES)}
                kwargs["attention_mask"] = torch.ones_like(positions)
        documents.noted = documents.noted or module is base
        return args, kwargs

    def end(*_: Any) -> None:
        documents.noted = False

    for module in {base, decoder}:
        module.register_forward_pre_hook(note, with_kwargs=True)
    base.register_forward_hook(end, always_call=True)
    return decoder, documents


def layers_with_state(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a decoder that have a causal convolution."""
    for module in decoder.modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            yield module


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what the layer gives for each document of each row.

    Args:
        self: The layer.
        hidden_states: (batch, tokens, hidden).
        args: Of these and the next, what has a value for each token is divided as well.
        kwargs: See `args`.
    """
    spans, size = self.documents.spans, hidden_states.shape[:2]
    others = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
    if spans is None:
        return self.forward_of_one(hidden_states, *args, **others)

    results = _of_documents(self.forward_of_one, spans, size, (hidden_states, *args), others)
    if isinstance(results[0][0], tuple):
        firsts = [[cast(Tensor, result[0]) for result in row] for row in results]
        return torch.cat([torch.cat(row, dim=1) for row in firsts]), *results[0][0][1:]
    return torch.cat([torch.cat(row, dim=1) for row in results])


def _decoder_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the output of a decoder with the values of each document of each row.

    Args:
        self: The decoder.
        args: Of these and the next, what has a value for each token is divided.
        kwargs: See `args`.
    """
    spans = self.documents.spans
    if spans is None:
        return self.forward_of_one(*args, **kwargs)
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    size = torch.Size((len(spans), spans[0][-1][1]))
    results = _of_documents(self.forward_of_one, spans, size, args, kwargs)
    lengths = [[end - begin for begin, end in row] for row in spans]
    rows = [_joined(row, of_row) for row, of_row in zip(results, lengths, strict=True)]
    return _joined(rows, None)


def _of_documents(
    forward: Callable[..., Any],
    spans: list[list[tuple[int, int]]],
    size: torch.Size,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> list[list[Any]]:
    """Return the results of a forward pass of each document of each row; `size` is that of values of tokens."""

    def of(row: int, begin: int, end: int) -> Any:
        def part(value: Any) -> Any:
            has_tokens = isinstance(value, Tensor) and value.shape[:2] == size
            return value[row : row + 1, begin:end] if has_tokens else value

        return forward(*map(part, args), **{name: part(value) for name, value in kwargs.items()})

    return [[of(row, begin, end) for begin, end in parts] for row, parts in enumerate(spans)]


def _joined(parts: list[Any], lengths: list[int] | None) -> Any:
    """Join outputs: states, (rows, streams times tokens, width), and scores of routers, (tokens, experts).

    Args:
        parts: The outputs. Those of ProphetNet have a stream for each token ahead that it predicts; others have one.
        lengths: Tokens of each, where they are of documents of a row; None where they are of rows.
    """
    first = parts[0]
    if isinstance(first, ModelOutput):
        fields = {name: [part[name] for part in parts] for name in first if name not in CACHES}
        return type(first)(**{name: _joined(values, lengths) for name, values in fields.items()})
    if isinstance(first, tuple):
        return tuple(_joined(list(values), lengths) for values in zip(*parts, strict=True))
    if not isinstance(first, Tensor):
        return first
    if lengths is None or first.dim() != 3:
        return torch.cat(parts)
    streams = [part.unflatten(1, (-1, length)) for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(streams, dim=2).flatten(1, 2)


def tell_documents_apart(model: nn.Module) -> None:
    """Give text decoders of vision models the positions and masks that they tell packed documents apart by.

    Qwen2.5-VL, GLM-4.5V and others have positions of three kinds in a row, and mask documents by a fourth one before
    these. Of positions of text alone their code makes three (transformers 5.24), and documents see each other. The
    model around such a decoder computes positions of pictures only where it is given none. Gemma 3 and Gemma 4 look up
    pictures by positions in masks of sliding windows, as if each document were the first one of its row.
    """
    from transformers import PreTrainedModel

    modules = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    for module in modules:
        code = inspect.getsource(inspect.unwrap(type(module).forward))
        if "create_masks_for_vision_model(" in code:
            module.register_forward_pre_hook(_with_picture_masks, with_kwargs=True)
        if "position_ids.shape[0] == 4" not in code:
            continue
        if ".expand(3, position_ids.shape[0], -1)" in code:
            module.register_forward_pre_hook(_with_text_positions, with_kwargs=True)
        for around in modules:
            if module in around.children() and "get_rope_index" in dir(around):
                around.register_forward_pre_hook(_with_picture_positions, with_kwargs=True)


def _with_text_positions(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = kwargs.get("position_ids")
    if positions is not None and positions.ndim == 2:
        kwargs["position_ids"] = positions.expand(4, *positions.shape)
    return args, kwargs


_GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Inputs by which a model computes positions of pictures and videos."""


def _grids(inputs: dict[str, Any], index: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments by which `get_rope_index` computes positions; nothing without pictures and videos.

    Qwen2.5-Omni's forward method has other names for some of its own (transformers 5.24, `compute_3d_position_ids`).
    """
    grids = {name: inputs[name] for name in _GRIDS if inputs.get(name) is not None}
    names, mask = inspect.signature(index).parameters, inputs.get("feature_attention_mask")
    if grids and "second_per_grids" in names and inputs.get("video_second_per_grid") is not None:
        grids["second_per_grids"] = inputs["video_second_per_grid"]
    if grids and "audio_seqlens" in names and mask is not None:
        grids["audio_seqlens"] = mask.sum(1)
    return grids


def _with_picture_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a packed row the positions that the model computes for its documents as a padded batch, `(4, 1, tokens)`."""
    positions = kwargs.get("position_ids")
    index: Callable[..., Any] = cast(Any, module).get_rope_index
    grids = _grids(kwargs, index)
    if not grids or positions is None or positions.ndim != 2 or kwargs.get("attention_mask") is not None:
        return args, kwargs
    starts = (positions[0] == 0).nonzero().flatten()
    lengths = torch.diff(starts, append=starts.new_tensor([positions.shape[1]])).tolist()
    of_tokens = {name: kwargs[name] for name in ("input_ids", "mm_token_type_ids") if kwargs.get(name) is not None}
    of_tokens["attention_mask"] = torch.ones_like(positions)
    batch = {name: pad_sequence(value[0].split(lengths), batch_first=True) for name, value in of_tokens.items()}
    of_pictures, _ = index(**batch, **grids)
    kwargs["position_ids"] = torch.cat([positions[None], of_pictures[:, None, batch["attention_mask"].bool()]])
    return args, kwargs


def _with_picture_masks(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a packed row the masks that the model makes of it as one document, in which no document sees another one."""
    base, positions = cast(Any, module), kwargs.get("position_ids")
    config = base.config.get_text_config()
    kinds = kwargs.get("token_type_ids")
    if kinds is None and config.use_bidirectional_attention == "vision":
        kinds = kwargs.get("mm_token_type_ids")
    if kinds is None or positions is None or len(positions) > 1 or kwargs.get("attention_mask") is not None:
        return args, kwargs
    if config._attn_implementation not in ("sdpa", "eager"):
        return args, kwargs
    code: Any = inspect.getmodule(type(module))
    masks = code.create_masks_for_vision_model(
        config=config,
        inputs_embeds=torch.empty(*kinds.shape, 1, dtype=base.dtype, device=kinds.device),
        attention_mask=None,
        cache=None,
        position_ids=None,
        block_sequence_ids=code.get_block_sequence_ids_for_mask(kinds, device=kinds.device),
    )
    document = (positions[0] == 0).cumsum(0)
    apart = document[:, None] != document
    kwargs["attention_mask"] = {name: _without_others(mask, apart) for name, mask in masks.items()}
    return args, kwargs


def _without_others(mask: Tensor | None, apart: Tensor) -> Tensor:
    """Return a mask, `(1, 1, tokens, tokens)`, in which tokens that are apart do not see each other.

    Args:
        mask: True, or 0, where a token is seen; None where attention is causal.
        apart: Whether tokens are of different documents, `(tokens, tokens)`.
    """
    if mask is None:
        return (~apart).tril()[None, None]
    return mask.masked_fill(apart, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)
