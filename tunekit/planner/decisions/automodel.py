"""Recipes that NeMo Automodel cannot train, or is not known to train as tunekit does, each with the remedy.

Fields that change a run are allowed by name: others are refused until a test shows that Automodel honours them.
"""

from collections.abc import Iterator

from tunekit.estimates.facts import Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.planner.decisions import backends
from tunekit.planner.decisions.candidates import Setting, divisors
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.section import ParallelSection, Section

VERSION = "0.7.0"
"""Version of nemo-automodel whose private names tunekit replaces."""

INSTALL = f"pip install 'tunekit[automodel]' && pip install --no-deps nemo-automodel=={VERSION}"
"""Command that installs it: with its dependencies it would bring an older Transformers."""

ENGINE = "parallel.engine=automodel"

HONOURED = {
    "model": {"path", "revision", "dtype", "attn_implementation", "chat_template"},
    "data": {
        "train", "eval", "format", "loss_on", "max_length", "too_long", "columns", "system", "prompt_style", "replace",
        "max_bad_rows", "eval_size", "weight_by", "stopping_strategy", "mixing", "shuffle",
    },
    "method": {"type", "trainer_args"},
    "adapter": {"type"},
    "train": {
        "num_epochs", "max_steps", "global_batch_size", "micro_batch_size", "learning_rate", "lr_scheduler_type",
        "warmup_steps", "optim", "weight_decay", "max_grad_norm", "gradient_checkpointing", "seed", "logging_steps",
        "eval_steps", "save_steps", "save_total_limit", "metric_for_best_model", "greater_is_better",
    },
    "parallel": {
        "engine", "strategy", "num_processes", "dp_shard_size", "ep_size", "pp_size", "reshard_after_forward",
        "max_restarts", "timeout_seconds", "grace_seconds",
    },
    "output": {"dir", "name", "report_to"},
}  # fmt: skip
"""Fields that Automodel honours, or that are done before it starts, by section."""

VALUES = {
    "model.kernels": ("torch",),
    "data.padding_free": (False,),
    "train.activation_offloading": (False,),
    "train.tiled_mlp": (False,),
    "train.torch_compile": (False,),
    "parallel.offload_param_device": ("none",),
    "parallel.offload_optimizer_device": ("none",),
    "output.sample_prompts": ([],),
}
"""Values of other fields that change nothing."""

TRAINER_ARGS = {"adam_beta1", "adam_beta2", "adam_epsilon", "router_aux_loss_coef"}
"""Arguments of TRL's config that are honoured."""

ROUTER_ARG = "method.trainer_args.router_aux_loss_coef"
"""Key of the coefficient of the routers' auxiliary loss."""

OPTIMS = ("adamw_torch", "adamw_torch_fused")


