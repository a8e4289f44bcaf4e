"""From a recipe and facts to a plan: one pure function, built of small decisions that each give their reason."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tunekit.errors import PlanError
from tunekit.planner.facts import DataFacts, Device, Hardware, ModelFacts
from tunekit.planner.isolation import WITHOUT_SDPA
from tunekit.planner.layout import Layout
from tunekit.planner.memory import RESERVE_SHARE, MemoryEstimate, estimate
from tunekit.planner.padding import check_isolation, needs_mask, padding_of
from tunekit.planner.plan import Plan, Reason, Schedule, count, gib
from tunekit.planner.records import RunRecord
from tunekit.planner.speed import Speed, speed_of, step_of
from tunekit.planner.states import Dtype, num_trainable_params
from tunekit.recipe.schema import (
    DEFAULT_LEARNING_RATE,
    DataSection,
    FullAdapter,
    LoraAdapter,
    LrSchedulerType,
    QloraAdapter,
    Recipe,
)

MEMORY_SHARE = {"cpu": 0.9, "cuda": 0.92}
"""Share of the free memory that a plan may use; the rest is for fragmentation and for other programs."""

ENOUGH_TOKENS = 2048
"""Tokens in a micro-batch from which a device is kept busy: more is not worth recomputing activations."""

MUCH_TRUNCATED = 0.05
"""Share of the rows from which on the plan warns that they lose their ends at `data.max_length`."""

RUNS_PER_RECIPE = 4
"""Evaluations and checkpoints in a run whose recipe does not say how often."""

WITHOUT_WEIGHTS = {
    "weights": "",
    "config": "; from its config.json, training needs the weights",
    "table": "; from tunekit's own table, training needs the files",
}
"""What a plan says of a model whose weights were not looked at, by where it is known from."""


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


def resolve(
    recipe: Recipe, hardware: Hardware, model: ModelFacts, data: DataFacts, records: Sequence[RunRecord] = ()
) -> Plan:
    """How to run `recipe` on `hardware`.

    Args:
        recipe: What is asked for.
        hardware: The machine.
        model: The model.
        data: The rows.
        records: Finished runs, from which the speed of this one is told.

    Raises:
        PlanError: The recipe asks for what this machine cannot do, or does not fit it.
    """
    device = hardware.device
    reasons = [_device_reason(hardware, device), _model_reason(model)]
    dtype, why = _dtype(recipe, device)
    full = isinstance(recipe.adapter, FullAdapter)
    autocast = dtype != "float32"
    kept = "float32 weights" if full else "4-bit base" if isinstance(recipe.adapter, QloraAdapter) else f"{dtype} base"
    reasons.append(Reason(topic="precision", choice=f"{dtype} products, {kept}", why=why))
    attention = _attention(recipe, hardware, device, model, dtype)
    reasons.append(attention)
    check_isolation(recipe.data, model, attention.choice)
    _check_lengths(recipe, model)
    trainable = num_trainable_params(model, recipe.adapter)
    reasons.append(_adapter_reason(recipe, model, trainable))
    _check_optim(recipe, device)
    _check_lr_scheduler(recipe)
    fit = _fit(recipe, device, model, dtype, attention.choice)
    reasons += fit.reasons(recipe.train.global_batch_size)
    padding = padding_of(recipe.data, model, attention.choice, fit.micro_batch_size)
    reasons.append(padding.reason())
    learning_rate = recipe.train.learning_rate or DEFAULT_LEARNING_RATE[recipe.adapter.type]
    given = "as in the recipe" if recipe.train.learning_rate else f"default for {recipe.adapter.type}"
    reasons.append(
        Reason(
            topic="optimizer",
            choice=f"{recipe.train.optim}, learning rate {learning_rate:g}",
            why=f"{given}; {recipe.train.lr_scheduler_type} schedule",
        )
    )
    schedule = _schedule(recipe, data)
    reasons.append(_data_reason(recipe, data))
    reasons += _mixture_reasons(recipe, data)
    reasons.append(_steps_reason(recipe, data, schedule))
    step = step_of(
        recipe,
        model,
        data,
        device,
        dtype=dtype,
        mask_length=padding.mask_length,
        padding_free=padding.is_free,
        micro_batch_size=fit.micro_batch_size,
        gradient_checkpointing=fit.gradient_checkpointing,
    )
    num_steps = None if schedule is None else schedule.num_steps
    speed = None if step is None else speed_of(step, device, hardware.figures, records, num_steps=num_steps)
    reasons.append(_speed_reason(recipe.data, data, speed))
    return Plan(
        recipe=recipe,
        layout=Layout(),
        num_nodes=1,
        device=device,
        dtype=dtype,
        autocast=autocast,
        attn_implementation=attention.choice,
        padding_free=padding.is_free,
        gradient_checkpointing=fit.gradient_checkpointing,
        micro_batch_size=fit.micro_batch_size,
        gradient_accumulation_steps=recipe.train.global_batch_size // fit.micro_batch_size,
        learning_rate=learning_rate,
        num_params=model.num_params,
        num_trainable_params=trainable,
        data=data,
        schedule=schedule,
        memory=fit.memory,
        memory_limit_bytes=fit.limit_bytes,
        speed=speed,
        reasons=tuple(reasons),
    )


def _device_reason(hardware: Hardware, device: Device) -> Reason:
    if device.kind == "cpu":
        why = f"no accelerator was found; one process uses all {hardware.num_cores} cores"
        return Reason(topic="device", choice=device.name, why=why)
    others = hardware.num_accelerators - 1
    why = f"{gib(device.memory_free_bytes)} of {gib(device.memory_total_bytes)} free; one process, no launcher"
    if others:
        why += f"; {others} more {'is' if others == 1 else 'are'} left idle: this version trains on one device"
    if hardware.note:
        why += f"; {hardware.note}"
    return Reason(topic="device", choice=device.name, why=why)


def _model_reason(model: ModelFacts) -> Reason:
    shape = f"{model.num_layers} layers of {model.hidden_size}, vocabulary of {model.vocab_size:,}"
    active = f", {count(model.num_active_params)} active" if model.num_experts else ""
    why = f"{model.architecture}, {count(model.num_params)} parameters{active}: {shape}"
    return Reason(topic="model", choice=model.path, why=why + WITHOUT_WEIGHTS[model.known_from])


def _dtype(recipe: Recipe, device: Device) -> tuple[Dtype, str]:
    """Type of the products, and why."""
    asked = recipe.model.dtype
    if asked == "float16" and device.kind == "cpu":
        raise PlanError(
            "model.dtype: float16 does not run on a CPU: torch would silently compute in float32",
            hint="use bfloat16 or float32",
        )
    if asked != "auto":
        return asked, "as in the recipe"
    if device.kind == "cpu":
        return "float32", "exact, and no slower for small models on a CPU"
    if device.native_bfloat16:
        return "bfloat16", f"{device.name} computes it natively"
    return "float32", f"{device.name} does not compute bfloat16 natively; float16 can be asked for"


def _attention(recipe: Recipe, hardware: Hardware, device: Device, model: ModelFacts, dtype: Dtype) -> Reason:
    """Attention implementation, and why."""
    asked = recipe.model.attn_implementation
    without_flash = "eager" if model.model_type in WITHOUT_SDPA else "sdpa"
    flash_runs = device.kind == "cuda" and (device.compute_capability or (0, 0)) >= (8, 0) and dtype != "float32"
    if asked.startswith("flash_attention") and not flash_runs:
        raise PlanError(
            f"model.attn_implementation: {asked} needs a CUDA device of compute capability 8.0 or newer and 16-bit "
            f"products; this is {device.name} with {dtype}",
            hint=f"use {without_flash}",
        )
    if asked.startswith("flash_attention") and hardware.flash_attn is False:
        raise PlanError(
            f"model.attn_implementation: {asked} is not installed", hint=f"install flash-attn, or use {without_flash}"
        )
    if asked == "sdpa" and without_flash != "sdpa":
        raise PlanError(
            f"model.attn_implementation: transformers has no sdpa for {model.model_type}", hint=f"use {without_flash}"
        )
    if asked != "auto":
        return Reason(topic="attention", choice=asked, why="as in the recipe")
    if flash_runs and hardware.flash_attn:
        return Reason(topic="attention", choice="flash_attention_2", why="flash-attn is installed and runs here")
    if without_flash != "sdpa":
        return Reason(topic="attention", choice=without_flash, why=f"transformers has no sdpa for {model.model_type}")
    return Reason(topic="attention", choice="sdpa", why="torch's fused attention; needs no further package")


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
    given = recipe.method.trainer_args.get("lr_scheduler_kwargs") or {}
    if needed and not set(needed.one_of) & set(given):
        raise PlanError(
            f"train.lr_scheduler_type: {name} needs {' or '.join(needed.one_of)}",
            hint=f"add to method.trainer_args: `lr_scheduler_kwargs: {{{needed.one_of[0]}: {needed.example}}}`",
        )


def _adapter_reason(recipe: Recipe, model: ModelFacts, trainable: int) -> Reason:
    adapter = recipe.adapter
    share = f"{count(trainable)} parameters trained, {trainable / model.num_params:.2%} of the model"
    if isinstance(adapter, FullAdapter):
        return Reason(topic="adapter", choice="full", why=f"{count(trainable)} parameters trained, all of them")
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
    targets = adapter.target_modules if adapter.target_modules == "all-linear" else ", ".join(adapter.target_modules)
    choice = f"{adapter.type}, rank {adapter.rank}, alpha {adapter.alpha:g}, on {targets}"
    return Reason(topic="adapter", choice=choice, why=share)


@dataclass(frozen=True)
class _Fit:
    """A way to cut the batch that fits the device."""

    micro_batch_size: int
    gradient_checkpointing: bool
    memory: MemoryEstimate
    limit_bytes: int
    why_batch: str
    why_checkpointing: str

    def reasons(self, batch: int) -> Iterator[Reason]:
        steps = batch // self.micro_batch_size
        yield Reason(
            topic="batch",
            choice=f"{batch} = {self.micro_batch_size} x {steps} accumulated x 1 device",
            why=self.why_batch,
        )
        choice = "on" if self.gradient_checkpointing else "off"
        yield Reason(topic="checkpointing", choice=choice, why=self.why_checkpointing)


def _fit(recipe: Recipe, device: Device, model: ModelFacts, dtype: Dtype, attention: str) -> _Fit:
    """The largest micro-batch that fits, without gradient checkpointing where that keeps the device busy."""
    batch, asked = recipe.train.global_batch_size, recipe.train.micro_batch_size
    if asked is not None and batch % asked:
        raise PlanError(
            f"train.micro_batch_size: {asked} does not divide train.global_batch_size {batch}",
            hint=f"use one of {', '.join(str(size) for size in _divisors(batch))}",
        )
    limit = int(MEMORY_SHARE[device.kind] * device.memory_free_bytes)
    sizes = [asked] if asked is not None else _divisors(batch)
    forced = recipe.train.gradient_checkpointing
    why_size = "as in the recipe" if asked is not None else "the most that fits"
    if asked is None and sizes[0] == batch:
        why_size = "the whole batch fits at once"
    enough = min(batch, math.ceil(ENOUGH_TOKENS / recipe.data.max_length))
    in_one_row = recipe.data.packing or recipe.data.padding_free is True
    widens_mask = asked is None and in_one_row and needs_mask(attention)
    if widens_mask:
        sizes = [size for size in sizes if size <= enough]
        enough = sizes[0]
    for checkpointing in [False, True] if forced == "auto" else [forced]:
        for size in sizes:
            if not checkpointing and forced == "auto" and size < enough and asked is None:
                break
            memory = _memory(recipe, device, model, dtype, attention, size, checkpointing)
            if memory.total_bytes <= limit:
                if size != batch and asked is None:
                    busy = widens_mask and size == sizes[0]
                    why_size = (
                        f"enough to keep it busy; more would only widen the mask of {attention}"
                        if busy
                        else f"the most that fits {gib(limit)}"
                    )
                why_checkpointing = (
                    "as in the recipe"
                    if forced != "auto"
                    else "activations would not fit without"
                    if checkpointing
                    else "activations fit without recomputing them"
                )
                return _Fit(size, checkpointing, memory, limit, why_size, why_checkpointing)
    least = _memory(recipe, device, model, dtype, attention, sizes[-1], forced != False)  # noqa: E712
    raise PlanError(
        f"this does not fit {device.name}: the least it needs is {gib(least.total_bytes)}, {gib(limit)} may be used "
        f"({gib(least.total_bytes - limit)} too much)",
        hint=_what_would_fit(recipe, device, model, dtype, attention, limit),
    )


def _memory(
    recipe: Recipe, device: Device, model: ModelFacts, dtype: Dtype, attention: str, size: int, checkpointing: bool
) -> MemoryEstimate:
    length = recipe.data.max_length
    mask_length = padding_of(recipe.data, model, attention, size).mask_length
    # Without the boundaries that a window draws, SDPA is told that attention is causal and needs no mask.
    slides = needs_mask(attention) and model.sliding_window is not None and length >= model.sliding_window
    return estimate(
        model,
        recipe.adapter,
        device=device.kind,
        dtype=dtype,
        optim=recipe.train.optim,
        num_tokens=size * length,
        mask_length=mask_length,
        sliding_mask_length=mask_length or (length if slides else None),
        gradient_checkpointing=checkpointing,
        accumulates=size < recipe.train.global_batch_size,
        layout=Layout(),
        reserve_share=RESERVE_SHARE[device.kind],
    )


def _what_would_fit(recipe: Recipe, device: Device, model: ModelFacts, dtype: Dtype, attention: str, limit: int) -> str:
    """The smallest single change with which one sequence fits, in words."""
    free = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"micro_batch_size": None, "gradient_checkpointing": True})}
    )
    for change, changed in _changes(free):
        memory = _memory(changed, device, model, dtype, attention, 1, True)
        if memory.total_bytes <= limit:
            return f"{change} would fit with {gib(memory.total_bytes)}"
    return "no single change of the recipe would fit; take a smaller model or a device with more memory"


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Single changes that save memory, the one that changes the least of the result first."""
    yield "leaving train.micro_batch_size and train.gradient_checkpointing to the plan", recipe
    optim = "adamw_8bit"
    yield (
        f"train.optim={optim}",
        recipe.model_copy(update={"train": recipe.train.model_copy(update={"optim": optim})}),
    )
    length = recipe.data.max_length // 2
    while length >= 256:
        data = recipe.data.model_copy(update={"max_length": length})
        yield f"data.max_length={length}", recipe.model_copy(update={"data": data})
        length //= 2
    if isinstance(recipe.adapter, FullAdapter):
        yield "adapter.type=lora", recipe.model_copy(update={"adapter": LoraAdapter()})
    if not isinstance(recipe.adapter, QloraAdapter):
        yield "adapter.type=qlora", recipe.model_copy(update={"adapter": QloraAdapter()})


