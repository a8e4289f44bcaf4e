"""DeepSpeed's ZeRO stages: what a device keeps of a model, what leaves it, and what it needs for a time.

Weights and gradients are in the compute type, and float32 copies of what is trained lie beside them: 2 + 2 + 12 bytes a
parameter with Adam. Stage 1 divides the copies and the optimizer's states, stage 2 the gradients too, stage 3 also the
weights (arXiv 1910.02054, section 5). Nothing of this is traced. The buckets are what transformers' `auto` would make
of them, but no larger than what is trained.
"""

from collections.abc import Iterator

from tunekit.planner.facts import Device, Facts, ModelFacts
from tunekit.planner.layout import Layout
from tunekit.planner.memory.activations import Head, Layers
from tunekit.planner.memory.phases import Kept, Need, Phase
from tunekit.planner.memory.states import BYTES, Dtype, num_trainable_params, weights_bytes
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

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
