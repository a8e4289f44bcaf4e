"""Checks of a recipe against a device and a model, for any layout. Each refusal names the place and the remedy."""

from dataclasses import dataclass

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Hardware, ModelFacts
from tunekit.estimates.memory.experts import FORMER_LINEARS, adapted_experts, last_part
from tunekit.estimates.memory.states import Dtype, unties_head
from tunekit.planner.decisions.backends import check_compile, check_isolation
from tunekit.planner.decisions.fit import divisors
from tunekit.planner.decisions.kernels import check_kernels
from tunekit.planner.decisions.vllm import why_no_vllm
from tunekit.recipe.methods import generates
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter, LoraAdapter
from tunekit.recipe.sections.section import LrSchedulerType


@dataclass(frozen=True)
class _Needed:
    """An argument that a learning-rate schedule cannot do without: its possible names, and a value to show."""

    one_of: tuple[str, ...]
    example: str


LR_SCHEDULER_KWARGS: dict[LrSchedulerType, _Needed] = {
    "cosine_with_min_lr": _Needed(("min_lr_rate", "min_lr"), "0.1"),
    "cosine_warmup_with_min_lr": _Needed(("min_lr_rate", "min_lr"), "0.1"),
    "warmup_stable_decay": _Needed(("num_decay_steps",), "2"),
}
"""Schedules of transformers that have no default for one of their arguments."""


def choose_dtype(recipe: Recipe, device: Device) -> tuple[Dtype, str]:
    """Type of the products, and why.

    Raises:
        PlanError: The device does not compute in the type that is asked for.
    """
    requested = recipe.model.dtype
    if requested == "float16" and device.kind == "cpu":
        raise PlanError(
            "model.dtype: float16 does not run on a CPU: torch would silently compute in float32",
            hint="use bfloat16 or float32",
        )
    if requested != "auto":
        return requested, "as in the recipe"
    if device.kind == "cpu":
        return "float32", "exact, and no slower for small models on a CPU"
    if device.native_bfloat16:
        return "bfloat16", f"{device.name} computes it natively"
    return "float32", f"{device.name} does not compute bfloat16 natively; float16 can be asked for"


def _check_lengths(recipe: Recipe, model: ModelFacts) -> None:
    limit = model.max_position_embeddings
    if limit is not None and recipe.data.max_length > limit:
        raise PlanError(
            f"data.max_length: {recipe.data.max_length} is more than the {limit} positions of {model.path}",
            hint=f"set it to {limit} or less",
        )


def _check_optim(recipe: Recipe, device: Device) -> None:
    optim = recipe.train.optim
    if optim.startswith("paged_") and device.kind == "cpu":
        twins = {"paged_adamw_32bit": "adamw_torch", "paged_ademamix_32bit": "ademamix"}
        raise PlanError(
            f"train.optim: {optim} moves its states between an accelerator and main memory; "
            f"{device.name} has one memory",
            hint=f"use {twins.get(optim, optim.removeprefix('paged_'))}",
        )


def _check_lr_scheduler(recipe: Recipe) -> None:
    name = recipe.train.lr_scheduler_type
    needed = LR_SCHEDULER_KWARGS.get(name)
    scheduler_args = recipe.method.trainer_args.get("lr_scheduler_kwargs") or {}
    if needed and not set(needed.one_of) & set(scheduler_args):
        raise PlanError(
            f"train.lr_scheduler_type: {name} needs {' or '.join(needed.one_of)}",
            hint=f"add to method.trainer_args: `lr_scheduler_kwargs: {{{needed.one_of[0]}: {needed.example}}}`",
        )


def _check_batch(recipe: Recipe) -> None:
    batch, requested = recipe.train.global_batch_size, recipe.train.micro_batch_size
    if requested is not None and batch % requested:
        raise PlanError(
            f"train.micro_batch_size: {requested} does not divide train.global_batch_size {batch}",
            hint=f"use one of {', '.join(str(size) for size in divisors(batch))}",
        )


