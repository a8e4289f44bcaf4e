"""Reasons of a plan about data, schedule and model: counts and choices in words.

Reasons of a plan about the disk: the files that a run writes, and whether there is room.

The range in which the formulas of memory were compared with traces, and what a plan outside of it says of that.
"""

import math
from collections.abc import Iterator
from typing import assert_never, get_args

from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts, Hardware, ModelFacts, Origin, start_words
from tunekit.estimates.layout import Layout
from tunekit.estimates.learning_rates import has_groups, rates_of
from tunekit.estimates.memory.activations import HEAD_COLUMNS, HEAD_TOKENS, is_traced
from tunekit.estimates.memory.memory import Saving, copied_bytes, divides_files, metric_of
from tunekit.estimates.memory.pictures import counts
from tunekit.estimates.memory.states import (
    BYTES,
    Dtype,
    initial_bytes,
    matrix_cost_of,
    num_live_layers,
    num_trainable_params,
    optimizer_bytes_per_param,
    reference_of,
    token_rows,
    trained_bytes,
    trained_tensors,
    trained_tokens,
)
from tunekit.estimates.models.model_config import model_types
from tunekit.estimates.models.rope import BY_LENGTH, scaled
from tunekit.estimates.models.towers import Part, Tower, part_of
from tunekit.estimates.passes import Passes, method_words, steps_per_epoch
from tunekit.estimates.throughput.speed import Speed
from tunekit.estimates.throughput.step import COLLATED_TOKENS_PER_SECOND, PERCENT, workers_for
from tunekit.estimates.traces import Deviations, Line
from tunekit.kernels.chunks import chunk_rows
from tunekit.planner.decisions.published import base_cost, base_words
from tunekit.planner.plan import VLLM, Plan, Reason, Schedule, count, gib, used_of
from tunekit.recipe.chat_templates import named_template
from tunekit.recipe.methods import generates, is_rewarded
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import (
    AdaloraAdapter,
    Adapter,
    FullAdapter,
    LoraAdapter,
    PeftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
)
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.section import BLOCK_OPTIMS, STOCHASTIC_OPTIMS, Optim, TrainSection

MUCH_TRUNCATED = 0.05
"""Share of the rows from which on the plan warns that they lose their ends at `data.max_length`."""

MAX_RATES = 6
"""Learning rates that a plan names."""

RUNS_PER_RECIPE = 4
"""Evaluations and checkpoints in a run whose recipe does not say how often."""

WITHOUT_WEIGHTS = {
    "weights": "",
    "config": "; from its config.json only, training needs the weights",
    "table": "; from the built-in table, training needs the files",
}
"""Sentence about a model whose weights were not inspected, by the origin of its facts."""


def device_reason(hardware: Hardware, layout: Layout, num_nodes: int) -> Reason:
    """Return the reason for the devices."""
    device, used = hardware.device, layout.num_processes
    where, note = f" in {num_nodes} nodes" if num_nodes > 1 else "", f"; {hardware.note}" if hardware.note else ""
    if device.kind == "cpu":
        share = "one process uses all" if used == num_nodes else f"{used // num_nodes} processes share the"
        why = f"no accelerator found; {share} {hardware.num_cores} cores{note}"
        return Reason(topic="device", choice=f"{device.name}{where}", why=why)
    why = f"{used_of(device.memory_free_bytes, device.memory_total_bytes)} free"
    idle = hardware.num_accelerators - used
    if idle:
        why += f"; {idle} idle: the batch does not divide evenly over all"
    choice = device.name if used == 1 else f"{used} x {device.name}"
    return Reason(topic="device", choice=f"{choice}{where}", why=f"{why}{note}")


def reserve_reasons(share: float, why: str | None) -> Iterator[Reason]:
    """Yield the reason for the allocator's reserve, where earlier runs measured it."""
    if why is not None:
        yield Reason(topic="reserve", choice=f"{share:.0%} on top of the tensors", why=why)


def precision_reason(recipe: Recipe, model: ModelFacts, layout: Layout, dtype: Dtype, why: str) -> Reason:
    """In which types the run computes, keeps weights and sums gradients over devices."""
    trained_dtype = recipe.train.trained_dtype
    stored = f"{trained_dtype} weights" if recipe.adapter.type == "full" else f"{dtype} base"
    if isinstance(recipe.adapter, QloraAdapter):
        stored = f"{recipe.adapter.bits}-bit base"
    if recipe.train.pure_bf16:
        stored += " and gradients"
        why += _bf16_words(recipe.train)
    if model.published_as is not None:
        stored = base_words(recipe, model, stored, dtype)
        why += base_cost(recipe, model, dtype)
    elif isinstance(recipe.adapter, QloraAdapter) and model.expert_stacks:
        stored = "4-bit base, experts included"
    summed = f"; gradients reduced in {layout.reduces_in(dtype, trained_dtype)}" if layout.num_processes > 1 else ""
    return Reason(topic="precision", choice=f"{dtype} compute, {stored}", why=f"{why}{summed}")


def _bf16_words(train: TrainSection) -> str:
    """Return the gain and the price of trained weights in bfloat16."""
    optim = train.optimizer
    each, instead = (2 * BYTES[dtype] + optimizer_bytes_per_param(optim, dtype) for dtype in ("bfloat16", "float32"))
    words = f": {each:.3g} bytes per parameter instead of {instead:.3g}, gradients accumulated in bfloat16"
    if optim in STOCHASTIC_OPTIMS:
        return f"{words}; weights rounded stochastically, so that small updates count on average"
    lost = "updates below 1/512 to 1/256 of a weight are lost: unset train.optim to round stochastically"
    return f"{words}; {optim} rounds weights to the nearest, so that {lost}"