def faults(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Iterator[tuple[str, str | None]]:
    """Yield what Automodel cannot do of a recipe that asks for it, as problems with their remedies."""
    if recipe.parallel.engine != "automodel":
        if recipe.parallel.pp_size not in (None, 1):
            yield "parallel.pp_size: Accelerate runs no pipeline", f"set {ENGINE}, or unset it"
        return
    if hardware.automodel is False:
        yield f"parallel.engine: nemo-automodel {VERSION} is not installed", INSTALL
    yield from recipe_faults(recipe, model)
    if adds_router_loss(recipe, model):
        yield f"{ROUTER_ARG}: NeMo Automodel computes the routers' auxiliary loss in another way", f"set {ROUTER_ARG}=0"
    yield from _size_faults(recipe.parallel, hardware.num_accelerators, model)


def recipe_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield what Automodel cannot do of a recipe on any machine."""
    if recipe.method.type != "sft":
        yield f"{ENGINE}: supports method.type=sft alone, not {recipe.method.type}", "use parallel.engine=accelerate"
    elif not isinstance(recipe.adapter, FullAdapter):
        hint = "set adapter.type=full, or parallel.engine=accelerate"
        yield f"{ENGINE}: adapter.type {recipe.adapter.type} is untested", hint
    else:
        yield from _field_faults(recipe)
    yield from _model_faults(recipe, model)


def adds_router_loss(recipe: Recipe, model: ModelFacts) -> bool:
    """Return whether a recipe trains routers by their auxiliary loss, which Automodel would compute otherwise."""
    return bool(recipe.method.trainer_args.get("router_aux_loss_coef", model.router_aux_loss_coef))


def _field_faults(recipe: Recipe) -> Iterator[tuple[str, str]]:
    remedy = "unset it, or use parallel.engine=accelerate"
    for name in type(recipe).model_fields:
        section = vars(recipe)[name]
        for field, value in _settings(section):
            key = f"{name}.{field}"
            if field not in HONOURED[name] and value not in VALUES.get(key, ()):
                yield f"{key}: untested with {ENGINE}", remedy
    for name in sorted(set(recipe.method.trainer_args) - TRAINER_ARGS):
        yield f"method.trainer_args.{name}: untested with {ENGINE}", remedy
    if recipe.parallel.strategy not in ("auto", "fsdp2"):
        yield f"parallel.strategy: {ENGINE} shards by fsdp2, not {recipe.parallel.strategy}", "unset it"
    if recipe.train.optimizer not in OPTIMS:
        yield f"train.optim: {recipe.train.optimizer} is untested with {ENGINE}", f"use train.optim={OPTIMS[1]}"


def _settings(section: Section) -> Iterator[tuple[str, object]]:
    """Yield the fields of a section that are not as by default."""
    for name, field in type(section).model_fields.items():
        value = vars(section)[name]
        if not field.is_required() and value != field.get_default(call_default_factory=True):
            yield name, value


def _model_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str]]:
    remedy = "use parallel.engine=accelerate"
    if model.published_as is not None:
        yield f"{ENGINE}: the weights of {model.path} are quantized", remedy
    if model.is_multimodal:
        yield f"{ENGINE}: {model.path} is no text model", remedy
    if model.origin is not None and model.origin.adapter is not None:
        yield f"{ENGINE}: cannot merge the adapter of {model.origin.name}", "export it merged, and start from that"


def _size_faults(requested: ParallelSection, num: int, model: ModelFacts) -> Iterator[tuple[str, str | None]]:
    """Yield sizes that are not known to run, or that do not multiply to the devices."""
    pp_size, shards = requested.pp_size or 1, requested.dp_shard_size
    devices = requested.num_processes or num
    if pp_size > model.num_layers:
        problem = f"parallel.pp_size: {pp_size} stages, but {model.path} has {model.num_layers} layers"
        yield problem, f"set it to {model.num_layers} or less"
    if pp_size > 1 and (why := backends.why_no_stages(model)) is not None:
        yield f"parallel.pp_size: {why}", "unset it"
    if devices % pp_size:
        numbers = ", ".join(map(str, sorted(divisors(devices))))
        yield f"parallel.pp_size: {pp_size} does not divide the {devices} devices", f"use one of {numbers}"
    if shards is not None and (shards * pp_size != devices if requested.pp_size else devices % shards):
        sizes = f"parallel.dp_shard_size {shards}" + (f" x parallel.pp_size {pp_size}" if requested.pp_size else "")
        problem = f"{sizes}: NeMo Automodel uses all {devices} devices, as stages of equally many"
        yield problem, f"unset parallel.dp_shard_size, which is then {max(1, devices // pp_size)}"
    ep_size, stage = requested.ep_size or 1, shards or devices // pp_size
    if ep_size > 1 and model.expert_shapes and (why := backends.why_not_divided_by_automodel(model)) is not None:
        yield f"parallel.ep_size: {why}", "unset it, or use parallel.engine=accelerate"
    if stage % ep_size:
        yield f"parallel.ep_size: {ep_size} does not divide the {stage} devices of a stage", "unset it"


def refusals(setting: Setting, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield pipelines that a model or a batch is not divided into."""
    if setting.dtype == "float16":
        yield "NeMo Automodel scales no losses for float16", "use model.dtype=bfloat16"
    if layout.pp_size == 1:
        return
    if (why_not := backends.why_no_stages(setting.model)) is not None:
        yield why_not, "use parallel.pp_size=1"
    train, groups = setting.recipe.train, layout.num_batches
    least = groups * layout.pp_size * (train.micro_batch_size or 1)
    if train.global_batch_size < least:
        number = train.global_batch_size // (groups * (train.micro_batch_size or 1))
        why = f"{layout.pp_size} stages need as many micro-batches, but a step has {number} for each"
        smaller = "" if train.micro_batch_size in (None, 1) else ", or unset train.micro_batch_size"
        multiple = "" if groups == 1 else f"a multiple of {groups}, "
        yield why, f"set train.global_batch_size to {multiple}{least:,} or more{smaller}"
