"""Checks of a recipe against a device and a model, for any layout and for one. Each names the place and the remedy."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Hardware, ModelFacts, Origin
from tunekit.estimates.layout import Layout
from tunekit.estimates.learning_rates import has_groups, unmatched
from tunekit.estimates.memory.experts import adapted_experts, last_part
from tunekit.estimates.memory.states import Dtype, reference_of, trained_tensors, unties_head
from tunekit.estimates.models.model_config import model_types, refused_targets_of
from tunekit.planner.decisions import backends
from tunekit.planner.decisions.candidates import Setting, divisors
from tunekit.recipe.methods import generates, is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.section import LrSchedulerType, Optim

LR_SCHEDULER_KWARGS: dict[LrSchedulerType, tuple[tuple[str, ...], str]] = {
    "cosine_with_min_lr": (("min_lr_rate", "min_lr"), "0.1"),
    "cosine_warmup_with_min_lr": (("min_lr_rate", "min_lr"), "0.1"),
    "warmup_stable_decay": (("num_decay_steps",), "2"),
}
"""Argument that a schedule of transformers has no default for: its possible names, and a value to show."""

SHARDED_OPTIMS: frozenset[Optim] = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Optimizers that take a step on tensors divided by FSDP2 (DTensor), as they do on whole ones. Those of bitsandbytes
and transformers' Adafactor raise (torch 2.13, bitsandbytes 0.50, transformers 5.23; a test runs each)."""

CPU_OPTIMS: frozenset[Optim] = frozenset({"adamw_torch", "adamw_torch_fused"})
"""Optimizers that DeepSpeed runs on the CPU, where states are offloaded to: torch's own. The fused one takes as
long as DeepSpeed's, which would be compiled when first used; the other one takes ten times as long."""

CLOSEST_OPTIM: Optim = "adamw_torch_fused"
"""Replacement of an optimizer that a layout does not run."""


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
        return requested, "set by the recipe"
    if device.kind == "cpu":
        return "float32", "exact, and no slower for small models on a CPU"
    if device.native_bfloat16:
        return "bfloat16", f"native on {device.name}"
    return "float32", f"{device.name} has no native bfloat16; model.dtype=float16 is available"


def check_recipe(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, attention: str, dtype: Dtype, teacher: ModelFacts | None
) -> None:
    """Refuse what a recipe asks for and this device or model cannot do, whatever the layout.

    Raises:
        PlanError: There is such a thing.
    """
    for problem, hint in _faults(recipe, hardware, model, attention, dtype, teacher):
        raise PlanError(problem, hint=hint)


def _faults(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, attention: str, dtype: Dtype, teacher: ModelFacts | None
) -> Iterator[tuple[str, str | None]]:
    """Yield what is wrong with a recipe on this device with this model, each with its remedy."""
    device, limit, train = hardware.device, model.max_position_embeddings, recipe.train
    yield from backends.isolation_faults(recipe.data, model, attention)
    yield from backends.kernels_faults(recipe, hardware, model)
    yield from backends.compile_faults(recipe, hardware)
    if limit is not None and recipe.data.max_length > limit:
        problem = f"data.max_length: {recipe.data.max_length} exceeds the {limit} positions of {model.path}"
        yield problem, f"set it to {limit} or less"
    if reason := model_types().refused.get(model.model_type):
        yield f"model.path: {model.model_type} models are not supported: {reason}", None
    yield from _published_faults(recipe, model)
    yield from _adapter_faults(recipe, model)
    yield from _merge_faults(recipe, model)
    for pattern in unmatched(recipe, trained_tensors(model, recipe.adapter)) if train.learning_rates else ():
        problem = f"train.learning_rates: no trained parameter of {model.path} matches {pattern!r}"
        yield problem, "remove it, or train what it names"
    if train.optim.startswith("paged_") and device.kind == "cpu":
        twins = {"paged_adamw_32bit": "adamw_torch", "paged_ademamix_32bit": "ademamix"}
        problem = f"train.optim: {train.optim} pages its states between an accelerator and host memory; "
        hint = f"use {twins.get(train.optim, train.optim.removeprefix('paged_'))}"
        yield f"{problem}{device.name} has only host memory", hint
    batch, size = train.global_batch_size, train.micro_batch_size
    if size is not None and batch % size:
        problem = f"train.micro_batch_size: {size} does not divide train.global_batch_size {batch}"
        yield problem, f"use one of {', '.join(map(str, divisors(batch)))}"
    names, example = LR_SCHEDULER_KWARGS.get(train.lr_scheduler_type, ((), ""))
    if names and not set(names) & set(recipe.method.trainer_args.get("lr_scheduler_kwargs") or {}):
        hint = f"add to method.trainer_args: `lr_scheduler_kwargs: {{{names[0]}: {example}}}`"
        yield f"train.lr_scheduler_type: {train.lr_scheduler_type} needs {' or '.join(names)}", hint
    yield from _parallel_faults(recipe, hardware, model)
    if teacher is not None and teacher.vocab_size != model.vocab_size:
        problem = f"method.teacher: {teacher.path} has a vocabulary of {teacher.vocab_size:,}, but {model.path} of "
        problem += f"{model.vocab_size:,}; probabilities are compared token by token"
        yield problem, "use a larger model of the same family as the teacher"
    if generates(recipe.method) and recipe.method.generation.use_vllm is True:
        obstacle = backends.why_no_vllm(recipe, hardware)
        if obstacle is not None:
            yield f"method.generation.use_vllm: {obstacle[0]}", obstacle[1]
    yield from backends.float8_faults(recipe, hardware, model, dtype)


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
            hint="unset it, or set a lower train.micro_batch_size",
        )
    if micro_batch_size == 1:
        raise PlanError(
            "train.retry_out_of_memory: the micro-batch that fits is 1, which cannot be halved", hint="unset it"
        )


