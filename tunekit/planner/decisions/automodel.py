"""Recipes that NeMo Automodel cannot train, or is not known to train as tunekit does, each with the remedy.

Fields that change a run are allowed by name: others are refused until a test shows that Automodel honours them.
"""

from collections.abc import Iterator

from tunekit.estimates.facts import Hardware, ModelFacts
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.section import Section

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
        "engine", "strategy", "num_processes", "dp_shard_size", "ep_size", "pp_size", "max_restarts",
        "timeout_seconds", "grace_seconds",
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
    "parallel.reshard_after_forward": (True,),
    "parallel.offload_param_device": ("none",),
    "parallel.offload_optimizer_device": ("none",),
    "output.sample_prompts": ([],),
}
"""Values of other fields that change nothing."""

TRAINER_ARGS = {"adam_beta1", "adam_beta2", "adam_epsilon", "router_aux_loss_coef"}
"""Arguments of TRL's config that are honoured."""

OPTIMS = ("adamw_torch", "adamw_torch_fused")

EXPERT_FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_moe")
"""Families whose experts Automodel divides, as far as losses were compared with Transformers' (0.7.0, `ep_size` of 2).
Its classes of other families are untested, and that of gpt-oss needs flex attention."""

PIPELINE_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", *EXPERT_FAMILIES)
"""Families whose layers Automodel divides into stages, compared in the same way."""


def faults(recipe: Recipe, hardware: Hardware, model: ModelFacts) -> Iterator[tuple[str, str | None]]:
    """Yield what Automodel cannot do of a recipe that asks for it, as problems with their remedies."""
    parallel = recipe.parallel
    if parallel.engine != "automodel":
        if parallel.pp_size not in (None, 1):
            yield "parallel.pp_size: Accelerate has no pipeline parallelism", f"set {ENGINE}, or unset it"
        return
    if hardware.automodel is False:
        yield f"parallel.engine: nemo-automodel {VERSION} is not installed", INSTALL
    if recipe.method.type != "sft":
        yield f"{ENGINE}: supports method.type=sft alone, not {recipe.method.type}", "use parallel.engine=accelerate"
    elif not isinstance(recipe.adapter, FullAdapter):
        hint = "set adapter.type=full, or parallel.engine=accelerate"
        yield f"{ENGINE}: adapter.type {recipe.adapter.type} is untested", hint
    else:
        yield from _field_faults(recipe)
    yield from _model_faults(recipe, model)


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


def _model_faults(recipe: Recipe, model: ModelFacts) -> Iterator[tuple[str, str | None]]:
    other = "use parallel.engine=accelerate"
    if model.published_as is not None:
        yield f"{ENGINE}: the weights of {model.path} are quantized", other
    if model.is_multimodal:
        yield f"{ENGINE}: {model.path} is no text model", other
    if model.origin is not None and model.origin.adapter is not None:
        yield f"{ENGINE}: cannot merge the adapter of {model.origin.name}", "export it merged, and start from that"
    if recipe.method.trainer_args.get("router_aux_loss_coef", model.router_aux_loss_coef):
        key = "method.trainer_args.router_aux_loss_coef"
        yield f"{key}: NeMo Automodel computes the routers' auxiliary loss in another way", f"set {key}=0"
    if (recipe.parallel.pp_size or 1) > 1:
        if model.has_tied_head:
            yield f"parallel.pp_size: the head of {model.path} shares the embedding's weights", f"unset it, or {other}"
        elif model.model_type not in PIPELINE_FAMILIES:
            yield f"parallel.pp_size: pipeline stages of {model.model_type} are untested", "unset it"
    if (recipe.parallel.ep_size or 1) > 1 and model.model_type not in EXPERT_FAMILIES:
        hint = f"unset it, or {other}; tested: {', '.join(EXPERT_FAMILIES)}"
        yield f"parallel.ep_size: divided experts of {model.model_type} are untested with {ENGINE}", hint
