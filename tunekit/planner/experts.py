"""What PEFT adapts of a model with routed experts: not the modules that it has, but those that it once had.

In transformers 5 the experts of a layer are fused into two tensors, and the router is a module of its own kind. For the
types below PEFT 0.21 takes a target as the name of the former linear layers and adapts the fused tensors instead
(`peft/utils/transformers_weight_conversion.py`): `down_proj` of every expert at the rank asked for, gate and up
projection together at twice the rank. The linear layers of dense MLPs and shared experts, which bear the same names,
then get no adapter. With other types a target matches linear modules alone, and their experts stay as they are.
"""

from collections.abc import Mapping

Sizes = dict[str, tuple[int, int]]
"""Outputs and inputs by name: what an adapter of rank r adds is r x (outputs + inputs)."""

_LIKE_MIXTRAL = {"gate": "gate", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_LIKE_QWEN2_MOE = {"gate": "gate", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}

FORMER_LINEARS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _LIKE_MIXTRAL),
    **dict.fromkeys(
        (
            "afmoe",
            "beam",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "longcat_flash",
            "mellum",
            "olmoe",
            "qwen3_moe",
            "qwen3_next",
            "solar_open",
        ),
        _LIKE_QWEN2_MOE,
    ),
}
"""Of each type that PEFT treats so: what became of the former linear layers of its experts, by their last names."""


def fused_experts(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, with the experts that files store one by one as the two tensors for all of them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        layer, experts, rest = name.partition(".experts.")
        number, _, leaf = rest.removesuffix(".weight").partition(".")
        if not number.isdigit() or leaf not in _FUSED:
            found[name] = shape
            continue
        part = f"{layer}{experts}{_FUSED[leaf]}"
        num, outputs, _ = found.get(part, (0, 0, 0))
        found[part] = (max(num, int(number) + 1), outputs + (shape[0] if number == "0" else 0), shape[1])
    return found


def adapted_experts(
    tensors: Mapping[str, tuple[int, ...]], former: Mapping[str, str], targets: str | list[str]
) -> Sizes:
    """What of the experts and routers gets an adapter, with the sizes of all matrices of a tensor taken together.

    Args:
        tensors: Shapes by name; the experts of a layer fused, or each for itself as files store them.
        former: What became of the former linear layers.
        targets: Names of modules, or `all-linear`.
    """
    asked = set(former.values()) if targets == "all-linear" else {former.get(_leaf(target)) for target in targets}
    found: Sizes = {}
    for name, shape in tensors.items():
        module = name.removesuffix(".weight")
        if ".experts." not in name:
            part = "gate" if _leaf(module) == "gate" else None
        else:
            part = former.get(_leaf(module), _leaf(module))
        if part is None or part not in asked or len(shape) < 2:
            continue
        *experts, outputs, inputs = shape
        times = experts[0] if experts else 1
        if part == "gate_up_proj":
            # Twice the rank over outputs of both: per expert 2r x (2i + h). Apart they are two of i outputs.
            found[module] = (2 * times * outputs, (2 if experts else 1) * times * inputs)
        else:
            found[module] = (times * outputs, times * inputs)
    return found


_FUSED = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
"""Tensors for all experts of a layer, by the last names of those for one expert in files."""


def is_former_linear(target: str, former: Mapping[str, str]) -> bool:
    """Whether a target names what once was a linear layer, so that PEFT looks for no module of that name."""
    return _leaf(target) in former


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
