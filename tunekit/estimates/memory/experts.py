"""Bytes of routed experts and of the adapters on them.

Adapters that PEFT puts on a model with routed experts: not on the modules that it has, but on those that it once
had.

In transformers 5 the experts of a layer are fused into two tensors, and the router is a module of its own kind. For the
types below PEFT 0.21 takes a target as the name of the former linear layers and adapts the fused tensors instead
(`peft/utils/transformers_weight_conversion.py`): `down_proj` of every expert at the rank asked for, gate and up
projection together at twice the rank. The linear layers of dense MLPs and shared experts, which bear the same names,
then get no adapter. With other types a target matches linear modules alone, and their experts stay as they are.

Bytes that the routed experts of a layer keep and need in a training step, as transformers 5 runs them on CUDA.

The rows of all pairs of a token and an expert are gathered in the order of the experts, and go through the experts'
fused matrices in one product each (`grouped_mm`, the default of `transformers.integrations.moe`). Autocast does not
know that product (pytorch/pytorch#174763): it computes in the type of the weights, so in float32 where experts are
trained whole. PEFT adds an adapter's product to the whole fused matrix before it is used (`ParamWrapper`): a matrix as
large as the experts, which is kept for the backward pass, and whose gradient is made there.

Symbols: h hidden size, m width of an expert, k experts per token, E experts, x bytes of the experts' type.
"""

import math
import re
from collections.abc import Collection, Mapping
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


def expert_adapters(name: str, tensors: Mapping[str, tuple[int, ...]], num_experts: int) -> list[tuple[int, int, int]]:
    """Outputs and inputs of the adapter of a layer's experts, and how many times its rank it has for all of them.

    Nothing where the tensor is but a part of the one that has the adapter.

    Args:
        name: A tensor that `adapted_experts` found.
        tensors: Shapes by name.
        num_experts: Experts of the layer.
    """
    *_, outputs, inputs = shape = tensors.get(name) or tensors[name + ".weight"]
    leaf = last_part(name)
    if len(shape) > 2:
        return [(outputs, inputs, num_experts * (2 if leaf == "gate_up_proj" else 1))]
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


_CASTED = frozenset({"flex_olmo", "gpt_oss", "mellum", "olmoe", "qwen3_moe", "qwen3_next"})
_SIGMOID = frozenset({"deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "solar_open"})

ROUTED_IN_COMPUTE_TYPE = _CASTED | _SIGMOID
"""Types whose routers cast the weights of the experts to the type of their logits, or take a sigmoid, which keeps it.
In others they are float32 by a softmax, and so is the product with what the experts give."""


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


@dataclass(frozen=True)
class SparseMlp:
    """Bytes of the experts of one layer in a step."""

    kept: int
    """Kept for the backward pass."""
    logits: int
    """Of these the router's logits where the loss that balances experts reads them, so that they stay in any case."""
    passing: int
    """In the forward pass, beyond what is kept."""
    working: int
    """In the backward pass, beyond what was kept: the most of its moments."""


def sparse_mlp(
    mixture: Mixture,
    model_type: str,
    hidden: int,
    trained: Trained,
    *,
    compute_bytes: int,
    casted: bool,
    num_tokens: int,
    recomputes: bool,
    accumulates: bool,
    beside: int,
) -> SparseMlp:
    """Return the bytes of one layer's experts, without the MLP beside them.

    Args:
        mixture: Sizes of the experts.
        model_type: The name that transformers has for the model's code.
        hidden: Width of the residual stream.
        trained: What of them changes.
        compute_bytes: Bytes of the compute type.
        casted: Whether trained weights are float32 and autocast makes copies of them.
        num_tokens: Tokens of a micro-batch.
        recomputes: Whether the layer is computed again in the backward pass.
        accumulates: Whether gradients of an earlier micro-batch are there, which new ones are added to.
        beside: Bytes of the layer that are not there while its experts are computed again, nor in their backward pass.
    """
    h, e = hidden, compute_bytes
    x = 4 if trained.whole and casted else e
    w = e if model_type in ROUTED_IN_COMPUTE_TYPE and not (trained.whole and casted) else 4
    rows, inner = mixture.per_token * num_tokens, mixture.per_token * num_tokens * mixture.inner
    gate_up, down = mixture.expert_params(h)
    # What the rows are, where a gradient of the weight needs them; gate and up, the activation; what the experts give.
    # GPT-OSS bounds gate and up, and takes its activation apart, so that it keeps twice as many.
    selected, product = x * h * rows, x * inner
    gates = (6 if model_type == "gpt_oss" else 3) * product
    kept_bytes = (trained.gate_up * selected) + gates + trained.down * product + x * h * rows
    # The router's logits, softmax and choice, and the loss that balances experts.
    kept_bytes += num_tokens * ((4 + e) * mixture.num_experts + 56 * mixture.per_token)
    logits = 0 if model_type in _SIGMOID else e * mixture.num_experts * num_tokens
    kept_bytes += (e * h * num_tokens) if trained.router and not trained.whole else 0
    merged_gate_up = 0 if trained.whole or not trained.gate_up else x * gate_up
    merged_down = 0 if trained.whole or not trained.down else x * down
    kept_bytes += merged_gate_up + merged_down
    # What the rows are, and that they are weighted, and put back into the order of the tokens.
    unkept_rows = 0 if trained.gate_up else selected
    passing = 2 * w * h * rows + unkept_rows
    if recomputes:
        last = merged_down + x * h * rows + max(product, 2 * w * h * rows)
        # Besides, the stream and its norm.
        passing = merged_gate_up + selected + max(4 * product, last) + 2 * x * h * num_tokens
    # In the layer's code are the stream, and the norm that the router reads, where nothing keeps them.
    normed = e == 2 or not trained.router if trained.whole else not trained.router
    named = (x * h * num_tokens if normed else 0) + (e * h * num_tokens if e == 2 and not trained.whole else 0)
    stays = trained.whole and not accumulates
    gone_down = trained.down * product + x * h * rows
    moments = (
        # Weighting: the gradient of each pair, and of both that were multiplied.
        3 * w * h * rows,
        # The end of computing again, whose results wait beside the gradient that asked for them.
        2 * w * h * rows + unkept_rows + named if recomputes else 0,
        # The last product: gradients of its rows and its weight.
        product + (x * down if trained.down else 0),
        # Where gate and up are taken apart: gradients of both and of their product.
        (3 * product if trained.whole else gates) - gone_down - merged_down + (x * down if stays else 0),
        # The first product: the gradient of both, of the rows and of its weight.
        2 * product + selected - gates - gone_down - merged_down
        + (x * gate_up if trained.gate_up else 0) + (x * down if stays else 0),
    )  # fmt: skip
    return SparseMlp(kept=kept_bytes, logits=logits, passing=passing, working=max(moments) - beside)
