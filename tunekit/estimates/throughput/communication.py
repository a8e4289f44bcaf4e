"""Communication of devices in a step, with each other and with their host: bytes, links and bandwidths.

Bytes are those that one device sends; it receives as many at the same time. Collectives are counted as rings, in which
gathering or reducing S bytes among n devices has each send (n - 1)/n S, and an all-reduce does both: the convention of
the bus bandwidth that NCCL's tests print (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that time is these
bytes over that bandwidth. The delay of starting a transfer is not counted; it matters for small ones.

Symbols: P parameters, L layers, T tokens of a micro-batch, h hidden size, q = heads x head size, kv = key-value heads x
head size, e bytes of the compute type.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from tunekit.estimates.facts import Facts, Figures, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.states import BYTES, Dtype, num_trainable_params, weights_bytes
from tunekit.estimates.passes import SFT, Passes
from tunekit.recipe.sections.model import FullAdapter, LoraAdapter, QloraAdapter


class Range(Facts):
    """Two ends between which a figure is expected."""

    low: float
    high: float

    def times(self, factor: float) -> "Range":
        """Both ends multiplied."""
        return Range(low=self.low * factor, high=self.high * factor)

    def plus(self, other: "Range") -> "Range":
        """Both ends added."""
        return Range(low=self.low + other.low, high=self.high + other.high)


NVLINK_SHARE = Range(low=0.33, high=0.85)
"""Share of the peak of links between the devices of a node that collectives reach.

High: 82 % in a ring of 8 H200 (github.com/stas00/ml-engineering, network/benchmarks/results/all-reduce-8xH200.md,
August 2026), 84 % between two H100 (github.com/NVIDIA/nccl/issues/1264). Low: 98 of 300 GB/s, worked out from LoRA
with ZeRO-3 of a 72B model on 4 A100, 17.6 s for 8 micro-batches of 256 tokens that cannot hide it
(github.com/QwenLM/Qwen, README, "Profiling of Memory and Speed")."""

PCIE_SHARE = Range(low=0.25, high=0.55)
"""The same where there is only PCIe. 28 of 63 GB/s among 8 RTX 5090, 35 among 4 (github.com/NVIDIA/nccl/issues/1639);
low: 12.7 of 31.5 GB/s among RTX 4090 that have direct access (github.com/tinygrad/open-gpu-kernel-modules/pull/22),
less where they go through main memory."""

NETWORK_SHARE = Range(low=0.45, high=0.95)
"""Share of the peak of the network. High: 46 to 48 of 50 GB/s an adapter (github.com/NVIDIA/nccl-tests/issues/290);
low: 180 of 400 GB/s a node (github.com/NVIDIA/nccl/issues/1031). A network that is not set up well is slower still:
100 of 400 GB/s (github.com/NVIDIA/nccl/issues/2409)."""

HOST_SHARE = Range(low=0.4, high=0.87)
"""Share of the peak of PCIe to main memory. High: 54.8 of 63 GB/s (github.com/aigatech/vpbenchmarking, 8 H100); low:
where devices share a switch, a choice and not a measurement."""

CPU_PARAMS_PER_SECOND = Range(low=0.35e9, high=3.4e9)
"""Parameters that the processors of a node update in a second, with Adam in float32.