def _schedule(recipe: Recipe, data: DataFacts) -> Schedule | None:
    """When things happen; not known before packing unless the recipe gives `max_steps`."""
    train = recipe.train
    unknown = recipe.data.packing and not data.tokenized and not recipe.data.streaming
    if unknown and train.max_steps is None:
        return None
    per_epoch = None if unknown or recipe.data.streaming else math.ceil(data.num_train / train.global_batch_size)
    steps = train.max_steps or math.ceil((train.num_epochs or 1) * (per_epoch or 0))
    warmup = train.warmup_steps if train.warmup_steps >= 1 else math.ceil(train.warmup_steps * steps)
    often = max(1, math.ceil(steps / RUNS_PER_RECIPE))
    return Schedule(
        num_steps=steps,
        steps_per_epoch=per_epoch,
        warmup_steps=int(warmup),
        eval_steps=None if data.num_eval is None else train.eval_steps or often,
        save_steps=train.save_steps or often,
    )


def _data_reason(recipe: Recipe, data: DataFacts) -> Reason:
    if recipe.data.streaming:
        why = f"read and tokenised while training; {data.num_train:,} were looked at"
        return Reason(topic="data", choice="a stream of rows", why=why)
    if not data.tokenized:
        why = f"cut to {recipe.data.max_length} tokens each when the run starts"
        return Reason(topic="data", choice=f"{data.num_train:,} rows", why=why)
    share = (data.num_trainable_tokens or 0) / max(1, data.num_train_tokens or 0)
    why = f"{data.num_train_tokens:,} tokens, {share:.0%} in the loss; longest row {data.longest_tokens}"
    cut = recipe.data.max_length
    counts = (
        (data.num_truncated, f"cut to {cut}"),
        (data.num_split, f"split at {cut}"),
        (data.num_dropped, "left out"),
    )
    for number, what in counts:
        if number:
            why += f"; {number:,} {what}"
    if data.truncated_share > MUCH_TRUNCATED:
        why += f": {data.truncated_share:.0%} of all rows lose their end; raise data.max_length or shorten them"
    packed = "packed sequences" if recipe.data.packing else "rows"
    if recipe.data.packing:
        filled = (data.num_train_tokens or 0) / (data.num_train * cut)
        why += f"; packing fills {filled:.1%} of the places"
    return Reason(topic="data", choice=f"{data.num_train:,} {packed}", why=why)


