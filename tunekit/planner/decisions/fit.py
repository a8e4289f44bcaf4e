"""Division of the batch so that a layout fits: micro-batches, checkpointing, and when gradients are reduced."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tunekit.estimates.facts import Device, Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate, estimate
from tunekit.estimates.memory.states import Dtype, reference_of
from tunekit.estimates.passes import Passes, passes_of
from tunekit.planner.decisions.backends import needs_mask, of_rows, padding_of
from tunekit.planner.decisions.isolation import VARLEN
from tunekit.planner.decisions.kernels import choose_kernels, head_kind
from tunekit.planner.decisions.vllm import VLLM, vllm_bytes, vllm_of
from tunekit.planner.plan import Reason, gib
from tunekit.recipe.schema import Recipe

MEMORY_SHARE = {"cpu": 0.9, "cuda": 0.92}
"""Share of the free memory that a plan may use; the rest is for fragmentation and for other programs."""

HOST_SHARE = 0.9
"""The same of main memory."""

ENOUGH_TOKENS = 2048
"""Tokens in a micro-batch from which a device is kept busy: more is not worth recomputing activations."""


@dataclass(frozen=True)
class Setting:
    """Decisions that are the same for every layout.

    Attributes:
        found_limit_bytes: What may be used of each device, where that turned out to be less than what is free.
        host_limit_bytes: What may be used of each node's main memory; None where that is not known.
        reserve_share: What the allocator holds beyond the tensors, as a share of them.
        why_reserve: Which runs that was learned from, None where it was not.
        teacher: The model to learn from, for distillation.
        by_vllm: Whether vLLM generates answers.
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
        recipe = self.recipe
        batch = recipe.train.global_batch_size
        passes = passes_of(
            recipe.method,
            recipe.adapter,
            recipe.data,
            global_batch_size=batch,
            teacher=self.teacher,
            by_vllm=self.by_vllm,
        )
        reference = reference_of(recipe.method, recipe.adapter, self.model.origin)
        return replace(passes, copies_adapter=reference == "copied adapter")

    def attention_in(self, layout: Layout) -> str:
        """Attention implementation in a layout: what is told where documents begin is not divided over devices."""
        is_divided = max(layout.cp_size, layout.sp_size, layout.tp_size) > 1
        return of_rows(self.attention, lie_apart=not is_divided)

    def passes_in(self, layout: Layout) -> Passes:
        """The same in a layout, which has a say in whose head scores tokens."""
        kernels, _ = choose_kernels(self.recipe, self.hardware, layout)
        passes = self.passes
        return replace(passes, head=head_kind(passes.head, self.recipe.method, kernels, layout))

    def vllm(self, layout: Layout) -> VLLM | None:
        """Return how vLLM is used, where it generates answers."""
        return vllm_of(self.recipe, self.model, self.device, layout) if self.by_vllm else None

    def memory(self, layout: Layout, num_nodes: int, size: int, *, checkpointing: bool) -> MemoryEstimate:
        """Estimate the memory of each device with `size` sequences in a micro-batch."""
        length = self.recipe.data.max_length
        attention = self.attention_in(layout)
        padding = padding_of(self.recipe.data, self.model, attention, size, self.passes)
        mask_length = padding.mask_length
        if padding.is_free and attention == VARLEN and self.device.kind == "cpu":
            # SDPA for one document after another: keys and values are repeated as with a mask, and there is none.
            mask_length = 0
        # Without the boundaries that a window draws, SDPA is told that attention is causal and needs no mask.
        window = self.model.sliding_window
        vllm = self.vllm(layout)
        masks = needs_mask(of_rows(attention, lie_apart=padding.is_free))
        slides = masks and window is not None and length >= window
        whole = size * self.passes.sequences_per_row * length if padding.is_free else length
        return estimate(
            self.model,
            self.recipe.adapter,
            device=self.device.kind,
            dtype=self.dtype,
            optim=self.recipe.train.optim,
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
            scores_length=whole if attention == "eager" else None,
        )

    def fits(self, memory: MemoryEstimate, devices_per_node: int) -> bool:
        """Return whether an estimate fits, on the devices and in host memory."""
        return memory.total_bytes <= self.limit_bytes(devices_per_node) and not self._is_too_much_for_host(memory)

    def why_not(self, memory: MemoryEstimate, devices_per_node: int) -> str:
        """The number that rules out what does not fit."""
        if self._is_too_much_for_host(memory):
            may = gib(self.host_limit_bytes or 0)
            return f"needs {gib(memory.host_bytes)} of main memory in each node, {may} may be used"
        return f"needs at least {gib(memory.total_bytes)} of {gib(self.limit_bytes(devices_per_node))}"

    def _is_too_much_for_host(self, memory: MemoryEstimate) -> bool:
        return self.host_limit_bytes is not None and memory.host_bytes > self.host_limit_bytes


