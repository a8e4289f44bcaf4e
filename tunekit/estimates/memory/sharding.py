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

from tunekit.estimates.facts import Device, Facts, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import Head, Layers
from tunekit.estimates.memory.states import (
    BYTES,
    Dtype,
    Kept,
    Need,
    Phase,
    num_trainable_params,
    unties_head,
    weights_bytes,
)
from tunekit.recipe.sections.model import FullAdapter, LoraAdapter, QloraAdapter

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

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(self.frozen + other.frozen, self.trained + other.trained, self.whole + other.whole)

    def __mul__(self, times: int) -> "Unit":
        return Unit(self.frozen * times, self.trained * times, self.whole * times)


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

    @property
    def all(self) -> Unit:
        """The whole model."""
        return self.layers + self.embedding + self.head

    def gathered(self, unit: Unit) -> int:
        """Parameters of a unit when it is whole on each device, padding included."""
        return self.num_shards * (unit.frozen + unit.trained)


def units_of(model: ModelFacts, adapter: FullAdapter | LoraAdapter, num_shards: int) -> Units:
    """Return the shards that each of `num_shards` devices holds."""
    shapes = model.shapes
    full = isinstance(adapter, FullAdapter)

    def unit(tensors: Count) -> Unit:
        padded = _padded(tensors, num_shards)
        return Unit(trained=padded, whole=_size(tensors)) if full else Unit(frozen=padded)

    def divided(layer: Count) -> Count:
        """Accelerate divides no 4-bit weights: they lie whole on each device."""
        quantised = isinstance(adapter, QloraAdapter)
        return {shape: times for shape, times in layer.items() if len(shape) != 2} if quantised else layer

    layers = [(unit(divided(tensors)), times) for tensors, times in shapes.layers]
    first, largest = layers[0][0], max((layer for layer, _ in layers), key=lambda layer: layer.frozen + layer.trained)
    whole = sum((layer * times for layer, times in layers), Unit())
    if not isinstance(adapter, FullAdapter):
        adapted = _adapters(model, adapter, num_shards)
        whole += adapted
        each = Unit(0, adapted.trained // model.num_layers, adapted.whole // model.num_layers)
        first, largest = first + each, largest + each
    tail = unit(shapes.embedding if unties_head(model, adapter) else shapes.head) + unit(shapes.others)
    kinds = [*(kind for kind, _ in shapes.layers), shapes.embedding, shapes.head]
    # Experts that are stored apart have their gate and their up projections in one tensor, two of a shape.
    tensors = [{shape: times if len(shape) > 2 else 1} for kind in kinds for shape, times in kind.items()]
    units = [Unit(frozen=_padded(tensor, num_shards), whole=_size(tensor)) for tensor in tensors]
    tensor = max(units, key=lambda unit: unit.frozen)
    return Units(first, largest, whole, unit(shapes.embedding), tail, tensor, model.num_layers, num_shards)


def _adapters(model: ModelFacts, adapter: LoraAdapter, num_shards: int) -> Unit:
    """The matrices of all adapters; what is trained besides them is divided without a remainder."""
    matrices: Counter[tuple[int, ...]] = Counter()
    for (outputs, inputs, each), times in model.adapter_shapes(adapter.target_modules).items():
        matrices[each * adapter.rank, inputs] += times
        matrices[outputs, each * adapter.rank] += times
    trained = num_trainable_params(model, adapter)
    remaining = trained - _size(matrices)
    return Unit(trained=_padded(matrices, num_shards) + -(-remaining // num_shards), whole=trained)


def _padded(tensors: Count, num_shards: int) -> int:
    """Parameters that a device holds of tensors that are cut along their first dimension."""
    return sum(times * -(-shape[0] // num_shards) * prod(shape[1:]) for shape, times in tensors.items())


def _size(tensors: Count) -> int:
    return sum(times * prod(shape) for shape, times in tensors.items())


def fsdp2_kept(
    units: Units,
    dtype: Dtype,
    *,
    undivided: int,
    optimizer_bytes: float,
    full: bool,
    layout: Layout,
    devices_per_node: int,
) -> Kept:
    """Return the bytes kept from step to step. With CPU offload all of it is in main memory, and gradients with it.

    Rank 0 loads the model into main memory and hands it out (`cpu_ram_efficient_loading`), so its node holds it once,
    in the type in which it is trained.

    Args:
        units: The model, divided.
        dtype: Type of frozen weights.
        undivided: Bytes of weights that each device holds whole.
        optimizer_bytes: Bytes of the optimizer's states for each trained parameter.
        full: Whether all weights are trained, and not adapters.
        layout: How the run is spread.
        devices_per_node: Devices that share a main memory.
    """
    mine = units.all
    trained, frozen = 4 * mine.trained, BYTES[dtype] * mine.frozen
    states = int(optimizer_bytes * mine.trained)
    loading = units.num_shards * ((4 if full else 0) * mine.trained + frozen)
    if layout.offload_param_device == "cpu":
        host = devices_per_node * (trained + frozen + states + 4 * mine.trained)
        return Kept(undivided, host_bytes=max(host, loading))
    return Kept(
        weights=undivided + frozen + (trained if full else 0),
        adapters=0 if full else trained,
        optimizer=states,
        host_bytes=loading,
    )


def fsdp2_needs(
    units: Units, layers: Layers, head: Head, dtype: Dtype, *, full: bool, tied: bool, layout: Layout, accumulates: bool
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases. A phase comes once for each moment or micro-batch that could be its peak.

    Args:
        units: The model, divided.
        layers: What the decoder layers hold.
        head: What the final norm and the head hold.
        dtype: Type of the products.
        full: Whether all weights are trained, and not adapters.
        tied: Whether the head uses the weights of the embedding.
        layout: How the run is spread.
        accumulates: Whether a step has several micro-batches.
    """
    e = BYTES[dtype]
    # A tensor arrives whole on each device and is cut there: it, and its parts laid out anew, with padding.
    yield "load", Need(gathered=(4 if full else e) * (units.tensor.whole + units.gathered(units.tensor)))
    backward = _Backward(units, layers, head, e, full, tied, layout, 0, 0, reduces=True)
    if accumulates and layout.sync_each_batch:
        backward = replace(backward, held=0 if layout.offload_param_device == "cpu" else 4 * units.all.trained)
    elif accumulates:
        backward = replace(backward, whole=e * units.all.whole)
        yield from replace(backward, reduces=False).needs()
    yield from backward.needs()
    yield "optimizer", Need(gradients=0 if layout.offload_param_device == "cpu" else 4 * units.all.trained)


@dataclass(frozen=True)
class _Backward:
    """A micro-batch, from the end of its forward pass on."""

    units: Units
    layers: Layers
    head: Head
    e: int
    """Bytes of the compute type."""
    full: bool
    tied: bool
    layout: Layout
    whole: int
    """Bytes of gradients that lie there whole before it."""
    held: int
    """Bytes of gradients that lie there in shards before it."""
    reduces: bool
    """True if gradients are reduced; otherwise they stay whole."""

    def needs(self) -> Iterator[tuple[Phase, Need]]:
        """Yield the needs of its phases."""
        kept_bytes = self.layers.kept + self.layers.shared
        tail, ahead = self._tail, self._layer
        stays = 0 if self.layout.reshard_after_forward else self._staying(self.units.num_layers)
        yield from self._unsharding()
        # The buffer in which the last unit of the forward pass arrived waits for the next.
        arrived = tail if self.full and not self.tied else ahead
        yield (
            "forward",
            Need(
                gradients=self.whole + self.held,
                activations=kept_bytes + self.layers.forward_only + self.head.kept,
                logits=self.head.forward,
                gathered=tail + arrived + stays,
            ),
        )
        # The head's gradient in float32, and its copy in the compute type.
        vocabulary = (4 + self._cast) * self._vocabulary if self.full else 0
        yield (
            "head",
            Need(
                gradients=self.whole + self.held,
                activations=kept_bytes + self.head.kept,
                logits=self.head.backward,
                gathered=tail + vocabulary + (stays or ahead),
            ),
        )
        yield from self._layer_needs()
        if self.full:
            yield from self._embedding_needs()

    def _unsharding(self) -> Iterator[tuple[Phase, Need]]:
        """Yield the moments when weights are copied out of the all-gather buffer, and the buffer is there still."""
        layers, num_layers = self.layers, self.units.num_layers
        keeps = not self.layout.reshard_after_forward
        before_last = layers.kept * (num_layers - 1) // num_layers
        tied = self._embedding if self.tied else 0
        moments = [
            # The first layer's, behind the embedding's; the last one's, behind that of another layer; and its experts'.
            (layers.stream, self._embedding + self._first + (self._staying(1) if keeps else self._first) + tied),
            (before_last, 2 * self._layer + (self._staying(num_layers) if keeps else self._layer) + tied),
            (layers.kept + layers.passing, self._layer + (self._staying(num_layers) if keeps else self._layer) + tied),
        ]
        if self.full and not self.tied:
            # The head's.
            moments.append((layers.kept, self._layer + 2 * self._tail + (self._staying(num_layers) if keeps else 0)))
        for stored, gathered in moments:
            yield "forward", Need(self.whole + self.held, stored + layers.shared, 0, gathered)

    def _layer_needs(self) -> Iterator[tuple[Phase, Need]]:
        layers, num_layers = self.layers, self.units.num_layers
        # A tied head is whole until the embedding's backward pass, and its gradient waits for that of the embedding.
        waits = (self._embedding + (self.e * self._vocabulary if self.full else 0)) if self.tied else 0
        of_tail = 0 if self.tied else self._reducing(self.units.head)
        before_first = self.units.layers + self.units.first * -1
        reducing = self._reducing(self.units.layer)
        # How many layers are left, what has its gradients, and the buffer from which the unit before is reduced.
        moments: list[tuple[Phase, int, Unit, int]] = [
            ("last layer", num_layers, Unit(), of_tail),
            ("first layer", 1, before_first, reducing),
        ]
        if num_layers > 2:
            # The last but one, and the second, or the third where a smaller one comes behind the second: memory falls
            # or rises evenly between them.
            lefts = {num_layers - 1, min(3, num_layers - 1), 2}
            moments += [
                ("middle layers", num_left, before_first + self.units.layer * (1 - num_left), reducing)
                for num_left in lefts
            ]
        for phase, num_left, finished, reducing in moments:
            following = self._first if num_left == 2 else self._layer
            stored = (
                layers.kept * num_left // num_layers + layers.recomputed + layers.working
                if num_left > 1
                else layers.leading
            )
            # This layer, and the next unit; or all that have not been freed.
            keeps = not self.layout.reshard_after_forward or num_left == 1
            gathered = self._staying(num_left) if keeps else self._layer + following
            finished += Unit() if self.tied else self.units.head
            yield (
                phase,
                Need(
                    gradients=self._gradients(finished),
                    activations=stored + layers.shared,
                    gathered=gathered + reducing + waits,
                ),
            )

    def _embedding_needs(self) -> Iterator[tuple[Phase, Need]]:
        table = self.e * self._vocabulary
        finished = self.units.layers + (Unit() if self.tied else self.units.head)
        reducing = self._reducing(self.units.first)
        if self.tied:
            # Gathered; the gradients of both uses, and their sum.
            yield (
                "embedding",
                Need(gradients=self._gradients(finished), gathered=self._embedding + 3 * table + reducing),
            )
            return
        yield (
            "embedding",
            Need(
                gradients=self._gradients(finished),
                activations=self.layers.stream,
                gathered=self._embedding + table + reducing,
            ),
        )
        if self.reduces:
            # What is reduced, before and after, and then cast.
            after = (self._cast + (4 if self.held or self._offloads else 0)) * self.units.embedding.trained
            yield (
                "embedding",
                Need(
                    gradients=self._gradients(finished + self.units.embedding),
                    gathered=table + self._reducing(self.units.embedding) + after,
                ),
            )

    def _gradients(self, done: Unit) -> int:
        """Bytes of gradients that stay, when those of `done` have been computed."""
        if not self.reduces:
            return self.whole + self.held
        each = 0 if self.held or self._offloads else 4
        if self.layout.dp_replicate_size > 1:
            # What was summed over the replicas stays until the pass ends, besides the copy in float32.
            each += self._cast
        return self.held + each * done.trained + max(0, self.whole - self.e * done.whole)

    def _staying(self, num_layers: int) -> int:
        """Bytes of the first layers and the embedding, gathered."""
        embedding, gathered = 0 if self.tied else self._embedding, self._gathered(self.units.layers) - self._first
        return self._first + gathered * (num_layers - 1) // max(1, self.units.num_layers - 1) + embedding

    def _gathered(self, unit: Unit) -> int:
        return self.e * self.units.gathered(unit)

    def _reducing(self, unit: Unit) -> int:
        """Bytes of the buffer from which a unit's gradients are reduced."""
        return self.e * self.units.num_shards * unit.trained if self.reduces else 0

    @property
    def _cast(self) -> int:
        """Bytes of a gradient in the compute type, where its copy in float32 is another."""
        return self.e if self.e != 4 else 0

    @property
    def _offloads(self) -> bool:
        """True if gradients leave the device when they are reduced."""
        return self.layout.offload_param_device == "cpu"

    @property
    def _first(self) -> int:
        return self._gathered(self.units.first)

    @property
    def _layer(self) -> int:
        return self._gathered(self.units.layer)

    @property
    def _embedding(self) -> int:
        return self._gathered(self.units.embedding)

    @property
    def _tail(self) -> int:
        """Bytes of the head's weights, and of the final norm's, in the forward pass and the head's backward pass."""
        return self._embedding if self.tied else self._gathered(self.units.head)

    @property
    def _vocabulary(self) -> int:
        """Parameters of the head."""
        return self.units.embedding.whole if self.tied else self.units.head.whole


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


def zero_buckets(model: ModelFacts, adapter: FullAdapter | LoraAdapter) -> ZeroBuckets:
    """The sizes for a model, which both the memory estimate and the configuration of the engine go by."""
    square = model.hidden_size**2
    return ZeroBuckets(
        reduced=min(square, num_trainable_params(model, adapter)),
        prefetched=int(0.9 * square),
        persistent=10 * model.hidden_size,
    )


def pad_to_multiple_of(max_length: int, layout: Layout, device: Device) -> int | None:
    """Return the multiple that rows are padded to where Ulysses divides them: one equal part per device.

    The devices show each other their micro-batches, which gloo can only where they are of one length.
    """
    parts = layout.sp_size
    if parts == 1:
        return None
    return parts * -(-max_length // parts) if device.kind == "cpu" else parts


def zero_kept(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    dtype: Dtype,
    *,
    optimizer_bytes: float,
    layout: Layout,
    devices_per_node: int,
) -> Kept:
    """Return the bytes kept from step to step, on each device and on the node.

    An offloaded optimizer takes the gradients with it, in float32: 16 bytes a parameter with Adam.
    """
    e, trained = BYTES[dtype], num_trainable_params(model, adapter)
    base = e * model.num_params if isinstance(adapter, FullAdapter) else weights_bytes(model, adapter, dtype)
    adapters = 0 if isinstance(adapter, FullAdapter) else e * trained
    if layout.strategy == "zero3":
        base, adapters = base // layout.num_shards, adapters // layout.num_shards
    part = trained // layout.num_shards
    # DeepSpeed updates a copy of weights that are in float32 as well (0.19).
    masters, states = 4 * part, int(optimizer_bytes * part)
    away = {"none": 0, "cpu": 0, "nvme": 0}
    away[layout.offload_param_device] += base + adapters
    away[layout.offload_optimizer_device] += masters + states + 4 * part
    stays_optimizer = layout.offload_optimizer_device == "none"
    stays_weights = layout.offload_param_device == "none"
    return Kept(
        weights=base if stays_weights else 0,
        adapters=adapters if stays_weights else 0,
        masters=masters if stays_optimizer else 0,
        optimizer=states if stays_optimizer else 0,
        host_bytes=devices_per_node * away["cpu"],
        nvme_bytes=devices_per_node * away["nvme"],
    )


def zero_needs(
    model: ModelFacts,
    adapter: FullAdapter | LoraAdapter,
    layers: Layers,
    head: Head,
    dtype: Dtype,
    *,
    layout: Layout,
    accumulates: bool,
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases."""
    e, trained = BYTES[dtype], num_trainable_params(model, adapter)
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
    yield (
        "forward",
        Need(before, kept_bytes + layers.forward_only + head.kept, head.forward, gathered_table + ahead + buckets),
    )
    yield "head", Need(before, kept_bytes + head.kept, head.backward, gathered_table + vocabulary + ahead + buckets)
    waits = e * table if full and model.has_tied_head else 0
    yield "last layer", Need(before, kept_bytes + layers.recomputed + layers.working, 0, around + waits)
    first = layers.first + layers.working + layers.shared
    yield "first layer", Need(gradients, first, 0, around + waits)
    if full:
        uses = 3 if model.has_tied_head else 1
        yield "embedding", Need(gradients, layers.stream, 0, gathered_table + uses * e * table + buckets)
    # The gradients of what is updated, in float32.
    updated = trained // shards
    if layout.strategy == "zero3":
        updated = min(updated, SUB_GROUP_PARAMS)
    if layout.offload_optimizer_device != "none" or e == 4:
        updated = 0
    yield "optimizer", Need(gradients=gradients + 4 * updated)