def _published_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse quantized weights that this adapter cannot be trained on, or that are not made dense as they are read."""
    method, is_qlora = model.published_as, isinstance(recipe.adapter, QloraAdapter)
    problem = f"model.path: the weights of {model.path} are published in {method}"
    if method == "bitsandbytes" and not is_qlora:
        yield f"{problem} 4 bits", "set adapter.type to qlora, or use the model that they were made of"
    elif method == "fp8" and is_qlora:
        yield f"{problem}, which is not quantized again", "set adapter.type to lora, or use a 16-bit copy of the model"
    elif method not in (None, "bitsandbytes", "fp8", "mxfp4"):
        yield f"{problem}, which cannot be trained", "use the model that they were made of"


def _adapter_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    adapter = recipe.adapter
    if isinstance(adapter, FullAdapter):
        yield from _part_faults(model, adapter)
        return
    if reason := model_types().without_adapters.get(model.model_type):
        yield f"adapter.type: no adapter is trained of {model.model_type} models: {reason}", "set adapter.type=full"
    yield from expert_faults(model, adapter)
    targets = adapter.target_modules if isinstance(adapter.target_modules, list) else []
    refused = [target for target in targets if last_part(target) in refused_targets_of(model.model_type)]
    if refused:
        problem = f"adapter.target_modules: PEFT does not adapt {', '.join(refused)} of {model.model_type} models"
        yield problem, "remove them, or set adapter.target_modules=all-linear, which leaves them out"
    missing = [target for target in targets if target not in refused and not model.adapter_linears([target])]
    if missing or not (refused or model.adapter_linears(adapter.target_modules)):
        endings = sorted({name.rpartition(".")[2] for name in model.linears})
        named = ", ".join(missing) or adapter.target_modules
        problem = f"adapter.target_modules: {model.path} has no linear layer named {named}"
        yield problem, f"available: {', '.join(endings)}"
    unknown = [name for name in adapter.modules_to_save or [] if model.num_params_in([name]) == 0]
    if unknown:
        hint = "a head tied to the embedding has no weights of its own; set the module that holds them"
        yield f"adapter.modules_to_save: {model.path} has no weights of {', '.join(unknown)}", hint


def _part_faults(model: ModelFacts, adapter: FullAdapter) -> Iterator[tuple[str, str]]:
    """Yield layers and patterns of a part to train that a model does not have."""
    if adapter.last_layers is not None and adapter.last_layers > model.num_layers:
        problem = f"adapter.last_layers: {adapter.last_layers} exceeds the {model.num_layers} layers of {model.path}"
        yield problem, f"set it to {model.num_layers} or less"
    names = [name for name in model.tensors if not model.is_tower(name)]
    for pattern in adapter.unfrozen_parameters or ():
        if not any(re.search(pattern, name) for name in names):
            endings = sorted({".".join(name.split(".")[-2:]) for name in names})
            hint = f"names end in: {', '.join(endings)}"
            if model.has_tied_head and "head" in pattern:
                hint = "a head tied to the embedding has no weights of its own; name the embedding"
            yield f"adapter.unfrozen_parameters: {model.path} has no parameter that matches {pattern!r}", hint


def expert_faults(model: ModelFacts, adapter: LoraAdapter) -> Iterator[tuple[str, str]]:
    """Yield what PEFT refuses to put on fused experts and routers.

    That is a part of a fused matrix without the others, dropout, and DoRA.
    """
    former = model_types().former_linears.get(model.model_type) if model.num_experts else None
    if former is None:
        return
    targets = set(map(last_part, adapter.target_modules)) if isinstance(adapter.target_modules, list) else set()
    for fused in sorted(set(former.values())):
        parts = [old for old, new in former.items() if new == fused]
        missing = ", ".join(part for part in parts if part not in targets)
        named = ", ".join(part for part in parts if part in targets)
        if missing and named:
            problem = f"adapter.target_modules: {named} without {missing}; the experts of {model.path} hold them "
            yield f"{problem}in one matrix, {fused}", f"add {missing}, or remove {named}"
    if not adapted_experts(model.tensors, former, adapter.target_modules):
        return
    unfused = sorted({last_part(name) for name in model.linears} - set(former))
    hint = f"unset it, or limit adapter.target_modules to {', '.join(unfused)}"
    for setting, is_set in (("dropout", adapter.dropout > 0), ("use_dora", adapter.use_dora)):
        if is_set:
            problem = f"adapter.{setting}: PEFT does not support it on the fused expert matrices and routers of "
            yield f"{problem}{model.path}", hint


def _merge_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse an adapter in whose model embedding and head have come apart: as one model they would be one again."""
    origin = model.origin
    if origin is None or origin.adapter is None or not origin.is_merged_for(recipe.adapter):
        return
    if unties_head(model, origin.adapter):
        problem = f"adapter.type: the adapter of {origin.name} trained an embedding that the head of "
        problem += f"{origin.base.path} shares, so merging it would change the head"
        yield problem, "use adapter.type=lora, which trains that adapter further"