High: torchtune's full training of a 70B model on 8 A100, offloaded with a fused optimizer, took 20.9 s for a step of
32,768 tokens (github.com/pytorch/torchtune, README of September 2024), of which computing takes at least 10.7 s: 6.9
billion a second in bfloat16, half as many in float32. Low: a 7B model on 8 A800, whose step of 64 rows of 4,096 tokens
took 35.4 s with its optimizer offloaded and 15.3 s without (gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a,
ZeRO-2)."""

STATES_BYTES_ON_DISK = 28
"""Bytes that a step reads and writes for each trained parameter whose states are on a disk: float32 gradient, weight
and two states are read, the last three written back (ZeRO-Infinity, arXiv 2104.07857, section 3)."""

LINKS = {
    "node": "between the devices of a node",
    "network": "between nodes",
    "host": "to main memory",
    "disk": "to disk",
}


Link = Literal["devices", "host", "disk"]

Hides = Literal["compute", "attention", "nothing", "generation"]


@dataclass(frozen=True)
class Transfer:
    """Something that every device sends.

    Attributes:
        what: What it is, in words.
        sent_bytes: Bytes that a device sends each time.
        link: `devices` for what goes to other devices, by whatever link there is.
        hides_behind: What the device computes meanwhile; what attention hides depends on how it is done. What
            generating answers sends is no part of a micro-batch.
        per_step: Whether it happens once an optimizer step, at the end of the last micro-batch, not in every one.
        num_in_node: Devices that take part and are in one node; of a disk those that share it.
        num_devices: All that take part.
    """

    what: str
    sent_bytes: float
    link: Link
    hides_behind: Hides
    per_step: bool = False
    num_in_node: int = 1
    num_devices: int = 1

    @property
    def crosses_nodes(self) -> bool:
        """True if it crosses the network."""
        return self.link == "devices" and self.num_in_node < self.num_devices

    @property
    def link_name(self) -> str:
        """The slowest link on its way, in words."""
        return LINKS["network" if self.crosses_nodes else "node" if self.link == "devices" else self.link]

    def seconds(self, figures: Figures) -> Range | None:
        """Return how long it takes by itself; None where a link's speed is not known."""
        speed = self._bytes_per_second(figures)
        return None if speed is None else Range(low=self.sent_bytes / speed.high, high=self.sent_bytes / speed.low)

    def _bytes_per_second(self, figures: Figures) -> Range | None:
        host, link, network = (
            figures.host_bytes_per_second,
            figures.link_bytes_per_second,
            figures.network_bytes_per_second,
        )
        if self.link == "host":
            return None if host is None else HOST_SHARE.times(host)
        if self.link == "disk":
            disk = figures.disk_bytes_per_second
            # What a file says of its disk is what it reaches.
            return None if disk is None else Range(low=disk, high=disk).times(1 / self.num_in_node)
        inside = None
        if link is not None:
            inside = (PCIE_SHARE if host is not None and link <= host else NVLINK_SHARE).times(link)
        if not self.crosses_nodes:
            return inside
        if network is None or (inside is None and self.num_in_node > 1):
            return None
        # A ring enters and leaves a node once; NCCL lays as many rings as there are adapters.
        across = NETWORK_SHARE.times(network * self.num_in_node)
        if inside is None or self.num_in_node == 1:
            return across
        return Range(low=min(inside.low, across.low), high=min(inside.high, across.high))


def transfers_of(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    dtype: Dtype,
    layout: Layout,
    *,
    num_nodes: int,
    num_tokens: float,
    gradient_checkpointing: bool,
    passes: Passes = SFT,
) -> tuple[Transfer, ...]:
    """All that a device sends in a step.

    Args:
        model: The model.
        adapter: What is trained.
        dtype: Type of the products.
        layout: How the run is spread.
        num_nodes: Machines that its processes are on, as many on each.
        num_tokens: Tokens of a micro-batch.
        gradient_checkpointing: Whether layers, and what they send, are computed again.
        passes: What the method does in a step.
    """
    per_node = layout.num_processes // num_nodes
    shards, tensor = layout.num_shards, layout.tp_size
    everything = [
        *_of_states(model, adapter, dtype, layout, _Group(shards, tensor, per_node), passes),
        *_between_replicas(model, adapter, dtype, layout, _Group(layout.dp_replicate_size, shards * tensor, per_node)),
        *_of_activations(model, dtype, layout, num_tokens, per_node, passes, again=gradient_checkpointing),
        *_of_offloading(model, adapter, dtype, layout, per_node, passes),
    ]
    return tuple(transfer for transfer in everything if transfer.sent_bytes > 0)


