"""Sizes of routed experts, and the adapters that PEFT puts on them: not on the modules that a model has, but on those
that it once had.

In transformers 5 the experts of a layer are fused into two tensors, and the router is a module of its own kind. Of some
types (`former_linears` in `model_types.yaml`) PEFT 0.21 takes a target as the name of the former linear layers and
adapts the fused tensors instead (`peft/utils/transformers_weight_conversion.py`): `down_proj` of every expert at the
rank asked for, gate and up projection together at twice the rank. The linear layers of dense MLPs and shared experts,
which bear the same names, then get no adapter. With other types a target matches linear modules alone, and their
experts stay as they are.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

Sizes = dict[str, tuple[int, int]]
"""Outputs and inputs by name: what an adapter of rank r adds is r x (outputs + inputs)."""


def fused_experts(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes by name, with the experts that files store one by one as the two tensors for all of them."""
    fused: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        layer, experts, suffix = name.partition(".experts.")
        number, _, leaf = suffix.removesuffix(".weight").partition(".")
        if not number.isdigit() or leaf not in _FUSED:
            fused[name] = shape
            continue
        part = f"{layer}{experts}{_FUSED[leaf]}"
        num, outputs, _ = fused.get(part, (0, 0, 0))
        fused[part] = (max(num, int(number) + 1), outputs + (shape[0] if number == "0" else 0), shape[1])
    return fused


@dataclass(frozen=True)
class Mixture:
    """The sizes of a model's routed experts, all those of a layer alike."""

    num_layers: int
    """Layers that have experts."""
    num_experts: int
    """Of such a layer."""
    per_token: int
    """Experts that a token goes through."""
    inner: int
    """Width of one expert."""
    shared: int
    """Width of the MLP beside the experts that every token goes through; 0 where there is none."""
    dense: int
    """Width of the MLP in the layers without experts; 0 where there are none."""

    def expert_params(self, hidden: int) -> tuple[int, int]:
        """Parameters of all gate and up projections of a layer, and of all down projections."""
        layer_params = self.num_experts * self.inner * hidden
        return 2 * layer_params, layer_params


def mixture_of(
    tensors: Mapping[str, tuple[int, ...]], num_experts: int, num_experts_per_token: int, hidden: int
) -> Mixture | None:
    """The experts among a model's tensors, fused or each for itself; None where there are none.

    Args:
        tensors: Shapes by name.
        num_experts: Routed experts of a layer that has them.
        num_experts_per_token: Those that a token goes through.
        hidden: Width of the residual stream.
    """
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    if not layers:
        return None
    elements = sum(
        math.prod(shape)
        for name, shape in tensors.items()
        if ".experts." in name and len(shape) >= 2 and not name.endswith("_bias")
    )
    mlps = {name: shape[0] for name, shape in tensors.items() if _DENSE_MLP.search(name) and ".experts." not in name}
    shared = [width for name, width in mlps.items() if "shared_expert" in name]
    dense = [width for name, width in mlps.items() if "shared_expert" not in name]
    return Mixture(
        num_layers=len(layers),
        num_experts=num_experts,
        per_token=num_experts_per_token,
        inner=elements // (3 * hidden * num_experts * len(layers)),
        shared=max(shared, default=0),
        dense=max(dense, default=0),
    )


_DENSE_MLP = re.compile(r"\.(up_proj|w3)\.weight$")


def adapted_experts(
    tensors: Mapping[str, tuple[int, ...]], former: Mapping[str, str], targets: str | list[str]
) -> Sizes:
    """Return the adapted matrices of experts and routers, with the sizes of all matrices of a tensor taken together.

    Args:
        tensors: Shapes by name, the experts of a layer fused.
        former: What became of the former linear layers.
        targets: Names of modules, or `all-linear`.
    """
    target_names = (
        set(former.values()) if targets == "all-linear" else {former.get(last_part(target)) for target in targets}
    )
    sizes: Sizes = {}
    for name, shape in tensors.items():
        module = name.removesuffix(".weight")
        part = last_part(module)
        if part not in target_names or len(shape) < 2 or (part == "gate") == (".experts." in name):
            continue
        *experts, outputs, inputs = shape
        # Gate and up projection together have twice the rank.
        times = math.prod(experts) * (2 if experts and part == "gate_up_proj" else 1)
        sizes[module] = (times * outputs, times * inputs)
    return sizes


def parameter_sizes(tensors: Mapping[str, tuple[int, ...]], names: Iterable[str]) -> Sizes:
    """Return the sizes of all matrices of each named stack of experts taken together."""
    stacks = {name: tensors[name] for name in names if len(tensors[name]) == 3}
    return {name: (num * outputs, num * inputs) for name, (num, outputs, inputs) in stacks.items()}


def expert_adapters(
    name: str, tensors: Mapping[str, tuple[int, ...]], num_experts: int, *, is_double: bool
) -> list[tuple[int, int, int]]:
    """Outputs and inputs of the adapter of a layer's experts, and how many times its rank it has for all of them.

    Nothing where the tensor is but a part of the one that has the adapter.

    Args:
        name: A tensor that `adapted_experts` found.
        tensors: Shapes by name.
        num_experts: Experts of the layer.
        is_double: Whether a stack has twice the rank.
    """
    *_, outputs, inputs = shape = tensors.get(name) or tensors[name + ".weight"]
    leaf = last_part(name)
    if len(shape) > 2:
        return [(outputs, inputs, num_experts * (2 if is_double else 1))]
    if ".experts.0." not in name or leaf in {"w3", "up_proj"}:
        return []
    return [(outputs, inputs, num_experts) if _FUSED[leaf] == "down_proj" else (2 * outputs, inputs, 2 * num_experts)]


_FUSED = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
"""Tensors for all experts of a layer, by the last names of those for one expert in files."""


def last_part(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


@dataclass(frozen=True)
class Trained:
    """Trained parts of a layer's experts and router."""

    whole: bool
    """True if all of it is trained, without adapters."""
    gate_up: bool
    """True if gate and up projections are trained."""
    down: bool
    router: bool


ROUTERS = frozenset({"gate", "router"})
"""Names of modules that choose experts."""


def trained_experts(adapted: Collection[str] | None) -> Trained:
    """Return which parts of the routed experts and their routers are trained.

    Args:
        adapted: Names of what has an adapter, as `ModelFacts.adapted` has them; None where all is trained.
    """
    if adapted is None:
        return Trained(whole=True, gate_up=True, down=True, router=True)
    experts = {name.rpartition(".")[2] for name in adapted if ".experts." in name}
    return Trained(
        whole=False,
        gate_up="gate_up_proj" in experts,
        down="down_proj" in experts,
        router=any(name.rpartition(".")[2] in ROUTERS for name in adapted),
    )
