"""The layouts that a run could have, in the order in which they are tried: what costs least comes first.

DDP moves the gradients once a step. FSDP2 moves the weights besides, twice in each micro-batch or once where they stay
after the forward pass; in a hybrid shard that happens inside the nodes. What divides a layer or a sequence waits for
other devices within each layer. What leaves the device comes back over a slower link than any of these.

Each function gives the layouts of one kind for the machine, none where the machine has no use for them. That a model
or a recipe cannot be run so is no reason to leave one out here: it is refused by name in `refusal`, and the plan keeps
it with the reason.

Division of the batch so that a layout fits: micro-batches, checkpointing, and when gradients are reduced.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from tunekit.estimates.facts import Device, Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate, estimate
from tunekit.estimates.memory.pictures import PictureLoad
from tunekit.estimates.memory.stages import layers_per_stage
from tunekit.estimates.memory.states import Dtype, reference_of
from tunekit.estimates.passes import Passes, passes_of
from tunekit.estimates.throughput.step import bubble
from tunekit.planner.decisions import backends
from tunekit.planner.decisions.vllm import vllm_bytes, vllm_of
from tunekit.planner.plan import VARLEN, VLLM, Kernels, Plan, Reason, gib
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.data import MediaKind
from tunekit.recipe.sections.section import ParallelSection

MEMORY_SHARE = {"cpu": 0.9, "cuda": 0.92}
"""Share of the free memory that a plan may use; the rest is for fragmentation and for other programs."""

HOST_SHARE = 0.9
"""The same of host memory."""

ENOUGH_TOKENS = 2048
"""Tokens in a micro-batch from which a device is kept busy: more is not worth recomputing activations."""


@dataclass(frozen=True)
class Setting:
    """Decisions that are the same for every layout.

    Attributes:
        found_limit_bytes: What may be used of each device, where that turned out to be less than what is free.
        host_limit_bytes: What may be used of each node's host memory; None where that is not known.
        reserve_share: What the allocator holds beyond the tensors, as a share of them.
        why_reserve: Which runs that was learned from, None where it was not.
        teacher: The model to learn from, for distillation.
        by_vllm: Whether vLLM generates answers.
        server_devices: Devices of the vLLM server that the run starts.
        media: Kinds of media of the rows.
        row_pixel_values: Values of the pixels of a row, at the most; None where that is not known.
    """

    recipe: Recipe
    hardware: Hardware
    model: ModelFacts
    dtype: Dtype
    attention: str
    found_limit_bytes: int | None
    host_limit_bytes: int | None
    reserve_share: float
    why_reserve: str | None
    teacher: ModelFacts | None = None
    by_vllm: bool = False
    server_devices: tuple[Device, ...] = ()
    media: tuple[MediaKind, ...] = ()
    row_pixel_values: int | None = None

    @property
    def device(self) -> Device:
        """One of the devices; they are equal."""
        return self.hardware.device

    def limit_bytes(self, devices_per_node: int) -> int:
        """Return the usable bytes of each device, if so many of a node are used: those with the most free memory."""
        if self.found_limit_bytes is not None:
            return self.found_limit_bytes
        used = self.hardware.freest(devices_per_node) or (self.device,)
        return int(MEMORY_SHARE[self.device.kind] * min(device.memory_free_bytes for device in used))

    @property
    def passes(self) -> Passes:
        """Passes of the method in a step."""
        recipe, batch = self.recipe, self.recipe.train.global_batch_size
        passes = passes_of(
            recipe.method,
            recipe.adapter,
            recipe.data,
            global_batch_size=batch,
            teacher=self.teacher,
            by_vllm=self.by_vllm,
        )
        reference = reference_of(recipe.method, recipe.adapter, self.model.origin)
        return replace(passes, copies_adapter=reference == "copied adapter", media=self.media)

    def attention_in(self, layout: Layout) -> str:
        """Attention implementation in a layout: what is told where documents begin is not divided over devices."""
        is_divided = layout.engine != "accelerate" or max(layout.cp_size, layout.sp_size, layout.tp_size) > 1
        return backends.of_rows(self.attention, self.model, lie_apart=not is_divided)

    def passes_in(self, layout: Layout) -> Passes:
        """The same in a layout, which has a say in whose head scores tokens."""
        passes, kernels = self.passes, self.kernels_in(layout)
        if layout.engine == "automodel":
            return replace(passes, head="whole")
        return replace(passes, head=backends.head_kind(passes.head, self.recipe.method, kernels, layout))

    def kernels_in(self, layout: Layout) -> Kernels:
        """Return the kernels that are chosen for a layout."""
        return backends.choose_kernels(self.recipe, self.hardware, layout)[0]

    def vllm(self, layout: Layout) -> VLLM | None:
        """Return how vLLM is used, where it generates answers."""
        if not self.by_vllm:
            return None
        return vllm_of(self.recipe, self.model, self.device, layout, self.server_devices)

    def may_offload(self, layout: Layout) -> bool:
        """Return whether the plan decides on offloaded activations, and a layout can have them."""
        is_open = self.recipe.train.activation_offloading == "auto"
        return is_open and backends.why_not_offloaded(self.recipe, self.device, layout) is None

    def may_tile(self, layout: Layout) -> bool:
        """Return whether the plan decides on MLPs in tiles, and a layout can have them."""
        is_open = self.recipe.train.tiled_mlp == "auto"
        return is_open and backends.why_not_tiled(self.recipe, self.model, layout) is None

    def memory(
        self,
        layout: Layout,
        num_nodes: int,
        size: int,
        *,
        checkpointing: bool,
        offloading: bool = False,
        tiled: bool = False,
    ) -> MemoryEstimate:
        """Estimate the memory of each device with `size` sequences in a micro-batch."""
        length = self.recipe.num_positions
        attention = self.attention_in(layout)
        padding = backends.padding_of(self.recipe.data, self.model, attention, size, self.passes)
        mask_length = padding.mask_length
        if padding.is_free and attention == VARLEN and self.device.kind == "cpu":
            # SDPA for one document after another: keys and values are repeated as with a mask, and there is none.
            mask_length = 0
        # Without the boundaries that a window draws, SDPA is told that attention is causal and needs no mask.
        window = self.model.sliding_window
        vllm = self.vllm(layout)
        of_rows = backends.of_rows(attention, self.model, lie_apart=padding.is_free)
        slides = backends.needs_mask(of_rows) and window is not None and length >= window
        whole = size * self.passes.sequences_per_row * length if padding.is_free else length
        return estimate(
            self.model,
            self.recipe.adapter,
            device=self.device.kind,
            dtype=self.dtype,
            optim=self.recipe.train.optimizer,
            trained_dtype=self.recipe.train.trained_dtype,
            has_ema=self.recipe.train.ema_decay is not None,
            low_rank=self.recipe.train.low_rank,
            num_tokens=size * self.passes.sequences_per_row * length,
            mask_length=mask_length,
            sliding_mask_length=length if mask_length is None and slides else mask_length,
            gradient_checkpointing=checkpointing,
            accumulates=size * layout.num_batches < self.recipe.train.global_batch_size,
            layout=layout,
            devices_per_node=layout.num_processes // num_nodes,
            reserve_share=self.reserve_share,
            passes=self.passes_in(layout),
            vllm_bytes=0 if vllm is None else vllm_bytes(vllm, self.device),
            scores_length=whole if of_rows == "eager" else None,
            activation_offloading=offloading,
            mlp_tile_tokens=self.model.hidden_size if tiled else None,
            # On CPUs they were not measured.
            kernels=self.device.kind == "cuda" and self.kernels_in(layout) == "tunekit",
            pictures=self._pictures(layout, size),
            qat=self.recipe.train.qat,
            num_micro_batches=max(1, self.recipe.train.global_batch_size // (size * layout.num_batches)),
        )

    def _pictures(self, layout: Layout, size: int) -> PictureLoad | None:
        """The pictures of micro-batches of `size` rows."""
        tower = self.model.tower
        if "image" not in self.media or tower is None:
            return None
        values = self.row_pixel_values or tower.most_values(self.recipe.data.max_length)
        values *= self.passes.sequences_per_row  # each answer comes with the pictures of its prompt
        return PictureLoad(size * values, self.recipe.train.global_batch_size // (size * layout.num_batches))

    def memory_as(self, chosen: "Fit | Plan", num_nodes: int, size: int, *, checkpointing: bool) -> MemoryEstimate:
        """Estimate the memory of what was chosen, with `size` sequences in a micro-batch."""
        return self.memory(
            chosen.layout,
            num_nodes,
            size,
            checkpointing=checkpointing,
            offloading=chosen.activation_offloading,
            tiled=chosen.mlp_tile_tokens is not None,
        )

    def fits(self, memory: MemoryEstimate, devices_per_node: int) -> bool:
        """Return whether an estimate fits, on the devices and in host memory."""
        return memory.total_bytes <= self.limit_bytes(devices_per_node) and not self._is_too_much_for_host(memory)

    def why_not(self, memory: MemoryEstimate, devices_per_node: int) -> str:
        """The number that rules out what does not fit."""
        if self._is_too_much_for_host(memory):
            may = gib(self.host_limit_bytes or 0)
            return f"needs {gib(memory.host_bytes)} of host memory per node, limit {may}"
        return f"needs at least {gib(memory.total_bytes)}, limit {gib(self.limit_bytes(devices_per_node))}"

    def _is_too_much_for_host(self, memory: MemoryEstimate) -> bool:
        return self.host_limit_bytes is not None and memory.host_bytes > self.host_limit_bytes


@dataclass(frozen=True)
class Fit:
    """A way to cut the batch that fits a layout."""

    layout: Layout
    micro_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    activation_offloading: bool
    mlp_tile_tokens: int | None
    memory: MemoryEstimate
    why_batch: str
    why_checkpointing: str
    why_offloading: str
    why_tiled: str

    def reasons(self) -> Iterator[Reason]:
        """The decisions for the plan."""
        batch = self.micro_batch_size * self.gradient_accumulation_steps * self.layout.num_batches
        at_once, unit = self.layout.num_batches, "device" if self.layout.pp_size == 1 else "pipeline"
        yield Reason(
            topic="batch",
            choice=f"{batch} = {self.micro_batch_size} x {self.gradient_accumulation_steps} accumulated x {at_once} "
            f"{unit}{'' if at_once == 1 else 's'}",
            why=self.why_batch,
        )
        choice = "on" if self.gradient_checkpointing else "off"
        yield Reason(topic="checkpointing", choice=choice, why=self.why_checkpointing)
        if self.activation_offloading:
            choice = f"layer inputs in pinned host memory, {gib(self.memory.offloaded_bytes)}"
            yield Reason(topic="activations", choice=choice, why=self.why_offloading)
        if self.mlp_tile_tokens is not None:
            yield Reason(topic="MLP", choice=f"tiles of {self.mlp_tile_tokens:,} tokens", why=self.why_tiled)


def fit(setting: Setting, layout: Layout, num_nodes: int) -> Fit | None:
    """The largest micro-batch that fits, without gradient checkpointing where that keeps the device busy."""
    recipe = setting.recipe
    requested, forced = recipe.train.micro_batch_size, recipe.train.gradient_checkpointing
    batch = recipe.train.global_batch_size // layout.num_batches
    devices_per_node = layout.num_processes // num_nodes
    sizes = _sizes(setting, batch // layout.sp_size, layout.pp_size)
    row_tokens = setting.passes.sequences_per_row * recipe.num_positions
    enough = min(batch, math.ceil(ENOUGH_TOKENS * layout.devices_per_sequence / row_tokens))
    widens_mask = requested is None and backends.lies_in_one_row(recipe.data) and backends.needs_mask(setting.attention)
    if widens_mask:
        sizes = [size for size in sizes if size <= enough]
        enough = sizes[0]
    if layout.pp_size > 1 and requested is None:
        # More micro-batches leave stages waiting for less of a step.
        enough = min((size for size in sizes if size >= enough), default=sizes[0])
        sizes = [size for size in sizes if size <= enough]
    for checkpointing, offloading, tiled in _recomputations(setting, layout):
        for size in sizes:
            if not checkpointing and forced == "auto" and size < enough and requested is None:
                break
            for variant in _variants(layout, accumulates=size < batch):
                memory = setting.memory(
                    variant, num_nodes, size, checkpointing=checkpointing, offloading=offloading, tiled=tiled
                )
                if not setting.fits(memory, devices_per_node):
                    continue
                limit = setting.limit_bytes(devices_per_node)
                busy = (widens_mask or layout.pp_size > 1) and size == sizes[0]
                return Fit(
                    layout=variant,
                    micro_batch_size=size,
                    gradient_accumulation_steps=batch // size,
                    gradient_checkpointing=checkpointing,
                    activation_offloading=offloading,
                    mlp_tile_tokens=setting.model.hidden_size if tiled else None,
                    memory=memory,
                    why_batch=_why_batch(setting, layout, size, batch, limit, busy=busy),
                    why_checkpointing="set by the recipe" if forced != "auto" else WHY_CHECKPOINTING[checkpointing],
                    why_offloading=_why_offloading(setting),
                    why_tiled=_why_tiled(setting),
                )
    return None


def _recomputations(setting: Setting, layout: Layout) -> list[tuple[bool, bool, bool]]:
    """Return whether activations are recomputed, inputs of layers offloaded, and MLPs tiled, the cheapest choice first.

    Copies are hidden by layers that compute long enough, whereas tiles compute MLPs once more.
    """
    train = setting.recipe.train
    kinds = [False, True] if train.gradient_checkpointing == "auto" else [train.gradient_checkpointing]
    offloads, tiles = [train.activation_offloading is True], [train.tiled_mlp is True]
    if setting.may_offload(layout):
        offloads.append(True)
    if setting.may_tile(layout):
        tiles.append(True)
    # Layers are recomputed before anything else is done, unless the recipe says otherwise.
    return [
        (again, offloaded, tiled)
        for tiled in tiles
        for offloaded in offloads
        for again in kinds
        if again or not (offloaded or (tiled and train.tiled_mlp == "auto" and kinds[-1]))
    ]


def _why_tiled(setting: Setting) -> str:
    """Return the reason to compute MLPs in tiles."""
    why = "set by the recipe" if setting.recipe.train.tiled_mlp is True else "all tokens at once would not fit"
    return f"{why}; each tile is recomputed in the backward pass"


def _why_offloading(setting: Setting) -> str:
    """Return the reason to offload activations."""
    is_set = setting.recipe.train.activation_offloading is True
    why = "set by the recipe" if is_set else "recomputation alone would not be enough"
    why += "; copied on a separate stream while other layers compute (predicted, not measured)"
    return why if setting.host_limit_bytes is not None else f"{why}; host memory of this machine unknown"


def least(setting: Setting, layout: Layout, num_nodes: int) -> MemoryEstimate:
    """The least that a layout needs with this recipe."""
    recipe = setting.recipe
    batch = recipe.train.global_batch_size // layout.num_batches
    size = _sizes(setting, batch // layout.sp_size, layout.pp_size)[-1]
    variants = _variants(layout, accumulates=size < batch)
    kinds = _recomputations(setting, layout)
    estimates = [
        setting.memory(variant, num_nodes, size, checkpointing=checkpointing, offloading=offloading, tiled=tiled)
        for variant in variants
        for checkpointing, offloading, tiled in reversed(kinds)
    ]
    return min(estimates, key=lambda memory: memory.total_bytes)


def _sizes(setting: Setting, batch: int, pp_size: int) -> list[int]:
    """Sizes of a micro-batch to try on each device, the largest first: of a pipeline those that give each stage one."""
    requested = setting.recipe.train.micro_batch_size
    if requested is not None:
        return [requested]
    return [size for size in divisors(batch) if size * pp_size <= batch]


def _variants(layout: Layout, *, accumulates: bool) -> list[Layout]:
    """A layout as it is, and where gradients can be summed over the devices more often, so."""
    if layout.strategy != "fsdp2" or layout.engine != "accelerate" or not accumulates:
        return [layout]
    return [layout, layout.model_copy(update={"sync_each_batch": True})]


def _why_batch(setting: Setting, layout: Layout, size: int, batch: int, limit_bytes: int, *, busy: bool) -> str:
    if setting.recipe.train.micro_batch_size is not None:
        return "set by the recipe"
    if size == batch:
        return "the whole batch fits at once"
    if size * layout.sp_size == batch:
        return f"one micro-batch from each of the {layout.sp_size} devices that split sequences"
    if layout.pp_size > 1 and busy:
        number = batch // size
        words = f"{bubble(layout.pp_size, number):.0%} of a step is the pipeline's bubble with {number} micro-batches"
        return f"enough to keep a stage busy: {words}, more with larger ones"
    if busy:
        return f"enough to keep the device busy; more would only widen the {setting.attention} mask"
    return f"the largest that fits in {gib(limit_bytes)}"


WHY_CHECKPOINTING = {True: "activations would not fit without it", False: "activations fit without recomputation"}
"""Reason to recompute activations, or not to."""


def divisors(number: int) -> list[int]:
    """Divisors of a number, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0]


