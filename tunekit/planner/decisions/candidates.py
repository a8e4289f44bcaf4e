"""The layouts that a run could have, in the order in which they are tried: what costs least comes first.

DDP moves the gradients once a step. FSDP2 moves the weights besides, twice in each micro-batch or once where they stay
after the forward pass; in a hybrid shard that happens inside the nodes. What divides a layer or a sequence waits for
other devices within each layer. What leaves the device comes back over a slower link than any of these.

Each function gives the layouts of one kind for the machine, none where the machine has no use for them. That a model
or a recipe cannot be run so is no reason to leave one out here: it is refused by name in `refusal`, and the plan keeps
it with the reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tunekit.estimates.facts import Origin
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.states import reference_of
from tunekit.planner.decisions.backends import of_rows, why_no_float8_in, why_not_compiled_in
from tunekit.planner.decisions.fit import ENOUGH_TOKENS, Setting, divisors
from tunekit.planner.decisions.kernels import why_no_kernels
from tunekit.planner.decisions.vllm import why_not_in
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter, QloraAdapter
from tunekit.recipe.sections.section import Optim, ParallelSection

SHARDED_OPTIMS: frozenset[Optim] = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Optimizers that take a step on tensors divided by FSDP2 (DTensor), as they do on whole ones. Those of bitsandbytes
and transformers' Adafactor raise (torch 2.13, bitsandbytes 0.50, transformers 5.23; a test runs each)."""

CPU_OPTIMS: frozenset[Optim] = frozenset({"adamw_torch", "adamw_torch_fused"})
"""Optimizers that DeepSpeed runs on the processor, where states are offloaded to: torch's own. The fused one takes as
long as DeepSpeed's, which would be compiled when first used; the other one takes ten times as long."""

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
    least = 1 if train.micro_batch_size else setting.passes.least_rows
    nodes = ((num_nodes, per_node) for num_nodes in range(hardware.num_nodes, 1, -1))
    for num_nodes, used in (*nodes, *((1, used) for used in range(per_node, 0, -1))):
        if requested not in (None, num_nodes * used):
            continue
        sequences, remainder = divmod(num_nodes * used, per_sequence)
        if sequences and not remainder and batch % sequences == 0 and batch // sequences >= least:
            return Spread(num_nodes, used)
    return None


def candidates(setting: Setting) -> Iterator[Candidate]:
    """The layouts to try, the cheapest first, of those that the recipe allows."""
    requested, passes = setting.recipe.parallel, setting.passes
    divides_second = passes.keeps_reference or passes.teacher is not None
    for kind in KINDS:
        for candidate in kind(setting):
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
    wishes = (
        (asked.strategy, layout.strategy),
        (asked.dp_shard_size, layout.dp_shard_size),
        (asked.tp_size, layout.tp_size),
        (asked.cp_size, layout.cp_size),
        (asked.sp_size, layout.sp_size),
        (asked.reshard_after_forward, layout.reshard_after_forward),
        (asked.offload_param_device, layout.offload_param_device),
        (asked.offload_optimizer_device, layout.offload_optimizer_device),
    )
    return all(wish in (None, "auto", has) for wish, has in wishes)


def _single(setting: Setting) -> Iterator[Candidate]:
    requested = setting.recipe.parallel
    alone = setting.hardware.num_accelerators <= 1 or requested.strategy == "single"
    if alone and requested.num_processes in (None, 1):
        is_single = setting.hardware.num_accelerators <= 1
        yield Candidate(Layout(), 1, "there is one device" if is_single else "one device, and no exchange")


def _ddp(setting: Setting) -> Iterator[Candidate]:
    used = spread(setting)
    if setting.hardware.num_accelerators > 1 and used:
        strategy = "ddp" if used.num_devices > 1 else "single"
        layout = Layout(strategy=strategy, dp_replicate_size=used.num_devices)
        yield Candidate(layout, used.num_nodes, "everything fits each device, so that only gradients are exchanged")


