"""Checks of a recipe against a device and a model, for any layout and for one. Each names the place and the remedy."""

import re
from collections.abc import Iterator
from typing import NamedTuple, get_args

from tunekit.errors import PlanError
from tunekit.estimates.facts import (
    DataFacts,
    Device,
    Hardware,
    ModelFacts,
    Origin,
    continued_adapter,
    is_embedding,
)
from tunekit.estimates.layout import Layout
from tunekit.estimates.learning_rates import has_groups, unmatched
from tunekit.estimates.memory.states import Dtype, has_low_rank, reference_of, token_rows, trained_tensors, unties_head
from tunekit.estimates.models.model_config import model_types
from tunekit.estimates.models.rope import BY_LENGTH, factor_for, kind_of
from tunekit.estimates.models.rope import faults as rope_faults
from tunekit.estimates.models.towers import Part
from tunekit.estimates.passes import Passes
from tunekit.planner.decisions import automodel, backends
from tunekit.planner.decisions.adapters import adapter_faults, start_refusal
from tunekit.planner.decisions.candidates import Setting, divisors
from tunekit.planner.decisions.published import published_faults, published_refusals
from tunekit.planner.decisions.vllm import why_no_vllm, why_no_vllm_in
from tunekit.planner.plan import VARLEN
from tunekit.recipe.methods import generates, has_teacher, is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import (
    FullAdapter,
    LoraAdapter,
    PeftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    num_virtual_tokens,
)
from tunekit.recipe.sections.rewards import ModelReward
from tunekit.recipe.sections.section import (
    BLOCK_OPTIMS,
    LOW_RANK_OPTIMS,
    OUR_OPTIMS,
    STOCHASTIC_OPTIMS,
    LrSchedulerType,
    Optim,
)

LR_SCHEDULER_KWARGS: dict[LrSchedulerType, tuple[tuple[str, ...], str]] = {
    "cosine_with_min_lr": (("min_lr_rate", "min_lr"), "0.1"),
    "cosine_warmup_with_min_lr": (("min_lr_rate", "min_lr"), "0.1"),
    "warmup_stable_decay": (("num_decay_steps",), "2"),
}
"""Argument that a schedule of transformers has no default for: its possible names, and a value to show."""

SHARDED_OPTIMS: frozenset[Optim] = LOW_RANK_OPTIMS | frozenset[Optim](
    {
        "adamw_torch",
        "adamw_torch_fused",
        "sgd",
        "adagrad",
        "rmsprop",
        "tunekit_adamw",
        *BLOCK_OPTIMS,
        "muon",
        "adam_mini",
    }
)
"""Optimizers that take a step on tensors divided by FSDP2 (DTensor), as they do on whole ones. Those of bitsandbytes
and transformers' Adafactor raise (torch 2.13, bitsandbytes 0.50, transformers 5.23; a test runs each). Blocks of
`tunekit_adamw_8bit` and `tunekit_adamw_4bit` are those of a part."""

CPU_OPTIMS: frozenset[Optim] = frozenset({"adamw_torch", "adamw_torch_fused"})
"""Optimizers that DeepSpeed runs on the CPU, where states are offloaded to: torch's own. The fused one takes as
long as DeepSpeed's, which would be compiled when first used; the other one takes ten times as long."""

EXPERT_OPTIMS: frozenset[Optim] = frozenset({"adamw_torch", "adamw_torch_fused", "sgd"})
"""Optimizers that are known to update experts which are divided among devices, with a group for each mesh."""

CLOSEST_OPTIM: Optim = "adamw_torch_fused"
"""Replacement of an optimizer that a layout does not run."""

CLOSEST_OF_OURS: Optim = "tunekit_adamw"
"""The same for weights in bfloat16."""