def _parallel_faults(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Iterator[tuple[str, str | None]]:
    """Yield what contradicts itself or the machine; what a library cannot do is refused by layout."""
    requested = recipe.parallel
    values = dict(requested)
    num, this = hardware.num_accelerators, f"this is {hardware.device.name}"
    if (requested.num_processes or 1) > max(1, num):
        those = f"available: {num}" if num else this
        if not num and hardware.num_nodes > 1:
            those = f"there are {hardware.num_nodes} nodes"
        problem = f"parallel.num_processes: {requested.num_processes} processes need as many accelerators, evenly "
        yield f"{problem}over the nodes; {those}", "each process needs an accelerator of its own"
    several = [name for name in ("dp_shard_size", "tp_size", "cp_size", "sp_size") if (values[name] or 1) > 1]
    if requested.strategy in ("ddp", "fsdp2", "zero1"):
        several.insert(0, "strategy")
    if several and num < 2:
        hint = "unset it" if hardware.accelerators else "set parallel.num_processes to share the CPU"
        yield f"parallel.{several[0]}: {values[several[0]]} needs several accelerators; {this}", hint
    if requested.strategy not in ("auto", "single") and not hardware.accelerators:
        yield f"parallel.strategy: {requested.strategy} needs accelerators; {this}", "unset it"
    for name in ("tp_size", "sp_size"):
        size = values[name] or 1
        if model.num_heads % size or (name == "tp_size" and model.num_kv_heads % size):
            heads = f"{model.num_heads} heads and {model.num_kv_heads} key-value heads"
            yield f"parallel.{name}: {size} does not divide the {heads} of {model.path}", None
    if (requested.cp_size or 1) > 1 and (requested.sp_size or 1) > 1:
        yield "parallel.cp_size and parallel.sp_size: Accelerate accepts only one of them", "unset one"
    offloads = requested.offload_param_device, requested.offload_optimizer_device
    if "nvme" in offloads and requested.nvme_path is None:
        name = "offload_param_device" if offloads[0] == "nvme" else "offload_optimizer_device"
        yield f"parallel.{name}: nvme needs parallel.nvme_path", "set it to a folder on a fast local disk"


class Refusal(NamedTuple):
    """Reason that a combination does not work, and the nearest that does."""

    why: str
    hint: str


def refusal(setting: Setting, layout: Layout) -> Refusal | None:
    """Return why the libraries cannot run this recipe in a layout correctly; None if they can."""
    return next((Refusal(why, hint) for why, hint in _refusals(setting, layout) if why is not None), None)


def _refusals(setting: Setting, layout: Layout) -> Iterator[tuple[str | None, str]]:
    """Yield obstacles of this recipe in a layout with their remedies; None where there is no such obstacle."""
    recipe, optim = setting.recipe, setting.recipe.train.optim
    is_zero, is_fsdp2 = layout.strategy.startswith("zero"), layout.strategy == "fsdp2"
    is_full, trains_on = isinstance(recipe.adapter, FullAdapter), recipe.method.spec.trains_on
    if isinstance(recipe.adapter, FullAdapter) and recipe.adapter.is_partial:
        if layout.strategy not in ("single", "ddp"):
            yield "training a part of a model is untested there", "use ddp, or train all parameters"
        if recipe.train.fp8:
            yield "training a part of a model is untested in float8", "unset train.fp8"
    if has_groups(recipe) and (layout.strategy == "zero3" or layout.offloads or layout.tp_size > 1):
        yield "several learning rates are untested there", "use ddp, fsdp2, zero1 or zero2 without offloading"
    if is_zero and setting.hardware.deepspeed is False:
        yield "DeepSpeed is not installed", "pip install 'tunekit[deepspeed]'"
    if isinstance(recipe.adapter, QloraAdapter) and (
        layout.strategy in ("fsdp2", "zero3") or layout.offload_param_device != "none"
    ):
        why = "ZeRO-3 does not shard bitsandbytes 4-bit weights"
        if is_fsdp2:
            why = "Accelerate shards 4-bit weights only if they are stored in a floating-point type "
            why += "(bnb_4bit_quant_storage), and tunekit stores them in bytes"
        yield why, "use ddp, or adapter.type=lora"
    elif isinstance(recipe.adapter, QloraAdapter) and is_zero and setting.model.expert_stacks:
        yield "DeepSpeed broadcasts every weight, and experts in 4 bits are not sent", "use ddp, or adapter.type=lora"
    if (
        layout.strategy == "zero3"
        and backends.lies_in_one_row(recipe.data)
        and backends.runs_by_document(setting.model)
    ):
        why = (
            f"ZeRO-3 gathers weights each time that a layer runs: in {setting.model.model_type}, once for each document"
        )
        yield f"{why}, of which processes have different numbers", "use fsdp2, or set data.packing=false"
    if is_fsdp2 and optim not in SHARDED_OPTIMS:
        yield f"{optim} does not support sharded tensors", f"use train.optim={CLOSEST_OPTIM}"
    if is_zero and layout.offload_optimizer_device != "none" and optim not in CPU_OPTIMS:
        yield f"DeepSpeed cannot run {optim} on the CPU", f"use train.optim={CLOSEST_OPTIM}"
    if is_fsdp2 and recipe.method.reference_use == "beforehand" and not is_full:
        why = "TRL precomputes log-probabilities before FSDP2 has loaded the weights in all processes"
        yield why, "unset method.precompute_ref_log_probs: the reference is the model without its adapter"
    if layout.strategy not in ("single", "ddp") and recipe.method.trainer_args.get("sync_ref_model"):
        why = "a checkpoint of sharded weights does not contain the synced reference model"
        yield why, "use ddp, or unset method.trainer_args.sync_ref_model"
    if setting.by_vllm:
        yield backends.why_no_vllm_in(recipe, layout), "unset method.generation.use_vllm"
    if setting.model.origin is not None and layout.strategy in ("fsdp2", "zero3"):
        yield from _origin_refusals(recipe, setting.model.origin, layout)
    if recipe.model.kernels != "auto":
        yield backends.why_no_kernels(recipe.model.kernels, layout), "unset model.kernels, or use torch"
    if recipe.train.torch_compile is True:
        yield backends.why_not_compiled_in(layout), "unset train.torch_compile"
    if recipe.train.fp8:
        yield backends.why_no_float8_in(layout), "unset train.fp8, or use fsdp2"
    if layout.tp_size > 1 and not is_full:
        yield "PEFT adapters do not support tensor parallel layers", "use fsdp2 without tp_size"
    if layout.tp_size > 1 and trains_on != "tokens":
        why = f"tensor parallelism in TRL covers only the trained model, not all that {recipe.method.type} computes"
        yield why, "use fsdp2 without tp_size"
    if layout.devices_per_sequence > layout.tp_size and trains_on != "tokens":
        yield f"{recipe.method.type} does not support split sequences", "use fsdp2 without cp_size and sp_size"
    if setting.device.kind == "cpu" and is_fsdp2:
        # What FSDP2 supports on accelerators only (torch 2.13; a test runs each).
        if layout.offload_param_device == "cpu":
            why = "FSDP2 offloads to pinned memory, which needs an accelerator"
            yield why, "unset parallel.offload_param_device: on a CPU everything is in host memory"
        if layout.cp_size > 1:
            why = "torch cannot split attention on a CPU (no rule for scaled_dot_product_flash_attention_for_cpu)"
            yield why, "use parallel.sp_size, which splits sequences by heads, or fsdp2 without cp_size"
    if layout.cp_size > 1:
        yield from _ring_refusals(setting)
    if layout.sp_size > 1:
        yield from _ulysses_refusals(setting, layout)


def _origin_refusals(recipe: Recipe, origin: Origin, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield reasons that training cannot start from this origin where weights are sharded."""
    is_merged = origin.is_merged_for(recipe.adapter)
    if layout.tp_size > 1 and is_merged:
        why = f"the adapter of {origin.name} cannot be merged into layers that are split while loading"
        yield why, "use fsdp2 without tp_size"
    reference = reference_of(recipe.method, recipe.adapter, origin)
    if is_rewarded(recipe.method) and reference == "second model" and is_merged:
        why = f"TRL loads and shards the reference of {recipe.method.type} itself, without merging the adapter"
        yield why, "use adapter.type=lora, method.beta=0, or ddp"
    if layout.strategy == "fsdp2" and reference == "beforehand" and is_merged:
        why = "TRL loads the model itself to precompute log-probabilities, without merging the adapter"
        yield why, "unset method.precompute_ref_log_probs"
    whole = origin.adapter is not None and origin.adapter.modules_to_save
    if layout.strategy == "zero3" and whole:
        why = f"ZeRO-3 shards {', '.join(whole)}, which {origin.name} trained in full, before its adapter can be loaded"
        yield why, "use fsdp2, ddp or zero2"


def _ulysses_refusals(setting: Setting, layout: Layout) -> Iterator[tuple[str, str]]:
    """Ulysses gives each device whole heads, and no mask.

    The devices that divide sequences show each other as many micro-batches as they are, and compute them one after
    another, so that the rows of a step are those of other layouts where it takes all of them.
    """
    recipe, window = setting.recipe, setting.model.sliding_window
    num_rows = layout.num_processes * (recipe.train.micro_batch_size or 1)
    if recipe.train.global_batch_size % num_rows:
        why = f"each of the {layout.num_processes} devices contributes its own micro-batch to a step"
        yield why, f"set train.global_batch_size to a multiple of {num_rows}"
    if setting.attention == "eager":
        yield "Ulysses does not support eager attention", "use sdpa"
    if setting.attention.startswith("flash_attention"):
        return
    if backends.lies_in_one_row(recipe.data):
        why = f"{setting.attention} does not separate packed documents when they are split"
        yield why, "use flash_attention_2, or unset packing"
    if window is not None and recipe.data.max_length > window:
        yield "Ulysses drops the mask that a sliding window needs", "use flash_attention_2"


def _ring_refusals(setting: Setting) -> Iterator[tuple[str, str]]:
    """Context parallel passes keys and values on and keeps no mask but the causal one."""
    recipe, window = setting.recipe, setting.model.sliding_window
    if backends.lies_in_one_row(recipe.data):
        key = "data.packing" if recipe.data.packing else "data.padding_free"
        yield "context parallelism drops the mask that separates packed documents", f"set {key}=false"
    key = recipe.model.attn_implementation
    attention = backends.of_rows(setting.attention, lie_apart=False) if key == "auto" else setting.attention
    if attention != "sdpa":
        yield f"context parallelism supports sdpa, not {attention}", "set model.attn_implementation=sdpa"
    if window is not None and recipe.data.max_length > window:
        why = f"context parallelism drops the mask of the sliding window of {window:,} tokens"
        yield why, "use another model, or a shorter data.max_length"