SIZES = (2, 4, 8, 16, 32, 64)
"""Devices that may divide a layer or a sequence."""


class Candidate(NamedTuple):
    """A layout on some or all nodes of the machine, and why it would be taken."""

    layout: Layout
    num_nodes: int
    why: str

    @property
    def devices_per_node(self) -> int:
        """Devices that are used of each node."""
        return self.layout.num_processes // self.num_nodes


@dataclass(frozen=True)
class Spread:
    """Devices in use: as many as the batch can be divided over.

    Attributes:
        num_nodes: Nodes.
        per_node: Devices in each.
    """

    num_nodes: int
    per_node: int

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.num_nodes * self.per_node


def spread(setting: Setting, per_sequence: int = 1) -> Spread | None:
    """The most devices that get equal parts of the batch; None if there are too few for one sequence."""
    hardware, train = setting.hardware, setting.recipe.train
    batch = train.global_batch_size // (train.micro_batch_size or 1)
    per_node, requested = len(hardware.accelerators), setting.recipe.parallel.num_processes
    nodes = ((num_nodes, per_node) for num_nodes in range(hardware.num_nodes, 1, -1))
    for num_nodes, used in (*nodes, *((1, used) for used in range(per_node, 0, -1))):
        if requested not in (None, num_nodes * used):
            continue
        sequences, remainder = divmod(num_nodes * used, per_sequence)
        if sequences and not remainder and batch % sequences == 0:
            return Spread(num_nodes, used)
    return None


