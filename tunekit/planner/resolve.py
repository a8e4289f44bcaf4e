"""From a recipe and facts to a plan: one pure function, built of small decisions that each give their reason."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tunekit.errors import PlanError
from tunekit.estimates.facts import SCORE, DataFacts, Hardware, ModelFacts
from tunekit.estimates.memory.memory import RESERVE_SHARE, MemoryEstimate, saving_of
from tunekit.estimates.memory.sharding import zero_buckets
from tunekit.estimates.memory.states import num_trainable_params, reference_of
from tunekit.estimates.throughput.speed import RunRecord, Speed, reserve_share, speed_of, step_of
from tunekit.planner.advice import advice
from tunekit.planner.decisions import backends, environment, reasons
from tunekit.planner.decisions.beyond import Beyond, beyond
from tunekit.planner.decisions.candidates import HOST_SHARE, Candidate, Fit, Setting, candidates, fit, least
from tunekit.planner.decisions.changes import change_first, what_would_fit
from tunekit.planner.decisions.checks import (
    Refusal,
    check_media,
    check_recipe,
    check_retry,
    check_rows,
    choose_dtype,
    refusal,
)
from tunekit.planner.decisions.engines import automodel_words
from tunekit.planner.decisions.vllm import check_server, split_for_server, why_no_vllm, why_no_vllm_in
from tunekit.planner.plan import VARLEN, Plan, Reason, Rejected, gib
from tunekit.recipe.methods import generates
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter


def resolve(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    records: Sequence[RunRecord] = (),
    teacher: ModelFacts | None = None,
) -> Plan:
    """Plan how to run `recipe` on `hardware`.

    Args:
        recipe: What is asked for.
        hardware: The machine.
        model: The model.
        data: The rows.
        records: Finished runs, from which the speed of this one is told.
        teacher: The model to learn from, for distillation.

    Raises:
        PlanError: The recipe asks for what this machine cannot do, or does not fit it.
    """
    plan, setting = _planned(recipe, hardware, model, data, records, teacher)

    def plan_of(other: Recipe) -> Plan:
        return _planned(other, hardware, model, data, records, teacher)[0]

    return plan.model_copy(update={"reasons": (*plan.reasons, *advice(plan, setting, plan_of))})


def _planned(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts,
    data: DataFacts,
    records: Sequence[RunRecord],
    teacher: ModelFacts | None,
) -> tuple[Plan, Setting]:
    """Return the plan, without advice, and the settings that it was chosen among."""
    hardware, server_devices = split_for_server(recipe, hardware.with_processes(recipe.parallel.num_processes))
    model = _as_trained(model, recipe)
    dtype, why_dtype = choose_dtype(recipe, hardware.device)
    attention, why_attention = backends.choose_attention(recipe, hardware, model, dtype, reads_media=bool(data.media))
    check_recipe(recipe, hardware, model, attention, dtype, teacher)
    check_media(recipe, model, data, attention, teacher)
    check_server(recipe, model, server_devices)
    setting = setting_of(recipe, hardware, model, records, data=data, teacher=teacher)
    setting = replace(setting, server_devices=server_devices)
    check_rows(recipe, data, attention, setting.passes)
    setting, chosen, why_generated = _with_generation(setting, _choose(setting))
    fitting, layout = chosen.fit, chosen.fit.layout
    kernels, why_kernels = backends.choose_kernels(recipe, hardware, layout)
    compiled, why_compiled = backends.choose_compile(
        recipe,
        hardware,
        kernels,
        layout,
        saves_activations=fitting.activation_offloading or fitting.mlp_tile_tokens is not None,
        repeated=backends.repeats(recipe.data, model, setting.attention_in(layout)),
    )
    check_retry(recipe, fitting.micro_batch_size)
    padding = backends.padding_of(
        recipe.data, model, setting.attention_in(layout), fitting.micro_batch_size, setting.passes
    )
    if backends.of_rows(attention, model, lie_apart=padding.is_free) != attention:
        attention, why_attention = backends.dense_attention(model)
    decoder_by_document = padding.is_free and backends.runs_decoder_by_document(model, attention)
    by_document = padding.is_free and not decoder_by_document and backends.runs_by_document(model)
    schedule = reasons.schedule_of(recipe, data)
    reasons.check_stopping(recipe, schedule)
    reasons.check_warmup(recipe, schedule)
    reasons.check_allocation(recipe.adapter, schedule, dtype)
    reasons.check_restarts(recipe.adapter, schedule)
    step = step_of(
        recipe,
        model,
        data,
        setting.device,
        dtype=dtype,
        mask_length=padding.mask_length,
        padding_free=padding.is_free,
        micro_batch_size=fitting.micro_batch_size,
        gradient_checkpointing=fitting.gradient_checkpointing,
        layout=layout,
        num_nodes=chosen.candidate.num_nodes,
        num_cores=hardware.num_cores,
        passes=setting.passes_in(layout),
        offloaded_bytes=fitting.memory.offloaded_bytes,
        tiled_mlp=fitting.mlp_tile_tokens is not None,
        is_fused=kernels != "torch" or compiled,
    )
    num_steps, speed = None if schedule is None else schedule.num_steps, None
    if step is not None:
        saves = recipe.train.save_steps
        speed = speed_of(step, setting.device, hardware.figures, records, num_steps=num_steps, save_steps=saves)
    spare_bytes = _spare_bytes(setting, chosen)
    saving = saving_of(recipe, model, data, layout, dtype, spare_bytes=spare_bytes, num_steps=num_steps)
    variables = environment.environment_of(hardware, layout, chosen.candidate.num_nodes, recipe.method)
    num_trained = num_trainable_params(model, recipe.adapter)
    wait_bytes, forced_timeout = environment.longest_wait_bytes(model, num_trained), recipe.parallel.timeout_seconds
    num_answers = fitting.micro_batch_size * fitting.gradient_accumulation_steps
    patience = environment.patience_of(wait_bytes, data.num_train + (data.num_eval or 0), recipe.method, num_answers)
    plan = Plan(
        recipe=recipe,
        origin=model.origin,
        reference=reference_of(recipe.method, recipe.adapter, model.origin),
        layout=layout,
        num_nodes=chosen.candidate.num_nodes,
        device=setting.device,
        dtype=dtype,
        autocast=dtype != "float32" and not recipe.train.pure_bf16 and layout.engine == "accelerate",
        attn_implementation=attention,
        flash_attention=backends.flash_attention_of(hardware, model) if attention == VARLEN else "FA2",
        kernels=kernels,
        torch_compile=compiled,
        fp8=recipe.train.fp8,
        new_tokens=model.new_tokens,
        padding_free=padding.is_free,
        by_document=by_document,
        decoder_by_document=decoder_by_document,
        gradient_checkpointing=fitting.gradient_checkpointing,
        activation_offloading=fitting.activation_offloading,
        mlp_tile_tokens=fitting.mlp_tile_tokens,
        micro_batch_size=fitting.micro_batch_size,
        gradient_accumulation_steps=fitting.gradient_accumulation_steps,
        environment=variables,
        timeout_seconds=forced_timeout or environment.timeout_of(wait_bytes),
        patience_seconds=max(patience, forced_timeout or 0),
        vllm=setting.vllm(layout),
        zero_buckets=zero_buckets(model, recipe.adapter) if layout.strategy.startswith("zero") else None,
        pad_to_multiple_of=layout.pad_to_multiple_of(recipe.data.max_length, setting.device),
        dataloader_num_workers=0 if speed is None else speed.num_workers,
        learning_rate=recipe.learning_rate,
        router_aux_loss_coef=reasons.router_aux_loss_coef(recipe, model),
        num_params=model.num_params,
        num_trainable_params=num_trained,
        data=data,
        schedule=schedule,
        saving=saving,
        memory=fitting.memory,
        unchecked=reasons.why_unchecked(model, recipe.num_positions, layout),
        memory_limit_bytes=setting.limit_bytes(chosen.candidate.devices_per_node),
        speed=speed,
        reasons=(
            reasons.device_reason(hardware, layout, chosen.candidate.num_nodes),
            chosen.reason(setting),
            *reasons.reserve_reasons(setting.reserve_share, setting.why_reserve),
            *reasons.model_reasons(recipe, model),
            reasons.precision_reason(recipe, model, layout, dtype, why_dtype),
            Reason(topic="attention", choice=attention, why=why_attention),
            Reason(topic="kernels", choice=kernels, why=why_kernels),
            *backends.compile_reasons(recipe, model, compiled, why_compiled),
            reasons.head_reason(
                hardware,
                model,
                setting.passes_in(layout),
                dtype,
                # With the most padding that there can be.
                fitting.micro_batch_size * setting.passes.sequences_per_row * recipe.num_positions,
                backends.why_trl_head(kernels, layout),
                layout,
            ),
            *reasons.method_reasons(recipe, model.origin, fitting.memory.parts.get("reference", 0)),
            *reasons.generation_reasons(recipe, setting.vllm(layout), why_generated, speed),
            *reasons.router_reasons(recipe, model, layout),
            reasons.adapter_reason(recipe, model, schedule),
            *fitting.reasons(),
            padding.reason(),
            *backends.documents_reasons(
                model, attention, by_document=by_document, decoder_by_document=decoder_by_document
            ),
            reasons.workers_reason(recipe, speed),
            reasons.optimizer_reason(recipe),
            *reasons.states_reasons(recipe, model),
            *reasons.learning_rates_reasons(recipe, model),
            *reasons.deepspeed_reasons(layout, recipe.train.optimizer),
            *environment.environment_reasons(variables, hardware, chosen.candidate.num_nodes),
            *environment.timeout_reasons(layout, wait_bytes, forced_timeout, max(patience, forced_timeout or 0)),
            *reasons.data_reasons(recipe, data, model),
            reasons.steps_reason(recipe, data, schedule),
            *reasons.saving_reasons(recipe, layout, schedule, saving, hardware),
            reasons.speed_reason(recipe.data, data, speed),
            *reasons.communication_reasons(speed),
            *_beyond_reasons(setting, chosen.candidate, speed),
        ),
        rejected=chosen.rejected,
        change_first=change_first(setting, chosen.candidate.num_nodes, fitting),
    )
    return plan, setting


def _as_trained(model: ModelFacts, recipe: Recipe) -> ModelFacts:
    """The model as its method loads it, and with the layers that its adapter inserts; it may be that already.

    Raises:
        PlanError: The model scores texts by a head that is not the method's.
    """
    head = recipe.method.score_head
    if head is None and model.judges:
        problem = f"model.path: {model.path!r} scores texts and generates none ({model.architecture})"
        raise PlanError(problem, hint="use a generative model, or method classification")
    if head is not None and model.judges and model.tensors[SCORE][0] != head.num_labels:
        num = model.tensors[SCORE][0]
        problem = f"model.path: the head of {model.path!r} has {num} labels, but that of the method {head.num_labels}"
        raise PlanError(problem, hint="use a generative model, or as many labels")
    if head is not None and not model.judges:
        model = model.as_judge(head)
    num_new = recipe.adapter.new_layers if isinstance(recipe.adapter, FullAdapter) else None
    if num_new is None or model.num_new_layers or model.num_layers % num_new:
        return model
    return model.with_new_layers(num_new)


def setting_of(
    recipe: Recipe,
    hardware: Hardware,
    model: ModelFacts,
    records: Sequence[RunRecord] = (),
    *,
    data: DataFacts | None = None,
    limit_bytes: int | None = None,
    teacher: ModelFacts | None = None,
) -> Setting:
    """Return the settings that every layout of a recipe has in common.

    Args:
        recipe: What is asked for.
        hardware: The machine.
        model: The model.
        records: Finished runs, from which the reserve is told.
        data: The rows, which may have pictures.
        limit_bytes: What may be used of each device, where that is known better than from its free memory.
        teacher: The model to learn from, for distillation.
    """
    hardware, model = hardware.with_processes(recipe.parallel.num_processes), _as_trained(model, recipe)
    device = hardware.device
    dtype, _ = choose_dtype(recipe, device)
    learned = reserve_share(records, device)
    host = hardware.cpu.memory_free_bytes if hardware.cpu is not None else None
    media = () if data is None else data.media
    return Setting(
        recipe=recipe,
        hardware=hardware,
        model=model,
        dtype=dtype,
        attention=backends.choose_attention(recipe, hardware, model, dtype, reads_media=bool(media))[0],
        found_limit_bytes=limit_bytes,
        host_limit_bytes=None if host is None else int(HOST_SHARE * host),
        reserve_share=RESERVE_SHARE[device.kind] if learned is None else learned[0],
        why_reserve=None if learned is None else learned[1],
        teacher=teacher,
        by_vllm=generates(recipe.method) and recipe.method.generation.use_vllm is True,
        media=media,
        row_pixel_values=None if data is None else data.most_pixel_values,
    )


@dataclass(frozen=True)
class _Chosen:
    """The first candidate that fits, and those before it."""

    candidate: Candidate
    fit: Fit
    rejected: tuple[Rejected, ...]

    def reason(self, setting: Setting) -> Reason:
        """The decision for the plan."""
        why = self.candidate.why
        if setting.recipe.parallel.strategy != "auto":
            why = f"set by the recipe; {why}"
        if self.fit.layout.offloads and setting.host_limit_bytes is None:
            why += "; host memory of this machine unknown"
        if self.fit.layout.sync_each_batch:
            why += "; gradients reduced in every micro-batch: they would not fit unsharded"
        return Reason(topic="layout", choice=self.fit.layout.name, why=why)


def _spare_bytes(setting: Setting, chosen: _Chosen) -> int | None:
    """Host memory that each process may take besides what the plan needs of it; None where that is not known."""
    memory, devices_per_node = chosen.fit.memory, chosen.candidate.devices_per_node
    if setting.device.kind == "cpu":
        return setting.limit_bytes(devices_per_node) - memory.total_bytes
    if setting.host_limit_bytes is None:
        return None
    return (setting.host_limit_bytes - memory.host_bytes) // devices_per_node


def _with_generation(setting: Setting, chosen: _Chosen) -> tuple[Setting, _Chosen, str]:
    """Choose the generation engine where the recipe leaves it open: vLLM where it fits the same layout.

    Returns:
        The setting with it, the layout that was chosen, cut anew where vLLM takes its part, and the reason.
    """
    recipe, hardware, method = setting.recipe, setting.hardware, setting.recipe.method
    if not generates(method) or method.generation.use_vllm != "auto":
        return setting, chosen, "set by the recipe"
    if setting.media:
        return setting, chosen, "prompts have images"
    if hardware.vllm is None:
        return setting, chosen, "unknown whether vLLM is installed there"
    refused = why_no_vllm(recipe, hardware, setting.model)
    why = refused[0] if refused is not None else why_no_vllm_in(recipe, chosen.fit.layout)
    if why is None:
        other = replace(setting, by_vllm=True)
        fitting = fit(other, chosen.fit.layout, chosen.candidate.num_nodes)
        if fitting is not None:
            return other, replace(chosen, fit=fitting), "installed, and fits together with the model"
        why = "vLLM would not fit together with the model"
    return setting, chosen, why


def _beyond_reasons(setting: Setting, candidate: Candidate, speed: Speed | None) -> Iterator[Reason]:
    """Yield the reason that another engine is expected to be faster: weights sent over the network, or to the
    processor.
    """
    if not (candidate.layout.num_shards > candidate.devices_per_node or candidate.layout.offloads):
        return
    other = _other_engine(setting)
    if other is None or other.num_nodes > setting.hardware.num_nodes or other.tokens_per_second is None:
        return
    ours = None if speed is None else speed.tokens_per_second
    if ours is None or other.tokens_per_second.high > ours.high:
        yield Reason(
            topic="faster elsewhere",
            choice=other.layout,
            why="; ".join(line.removesuffix(":") for line in other.words()),
        )


def _choose(setting: Setting) -> _Chosen:
    """Try the candidates in their order.

    Raises:
        PlanError: None of them fits, or there is none.
    """
    rejected: list[Rejected] = []
    needs: list[tuple[MemoryEstimate, int]] = []
    refusals: list[Refusal] = []
    for candidate in candidates(setting):
        layout, per_node = candidate.layout, candidate.devices_per_node
        refused = refusal(setting, layout)
        if refused is not None:
            refusals.append(refused)
            rejected.append(Rejected(layout=layout, why=refused.why))
            continue
        fitting = fit(setting, layout, candidate.num_nodes)
        if fitting is not None:
            return _Chosen(candidate, fitting, tuple(rejected))
        needed = least(setting, layout, candidate.num_nodes)
        why = setting.why_not(needed, per_node)
        rejected.append(Rejected(layout=layout, why=why, needed_bytes=needed.total_bytes))
        needs.append((needed, per_node))
    if not needs:
        raise _nothing_possible(setting, rejected, refusals)
    smallest, per_node = min(needs, key=lambda need: need[0].total_bytes)
    limit = setting.limit_bytes(per_node)
    over = smallest.total_bytes - limit
    tried = [f"  {rejection.layout.name}: {rejection.why}" for rejection in rejected] if len(rejected) > 1 else []
    much = f" ({gib(over)} over)" if over > 0 else f", and {setting.why_not(smallest, per_node)}"
    smaller = what_would_fit(setting)
    other = _other_engine(setting) if setting.hardware.num_accelerators > 1 else None
    ours = automodel_words(setting)
    raise PlanError(
        f"does not fit on {_machine(setting)}: needs at least {gib(smallest.total_bytes)}, limit {gib(limit)}{much}",
        hint="\n".join(
            [smaller.words, *([] if ours is None else [ours]), *([] if other is None else other.words()), *tried]
        ),
        changes=smaller.changes,
        needed_bytes=smallest.total_bytes if over > 0 else None,
        limit_bytes=limit,
    )


def _other_engine(setting: Setting) -> Beyond | None:
    """A layout of another engine to start from, which there is for training all weights."""
    recipe = setting.recipe
    if not isinstance(recipe.adapter, FullAdapter):
        return None
    return beyond(setting.model, setting.hardware, batch=recipe.train.global_batch_size, length=recipe.data.max_length)


def _machine(setting: Setting) -> str:
    number = setting.hardware.num_accelerators
    return setting.device.name if number <= 1 else f"{number} x {setting.device.name}"


def _nothing_possible(setting: Setting, rejected: list[Rejected], refusals: list[Refusal]) -> PlanError:
    """Return the error for a recipe without any layout left to try."""
    if rejected:
        return PlanError(f"{rejected[0].layout.name}: {rejected[0].why}", hint=refusals[0].hint)
    parallel, batch = setting.recipe.parallel, setting.recipe.train.global_batch_size
    settings = [f"parallel.{name}={value}" for name, value in parallel.model_dump(exclude_defaults=True).items()]
    num = parallel.num_processes
    multiple = f", or set train.global_batch_size to a multiple of {num}" if num and batch % num else ""
    return PlanError(
        f"{', '.join(settings)}: no layout for {_machine(setting)} with a global batch size of {batch}",
        hint=f"unset some of them{multiple}",
    )