def choose_dtype(recipe: Recipe, device: Device) -> tuple[Dtype, str]:
    """Type of the products, and why.

    Raises:
        PlanError: The device does not compute in the type that is asked for.
    """
    requested = recipe.model.dtype
    if recipe.train.pure_bf16:
        if device.kind != "cpu" and not device.native_bfloat16:
            raise PlanError(
                f"train.pure_bf16: {device.name} has no native bfloat16", hint="unset it, or set adapter.type=lora"
            )
        return "bfloat16", "set by train.pure_bf16"
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
    device, train = hardware.device, recipe.train
    yield from backends.kernels_faults(recipe, hardware, model)
    yield from backends.compile_faults(recipe, hardware, model, attention)
    yield from _position_faults(recipe, model)
    yield from _changed_faults(recipe)
    yield from _token_faults(recipe, model)
    if reason := model_types().refused.get(model.model_type):
        yield f"model.path: {model.model_type} models are not supported: {reason}", None
    yield from published_faults(recipe, hardware, model)
    yield from adapter_faults(recipe.adapter, model)
    yield from _merge_faults(recipe, model)
    for pattern in unmatched(recipe, trained_tensors(model, recipe.adapter)) if train.learning_rates else ():
        problem = f"train.learning_rates: no trained parameter of {model.path} matches {pattern!r}"
        yield problem, "remove it, or train the parameters that it matches"
    yield from _bitsandbytes_faults(train.optimizer, device)
    if train.optimizer == "schedule_free_adamw" and hardware.schedulefree is False:
        yield "train.optim: schedulefree is not installed", "pip install 'tunekit[optim]'"
    yield from _low_rank_faults(recipe, model)
    batch, size = train.global_batch_size, train.micro_batch_size
    if size is not None and batch % size:
        problem = f"train.micro_batch_size: {size} does not divide train.global_batch_size {batch}"
        yield problem, f"use one of {', '.join(map(str, divisors(batch)))}"
    names, example = LR_SCHEDULER_KWARGS.get(train.lr_scheduler_type, ((), ""))
    if names and not set(names) & set(recipe.method.trainer_args.get("lr_scheduler_kwargs") or {}):
        hint = f"set in method.trainer_args: `lr_scheduler_kwargs: {{{names[0]}: {example}}}`"
        yield f"train.lr_scheduler_type: {train.lr_scheduler_type} needs {' or '.join(names)}", hint
    yield from _parallel_faults(recipe, hardware, model)
    yield from automodel.faults(recipe, hardware, model)
    reads_own_tokens = recipe.method.spec.teacher_reads_own_tokens
    if teacher is not None and teacher.judges:
        yield f"method.teacher: {teacher.path} scores texts and generates none", "use a generative model"
    if teacher is not None and teacher.vocab_size != model.vocab_size and not reads_own_tokens:
        problem = f"method.teacher: {teacher.path} has a vocabulary of {teacher.vocab_size:,}, but {model.path} of "
        problem += f"{model.vocab_size:,}; probabilities are compared token by token"
        yield problem, "use a larger model of the same family as the teacher, or method gold"
    if generates(recipe.method) and recipe.method.generation.use_vllm is True:
        obstacle = why_no_vllm(recipe, hardware, model)
        if obstacle is not None:
            yield f"method.generation.use_vllm: {obstacle[0]}", obstacle[1]
    yield from backends.float8_faults(recipe, hardware, model, dtype)
    yield from backends.qat_faults(recipe, hardware, model)


def _bitsandbytes_faults(optim: Optim, device: Device) -> Iterator[tuple[str, str]]:
    """Refuse optimizers of bitsandbytes that a device has no memory or no kernel for (bitsandbytes 0.50)."""
    is_8bit = optim.endswith("8bit") and optim not in OUR_OPTIMS
    twins = {"paged_adamw_32bit": "adamw_torch", "paged_ademamix_32bit": "ademamix"}
    twin = twins.get(optim, optim.removeprefix("paged_"))
    if optim.startswith("paged_") and device.kind == "cpu":
        problem = f"train.optim: {optim} pages its states between an accelerator and host memory; "
        yield f"{problem}{device.name} has only host memory", f"use {twin}"
    elif optim.startswith("paged_") and device.kind == "mps":
        hint = f"use {CLOSEST_OPTIM if is_8bit else twin}"
        yield f"train.optim: {optim} pages its states by CUDA, which {device.name} does not have", hint
    elif is_8bit and device.kind == "mps":
        problem = f"train.optim: {optim}: bitsandbytes has no 8-bit optimizers for {device.name}"
        yield problem, f"use {CLOSEST_OPTIM}"


