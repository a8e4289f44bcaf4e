"""A starting layout for full training that tunekit cannot run: with pipeline, and of experts with expert parallel.

Megatron-Core and TorchTitan do that. Here is what their guides do by rule of thumb: tensor parallel (TP) inside a
node, stages of a pipeline (PP) across nodes, replicas (DP) on top that divide the optimizer's states (ZeRO-1), parts
of a sequence (CP) where it is long, experts apart (EP). There are as few stages as fit; of the layouts that are left,
the one that is expected to be the fastest is taken. Nothing of it was measured: it is where to start from.

Assumed are Adam with a float32 copy of bfloat16 weights and float32 gradients, micro-batches of one sequence, fused
attention, norms divided as well (sequence parallel), and stages that are equally large.

Symbols: s tokens of a sequence on a device, h hidden size, L layers, P stages, M micro-batches of a step, v parts
that a stage is cut into.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

from tunekit.estimates.facts import Figures, Hardware, ModelFacts
from tunekit.estimates.throughput.step import Range, Transfer, bubble
from tunekit.planner.decisions.candidates import MEMORY_SHARE

LONG_SEQUENCE = 32768
"""Tokens of a sequence on one device up to which it is left whole: the guides' rule."""

SHARDED_BYTES, WHOLE_BYTES = 12, 6
"""Bytes a parameter with ZeRO-1: a float32 copy and two states are divided among replicas; bfloat16 weights and float32
gradients are not (github.com/NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py)."""

EFFICIENCY = Range(low=0.35, high=0.55)
"""Share of the peak while a stage computes. Guides of 2026 call 40 to 55 % well tuned on H100s; Llama 3 405B reached 38
to 43 % of 8,192 to 16,384 of them, with what it waited in it (arXiv 2407.21783, table 4)."""

MOST_TENSOR = 8
"""Devices that share a layer at most, all of them in one node: the guides' rule, and a node's usual size."""

MOST_PARTS = 8
"""Parts that a stage is cut into at most: NVIDIA's recipes for Llama 3 have 5 to 8
(github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md)."""

MOST_NODES = 4096
"""Limit of the search for a machine that is large enough."""