@dataclass(frozen=True)
class Fit:
    """A way to cut the batch that fits a layout."""

    layout: Layout
    micro_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    memory: MemoryEstimate
    why_batch: str
    why_checkpointing: str

    def reasons(self) -> Iterator[Reason]:
        """The decisions for the plan."""
        batch = self.micro_batch_size * self.gradient_accumulation_steps * self.layout.num_batches
        at_once = self.layout.num_batches
        yield Reason(
            topic="batch",
            choice=f"{batch} = {self.micro_batch_size} x {self.gradient_accumulation_steps} accumulated x {at_once} "
            f"device{'' if at_once == 1 else 's'}",
            why=self.why_batch,
        )
        choice = "on" if self.gradient_checkpointing else "off"
        yield Reason(topic="checkpointing", choice=choice, why=self.why_checkpointing)


def fit(setting: Setting, layout: Layout, num_nodes: int) -> Fit | None:
    """The largest micro-batch that fits, without gradient checkpointing where that keeps the device busy."""
    recipe = setting.recipe
    requested, forced = recipe.train.micro_batch_size, recipe.train.gradient_checkpointing
    batch = recipe.train.global_batch_size // layout.num_batches
    devices_per_node = layout.num_processes // num_nodes
    sizes = _sizes(setting, batch // layout.sp_size)
    row_tokens = setting.passes.sequences_per_row * recipe.data.max_length
    enough = min(batch, math.ceil(ENOUGH_TOKENS * layout.devices_per_sequence / row_tokens))
    in_one_row = recipe.data.packing or recipe.data.padding_free is True
    widens_mask = requested is None and in_one_row and needs_mask(setting.attention)
    if widens_mask:
        sizes = [size for size in sizes if size <= enough]
        enough = sizes[0]
    for checkpointing in [False, True] if forced == "auto" else [forced]:
        for size in sizes:
            if not checkpointing and forced == "auto" and size < enough and requested is None:
                break
            for variant in _variants(layout, accumulates=size < batch):
                memory = setting.memory(variant, num_nodes, size, checkpointing=checkpointing)
                if not setting.fits(memory, devices_per_node):
                    continue
                busy = widens_mask and size == sizes[0]
                return Fit(
                    layout=variant,
                    micro_batch_size=size,
                    gradient_accumulation_steps=batch // size,
                    gradient_checkpointing=checkpointing,
                    memory=memory,
                    why_batch=_why_batch(
                        setting, layout, size, batch, setting.limit_bytes(devices_per_node), busy=busy
                    ),
                    why_checkpointing=_why_checkpointing(forced, checkpointing),
                )
    return None


def least(setting: Setting, layout: Layout, num_nodes: int) -> MemoryEstimate:
    """The least that a layout needs with this recipe."""
    recipe = setting.recipe
    forced = recipe.train.gradient_checkpointing
    batch = recipe.train.global_batch_size // layout.num_batches
    size = _sizes(setting, batch // layout.sp_size)[-1]
    variants = _variants(layout, accumulates=size < batch)
    kinds = [True, False] if forced == "auto" else [forced]
    estimates = [setting.memory(v, num_nodes, size, checkpointing=kind) for v in variants for kind in kinds]
    return min(estimates, key=lambda memory: memory.total_bytes)


def _sizes(setting: Setting, batch: int) -> list[int]:
    """Sizes of a micro-batch to try on each device, the largest first."""
    requested = setting.recipe.train.micro_batch_size
    if requested is not None:
        return [requested]
    return [size for size in divisors(batch) if size >= setting.passes.least_rows]


def _variants(layout: Layout, *, accumulates: bool) -> list[Layout]:
    """A layout as it is, and where gradients can be summed over the devices more often, so."""
    if layout.strategy != "fsdp2" or not accumulates:
        return [layout]
    return [layout, layout.model_copy(update={"sync_each_batch": True})]


def _why_batch(setting: Setting, layout: Layout, size: int, batch: int, limit_bytes: int, *, busy: bool) -> str:
    if setting.recipe.train.micro_batch_size is not None:
        return "as in the recipe"
    if size == batch:
        return "the whole batch fits at once"
    if size * layout.sp_size == batch:
        return f"each of the {layout.sp_size} devices that divide sequences brings one micro-batch"
    if busy:
        return f"enough to keep it busy; more would only widen the mask of {setting.attention}"
    return f"the most that fits {gib(limit_bytes)}"


def _why_checkpointing(forced: object, checkpointing: bool) -> str:
    if forced != "auto":
        return "as in the recipe"
    return "activations would not fit without" if checkpointing else "activations fit without recomputing them"


def divisors(number: int) -> list[int]:
    """Divisors of a number, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0]
