"""Adapters beside base weights that a run changes, and their files, which apply to the base as everybody has it.

Some begin with parts of the base weights (PiSSA, arXiv 2404.02948; OLoRA, arXiv 2406.01775): PEFT takes s B0 A0 out of
each adapted weight W and trains s B A beside the rest. Others are merged into the weights at times and begin anew
(ReLoRA, arXiv 2307.05695). Either way the model computes with W + s B1 A1 + ... + s Bn An + s B A, where B1 is -B0 in
the first case. That is W with a plain adapter, whose A is A above A1 to An, and whose B is B beside B1 to Bn. From its
file the trained matrices and the parts of the base are read again to the bit.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tunekit.probe.origin import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tunekit.recipe.sections.adapters import LoraAdapter

if TYPE_CHECKING:
    from peft import PeftModel

_A, _B = ".lora_A.weight", ".lora_B.weight"

Pair = tuple[Tensor, Tensor]
"""Matrices A, `(rank, inputs)`, and B, `(outputs, rank)`."""


def matrices(model: "PeftModel") -> dict[str, Tensor]:
    """Return the matrices A and B of a model's adapter on the CPU, by their names in files."""
    return {name: tensor.detach().cpu().clone() for name, tensor in _own(model).items()}


def _own(model: "PeftModel") -> dict[str, Tensor]:
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor for name, tensor in weights.items() if name.endswith((_A, _B))}


def parts_of(model: "PeftModel") -> dict[str, Tensor]:
    """Return the parts that were added to a model's base weights, by the names of their matrices in files."""
    parts: dict[str, Tensor] = vars(model).setdefault("base_parts", {})
    return parts


def keep_initial(model: "PeftModel") -> None:
    """Have a model keep the matrices that its new adapter begins with, which are subtracted from the base weights."""
    parts_of(model).update({name: -one if name.endswith(_B) else one for name, one in matrices(model).items()})


def keep_merged(model: "PeftModel", merged: dict[str, Tensor]) -> None:
    """Have a model keep matrices that were merged into its base weights."""
    parts = parts_of(model)
    for name, matrix in merged.items():
        parts[name] = torch.cat((parts[name], matrix), dim=_rank_dim(name)) if name in parts else matrix


def save_plain(model: "PeftModel", adapter: LoraAdapter, folder: Path) -> None:
    """Make an adapter that PEFT saved to a folder one that applies to the base weights as they were."""
    parts = parts_of(model)
    if not parts:
        return
    weights, times = load_file(folder / ADAPTER_WEIGHTS), 1
    for name, part in parts.items():
        dim = _rank_dim(name)
        times = 1 + part.shape[dim] // weights[name].shape[dim]
        weights[name] = torch.cat((weights[name], part), dim=dim).contiguous()
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    saved, file = adapter.of_times_the_rank(times), folder / ADAPTER_CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"r": saved.rank, "lora_alpha": saved.alpha, "init_lora_weights": True}
    config |= {"rank_pattern": saved.rank_pattern or {}, "alpha_pattern": saved.alpha_pattern or {}}
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def load_plain(model: "PeftModel", folder: Path) -> None:
    """Give a model the trained adapter of a folder, and its base weights the parts that were added to them.

    On the same device a model whose initial adapter was taken out of them has these already, since that is computed
    again as it was. Where that takes rows, it is not: the base is whole then, as it is before all restarts.
    """
    weights, before, after = load_file(folder / ADAPTER_WEIGHTS), parts_of(model), dict[str, Tensor]()
    for name, own in _own(model).items():
        dim = _rank_dim(name)
        rank, total = own.shape[dim], weights[name].shape[dim]
        if total > rank:
            after[name] = weights[name].narrow(dim, rank, total - rank).contiguous()
            weights[name] = weights[name].narrow(dim, 0, rank).contiguous()
    for module in [name.removesuffix(_A) for name in after if name.endswith(_A)]:
        layer, (a, b) = model.get_submodule(module), _pair(after, module)
        if not before:
            rank = len(weights[module + _A])
            for each in zip(torch.split(a, rank), torch.split(b, rank, dim=1), strict=True):
                add(layer, each)
        elif not all(map(torch.equal, _pair(before, module), (a, b))):
            a_before, b_before = _pair(before, module)
            add(layer, (a_before, -b_before), (a, b))
    cast(Any, model).base_parts = after
    set_peft_model_state_dict(model, weights)


def _pair(parts: dict[str, Tensor], module: str) -> Pair:
    return parts[module + _A], parts[module + _B]


def _rank_dim(name: str) -> int:
    """Return the dimension along which a matrix has its rank."""
    return 0 if name.endswith(_A) else 1


def add(module: nn.Module, *pairs: Pair) -> None:
    """Add the scaled products of pairs to the weight of an adapted layer, in float32, and round it once."""
    layer = cast(Any, module)
    weight = layer.get_base_layer().weight
    with torch.no_grad():
        total = weight.float()
        for a, b in pairs:
            part = layer.scaling["default"] * b.to(weight.device).contiguous() @ a.to(weight.device).contiguous()
            total = total + (part.T if layer.fan_in_fan_out else part)
        weight.copy_(total.to(weight.dtype))