def _fsdp2(setting: Setting) -> Iterator[Candidate]:
    """Full shard in each node, then over more and more nodes."""
    used = spread(setting)
    if not used or used.num_devices == 1:
        return
    for size in _shard_sizes(setting, used):
        layout = Layout(strategy="fsdp2", dp_replicate_size=used.num_devices // size, dp_shard_size=size)
        inside = size <= used.per_node
        where = "inside a node" if inside and used.num_nodes > 1 else "" if inside else "over several nodes"
        keeps = "weights stay whole after the forward pass: one exchange less"
        if inside:
            yield Candidate(layout.model_copy(update={"reshard_after_forward": False}), used.num_nodes, keeps)
        why = f"weights, gradients and optimizer states are divided {where}".rstrip()
        if not inside:
            why += ": the network carries the weights twice in each micro-batch"
        yield Candidate(layout, used.num_nodes, why)


def _shard_sizes(setting: Setting, used: Spread) -> list[int]:
    requested = setting.recipe.parallel.dp_shard_size
    if requested is not None:
        return [requested] if used.num_devices % requested == 0 else []
    return [used.per_node * nodes for nodes in reversed(divisors(used.num_nodes))]


def _zero(setting: Setting) -> Iterator[Candidate]:
    """DeepSpeed's stages as they are, for those who ask for them, or have a second model."""
    used = spread(setting)
    if not used or used.num_devices == 1:
        return
    for strategy, what in (
        ("zero1", "optimizer states"),
        ("zero2", "optimizer states and gradients"),
        ("zero3", "weights, gradients and optimizer states"),
    ):
        layout = Layout.model_validate({"strategy": strategy, "dp_shard_size": used.num_devices})
        why = f"{what} are divided"
        if strategy == "zero3" and setting.passes.teacher is not None:
            why += ", and the teacher, which FSDP2 does not divide"
        elif strategy == "zero3" and setting.passes.keeps_reference:
            why += ", and the reference layer by layer, which FSDP2 gathers whole"
        yield Candidate(layout, used.num_nodes, why)


def _tensor_parallel(setting: Setting) -> Iterator[Candidate]:
    """Each layer over devices of a node, where a layer's weights and activations would not fit one."""
    model = setting.model
    for size in SIZES:
        used = spread(setting, size)
        divides = model.num_heads % size == 0 and model.num_kv_heads % size == 0
        if used and size <= used.per_node and used.per_node % size == 0 and divides:
            layout = Layout(strategy="fsdp2", dp_shard_size=used.num_devices // size, tp_size=size)
            why = "each layer is divided over devices of a node; without checkpoints, which transformers cannot resume"
            yield Candidate(layout, used.num_nodes, why)


def _context_parallel(setting: Setting) -> Iterator[Candidate]:
    """Each sequence over devices, as long as the part of each keeps it busy."""
    for size in _sequence_sizes(setting, setting.recipe.parallel.cp_size):
        used = spread(setting, size)
        if used:
            layout = Layout(strategy="fsdp2", dp_shard_size=used.num_devices // size, cp_size=size)
            why = f"{setting.recipe.data.max_length:,} tokens are divided over {size} devices in a ring"
            yield Candidate(layout, used.num_nodes, why)


def _ulysses(setting: Setting) -> Iterator[Candidate]:
    for size in _sequence_sizes(setting, setting.recipe.parallel.sp_size):
        used = spread(setting, size)
        if used and setting.model.num_heads % size == 0:
            layout = Layout(strategy="zero3", dp_shard_size=used.num_devices // size, sp_size=size)
            tokens = f"{setting.recipe.data.max_length:,} tokens"
            why = f"{tokens} are divided over {size} devices by heads; without checkpoints: {layout.why_not_resumed}"
            yield Candidate(layout, used.num_nodes, why)


def _sequence_sizes(setting: Setting, asked: int | None) -> list[int]:
    if asked is not None:
        return [asked] if asked > 1 else []
    return [size for size in SIZES if setting.recipe.data.max_length >= size * ENOUGH_TOKENS]


def _optimizer_offload(setting: Setting) -> Iterator[Candidate]:
    """Optimizer states in main memory, where all is trained: what an adapter needs of them is small."""
    used = spread(setting) if setting.hardware.accelerators else None
    requested = setting.recipe.parallel.offload_optimizer_device == "cpu"
    if not used or not (requested or isinstance(setting.recipe.adapter, FullAdapter)):
        return
    why = "the processor updates the weights: they cross to the host once a step"
    for strategy in ("zero2", "zero3") if used.num_devices > 1 else ("zero2",):
        where = {"dp_shard_size": used.num_devices, "offload_optimizer_device": "cpu"}
        yield Candidate(Layout.model_validate({"strategy": strategy, **where}), used.num_nodes, why)


def _offload(setting: Setting) -> Iterator[Candidate]:
    """Weights in main memory too: they come to the device layer by layer, in each micro-batch."""
    used = spread(setting) if setting.hardware.accelerators else None
    if not used:
        return
    why = "weights lie in main memory and come layer by layer, in each micro-batch"
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


def _nvme(setting: Setting) -> Iterator[Candidate]:
    """On a disk, for those who name one."""
    used = spread(setting) if setting.hardware.accelerators else None
    if used and setting.recipe.parallel.nvme_path:
        both = {"offload_param_device": "nvme", "offload_optimizer_device": "nvme"}
        layout = Layout.model_validate({"strategy": "zero3", "dp_shard_size": used.num_devices, **both})
        yield Candidate(layout, used.num_nodes, f"everything lies in {setting.recipe.parallel.nvme_path}")


KINDS: tuple[Callable[[Setting], Iterator[Candidate]], ...] = (
    _single,
    _ddp,
    _fsdp2,
    _zero,
    _context_parallel,
    _ulysses,
    _tensor_parallel,
    _optimizer_offload,
    _offload,
    _nvme,
)
"""The kinds of layouts in the order in which they are tried."""


class Refusal(NamedTuple):
    """Reason that a combination does not work, and the nearest that does."""

    why: str
    hint: str


def refusal(setting: Setting, layout: Layout) -> Refusal | None:
    """Return why the libraries cannot run this recipe in a layout correctly; None if they can."""
    recipe, optim = setting.recipe, setting.recipe.train.optim
    if layout.strategy.startswith("zero") and setting.hardware.deepspeed is False:
        return Refusal("DeepSpeed is not installed", "pip install 'tunekit[deepspeed]'")
    if isinstance(recipe.adapter, QloraAdapter) and (
        layout.strategy in ("fsdp2", "zero3") or layout.offload_param_device != "none"
    ):
        why = "ZeRO-3 does not divide the 4-bit weights of bitsandbytes"
        if layout.strategy == "fsdp2":
            why = "Accelerate shards 4-bit weights only where they are stored in a floating type "
            why += "(bnb_4bit_quant_storage), and tunekit stores them in bytes"
        return Refusal(why, "use ddp, or adapter.type=lora")
    if layout.strategy == "fsdp2" and optim not in SHARDED_OPTIMS:
        return Refusal(f"{optim} takes no step on sharded tensors", f"use train.optim={CLOSEST_OPTIM}")
    if layout.strategy.startswith("zero") and layout.offload_optimizer_device != "none" and optim not in CPU_OPTIMS:
        return Refusal(f"DeepSpeed cannot run {optim} on the processor", f"use train.optim={CLOSEST_OPTIM}")
    beforehand = recipe.method.reference_use == "beforehand"
    if layout.strategy == "fsdp2" and beforehand and not isinstance(recipe.adapter, FullAdapter):
        why = "TRL computes log-probabilities beforehand when FSDP2 has not yet given all processes their weights"
        return Refusal(why, "leave method.precompute_ref_log_probs out: the reference is the model without its adapter")
    if layout.strategy not in ("single", "ddp") and recipe.method.trainer_args.get("sync_ref_model"):
        why = "a checkpoint of divided weights has no reference that follows the model"
        return Refusal(why, "use ddp, or leave method.trainer_args.sync_ref_model out")
    without_vllm = why_not_in(recipe, layout) if setting.by_vllm else None
    if without_vllm is not None:
        return Refusal(without_vllm, "leave method.generation.use_vllm out")
    origin = setting.model.origin
    if origin is not None and layout.strategy in ("fsdp2", "zero3"):
        refused = _origin_refusal(recipe, origin, layout)
        if refused is not None:
            return refused
    if recipe.model.kernels != "auto":
        without_kernels = why_no_kernels(recipe.model.kernels, layout)
        if without_kernels is not None:
            return Refusal(without_kernels, "leave model.kernels out, or use torch")
    without_compile = why_not_compiled_in(layout) if recipe.train.torch_compile is True else None
    if without_compile is not None:
        return Refusal(without_compile, "leave train.torch_compile out")
    without_float8 = why_no_float8_in(layout) if recipe.train.fp8 else None
    if without_float8 is not None:
        return Refusal(without_float8, "leave train.fp8 out, or use fsdp2")
    if layout.tp_size > 1 and not isinstance(recipe.adapter, FullAdapter):
        return Refusal("PEFT's adapters do not run on layers divided by tensor parallel", "use fsdp2 without tp_size")
    if layout.tp_size > 1 and recipe.method.spec.trains_on != "tokens":
        why = f"TRL divides no layers of what {recipe.method.type} computes besides the trained model"
        return Refusal(why, "use fsdp2 without tp_size")
    if layout.devices_per_sequence > layout.tp_size and recipe.method.spec.trains_on != "tokens":
        return Refusal(f"{recipe.method.type} is not computed on divided sequences", "use fsdp2 without them")
    if setting.device.kind == "cpu" and layout.strategy == "fsdp2":
        refused = _cpu_refusal(layout)
        if refused is not None:
            return refused
    if layout.cp_size > 1:
        return _ring_refusal(setting)
    if layout.sp_size > 1:
        return _ulysses_refusal(setting, layout)
    return None


def _origin_refusal(recipe: Recipe, origin: Origin, layout: Layout) -> Refusal | None:
    """Return why training cannot start from this origin where weights are sharded."""
    if layout.tp_size > 1 and origin.is_merged_for(recipe.adapter):
        why = f"the adapter of {origin.name} cannot be merged into layers that are divided as they are read"
        return Refusal(why, "use fsdp2 without tp_size")
    reference = reference_of(recipe.method, recipe.adapter, origin)
    if is_rewarded(recipe.method) and reference == "second model" and origin.is_merged_for(recipe.adapter):
        why = f"TRL loads the reference of {recipe.method.type} itself and divides it, without the adapter to be merged"
        return Refusal(why, "use adapter.type=lora, method.beta=0, or ddp")
    if layout.strategy == "fsdp2" and reference == "beforehand" and origin.is_merged_for(recipe.adapter):
        why = "TRL loads the model itself to compute log-probabilities beforehand, without the adapter to be merged"
        return Refusal(why, "leave method.precompute_ref_log_probs out")
    whole = origin.adapter is not None and origin.adapter.modules_to_save
    if layout.strategy == "zero3" and whole:
        why = f"ZeRO-3 divides {', '.join(whole)}, which {origin.name} trained whole, before its adapter can be read"
        return Refusal(why, "use fsdp2, ddp or zero2")
    return None


CLOSEST_OPTIM: Optim = "adamw_torch_fused"
"""Replacement of an optimizer that a layout does not run."""


def _ulysses_refusal(setting: Setting, layout: Layout) -> Refusal | None:
    """Ulysses gives each device whole heads, and no mask.

    The devices that divide sequences show each other as many micro-batches as they are, and compute them one after
    another, so that the rows of a step are those of other layouts where it takes all of them.
    """
    recipe, model = setting.recipe, setting.model
    num_rows = layout.num_processes * (recipe.train.micro_batch_size or 1)
    if recipe.train.global_batch_size % num_rows:
        why = f"each of the {layout.num_processes} devices brings a micro-batch of its own to a step"
        return Refusal(why, f"set train.global_batch_size to a multiple of {num_rows}")
    if setting.attention == "eager":
        return Refusal("Ulysses does not divide eager attention", "use sdpa")
    if setting.attention.startswith("flash_attention"):
        return None
    if recipe.data.packing or recipe.data.padding_free is True:
        why = f"{setting.attention} does not keep packed documents apart when they are divided"
        return Refusal(why, "use flash_attention_2, or rows without packing")
    if model.sliding_window is not None and recipe.data.max_length > model.sliding_window:
        return Refusal("Ulysses drops the mask that a sliding window needs", "use flash_attention_2")
    return None


def _cpu_refusal(layout: Layout) -> Refusal | None:
    """Return what FSDP2 supports on accelerators only (torch 2.13; a test runs each)."""
    if layout.offload_param_device == "cpu":
        why = "FSDP2 pins the memory to which it offloads, which takes an accelerator"
        return Refusal(why, "leave parallel.offload_param_device out: on a CPU all is in main memory")
    if layout.cp_size > 1:
        why = "torch has no rule to divide attention on a CPU (scaled_dot_product_flash_attention_for_cpu)"
        return Refusal(why, "use parallel.sp_size, which divides sequences by heads, or fsdp2 without cp_size")
    return None


def _ring_refusal(setting: Setting) -> Refusal | None:
    """Context parallel passes keys and values on and keeps no mask but the causal one."""
    recipe, model = setting.recipe, setting.model
    if recipe.data.packing or recipe.data.padding_free is True:
        key = "data.packing" if recipe.data.packing else "data.padding_free"
        why = "context parallel drops the mask that keeps packed documents apart"
        return Refusal(why, f"set {key}=false")
    key = recipe.model.attn_implementation
    attention = of_rows(setting.attention, lie_apart=False) if key == "auto" else setting.attention
    if attention != "sdpa":
        why = f"context parallel divides sdpa, not {attention}"
        return Refusal(why, "set model.attn_implementation=sdpa")
    if model.sliding_window is not None and recipe.data.max_length > model.sliding_window:
        why = f"context parallel drops the mask of a window of {model.sliding_window:,} tokens"
        return Refusal(why, "use another model, or a shorter data.max_length")
    return None
