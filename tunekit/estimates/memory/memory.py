"""Bytes of a training step on one device, and of the files that a run writes.

Bytes that a training step needs on one device, by phase and by part.

A step goes through phases, and what it needs is the most that any of them needs: at the end of the forward pass all
that is kept for the backward pass is there but few gradients, at its end the gradients but few activations. Closed
forms for Llama-like decoders. The activation counts are exact for Hugging Face's modules with SDPA: they equal the
bytes that autograd saves, which the tests measure. Where an architecture differs they are an estimate.
`benchmarks/planner.py` compares the phases with a trace of the real modules.

Symbols: h hidden size, i intermediate size, q = heads x head size, kv = key-value heads x head size, e bytes of the
compute type, T tokens of a micro-batch.

Files that a run writes: checkpoints, of which the newest and the best are kept, and its result.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, get_args

from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts, DeviceKind, Facts, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory import states
from tunekit.estimates.memory.activations import Head, Layers, head_of, is_traced, layers_of, products_of
from tunekit.estimates.memory.pictures import PictureBytes, PictureLoad, counts, picture_bytes
from tunekit.estimates.memory.sharding import fsdp2_kept, fsdp2_needs, units_of, zero_kept, zero_needs
from tunekit.estimates.memory.stages import staged_needs
from tunekit.estimates.memory.states import BYTES, PHASE_WORDS, Dtype, Kept, Need, Phase
from tunekit.estimates.passes import SFT, Passes, method_needs, with_reference
from tunekit.estimates.traces import Deviation, Deviations, Line, Lines, PhaseBytes, StepTrace, TraceRequest
from tunekit.recipe.methods.spec import HeadKind
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import Adapter, FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.section import BLOCK_OPTIMS, LowRank, Optim, QatSection

CONTEXT_BYTES = {"cpu": 900 * 2**20, "cuda": 1400 * 2**20}
"""Bytes of a process besides these parts. On a CPU: the libraries, the tokenized rows and the allocator's cache, 0.5
GiB resident after the imports and 0.8 GiB at the end of a small run (torch 2.13, transformers 5.23). On CUDA: the
context with its libraries, an upper bound of published figures (0.5 to 1.4 GB)."""

FOREACH: frozenset[Optim] = frozenset({"adamw_torch"})
"""Optimizers that take all parameters at once on CUDA, with a temporary value for each (torch.optim, `foreach`)."""

_OfTraining = Literal["weights", "adapters", "masters", "gradients", "optimizer", "activations", "logits", "gathered"]
_OfMethod = Literal["pictures", "reference", "kv cache", "vllm"]
Part = Literal[_OfTraining, _OfMethod, "context", "reserve"]
"""Purpose of memory. `masters`: float32 copies of weights that are computed with in 16 bits; `gathered`: weights and
gradients of layers that are there whole for a moment, and buffers for it; `pictures`: pixels, and
what a vision tower makes of them; `reference`: a second model, one to compare
with or to learn from; `vllm`: the share of vLLM; `context`: the process besides tensors, libraries or the CUDA context;
`reserve`: memory that the allocator takes and no tensor uses."""

Confidence = Literal["traced", "model traced", "closed form", "outside the model"]
"""Reliability of an estimate: formulas compared with traces of the real modules, formulas that a trace of this model's
step corrected, formulas that were not compared, or formulas of another kind of model for want of its own."""

RESERVE_SHARE = {"cpu": 0.0, "cuda": 0.03}
"""Memory that the allocator holds beyond the tensors, as a share of them, where no recorded run says better: the lower
end of the published 3 to 8 % with expandable segments; the rest is left by `MEMORY_SHARE`."""


class MemoryEstimate(Facts):
    """Bytes on each device at the peak of a step, by part."""

    parts: Mapping[Part, int]
    """Bytes at the peak by part, those that there are."""
    phase: Phase
    """Phase of the peak."""
    phases: Mapping[Phase, int]
    """Bytes of tensors at the peak of each phase."""
    host_bytes: int = 0
    """Host memory of each node that is needed for what the devices do not hold."""
    nvme_bytes: int = 0
    """Disk of each node that is needed for it."""
    offloaded_bytes: int = 0
    """Bytes of layer inputs that each device copies to host memory in a micro-batch, and back."""
    confidence: Confidence = "traced"
    is_fused: bool = False
    """True if layers are counted as tunekit's kernels compute them."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors at the peak: what torch calls allocated."""
        return self.phases[self.phase]

    @property
    def total_bytes(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())

    @property
    def peak_words(self) -> str:
        """Phase of the peak, in words."""
        return f"peak {PHASE_WORDS[self.phase]}"


