"""Work and time of an optimizer step: its FLOPs, exchanges and updates.

A device computes products at a share of its peak, attention and what lies between products at the speed of its memory
(see `tunekit.estimates.throughput.traffic`), unless the CPU takes longer to launch its kernels. It sends meanwhile:
what it gathers or reduces hides behind computing unless it takes longer, so that a micro-batch takes the longer of
both; what it has to wait for comes on top. Then the optimizer goes through memory. Both ends of each figure are carried
along: computing fast over fast links, and slowly over slow ones. Nearly each part is a factor of two wide at most, and
so is their sum; padding whose lengths are not known adds to it.

Floating-point operations (FLOPs) are those of products of matrices, two for each multiplication. They are counted as
torch's FlopCounterMode counts them; the tests compare the two. Of routed experts a token goes through a few, and so
only these are counted; what PEFT adds to the fused matrix of all experts is made once for all tokens of a micro-batch
(see `tunekit.estimates.memory.experts`).

Bytes of communication are those that one device sends; it receives as many at the same time. Collectives are counted as
rings, in which gathering or reducing S bytes among n devices has each send (n - 1)/n S, and an all-reduce does both:
the convention of the bus bandwidth that NCCL's tests print (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that
time is these bytes over that bandwidth. The delay of starting a transfer is not counted; it matters for small ones.

Symbols: P parameters, N those of linear layers but the head, A those of their adapters, V vocabulary, L layers, T
tokens of a micro-batch, h hidden size, q = heads x head size, kv = key-value heads x head size, e bytes of the compute
type.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, assert_never

from tunekit.estimates.facts import SCORE, Device, Facts, Figures, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import TO_MLP
from tunekit.estimates.memory.experts import last_part, trained_experts
from tunekit.estimates.memory.states import (
    BYTES,
    Dtype,
    num_quantised,
    num_trainable_params,
    scales_bytes,
    weights_bytes,
)
from tunekit.estimates.models.architectures import ATTENTION_LAYERS
from tunekit.estimates.models.model_config import model_types
from tunekit.estimates.passes import SFT, Passes
from tunekit.estimates.throughput.traffic import Traffic
from tunekit.recipe.sections.adapters import Adapter, FullAdapter, LoraAdapter, QloraAdapter


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

    def words(self, form: Callable[[float], str]) -> str:
        """Both ends in words, or one where they read the same: `12 min to 14 min`."""
        low, high = form(self.low), form(self.high)
        return low if low == high else f"{low} to {high}"

    def seconds_of(self, work: float) -> "Range":
        """Seconds that so much work takes at these rates."""
        return Range(low=work / self.high, high=work / self.low)


def range_of(figures: Collection[float]) -> Range:
    """The least and the greatest of some figures."""
    return Range(low=min(figures), high=max(figures))


def longest_of(*spans: Range) -> Range:
    """The longest of spans at the same time, at both ends."""
    return Range(low=max(span.low for span in spans), high=max(span.high for span in spans))


PERCENT = "{:.0%}".format
"""Writes a share for `Range.words`."""

NVLINK_SHARE = Range(low=0.42, high=0.84)
"""Share of the peak of links between the devices of a node that collectives reach.

High: 82 % in a ring of 8 H200 (github.com/stas00/ml-engineering, network/benchmarks/results/all-reduce-8xH200.md,
August 2026), 84 % between two H100 (github.com/NVIDIA/nccl/issues/1264). Low: half of it. LoRA with ZeRO-3 of a 72B
model on 4 A100 reached 33 %, worked out from 17.6 s for 8 micro-batches of 256 tokens that cannot hide it
(github.com/QwenLM/Qwen, README, "Profiling of Memory and Speed")."""

PCIE_SHARE = Range(low=0.27, high=0.54)
"""The same where there is only PCIe. 28 of 63 GB/s among 8 RTX 5090, 35 among 4 (github.com/NVIDIA/nccl/issues/1639);
low: half of the latter. Where they go through host memory it is less: 12.7 of 31.5 GB/s among RTX 4090 that have direct
access (github.com/tinygrad/open-gpu-kernel-modules/pull/22)."""

NETWORK_SHARE = Range(low=0.47, high=0.94)
"""Share of the peak of the network. High: 46 to 48 of 50 GB/s an adapter (github.com/NVIDIA/nccl-tests/issues/290);
low: 180 of 400 GB/s a node (github.com/NVIDIA/nccl/issues/1031). A network that is not set up well is slower still:
100 of 400 GB/s (github.com/NVIDIA/nccl/issues/2409)."""

HOST_SHARE = Range(low=0.43, high=0.86)
"""Share of the peak of PCIe to host memory. High: 54.8 of 63 GB/s (github.com/aigatech/vpbenchmarking, 8 H100); low:
half of it, where devices share a switch: a choice and not a measurement."""

CPU_PARAMS_PER_SECOND = Range(low=0.35e9, high=0.7e9)
"""Parameters that the CPUs of a node update in a second, with Adam in float32.