def head_reason(
    hardware: Hardware,
    model: ModelFacts,
    passes: Passes,
    dtype: Dtype,
    num_tokens: int,
    why_trl: str | None,
    layout: Layout,
) -> Reason:
    """Return the reason for the head: what it stores of its logits.

    Args:
        hardware: The machine.
        model: The model.
        passes: What the method does in a step.
        dtype: Type of the products.
        num_tokens: Tokens of a micro-batch.
        why_trl: Why TRL's head stays where it is, as far as that is the layout's or the kernels'.
        layout: The layout.
    """
    experts = "; experts by torch's grouped matmul" if model.num_experts else ""
    size = gib(BYTES[dtype] * passes.max_scored_share * num_tokens * model.vocab_size)
    full = f"full logits would take {size} per micro-batch"
    choice, why = "one score per token", "no logits over the vocabulary"
    if layout.engine == "automodel":
        where = ", in the last stage" if layout.pp_size > 1 else ""
        why = f"NeMo Automodel's masked cross-entropy reads them in float32{where}"
        return Reason(topic="head", choice=f"full logits, {size}", why=why)
    if passes.head in ("sums", "chunks"):
        rows = chunk_rows(int(passes.max_scored_share * num_tokens), model.vocab_size, BYTES[dtype])
        by = "with their gradients" if passes.head == "sums" else "with a gradient per token"
        choice = "tunekit's chunked loss head"
        why = f"{full}; {rows:,} tokens at a time {by}, masked tokens skipped"
    elif passes.head == "whole":
        choice, why = f"full logits, {size}", "TRL's experimental trainers do not have its tiled loss head"
    elif passes.head == "tiles":
        by = "Triton" if hardware.device.kind == "cuda" else "torch (Triton needs an accelerator)"
        note = "" if why_trl is None else f"; {why_trl}"
        choice = "TRL's tiled loss head"
        why = f"{full}; tiles of {HEAD_TOKENS:,} tokens x {HEAD_COLUMNS:,} vocabulary entries, reduced by {by}{note}"
    return Reason(topic="head", choice=choice, why=why + experts)


def workers_reason(recipe: Recipe, speed: Speed | None) -> Reason:
    """Return the reason for the number of data workers."""
    number, why = 0, f"a process collates {COLLATED_TOKENS_PER_SECOND:,.0f} tokens/s"
    if recipe.data.streaming:
        why = "one process reads the stream, in order"
    elif generates(recipe.method):
        why = "only prompts are loaded; answers are generated"
    elif speed is None or speed.fed_tokens_per_second is None:
        why += "; device throughput unknown"
    else:
        number = speed.num_workers
        why += f", a device computes at most {float(f'{speed.fed_tokens_per_second:.3g}'):,.0f}"
        why += "; no cores left for more" if number < workers_for(speed.fed_tokens_per_second) else ""
    return Reason(topic="workers", choice=f"{number} per device" if number else "none", why=why)


def adapter_reason(recipe: Recipe, model: ModelFacts, schedule: Schedule | None) -> Reason:
    """Return the reason for the adapter."""
    adapter, trained = recipe.adapter, num_trainable_params(model, recipe.adapter)
    if isinstance(adapter, FullAdapter) and not adapter.is_partial:
        return Reason(topic="adapter", choice="full", why=f"all {count(trained)} parameters trained")
    if isinstance(adapter, FullAdapter):
        parts = [] if adapter.last_layers is None else [f"the last {adapter.last_layers} layers"]
        if adapter.new_layers is not None:
            parts = [f"{adapter.new_layers} new layers, {model.num_layers} in total"]
        share = f"{count(trained)} of {count(model.num_params)} parameters trained, {trained / model.num_params:.2%}; "
        num_frozen = model.num_layers - num_live_layers(model, adapter)
        share += f"no activations stored for the first {num_frozen} layers, " if num_frozen else ""
        share += "other frozen parameters counted as trained (upper bound)"
        parts += [part.replace("_", " ") for part in get_args(Part) if adapter.training_of(part) == "full"]
        return Reason(
            topic="adapter", choice=f"full, of {', '.join([*parts, *(adapter.unfrozen_parameters or ())])}", why=share
        )
    is_before = isinstance(adapter, PromptTuningAdapter)
    choice = f"{adapter.words} before each row" if is_before else f"{adapter.words}, on {_targets_words(adapter)}"
    share = f"{count(trained)} parameters trained, {trained / model.num_params:.2%} of the model"
    if isinstance(adapter, LoraAdapter) and adapter.init_lora_weights is not True:
        choice += f", from {adapter.init_lora_weights}"
    if isinstance(adapter, LoraAdapter):
        share = "".join([f"{'at most ' * adapter.distributes_ranks}{share}", *_start_words(adapter, model)])
        share += _restart_words(adapter, model, schedule)
    return Reason(topic="adapter", choice=choice, why=share)


def _start_words(adapter: LoraAdapter, model: ModelFacts) -> Iterator[str]:
    """Yield where the initial matrices of an adapter are from, and what that costs."""
    if adapter.splits_base:
        yield f"; subtracted from the base weights, and saved as plain LoRA of rank {adapter.as_saved.rank}"
    if adapter.distributes_ranks:
        num, most = len(model.adapted(adapter).ranks), round(adapter.rank * adapter.rho)
        yield f"; {adapter.rank * num:,} ranks distributed by the rows, at most {most} per module, estimated as if the "
        yield "largest modules got them"
    if adapter.sees_rows:
        yield f"; one forward pass over {adapter.num_init_rows:,} rows before training"
    if initial_bytes(model, adapter):
        what = "covariances of the inputs take" if adapter.sees_rows else "quantization errors take"
        yield f"; {what} {gib(initial_bytes(model, adapter))}"
    if adapter.is_of_4bit_base:
        yield "; before training, the unquantized base is loaded into host memory as well; the adapter fits only the "
        yield "4-bit base"