def check_retry(recipe: Recipe, micro_batch_size: int) -> None:
    """Check that the micro-batch of a plan can be halved where memory runs out, if that is asked for.

    Raises:
        PlanError: It cannot.
    """
    if not recipe.train.retry_out_of_memory:
        return
    if recipe.method.couples_rows:
        raise PlanError(
            f"train.retry_out_of_memory: the loss of {recipe.method.type} depends on which rows share a micro-batch",
            hint="leave it out, or set train.micro_batch_size lower from the beginning",
        )
    if micro_batch_size == 1:
        raise PlanError(
            "train.retry_out_of_memory: the micro-batch that fits is 1, which cannot be halved", hint="leave it out"
        )


def _check_adapter(recipe: Recipe, model: ModelFacts) -> None:
    adapter = recipe.adapter
    if isinstance(adapter, FullAdapter):
        return
    check_adapted_experts(model, adapter)
    matched = model.adapter_linears(adapter.target_modules)
    missing = [
        target
        for target in (adapter.target_modules if isinstance(adapter.target_modules, list) else [])
        if not model.adapter_linears([target])
    ]
    if missing or not matched:
        endings = sorted({name.rpartition(".")[2] for name in model.linears})
        raise PlanError(
            f"adapter.target_modules: {model.path} has no linear layer named {', '.join(missing) or 'so'}",
            hint=f"it has {', '.join(endings)}",
        )
    unknown = [name for name in adapter.modules_to_save or [] if model.num_params_in([name]) == 0]
    if unknown:
        raise PlanError(
            f"adapter.modules_to_save: {model.path} stores no weights of {', '.join(unknown)}",
            hint="a head tied to the embedding has no weights of its own; name the module that holds them",
        )


def _check_merge(recipe: Recipe, model: ModelFacts) -> None:
    """Refuse an adapter in whose model embedding and head have come apart: as one model they would be one again."""
    origin = model.origin
    if origin is None or origin.adapter is None or not origin.is_merged_for(recipe.adapter):
        return
    if unties_head(model, origin.adapter):
        raise PlanError(
            f"adapter.type: the adapter of {origin.name} trained an embedding that the head of {origin.base.path} "
            "shares, and cannot be merged: the head would change with it",
            hint="use adapter.type=lora, which trains that adapter further",
        )


def _those(hardware: Hardware) -> str:
    """The machine in words."""
    if not hardware.accelerators:
        return f"there are {hardware.num_nodes} nodes" if hardware.num_nodes > 1 else f"this is {hardware.device.name}"
    return f"there are {hardware.num_accelerators}"