@dataclass(frozen=True)
class _Group:
    """Devices that take part in a collective: every `stride`-th, in the order of Accelerate's mesh."""

    size: int
    stride: int
    per_node: int

    @property
    def num_in_node(self) -> int:
        return min(self.size, max(1, self.per_node // self.stride))

    def sends(self, what: str, size_bytes: float, hides: Hides, *, per_step: bool = False) -> Transfer:
        """A ring in which `size_bytes` are gathered, or reduced."""
        sent = (self.size - 1) / self.size * size_bytes
        return Transfer(what, sent, "devices", hides, per_step, self.num_in_node, self.size)


def gathered_bytes(model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype) -> float:
    """Bytes of all weights in the type in which they are gathered.

    Accelerate's FSDP2 and DeepSpeed gather in the compute type. Of 4-bit weights the packed values are gathered, where
    they are divided at all; their constants are on every device.
    """
    trained = 0 if isinstance(adapter, FullAdapter) else num_trainable_params(model, adapter)
    if not isinstance(adapter, QloraAdapter):
        return float(BYTES[dtype] * (model.num_params + trained))
    quantised = model.num_linear_params
    return 0.5 * quantised + BYTES[dtype] * (model.num_params - quantised + trained)


def _of_states(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    dtype: Dtype,
    layout: Layout,
    group: _Group,
    passes: Passes,
) -> Iterator[Transfer]:
    """Weights and gradients among the devices that divide them.

    FSDP2 gathers a layer before its forward pass and, resharded, again before its backward pass; a frozen base is
    gathered too, but has no gradients. Without `sync_each_batch` Accelerate reduces in the last micro-batch alone. ZeRO
    gathers what is divided at its stage: ZeRO-3 weights, the others what the optimizer updated.

    Passes without gradients gather as well, but for one that follows a forward pass whose weights stayed. FSDP2 has a
    reference model of its own in one unit: gathered before it computes, once for all where it stays.
    """
    weights = gathered_bytes(model, adapter, dtype) / layout.tp_size
    gradients = BYTES[dtype] * num_trainable_params(model, adapter) / layout.tp_size
    match layout.strategy:
        case "fsdp2" | "zero3":
            twice = layout.strategy == "zero3" or layout.reshard_after_forward
            again, alone = passes.num_forwards, 0.0
            if passes.keeps_reference and layout.strategy == "fsdp2":
                again, alone = again - passes.num_reference_forwards, twice * passes.num_reference_forwards
            if not twice and (passes.refers_in_micro_batch or passes.estimates):
                again = 0
            yield group.sends("gathering weights", ((2 if twice else 1) + again) * weights, "compute")
            yield group.sends("gathering the reference", alone * weights, "nothing")
            often = _times_generating(passes, layout)
            yield group.sends("gathering weights to generate", often * weights, "generation", per_step=True)
            once = layout.strategy == "fsdp2" and not layout.sync_each_batch
            yield group.sends("reducing gradients", gradients, "compute", per_step=once)
        case "zero1" | "zero2":
            yield group.sends("reducing gradients", gradients, "compute", per_step=layout.strategy == "zero1")
            yield group.sends("gathering updated weights", gradients, "nothing", per_step=True)
        case "single" | "ddp":
            pass
        case _:
            assert_never(layout.strategy)


def _times_generating(passes: Passes, layout: Layout) -> float:
    """Return how often in an optimizer step all weights are gathered to generate.

    FSDP2 frees each layer again, unless its weights stay, and so gathers for every token; TRL has ZeRO-3 gather all of
    them at once.
    """
    generation = passes.generation
    if generation is None:
        return 0.0
    every_token = layout.strategy == "fsdp2" and layout.reshard_after_forward
    return (generation.completion_tokens if every_token else 1) / generation.num_steps


def _between_replicas(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype, layout: Layout, group: _Group
) -> Iterator[Transfer]:
    """Gradients among devices that hold a copy each: DDP's in float32 as its weights, FSDP2's in the compute type."""
    each = 4 if layout.strategy == "ddp" else BYTES[dtype]
    gradients = each * num_trainable_params(model, adapter) / layout.tp_size / layout.num_shards
    often = layout.strategy == "fsdp2" and layout.sync_each_batch
    yield group.sends("summing gradients", 2 * gradients, "compute", per_step=not often)


def _of_activations(
    model: ModelFacts, dtype: Dtype, layout: Layout, num_tokens: float, per_node: int, passes: Passes, *, again: bool
) -> Iterator[Transfer]:
    """Yield the transfers between devices that compute one micro-batch together, in every layer.

    Tensor parallel sums activations twice in the forward pass of a layer (arXiv 1909.08053, section 3). In the
    backward pass transformers sums the gradient of each product's own input, so five times in Llama's layers, where
    two would do. Context parallel passes keys and values on, in the backward pass besides their gradients (arXiv
    2310.01889). Ulysses exchanges queries, keys, values and outputs, so that each device has some of the heads (arXiv
    2309.14509).
    """
    e, layers = BYTES[dtype], model.num_layers
    tensor, context, ulysses = layout.tp_size, layout.cp_size, layout.sp_size
    tokens = num_tokens / (context * ulysses)
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    times = 3 if again else 2
    # Computed again is a layer up to the input of its last product.
    sums = (3 if again else 2) + _num_column_products(model) + 2 * passes.num_forwards
    summed = layers * sums * tokens * model.hidden_size * e
    yield _Group(tensor, 1, per_node).sends("summing activations", 2 * summed, "nothing")
    rings = layers * (times + 1) * num_tokens / ulysses * 2 * kv / tensor * e
    yield _Group(context, tensor, per_node).sends("passing keys and values", rings, "attention")
    exchanged = layers * times * tokens * 2 * (q + kv) / tensor * e
    yield _Group(ulysses, tensor, per_node).sends("exchanging heads", exchanged, "nothing")


def _num_column_products(model: ModelFacts) -> int:
    """Products of a layer that are divided by columns: all but those that lead back to the stream, one in each half."""
    return max(2, sum(".layers.0." in f".{name}" and "vision" not in name for name in model.linears) - 2)


def _of_offloading(
    model: ModelFacts, adapter: FullAdapter | LoraAdapter, dtype: Dtype, layout: Layout, per_node: int, passes: Passes
) -> Iterator[Transfer]:
    """Weights, gradients and states between a device and where they lie.

    FSDP2 copies its part of a weight as it is stored and casts it on the device (torch's CPUOffloadPolicy), ZeRO
    sends it in the compute type. Gradients go down whenever they were reduced.
    """
    parts = layout.num_shards * layout.tp_size
    trained = num_trainable_params(model, adapter) / parts
    stored = layout.strategy == "fsdp2"
    adapters = 0 if isinstance(adapter, FullAdapter) else 4 * num_trainable_params(model, adapter)
    as_stored = weights_bytes(model, adapter, dtype) + adapters
    weights = (as_stored if stored else gathered_bytes(model, adapter, dtype)) / parts
    gathers = (1 if stored and not layout.reshard_after_forward else 2) + passes.num_forwards
    e = 4 if stored else BYTES[dtype]
    reduces_often = layout.sync_each_batch if stored else layout.strategy != "zero1"
    if layout.offload_param_device == "cpu":
        yield Transfer("fetching weights", gathers * weights, "host", "compute")
    elif layout.offload_param_device == "nvme":
        yield Transfer("fetching weights", gathers * weights, "disk", "compute", num_in_node=per_node)
    if layout.offload_param_device != "none":
        link: Link = "host" if layout.offload_param_device == "cpu" else "disk"
        size = _times_generating(passes, layout) * weights
        yield Transfer("fetching weights to generate", size, link, "generation", per_step=True, num_in_node=per_node)
    if layout.offload_optimizer_device != "none" or (stored and layout.offload_param_device == "cpu"):
        yield Transfer("sending gradients down", e * trained, "host", "compute", per_step=not reduces_often)
        if layout.offload_param_device == "none":
            yield Transfer("fetching updated weights", e * trained, "host", "nothing", per_step=True)
    if layout.offload_optimizer_device == "nvme":
        size = STATES_BYTES_ON_DISK * trained
        yield Transfer("optimizer states", size, "disk", "nothing", per_step=True, num_in_node=per_node)