def _restart_words(adapter: LoraAdapter, model: ModelFacts, schedule: Schedule | None) -> str:
    """Return how often an adapter restarts, and what is saved then."""
    if adapter.relora is None:
        return ""
    one, two = (4 * num_trainable_params(model, adapter.of_times_the_rank(times)) for times in (1, 2))
    words = f"; merged into the base weights and restarted every {adapter.relora.steps:,} steps, which adds "
    words += f"{gib(two - one)} to host memory and checkpoints"
    if schedule is None:
        return words
    num, saved = adapter.relora.num_restarts(schedule.num_steps), adapter.saved_after(schedule.num_steps)
    return f"{words}, {num:,} {'time' if num == 1 else 'times'}; saved as plain LoRA of rank {saved.rank:,}"


def _targets_words(adapter: PeftAdapter) -> str:
    """Return the modules that get an adapter, and those of other ranks and alphas."""
    targets = adapter.target_modules
    words = targets if isinstance(targets, str) else ", ".join(targets)
    if adapter.exclude_modules:
        words += f" without {', '.join(adapter.exclude_modules)}"
    if adapter.layers_to_transform:
        words += f" in layers {', '.join(map(str, adapter.layers_to_transform))}"
    if not isinstance(adapter, LoraAdapter):
        return words
    for name, pattern in (("rank", adapter.rank_pattern), ("alpha", adapter.alpha_pattern)):
        words += "".join(f"; {name} {value:g} on {module}" for module, value in (pattern or {}).items())
    return words


def optimizer_reason(recipe: Recipe) -> Reason:
    """Return the reason for the optimizer."""
    reason, choice = "set by the recipe", f"{recipe.train.optimizer}, learning rate {recipe.learning_rate:g}"
    if recipe.train.learning_rate is None:
        source = recipe.method.spec.learning_rate.source
        times = "" if isinstance(recipe.adapter, FullAdapter) else _times(recipe.adapter)
        reason = f"default of {recipe.method.type} for {recipe.adapter.type} ({times}{source})"
    reason += f"; {recipe.train.lr_scheduler_type} schedule"
    if recipe.train.optimizer in STOCHASTIC_OPTIMS:
        bits = BLOCK_OPTIMS.get(recipe.train.optimizer)
        kept = recipe.train.trained_dtype if bits is None else f"{bits} bits"
        reason += f"; tunekit's AdamW, states in {kept}"
    return Reason(topic="optimizer", choice=choice, why=reason)


def _times(adapter: PeftAdapter) -> str:
    """Return how the default rate of an adapter follows from that of full fine-tuning."""
    if adapter.takes_full_rate:
        return "that of full fine-tuning in "
    times = adapter.times_rate_of_lora
    return f"{'' if times == 1 else f'{times} times that of LoRA, '}ten times the full fine-tuning rate of "


def states_reasons(recipe: Recipe, model: ModelFacts) -> Iterator[Reason]:
    """Yield the reasons for the states of an optimizer that keeps others than AdamW, and for an average of weights."""
    train = recipe.train
    if train.optimizer == "schedule_free_adamw":
        _, num_bytes = trained_bytes(model, recipe.adapter, train.optimizer, train.trained_dtype)
        why = "weight average instead of a schedule: evaluations, checkpoints and the result use it"
        yield Reason(topic="optimizer states", choice=gib(num_bytes), why=f"{why}; the optimizer has its own warm-up")
    if train.ema_decay is not None:
        num_bytes = BYTES[train.trained_dtype] * num_trainable_params(model, recipe.adapter)
        steps = f"over about {1 / (1 - train.ema_decay):,.0f} steps"
        why = f"decay {train.ema_decay:g}, {steps}: evaluations, checkpoints and the result use the average"
        yield Reason(topic="average of weights", choice=gib(num_bytes), why=why)
    cost = matrix_cost_of(model, recipe.adapter, train.optimizer, train.trained_dtype, train.low_rank)
    if cost is None:
        return
    num = num_trainable_params(model, recipe.adapter)
    _, adamw_bytes = trained_bytes(model, recipe.adapter, "adamw_torch_fused", train.trained_dtype)
    others = f", AdamW for the other {count(num - cost.num_params)}" if num > cost.num_params else ""
    choice = f"{gib(cost.states_bytes)} instead of {gib(adamw_bytes)}"
    if train.optimizer == "adam_mini":
        why = "one second moment per query or key head, per row of other matrices, and per vector"
        yield Reason(topic="optimizer states", choice=choice, why=why)
        return
    if train.low_rank is None:
        why = f"Muon for {count(cost.num_params)} parameters in matrices{others}; updates as large as AdamW's, "
    else:
        what = f"rank {train.low_rank.rank} for {count(cost.num_params)} parameters in matrices"
        why = f"{what}{others}; projections updated every {train.low_rank.update_proj_gap} steps, "
    why += f"at {cost.flops / 1e12:,.3g} TFLOP per step"
    yield Reason(topic="optimizer states", choice=choice, why=why)


def learning_rates_reasons(recipe: Recipe, model: ModelFacts) -> Iterator[Reason]:
    """Yield the reason for learning rates that differ between parameters."""
    if not has_groups(recipe):
        return
    rates = rates_of(recipe, model)
    groups = [f"{count(size)} parameters at {rate:.3g}" for rate, size in rates.items()]
    shown = groups if len(groups) <= MAX_RATES else [*groups[: MAX_RATES - 1], "...", groups[-1]]
    why = f"set by the recipe; the schedule scales all of them, and logs show the first, {next(iter(rates)):.3g}"
    yield Reason(topic="learning rates", choice=", ".join(shown), why=why)


