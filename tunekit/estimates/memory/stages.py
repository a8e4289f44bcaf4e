"""Bytes of a model that NeMo Automodel divides: by layers into the stages of a pipeline, and each stage by FSDP2.

Read from nemo_automodel 0.7.0 and torch 2.13; nothing of it was compared with a device.

Stages. Each gets as many layers, the first of them one more where the number does not divide; the embedding is on the
first, the final norm and the head are on the last (`distributed/pipelining/functional.py`,
`generate_hf_model_fqn_per_model_part`). By the schedule 1F1B stage s of P holds activations of P - s micro-batches at
once (arXiv 2006.09503, section 2.2). Tensors in which a stage receives activations and gradients are as many, and two
more, where they are pooled (`pp_recv_buffer_pool`, which the training sets); torch has them of all micro-batches of a
step. So are logits dropped behind the loss, which torch's last stage keeps of all micro-batches and puts together at
the end (`schedule.step` with `return_outputs`, which the training unsets).

Weights of a stage stay gathered from the first micro-batch to the last, and gradients are accumulated whole, in the
type in which they are reduced (`FSDPParam.to_accumulated_grad_if_needed`), until the last backward pass reduces them:
torch's `backward_maybe_with_nosync`, and Automodel's of mixtures. Reduced in every micro-batch
(`distributed.defer_fsdp_grad_sync: false`) they are there in shards, and weights are freed behind a backward pass.

Experts. Each of `ep_size` devices has some of them, divided along their second dimension among those that have the
same (`moe/parallelizer.py`, `apply_fsdp`). By the torch dispatcher a device computes its experts for the tokens of all
`ep_size` devices: it gathers them, and sums what all experts give in float32 (`moe/experts.py`, `GroupedExperts`).

Layers are transformers' own (`force_hf: true`), Automodel's where experts are divided; both are recomputed as a whole,
from their inputs (`apply_full_layer_checkpointing_to_layers`, `moe/parallelizer.py`: `apply_ac`). Automodel's dense
classes are not: they keep four inputs of each layer. The loss takes all logits in float32 (`loss/masked_ce.py`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from tunekit.estimates.facts import DeviceKind, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory import states
from tunekit.estimates.memory.activations import Head, Layers, layers_of, products_of
from tunekit.estimates.memory.states import BYTES, Dtype, Kept, Need, Phase
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.section import Optim

FULL = FullAdapter()

POOL_SLACK = 2
"""Received tensors that a pool has beyond those of micro-batches in flight (`pp_recv_buffer_pool_slack`)."""


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers and reduces together."""

    divided: int = 0
    """As a device holds them, with padding."""
    whole: int = 0
    """As a device gathers them: of experts its own alone."""
    experts: int = 0
    """Of these, those of experts."""

    def __add__(self, other: "Unit") -> "Unit":
        return Unit(self.divided + other.divided, self.whole + other.whole, self.experts + other.experts)


@dataclass(frozen=True)
class Stage:
    """Part of a model that the devices of one stage hold."""

    index: int
    pp_size: int
    start: int
    """Number of its first layer."""
    layers: tuple[Unit, ...]
    embedding: Unit
    tail: Unit
    """The final norm and the head."""

    @property
    def is_first(self) -> bool:
        """True if it embeds tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if it computes the loss."""
        return self.index == self.pp_size - 1

    @property
    def all(self) -> Unit:
        """All of its parameters."""
        return sum(self.layers, self.embedding + self.tail)

    @property
    def largest(self) -> Unit:
        """The unit that takes most when it is gathered."""
        return max((*self.layers, self.embedding, self.tail), key=lambda unit: unit.whole)


def layers_per_stage(num_layers: int, pp_size: int) -> list[int]:
    """Return the number of layers of each stage."""
    each, more = divmod(num_layers, pp_size)
    return [each + (index < more) for index in range(pp_size)]


def stages_of(model: ModelFacts, layout: Layout) -> list[Stage]:
    """Return the stages of a model in their order."""
    units = [_unit_of(shapes, model, layout) for shapes in model.layer_shapes]
    shapes = model.shapes
    embedding, tail = (_unit_of(counter, model, layout) for counter in (shapes.embedding, shapes.head + shapes.others))
    stages, start = [], 0
    for index, number in enumerate(layers_per_stage(model.num_layers, layout.pp_size)):
        own = tuple(units[start : start + number])
        first, last = index == 0, index == layout.pp_size - 1
        stages.append(
            Stage(index, layout.pp_size, start, own, embedding if first else Unit(), tail if last else Unit())
        )
        start += number
    return stages


