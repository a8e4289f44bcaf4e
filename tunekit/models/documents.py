"""Layers that carry a state along a row, run once for each of its documents.

State-space layers, linear attention and short convolutions read a row from its beginning to its end, whatever the masks
of attention are. Their fast kernels take boundaries of documents; transformers' own code does not. Where rows hold
several documents, each such layer is given one after the other here, as if it stood alone. All other layers work on
single tokens, but for attention, which keeps documents apart by itself.

Such layers are known by a causal convolution of their own, which all of these families have before their recurrence
(Mamba, gated delta rule, RG-LRU, LFM2's short convolution).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keywords that tell of the whole row, and that a layer is not given with one document."""


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
        """Read where documents begin: where positions, of shape (batch, tokens), begin again at 0."""
        self.spans = None
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
    from transformers import PreTrainedModel

    base = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    decoder, documents = base.get_decoder(), Documents()

    def note(module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        # A head of its own may call the decoder past the model around it.
        if module is base or not documents.noted:
            documents.note(kwargs.get("position_ids"))
        documents.noted = documents.noted or module is base

    def end(*_: Any) -> None:
        documents.noted = False

    for module in {base, decoder}:
        module.register_forward_pre_hook(note, with_kwargs=True)
    base.register_forward_hook(end, always_call=True)
    layers = list(layers_with_state(decoder))
    for layer in layers:
        vars(layer)["documents"], vars(layer)["forward_of_one"] = documents, layer.forward
        vars(layer)["forward"] = MethodType(_forward, layer)
    return len(layers)


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

    def of(row: int, begin: int, end: int) -> Any:
        def part(value: Any) -> Any:
            has_tokens = isinstance(value, Tensor) and value.shape[:2] == size
            return value[row : row + 1, begin:end] if has_tokens else value

        given = {name: part(value) for name, value in others.items()}
        return self.forward_of_one(part(hidden_states), *map(part, args), **given)

    results = [[of(row, begin, end) for begin, end in parts] for row, parts in enumerate(spans)]
    if isinstance(results[0][0], tuple):
        firsts = [[cast(Tensor, result[0]) for result in row] for row in results]
        return torch.cat([torch.cat(row, dim=1) for row in firsts]), *results[0][0][1:]
    return torch.cat([torch.cat(row, dim=1) for row in results])
