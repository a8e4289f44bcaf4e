"""Bytes of a model that FSDP2 or ZeRO divides.

FSDP2 as Accelerate sets it up: what a device keeps of a model that others hold too, and what it gathers for a time.

Accelerate's `fsdp2_prepare_model` (1.15) makes a unit of each decoder layer and of the embedding; the final norm and
the head are one more that stays gathered from the forward pass on, with the embedding where the head is tied to it.
Below an adapter it does not find the final norm, and TRL's head gathers its weight itself. Every unit is divided along
the first dimension of its tensors, so a tensor with fewer rows than there are devices is padded: an adapter of rank 8
takes as much as one of rank 512 when 512 devices share it. Weights are gathered and gradients reduced in the compute
type; the shards of what is trained are float32 (Accelerate casts them up).

Around a layer there are: its weights, the buffer in which the next unit's arrive, and the buffer from which the last
unit's gradients are reduced. The trace in `tests/estimates/oracle_shards.py` is the source of what is there when.

DeepSpeed's ZeRO stages: what a device keeps of a model, what leaves it, and what it needs for a time.

Weights and gradients are in the compute type, and float32 copies of what is trained lie beside them: 2 + 2 + 12 bytes a
parameter with Adam. Stage 1 divides the copies and the optimizer's states, stage 2 the gradients too, stage 3 also the
weights (arXiv 1910.02054, section 5). Nothing of this is traced. The buckets are what transformers' `auto` would make
of them, but no larger than what is trained.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from tunekit.estimates.facts import Facts, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory import states
from tunekit.estimates.memory.activations import Head, Layers
from tunekit.estimates.memory.states import BYTES, Dtype, Kept, Need, Phase
from tunekit.recipe.sections.adapters import Adapter, AnyPeftAdapter, FullAdapter, LoraAdapter, QloraAdapter

Count = Mapping[tuple[int, ...], int]
"""Number of tensors of each shape."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together."""

    frozen: int = 0
    """As a device holds them, with padding: the same on each."""
    trained: int = 0
    whole: int = 0
    """Of the trained ones all, without padding."""
    packed: int = 0
    """Bytes of weights in 4 bits as a device holds them, without their scales."""
    experts: int = 0
    """Of the trained ones those of experts that other devices keep whole: they are not gathered here."""

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(
            self.frozen + other.frozen,
            self.trained + other.trained,
            self.whole + other.whole,
            self.packed + other.packed,
            self.experts + other.experts,
        )

    def __mul__(self, times: int) -> "Unit":
        return Unit(
            self.frozen * times, self.trained * times, self.whole * times, self.packed * times, self.experts * times
        )

    def bytes_held(self, e: int) -> int:
        """Bytes of a device's shards, of `e` each where they are not packed."""
        return e * (self.frozen + self.trained) + self.packed