def _unit_of(tensors: Counter[tuple[int, ...]], model: ModelFacts, layout: Layout) -> Unit:
    """Return the parameters of some tensors, cut along their first dimension, or experts along their second."""
    shards, ep, unit = layout.num_shards, layout.ep_size, Unit()
    for shape, times in tensors.items():
        if ep > 1 and shape in model.expert_shapes:
            experts, rows, *columns = shape
            parts = shards // ep
            divided = times * experts // ep * -(-rows // parts) * prod(columns)
            unit += Unit(divided, parts * divided, parts * divided)
        else:
            first, *inner = shape or (1,)
            divided = times * -(-first // shards) * prod(inner)
            unit += Unit(divided, shards * divided)
    return unit


def staged_needs(
    model: ModelFacts,
    *,
    device: DeviceKind,
    dtype: Dtype,
    optim: Optim,
    trained_dtype: Dtype,
    num_tokens: int,
    num_micro_batches: int,
    mask_length: int | None,
    sliding_mask_length: int | None,
    gradient_checkpointing: bool,
    layout: Layout,
    scores_length: int | None,
    foreach: bool,
) -> tuple[Kept, dict[Phase, Need]]:
    """Return the bytes that the devices of the largest stage keep, and those of its phases at their most.

    Args:
        model: The model, trained whole.
        device: Kind of the devices.
        dtype: Type of the products.
        optim: Optimizer.
        trained_dtype: Type of trained weights, and of their reduced gradients.
        num_tokens: Tokens of a micro-batch with its padding.
        num_micro_batches: Micro-batches of a step that pass through each stage.
        mask_length: Length of a row of the attention mask; None without a mask.
        sliding_mask_length: The same in layers of sliding attention.
        gradient_checkpointing: Whether layers are computed again in the backward pass.
        layout: Sizes of the layout.
        scores_length: Length of a row of scores where attention keeps all of them; None elsewhere.
        foreach: Whether the optimizer's step has a temporary value for each parameter.
    """
    w, of_optimizer = BYTES[trained_dtype], states.optimizer_bytes_per_param(optim, trained_dtype)
    largest: tuple[Kept, dict[Phase, Need]] | None = None
    cut: dict[tuple[Unit, ...], Layers] = {}
    for stage in stages_of(model, layout):
        if stage.layers not in cut:
            part = model.of_layers(stage.start, stage.start + len(stage.layers))
            products = products_of(part, FULL, dtype, device, autocast=False, trained_dtype=trained_dtype)
            cut[stage.layers] = layers_of(
                products,
                num_tokens,
                mask_length,
                sliding_mask_length,
                gradient_checkpointing=gradient_checkpointing,
                accumulates=num_micro_batches > 1,
                scores_length=scores_length,
            )
        step = _Step(
            stage,
            cut[stage.layers],
            head_of_all(model, num_tokens, dtype) if stage.is_last else Head(0, 0, 0),
            layout,
            BYTES[dtype],
            w,
            BYTES[layout.reduces_in(dtype, trained_dtype)],
            num_micro_batches,
            logits=BYTES[dtype] * model.vocab_size * num_tokens if stage.is_last else 0,
            exchanged=_exchanged_bytes(model, layout, num_tokens, dtype),
            recomputes=gradient_checkpointing,
        )
        unit = stage.all
        kept_state = Kept(w * unit.divided, optimizer=int(of_optimizer * unit.divided))
        highest: dict[Phase, Need] = {}
        for phase, need in step.needs():
            more = replace(need, gradients=2 * need.gradients) if phase == "optimizer" and foreach else need
            if phase not in highest or more.total > highest[phase].total:
                highest[phase] = more
        if largest is None or _peak(kept_state, highest) > _peak(*largest):
            largest = kept_state, highest
    assert largest is not None
    return largest


def _peak(kept_state: Kept, needs: dict[Phase, Need]) -> int:
    return kept_state.total + max(need.total for phase, need in needs.items() if phase != "load")


def head_of_all(model: ModelFacts, num_tokens: int, dtype: Dtype) -> Head:
    """Return the bytes of the final norm, the head and the loss, without the logits of the compute type.

    The norm keeps its input in float32 and its product, the head what it reads. Logits are cast to float32 for the
    loss, which keeps their log-softmax; behind it there are its gradient, and that of the cast logits. Those of the
    compute type are there until then: the model's output, or that of the stage, holds them.
    """
    e, h = BYTES[dtype], model.hidden_size
    wide = 4 * model.vocab_size * num_tokens
    return Head((4 + 2 * e) * h * num_tokens + wide, wide if e < 4 else 0, 2 * wide)


def _exchanged_bytes(model: ModelFacts, layout: Layout, num_tokens: int, dtype: Dtype) -> int:
    """Bytes of the tokens that a device gathers to compute its experts, and twice of what these give in float32."""
    if layout.ep_size == 1 or model.mixture is None:
        return 0
    return (BYTES[dtype] + 2 * 4) * layout.ep_size * num_tokens * model.hidden_size


@dataclass(frozen=True)
class _Step:
    """An optimizer step on a device of one stage."""

    stage: Stage
    layers: Layers
    head: Head
    layout: Layout
    e: int
    """Bytes of the compute type."""
    w: int
    """Bytes of a trained weight, and of its reduced gradient."""
    r: int
    """Bytes of a gradient that is accumulated whole, and sent."""
    num_micro_batches: int
    logits: int
    """Bytes of a micro-batch's logits in the compute type."""
    exchanged: int
    """Bytes of what is exchanged for the experts of a layer while they are computed."""
    recomputes: bool

    @property
    def accumulates(self) -> bool:
        """True if gradients of an earlier micro-batch are there."""
        return self.num_micro_batches > 1

    @property
    def defers(self) -> bool:
        """True if gradients are whole until the last micro-batch."""
        return self.accumulates and not self.layout.sync_each_batch

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations are there at once."""
        return min(self.stage.pp_size - self.stage.index, self.num_micro_batches)

    @property
    def received(self) -> int:
        """Bytes of the tensors in which activations and gradients arrive (`pipelining/recv_buffer_pool.py`).

        Activations are what the first layer reads, which is counted with it where that is all it keeps.
        """
        number = max(2, min(self.num_micro_batches, self.in_flight + POOL_SLACK))
        activations = 0 if self.stage.is_first else number - self.in_flight * self.recomputes
        gradients = 0 if self.stage.is_last else number
        return (activations + gradients) * self.layers.stream

    @property
    def kept(self) -> int:
        """Bytes of activations of one micro-batch: those of layers, and the output of the stage."""
        sent = 0 if self.stage.is_last else self.layers.stream
        casts = 0 if self.recomputes or self.w == self.e else self.e * self._local_experts
        return self.layers.kept + casts + sent

    def needs(self) -> Iterator[tuple[Phase, Need]]:
        """Yield the needs of the phases of a stage, some for several moments."""
        stage, layers, head, divided = self.stage, self.layers, self.head, self.w * self.stage.all.divided
        earlier = (self.in_flight - 1) * self.kept + self.received + layers.shared
        whole, around, staying = self._whole, self._around, self._staying
        before = self.r * stage.all.whole if self.defers else divided if self.accumulates else 0
        forward = earlier + self.kept + layers.forward_only
        computing = max(0, layers.passing) + self.exchanged
        yield "load", Need(gathered=2 * self.w * stage.largest.divided)
        yield "forward", Need(before, forward + computing, 0, staying)
        if stage.is_last:
            yield "forward", Need(before, forward + head.kept, self.logits + head.forward, staying)
            gathered = (whole or around) + self._gradient(stage.tail)
            yield "head", Need(before, earlier + self.kept + head.kept, self.logits + head.backward, gathered)
        last, first = stage.layers[-1], stage.layers[0]
        working = layers.working + self.exchanged
        stored = earlier + self.kept + layers.recomputed + working
        sums = before if self.accumulates else self.w * stage.tail.divided
        yield "last layer", Need(sums, stored, 0, (whole or around) + self._gradient(last))
        # Gradients that have no sum yet are there of all layers but the first.
        sums = before if self.accumulates else divided - self.w * (first.divided + stage.embedding.divided)
        own = layers.leading + (self.exchanged if first.experts else 0)
        gathered = whole if self._keeps_behind else self.e * first.whole + self.e * stage.embedding.whole
        yield "first layer", Need(sums, earlier + own, 0, gathered + self._gradient(first))
        if stage.is_first:
            gathered = (whole if self._keeps_behind else self.e * stage.embedding.whole) + self._gradient(
                stage.embedding
            )
            yield "embedding", Need(before or divided, earlier + layers.stream, 0, gathered)
        if self.defers:
            # Whole gradients are reduced unit by unit: what is sent, and the sums of what has been.
            sending = self.r * stage.largest.whole
            kept_weights = whole if stage.pp_size > 1 else 0
            yield "first layer", Need(before, self.received + layers.shared, 0, kept_weights + 2 * sending)
        yield "optimizer", Need(divided, self.received)

    @property
    def _whole(self) -> int:
        """Bytes of the stage's weights where all of them stay gathered in the forward pass; 0 elsewhere."""
        stays = not self.layout.reshard_after_forward or (self.stage.pp_size > 1 and self.defers)
        return self.e * (self.stage.all.whole - self._local_experts) if stays else 0

    @property
    def _local_experts(self) -> int:
        """Parameters of experts that no other device has: they are never gathered, and each forward pass casts them."""
        return self.stage.all.experts if self.layout.ep_size == self.layout.num_shards else 0

    @property
    def _keeps_behind(self) -> bool:
        """True if gathered weights stay behind a backward pass."""
        return self.stage.pp_size > 1 and self.defers

    @property
    def _around(self) -> int:
        """Bytes of the weights around a layer: its own and those of the next unit, and the tail's behind them."""
        layer = max(unit.whole for unit in self.stage.layers)
        return 2 * self.e * layer + self.e * self.stage.tail.whole

    @property
    def _staying(self) -> int:
        """Bytes of weights at the end of the forward pass, with the buffer in which the last ones arrived."""
        return (self._whole or self._around) + self.e * self.stage.largest.whole

    def _gradient(self, unit: Unit) -> int:
        """Bytes of a unit's gradient as the backward pass gives it, and of what is sent where that is reduced.

        It is added to a sum that is there whole; or that of the unit before is sent meanwhile, until its own is.
        """
        return (self.e + (0 if self.defers else self.r)) * unit.whole