def deepspeed_reasons(layout: Layout, optim: Optim) -> Iterator[Reason]:
    """Yield the reasons about DeepSpeed: how it differs from other engines, and what it costs."""
    if not layout.strategy.startswith("zero"):
        return
    if layout.offload_optimizer_device != "none":
        why = "set by the recipe; DeepSpeed's own AdamW needs compilation and is hardly faster than torch's"
        yield Reason(topic="offloaded states", choice=f"updated by {optim} on the CPU", why=why)
    if "nvme" in (layout.offload_param_device, layout.offload_optimizer_device):
        why = "DeepSpeed compiles its disk I/O on first use, which takes minutes"
        yield Reason(topic="disk", choice="needs a C++ compiler, ninja and libaio headers", why=why)


def model_reasons(recipe: Recipe, model: ModelFacts) -> Iterator[Reason]:
    """Yield the reasons about the model, what training starts from, and code besides that of the libraries."""
    shape = f"{model.num_layers} layers, hidden size {model.hidden_size}, vocabulary {model.vocab_size:,}"
    active = f", {count(model.num_active_params)} active" if model.num_experts else ""
    why = f"{model.architecture}, {count(model.num_params)} parameters{active}: {shape}"
    yield Reason(topic="model", choice=model.path, why=why + WITHOUT_WEIGHTS[model.known_from])
    if model.deviations is not None:
        yield _trace_reason(model.deviations)
    elif model.why_untraced is not None:
        yield Reason(topic="trace", choice="none", why=model.why_untraced)
    if model.num_tower_params:
        yield _tower_reason(recipe.adapter, model)
    if model.origin is not None:
        choice, why = start_words(model.origin, recipe.adapter)
        yield Reason(topic="starts from", choice=choice, why=why)
    yield from _rope_reasons(recipe, model)
    yield from _token_reasons(recipe, model)
    yield from _template_reasons(recipe, model)
    if recipe.model.trust_remote_code:
        at = (
            f"at commit {recipe.model.revision}"
            if recipe.model.revision
            else "the latest commit when the run is created"
        )
        yield Reason(topic="code", choice=f"remote code of the model, {at}", why="model.trust_remote_code is true")


def _trace_reason(deviations: Deviations) -> Reason:
    """Tell how far the formulas for the layers are from a trace of the step."""
    lines = deviations.casting
    num_tokens = lines.kept.num_tokens[1]

    def words(line: Line) -> str:
        deviation = line.at(num_tokens).kept
        return f"{gib(abs(deviation))} {'more' if deviation >= 0 else 'less'}"

    why = f"the real modules on tensors without storage: layers keep {words(lines.kept)} than by the formulas"
    if lines.recomputed is not None:
        why += f", {words(lines.recomputed)} with gradient checkpointing"
    return Reason(topic="trace", choice=f"a step of {num_tokens:,} tokens", why=why)


def _tower_reason(adapter: Adapter, model: ModelFacts) -> Reason:
    trained = {part: adapter.training_of(part) for part in get_args(Part) if adapter.training_of(part) != "frozen"}
    if not trained:
        why = "no gradients and no adapters: not used for text; saved unchanged with full fine-tuning"
        return Reason(topic="towers", choice=f"frozen, {count(model.num_tower_params)} parameters", why=why)
    names = [f"{part.replace('_', ' ')} {'trained' if how == 'full' else how}" for part, how in trained.items()]
    num = sum(
        math.prod(shape)
        for name, shape in trained_tensors(model, adapter).items()
        if model.is_tower(name) and adapter.training_of(part_of(name)) != "frozen"
    )
    why = f"{count(num)} trained parameters; zero gradients in micro-batches without images"
    if model.num_read_tower_layers is not None and "vision_tower" in trained:
        why += f"; only the first {model.num_read_tower_layers} layers, of which vision_feature_layer reads the last"
    return Reason(topic="towers", choice=", ".join(names), why=why)


def _rope_reasons(recipe: Recipe, model: ModelFacts) -> Iterator[Reason]:
    """Yield the reason for more positions than the model has by itself."""
    section, rope = model.loaded_for(recipe.model).rope_scaling, model.rotary
    if section is None or rope is None:
        return
    new = scaled(rope, section)
    why = f"rotary embeddings scaled by {new.kind}, factor {section.factor:g}"
    if rope.kind != "default":
        why += f", instead of the model's {rope.kind}" + f", factor {rope.own_factor:g}" * (rope.own_factor > 1)
    if new.kind in BY_LENGTH:
        why += "; the longest row of a micro-batch determines the factors of all its rows"
    if not isinstance(recipe.adapter, FullAdapter):
        why += "; the adapter requires this scaling, which its config.json contains"
    yield Reason(topic="context", choice=f"{new.positions:,} positions instead of {rope.positions:,}", why=why)


def _token_reasons(recipe: Recipe, model: ModelFacts) -> Iterator[Reason]:
    """Yield the reason for tokens that are added, with the rows that they take."""
    rows = token_rows(model, recipe.adapter)
    alone = len(trained_tokens(model, recipe.adapter))
    tables, size = len(model.vocabulary_tables), 4 * model.vocab_size * model.hidden_size
    trained = f"PEFT trains only these rows (trainable_token_indices, {4 * alone * model.hidden_size:,} "
    trained += (
        f"bytes per matrix): {tables} full {'matrices' if tables > 1 else 'matrix'} would take {gib(tables * size)}"
    )
    num = len(model.new_tokens)
    if rows and alone > num:
        yield Reason(topic="trained tokens", choice=f"rows of {alone}", why=trained)
    if not num:
        return
    spare = num - model.num_new_rows
    where = [f"{model.num_new_rows} new rows initialized near the mean of the others"] * bool(model.num_new_rows)
    where += [f"{spare} rows that the tokenizer did not use"] * (spare > 0)
    why = f"in {' and '.join(where)}"
    why += f"; {trained}" if rows and alone == num else ""
    yield Reason(topic="tokens", choice=f"{num} added, vocabulary {model.vocab_size:,}", why=why)