def _mixture_reasons(recipe: Recipe, data: DataFacts) -> Iterator[Reason]:
    """How much of the training each of several sources is."""
    if len(data.sources) < 2:
        return
    if recipe.data.streaming:
        yield _stream_mixture_reason(recipe.data, data)
        return
    total = sum(source.size for source in data.sources)
    choice = ", ".join(f"{source.name} {source.size / total:.1%}" for source in data.sources)
    measured = "of the tokens" if data.tokenized else "of the text, before it is tokenised"
    section = recipe.data
    weights = [source.weight for source in section.sources]
    if weights[0] is None:
        why = "every row of each is used once"
    else:
        spoken = " : ".join(f"{weight:g}" for weight in weights)
        ends = (
            "no row is used twice" if section.stopping_strategy == "first_exhausted" else "small sources are repeated"
        )
        why = f"weights {spoken} by {section.weight_by}; {ends}"
    rows = ", ".join(f"{source.num_rows:,}" for source in data.sources)
    yield Reason(topic="mixture", choice=f"{choice} {measured}", why=f"{why}; {rows} rows")


def _stream_mixture_reason(section: DataSection, data: DataFacts) -> Reason:
    weights = [source.weight for source in section.sources if source.weight is not None]
    names = [source.name for source in data.sources]
    if not weights:
        order = "they take turns" if section.mixing == "interleave" else "one after another"
        return Reason(topic="mixture", choice=", ".join(names), why=f"{order}; how much each holds is not known")
    shares = (f"{name} {weight / sum(weights):.1%}" for name, weight in zip(names, weights, strict=True))
    return Reason(topic="mixture", choice=f"{', '.join(shares)} of the rows", why="until a stream ends that is due")