def _low_rank_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse states of a low rank where no matrix has them, and patterns that match none."""
    low_rank = recipe.train.low_rank
    if low_rank is None:
        return
    trained = trained_tensors(model, recipe.adapter)
    for at, pattern in enumerate(low_rank.target_modules or ()):
        matches = [shape for name, shape in trained.items() if re.search(pattern, name) and len(shape) == 2]
        if not matches:
            problem = f"train.optim_target_modules[{at}]: no trained matrix of {model.path} matches {pattern!r}"
            yield problem, "remove it, or train the parameters that it matches"
    if not any(has_low_rank(name, shape, low_rank) for name, shape in trained.items()):
        most = max((min(shape) for shape in trained.values() if len(shape) == 2), default=0)
        other = f"use train.optim={CLOSEST_OPTIM}"
        if most < 2:
            yield f"train.optim: {low_rank.optim} projects matrices, but none is trained", other
        else:
            problem = f"train.optim_args.rank: {low_rank.rank} is at least the smaller side of all matrices"
            yield problem, f"set it below {most}, or {other}"


def _position_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse a scaling that the model cannot have, and more tokens than it has positions."""
    section, rope = model.loaded_for(recipe.model).rope_scaling, model.rotary
    if section is not None and rope is None:
        # Those of other layers (Beam's, with sliding windows) do not depend on the length of a row.
        yield f"model.rope_scaling: {model.path} has no rotary embeddings in its full-attention layers", "unset it"
        return
    if section is not None and rope is not None:
        for name, what, hint in rope_faults(rope, section, model.model_type):
            yield f"model.rope_scaling.{name}: {what}", hint
        for name, factors in (("short_factor", section.short_factor), ("long_factor", section.long_factor)):
            num = int(model.head_dim * float(rope.parameters.get("partial_rotary_factor") or 1)) // 2
            if factors is not None and len(factors) != num and not model.latent_widths:
                problem = f"model.rope_scaling.{name}: {len(factors)} numbers, but {model.path} has {num} frequencies"
                yield problem, "set one per frequency"
    limit = model.positions_for(recipe.model)
    num, virtual = recipe.num_positions, num_virtual_tokens(recipe.adapter)
    if limit is not None and num > limit:
        factor = None if rope is None else factor_for(rope, section, num, model.model_type)
        longer = "" if factor is None else f", or set model.rope_scaling.factor={factor}"
        length = f"{recipe.data.max_length}{f' behind {virtual} virtual tokens' if virtual else ''}"
        problem = f"data.max_length: {length} exceeds the {limit} positions of {model.path}"
        yield problem, f"set it to {limit - virtual} or less{longer}"


CHANGES = ("image_processor", "video_processor", "rope_scaling", "add_tokens", "add_special_tokens", "special_tokens")
"""Fields of a model section that change the model that is trained, or what it reads."""


