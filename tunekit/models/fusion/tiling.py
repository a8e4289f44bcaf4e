"""MLPs in tiles: a part of the tokens at a time, computed again in the backward pass (ALST, arXiv 2506.13996).

An MLP computes each token by itself, so that its wide intermediate values need be there for some tokens only. Each tile
is a checkpoint of torch's, which, unlike Liger's and DeepSpeed's tiled MLPs, restores autocast where it computes again,
and leaves gradients of weights to autograd, which sums those of the tiles.

MLPs are known by structure, as for fusion, and the *instance* is given another forward around the one that it has,
fused or not, when it is proved that its tiles give the same outputs and gradients as all tokens together.
"""

from collections.abc import Hashable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tunekit.errors import ModelError
from tunekit.models.fusion.forms import gated_rule
from tunekit.models.fusion.proof import Difference, Fusion, differ

TILE, WHOLE = "tile_tokens", "forward_of_tile"
"""Names of the attributes of a tiled module that hold the tokens of a tile, and the forward for one."""

TRIED_TOKENS = 3
"""Tokens of a tile in the proof, whose input has ten: the last tile is a smaller one."""


def tile_mlps(model: nn.Module, tile_tokens: int) -> int:
    """Have the MLP of each decoder layer compute its tokens in tiles, and return how many there are.

    Args:
        model: The model, with its adapters and fused, neither divided nor compiled.
        tile_tokens: Tokens of a tile.

    Raises:
        ModelError: A layer has no MLP whose tiles are proved to compute the same.
    """
    from transformers import PreTrainedModel

    base = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    proofs: dict[Hashable, Difference] = {}
    layers = base.get_decoder().layers
    for number, layer in enumerate(layers):
        mlps = [(module, fusion) for module in layer.modules() if isinstance(fusion := gated_rule(module), Fusion)]
        if len(mlps) != 1:
            raise ModelError(
                f"train.tiled_mlp: layer {number} of {type(base).__name__} has {len(mlps)} gated MLPs, not one",
                hint="unset it",
            )
        module, fusion = mlps[0]
        key = (type(module), fusion.settings, fusion.sizes)
        if key not in proofs:
            proofs[key] = _prove(fusion)
        if not proofs[key].is_rounding:
            raise ModelError(f"train.tiled_mlp: in {type(module).__name__} {proofs[key].words()}", hint="unset it")
        _tile(module, tile_tokens)
    return len(layers)


def _prove(fusion: Fusion) -> Difference:
    """Compare an MLP's own code on all tokens and in tiles, on a stand-in.

    In float64, since gradients of weights are sums over tokens, which tiles sum in another order. A fused forward was
    proved to compute the same for any tokens.
    """
    cpu, dtype = torch.device("cpu"), torch.float64
    with torch.random.fork_rng(devices=[]):
        old, new = (fusion.trial(torch.Generator().manual_seed(0), cpu, dtype) for _ in range(2))
    _tile(new.module, TRIED_TOKENS)
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return differ(old, new, "float64 on cpu", dtype)


def _tile(module: nn.Module, tile_tokens: int) -> None:
    vars(module)[TILE], vars(module)[WHOLE] = tile_tokens, module.forward
    vars(module)["forward"] = MethodType(_forward, module)


def _forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Return the MLP of each tile of tokens, of shape (..., hidden)."""
    tiles = torch.split(hidden_states.flatten(0, -2).unsqueeze(0), self.tile_tokens, dim=1)
    if torch.is_grad_enabled():
        outputs = [
            checkpoint(self.forward_of_tile, tile, use_reentrant=False, preserve_rng_state=False) for tile in tiles
        ]
    else:
        outputs = [self.forward_of_tile(tile) for tile in tiles]
    return torch.cat(outputs, dim=1).view(hidden_states.shape)