def _template_reasons(recipe: Recipe, model: ModelFacts) -> Iterator[Reason]:
    """Yield the reason for a chat template of known name, with the token that ends its answers."""
    facts, name = model.template, recipe.model.chat_template
    if name is None and facts is not None:
        name = facts.of_type
    template = named_template(name)
    if template is None:
        return
    if facts is None:
        why = "the tokenizer is not at hand: the run checks that it has the template's tokens"
    elif facts.replaces is None:
        why = f"answers end with {facts.end}, the tokenizer's end token"
        why += "; the model comes without a chat template" if facts.of_type else ""
    else:
        why = f"answers end with {facts.end}, the end token in place of {facts.replaces}"
    if facts is not None and facts.as_text:
        tokens = to_inline_yaml([*(recipe.model.add_special_tokens or ()), *facts.as_text])
        why += f"; {', '.join(facts.as_text)} read as ordinary text, unless model.add_special_tokens={tokens}"
    yield Reason(topic="chat template", choice=template.name, why=why)


def router_reasons(recipe: Recipe, model: ModelFacts, layout: Layout) -> Iterator[Reason]:
    """Yield the reason for the routers' auxiliary loss, the one part of a loss that depends on the cut of a batch."""
    coefficient = router_aux_loss_coef(recipe, model)
    if layout.engine == "automodel":
        return
    if model.num_experts and coefficient is None:
        who = f"TRL's {recipe.method.type} trainer"
        if recipe.method.spec.adds_router_loss:
            who = f"the code of {model.model_type} has no router loss, and TRL"
        yield Reason(topic="experts", choice="no load balancing", why=f"{who} adds no router loss")
    elif coefficient:
        is_set = recipe.method.trainer_args.get("router_aux_loss_coef") is not None
        why = (
            f"coefficient {'set by the recipe' if is_set else 'from the model config'}; TRL adds the router loss as a "
        )
        why += "mean over micro-batches, so it depends slightly on the micro-batch size"
        why += "" if is_set else f"; {ROUTER_ARG}=0.0 disables it"
        yield Reason(topic="experts", choice=f"load balancing, router_aux_loss_coef {coefficient:g}", why=why)


ROUTER_ARG = "method.trainer_args.router_aux_loss_coef"
"""Key of a recipe that sets the coefficient."""


def router_aux_loss_coef(recipe: Recipe, model: ModelFacts) -> float | None:
    """Return the coefficient of the routers' auxiliary loss; None where the model or the method has none.

    Raises:
        PlanError: The recipe gives one, and the model has no such loss.
    """
    coefficient: float | None = recipe.method.trainer_args.get("router_aux_loss_coef")
    if not recipe.method.spec.adds_router_loss:
        return None
    if coefficient and model.router_aux_loss_coef is None:
        raise PlanError(f"{ROUTER_ARG}: {model.path} ({model.model_type}) has no router loss", hint="unset it")
    return model.router_aux_loss_coef if coefficient is None else coefficient


def method_reasons(recipe: Recipe, origin: Origin | None, kept_bytes: int) -> Iterator[Reason]:
    """Yield the reasons for the method, if it is not supervised fine-tuning, and for its reference with its cost.

    Args:
        recipe: The recipe.
        origin: Where training starts.
        kept_bytes: What each device keeps of the reference.
    """
    words = method_words(recipe.method, recipe.adapter, origin)
    if words is not None:
        yield Reason(topic="method", choice=words[0], why=words[1])
    reference = reference_of(recipe.method, recipe.adapter, origin)
    match reference:
        case "without adapter":
            choice, why = "the model without its adapter", "one forward pass without gradients, no extra memory"
        case "copied adapter":
            assert origin is not None
            choice = f"a frozen copy of the adapter of {origin.name}"
            why = f"{gib(kept_bytes)} and one forward pass without gradients; disabling the adapter would give "
            why += f"{origin.base.path}, not the starting point"
        case "second model":
            choice, why = "a second model", f"{gib(kept_bytes)} per device and one forward pass without gradients"
            if origin is not None and origin.adapter is not None:
                choice += f", with the adapter of {origin.name} merged"
        case "beforehand":
            choice = "log-probabilities precomputed before training"
            why = "one pass over all rows, cached for other runs with the same model and rows, except with ZeRO-3"
        case "none":
            return
        case _:
            assert_never(reference)
    yield Reason(topic="reference", choice=choice, why=why)


def generation_reasons(recipe: Recipe, vllm: VLLM | None, why: str, speed: Speed | None) -> Iterator[Reason]:
    """Yield the reasons for generation: the engine, and its share of a step."""
    if not generates(recipe.method):
        return
    choice = "transformers, all answers of a step at once"
    generation = recipe.method.generation
    if vllm is not None and vllm.mode == "server":
        num = recipe.method.num_server_devices
        choice = f"vLLM server, {generation.vllm_server_base_url}"
        if num:
            choice = (
                f"vLLM server on {num} other device{'s' * (num > 1)}, {vllm.gpu_memory_utilization:.0%} of their memory"
            )
            why += "; started and stopped with the run"
        why += "; server throughput unknown, estimated as on these devices"
    elif vllm is not None:
        choice = f"vLLM on the training devices, {vllm.gpu_memory_utilization:.0%} of their memory"
        if not isinstance(recipe.adapter, FullAdapter):
            why += "; TRL merges and unmerges the adapter for it, which rounds the weights"
    share = None if speed is None else speed.generation_share
    if share is not None:
        why += f"; {share.words(PERCENT)} of the step time"
    yield Reason(topic="generation", choice=choice, why=why)


