"""Adapters that begin with parts of the base weights (PiSSA, arXiv 2404.02948; OLoRA, arXiv 2406.01775): their files.

PEFT takes s B0 A0 out of each adapted weight W and trains s B A beside the rest. What is saved must apply to W, which
everybody has: W - s B0 A0 + s B A is W with a plain adapter whose A is A above A0, and whose B is B beside -B0. From it
the trained half and the initial one are read again to the bit.
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


def keep_initial(model: "PeftModel") -> None:
    """Have a model keep the matrices that its new adapter begins with, on the CPU."""
    weights = get_peft_model_state_dict(model, save_embedding_layers=False)
    initial = {name: tensor.detach().cpu().clone() for name, tensor in weights.items() if name.endswith((_A, _B))}
    cast(Any, model).initial_weights = initial


def save_plain(model: "PeftModel", adapter: LoraAdapter, folder: Path) -> None:
    """Make an adapter that PEFT saved to a folder one that applies to the base weights as they were."""
    initial: dict[str, Tensor] = cast(Any, model).initial_weights
    weights = load_file(folder / ADAPTER_WEIGHTS)
    for name, first in initial.items():
        halves = (weights[name], first) if name.endswith(_A) else (weights[name], -first)
        weights[name] = torch.cat(halves, dim=_split_of(name)).contiguous()
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    saved, file = adapter.as_saved, folder / ADAPTER_CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    config |= {"r": saved.rank, "lora_alpha": saved.alpha, "init_lora_weights": True}
    config |= {"rank_pattern": saved.rank_pattern or {}, "alpha_pattern": saved.alpha_pattern or {}}
    file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def load_plain(model: "PeftModel", folder: Path) -> None:
    """Give a model the trained adapter of a folder, and its base weights what the initial one of there leaves of them.

    On the same device the model has these already, since its initial adapter is computed again as it was. Where that
    takes rows, it is not: the base is whole then, and the initial part is taken out as it was before.
    """
    before: dict[str, Tensor] = vars(model).get("initial_weights", {})
    weights, after = load_file(folder / ADAPTER_WEIGHTS), dict[str, Tensor]()
    for name in [name for name in weights if name.endswith((_A, _B))]:
        trained, first = weights[name].chunk(2, dim=_split_of(name))
        weights[name], after[name] = trained.contiguous(), (first if name.endswith(_A) else -first).contiguous()
    for module in [name.removesuffix(_A) for name in after if name.endswith(_A)]:
        if not before:
            take_out(model.get_submodule(module), after[module + _A], after[module + _B])
            continue
        pairs = [(initial[module + _A], initial[module + _B]) for initial in (before, after)]
        if not all(map(torch.equal, *pairs)):
            _move_base(model.get_submodule(module), *pairs)
    cast(Any, model).initial_weights = after
    set_peft_model_state_dict(model, weights)


def _split_of(name: str) -> int:
    """Return the dimension along which a matrix has its rank."""
    return 0 if name.endswith(_A) else 1


def take_out(module: nn.Module, a: Tensor, b: Tensor) -> None:
    """Take the initial part of an adapted layer out of its whole weight, to the bit as when the adapter began."""
    layer = cast(Any, module)
    weight = layer.get_base_layer().weight
    part = layer.scaling["default"] * b.to(weight.device) @ a.to(weight.device)
    with torch.no_grad():
        weight.copy_((weight.float() - (part.T if layer.fan_in_fan_out else part)).to(weight.dtype))


def _move_base(module: nn.Module, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
    """Put the initial part of an adapted layer's weight back, and take another one out."""
    layer = cast(Any, module)
    weight, scale = layer.get_base_layer().weight, layer.scaling["default"]
    parts = [scale * (b.to(weight.device) @ a.to(weight.device)) for a, b in (before, after)]
    with torch.no_grad():
        weight.copy_((weight.float() + parts[0] - parts[1]).to(weight.dtype))