def estimate(
    model: ModelFacts,
    adapter: Adapter,
    *,
    device: DeviceKind,
    dtype: Dtype,
    optim: Optim,
    trained_dtype: Dtype = "float32",
    has_ema: bool = False,
    low_rank: LowRank | None = None,
    num_tokens: int,
    mask_length: int | None,
    sliding_mask_length: int | None,
    gradient_checkpointing: bool,
    accumulates: bool,
    layout: Layout,
    devices_per_node: int,
    reserve_share: float,
    passes: Passes = SFT,
    vllm_bytes: int = 0,
    scores_length: int | None = None,
    activation_offloading: bool = False,
    mlp_tile_tokens: int | None = None,
    kernels: bool = False,
    pictures: PictureLoad | None = None,
    qat: QatSection | None = None,
    num_micro_batches: int = 1,
) -> MemoryEstimate:
    """Memory of one training step on each device.

    Args:
        model: The model.
        adapter: What is trained.
        device: Where.
        dtype: Type of the products, and of frozen weights.
        optim: Optimizer.
        trained_dtype: Type of trained weights and of their gradients.
        has_ema: Whether an average of the trained weights is kept beside them.
        low_rank: Matrices whose states have a low rank.
        num_tokens: Tokens of a micro-batch with its padding.
        mask_length: Length of a row of the attention mask: to which sequences are padded, or of all that lie one behind
            the other; None without a mask.
        sliding_mask_length: The same for layers of sliding attention, which need a mask also where others do not.
        gradient_checkpointing: Whether only layer inputs are kept, and one layer is recomputed at a time.
        accumulates: Whether a step has several micro-batches, so that gradients lie there from the first one on.
        layout: How the run is spread over devices.
        devices_per_node: How many of them share the host memory and the disk of a node.
        reserve_share: What the allocator holds beyond the tensors, as a share of them.
        passes: What the method does in a step.
        vllm_bytes: What vLLM takes of each device.
        scores_length: Length of a row of scores where attention keeps all of them, as eager attention does; None else.
        activation_offloading: Whether the inputs of layers are in host memory until the backward pass.
        mlp_tile_tokens: Tokens that an MLP computes at a time; None for all.
        kernels: Whether tunekit's kernels compute what they know, rather than torch's operations.
        pictures: Pictures of a micro-batch; None without, or where no more is known of the model's tower.
        qat: Rounding of linear layers, or None.
        num_micro_batches: Micro-batches of a step that a device computes; counted where they pass through a pipeline,
            or are accumulated by NeMo Automodel.
    """
    if layout.engine == "automodel":
        of_stage, its_needs = staged_needs(
            model,
            device=device,
            dtype=dtype,
            optim=optim,
            trained_dtype=trained_dtype,
            num_tokens=num_tokens,
            num_micro_batches=num_micro_batches,
            mask_length=mask_length,
            sliding_mask_length=sliding_mask_length,
            gradient_checkpointing=gradient_checkpointing,
            layout=layout,
            scores_length=scores_length,
            foreach=optim in FOREACH and device == "cuda",
        )
        confidence = _confidence(model, adapter, layout, passes, qat, offloads=False)
        return _peak_of(of_stage, its_needs, device, reserve_share, confidence)
    shard = model if layout.tp_size == 1 else model.divided_by(layout.tp_size)
    autocast = layout.autocasts
    products = products_of(
        shard, adapter, dtype, device, autocast=autocast, trained_dtype=trained_dtype, kernels=kernels, qat=qat
    )
    mine = -(-num_tokens // (layout.cp_size * layout.sp_size))
    layers = layers_of(
        products,
        mine,
        mask_length,
        sliding_mask_length,
        gradient_checkpointing=gradient_checkpointing,
        accumulates=accumulates,
        scores_length=scores_length,
        num_gathered=num_tokens if layout.cp_size > 1 else 0,
        mlp_tile_tokens=mlp_tile_tokens,
    )
    num_live = states.num_live_layers(shard, adapter)
    layers = replace(layers, kept=math.ceil(layers.kept * num_live / shard.num_layers))
    if model.deviations is not None:
        lines = model.deviations.of(casts_weights=autocast)
        layers = _corrected(layers, lines.at(mine, recomputes=gradient_checkpointing))
    offloaded = num_live * layers.stream if activation_offloading else 0
    if offloaded:
        layers = _held_behind_copies(layers, num_live)
    widens = not layout.strategy.startswith("zero")
    head = head_of(products, mine, scored_share=passes.max_scored_share, kind=passes.head, widens=widens)
    kept_state, needs, trained = _engine(
        shard,
        adapter,
        layers,
        head,
        dtype,
        optim,
        layout,
        devices_per_node,
        accumulates=accumulates,
        trained_dtype=trained_dtype,
        has_ema=has_ema,
        low_rank=low_rank,
        head_kind=passes.head,
    )
    # Where the optimizer's states are offloaded, its step is not computed here.
    copied = products.trained_bytes * trained if optim in FOREACH and device == "cuda" and kept_state.optimizer else 0
    if optim == "schedule_free_adamw":
        # It takes all parameters at once on a CPU too.
        copied = products.trained_bytes * trained
    elif (cost := states.matrix_cost_of(shard, adapter, optim, trained_dtype, low_rank, layout.num_shards)) is not None:
        copied = cost.step_bytes
    dense = states.dense_bytes(shard, adapter, dtype)
    # One weight at a time, in the layers; at the end of the forward pass there are the head's tensors in its place,
    # which FSDP2 has in a phase of its own.
    dequantised = states.dequantised_bytes(shard, adapter, dtype)
    beside_head = dequantised if layout.strategy == "fsdp2" else max(0, dequantised - head.kept - head.forward)
    # The head's table with the rows of new tokens, its gradient behind it, and that of the embedding's at the end.
    table = states.row_copies_bytes(shard, adapter)
    copies: dict[Phase, int] = {"forward": table, "head": 2 * table, "first layer": table, "embedding": table}
    highest: dict[Phase, Need] = {}
    for phase, need in needs:
        more = need
        if phase == "load":
            beside = states.initial_bytes(shard, adapter) + (dense if device == "cpu" else 0)
            more = replace(need, activations=need.activations + beside)
        elif phase == "optimizer":
            more = replace(need, gradients=need.gradients + copied)
        elif phase not in ("head", "embedding"):
            more = replace(need, gathered=need.gathered + (beside_head if phase == "forward" else dequantised))
        more = replace(more, activations=more.activations + copies.get(phase, 0))
        if phase not in highest or more.total > highest[phase].total:
            highest[phase] = more
    kept_state = with_reference(
        kept_state, shard, passes, dtype, layout, devices_per_node=devices_per_node, trained_dtype=trained_dtype
    )
    pinned = 0
    if offloaded:
        # TRL copies all that autograd saves, of the norm and the head too: where a head makes its gradient with its
        # logits, that also.
        of_table = BYTES["float32"] * shard.vocab_size * shard.hidden_size if products.tables.head else 0
        of_head = 2 * head.kept + (_pinned_bytes(of_table) if of_table and passes.head == "sums" else 0)
        pinned = num_live * _pinned_bytes(layers.stream) + of_head
    in_host = pinned + (dense * devices_per_node if device != "cpu" else 0)
    kept_state = replace(kept_state, vllm=vllm_bytes, host_bytes=kept_state.host_bytes + in_host)
    highest |= method_needs(products, passes, layout, layers, head, mine, highest)
    if pictures is not None and model.tower is not None:
        bytes_of = picture_bytes(
            model.tower, pictures, products, num_tokens, adapter, checkpointing=gradient_checkpointing
        )
        highest = _with_pictures(highest, bytes_of)
    confidence = _confidence(model, adapter, layout, passes, qat, offloads=offloaded > 0)
    peak = _peak_of(kept_state, highest, device, reserve_share, confidence)
    return peak.model_copy(update={"offloaded_bytes": offloaded, "is_fused": products.fused})


def _peak_of(
    kept_state: Kept, needs: Mapping[Phase, Need], device: DeviceKind, reserve_share: float, confidence: Confidence
) -> MemoryEstimate:
    """Return the estimate of the phase that needs the most."""
    phases = {
        phase: need.total + (kept_state.loaded if phase == "load" else kept_state.total)
        for phase, need in needs.items()
    }
    phase = max(phases, key=phases.__getitem__)
    if phase == "load":
        kept_state = replace(kept_state, optimizer=0)
    reserve = int(reserve_share * (phases[phase] - kept_state.vllm))
    return MemoryEstimate(
        parts=_parts(kept_state, needs[phase], CONTEXT_BYTES[device], reserve),
        phase=phase,
        phases=phases,
        host_bytes=kept_state.host_bytes,
        nvme_bytes=kept_state.nvme_bytes,
        confidence=confidence,
    )


def with_trace(model: ModelFacts, request: TraceRequest, trace: StepTrace) -> ModelFacts:
    """Return a model whose estimates are corrected by what a trace of its step found.

    Args:
        model: The model, as it is or with the trace of weights that autocast casts.
        request: The step that was traced.
        trace: The trace.
    """
    window = model.sliding_window
    slides = window is not None and request.length >= window

    def phases_of(num_tokens: int, *, passing: int, recomputes: bool) -> Mapping[Phase, int]:
        """By the formulas, with so much in the forward pass of the layers beyond what they keep."""
        line = Line((0, 1), (Deviation(passing=passing), Deviation(passing=passing)))
        return estimate(
            model.model_copy(update={"deviations": Deviations(request.adapter, Lines(line, line))}),
            request.adapter,
            device="cuda",
            dtype=request.dtype,
            optim="adamw_torch_fused",
            trained_dtype=request.weights_dtype,
            num_tokens=num_tokens,
            mask_length=None,
            sliding_mask_length=request.length if slides else None,
            gradient_checkpointing=recomputes,
            accumulates=False,
            layout=Layout(),
            devices_per_node=1,
            reserve_share=0.0,
            scores_length=request.length if request.attention == "eager" else None,
        ).phases

    def deviation(traced: PhaseBytes, num_tokens: int, *, recomputes: bool) -> Deviation:
        formulas = phases_of(num_tokens, passing=0, recomputes=recomputes)
        # With more than the head can have, that phase is what is kept, and it.
        after_layers = phases_of(num_tokens, passing=_TOO_MUCH, recomputes=recomputes)["forward"] - _TOO_MUCH
        lacking = traced.head - formulas["head"]
        return Deviation(
            passing=max(0, traced.layers - after_layers - lacking),
            kept=lacking,
            forward=traced.forward - formulas["forward"] - lacking,
            last=traced.last - formulas["last layer"] - lacking,
            first=traced.first - formulas["first layer"],
        )

    def line(traced: tuple[PhaseBytes, PhaseBytes], *, recomputes: bool) -> Line:
        few, more = (num_rows * request.length for num_rows in request.num_rows)
        ends = deviation(traced[0], few, recomputes=recomputes), deviation(traced[1], more, recomputes=recomputes)
        return Line((few, more), ends)

    recomputed = None if trace.recomputed is None else line(trace.recomputed, recomputes=True)
    lines = Lines(line(trace.kept, recomputes=False), recomputed)
    if request.casts_weights or model.deviations is None:
        deviations = Deviations(request.adapter, lines)
    else:
        deviations = Deviations(request.adapter, model.deviations.casting, lines)
    return model.model_copy(update={"deviations": deviations})


_TOO_MUCH = 2**60


def _corrected(layers: Layers, deviation: Deviation) -> Layers:
    """Return the layers of a micro-batch with what the formulas lack of them."""
    return replace(
        layers,
        kept=layers.kept + deviation.kept,
        forward_only=layers.forward_only + deviation.forward,
        passing=deviation.passing,
        recomputed=layers.recomputed + deviation.last,
        first=layers.first + deviation.first,
        leading=layers.leading + deviation.first,
    )


HELD_INPUTS = 5
"""Most inputs of layers that are still on a device while they are copied (TRL's `OffloadActivations`,
`max_fwd_stash_size`). The backward pass fetches one while the one before it is in use."""


def _held_behind_copies(layers: Layers, num_live: int) -> Layers:
    """Return what is left on a device of layers whose inputs are offloaded."""
    held = min(num_live, HELD_INPUTS)
    return replace(layers, kept=layers.kept - (num_live - held) * layers.stream)


def _pinned_bytes(size: int) -> int:
    """Bytes of pinned memory for a tensor: torch's allocator rounds up to a power of two (`CachingHostAllocator`)."""
    return 1 << (size - 1).bit_length()


def _engine(
    model: ModelFacts,
    adapter: Adapter,
    layers: Layers,
    head: Head,
    dtype: Dtype,
    optim: Optim,
    layout: Layout,
    devices_per_node: int,
    *,
    accumulates: bool,
    trained_dtype: Dtype,
    has_ema: bool,
    low_rank: LowRank | None,
    head_kind: HeadKind,
) -> tuple[Kept, Iterable[tuple[Phase, Need]], int]:
    """Return the bytes kept and the needs of the phases by the layout's strategy, and the trained parameters of a
    device.
    """
    trained, w = states.num_trainable_params(model, adapter), BYTES[trained_dtype]
    optimizer_bytes = states.optimizer_bytes_per_param(optim, trained_dtype)
    if layout.strategy in ("single", "ddp"):
        adapters, of_optimizer = states.trained_bytes(model, adapter, optim, trained_dtype, low_rank)
        weights = states.weights_bytes(model, adapter, dtype, trained_dtype)
        # The fused heads sum the gradient of their weight in float32, and cast it.
        summed = 4 if w < 4 and head_kind != "whole" else 0
        needs = _needs(model, adapter, layers, head, layout, accumulates=accumulates, w=w, summed=summed)
        return Kept(weights, adapters, optimizer=of_optimizer + w * trained * has_ema), needs, trained
    if layout.strategy == "fsdp2":
        units = units_of(model, adapter, layout.num_shards, layout.ep_size)
        of_optimizer = int(optimizer_bytes * units.all.trained)
        cost = states.matrix_cost_of(model, adapter, optim, trained_dtype, low_rank, layout.num_shards)
        if cost is not None:
            of_optimizer = cost.states_bytes
        elif optim in BLOCK_OPTIMS:
            trained_tensors = states.trained_tensors(model, adapter).values()
            of_optimizer = states.block_states_bytes(trained_tensors, optim, trained_dtype, layout.num_shards)
        of_optimizer += w * units.all.trained * has_ema
        kept_state = fsdp2_kept(units, dtype, layout, of_optimizer, devices_per_node, w)
        needs = fsdp2_needs(units, layers, head, dtype, layout, accumulates=accumulates, w=w)
        return kept_state, needs, units.all.trained
    kept_state = zero_kept(
        model, adapter, dtype, layout, optimizer_bytes=optimizer_bytes, devices_per_node=devices_per_node
    )
    needs = zero_needs(model, adapter, layers, head, dtype, layout, accumulates=accumulates)
    return kept_state, needs, trained // layout.num_shards


def _with_pictures(needs: Mapping[Phase, Need], pictures: PictureBytes) -> dict[Phase, Need]:
    """Return the needs of the phases with those of pictures, and that of the tower: before the first layer of text."""
    forward, kept = needs["forward"], pictures.pixels + pictures.embedded + pictures.kept
    whole = kept + pictures.states + pictures.crossed
    beside: dict[Phase, int] = {
        "load": 0,
        "embedding": pictures.pixels,
        "forward": whole + pictures.casts + pictures.outputs,
        "head": whole,
        "last layer": whole,
        "optimizer": pictures.pixels,
    }
    if pictures.recomputed:
        # The last layer has no cross-attention, and one between has.
        needs = {**needs, "middle layers": needs["last layer"]}
        beside["middle layers"] = kept + pictures.states + pictures.recomputed
    of_tower = pictures.pixels + pictures.kept + pictures.casts + pictures.encoding
    encoding = Need(forward.gradients, gathered=forward.gathered, pictures=of_tower)
    grown = {phase: replace(need, pictures=beside.get(phase, kept)) for phase, need in needs.items()}
    if pictures.backward:
        # The tower's backward pass comes behind that of the first layer, whose activations are gone.
        first = needs["first layer"]
        behind = replace(first, activations=0, pictures=pictures.pixels + pictures.kept + pictures.backward)
        grown["first layer"] = max(grown["first layer"], behind, key=lambda need: need.total)
    return {**grown, "pictures": encoding}


def _parts(kept: Kept, need: Need, context: int, reserve: int) -> dict[Part, int]:
    """The parts that there are."""
    sizes = {**vars(kept), **vars(need), "kv cache": need.kv_cache, "context": context, "reserve": reserve}
    return {part: sizes[part] for part in get_args(Part) if sizes[part]}


def _confidence(
    model: ModelFacts, adapter: Adapter, layout: Layout, passes: Passes, qat: QatSection | None, *, offloads: bool
) -> Confidence:
    """Families and layouts that the tests trace; the activations of other attention decoders are much alike.

    Adapters are traced without dropout, DoRA and wholly trained modules, and other methods than SFT on dense models.
    """
    unknown = "audio" in passes.media or (
        "image" in passes.media and (model.tower is None or not counts(model.tower, adapter))
    )
    if unknown or not (is_traced(model) or model.deviations is not None):
        return "outside the model"
    if qat is not None or layout.engine != "accelerate":
        return "closed form"
    alone = (
        layout.tp_size == layout.ep_size == layout.cp_size == layout.sp_size == 1
        and layout.offload_param_device == "none"
    )
    if model.deviations is not None:
        is_same = adapter == model.deviations.adapter and passes.method == "sft" and not passes.media
        alone &= layout.autocasts or (layout.strategy == "fsdp2" and model.deviations.handed is not None)
        return "model traced" if is_same and alone and not offloads else "closed form"
    compares = passes.teacher is not None or passes.compares_with_itself
    if offloads or compares or isinstance(adapter, QloraAdapter) or states.token_rows(model, adapter):
        return "closed form"
    if not isinstance(adapter, FullAdapter | LoraAdapter) or (isinstance(adapter, FullAdapter) and adapter.is_partial):
        return "closed form"
    if isinstance(adapter, LoraAdapter) and adapter.modules_to_save and layout.strategy not in ("single", "ddp"):
        # Tables that are trained beside an adapter are counted on one device only as they are traced.
        return "closed form"
    traced: tuple[str, ...] = () if model.num_experts else ("single", "ddp")
    if passes.media:
        # Towers are traced on one device, below supervised fine-tuning.
        traced = ("single", "ddp") if passes.method == "sft" else ()
    elif passes.method == "sft":
        traced = ("single", "ddp", "fsdp2")
    engine = layout.strategy in traced
    return "traced" if alone and engine else "closed form"


def _needs(
    model: ModelFacts,
    adapter: Adapter,
    layers: Layers,
    head: Head,
    layout: Layout,
    *,
    accumulates: bool,
    w: int,
    summed: int,
) -> Iterator[tuple[Phase, Need]]:
    """Yield the needs of the phases on one device. A gradient that is added to another is there beside it.

    DDP holds as many bytes again in buckets, from which gradients are reduced (`gradient_as_bucket_view` is off in
    Accelerate).

    Args:
        model: The model.
        adapter: What is trained.
        layers: What the decoder layers hold.
        head: What the final norm and the head hold.
        layout: Whether there are buckets.
        accumulates: Whether a step has several micro-batches.
        w: Bytes of a trained weight, and of its gradient.
        summed: Bytes of the sum of which the head makes the gradient of a weight of its own; 0 where it is that.
    """
    trained = w * states.num_trainable_params(model, adapter)
    table, tables = w * model.vocab_size * model.hidden_size, states.trained_tables(model, adapter)
    vocabulary = table if tables.head else 0
    of_head = vocabulary + (summed * model.vocab_size * model.hidden_size if tables.head else 0)
    in_layers = trained - table * tables.num
    # Of a part it is not known how much lies in the first of its layers.
    is_partial = isinstance(adapter, FullAdapter) and adapter.is_partial
    per_layer = 0 if is_partial else in_layers // model.num_layers
    before = trained if accumulates else 0
    first = before or vocabulary + in_layers - per_layer
    # Gradients of a weight with two uses wait for each other and are summed into a third tensor.
    waiting = vocabulary if tables.is_one and accumulates else 0
    forward = Need(before, layers.kept + layers.forward_only + layers.shared + head.kept, head.forward)
    if layers.passing > head.kept + head.forward:
        forward = Need(before, layers.kept + layers.shared + layers.passing)
    needs: dict[Phase, Need] = {
        "forward": forward,
        "head": Need(before + of_head, layers.kept + layers.shared + head.kept, head.backward),
        "last layer": Need(
            waiting + (before or vocabulary), layers.kept + layers.recomputed + layers.working + layers.shared
        ),
        "first layer": Need(waiting + first, layers.first + layers.working + layers.shared),
    }
    if tables.embedding:
        fresh = (2 if tables.is_one else 0) + (1 if accumulates else 0)
        needs["embedding"] = Need(trained + fresh * table, 0 if tables.is_one else layers.stream)
    needs["optimizer"] = Need(trained)
    yield "load", Need()
    buckets = trained if layout.strategy == "ddp" else 0
    for phase, need in needs.items():
        yield phase, replace(need, gathered=buckets)


TOKENIZER_BYTES = 128
"""Of a tokenizer's files for each entry of its vocabulary: 134 of Llama 3, 127 of Gemma 3, 75 of Qwen 2.5."""

ROW_BYTES = 8
"""Of the rows for each token: its id and its label."""


class Saving(Facts):
    """Checkpoints of a run: when and how they are written, and the measure of the best one."""

    checkpoint_bytes: int | None = None
    """Expected bytes of a checkpoint; None in plans that do not know."""
    result_bytes: int | None = None
    """The same of the result."""
    run_bytes: int | None = None
    """The same of the run at most, with the rows and the checkpoint that is being written."""
    in_background: bool = False
    """True if a checkpoint is written during training, from a copy in host memory."""
    metric_for_best_model: str | None = None
    """None without rows to evaluate on."""
    greater_is_better: bool = False


def checkpoint_bytes(
    recipe: Recipe, model: ModelFacts, layout: Layout, dtype: Dtype, num_steps: int | None = None
) -> int:
    """Return the bytes of a checkpoint: weights or adapter, their average, the optimizer's states, and the tokenizer.

    DeepSpeed keeps the weights that it computes with and float32 copies of them; stage 3 divides both.

    Args:
        recipe: What is asked for.
        model: The model.
        layout: How the run is spread.
        dtype: Type of the products.
        num_steps: Steps until then, where they are known.
    """
    trained, train = states.num_trainable_params(model, recipe.adapter), recipe.train
    _, of_optimizer = states.trained_bytes(model, recipe.adapter, train.optimizer, train.trained_dtype, train.low_rank)
    weights = _saved_bytes(recipe, model, num_steps)
    if layout.strategy.startswith("zero"):
        whole = BYTES[dtype] * trained
        weights = 4 * trained + (whole if layout.strategy == "zero3" else 2 * whole)
    average = 0 if train.ema_decay is None else BYTES[train.trained_dtype] * trained
    return weights + of_optimizer + average + TOKENIZER_BYTES * model.vocab_size


def result_bytes(recipe: Recipe, model: ModelFacts, num_steps: int | None = None) -> int:
    """Return the bytes of the trained model or adapter, after a number of steps where that is known."""
    return _saved_bytes(recipe, model, num_steps) + TOKENIZER_BYTES * model.vocab_size


def _saved_bytes(recipe: Recipe, model: ModelFacts, num_steps: int | None) -> int:
    """Return the bytes of the weights of a model that is trained whole, or of the adapter."""
    adapter, train = recipe.adapter, recipe.train
    if isinstance(adapter, FullAdapter):
        return BYTES[train.trained_dtype] * model.num_params
    saved, _ = states.trained_bytes(model, adapter.saved_after(num_steps), train.optimizer)
    return saved


def metric_of(recipe: Recipe, data: DataFacts) -> tuple[str | None, bool]:
    """By which measure of the evaluations the best is told, and whether the greatest is; None without evaluations.

    Raises:
        PlanError: The recipe names one, and there is nothing to evaluate on.
    """
    train = recipe.train
    if data.num_eval is None:
        for name in ("metric_for_best_model", "greater_is_better", "early_stopping_patience"):
            if dict(train)[name] is not None:
                purpose = "stop early" if name == "early_stopping_patience" else "select the best checkpoint"
                raise PlanError(f"train.{name}: no evaluation rows to {purpose} by", hint="set data.eval, or unset it")
        return None, False
    metric = train.metric_for_best_model
    if metric is None:
        metric = f"eval_{recipe.method.best_metric}"
    greater = train.greater_is_better
    return metric, not metric.endswith("loss") if greater is None else greater


def saving_of(
    recipe: Recipe,
    model: ModelFacts,
    data: DataFacts,
    layout: Layout,
    dtype: Dtype,
    *,
    spare_bytes: int | None,
    num_steps: int | None,
) -> Saving:
    """Plan the checkpoints of a run.

    Args:
        recipe: What is asked for.
        model: The model.
        data: The rows.
        layout: How the run is spread.
        dtype: Type of the products.
        spare_bytes: Host memory that each process may still take; None where that is not known.
        num_steps: Optimizer steps; None where they are not known.

    Raises:
        PlanError: The recipe names a measure of evaluations that there are not, or of which nothing would be kept.
    """
    metric, greater = metric_of(recipe, data)
    if layout.why_not_resumed is not None:
        for name in ("metric_for_best_model", "early_stopping_patience"):
            if dict(recipe.train)[name] is not None:
                raise PlanError(
                    f"train.{name}: {layout.name} saves no checkpoints: {layout.why_not_resumed}",
                    hint="unset it, or choose another layout",
                )
        metric, greater = None, False
    size = checkpoint_bytes(recipe, model, layout, dtype, num_steps)
    fits = spare_bytes is not None and copied_bytes(size, layout) <= spare_bytes
    num_kept = 0 if layout.why_not_resumed else recipe.train.save_total_limit + (metric is not None) + 1
    result = result_bytes(recipe, model, num_steps)
    return Saving(
        checkpoint_bytes=size,
        result_bytes=result,
        run_bytes=num_kept * size + result + ROW_BYTES * (data.num_train_tokens or 0),
        in_background=layout.engine == "accelerate" and divides_files(layout) and fits,
        metric_for_best_model=metric,
        greater_is_better=greater,
    )


def divides_files(layout: Layout) -> bool:
    """Return whether every process writes a part of a checkpoint, from states that can be copied."""
    nvme = "nvme" in (layout.offload_param_device, layout.offload_optimizer_device)
    return layout.why_not_resumed is None and layout.strategy not in ("single", "ddp") and not nvme


def copied_bytes(size: int, layout: Layout) -> int:
    """Host memory that each process takes for a copy of its part of a checkpoint of that size."""
    return math.ceil(size / (layout.num_shards * layout.pp_size))