def schedule_of(recipe: Recipe, data: DataFacts) -> Schedule | None:
    """Return the schedule; unknown before packing unless the recipe gives `max_steps`."""
    train = recipe.train
    unknown = recipe.data.packing and not data.tokenized and not recipe.data.streaming
    if unknown and train.max_steps is None:
        return None
    is_known = not unknown and not recipe.data.streaming
    per_epoch = steps_per_epoch(recipe.method, data.num_train, train.global_batch_size) if is_known else None
    steps = train.max_steps or math.ceil((train.num_epochs or 1) * (per_epoch or 0))
    warmup = train.warmup_steps if train.warmup_steps >= 1 else math.ceil(train.warmup_steps * steps)
    often = max(1, math.ceil(steps / RUNS_PER_RECIPE))
    # A checkpoint holds no answers: it is made where new ones are due.
    together = recipe.method.steps_per_generation if generates(recipe.method) else 1
    return Schedule(
        num_steps=steps,
        steps_per_epoch=per_epoch,
        warmup_steps=int(warmup),
        eval_steps=None if data.num_eval is None else train.eval_steps or often,
        save_steps=train.save_steps or math.ceil(often / together) * together,
        save_together=together,
    )


def check_allocation(adapter: Adapter, schedule: Schedule | None, dtype: Dtype) -> None:
    """Refuse steps without a change of ranks that leave none with one, and gradients that are scaled.

    Raises:
        PlanError: They do, or float16 scales them.
    """
    if not isinstance(adapter, AdaloraAdapter):
        return
    if dtype == "float16":
        problem = "adapter.type: adalora adds unscaled gradients to those scaled for float16"
        raise PlanError(problem, hint="set model.dtype=float32, or adapter.type=lora")
    if schedule is None:
        return
    fixed, num_steps = adapter.tinit + adapter.tfinal, schedule.num_steps
    if fixed >= num_steps:
        problem = f"adapter.tinit, adapter.tfinal: {fixed} steps together, but the run has {num_steps}"
        raise PlanError(problem, hint="lower them, or train longer")


def check_restarts(adapter: Adapter, schedule: Schedule | None) -> None:
    """Refuse restarts of an adapter of which a run reaches none.

    Raises:
        PlanError: It ends before.
    """
    if schedule is None or not isinstance(adapter, LoraAdapter) or adapter.relora is None:
        return
    if not adapter.relora.num_restarts(schedule.num_steps):
        problem = f"adapter.relora.steps: no restart in {schedule.num_steps} steps, one is due after "
        raise PlanError(f"{problem}{adapter.relora.steps}", hint="lower it, or train longer")


def check_warmup(recipe: Recipe, schedule: Schedule | None) -> None:
    """Refuse a polynomial decay without steps: transformers divides by their number (5.24).

    Raises:
        PlanError: All steps are warm-up.
    """
    if schedule is None or recipe.train.lr_scheduler_type != "polynomial":
        return
    if schedule.warmup_steps == schedule.num_steps:
        problem = (
            f"train.warmup_steps: {schedule.warmup_steps} leaves none of {schedule.num_steps} steps for polynomial "
            "decay"
        )
        raise PlanError(problem, hint="lower it, train longer, or set train.lr_scheduler_type=linear")


def check_stopping(recipe: Recipe, schedule: Schedule | None) -> None:
    """Refuse a patience that the evaluations of a run cannot exhaust before its end.

    Raises:
        PlanError: There are too few of them.
    """
    patience = recipe.train.early_stopping_patience
    if patience is None or schedule is None or schedule.eval_steps is None:
        return
    between = math.lcm(schedule.eval_steps, schedule.save_together)
    num = (schedule.num_steps - 1) // between
    if num > patience:
        return
    ways = [f"set train.early_stopping_patience={num - 1}"] if num > 1 else []
    often = (schedule.num_steps - 1) // (patience + 1) // schedule.save_together * schedule.save_together
    ways += [f"set train.eval_steps={often}"] if often else []
    problem = f"train.early_stopping_patience: {patience} needs {patience + 1} evaluations before the last step, "
    problem += f"{schedule.num_steps}, but there {'is' if num == 1 else 'are'} {num}, "
    problem += "every step" if between == 1 else f"every {between} steps"
    raise PlanError(problem, hint=", or ".join(ways) or "unset it, or train longer")


def data_reasons(recipe: Recipe, data: DataFacts, model: ModelFacts) -> Iterator[Reason]:
    """Yield the reasons about the data, and the share of each source."""
    yield _data_reason(recipe, data)
    yield from _mixture_reasons(recipe, data)
    if data.has_pictures:
        yield _picture_reason(recipe.adapter, data, model.tower)
    if data.has_audio:
        yield _audio_reason(data)
    balance = None if data.num_good is None else recipe.method.balance(data.num_train, data.num_good)
    if balance is not None:
        choice, why = balance
        yield Reason(topic="balance", choice=choice, why=why)