Low: a 7B model on 8 A800, whose step of 64 rows of 4,096 tokens took 35.4 s with its optimizer offloaded and 15.3 s
without (gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a, ZeRO-2). High: twice that. A fused optimizer in
bfloat16 can do ten times as many (70B on 8 A100, github.com/pytorch/torchtune, README of September 2024)."""

STATES_BYTES_ON_DISK = 28
"""Bytes that a step reads and writes for each trained parameter whose states are on a disk: float32 gradient, weight
and two states are read, the last three written back (ZeRO-Infinity, arXiv 2104.07857, section 3)."""

LINKS = {
    "node": "between the devices of a node",
    "network": "between nodes",
    "host": "to host memory",
    "disk": "to disk",
}


def bubble(stages: int, micro_batches: int, parts: int = 1) -> float:
    """Share of a step in which a stage waits for others: (P - 1) / (v M + P - 1) (arXiv 2104.04473, section 2.2)."""
    return (stages - 1) / (parts * micro_batches + stages - 1)


Link = Literal["devices", "host", "disk"]

Hides = Literal["compute", "attention", "neighbours", "nothing", "generation"]


@dataclass(frozen=True)
class Transfer:
    """Something that every device sends.

    Attributes:
        what: What it is, in words.
        sent_bytes: Bytes that a device sends each time.
        link: `devices` for what goes to other devices, by whatever link there is.
        hides_behind: What the device computes meanwhile; what attention hides depends on how it is done, and what
            neighbours in a pipeline send each other on whether one of them waits for it. What generating answers sends
            is no part of a micro-batch.
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
        return None if speed is None else speed.seconds_of(self.sent_bytes)

    def _bytes_per_second(self, figures: Figures) -> Range | None:
        host, link = figures.host_bytes_per_second, figures.link_bytes_per_second
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
        network = figures.network_bytes_per_second
        if network is None or (inside is None and self.num_in_node > 1):
            return None
        # A ring enters and leaves a node once; NCCL lays as many rings as there are adapters.
        across = NETWORK_SHARE.times(network * self.num_in_node)
        if inside is None or self.num_in_node == 1:
            return across
        return Range(low=min(inside.low, across.low), high=min(inside.high, across.high))