@dataclass(frozen=True)
class Beyond:
    """A starting layout for another engine, and what is to be expected of it."""

    model: ModelFacts
    sizes: "_Sizes"
    hardware: Hardware
    """The machine; it has fewer nodes than `num_nodes` where the training does not fit it."""
    num_nodes: int
    batch: int
    length: int
    tp: int
    pp: int
    cp: int
    ep: int
    recomputes: bool
    """True if layers are recomputed in the backward pass."""

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return max(1, len(self.hardware.accelerators))

    @property
    def num_devices(self) -> int:
        """Devices that the layout needs."""
        return self.num_nodes * self.per_node

    @property
    def figures(self) -> Figures:
        """Data sheet of a device."""
        return self.hardware.figures or Figures()

    @property
    def dp(self) -> int:
        """Replicas of the model."""
        return self.num_devices // (self.tp * self.pp * self.cp)

    @property
    def layout(self) -> str:
        """The layout in short: `TP 8 x PP 8 x DP 4`."""
        sizes = (("TP", self.tp), ("PP", self.pp), ("CP", self.cp), ("DP", self.dp), ("EP", self.ep))
        return " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name in ("TP", "PP", "DP"))

    @property
    def is_even(self) -> bool:
        """True if devices, batch and experts divide evenly."""
        devices, together = self.num_devices, self.tp * self.pp * self.cp
        if devices % together or self.batch % (devices // together):
            return False
        return self.ep == 1 or not (self.model.num_experts % self.ep or (devices // self.pp) % self.ep)

    @property
    def num_micro_batches(self) -> int:
        """Of a step, on each replica."""
        return self.batch // self.dp

    @property
    def num_parts(self) -> int:
        """Parts of a stage; interleaving needs a whole round of micro-batches for the stages."""
        whole = self.num_micro_batches % self.pp == 0
        return min(MOST_PARTS, math.ceil(self.model.num_layers / self.pp)) if self.pp > 1 and whole else 1

    @property
    def flops_per_token(self) -> float:
        """Operations: 6 for each parameter that a token is multiplied with, and 12 L q s of attention."""
        m = self.model
        whole = 6.0 * self.sizes.active + 12 * m.num_layers * m.num_heads * m.head_dim * self.length
        return whole * 4 / 3 if self.recomputes else whole

    @property
    def tokens(self) -> float:
        """Tokens of a sequence on a device, those of its tensor parallel group taken together."""
        return self.length / self.cp

    @property
    def memory_bytes(self) -> float:
        """Bytes on a device of the first stage, which holds the most activations and the embedding.

        A layer keeps (18 h + 4 i) s bytes of a micro-batch, divided by tensor parallel, or recomputed 2 h s (arXiv
        2205.05198, table 2, with fused attention), and the first stage keeps those of P micro-batches at once.
        """
        m, sizes, tp = self.model, self.sizes, self.tp
        other_params = sizes.others / (tp * self.pp)
        table_here = sizes.table * (1 if self.pp > 1 else sizes.num_tables) / tp
        apart = sizes.experts / (self.ep * self.pp)
        copies = self.num_devices / (self.ep * self.pp)
        states = (other_params + table_here) * (WHOLE_BYTES + SHARDED_BYTES / (self.dp * self.cp))
        states += apart * (WHOLE_BYTES + SHARDED_BYTES / copies)
        layer = self.tokens * (18 * m.hidden_size + 4 * m.intermediate_size) / tp
        kept_bytes = 2 * self.tokens * m.hidden_size / tp if self.recomputes else layer
        in_flight = m.num_layers / self.pp * min(self.pp, self.num_micro_batches)
        logits = 6 * self.tokens * m.vocab_size / tp if self.pp == 1 else 0
        return states + kept_bytes * in_flight + (layer if self.recomputes else 0) + logits

    def transfers(self) -> Iterator[Transfer]:
        """Yield the transfers of a device of a middle stage in a step."""
        m, passes = self.model, 3 if self.recomputes else 2
        width = 2 * self.tokens * m.hidden_size
        number, layers = self.num_micro_batches, m.num_layers / self.pp
        yield self._ring("TP", self.tp, 1, number * layers * passes * 2 * 2 * width)
        keys = 2 * self.tokens * 2 * m.num_kv_heads * m.head_dim / self.tp
        yield self._ring("CP", self.cp, self.tp, number * layers * (passes + 1) * keys * self.cp)
        if self.ep > 1:
            # Each token goes to its experts and comes back, in every pass.
            routed = width / self.tp * m.num_experts_per_token * 2
            yield self._ring("EP", self.ep, 1, number * layers * passes * routed)
        if self.pp > 1:
            border = number * self.num_parts * 2 * width / self.tp
            yield Transfer("PP", border, "devices", "compute", True, 1, 2)
        # Float32 gradients are reduced, bfloat16 weights gathered.
        size = 6 * self.sizes.others / (self.tp * self.pp)
        yield self._ring("DP", self.dp * self.cp, self.tp, size)
        copies = self.num_devices // (self.ep * self.pp)
        yield self._ring("DP of experts", copies, self.ep, 6 * self.sizes.experts / (self.ep * self.pp))

    def _ring(self, what: str, size: int, stride: int, size_bytes: float) -> Transfer:
        inside = min(size, max(1, self.per_node // stride))
        return Transfer(what, (size - 1) / size * size_bytes, "devices", "nothing", True, inside, size)

    @property
    def seconds(self) -> Range | None:
        """Time of a step: micro-batches one after another, the bubble, and what is sent meanwhile or not."""
        peak = self.figures.flops_16bit
        if peak is None:
            return None
        computing = self.batch * self.length * self.flops_per_token / self.num_devices
        # Parts of a stage are left to be tried: they are in the better end alone, and no layout is chosen for them.
        fewer = 1 + (self.pp - 1) / (self.num_parts * self.num_micro_batches)
        rounds = 1 + (self.pp - 1) / self.num_micro_batches
        low, high = fewer * computing / (EFFICIENCY.high * peak), rounds * computing / (EFFICIENCY.low * peak)
        for transfer in self.transfers():
            span = transfer.seconds(self.figures)
            if transfer.sent_bytes and span is None:
                return None
            # What goes to neighbours in the pipeline hides. A ring of keys and values or of gradients may or may not.
            if span is not None and transfer.what in ("TP", "EP"):
                low, high = low + fewer * span.low, high + rounds * span.high
            elif span is not None and transfer.what != "PP":
                high += span.high
        return Range(low=low, high=high)

    @property
    def slowest_seconds(self) -> float:
        """Seconds by which layouts are compared; where nothing is known of a device, by the bubble and recomputation
        alone.
        """
        if self.seconds is not None:
            return self.seconds.high
        again = 4 / 3 if self.recomputes else 1.0
        return again * (1 + (self.pp - 1) / self.num_micro_batches)

    @property
    def sent(self) -> list[tuple[str, float]]:
        """Transfers of a device in a step: kind and bytes."""
        return [(transfer.what, transfer.sent_bytes) for transfer in self.transfers() if transfer.sent_bytes]

    @property
    def tokens_per_second(self) -> Range | None:
        """Of all devices; None where the sheet or a link is not known."""
        return None if self.seconds is None else self.seconds.seconds_of(self.batch * self.length)

    def words(self) -> list[str]:
        """The layout and its figures, in lines."""
        num_there = self.hardware.num_nodes * self.per_node
        but = f", but not on {num_there:,} devices" if self.num_devices > num_there else ""
        again, device = "with" if self.recomputes else "without", self.hardware.device.name
        size, limit = self.memory_bytes / 2**30, _limit(self.hardware) / 2**30
        lines = [
            f"Megatron-Core or TorchTitan can{but}; starting point on {self.num_devices:,} x {device}:",
            f"{self.layout}, ZeRO-1, {again} recomputation",
            f"memory: {size:.0f} of {limit:.0f} GiB per device (estimate)",
        ]
        if self.pp > 1:
            stages, number, parts = self.pp, self.num_micro_batches, self.num_parts
            cut = f", {bubble(stages, number, parts):.0%} with {parts} parts per stage" if parts > 1 else ""
            lines.append(f"pipeline: {number} micro-batches, {bubble(stages, number):.0%} bubble{cut}")
        sent = ", ".join(f"{what} {size / 1e9:,.{0 if size > 1e10 else 1}f} GB" for what, size in self.sent)
        lines.append(f"sent per device and step: {sent}")
        tokens, usd_per_hour = self.tokens_per_second, self.figures.usd_per_hour
        if tokens is not None:
            speed = f"throughput (estimate): {tokens.words(_two_digits)} tokens/s in total"
            if usd_per_hour is not None:
                usd = tokens.seconds_of(1e9 * usd_per_hour / 3600 * self.num_devices)
                speed += f", {usd.words(_two_digits)} USD per billion tokens"
            lines.append(speed)
        return lines


def beyond(model: ModelFacts, hardware: Hardware, *, batch: int, length: int) -> Beyond | None:
    """Find a layout to start training all of `model`; None where no number of such machines suffices.

    Args:
        model: The model.
        hardware: The machine. Where nothing fits it, twice, four times as many nodes are looked at.
        batch: Sequences of an optimizer step.
        length: Tokens of each.
    """
    sizes = _sizes_of(model)
    nodes = hardware.num_nodes
    while nodes <= MOST_NODES:
        ways = list(_ways(model, sizes, hardware, nodes, batch, length))
        if ways:
            return min(ways, key=lambda way: (way.slowest_seconds, way.pp))
        nodes *= 2
    return None


@dataclass(frozen=True)
class _Sizes:
    """Numbers of a model's parameters."""

    table: int
    """Of the embedding, and of a head that is not tied."""
    num_tables: int
    experts: int
    others: int
    """In layers, but for experts."""
    active: int
    """That a token is multiplied with."""


def _sizes_of(model: ModelFacts) -> _Sizes:
    table = model.vocab_size * model.hidden_size
    tables = 1 if model.has_tied_head else 2
    experts = sum(math.prod(shape) for name, shape in model.tensors.items() if ".experts." in name)
    others = model.num_params - experts - tables * table
    return _Sizes(table, tables, experts, others, model.num_active_params - (tables - 1) * table)


def _ways(
    model: ModelFacts, sizes: _Sizes, hardware: Hardware, nodes: int, batch: int, length: int
) -> Iterator[Beyond]:
    """Layouts that fit, each with as few stages as do: a stage is there for memory, and costs a bubble."""
    per_node, limit = max(1, len(hardware.accelerators)), _limit(hardware)
    cp = 2 ** math.ceil(math.log2(max(1.0, length / LONG_SEQUENCE)))
    whole_node = [tp for tp in _powers(min(per_node, MOST_TENSOR)) if model.num_heads % tp == 0]
    # Experts are narrow already, so for them less is looked at too.
    tensor = whole_node if model.num_experts else whole_node[-1:]
    expert = _powers(model.num_experts)[1:] if model.num_experts else [1]
    way_of = partial(Beyond, model, sizes, hardware, nodes, batch, length)
    for tp, ep, again in product(tensor, expert, (False, True)):
        ways = (way_of(tp=tp, pp=pp, cp=cp, ep=ep, recomputes=again) for pp in _powers(model.num_layers))
        fitting = (way for way in ways if way.is_even and way.memory_bytes <= limit)
        yield from islice(fitting, 1)


def _limit(hardware: Hardware) -> int:
    return int(MEMORY_SHARE[hardware.device.kind] * hardware.device.memory_free_bytes)


def _powers(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [2**power for power in range(max(1, most).bit_length())]


def _two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.0f}"