def _check_parallel(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> None:
    """Refuse what contradicts itself or the machine; what a library cannot do is refused by layout."""
    requested = recipe.parallel
    if (requested.num_processes or 1) > max(1, hardware.num_accelerators):
        raise PlanError(
            f"parallel.num_processes: {requested.num_processes} processes need as many accelerators, of the "
            "same number "
            f"in each node; {_those(hardware)}",
            hint="each process computes on one of its own",
        )
    several = [name for name in ("dp_shard_size", "tp_size", "cp_size", "sp_size") if (dict(requested)[name] or 1) > 1]
    if requested.strategy in ("ddp", "fsdp2", "zero1"):
        several.insert(0, "strategy")
    if several and hardware.num_accelerators < 2:
        what = f"parallel.{several[0]}: {dict(requested)[several[0]]} needs several accelerators"
        hint = "leave it to the plan" if hardware.accelerators else "set parallel.num_processes to share the processor"
        raise PlanError(f"{what}; this is {hardware.device.name}", hint=hint)
    if requested.strategy not in ("auto", "single") and not hardware.accelerators:
        raise PlanError(
            f"parallel.strategy: {requested.strategy} needs accelerators; this is {hardware.device.name}",
            hint="leave it to the plan",
        )
    for name in ("tp_size", "sp_size"):
        size = dict(requested)[name] or 1
        if model.num_heads % size or (name == "tp_size" and model.num_kv_heads % size):
            heads = f"{model.num_heads} heads and {model.num_kv_heads} key-value heads"
            raise PlanError(f"parallel.{name}: {size} does not divide the {heads} of {model.path}")
    if (requested.cp_size or 1) > 1 and (requested.sp_size or 1) > 1:
        raise PlanError("parallel.cp_size and parallel.sp_size: Accelerate takes one of them", hint="leave one out")
    on_disk = [name for name in ("offload_param_device", "offload_optimizer_device") if dict(requested)[name] == "nvme"]
    if on_disk and requested.nvme_path is None:
        raise PlanError(
            f"parallel.{on_disk[0]}: nvme needs parallel.nvme_path", hint="name a folder on a fast local disk"
        )


def _check_teacher(model: ModelFacts, teacher: ModelFacts | None) -> None:
    if teacher is not None and teacher.vocab_size != model.vocab_size:
        raise PlanError(
            f"method.teacher: {teacher.path} has a vocabulary of {teacher.vocab_size:,}, and {model.path} one of "
            f"{model.vocab_size:,}: probabilities are compared token by token",
            hint="take a larger model of the same family as the teacher",
        )


def _check_vllm(recipe: Recipe, hardware: Hardware) -> None:
    method = recipe.method
    if not generates(method) or method.generation.use_vllm is not True:
        return
    refusal = why_no_vllm(recipe, hardware)
    if refusal is not None:
        why, hint = refusal
        raise PlanError(f"method.generation.use_vllm: {why}", hint=hint)


def check_recipe(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, attn_implementation: str, teacher: ModelFacts | None
) -> None:
    """Refuse what a recipe asks for and this device or model cannot do, whatever the layout.

    Raises:
        PlanError: There is such a thing.
    """
    check_isolation(recipe.data, model, attn_implementation)
    check_kernels(recipe, hardware, model)
    check_compile(recipe, hardware)
    _check_lengths(recipe, model)
    _check_adapter(recipe, model)
    _check_merge(recipe, model)
    _check_optim(recipe, hardware.device)
    _check_batch(recipe)
    _check_lr_scheduler(recipe)
    _check_parallel(recipe, hardware, model)
    _check_teacher(model, teacher)
    _check_vllm(recipe, hardware)


def check_adapted_experts(model: ModelFacts, adapter: LoraAdapter) -> None:
    """Refuse what PEFT refuses to put on fused experts and routers.

    Raises:
        PlanError: A part of a fused matrix is named without the others, or the adapter has dropout or is DoRA's.
    """
    former = FORMER_LINEARS.get(model.model_type) if model.num_experts else None
    if former is None:
        return
    targets = (
        set() if adapter.target_modules == "all-linear" else {last_part(target) for target in adapter.target_modules}
    )
    for fused in sorted(set(former.values())):
        parts = [old for old, new in former.items() if new == fused]
        missing = [part for part in parts if part not in targets]
        if missing and len(missing) < len(parts):
            named = ", ".join(part for part in parts if part in targets)
            raise PlanError(
                f"adapter.target_modules: {named} without {', '.join(missing)}; the experts of {model.path} have them "
                f"in one matrix, {fused}",
                hint=f"name {', '.join(missing)} too, or leave {named} out",
            )
    if not adapted_experts(model.tensors, former, adapter.target_modules):
        return
    unfused = sorted({last_part(name) for name in model.linears} - set(former))
    for setting, is_set in (("dropout", adapter.dropout > 0), ("use_dora", adapter.use_dora)):
        if is_set:
            raise PlanError(
                f"adapter.{setting}: PEFT has none for the fused matrices of experts and the routers of {model.path}",
                hint=f"leave it out, or put adapters on {', '.join(unfused)} alone by adapter.target_modules",
            )