def _data_reason(recipe: Recipe, data: DataFacts) -> Reason:
    if recipe.data.streaming:
        why = f"read and tokenized during training; {data.num_train:,} inspected"
        return Reason(topic="data", choice="stream of rows", why=why)
    if not data.tokenized:
        why = f"truncated to {recipe.data.max_length} tokens each when the run starts"
        return Reason(topic="data", choice=f"{data.num_train:,} rows", why=why)
    share = (data.num_trainable_tokens or 0) / max(1, data.num_train_tokens or 0)
    why = f"{data.num_train_tokens:,} tokens, {share:.0%} in the loss; longest row {data.longest_tokens}"
    if recipe.method.spec.classifies == "text":
        why = f"{data.num_train_tokens:,} tokens, each answer scored at its end; longest row {data.longest_tokens}"
    if recipe.method.spec.classifies == "steps":
        num_steps = data.num_trainable_tokens or 0
        why = f"{data.num_train_tokens:,} tokens, {num_steps:,} labeled steps; longest row {data.longest_tokens}"
    if recipe.method.spec.classifies == "classes":
        why = f"{data.num_train_tokens:,} tokens, each text scored at its end; longest row {data.longest_tokens}"
    if data.format == "prompts":
        why = f"{data.num_train_tokens:,} tokens of prompts; longest prompt {data.longest_tokens}"
    cut = recipe.data.max_length
    counts = {f"truncated to {cut}": data.num_truncated, f"split at {cut}": data.num_split, "skipped": data.num_dropped}
    why += "".join(f"; {number:,} {what}" for what, number in counts.items() if number)
    if data.truncated_share > MUCH_TRUNCATED:
        why += f": {data.truncated_share:.0%} of all rows are truncated; raise data.max_length or shorten them"
    rows = "rows"
    if recipe.data.curriculum is not None:
        why += "; shortest first in every epoch"
    if recipe.data.curriculum_column is not None:
        why += f"; by {recipe.data.curriculum_column}, ascending, in every epoch"
    if recipe.data.packing:
        rows, filled = "packed sequences", (data.num_train_tokens or 0) / (data.num_train * cut)
        why += f"; packing efficiency {filled:.1%}"
    return Reason(topic="data", choice=f"{data.num_train:,} {rows}", why=why)


def _picture_reason(adapter: Adapter, data: DataFacts, tower: Tower | None) -> Reason:
    is_trained = adapter.training_of("vision_tower") != "frozen"
    why = f"encoded by the {'trained' if is_trained else 'frozen'} tower in each micro-batch"
    if tower is None:
        why += "; its memory is unknown for this model type and not in the estimate"
    elif not counts(tower, adapter):
        why += "; the memory of its backward pass is unknown for this model type and not in the estimate"
    elif data.most_pixel_values is not None:
        why += f", {data.most_pixel_values / tower.values_per_patch:,.0f} patches per row at most"
    elif not data.tokenized:
        why += "; until rows are tokenized, estimated as many as fit in a row"
    if not data.num_pictures:
        return Reason(topic="pictures", choice="in the rows", why=why)
    mean = (data.num_picture_tokens or 0) / data.num_pictures
    return Reason(topic="pictures", choice=f"{data.num_pictures:,}, {mean:,.0f} tokens each on average", why=why)


def _audio_reason(data: DataFacts) -> Reason:
    why = "encoded by the frozen tower in each micro-batch; its activations are not in the estimate"
    if not data.num_clips:
        return Reason(topic="audio", choice="in the rows", why=why)
    mean = (data.num_clip_tokens or 0) / data.num_clips
    return Reason(topic="audio", choice=f"{data.num_clips:,} clips, {mean:,.0f} tokens each on average", why=why)


def _mixture_reasons(recipe: Recipe, data: DataFacts) -> Iterator[Reason]:
    """Yield the share of each of several sources in the training."""
    if len(data.sources) < 2:
        return
    if recipe.data.streaming:
        yield _stream_mixture_reason(recipe.data, data)
        return
    total = sum(source.size for source in data.sources)
    choice = ", ".join(f"{source.name} {source.size / total:.1%}" for source in data.sources)
    measured = "of the tokens" if data.tokenized else "of the text, before tokenization"
    section = recipe.data
    weights = [source.weight for source in section.sources]
    why = "every row used once"
    if weights[0] is not None:
        is_first = section.stopping_strategy == "first_exhausted"
        why = f"weights {' : '.join(f'{weight:g}' for weight in weights)} by {section.weight_by}; "
        why += "no row repeated" if is_first else "small sources repeated"
    rows = ", ".join(f"{source.num_rows:,}" for source in data.sources)
    yield Reason(topic="mixture", choice=f"{choice} {measured}", why=f"{why}; {rows} rows")


def _stream_mixture_reason(section: DataSection, data: DataFacts) -> Reason:
    weights = [source.weight for source in section.sources if source.weight is not None]
    names = [source.name for source in data.sources]
    if not weights:
        order = "interleaved" if section.mixing == "interleave" else "concatenated"
        return Reason(topic="mixture", choice=", ".join(names), why=f"{order}; sizes unknown")
    shares = (f"{name} {weight / sum(weights):.1%}" for name, weight in zip(names, weights, strict=True))
    return Reason(topic="mixture", choice=f"{', '.join(shares)} of the rows", why="until a sampled stream is exhausted")


def steps_reason(recipe: Recipe, data: DataFacts, schedule: Schedule | None) -> Reason:
    """Return the reason for the number of steps."""
    train, batch, trains_on = recipe.train, recipe.train.global_batch_size, recipe.method.spec.trains_on
    if schedule is None:
        why = f"{data.num_train:,} rows to be packed first"
        return Reason(topic="steps", choice="known after tokenization", why=why)
    if train.max_steps is None:
        answers = f" x {recipe.method.num_generations} answers" if is_rewarded(recipe.method) else ""
        why = f"{train.num_epochs or 1:g} x {data.num_train:,}{answers} / {batch} per step"
    elif schedule.steps_per_epoch is None:
        why = "set by the recipe"
    else:
        why = f"set by the recipe; {train.max_steps / schedule.steps_per_epoch:.3g} epochs"
    missing = -data.num_train % batch
    if trains_on in ("pairs", "answers") and missing:
        why += f"; {missing} {trains_on} from the start complete the last step of an epoch"
    if schedule.eval_steps is not None:
        why += f"; evaluation on {data.num_eval:,} every {schedule.eval_steps} steps"
    if schedule.num_steps == schedule.warmup_steps == 1 and train.lr_scheduler_type != "constant":
        why += "; warm-up begins at learning rate 0: the weights do not change unless train.warmup_steps is 0"
    choice = f"{schedule.num_steps}, {schedule.warmup_steps} of warmup"
    if train.early_stopping_patience is None:
        return Reason(topic="steps", choice=choice, why=why)
    metric, _ = metric_of(recipe, data)
    least = f" by more than {train.early_stopping_threshold:g}" if train.early_stopping_threshold else ""
    num = train.early_stopping_patience
    evaluations = "an evaluation does" if num == 1 else f"{num} consecutive evaluations do"
    why += f"; stops early once {evaluations} not improve {metric}{least}"
    return Reason(topic="steps", choice=f"at most {choice}", why=why)