def _steps_reason(recipe: Recipe, data: DataFacts, schedule: Schedule | None) -> Reason:
    if schedule is None:
        why = f"{data.num_train:,} rows are to be packed first"
        return Reason(topic="steps", choice="known after tokenising", why=why)
    if recipe.train.max_steps is not None:
        why = "as in the recipe"
        if schedule.steps_per_epoch is not None:
            why += f"; {recipe.train.max_steps / schedule.steps_per_epoch:.3g} epochs"
    else:
        batch = recipe.train.global_batch_size
        epochs = recipe.train.num_epochs or 1
        why = f"{epochs:g} x {data.num_train:,} / {batch} a step"
    if schedule.eval_steps is not None:
        why += f"; evaluation on {data.num_eval:,} every {schedule.eval_steps}"
    return Reason(topic="steps", choice=f"{schedule.num_steps}, {schedule.warmup_steps} of warm-up", why=why)


def _speed_reason(section: DataSection, data: DataFacts, speed: Speed | None) -> Reason:
    if speed is None:
        why = "operations are counted for dense decoders with attention in every layer"
        return Reason(topic="speed", choice="not predicted", why=why)
    at_most = not data.tokenized and not section.packing
    why = speed.basis
    if at_most and speed.seconds is not None:
        why += f"; every row taken as {section.max_length} tokens"
    return Reason(topic="speed", choice=speed.words(at_most=at_most), why=why)


def _divisors(number: int) -> list[int]:
    """Divisors of a number, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0]