def candidates(setting: Setting) -> Iterator[Candidate]:
    """The layouts to try, the cheapest first, of those that the recipe allows."""
    requested, passes, used = setting.recipe.parallel, setting.passes, spread(setting)
    if requested.engine == "automodel":
        for candidate in _automodel(setting):
            if _is_asked_for(requested, candidate.layout, divides_second=False):
                yield candidate
        return
    divides_second = passes.keeps_reference or passes.teacher is not None
    kinds = [_single(setting), _context_parallel(setting), _ulysses(setting), _tensor_parallel(setting)]
    if used:
        kinds[1:1] = [_ddp(setting, used), _fsdp2(setting, used), _zero(setting, used)]
        kinds += [_expert_parallel(setting, used)]
        kinds += [_optimizer_offload(setting, used), _offload(setting, used), _nvme(setting, used)]
    for candidate in chain.from_iterable(kinds):
        if _is_asked_for(requested, candidate.layout, divides_second=divides_second):
            yield candidate


def _is_asked_for(asked: ParallelSection, layout: Layout, *, divides_second: bool) -> bool:
    # FSDP2 does the same as a stage that nothing is added to; but a second model ZeRO-3 alone divides.
    adds_nothing = layout.offload_optimizer_device == "none" and layout.sp_size == 1
    adds_nothing = adds_nothing and not (layout.strategy == "zero3" and divides_second)
    if asked.strategy == "auto" and layout.strategy.startswith("zero") and adds_nothing:
        return False
    if asked.reshard_after_forward != "auto" and layout.strategy != "fsdp2":
        return False
    wishes, has = dict(asked), dict(layout)
    return all(wishes[name] in (None, "auto", has[name]) for name in wishes.keys() & has.keys())