def speed_reason(section: DataSection, data: DataFacts, speed: Speed | None) -> Reason:
    """Return the reason for the expected speed."""
    if speed is None:
        why = "FLOPs are known only for decoders with attention in every layer"
        return Reason(topic="speed", choice="throughput unknown", why=why)
    at_most = not data.has_lengths and not section.packing
    rows = f"; every row counted as {section.max_length} tokens" if at_most and speed.seconds is not None else ""
    return Reason(topic="speed", choice=speed.words(at_most=at_most), why=f"{speed.basis}{rows}")


def communication_reasons(speed: Speed | None) -> Iterator[Reason]:
    """Yield the reasons about communication, and the cost of failures."""
    if speed is not None and speed.communication is not None:
        yield Reason(topic="communication", choice=speed.communication, why="sent by each device")
    if speed is not None and speed.goodput is not None:
        yield Reason(topic="failures", choice=speed.goodput.words(), why="included in time and cost above")


def saving_reasons(
    recipe: Recipe, layout: Layout, schedule: Schedule | None, saving: Saving, hardware: Hardware
) -> Iterator[Reason]:
    """Yield the reasons about checkpoints: how they are written, and their room on the disk."""
    if layout.why_not_resumed is not None:
        yield Reason(topic="checkpoints", choice="none", why=layout.why_not_resumed)
    else:
        yield _checkpoints_reason(layout, schedule, saving)
    free = "" if hardware.disk_free_bytes is None else f"; {gib(hardware.disk_free_bytes)} free"
    choice = f"{gib(saving.run_bytes or 0)} at most"
    yield Reason(topic="disk space", choice=choice, why=_words(recipe, layout, saving) + free)


def _checkpoints_reason(layout: Layout, schedule: Schedule | None, saving: Saving) -> Reason:
    size = saving.checkpoint_bytes or 0
    often = "" if schedule is None else f"every {schedule.save_steps:,} steps, "
    if "nvme" in (layout.offload_param_device, layout.offload_optimizer_device):
        why = "training waits: states offloaded to disk are read back and written"
    elif saving.in_background:
        why = f"written in the background; training waits for a copy, {gib(copied_bytes(size, layout))} of host memory"
        why += " per process"
    elif divides_files(layout):
        why = "training waits: a copy to write from would not fit in host memory"
    else:
        why = "training waits: one process writes everything"
    return Reason(topic="checkpoints", choice=f"{often}{gib(size)} each", why=why)


def _words(recipe: Recipe, layout: Layout, saving: Saving) -> str:
    """Describe the largest use of the disk."""
    parts = ["the result", "the rows"]
    if layout.why_not_resumed is None:
        best = ["best"] if saving.metric_for_best_model else []
        parts = [f"newest {recipe.train.save_total_limit} checkpoints", *best, "the one being written", *parts]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def check_disk(plan: Plan, free_bytes: int, where: str) -> None:
    """Refuse a run that would fill the disk.

    Args:
        plan: The plan.
        free_bytes: What is free where the run will lie.
        where: Its folder, or the one that it will be in.

    Raises:
        PlanError: There is too little room.
    """
    recipe, needed = plan.recipe, plan.saving.run_bytes
    if needed is None or needed <= free_bytes:
        return
    ways = [f"free {gib(needed - free_bytes)} there", "set output.dir to another disk"]
    if recipe.train.save_total_limit > 2:
        ways.append("set train.save_total_limit=2")
    if isinstance(recipe.adapter, FullAdapter):
        ways.append("train an adapter with small checkpoints (adapter.type=lora)")
    words = _words(recipe, plan.layout, plan.saving)
    raise PlanError(
        f"output.dir: the run needs up to {gib(needed)} on the disk of {where} ({words}; a checkpoint "
        f"needs {gib(plan.saving.checkpoint_bytes or 0)}), but only {gib(free_bytes)} are free",
        hint=", or ".join(ways),
        needed_bytes=needed,
        limit_bytes=free_bytes,
    )


CHECKED_PARAMS = 70_600_000_000
"""Parameters of the largest model of which a step was traced (tests/estimates/grid.py, grid_shards.py)."""

CHECKED_LENGTH = 8192
"""Tokens of the longest row of such a step."""


def why_unchecked(model: ModelFacts, max_length: int, layout: Layout) -> str | None:
    """Return what of a run lies outside of what was traced, with the range that was; None where nothing does.

    Args:
        model: The model.
        max_length: Tokens of the longest row.
        layout: The layout.
    """
    outside = ["NeMo Automodel, by formulas alone"] if layout.engine == "automodel" else []
    if not is_traced(model) and model.deviations is None:
        outside.append(f"{model.model_type} (verified: {', '.join(sorted(model_types().traced))})")
    if model.num_params > CHECKED_PARAMS:
        outside.append(f"{count(model.num_params)} parameters (verified: up to {count(CHECKED_PARAMS)})")
    if max_length > CHECKED_LENGTH:
        outside.append(f"rows of {max_length:,} tokens (verified: up to {CHECKED_LENGTH:,})")
    return f"memory estimate not verified for {' and '.join(outside)}" if outside else None