def transfers_of(
    model: ModelFacts,
    adapter: Adapter,
    dtype: Dtype,
    layout: Layout,
    *,
    num_nodes: int,
    num_tokens: float,
    gradient_checkpointing: bool,
    passes: Passes = SFT,
    trained_dtype: Dtype = "float32",
    offloaded_bytes: int = 0,
    update_bytes: int = 0,
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
        trained_dtype: Type of trained weights and of their gradients.
        offloaded_bytes: Activations that go to host memory in a micro-batch, and come back.
        update_bytes: Updates that an optimizer gathers from the devices that divide them.
    """
    sender = _Sender(model, adapter, dtype, layout, passes, layout.num_processes // num_nodes, trained_dtype)
    everything = [
        *sender.of_states(),
        *sender.between_replicas(),
        *sender.of_activations(num_tokens, again=gradient_checkpointing),
        *sender.of_offloading(),
        Transfer("offloading activations", 2 * offloaded_bytes, "host", "compute"),
        sender.ring(layout.num_shards, layout.tp_size, "gathering updates", update_bytes, "nothing", per_step=True),
    ]
    return tuple(transfer for transfer in everything if transfer.sent_bytes > 0)


def gathered_bytes(model: ModelFacts, adapter: Adapter, dtype: Dtype) -> float:
    """Bytes of all weights in the type in which they are gathered.

    Accelerate's FSDP2 and DeepSpeed gather in the compute type. Of 4-bit weights the packed values are gathered; their
    scales are on every device.
    """
    trained = 0 if isinstance(adapter, FullAdapter) else num_trainable_params(model, adapter)
    if not isinstance(adapter, QloraAdapter):
        return float(BYTES[dtype] * (model.num_params + trained))
    quantised = num_quantised(model)
    return 0.5 * quantised + BYTES[dtype] * (model.num_params - quantised + trained)


@dataclass(frozen=True)
class _Sender:
    """A device of a layout, and what it sends."""

    model: ModelFacts
    adapter: Adapter
    dtype: Dtype
    layout: Layout
    passes: Passes
    per_node: int
    trained_dtype: Dtype

    @property
    def num_trained(self) -> int:
        return num_trainable_params(self.model, self.adapter)

    def ring(
        self, size: int, stride: int, what: str, size_bytes: float, hides: Hides, *, per_step: bool = False
    ) -> Transfer:
        """A ring in which `size_bytes` are gathered, or reduced.

        Its `size` devices are every `stride`-th, in the order of Accelerate's mesh.
        """
        num_in_node = min(size, max(1, self.per_node // stride))
        return Transfer(what, (size - 1) / size * size_bytes, "devices", hides, per_step, num_in_node, size)

    def of_states(self) -> Iterator[Transfer]:
        """Yield the transfers of weights and gradients among the devices that divide them.

        FSDP2 gathers a layer before its forward pass and, resharded, again before its backward pass; a frozen base is
        gathered too, but has no gradients. Without `sync_each_batch` Accelerate reduces in the last micro-batch alone.
        ZeRO gathers what is divided at its stage: ZeRO-3 weights, the others what the optimizer updated.

        Passes without gradients gather as well, but for one that follows a forward pass whose weights stayed. FSDP2 has
        a reference model of its own in one unit: gathered before it computes, once for all where it stays.
        """
        layout, passes = self.layout, self.passes
        sends = partial(self.ring, layout.num_shards, layout.tp_size)
        experts = self.kept_experts_bytes
        weights = gathered_bytes(self.model, self.adapter, self.dtype) / layout.tp_size - experts
        trained_experts = experts if isinstance(self.adapter, FullAdapter) else 0.0
        gradients = BYTES[self.dtype] * self.num_trained / layout.tp_size - trained_experts
        match layout.strategy:
            case "fsdp2" | "zero3":
                twice = layout.strategy == "zero3" or layout.reshard_after_forward
                again, alone = passes.num_forwards, 0.0
                if passes.keeps_reference and layout.strategy == "fsdp2":
                    again, alone = again - passes.num_reference_forwards, twice * passes.num_reference_forwards
                if not twice and (passes.refers_in_micro_batch or passes.estimates):
                    again = 0
                yield sends("gathering weights", ((2 if twice else 1) + again) * weights, "compute")
                yield sends("gathering the reference", alone * weights, "nothing")
                often = self.times_generating
                yield sends("gathering weights to generate", often * weights, "generation", per_step=True)
                once = layout.strategy == "fsdp2" and not layout.sync_each_batch
                yield sends("reducing gradients", gradients, "compute", per_step=once)
            case "zero1" | "zero2":
                yield sends("reducing gradients", gradients, "compute", per_step=layout.strategy == "zero1")
                yield sends("gathering updated weights", gradients, "nothing", per_step=True)
            case "single" | "ddp":
                pass
            case _:
                assert_never(layout.strategy)

    @property
    def kept_experts_bytes(self) -> float:
        """Bytes of experts that are not exchanged, as each device keeps its own."""
        if self.layout.ep_size == 1:
            return 0.0
        stacks = (math.prod(shape) for shape in self.model.tensors.values() if shape in self.model.expert_shapes)
        return BYTES[self.dtype] * sum(stacks) * (1 - 1 / self.layout.ep_size)

    @property
    def times_generating(self) -> float:
        """Number of times in an optimizer step that all weights are gathered to generate.

        FSDP2 frees each layer again, unless its weights stay, and so gathers for every token; TRL has ZeRO-3 gather all
        of them at once.
        """
        generation = self.passes.generation
        if generation is None:
            return 0.0
        every_token = self.layout.strategy == "fsdp2" and self.layout.reshard_after_forward
        return (generation.completion_tokens if every_token else 1) / generation.num_steps

    def between_replicas(self) -> Iterator[Transfer]:
        """Yield the gradients among devices with a copy each: DDP's as they are trained, FSDP2's of the compute
        type.
        """
        layout = self.layout
        sends = partial(self.ring, layout.dp_replicate_size, layout.num_shards * layout.tp_size)
        each = BYTES[self.trained_dtype if layout.strategy == "ddp" else self.dtype]
        gradients = each * self.num_trained / layout.tp_size / layout.num_shards
        often = layout.strategy == "fsdp2" and layout.sync_each_batch
        yield sends("summing gradients", 2 * gradients, "compute", per_step=not often)

    def of_activations(self, num_tokens: float, *, again: bool) -> Iterator[Transfer]:
        """Yield the transfers between devices that compute one micro-batch together, in every layer.

        Tensor parallel sums activations twice in the forward pass of a layer (arXiv 1909.08053, section 3). In the
        backward pass transformers sums the gradient of each product's own input, so five times in Llama's layers, where
        two would do. Context parallel passes keys and values on, in the backward pass besides their gradients (arXiv
        2310.01889). Ulysses exchanges queries, keys, values and outputs, so that each device has some of the heads
        (arXiv 2309.14509). Expert parallel sends tokens to the devices of their experts and back (arXiv 2006.16668).
        """
        model, e, layers = self.model, BYTES[self.dtype], self.model.num_layers
        tensor, context, ulysses = self.layout.tp_size, self.layout.cp_size, self.layout.sp_size
        tokens = num_tokens / (context * ulysses)
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        times = 3 if again else 2
        # Computed again is a layer up to the input of its last product.
        sums = times + _num_column_products(model) + 2 * self.passes.num_forwards
        summed = layers * sums * tokens * model.hidden_size * e
        yield self.ring(tensor, 1, "summing activations", 2 * summed, "nothing")
        rings = layers * (times + 1) * num_tokens / ulysses * 2 * kv / tensor * e
        yield self.ring(context, tensor, "passing keys and values", rings, "attention")
        exchanged = layers * times * tokens * 2 * (q + kv) / tensor * e
        yield self.ring(ulysses, tensor, "exchanging heads", exchanged, "nothing")
        # Tokens go to each of their experts and come back, and so do their gradients.
        routed = 0 if model.mixture is None else model.mixture.num_layers * model.mixture.per_token
        sent = 2 * (times + self.passes.num_forwards) * routed * num_tokens * model.hidden_size * e
        yield self.ring(self.layout.ep_size, 1, "exchanging tokens of experts", sent, "nothing")

    def of_offloading(self) -> Iterator[Transfer]:
        """Yield the weights, gradients and states that go between a device and where they lie.

        FSDP2 copies its part of a weight as it is stored and casts it on the device (torch's CPUOffloadPolicy), ZeRO
        sends it in the compute type. Gradients go down whenever they were reduced.
        """
        model, adapter, dtype, layout = self.model, self.adapter, self.dtype, self.layout
        weights_at, states_at = layout.offload_param_device, layout.offload_optimizer_device
        parts, stored = layout.num_shards * layout.tp_size, layout.strategy == "fsdp2"
        trained = self.num_trained / parts
        adapters = 0 if isinstance(adapter, FullAdapter) else 4 * self.num_trained
        whole = weights_bytes(model, adapter, dtype, self.trained_dtype) - scales_bytes(model, adapter)
        as_stored = whole + adapters
        weights = (as_stored if stored else gathered_bytes(model, adapter, dtype)) / parts
        gathers = (1 if stored and not layout.reshard_after_forward else 2) + self.passes.num_forwards
        e = BYTES[self.trained_dtype if stored else dtype]
        reduces_often = layout.sync_each_batch if stored else layout.strategy != "zero1"
        if weights_at != "none":
            to = partial(Transfer, link="host" if weights_at == "cpu" else "disk", num_in_node=self.per_node)
            yield to("fetching weights", gathers * weights, hides_behind="compute")
            size = self.times_generating * weights
            yield to("fetching weights to generate", size, hides_behind="generation", per_step=True)
        if states_at != "none" or (stored and weights_at == "cpu"):
            yield Transfer("sending gradients down", e * trained, "host", "compute", per_step=not reduces_often)
            if weights_at == "none":
                yield Transfer("fetching updated weights", e * trained, "host", "nothing", per_step=True)
        if states_at == "nvme":
            size = STATES_BYTES_ON_DISK * trained
            yield Transfer("optimizer states", size, "disk", "nothing", per_step=True, num_in_node=self.per_node)


def _num_column_products(model: ModelFacts) -> int:
    """Products of a layer that are divided by columns: all but those that lead back to the stream, one in each half."""
    return max(2, sum(".layers.0." in f".{name}" and not model.is_tower(name) for name in model.linears) - 2)


PRODUCTS_SHARE = 0.8
"""Share of a CUDA device's peak at which products of matrices are computed, where nothing else takes time.

This and the next three constants are fitted together to 94 published runs and six of tunekit's on an H200
(tests/estimates/published_speed.yaml, benchmarks/results/train-nvidia-h200.json); runs that nothing was fitted to say
how true they are (`python -m benchmarks.speed`)."""

ATTENTION_OPERATIONS_PER_BYTE = 100
"""Operations of attention, all pairs of tokens counted, in the time of one byte from memory. Published runs with long
rows are as fast on H100s as their memory, not as their products; kernels compute half of the pairs."""

FUSED_MOVES = 4.4
"""Times that what products read and write goes through memory, with kernels that fuse what lies between them."""

EAGER_MOVES = 12
"""The same in eager code, where every norm, cast, sum and activation goes through memory."""

MEMORY_SHARE = 0.85
"""Share of the peak of its memory that a device reaches: 4.27 of 4.8 TB/s on an H200, copying
(benchmarks/results/LOG.md), and a little less in kernels that compute as well."""

DEQUANTISING_SHARE = 0.46
"""The same of making weights of 4-bit ones: bitsandbytes on an H200 (README, `nf4 dequantisation`). GPTQ's kernels are
several times as slow, by Qwen's rows of few tokens."""

SPREAD = Range(low=0.72, high=1.4)
"""Ends of the range around what the model of a step gives, so that 80 % of measured runs are in it; published runs are
spread by software, clocks and what their sources do not say. A factor of two."""

FORWARD_SECONDS = Range(low=0.0004, high=0.0008)
"""Least time of a forward pass of a layer on CUDA, for the CPU to launch its kernels. High: generating takes 0.76 to
0.78 ms a layer and token with models of 1.8B to 14B, of 24 to 40 layers (github.com/QwenLM/Qwen, README, "Inference
Performance": 54.09, 40.93 and 32.22 tokens/s on an A100, transformers). Low: faster CPUs than those of the 0.6 ms that
Qwen3 takes, a choice and not a measurement. How many forward passes a micro-batch is worth stands in
`tunekit.estimates.throughput.traffic`."""

COLLATED_TOKENS_PER_SECOND = 2.0e6
"""Of which a process makes micro-batches, from tokenized rows on disk: 2.1 million padding-free, 2.6 million padded, on
one core of an AMD EPYC with TRL 1.16 (`python -m benchmarks.collate`, 2026-11-21). Workers do it while devices compute;
without them it comes on top, at worst. Tokenizing a stream is not in it."""

BANDWIDTH_SHARE = Range(low=0.6, high=1.0)
"""Share of the peak of its memory at which a device reads weights to generate. Low: 8.48 tokens/s with a 72B model, 145
GB on two A100 that take turns (the same table); high: the peak itself."""

HIDDEN_BY_LAST_BACKWARD = 0.5
"""Share of a micro-batch's computing that overlaps with communication once a step: the gradients of the last layers are
ready while the first are still computed, in a backward pass that is at least half of the computing."""


@dataclass(frozen=True)
class Generating:
    """The work of generating answers in one optimizer step.

    Attributes:
        num_tokens: New tokens of an answer, which come one after another.
        read_bytes: Memory that each device reads and writes.
        flops: Operations, on all devices.
        is_launched: Whether the CPU launches each kernel; vLLM replays them, so that this may take no time.
        is_ahead: Whether they are generated on other devices while the step trains on earlier ones.
    """

    num_tokens: float
    read_bytes: float
    flops: float
    is_launched: bool = True
    is_ahead: bool = False


@dataclass(frozen=True)
class Before:
    """A forward pass over all rows before the training.

    Attributes:
        flops: Operations, on all devices.
        num_micro_batches: Micro-batches that a device computes one after another.
    """

    flops: float
    num_micro_batches: float


@dataclass(frozen=True)
class Step:
    """The work of one optimizer step, on all devices unless said otherwise.

    Attributes:
        adapter: Kind of the adapter.
        layout: How it is spread.
        num_nodes: Machines that it is spread over.
        flops_per_token: Operations for one token, in all passes of a micro-batch.
        model_flops_per_token: Of these, what is no recomputation, and those of generating it.
        num_tokens: Tokens without padding.
        max_computed_tokens: Tokens with the most padding that there can be.
        num_micro_batches: Micro-batches that a device computes one after another.
        num_trained: Trained parameters.
        optimizer_bytes: Memory that the optimizer reads and writes on each device.
        optimizer_flops: Operations of the optimizer on each device, where they take longer than its memory.
        checkpoint_bytes: Size of a checkpoint with the optimizer's states.
        transfers: What each device sends.
        is_sparse: Whether tokens go through experts.
        method: Kind of the method.
        num_forwards: Passes without gradients of a micro-batch.
        generating: The work of generating its answers; None where there are none.
        before: What is computed before the first step; None where nothing is.
        max_workers: Processes that may make micro-batches beside each that computes; None for as many as it takes.
        attention_flops_per_token: Of the operations for one token, those of attention.
        traffic: Bytes that go through memory in a micro-batch.
        is_fused: Whether kernels fuse what lies between products, or layers are compiled.
        launched_passes: Kernels that a micro-batch launches for a layer, in forward passes.
        slowest_stage: Work of the stage of a pipeline that computes longest, over that of a mean one.
    """

    model_type: str
    num_params: int
    num_layers: int
    adapter: str
    dtype: Dtype
    layout: Layout
    num_nodes: int
    flops_per_token: float
    model_flops_per_token: float
    num_tokens: float
    max_computed_tokens: float
    num_micro_batches: int
    num_trained: int
    optimizer_bytes: float
    checkpoint_bytes: float
    transfers: tuple[Transfer, ...] = ()
    optimizer_flops: float = 0.0
    is_sparse: bool = False
    method: str = "sft"
    num_forwards: float = 0.0
    generating: Generating | None = None
    before: Before | None = None
    max_workers: int | None = None
    attention_flops_per_token: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    is_fused: bool = True
    launched_passes: float = 3.0
    slowest_stage: float = 1.0

    @property
    def num_slots(self) -> int:
        """Micro-batches, and those for which a stage of a pipeline waits at the beginning and the end of a step."""
        return self.num_micro_batches + self.layout.pp_size - 1

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage of a pipeline waits for others."""
        return bubble(self.layout.pp_size, self.num_micro_batches)

    @property
    def num_devices(self) -> int:
        """Devices that it is spread over."""
        return self.layout.num_processes

    @property
    def num_writers(self) -> int:
        """Machines that hold a part of a checkpoint each: those of one replica."""
        return max(1, self.num_nodes // self.layout.dp_replicate_size)

    @property
    def generates_ahead(self) -> bool:
        """True if answers are generated on other devices while it trains on earlier ones."""
        return self.generating is not None and self.generating.is_ahead

    @property
    def tokens_of_micro_batch(self) -> float:
        """Tokens of one micro-batch, with the most padding that there can be."""
        return self.max_computed_tokens / self.num_micro_batches / self.layout.num_batches

    def computing(self, rate: Range) -> Range:
        """Seconds in which a device computes one micro-batch, at `rate` operations a second."""
        share = self.flops_per_token / self.num_micro_batches / self.num_devices
        share *= self.slowest_stage
        launched = self.num_layers * (self.launched_passes + self.num_forwards)
        launching = FORWARD_SECONDS.times(launched / self.layout.pp_size)
        products = Range(low=self.num_tokens * share / rate.high, high=self.max_computed_tokens * share / rate.low)
        return longest_of(products, launching)

    def sending(self, figures: Figures, hides: Hides, *, per_step: bool, link: Link | None = None) -> Range:
        """Seconds of what is sent in a micro-batch, or once a step, over one link or all; unknown ones left out."""
        spans = [
            span
            for transfer in self.transfers
            if (transfer.hides_behind, transfer.per_step) == (hides, per_step) and link in (None, transfer.link)
            if (span := transfer.seconds(figures)) is not None
        ]
        return Range(low=sum(span.low for span in spans), high=sum(span.high for span in spans))


def rate_of(step: Step, device: Device, figures: Figures | None) -> tuple[Range, str] | None:
    """Operations a second that a device reaches by its sheet, and in words; None where that is not known."""
    rate, peak = modelled_rate(step, device, figures), peak_of(step, device, figures)
    if rate is None or peak is None:
        return None
    span = SPREAD.times(rate)
    # No device is faster than its peak.
    span = Range(low=span.low, high=min(span.high, peak))
    words = f"estimate: {span.times(1 / peak).words(PERCENT)} of {peak / 1e12:,.0f} TFLOP/s"
    return span, words + (", as for dense models" if step.is_sparse else "")


def modelled_rate(step: Step, device: Device, figures: Figures | None) -> float | None:
    """Operations a second that the model of a step gives, between the ends of the range; None where unknown."""
    peak = peak_of(step, device, figures)
    bandwidth = None if figures is None else figures.memory_bytes_per_second
    if peak is None or bandwidth is None:
        return None
    return step.flops_per_token / _seconds_per_token(step, peak, bandwidth)


def _seconds_per_token(step: Step, peak: float, bandwidth: float) -> float:
    """Seconds of one device for a token of a full micro-batch, in products, attention and memory."""
    traffic, tokens = step.traffic, step.tokens_of_micro_batch
    products = (step.flops_per_token - step.attention_flops_per_token) / (PRODUCTS_SHARE * peak)
    attention = step.attention_flops_per_token / ATTENTION_OPERATIONS_PER_BYTE
    moved = (FUSED_MOVES if step.is_fused else EAGER_MOVES) * traffic.layers + traffic.weights / tokens
    dequantised = traffic.dequantised / tokens
    return products + (attention + moved / MEMORY_SHARE + dequantised / DEQUANTISING_SHARE) / bandwidth


def peak_of(step: Step, device: Device, figures: Figures | None) -> float | None:
    """Operations a second that a device's sheet promises for the step's type; None where it says nothing."""
    if device.kind != "cuda" or figures is None or step.dtype == "float32":
        return None
    # Tensor cores compute both 16-bit types at one rate.
    return figures.flops_16bit


def unknown_link(step: Step, figures: Figures) -> str | None:
    """A link that the step needs and whose speed is not known, in words."""
    return next((each.link_name for each in step.transfers if each.seconds(figures) is None), None)


def seconds_of(step: Step, rate: Range, figures: Figures) -> Range | None:
    """Return the seconds of a step, where devices compute at `rate`; None where a link or the memory's speed is not
    known.
    """
    update, generation = _updating(step, rate, figures), generating(step, rate, figures)
    if update is None or generation is None or unknown_link(step, figures) is not None:
        return None
    computing = step.computing(rate)
    hidden, exposed = waiting(step, figures)
    behind = step.sending(figures, "compute", per_step=True)
    after = step.sending(figures, "nothing", per_step=True)
    workers = num_workers(step, rate, figures)
    collating = step.tokens_of_micro_batch / COLLATED_TOKENS_PER_SECOND / max(1, workers)
    beside, on_top = (collating, 0.0) if workers else (0.0, collating)
    micro_batch = longest_of(computing, hidden, Range(low=collating, high=beside)).plus(exposed)
    uncovered = Range(
        low=max(0.0, behind.low - HIDDEN_BY_LAST_BACKWARD * computing.low),
        high=max(0.0, behind.high - HIDDEN_BY_LAST_BACKWARD * computing.high),
    )
    micro_batches = micro_batch.plus(Range(low=0.0, high=on_top)).times(step.num_slots)
    return with_generation(step, micro_batches.plus(uncovered).plus(after).plus(update), generation)


def with_generation(step: Step, training: Range, generation: Range) -> Range:
    """Seconds of a step that takes so long to train, and its answers to generate."""
    return longest_of(training, generation) if step.generates_ahead else training.plus(generation)


def fed_tokens_per_second(step: Step, rate: Range, figures: Figures) -> float:
    """Tokens a second of which a device computes micro-batches at most, were they always there."""
    hidden, exposed = waiting(step, figures)
    return step.tokens_of_micro_batch / (max(step.computing(rate).low, hidden.low) + exposed.low)


def num_workers(step: Step, rate: Range, figures: Figures) -> int:
    """Processes that make micro-batches beside each that computes: none where that one makes them as fast itself.

    The loader of what generates answers makes none: prompts alone come from it.
    """
    if step.generating is not None:
        return 0
    needed = workers_for(fed_tokens_per_second(step, rate, figures))
    return needed if step.max_workers is None else min(needed, step.max_workers)


def workers_for(tokens_per_second: float) -> int:
    """Processes that it takes to make micro-batches beside a device that computes so many tokens of them."""
    share = tokens_per_second / COLLATED_TOKENS_PER_SECOND
    return 0 if share <= 1 else math.ceil(share)


def generating(step: Step, rate: Range, figures: Figures) -> Range | None:
    """Seconds in which the answers of a step are generated; None where the memory's speed is not known.

    For each token all weights are read from memory, kernels launched and, where they are divided, weights gathered: the
    longest of these. Computing is hidden by it at best.
    """
    work, bandwidth = step.generating, figures.memory_bytes_per_second
    if work is None:
        return Range(low=0.0, high=0.0)
    if bandwidth is None:
        return None
    reading = BANDWIDTH_SHARE.times(bandwidth)
    launching = FORWARD_SECONDS.times(step.num_layers * work.num_tokens)
    if not work.is_launched:
        launching = Range(low=0.0, high=launching.high)
    sending = step.sending(figures, "generation", per_step=True)
    computing = work.flops / step.num_devices
    return Range(
        low=max(work.read_bytes / reading.high, launching.low, sending.low, computing / rate.high),
        high=max(work.read_bytes / reading.low, launching.high, sending.high) + computing / rate.low,
    )


def seconds_before(step: Step, rate: Range) -> Range:
    """Seconds of what is computed before the first step."""
    work = step.before
    if work is None:
        return Range(low=0.0, high=0.0)
    launching = FORWARD_SECONDS.times(step.num_layers * work.num_micro_batches)
    return longest_of(rate.seconds_of(work.flops / step.num_devices), launching)


def waiting(step: Step, figures: Figures) -> tuple[Range, Range]:
    """Seconds of a micro-batch in which is sent what may hide behind computing, and what may not."""
    # Different links work at the same time.
    links: tuple[Link, ...] = ("devices", "host", "disk")
    hidden = longest_of(*(step.sending(figures, "compute", per_step=False, link=link) for link in links))
    nothing = step.sending(figures, "nothing", per_step=False)
    attention = step.sending(figures, "attention", per_step=False)
    neighbours = step.sending(figures, "neighbours", per_step=False)
    return hidden, Range(low=nothing.low, high=nothing.high + attention.high + neighbours.high)


def communication_words(step: Step, rate: Range, figures: Figures) -> str | None:
    """Describe the communication and whether it is hidden, for a reason; None where nothing is sent."""
    if not step.transfers:
        return None
    unknown = unknown_link(step, figures)
    if unknown is not None:
        return f"bandwidth {unknown} unknown, so the time spent waiting is unknown too"
    words = (
        _bubble_words(step),
        _hiding_words(step, rate, figures),
        _waiting_words(step, rate, figures),
        _once_words(step),
    )
    return "; ".join(filter(None, words))


def _bubble_words(step: Step) -> str | None:
    """Describe the share of a step in which stages of a pipeline wait for their first and after their last work."""
    if step.layout.pp_size == 1:
        return None
    return f"{step.bubble:.0%} bubble with {step.num_micro_batches} micro-batches in {step.layout.pp_size} stages"


def _hiding_words(step: Step, rate: Range, figures: Figures) -> str | None:
    """Describe whether the tokens of a micro-batch suffice to hide the communication meanwhile.

    It takes as long for few tokens as for many, and so needs as many as a device computes while it lasts.
    """
    sent = [transfer for transfer in step.transfers if not transfer.per_step and transfer.hides_behind == "compute"]
    if not sent:
        return None
    hidden, _ = waiting(step, figures)
    tokens = step.tokens_of_micro_batch
    a_token = step.flops_per_token / (step.layout.devices_per_sequence * step.layout.pp_size)
    needed = Range(low=hidden.low * rate.low / a_token, high=hidden.high * rate.high / a_token)
    how = "hidden" if tokens >= needed.high else "not hidden" if tokens < needed.low else "possibly hidden"
    slowest = max(sent, key=lambda one: (one.seconds(figures) or hidden).high)
    size = sum(transfer.sent_bytes for transfer in sent) / 1e9
    words = f"{size:,.1f} GB per micro-batch {slowest.link_name}, {how} by its {tokens:,.0f} tokens"
    return f"{words} ({needed.words(_rounded)} needed)"


def _waiting_words(step: Step, rate: Range, figures: Figures) -> str | None:
    """Describe the share of a micro-batch in which devices wait for each other."""
    hidden, exposed = waiting(step, figures)
    if exposed.high == 0:
        return None
    busy = longest_of(step.computing(rate), hidden)
    shares = range_of((exposed.low / (exposed.low + busy.low), exposed.high / (exposed.high + busy.high)))
    return f"{shares.words(PERCENT)} of a micro-batch spent waiting for other devices"


def _once_words(step: Step) -> str | None:
    """Describe the communication once a step, and that of generating answers."""
    sentences = []
    for when, generates in (("per step", False), ("per step for generation", True)):
        sent = [each for each in step.transfers if each.per_step and (each.hides_behind == "generation") == generates]
        links = " and ".join(dict.fromkeys(transfer.link_name for transfer in sent))
        if sent:
            sentences.append(f"{_in_gb(sum(transfer.sent_bytes for transfer in sent))} {when} {links}")
    return "; ".join(sentences) or None


def _in_gb(size_bytes: float) -> str:
    size = size_bytes / 1e9
    return f"{size:,.0f} GB" if size >= 100 else f"{size:,.3g} GB"


def _updating(step: Step, rate: Range, figures: Figures) -> Range | None:
    """Seconds of the optimizer: on a device through memory and computing, on CPUs at what they were seen to do."""
    layout = step.layout
    # FSDP2 has one switch for all that is offloaded.
    if layout.offload_optimizer_device != "none" or (layout.strategy, layout.offload_param_device) == ("fsdp2", "cpu"):
        return CPU_PARAMS_PER_SECOND.seconds_of(step.num_trained / step.num_nodes)
    bandwidth = figures.memory_bytes_per_second
    if bandwidth is None:
        return None
    moving = step.optimizer_bytes / bandwidth
    return Range(low=moving, high=moving).plus(rate.seconds_of(step.optimizer_flops))


def _rounded(tokens: float) -> str:
    """A number of tokens with two digits."""
    return f"{float(f'{tokens:.2g}'):,.0f}"


def is_counted(model: ModelFacts) -> bool:
    """Return whether the closed form holds: a decoder whose layers mix tokens by attention alone."""
    if any("expert" in name for name in model.tensors) and model.mixture is None:
        return False
    if model.layer_types:
        return set(model.layer_types) <= ATTENTION_LAYERS
    return model.model_type not in model_types().carry_state


def flops_per_token(
    model: ModelFacts,
    adapter: Adapter,
    *,
    attended_tokens: float,
    num_tokens: float,
    head_share: float,
    gradient_checkpointing: bool,
    whole_head: bool = False,
    tiled_mlp: bool = False,
) -> float:
    """Floating-point operations of one token in a training step.

    A product costs 2 forward and 2 for each of the gradients of its input and its weight: 6N where weights are
    trained, 4N + 6A with adapters. Attention costs 12 L q a over `a` tokens, causal or not (arXiv 2204.02311, appendix
    B; kernels that skip the masked half do half of it). The head is TRL's in tiles: computed, computed again in the
    backward pass, and one or two gradients. Checkpointing computes each layer again up to the input of its last
    product. DoRA's norms, which are computed once a step and not for each token, are not counted.

    Args:
        model: A model that `is_counted`.
        adapter: What is trained.
        attended_tokens: Length of a row of attention scores.
        num_tokens: Tokens of a micro-batch.
        head_share: Share of the tokens for which logits are computed.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        whole_head: Whether logits are computed once: all together, and kept, or in chunks with their gradients.
        tiled_mlp: Whether MLPs are computed once more in the backward pass, up to the input of their last product.
    """
    linear, attention = model.num_linear_params, _attention_flops(model, attended_tokens)
    last = {name: s for name, s in model.linears.items() if _is_last(name, s, model)}
    experts_forward, experts_backward = _experts(model, adapter, num_tokens)
    forward: float
    backward: float
    if isinstance(adapter, FullAdapter):
        forward, backward, head_is_trained = 2 * linear, 4 * linear, True
    else:
        ranks = model.adapted(adapter).ranks
        adapted = {n: s for n, s in model.adapter_linears(adapter).items() if n in model.linears}
        added = sum(ranks[name] * (outputs + inputs) for name, (outputs, inputs) in adapted.items())
        whole = adapter.modules_to_save or []
        forward = 2 * linear + 2 * added
        backward = 2 * linear + 4 * added + 2 * (_sizes(model.adapter_linears(whole)) if whole else 0)
        head_is_trained = model.judges or "lm_head" in whole
        # Where the last product has an adapter, the adapter's own comes after it and is the one left out.
        last = {name: s for name, s in last.items() if name not in adapted}
    forward, backward = forward + experts_forward, backward + experts_backward
    head = ((6 if whole_head else 8) - (0 if head_is_trained else 2)) * head_params(model) * head_share
    again = forward + attention - 2 * _sizes(last) if gradient_checkpointing else 0
    tiled = 2 * _sizes({n: s for n, s in model.linears.items() if last_part(n) in TO_MLP}) if tiled_mlp else 0
    return forward + backward + 3 * attention + head + again + tiled


def attention_flops_per_token(model: ModelFacts, *, attended_tokens: float, num_passes: float) -> float:
    """Floating-point operations of one token's attention in a training step.

    Args:
        model: A model that `is_counted`.
        attended_tokens: Length of a row of attention scores.
        num_passes: Forward passes, of which the backward pass is worth two.
    """
    return num_passes * _attention_flops(model, attended_tokens)


def forward_flops_per_token(model: ModelFacts, *, attended_tokens: float, head_share: float) -> float:
    """Floating-point operations of one token in a forward pass without gradients and without adapters.

    Args:
        model: A model that `is_counted`.
        attended_tokens: Length of a row of attention scores.
        head_share: Share of the tokens for which logits are computed.
    """
    experts, _ = _experts(model, FullAdapter(), 1)
    attention = _attention_flops(model, attended_tokens)
    return 2 * model.num_linear_params + experts + attention + 2 * head_params(model) * head_share


def head_params(model: ModelFacts) -> int:
    """Parameters of the product that scores a token: by each word of the vocabulary, or by the numbers of a score."""
    return (model.tensors[SCORE][0] if model.judges else model.vocab_size) * model.hidden_size


def _is_last(name: str, sizes: tuple[int, int], model: ModelFacts) -> bool:
    """Return whether a linear layer is the last product of its decoder layer; experts are weighted after it."""
    if model.num_experts:
        return name.endswith(".down_proj")
    return sizes == (model.hidden_size, model.intermediate_size)


def _attention_flops(model: ModelFacts, attended_tokens: float) -> float:
    """Operations per token of scores and sums; with latent attention values are narrower than queries and keys."""
    return 2 * model.num_layers * (model.num_heads * model.head_dim + model.attended_width) * attended_tokens


def _experts(model: ModelFacts, adapter: Adapter, num_tokens: float) -> tuple[float, float]:
    """Operations per token of all layers' routers and routed experts, forward and backward.

    An adapter of experts is added to their matrices before the product, so that the whole matrices' gradients are
    computed as in full training, and then those of the adapter's two factors.
    """
    mixture = model.mixture
    if mixture is None:
        return 0, 0
    h, layers = model.hidden_size, mixture.num_layers
    trained = trained_experts(None if isinstance(adapter, FullAdapter) else model.adapted(adapter).kinds)
    router = mixture.num_experts * h
    down = mixture.per_token * mixture.inner * h
    linear = router + 3 * down
    gradients = router * trained.router + 2 * down * trained.gate_up + down * trained.down
    forward: float = 2 * linear
    backward: float = 2 * linear + 2 * gradients
    if not isinstance(adapter, FullAdapter):
        all_gate_up, all_down = mixture.expert_params(h)
        rank = adapter.rank if isinstance(adapter, LoraAdapter) else 0
        stacks = [name for name in model.adapted(adapter).ranks if name.endswith("experts.gate_up_proj")]
        times = 2 if any(map(adapter.doubles_rank, stacks)) else 1
        ranks = times * rank * all_gate_up * trained.gate_up + rank * all_down * trained.down
        ranks += rank * router * trained.router
        # Twice forward: torch tries a parametrization when it is registered, which PEFT does in each forward pass.
        forward, backward = forward + 4 * ranks / num_tokens, backward + 4 * ranks / num_tokens
    return layers * forward, layers * backward


def _sizes(linears: Mapping[str, tuple[int, int]]) -> int:
    return sum(outputs * inputs for outputs, inputs in linears.values())