def _single(setting: Setting) -> Iterator[Candidate]:
    requested = setting.recipe.parallel
    alone = setting.hardware.num_accelerators <= 1 or requested.strategy == "single"
    if alone and requested.num_processes in (None, 1):
        is_single = setting.hardware.num_accelerators <= 1
        yield Candidate(Layout(), 1, "only one device" if is_single else "one device, no communication")


def _ddp(setting: Setting, used: Spread) -> Iterator[Candidate]:
    if setting.hardware.num_accelerators > 1:
        strategy = "ddp" if used.num_devices > 1 else "single"
        layout = Layout(strategy=strategy, dp_replicate_size=used.num_devices)
        yield Candidate(layout, used.num_nodes, "everything fits on each device; only gradients are all-reduced")


def _fsdp2(setting: Setting, used: Spread) -> Iterator[Candidate]:
    """Full shard in each node, then over more and more nodes."""
    if used.num_devices == 1:
        return
    for size in _shard_sizes(setting, used):
        layout = Layout(strategy="fsdp2", dp_replicate_size=used.num_devices // size, dp_shard_size=size)
        inside = size <= used.per_node
        where = "within a node" if inside and used.num_nodes > 1 else "" if inside else "across nodes"
        keeps = "weights stay gathered after the forward pass: one all-gather less"
        if inside:
            yield Candidate(layout.model_copy(update={"reshard_after_forward": False}), used.num_nodes, keeps)
        why = f"weights, gradients and optimizer states sharded {where}".rstrip()
        if not inside:
            why += "; the network carries the weights twice per micro-batch"
        yield Candidate(layout, used.num_nodes, why)


def _shard_sizes(setting: Setting, used: Spread) -> list[int]:
    requested = setting.recipe.parallel.dp_shard_size
    if requested is not None:
        return [requested] if used.num_devices % requested == 0 else []
    return [used.per_node * nodes for nodes in reversed(divisors(used.num_nodes))]


def _zero(setting: Setting, used: Spread) -> Iterator[Candidate]:
    """DeepSpeed's stages as they are, for those who ask for them, or have a second model."""
    if used.num_devices == 1:
        return
    for strategy, what in (
        ("zero1", "optimizer states"),
        ("zero2", "optimizer states and gradients"),
        ("zero3", "weights, gradients and optimizer states"),
    ):
        layout = Layout.model_validate({"strategy": strategy, "dp_shard_size": used.num_devices})
        why = f"{what} sharded"
        if strategy == "zero3" and setting.passes.teacher is not None:
            why += ", and the teacher, which FSDP2 does not shard"
        elif strategy == "zero3" and setting.passes.keeps_reference:
            why += ", and the reference gathered layer by layer, which FSDP2 gathers whole"
        yield Candidate(layout, used.num_nodes, why)


def _tensor_parallel(setting: Setting) -> Iterator[Candidate]:
    """Each layer over devices of a node, where a layer's weights and activations would not fit one."""
    model = setting.model
    for size in SIZES:
        used = spread(setting, size)
        divides = model.num_heads % size == 0 and model.num_kv_heads % size == 0
        if used and used.per_node % size == 0 and divides:
            layout = Layout(strategy="fsdp2", dp_shard_size=used.num_devices // size, tp_size=size)
            why = "layers split over the devices of a node; no checkpoints, since transformers cannot resume them"
            yield Candidate(layout, used.num_nodes, why)


def _expert_parallel(setting: Setting, used: Spread) -> Iterator[Candidate]:
    """Whole experts on each device, where gathering all experts of a layer would not fit one."""
    requested = setting.recipe.parallel.ep_size
    if not setting.model.expert_shapes or used.num_devices == 1:
        return
    sizes = divisors(used.per_node) if requested is None else [requested]
    for size in sizes:
        if size > 1 and used.num_devices % size == 0 and setting.model.num_experts % size == 0:
            layout = Layout(strategy="fsdp2", dp_shard_size=used.num_devices, ep_size=size)
            why = f"each device keeps 1/{size} of the experts and receives their tokens; all else is sharded"
            yield Candidate(layout, used.num_nodes, why)


def _automodel(setting: Setting) -> Iterator[Candidate]:
    """NeMo Automodel's layouts: without a pipeline, then with as few stages as fit, and as few devices per expert.

    Gradients are reduced once a step, and only where none of these fits in every micro-batch: a pipeline would gather
    its weights as often. Without one weights are gathered in every micro-batch anyway.
    """
    grids = list(_automodel_grids(setting))
    for syncs in (False, True):
        for used, layout in grids:
            is_piped, why = layout.pp_size > 1, _automodel_words(setting, layout)
            layout = layout.model_copy(update={"sync_each_batch": syncs})
            if is_piped or layout.dp_shard_size <= used.per_node:
                period = "from micro-batch to micro-batch" if is_piped and not syncs else "after the forward pass"
                stays = layout.model_copy(update={"reshard_after_forward": False})
                yield Candidate(stays, used.num_nodes, f"{why}; weights stay gathered {period}")
            if syncs or not is_piped:
                yield Candidate(layout, used.num_nodes, why)


def _automodel_grids(setting: Setting) -> Iterator[tuple[Spread, Layout]]:
    """Yield the devices in use, and their division into stages and groups with different experts."""
    requested = setting.recipe.parallel
    num_devices = requested.num_processes or setting.hardware.num_accelerators
    for pp_size in [requested.pp_size] if requested.pp_size else sorted(divisors(num_devices)):
        used = spread(setting, pp_size)
        if used is None or used.num_devices == 1 or pp_size > setting.model.num_layers:
            continue
        dp_size = used.num_devices // pp_size
        for ep_size in _expert_sizes(setting, dp_size, used.per_node):
            sizes = {"dp_shard_size": dp_size, "ep_size": ep_size, "pp_size": pp_size}
            yield used, Layout.model_validate({"engine": "automodel", "strategy": "fsdp2", **sizes})


def _expert_sizes(setting: Setting, dp_size: int, per_node: int) -> list[int]:
    """Devices of a stage that have different experts: none, or as few as fit, within a node."""
    requested, model = setting.recipe.parallel.ep_size, setting.model
    sizes = [requested] if requested else sorted(divisors(per_node))
    if not requested and (not model.expert_shapes or backends.why_not_divided_by_automodel(model) is not None):
        sizes = [1]
    return [size for size in sizes if dp_size % size == 0 and (size == 1 or model.num_experts % size == 0)]


def _automodel_words(setting: Setting, layout: Layout) -> str:
    """Return what the devices of a layout share."""
    is_set = setting.recipe.parallel.pp_size is not None
    over = "" if layout.dp_shard_size == 1 else f" sharded over {layout.dp_shard_size} devices"
    why = f"weights, gradients and optimizer states{over}"
    if layout.pp_size > 1:
        numbers = sorted(set(layers_per_stage(setting.model.num_layers, layout.pp_size)))
        layers = f"{' to '.join(map(str, numbers))} layer{'s' * (numbers[-1] > 1)}"
        fewest = "set by the recipe" if is_set else "fewer stages would not fit"
        why = f"{layout.pp_size} stages of {layers}, {f'each{over}' if over else 'one device each'}; {fewest}"
    if layout.ep_size > 1:
        why += f"; each device keeps 1/{layout.ep_size} of the experts, for the tokens of {layout.ep_size} devices"
    return why


def _context_parallel(setting: Setting) -> Iterator[Candidate]:
    """Each sequence over devices, as long as the part of each keeps it busy."""
    for size in _sequence_sizes(setting, setting.recipe.parallel.cp_size):
        used = spread(setting, size)
        if used:
            layout = Layout(strategy="fsdp2", dp_shard_size=used.num_devices // size, cp_size=size)
            why = f"{setting.recipe.data.max_length:,} tokens split over {size} devices in a ring"
            yield Candidate(layout, used.num_nodes, why)


def _ulysses(setting: Setting) -> Iterator[Candidate]:
    for size in _sequence_sizes(setting, setting.recipe.parallel.sp_size):
        used = spread(setting, size)
        if used and setting.model.num_heads % size == 0:
            layout = Layout(strategy="zero3", dp_shard_size=used.num_devices // size, sp_size=size)
            tokens = f"{setting.recipe.data.max_length:,} tokens"
            why = f"{tokens} split over {size} devices by heads; no checkpoints: {layout.why_not_resumed}"
            yield Candidate(layout, used.num_nodes, why)


def _sequence_sizes(setting: Setting, asked: int | None) -> list[int]:
    if asked is not None:
        return [asked] if asked > 1 else []
    return [size for size in SIZES if setting.recipe.data.max_length >= size * ENOUGH_TOKENS]


def _optimizer_offload(setting: Setting, used: Spread) -> Iterator[Candidate]:
    """Optimizer states in host memory, for full fine-tuning: what an adapter needs of them is small."""
    requested = setting.recipe.parallel.offload_optimizer_device == "cpu"
    if not (requested or isinstance(setting.recipe.adapter, FullAdapter)):
        return
    why = "the CPU updates the weights, which cross to the host once per step"
    for strategy in ("zero2", "zero3") if used.num_devices > 1 else ("zero2",):
        where = {"dp_shard_size": used.num_devices, "offload_optimizer_device": "cpu"}
        yield Candidate(Layout.model_validate({"strategy": strategy, **where}), used.num_nodes, why)


def _offload(setting: Setting, used: Spread) -> Iterator[Candidate]:
    """Weights in host memory too, fetched layer by layer in every micro-batch."""
    why = "weights in host memory, fetched layer by layer in every micro-batch"
    both = {"offload_param_device": "cpu", "offload_optimizer_device": "cpu"}
    if used.num_devices == 1:
        yield Candidate(Layout.model_validate({"strategy": "zero3", **both}), 1, why)
        return
    for size in _shard_sizes(setting, used):
        sizes = {"dp_replicate_size": used.num_devices // size, "dp_shard_size": size}
        yield Candidate(Layout.model_validate({"strategy": "fsdp2", **sizes, **both}), used.num_nodes, why)
    if setting.recipe.parallel.strategy == "zero3":
        layout = Layout.model_validate({"strategy": "zero3", "dp_shard_size": used.num_devices, **both})
        yield Candidate(layout, used.num_nodes, why)


def _nvme(setting: Setting, used: Spread) -> Iterator[Candidate]:
    """Everything on a disk, for those who set one."""
    if setting.recipe.parallel.nvme_path:
        both = {"offload_param_device": "nvme", "offload_optimizer_device": "nvme"}
        layout = Layout.model_validate({"strategy": "zero3", "dp_shard_size": used.num_devices, **both})
        yield Candidate(layout, used.num_nodes, f"everything offloaded to {setting.recipe.parallel.nvme_path}")