def _changed_faults(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Refuse changes of models that are not trained, which are used as they were published."""
    sections = {"method.teacher": recipe.method.teacher} if has_teacher(recipe.method) else {}
    if is_rewarded(recipe.method):
        rewards = enumerate(recipe.method.rewards)
        sections |= {f"method.rewards[{at}].model": one.model for at, one in rewards if isinstance(one, ModelReward)}
    for key, section in sections.items():
        for name in CHANGES:
            if name in section.model_fields_set and dict(section)[name]:
                problem = f"{key}.{name}: only the trained model can be changed"
                yield problem, "save the changed model and set its folder"


def _token_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse tokens that are there already, and models that get none."""
    if model.known_tokens:
        name = "add_tokens" if model.known_tokens[0] in (recipe.model.add_tokens or ()) else "add_special_tokens"
        yield f"model.{name}: {model.known_tokens[0]} is a token of {model.path} already", "remove it"
    origin = model.origin
    if origin is not None and origin.adapter is not None and recipe.model.all_tokens:
        problem = f"model: {recipe.model.all_tokens[0]} cannot be added to {origin.name}, which is an adapter"
        yield problem, "add it in the run that trained the adapter, or start from its merged export"
    if model.new_tokens and any("per_layer" in name for name in model.tensors if is_embedding(name)):
        yield (
            f"model.add_tokens: {model.path} has one embedding per layer, which cannot be resized",
            "remove the tokens",
        )
    if token_rows(model, recipe.adapter) and any(f"{head}.bias" in model.tensors for head in model_types().heads):
        name = "model.add_tokens" if model.new_tokens else "adapter.trainable_token_indices"
        problem = f"{name}: the head of {model.path} has a bias, which PEFT ignores with trained token rows"
        yield problem, "set adapter.type=full"


def check_rows(recipe: Recipe, rows: DataFacts, attn_implementation: str, passes: Passes) -> None:
    """Check that a teacher can read rows, and that completions have prompts.

    Args:
        recipe: The recipe.
        rows: The rows.
        attn_implementation: Attention implementation by its transformers name.
        passes: What the method does in a step.

    Raises:
        PlanError: The teacher cannot read them as they are laid out, or completions are to follow rows without prompts.
    """
    teacher = passes.teacher
    if teacher is not None and backends.lies_in_one_row(recipe.data):
        why_not = backends.why_not_packed(teacher, attn_implementation)
        if why_not is not None:
            key = "data.packing" if recipe.data.packing else "data.padding_free"
            problem = f"{key}: unsupported by method.teacher {teacher.path}: {why_not}"
            raise PlanError(problem, hint=f"set {key}=false, or use another teacher")
        if rows.media:
            raise PlanError("data.packing: unsupported for rows with images with a teacher", hint="unset it")
    if passes.generation is None or not recipe.method.spec.masks_as_told:
        return
    if rows.media:
        raise PlanError("method.lmbda: completions of rows with images are unsupported", hint="set method.lmbda=0")
    if rows.format in ("text", "tokens"):
        problem = f"method.lmbda: completions need rows with prompts, but data.train holds {rows.format}"
        raise PlanError(problem, hint="set method.lmbda=0")


def check_media(
    recipe: Recipe,
    model: ModelFacts,
    rows: DataFacts,
    attn_implementation: str,
    teacher: ModelFacts | None = None,
) -> None:
    """Check that rows with media can be trained on as a recipe says.

    Args:
        recipe: The recipe.
        model: The model.
        rows: The rows.
        attn_implementation: Attention implementation by its transformers name.
        teacher: The model to learn from, for distillation.

    Raises:
        PlanError: They cannot, or the recipe says how to read media where there are none.
    """
    parts = [part for part in get_args(Part) if recipe.adapter.training_of(part) != "frozen"]
    if rows.has_audio and parts:
        problem = f"adapter.{parts[0]}: towers are only trained on images, but the rows have audio"
        raise PlanError(problem, hint="unset it")
    if not rows.has_pictures:
        if parts:
            raise PlanError(f"adapter.{parts[0]}: no effect, the rows have no images", hint="unset it")
        if recipe.model.image_processor is not None:
            raise PlanError("model.image_processor: no effect, the rows have no images", hint="unset it")
    if recipe.model.video_processor is not None and not rows.has_videos:
        raise PlanError("model.video_processor: no effect, the rows have no videos", hint="unset it")
    if not rows.media:
        return
    data, parallel = recipe.data, recipe.parallel
    nouns = "images" if rows.has_pictures else "audio"
    if not model.is_multimodal:
        problem = f"model.path: rows have {nouns}, but {model.path} is a text-only model"
        other = "vision-language model" if rows.has_pictures else "model that takes audio"
        raise PlanError(problem, hint=f"choose a {other}, or remove the {nouns} from the rows")
    if teacher is not None and not teacher.is_multimodal:
        problem = f"method.teacher: rows have images, but {teacher.path} is a text-only model"
        raise PlanError(problem, hint="choose a vision-language model of the same family as the teacher")
    untested = {"fp8": recipe.train.fp8, "qat": recipe.train.qat, "layerwise_lr_decay": recipe.train.layerwise_lr_decay}
    for name in [name for name, value in untested.items() if parts and value]:
        problem = f"train.{name}: unsupported where a vision tower or projector is trained"
        raise PlanError(problem, hint=f"unset it, or adapter.{parts[0]}")
    settings = {
        f"model.attn_implementation={VARLEN}": recipe.model.attn_implementation == VARLEN,
        "data.padding_free": data.padding_free is True,
        "data.streaming": data.streaming,
        "method.generation.use_vllm": generates(recipe.method) and recipe.method.generation.use_vllm is True,
        "method.max_resample_times": generates(recipe.method) and recipe.method.resamples,
        "method.replay_buffer_size": generates(recipe.method) and recipe.method.replays,
        "parallel.engine": parallel.engine != "accelerate",
        "parallel.tp_size": (parallel.tp_size or 1) > 1,
        "parallel.ep_size": (parallel.ep_size or 1) > 1,
        "parallel.cp_size": (parallel.cp_size or 1) > 1,
        "parallel.sp_size": (parallel.sp_size or 1) > 1,
    }
    for key, is_asked in settings.items():
        if is_asked:
            raise PlanError(f"{key}: unsupported for rows with {nouns}", hint="unset it")
    why_not = backends.why_media_not_packed(model, attn_implementation) if data.packing else None
    if why_not is not None:
        raise PlanError(f"data.packing: unsupported for rows with {nouns}: {why_not}", hint="unset it")


def check_retry(recipe: Recipe, micro_batch_size: int) -> None:
    """Check that the micro-batch of a plan can be halved where memory runs out, if that is asked for.

    Raises:
        PlanError: It cannot.
    """
    if not recipe.train.retry_out_of_memory:
        return
    if micro_batch_size == 1:
        raise PlanError(
            "train.retry_out_of_memory: the micro-batch that fits is 1, which cannot be halved", hint="unset it"
        )


def _merge_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Refuse an adapter in whose model embedding and head have come apart: as one model they would be one again."""
    origin = model.origin
    if origin is None or origin.adapter is None or not origin.is_merged_for(recipe.adapter):
        return
    adapter = origin.adapter
    if isinstance(adapter, PromptTuningAdapter):
        problem = f"adapter.type: the virtual tokens of {origin.name} are no part of weights to be merged into"
        yield problem, "use adapter.type=prompt_tuning, which continues training them"
    if isinstance(adapter, LoraAdapter) and adapter.lora_bias:
        without = [name for name in model.adapted(adapter).sizes if f"{name}.bias" not in model.tensors]
        if without:
            problem = (
                f"adapter.type: the adapter of {origin.name} has biases, and {without[0]} has none to merge them into"
            )
            yield problem, "use adapter.type=lora, which continues training that adapter"
    if unties_head(model, origin.adapter):
        problem = f"adapter.type: the adapter of {origin.name} trained an embedding that the head of "
        problem += f"{origin.base.path} shares, so merging it would change the head"
        yield problem, "use adapter.type=lora, which continues training that adapter"


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
        yield f"{problem}over the nodes; {those}", "each process needs its own accelerator"
    several = [
        name
        for name in ("dp_shard_size", "tp_size", "ep_size", "pp_size", "cp_size", "sp_size")
        if (values[name] or 1) > 1
    ]
    if requested.engine == "automodel":
        several.insert(0, "engine")
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
    if (size := requested.ep_size or 1) > 1:
        if not model.expert_shapes:
            yield f"parallel.ep_size: {model.path} has no layers with experts", "unset it"
        elif model.num_experts % size:
            yield f"parallel.ep_size: {size} does not divide the {model.num_experts} experts of {model.path}", None
        elif requested.engine == "accelerate" and (why := backends.why_not_divided(model)) is not None:
            yield f"parallel.ep_size: {why}", "unset it"
        together = [name for name in ("tp_size", "cp_size", "sp_size") if (values[name] or 1) > 1]
        if together:
            yield f"parallel.ep_size and parallel.{together[0]}: untested together", "unset one"
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


def _loss_refusals(setting: Setting, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield why the loss of a method cannot be computed in a layout."""
    why = backends.why_trl_head(setting.kernels_in(layout), layout)
    hint = "unset model.kernels" if setting.recipe.model.kernels in ("torch", "liger") else "unset method.loss_type"
    trl_head = None if why is None else (why, hint)
    refused = setting.recipe.method.why_no_loss(trl_head, divides_sequences=layout.sp_size > 1)
    if refused is not None:
        yield refused


def _refusals(setting: Setting, layout: Layout) -> Iterator[tuple[str | None, str]]:
    """Yield obstacles of this recipe in a layout with their remedies; None where there is no such obstacle."""
    recipe, optim = setting.recipe, setting.recipe.train.optimizer
    is_zero, is_fsdp2 = layout.strategy.startswith("zero"), layout.strategy == "fsdp2"
    is_full, is_single_pass = isinstance(recipe.adapter, FullAdapter), recipe.method.is_single_pass
    yield from start_refusal(
        recipe, layout, continues=continued_adapter(setting.model.origin, recipe.adapter) is not None
    )
    if isinstance(recipe.adapter, FullAdapter) and recipe.adapter.is_partial:
        if layout.strategy not in ("single", "ddp"):
            yield "training some of the parameters is untested with this layout", "use ddp, or train all parameters"
        if recipe.train.fp8:
            yield "training some of the parameters is untested in float8", "unset train.fp8"
    if has_groups(recipe) and (layout.strategy == "zero3" or layout.offloads or layout.is_divided_at_load):
        yield (
            "several learning rates are untested with this layout",
            "use ddp, fsdp2, zero1 or zero2 without offloading",
        )
    if is_zero and setting.hardware.deepspeed is False:
        yield "DeepSpeed is not installed", "pip install 'tunekit[deepspeed]'"
    if layout.engine == "accelerate":
        yield from _loss_refusals(setting, layout)
    yield from published_refusals(recipe, setting.model, layout)
    if isinstance(recipe.adapter, QloraAdapter):
        yield from _qlora_refusals(recipe.adapter, setting, layout)
    if setting.media and layout.strategy == "zero3":
        tower = "vision tower runs only where rows have images"
        if "audio" in setting.media:
            tower = "audio tower runs only where rows have audio"
        yield f"ZeRO-3 gathers weights each time a module runs, and the {tower}", "use fsdp2"
    repeated = backends.repeats(recipe.data, setting.model, setting.attention_in(layout))
    if repeated is not None and (layout.strategy == "zero3" or (is_fsdp2 and repeated == "the decoder")):
        name, key = "FSDP2" if is_fsdp2 else "ZeRO-3", "data.packing" if recipe.data.packing else "data.padding_free"
        why = f"{name} gathers weights each time a layer runs: in {setting.model.model_type}, once per document"
        other = "ddp" if repeated == "the decoder" else "fsdp2"
        yield f"{why}, and processes have different numbers of documents", f"use {other}, or set {key}=false"
    if is_fsdp2 and not is_full and setting.model.model_type in model_types().shares_layers:
        why = f"Accelerate loses adapters of the layer that {setting.model.model_type} reuses in several places"
        yield why, "use ddp"
    if recipe.train.averages and is_zero:
        of, other = f" of {optim}", f"train.optim={CLOSEST_OPTIM}"
        if recipe.train.ema_decay is not None:
            of, other = "", "unset train.ema_decay"
        why = f"DeepSpeed updates flat float32 copies of the weights, which cannot switch to the average{of}"
        yield why, f"use ddp, or {other}"
    elif optim == "schedule_free_adamw" and is_fsdp2:
        why = f"{optim} does not resume exactly from checkpoints of sharded weights"
        yield why, f"use ddp, or train.optim={CLOSEST_OPTIM}"
    if is_fsdp2 and optim not in SHARDED_OPTIMS:
        closest = CLOSEST_OF_OURS if recipe.train.pure_bf16 else CLOSEST_OPTIM
        yield f"{optim} does not support sharded tensors", f"use train.optim={closest}"
    yield from _bf16_refusals(recipe, layout)
    if optim == "muon":
        yield from _muon_refusals(layout)
    if optim in LOW_RANK_OPTIMS:
        yield from _low_rank_refusals(optim, layout)
    if optim == "adam_mini":
        yield from _mini_refusals(layout)
    if is_zero and layout.offload_optimizer_device != "none" and optim not in CPU_OPTIMS:
        yield f"DeepSpeed cannot run {optim} on the CPU", f"use train.optim={CLOSEST_OPTIM}"
    if is_fsdp2 and recipe.method.reference_use == "beforehand" and not is_full:
        why = "TRL precomputes log-probabilities before FSDP2 has loaded the weights in all processes"
        yield why, "unset method.precompute_ref_log_probs: the reference is the model without its adapter"
    if layout.strategy not in ("single", "ddp") and recipe.method.trainer_args.get("sync_ref_model"):
        why = "a checkpoint of sharded weights does not contain the synced reference model"
        yield why, "use ddp, or unset method.trainer_args.sync_ref_model"
    if setting.by_vllm:
        yield why_no_vllm_in(recipe, layout), "unset method.generation.use_vllm"
    if setting.model.origin is not None and layout.strategy in ("fsdp2", "zero3"):
        yield from _origin_refusals(recipe, setting.model.origin, layout)
    if recipe.model.kernels != "auto":
        yield backends.why_no_kernels(recipe.model.kernels, layout), "unset model.kernels, or use torch"
    if recipe.train.torch_compile is True:
        yield backends.why_not_compiled_in(layout), "unset train.torch_compile"
    if recipe.train.fp8:
        yield backends.why_no_float8_in(layout), "unset train.fp8, or use fsdp2"
    if recipe.train.qat is not None:
        yield backends.why_no_qat_in(layout), "unset train.qat, or use fsdp2"
    if recipe.train.activation_offloading is True:
        yield backends.why_not_offloaded(recipe, setting.device, layout), "unset train.activation_offloading"
    if recipe.train.tiled_mlp is True:
        yield backends.why_not_tiled(recipe, setting.model, layout), "unset train.tiled_mlp"
    if layout.engine == "automodel":
        yield from automodel.refusals(setting, layout)
    if layout.is_divided_at_load:
        what, without = _divided_at_load(layout)
        if not is_full and layout.tp_size > 1:
            yield f"PEFT adapters do not support {what}", without
        if not is_single_pass:
            why = (
                f"transformers splits only the trained model into {what}, not the other computations of "
                f"{recipe.method.type}"
            )
            yield why, without
    if layout.ep_size > 1 and layout.engine == "accelerate":
        yield from _expert_refusals(recipe, setting.model)
    if layout.devices_per_sequence > layout.tp_size and not is_single_pass:
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
    yield from _rope_refusals(setting, layout)
    yield from _row_refusals(setting, layout)
    if layout.sp_size > 1:
        yield from _ulysses_refusals(setting, layout)


def _qlora_refusals(adapter: QloraAdapter, setting: Setting, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield layouts that do not divide or send quantized weights."""
    model, other = setting.model, "use ddp, or adapter.type=lora"
    if model.published_as is None and model.is_packed_for(adapter):
        if layout.strategy not in ("single", "ddp"):
            yield "int8 weights cannot be sharded or broadcast", "use ddp, adapter.quant_type=nf4, or adapter.type=lora"
        return
    adapted = model.adapted(adapter).kinds
    if layout.strategy == "fsdp2" and setting.hardware.shards_4bit is False:
        yield "FSDP2 of torch 2.11 does not shard 4-bit weights", "install torch 2.12 or newer, or use ddp"
    if layout.strategy == "zero3":
        yield "ZeRO-3 does not shard bitsandbytes 4-bit weights", "use fsdp2, ddp, or adapter.type=lora"
    elif layout.strategy.startswith("zero") and model.expert_stacks:
        yield "DeepSpeed broadcasts every weight, which fails for 4-bit experts", other
    elif layout.strategy == "fsdp2" and model.expert_stacks and any(".experts" in one for one in adapted):
        yield "PEFT adapts only unsharded 4-bit experts", "use ddp, or exclude experts from adapter.target_modules"
    elif layout.strategy == "fsdp2" and adapter.use_dora:
        yield "PEFT needs unsharded 4-bit weights for DoRA", "use ddp, or unset adapter.use_dora"


def _rope_refusals(setting: Setting, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield why a layout cannot have the rotary embeddings of a model, or TRL not the ones that a recipe changes."""
    recipe, rope = setting.recipe, setting.model.rotary
    section = setting.model.loaded_for(recipe.model).rope_scaling
    kind = "default" if rope is None else rope.kind if section is None else kind_of(rope, section)
    if kind in BY_LENGTH and layout.cp_size * layout.sp_size > 1:
        why = f"{kind} rotary embeddings depend on the row length, but each device has only part of a row"
        yield why, "use yarn, or a layout without cp_size and sp_size"
    changed = "model.rope_scaling" if section is not None else "the tokens that the recipe adds"
    if section is None and not setting.model.new_tokens:
        return
    reference = reference_of(recipe.method, recipe.adapter, setting.model.origin)
    by_trl = is_rewarded(recipe.method) and recipe.method.trl_loads_reference
    if isinstance(recipe.adapter, FullAdapter) and reference == "second model" and by_trl:
        why = f"TRL loads the reference of {recipe.method.type} without {changed}"
        yield why, "use adapter.type=lora, or method.beta=0"
    if isinstance(recipe.adapter, FullAdapter) and reference == "beforehand":
        why = f"TRL loads the model to precompute log-probabilities without {changed}"
        yield why, "unset method.precompute_ref_log_probs"


def _divided_at_load(layout: Layout) -> tuple[str, str]:
    """Return what transformers divides a model into as it loads it, and the layout without it."""
    if layout.tp_size > 1:
        return "tensor parallel layers", "use fsdp2 without tp_size"
    return "expert parallel layers", "use fsdp2 without ep_size"


def _expert_refusals(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield what is not known to work where experts are divided: parameters lie on two meshes."""
    if (why := backends.why_not_divided(model)) is not None:
        yield why, "unset parallel.ep_size"
    if (optim := recipe.train.optimizer) not in EXPERT_OPTIMS:
        yield f"{optim} is untested with expert parallel layers", f"use train.optim={CLOSEST_OPTIM}"
    if recipe.train.ema_decay is not None:
        yield "averages of expert parallel layers are untested", "unset train.ema_decay"
    if not isinstance(recipe.adapter, FullAdapter):
        yield from _adapter_refusals(recipe.adapter, model)


def _adapter_refusals(adapter: PeftAdapter, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield adapters that are not known to train where experts are divided."""
    without = "use fsdp2 without ep_size"
    if not isinstance(adapter, LoraAdapter) or isinstance(adapter, QloraAdapter):
        yield f"{adapter.type} with expert parallel layers is untested", without
        return
    for name in backends.beyond_plain_lora(adapter)[:1]:
        yield f"adapter.{name} with expert parallel layers is untested", f"unset it, or {without}"
    if any(".experts" in name for name in model.adapted(adapter).kinds):
        hint = f"adapt attention alone, such as adapter.target_modules=[q_proj, k_proj, v_proj, o_proj], or {without}"
        yield "PEFT adapts only whole experts", hint
    if continued_adapter(model.origin, adapter) is not None:
        yield "an adapter that is trained further with expert parallel layers is untested", without


def _row_refusals(setting: Setting, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield why rows of tokens cannot be made, or trained beside an adapter, in a layout."""
    model, recipe = setting.model, setting.recipe
    if model.num_new_rows and (layout.strategy == "zero3" or layout.is_divided_at_load):
        yield (
            "embedding and head cannot be resized for new tokens while they are sharded on loading",
            "use ddp or fsdp2",
        )
    if not token_rows(model, recipe.adapter):
        return
    if layout.strategy not in ("single", "ddp"):
        why = f"PEFT reads token rows from the unsharded embedding, which {layout.strategy} does not keep"
        yield why, "use ddp, or adapter.type=full"
    if reference_of(recipe.method, recipe.adapter, model.origin) == "copied adapter":
        why = "PEFT cannot hold two adapters that train rows of the same tokens"
        yield why, "use adapter.type=full, or start from the adapter's merged export"


def _bf16_refusals(recipe: Recipe, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield layouts that have no use for weights in bfloat16, or for stochastic rounding, or do not run them right."""
    optim, is_pure = recipe.train.optimizer, recipe.train.pure_bf16
    other = "unset train.pure_bf16" if is_pure else f"use train.optim={CLOSEST_OPTIM}"
    if layout.strategy.startswith("zero"):
        if is_pure:
            yield "DeepSpeed always updates float32 copies of the weights", f"use fsdp2 or ddp, or {other}"
        elif optim in STOCHASTIC_OPTIMS:
            why = f"DeepSpeed updates flat float32 copies of the weights, so {optim} has no effect"
            yield why, other
    if layout.is_divided_at_load and (is_pure or optim in STOCHASTIC_OPTIMS):
        what, without = _divided_at_load(layout)
        yield f"{'weights in bfloat16' if is_pure else optim} in {what}: unsupported", f"{without}, or {other}"
    if layout.offload_param_device != "none" and optim in STOCHASTIC_OPTIMS:
        why = f"{optim} is an accelerator kernel: with offloading it would run on the CPU, at minutes per step"
        yield why, f"unset parallel.offload_param_device, or {other}"


def _muon_refusals(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield layouts in which no process has whole matrices, or not where they can be multiplied in time."""
    other = f"use train.optim={CLOSEST_OPTIM}"
    if layout.strategy.startswith("zero"):
        yield "Muon updates whole matrices, but DeepSpeed shards flat copies of all weights", f"use fsdp2, or {other}"
    if layout.is_divided_at_load:
        what, without = _divided_at_load(layout)
        yield f"Muon on {what}: unsupported", f"{without}, or {other}"
    if layout.offload_param_device != "none":
        why = "Muon multiplies each matrix 15 times: with offloading it would run on the CPU, at minutes per step"
        yield why, f"unset parallel.offload_param_device, or {other}"


def _low_rank_refusals(optim: Optim, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield layouts in which no process gets the gradient of a whole matrix, or not where it is decomposed in time."""
    other = f"use train.optim={CLOSEST_OPTIM}"
    if layout.strategy.startswith("zero"):
        why = f"{optim} projects whole matrices, but DeepSpeed shards flat copies of all weights"
        yield why, f"use fsdp2, or {other}"
    if layout.is_divided_at_load:
        what, without = _divided_at_load(layout)
        yield f"{optim} on {what}: unsupported", f"{without}, or {other}"
    if layout.offload_param_device != "none":
        why = f"{optim} projects each matrix: with offloading it would run on the CPU, at minutes per step"
        yield why, f"unset parallel.offload_param_device, or {other}"


def _mini_refusals(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield layouts in which parameters are not divided by rows."""
    other = f"use train.optim={CLOSEST_OPTIM}"
    if layout.strategy.startswith("zero"):
        yield (
            "adam_mini needs rows and heads, but DeepSpeed shards flat copies of all weights",
            f"use fsdp2, or {other}",
        )
    if layout.is_divided_at_load:
        what, without = _divided_at_load(layout)
        yield f"adam_mini on {what}: unsupported", f"{without}, or {other}"


def _origin_refusals(recipe: Recipe, origin: Origin, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield reasons that training cannot start from this origin where weights are sharded."""
    is_merged = origin.is_merged_for(recipe.adapter)
    if layout.is_divided_at_load and is_merged:
        what, without = _divided_at_load(layout)
        yield f"the adapter of {origin.name} cannot be merged into {what}, which are divided while loading", without
    reference = reference_of(recipe.method, recipe.adapter, origin)
    by_trl = is_rewarded(recipe.method) and recipe.method.trl_loads_reference
    if by_trl and reference == "second model" and is_merged:
        why = f"TRL loads and shards the reference of {recipe.method.type} without merging the adapter"
        yield why, "use adapter.type=lora, method.beta=0, or ddp"
    if layout.strategy == "fsdp2" and reference == "beforehand" and is_merged:
        why = "TRL loads the model to precompute log-probabilities without merging the adapter"
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
        why = f"{setting.attention} does not separate packed documents in split sequences"
        yield why, "use flash_attention_2, or unset packing"
    if window is not None and recipe.data.max_length > window:
        yield "Ulysses drops the mask of sliding-window attention", "use flash_attention_2"


def _ring_refusals(setting: Setting) -> Iterator[tuple[str, str]]:
    """Context parallel passes keys and values on and keeps no mask but the causal one."""
    recipe, window = setting.recipe, setting.model.sliding_window
    if backends.lies_in_one_row(recipe.data):
        key = "data.packing" if recipe.data.packing else "data.padding_free"
        yield "context parallelism drops the mask that separates packed documents", f"set {key}=false"
    key = recipe.model.attn_implementation
    attention = (
        backends.of_rows(setting.attention, setting.model, lie_apart=False) if key == "auto" else setting.attention
    )
    if attention != "sdpa":
        yield f"context parallelism supports sdpa, not {attention}", "set model.attn_implementation=sdpa"
    if window is not None and recipe.data.max_length > window:
        why = f"context parallelism drops the mask of the sliding window of {window:,} tokens"
        yield why, "use another model, or a shorter data.max_length"