@dataclass(frozen=True)
class Units:
    """A model as FSDP2 divides it."""

    first: Unit
    """The first layer, which is a small one where those behind it have experts."""
    layer: Unit
    """The largest."""
    layers: Unit
    """All of them."""
    embedding: Unit
    head: Unit
    """The final norm, and the head where it has weights of its own."""
    tensor: Unit
    """The largest tensor, whether it is trained or not."""
    num_layers: int
    num_shards: int
    ep_size: int
    """Devices that keep different experts."""
    full: bool
    """True if all weights are trained, and not adapters."""
    tied: bool
    """True if the head uses the weights of the embedding."""
    undivided: int
    """Bytes of what each device holds whole: the scales of weights in 4 bits."""

    @property
    def all(self) -> Unit:
        """The whole model."""
        return self.layers + self.embedding + self.head

    def gathered(self, unit: Unit, e: int) -> int:
        """Bytes of a unit when it is whole on each device, padding included."""
        return self.num_shards * unit.bytes_held(e) - self._elsewhere(unit, e)

    def reduced(self, unit: Unit, e: int) -> int:
        """Bytes of the gradients of a unit that a device has whole, padding included."""
        return self.num_shards * e * unit.trained - (self._elsewhere(unit, e) if self.full else 0)

    def _elsewhere(self, unit: Unit, e: int) -> int:
        """Bytes of experts that only other devices compute."""
        return (self.num_shards - self.num_shards // self.ep_size) * e * unit.experts


def units_of(model: ModelFacts, adapter: Adapter, num_shards: int, ep_size: int = 1) -> Units:
    """Return the shards that each of `num_shards` devices holds, `ep_size` of which keep different experts."""
    shapes = model.shapes
    full = isinstance(adapter, FullAdapter)
    stacks = model.expert_shapes if ep_size > 1 else frozenset()

    def unit(tensors: Count) -> Unit:
        padded = _padded(tensors, num_shards)
        experts = _padded({shape: times for shape, times in tensors.items() if shape in stacks}, num_shards)
        if not full:
            return Unit(frozen=padded, experts=experts)
        return Unit(trained=padded, whole=_size(tensors), experts=experts)

    def packed(tensors: Count) -> Unit:
        if not isinstance(adapter, QloraAdapter):
            return unit(tensors)
        linears = () if model.published_as == "mxfp4" else model.quantised_linears.shapes
        kept = {*model.expert_stacks, *linears}
        in_4_bits = {shape: times for shape, times in tensors.items() if shape in kept}
        others = {shape: times for shape, times in tensors.items() if shape not in kept}
        return replace(unit(others), packed=_padded(_as_bytes(in_4_bits), num_shards))

    layers = [(packed(tensors), times) for tensors, times in shapes.layers]
    first, largest = layers[0][0], max((layer for layer, _ in layers), key=lambda layer: layer.bytes_held(2))
    whole = sum((layer * times for layer, times in layers), Unit())
    if not isinstance(adapter, FullAdapter):
        adapted = _adapters(model, adapter, num_shards)
        whole += adapted
        num_layers = states.num_adapted_layers(model, adapter)
        each = Unit(0, adapted.trained // num_layers, adapted.whole // num_layers)
        first, largest = first + each, largest + each
    unties = states.unties_head(model, adapter)
    tail = unit(shapes.embedding if unties else shapes.head) + packed(shapes.others)
    # Experts that are stored apart have their gate and their up projections in one tensor, two of a shape.
    stored = [(shape, times) for kind, _ in shapes.layers for shape, times in kind.items()]
    tensors = [packed({shape: times if len(shape) > 2 else 1}) for shape, times in stored]
    tensors += [unit({shape: 1}) for shape in (*shapes.embedding, *shapes.head)]
    return Units(
        first,
        layer=largest,
        layers=whole,
        embedding=unit(shapes.embedding),
        head=tail,
        tensor=max(tensors, key=lambda unit: unit.bytes_held(2)),
        num_layers=model.num_layers,
        num_shards=num_shards,
        ep_size=ep_size,
        full=full,
        tied=model.has_tied_head and not unties,
        undivided=states.scales_bytes(model, adapter),
    )


def _adapters(model: ModelFacts, adapter: AnyPeftAdapter, num_shards: int) -> Unit:
    """Trained parameters of all adapters; those beside the matrices of LoRA are divided without a remainder."""
    if not isinstance(adapter, LoraAdapter):
        tensors = Counter(states.trained_tensors(model, adapter).values())
        return Unit(trained=_padded(tensors, num_shards), whole=_size(tensors))
    matrices: Counter[tuple[int, ...]] = Counter()
    for (outputs, inputs, rank), times in model.adapted(adapter).adapters.items():
        matrices[rank, inputs] += times
        matrices[outputs, rank] += times
    trained = states.num_trainable_params(model, adapter)
    remaining = trained - _size(matrices)
    return Unit(trained=_padded(matrices, num_shards) + -(-remaining // num_shards), whole=trained)


def _padded(tensors: Count, num_shards: int) -> int:
    """Parameters that a device holds of tensors that are cut along their first dimension.

    Among the stored tensors are numbers without dimensions: buffers, such as the constants of Apertus' activation.
    """
    return sum(times * -(-(shape or (1,))[0] // num_shards) * prod(shape[1:]) for shape, times in tensors.items())


def _as_bytes(tensors: Count) -> Count:
    """Tensors in 4 bits as they are stored, two values a byte, in one column."""
    stored: Counter[tuple[int, ...]] = Counter()
    for shape, times in tensors.items():
        stored[-(-prod(shape) // 2), 1] += times
    return stored


def _size(tensors: Count) -> int:
    return sum(times * prod(shape) for shape, times in tensors.items())


def fsdp2_kept(
    units: Units, dtype: Dtype, layout: Layout, of_optimizer: int, devices_per_node: int, w: int = 4
) -> Kept:
    """Return the bytes kept from step to step. With CPU offload all of it is in host memory, and gradients with it.

    Rank 0 loads the model into host memory and hands it out (`cpu_ram_efficient_loading`), so its node holds it once,
    in the type in which it is trained.

    Args:
        units: The model, divided.
        dtype: Type of frozen weights.
        layout: How the run is spread.
        of_optimizer: Bytes of the optimizer's states on a device.
        devices_per_node: Devices that share a host memory.
        w: Bytes of a trained weight, and of its gradient.
    """
    mine, full = units.all, units.full
    trained, frozen = w * mine.trained, BYTES[dtype] * mine.frozen + mine.packed
    loading = units.num_shards * ((trained if full else 0) + frozen)
    if layout.offload_param_device == "cpu":
        host = devices_per_node * (trained + frozen + of_optimizer + trained)
        return Kept(units.undivided, host_bytes=max(host, loading))
    weights = units.undivided + frozen + (trained if full else 0)
    return Kept(weights, adapters=0 if full else trained, optimizer=of_optimizer, host_bytes=loading)


def fsdp2_needs(
    units: Units, layers: Layers, head: Head, dtype: Dtype, layout: Layout, *, accumulates: bool, w: int = 4
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases. A phase comes once for each moment or micro-batch that could be its peak.

    Args:
        units: The model, divided.
        layers: What the decoder layers hold.
        head: What the final norm and the head hold.
        dtype: Type of the products.
        layout: How the run is spread.
        accumulates: Whether a step has several micro-batches.
        w: Bytes of a trained weight, and of its gradient.
    """
    e = BYTES[dtype]
    gradients = 0 if layout.offload_param_device == "cpu" else w * units.all.trained
    # A tensor arrives whole on each device and is cut there: it, and its parts laid out anew, with padding.
    yield "load", Need(gathered=2 * units.gathered(units.tensor, w if units.full else e))
    backward = _Backward(units, layers, head, e, w, layout)
    if accumulates and layout.sync_each_batch:
        backward = replace(backward, held=gradients)
    elif accumulates:
        backward = replace(backward, whole=e * units.all.whole)
        yield from replace(backward, reduces=False).needs()
    yield from backward.needs()
    yield "optimizer", Need(gradients)


@dataclass(frozen=True)
class _Backward:
    """A micro-batch, from the end of its forward pass on."""

    units: Units
    layers: Layers
    head: Head
    e: int
    """Bytes of the compute type."""
    w: int
    """Bytes of a trained weight, and of its gradient in shards."""
    layout: Layout
    whole: int = 0
    """Bytes of gradients that lie there whole before it."""
    held: int = 0
    """Bytes of gradients that lie there in shards before it."""
    reduces: bool = True
    """True if gradients are reduced; otherwise they stay whole."""

    def needs(self) -> Iterator[tuple[Phase, Need]]:
        """Yield the needs of its phases."""
        units, head, before = self.units, self.head, self.whole + self.held
        tail, ahead = self._tail, self._gathered(units.layer)
        kept_bytes = self.layers.kept + self.layers.shared + head.kept
        stays = 0 if self.layout.reshard_after_forward else self._staying(units.num_layers)
        yield from self._unsharding()
        # The buffer in which the last unit of the forward pass arrived waits for the next.
        arrived = tail if units.full and not units.tied else ahead
        yield "forward", Need(before, kept_bytes + self.layers.forward_only, head.forward, tail + arrived + stays)
        # The head's gradient in float32, and its copy in the compute type.
        vocabulary = (4 + (self.e if self.e < 4 else 0)) * self._vocabulary if units.full else 0
        yield "head", Need(before, kept_bytes, head.backward, tail + vocabulary + (stays or ahead))
        yield from self._layer_needs()
        if units.full:
            yield from self._embedding_needs()

    def _unsharding(self) -> Iterator[tuple[Phase, Need]]:
        """Yield the moments when weights are copied out of the all-gather buffer, and the buffer is there still."""
        layers, units, num_layers = self.layers, self.units, self.units.num_layers
        first, layer, embedding = (self._gathered(unit) for unit in (units.first, units.layer, units.embedding))
        keeps = not self.layout.reshard_after_forward
        before_last = layers.kept * (num_layers - 1) // num_layers
        tied = embedding if units.tied else 0
        staying = self._staying(num_layers) if keeps else layer
        moments = [
            # The first layer's, behind the embedding's; the last one's, behind that of another layer; and its experts'.
            (layers.stream, embedding + first + (self._staying(1) if keeps else first) + tied),
            (before_last, 2 * layer + staying + tied),
            (layers.kept + layers.passing, layer + staying + tied),
        ]
        if units.full and not units.tied:
            # The head's.
            moments.append((layers.kept, layer + 2 * self._tail + (staying if keeps else 0)))
        for stored, gathered in moments:
            yield "forward", Need(self.whole + self.held, stored + layers.shared, 0, gathered)

    def _layer_needs(self) -> Iterator[tuple[Phase, Need]]:
        layers, units, num_layers = self.layers, self.units, self.units.num_layers
        # A tied head is whole until the embedding's backward pass, and its gradient waits for that of the embedding.
        waits = self._tail + (self.e * self._vocabulary if units.full else 0) if units.tied else 0
        of_tail = 0 if units.tied else self._reducing(units.head)
        before_first = units.layers + units.first * -1
        reducing = self._reducing(units.layer)
        # How many layers are left, what has its gradients, and the buffer from which the unit before is reduced.
        moments: list[tuple[Phase, int, Unit, int]] = [
            ("last layer", num_layers, Unit(), of_tail),
            ("first layer", 1, before_first, reducing),
        ]
        if num_layers > 2:
            # The last but one, and the second, or the third where a smaller one comes behind the second: memory falls
            # or rises evenly between them.
            lefts = {num_layers - 1, min(3, num_layers - 1), 2}
            moments += [("middle layers", left, before_first + units.layer * (1 - left), reducing) for left in lefts]
        for phase, num_left, finished, reducing in moments:
            stored = layers.leading
            if num_left > 1:
                stored = layers.kept * num_left // num_layers + layers.recomputed + layers.working
            # This layer, and the next unit; or all that have not been freed.
            gathered = self._gathered(units.layer) + self._gathered(units.first if num_left == 2 else units.layer)
            if not self.layout.reshard_after_forward or num_left == 1:
                gathered = self._staying(num_left)
            gradients = self._gradients(finished + (Unit() if units.tied else units.head))
            yield phase, Need(gradients, stored + layers.shared, 0, gathered + reducing + waits)

    def _embedding_needs(self) -> Iterator[tuple[Phase, Need]]:
        units, table = self.units, self.e * self._vocabulary
        finished = units.layers + (Unit() if units.tied else units.head)
        gradients, gathered = self._gradients(finished), self._gathered(units.embedding) + self._reducing(units.first)
        if units.tied:
            # Gathered; the gradients of both uses, and their sum.
            yield "embedding", Need(gradients, gathered=gathered + 3 * table)
            return
        yield "embedding", Need(gradients, self.layers.stream, 0, gathered + table)
        if self.reduces:
            # What is reduced, before and after, and then cast.
            after = (self._cast + (self.w if self.held or self._offloads else 0)) * units.embedding.trained
            reduced = table + self._reducing(units.embedding) + after
            yield "embedding", Need(self._gradients(finished + units.embedding), gathered=reduced)

    def _gradients(self, done: Unit) -> int:
        """Bytes of gradients that stay, when those of `done` have been computed."""
        if not self.reduces:
            return self.whole + self.held
        each = 0 if self.held or self._offloads else self.w
        if self.layout.dp_replicate_size > 1:
            # What was summed over the replicas stays until the pass ends, besides a copy in float32.
            each += self._cast
        return self.held + each * done.trained + max(0, self.whole - self.e * done.whole)

    def _staying(self, num_layers: int) -> int:
        """Bytes of the first layers and the embedding, gathered."""
        units, first = self.units, self._gathered(self.units.first)
        embedding, behind = 0 if units.tied else self._gathered(units.embedding), self._gathered(units.layers) - first
        return first + behind * (num_layers - 1) // max(1, units.num_layers - 1) + embedding

    def _gathered(self, unit: Unit) -> int:
        return self.units.gathered(unit, self.e)

    def _reducing(self, unit: Unit) -> int:
        """Bytes of the buffer from which a unit's gradients are reduced."""
        return self.units.reduced(unit, self.e) if self.reduces else 0

    @property
    def _cast(self) -> int:
        """Bytes of a gradient in the compute type, where that of the weight is another in float32."""
        return self.e if self.e != self.w else 0

    @property
    def _offloads(self) -> bool:
        """True if gradients leave the device when they are reduced."""
        return self.layout.offload_param_device == "cpu"

    @property
    def _tail(self) -> int:
        """Bytes of the head's weights, and of the final norm's, in the forward pass and the head's backward pass."""
        return self._gathered(self.units.embedding if self.units.tied else self.units.head)

    @property
    def _vocabulary(self) -> int:
        """Parameters of the head."""
        return (self.units.embedding if self.units.tied else self.units.head).whole


SUB_GROUP_PARAMS = 10**9
"""Parameters that stage 3 updates at a time (DeepSpeed's `sub_group_size`)."""


class ZeroBuckets(Facts):
    """Sizes of what DeepSpeed puts together for one exchange, in parameters."""

    reduced: int
    """Gradients that are summed at once (`reduce_bucket_size`)."""
    prefetched: int
    """Weights that stage 3 gathers ahead of their use (`stage3_prefetch_bucket_size`)."""
    persistent: int
    """Size of a weight below which stage 3 leaves it whole on each device (`stage3_param_persistence_threshold`)."""


def zero_buckets(model: ModelFacts, adapter: Adapter) -> ZeroBuckets:
    """The sizes for a model, which both the memory estimate and the configuration of the engine go by."""
    square = model.hidden_size**2
    return ZeroBuckets(
        reduced=min(square, states.num_trainable_params(model, adapter)),
        prefetched=int(0.9 * square),
        persistent=10 * model.hidden_size,
    )


def zero_kept(
    model: ModelFacts, adapter: Adapter, dtype: Dtype, layout: Layout, *, optimizer_bytes: float, devices_per_node: int
) -> Kept:
    """Return the bytes kept from step to step, on each device and on the node.

    An offloaded optimizer takes the gradients with it, in float32: 16 bytes a parameter with Adam.
    """
    e, trained = BYTES[dtype], states.num_trainable_params(model, adapter)
    base = e * model.num_params if isinstance(adapter, FullAdapter) else states.weights_bytes(model, adapter, dtype)
    adapters = 0 if isinstance(adapter, FullAdapter) else e * trained
    if layout.strategy == "zero3":
        base, adapters = base // layout.num_shards, adapters // layout.num_shards
    part = trained // layout.num_shards
    # DeepSpeed updates a copy of weights that are in float32 as well (0.19).
    masters, of_optimizer = 4 * part, int(optimizer_bytes * part)
    away = {"none": 0, "cpu": 0, "nvme": 0}
    if layout.offload_param_device != "none":
        away[layout.offload_param_device] += base + adapters
        base = adapters = 0
    if layout.offload_optimizer_device != "none":
        away[layout.offload_optimizer_device] += masters + of_optimizer + 4 * part
        masters = of_optimizer = 0
    host, nvme = devices_per_node * away["cpu"], devices_per_node * away["nvme"]
    return Kept(base, adapters, masters, optimizer=of_optimizer, host_bytes=host, nvme_bytes=nvme)


def zero_needs(
    model: ModelFacts, adapter: Adapter, layers: Layers, head: Head, dtype: Dtype, layout: Layout, *, accumulates: bool
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases."""
    e, trained = BYTES[dtype], states.num_trainable_params(model, adapter)
    full, shards = isinstance(adapter, FullAdapter), layout.num_shards
    table = model.vocab_size * model.hidden_size
    gradients = e * trained // (1 if layout.strategy == "zero1" else shards)
    if layout.strategy != "zero1" and layout.offload_optimizer_device != "none":
        gradients = 0
    before = gradients if accumulates else 0
    sizes = zero_buckets(model, adapter)
    # One bucket is filled while the other is reduced.
    buckets = 2 * e * sizes.reduced
    layer = ahead = gathered_table = 0
    if layout.strategy == "zero3":
        whole = model.num_params + (0 if full else trained) - (1 if model.has_tied_head or model.judges else 2) * table
        layer, ahead, gathered_table = e * whole // model.num_layers, e * sizes.prefetched, e * table
    layer_gradients = e * (trained - (table if full else 0)) // model.num_layers if layout.strategy != "zero1" else 0
    around = layer + ahead + layer_gradients + buckets
    kept_bytes = layers.kept + layers.shared
    vocabulary = (4 + e) * table if full and not model.judges else 0
    yield "load", Need(gathered=gathered_table)
    gathered = gathered_table + ahead + buckets
    yield "forward", Need(before, kept_bytes + layers.forward_only + head.kept, head.forward, gathered)
    yield "head", Need(before, kept_bytes + head.kept, head.backward, gathered + vocabulary)
    waits = e * table if full and model.has_tied_head else 0
    yield "last layer", Need(before, kept_bytes + layers.recomputed + layers.working, 0, around + waits)
    yield "first layer", Need(gradients, layers.first + layers.working + layers.shared, 0, around + waits)
    if full:
        uses = 3 if model.has_tied_head else 1
        yield "embedding", Need(gradients, layers.stream, 0, gathered_table + uses * e * table + buckets)
    # The gradients of what is updated, in float32.
    updated = min(trained // shards, SUB_GROUP_PARAMS) if layout.strategy == "zero3" else trained // shards
    if layout.offload_optimizer_device != "none" or e == 4:
        updated = 0
    yield "optimizer", Need(gradients + 4 * updated)
