"""Megatron-Core's settings -> a recipe, from ms-swift (`megatron sft`, `pt`, `rlhf`) and LLaMA-Factory (USE_MCA=1).

A layout changes no result, so the recipe has what an engine of tunekit can have of it, and the plan decides the rest:
pipelines are NeMo Automodel's, experts and sequences are divided by Accelerate as well. The batch of ms-swift is that
of a step, whatever the number of devices; LLaMA-Factory's counts the devices that share no row.
"""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
from tunekit.estimates.models.model_config import known_models, num_experts_of, text_config
from tunekit.migration import images, optimizers, swift
from tunekit.migration.draft import Draft, UnfitError, carried, is_off, lower, names, number, reason, text, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.table import tool_table
from tunekit.recipe.methods import METHODS

_TENSOR, _PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_EXPERT, _CONTEXT = "expert_model_parallel_size", "context_parallel_size"
SIZES = (_TENSOR, _PIPELINE, _EXPERT, _CONTEXT)
"""Keys of a layout."""

_GLOBAL_BATCH = 16
"""ms-swift's default."""

_ATTENTION = {"linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_proj": ["o_proj"]}
_MODULES = {
    **_ATTENTION,
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
    "word_embeddings": ["embed_tokens"],
    "output_layer": ["lm_head"],
}
"""Modules of Megatron's models, and what they are in transformers' of the Llama and Qwen families."""


def is_of_swift(draft: Draft) -> bool:
    """Return whether a configuration is of ms-swift's Megatron: by its command, else by its keys."""
    if draft.original.program is not None:
        return draft.original.program == "megatron"
    marks = {*tool_table("ms-swift-megatron").marks.split(), *SIZES}
    return not marks.isdisjoint(draft.original.values)


def is_of_llama_factory(draft: Draft) -> bool:
    """Return whether LLaMA-Factory trains with Megatron: a variable says it, or keys that it has only then."""
    switches = (draft.get("use_mca", False), draft.original.environment.get("USE_MCA", False))
    return any(str(switch).lower() in ("true", "1", "y") for switch in switches) or any(map(draft.get, SIZES))


def devices_per_row(draft: Draft) -> int:
    """Return the devices that share a row, and so count once in the batch of a step."""
    return prod(_size(draft, key) for key in (_TENSOR, _PIPELINE, _CONTEXT))


def _size(draft: Draft, key: str) -> int:
    value = draft.get(key)
    return max(1, value) if isinstance(value, int) else 1


# ms-swift


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    # Where keys alone say it, too.
    draft.original.program = "megatron"
    swift.read_environment(draft)
    if draft.get("model") is None and (key := _weights_key(draft)) is not None:
        draft.put("model.path", _converted_from(draft, text(draft.get(key))), key)
    draft.put("train.global_batch_size", _batch(draft), "global_batch_size")
    swift.prepare_training(draft, default_tuner="full")


def _batch(draft: Draft) -> Any:
    return draft.get("global_batch_size", _GLOBAL_BATCH)


def _weights_key(draft: Draft) -> str | None:
    return next((key for key in ("mcore_model", "load") if draft.get(key) is not None), None)


def _converted_from(draft: Draft, folder: str) -> str:
    """Return the model that a folder of Megatron's weights was made of: as its args.json says it, else by its name."""
    arguments = Path(folder) / "args.json"
    if arguments.is_file():
        try:
            model = json.loads(arguments.read_text(encoding="utf-8")).get("model")
        except (ValueError, AttributeError):
            raise RecipeError(f"{arguments}: is not ms-swift's args.json", hint="set --model") from None
        if isinstance(model, str):
            return model
    name = Path(folder).name.removesuffix("-mcore")
    return next((model for model in known_models() if model.rpartition("/")[2] == name), name)


def finish(draft: Draft) -> None:
    """Record ms-swift's defaults for what the file does not set, and what looks wrong."""
    steps, epochs = draft.get("train_iters"), draft.get("num_train_epochs", draft.get("max_epochs"))
    if steps is None and epochs is None:
        draft.suspect("train_iters", "neither train_iters nor num_train_epochs: ms-swift does not start without one")
        draft.assume({"train.num_epochs": 1}, "the file sets no length")
    if "train.max_steps" not in draft.values:
        words = "ms-swift skips rows that do not fill the last batch of a step; tunekit trains on them"
        draft.differ("num_train_epochs", epochs, words)
    if draft.get("global_batch_size") is None:
        draft.assume({"train.global_batch_size": _GLOBAL_BATCH})
    if draft.has_adapter and _adapts_fused(draft):
        words = "Megatron adapts query, key and value together, with one LoRA A for the three, and so gate and up; "
        draft.differ("target_modules", draft.get("target_modules", "all-linear"), f"{words}PEFT adapts each separately")
    swift.assume_defaults(draft)
    settle_layout(draft)


def _adapts_fused(draft: Draft) -> bool:
    """Return whether an adapter is on layers that Megatron has fused."""
    targets = names(draft.get("target_modules", "all-linear"))
    return any(target in ("all-linear", "linear_qkv", "linear_fc1") for target in targets)


def batch(draft: Draft, entry: Entry) -> Fate:
    """The batch of a step, over all devices."""
    return carried("train.global_batch_size", whole(entry.value))


def steps(draft: Draft, entry: Entry) -> Fate:
    """Steps, which epochs go before unless rows are streamed."""
    if _counts_epochs(draft):
        return Fate("silent", "the epochs take precedence")
    return draft.carry(entry, "train.max_steps", whole(entry.value))


def epochs(draft: Draft, entry: Entry) -> Fate:
    """Epochs, by either name."""
    if _counts_epochs(draft):
        return draft.carry(entry, "train.num_epochs", number(entry.value))
    words = "a stream that ends earlier ends training in ms-swift; the recipe trains for train.max_steps"
    return Fate("different", words)


def _counts_epochs(draft: Draft) -> bool:
    has_epochs = any(draft.get(key) is not None for key in ("num_train_epochs", "max_epochs"))
    return has_epochs and not (truth(draft.get("streaming", False)) and draft.get("train_iters") is not None)


_STYLES = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "constant_with_warmup",
    "inverse-square-root": "inverse_sqrt",
}
"""Schedules of Megatron, and transformers' that compute the same."""


def _style(draft: Draft) -> str:
    return text(draft.get("lr_decay_style", "cosine"))


def decay(draft: Draft, entry: Entry) -> Fate:
    """The schedule of the learning rate."""
    style = _style(draft)
    if style not in _STYLES:
        raise UnfitError("set train.lr_scheduler_type to warmup_stable_decay with its lr_scheduler_kwargs")
    if style == "inverse-square-root" and not (draft.get("lr_warmup_iters") or draft.get("lr_warmup_fraction")):
        raise UnfitError("without warm-up it begins to fall at the first step, transformers' at step 10,000")
    return draft.carry(entry, "train.lr_scheduler_type", _STYLES[style])


def min_lr(draft: Draft, entry: Entry) -> Fate:
    """The learning rate that a cosine ends at, as a share of the highest."""
    least = number(entry.value)
    if not least or _style(draft) == "constant":
        return Fate("silent", "0 is the default" if not least else "only used with a schedule that decays")
    if _style(draft) != "cosine":
        raise UnfitError(f"with lr_decay_style {_style(draft)} the recipe ends at a learning rate of 0")
    rate = number(draft.get("lr", 1e-4 if draft.has_adapter else 1e-5))
    share = float(f"{least / rate:.6g}") if rate else 0.0
    draft.put("train.lr_scheduler_type", "cosine_with_min_lr", entry.key, "lr_decay_style")
    return draft.carry(entry, "method.trainer_args.lr_scheduler_kwargs", {"min_lr_rate": share})


def decay_steps(draft: Draft, entry: Entry) -> Fate:
    """The steps of the schedule: all."""
    if not _counts_epochs(draft) and entry.value == draft.get("train_iters"):
        return Fate("silent", "the schedule ends with the last step")
    raise UnfitError("the schedule ends with the last step")


def warmup(draft: Draft, entry: Entry) -> Fate:
    """Steps of warm-up, or a share of all, which goes before."""
    is_share = entry.key == "lr_warmup_fraction"
    if not is_share and draft.get("lr_warmup_fraction") is not None:
        return Fate("silent", "lr_warmup_fraction takes precedence")
    value = number(entry.value)
    if is_share and value >= 1:
        raise UnfitError(f"{value} is not below 1; use lr_warmup_iters for a number of steps")
    return draft.carry(entry, "train.warmup_steps", value)


def weights(draft: Draft, entry: Entry) -> Fate:
    """A folder of Megatron's own weights, of which the recipe has the model that they were made of."""
    if draft.get("model") is not None:
        words = f"Megatron's weights in {entry.value} are not read: the recipe starts from {draft.get('model')}"
        return Fate("different", words, "model.path")
    if entry.key != _weights_key(draft):
        return Fate("silent", f"{_weights_key(draft)} takes precedence")
    path = draft.values["model.path"]
    draft.suspect(entry.key, f"{entry.value} holds Megatron's weights; the recipe starts from {path}: check model.path")
    return carried("model.path", path)


def packing(draft: Draft, entry: Entry) -> Fate:
    """Packing, which counts packs and not rows into the batch of a step."""
    if truth(entry.value) and draft.method not in ("sft", "gkd"):
        size = draft.values["train.global_batch_size"]
        raise UnfitError(f"a step of {draft.method} takes {size} rows here, and {size} packs of rows in ms-swift")
    return swift.packing(draft, entry)


def divergence(draft: Draft, entry: Entry) -> Fate:
    """The term of KTO that estimates the divergence from the reference."""
    if draft.method != "kto" or truth(entry.value):
        return Fate("silent", "is the default" if draft.method == "kto" else "only used with kto")
    return Fate("different", "ms-swift leaves the divergence out of the loss; tunekit estimates it in each batch")


def targets(draft: Draft, entry: Entry) -> Fate:
    """The modules of an adapter, by Megatron's names."""
    modules = names(entry.value)
    if "all-linear" in modules:
        if modules != ["all-linear"]:
            raise UnfitError(f"{', '.join(modules)}: adapter.target_modules takes all-linear alone, or names")
        return draft.carry(entry, "adapter.target_modules", "all-linear")
    return draft.carry(entry, "adapter.target_modules", _renamed(modules))


def beside_adapter(draft: Draft, entry: Entry) -> Fate:
    """Modules that are trained beside an adapter, by Megatron's names."""
    return images.trained_modules(draft, replace(entry, value=_renamed(names(entry.value))))


def _renamed(modules: list[str]) -> list[str]:
    renamed = [name for module in modules for name in _MODULES.get(module, [module])]
    unknown = [name for name in renamed if name.startswith("all-") or name.startswith("linear_")]
    if unknown:
        raise UnfitError(f"{', '.join(unknown)}: name the modules of transformers' model")
    return renamed


# Settings of both


def size(draft: Draft, entry: Entry) -> Fate:
    """A size of the layout, of which `settle_layout` says more."""
    return Fate("silent", "is off") if whole(entry.value) == 1 else Fate("decided", reason("devices"))


def settle_layout(draft: Draft) -> None:
    """Let the recipe have what tunekit's engines can have of a layout, and leave the rest to the plan."""
    sizes = {key: _size(draft, key) for key in SIZES if _size(draft, key) > 1}
    for key in sizes:
        obstacle = _obstacle(draft, key, sizes)
        if obstacle is not None:
            draft.fates[key] = Fate("decided", f"{obstacle}; {reason('devices')}")
            continue
        if key == _PIPELINE:
            draft.put("parallel.engine", "automodel", key)
        target = f"parallel.{_FIELDS[key]}"
        draft.put(target, sizes[key], key)
        draft.fates[key] = carried(target, sizes[key])
    if "parallel.engine" in draft.values:
        words = carried("parallel.engine", "automodel").words
        draft.fates[_PIPELINE] = Fate("carried", f"{draft.fates[_PIPELINE].words}, {words}")


_FIELDS = {_PIPELINE: "pp_size", _EXPERT: "ep_size", _CONTEXT: "cp_size"}
"""Sizes that a recipe takes over, with their fields. Tensors it leaves to fsdp2, which shards them where needed."""


def _obstacle(draft: Draft, key: str, sizes: dict[str, int]) -> str | None:
    """Return why a size is not the recipe's: no engine has it with the method, the adapter, the rows or other sizes."""
    has_pipeline = _PIPELINE in sizes and _why_no_pipeline(draft) is None
    if key == _TENSOR:
        return "fsdp2 shards the weights of each layer, which parallel.tp_size splits"
    if key == _PIPELINE:
        return _why_no_pipeline(draft)
    if _has_media(draft):
        return "not with rows that have images, videos or audio"
    if draft.method != "sft":
        return f"only sft divides experts and rows, not {draft.method}"
    if key == _EXPERT:
        return _why_no_experts(draft)
    if has_pipeline or _EXPERT in sizes:
        return "parallel.cp_size is on its own"
    return "parallel.cp_size trains without packing" if draft.values.get("data.packing") else None


def _why_no_pipeline(draft: Draft) -> str | None:
    """Return why a run cannot be a pipeline of NeMo Automodel's; None if it can."""
    if draft.method != "sft" or draft.has_adapter:
        return "parallel.engine=automodel, which has pipelines, trains in full by sft"
    if draft.values.get("data.packing"):
        return "parallel.engine=automodel, which has pipelines, trains without packing"
    return "parallel.engine=automodel, which has pipelines, trains on text" if _has_media(draft) else None


def _why_no_experts(draft: Draft) -> str | None:
    """Return why experts cannot be divided; None if they can."""
    if not draft.has_adapter:
        return None
    modules = draft.values.get("adapter.target_modules", "all-linear")
    of_attention = {name for parts in _ATTENTION.values() for name in parts}
    if draft.values["adapter.type"] == "lora" and isinstance(modules, list) and {*modules} <= of_attention:
        return None
    return "parallel.ep_size takes LoRA on attention alone"


def _has_media(draft: Draft) -> bool:
    """Return whether rows have more than text, as far as a configuration says it."""
    return draft.has_images or draft.has_audio or draft.has_videos or images.family(draft) is not None


def router_loss(draft: Draft, entry: Entry) -> Fate:
    """The loss that balances the load of experts, of each layer in Megatron and of all together in transformers."""
    value = entry.value[0] if isinstance(entry.value, list) and len(entry.value) == 1 else entry.value
    coefficient = number(value)
    if not coefficient or draft.get("moe_router_load_balancing_type") == "none":
        return Fate("silent", "is off")
    if not METHODS[draft.method].spec.adds_router_loss:
        raise UnfitError(f"unsupported for {draft.method}")
    fate = draft.carry(entry, ROUTER_ARG, coefficient)
    return Fate("different", f"{fate.words}; {_ROUTER_LOSS}")


def assume_router_loss(draft: Draft) -> None:
    """Record the coefficient of that loss that LLaMA-Factory's trainer takes from the model's configuration."""
    facts = known_models().get(str(draft.values.get("model.path")))
    config = {} if facts is None else text_config(facts.config)
    if draft.get("moe_aux_loss_coeff") is not None or not num_experts_of(config):
        return
    coefficient = config.get("router_aux_loss_coef")
    if coefficient is not None and METHODS[draft.method].spec.adds_router_loss:
        draft.assume({ROUTER_ARG: coefficient}, "Megatron takes it from the model's configuration")
    words = f"the default is the model's router_aux_loss_coef; {_ROUTER_LOSS}"
    draft.differ("moe_aux_loss_coeff", coefficient, words)


ROUTER_ARG = "method.trainer_args.router_aux_loss_coef"
_ROUTER_LOSS = "Megatron adds the loss of every layer, divided by the experts per token; transformers one of all layers"


def balancing(draft: Draft, entry: Entry) -> Fate:
    """The kind of that loss."""
    if is_off(draft.get("moe_aux_loss_coeff", 0)) or text(entry.value) in ("aux_loss", "none"):
        return Fate("silent", "sets moe_aux_loss_coeff's loss")
    raise UnfitError(f"{entry.value}: transformers has aux_loss")


def capacity(draft: Draft, entry: Entry) -> Fate:
    """The tokens that an expert takes at most."""
    if number(entry.value) <= 0:
        return Fate("silent", "is off")
    return Fate("different", "Megatron drops tokens beyond the capacity of an expert; tunekit drops none")


def fp8(draft: Draft, entry: Entry) -> Fate:
    """Linear layers in 8-bit floating point, with a scale of Megatron's kind."""
    if is_off(entry.value):
        return Fate("silent", "is off")
    kind = text(draft.get("fp8_recipe", "delayed"))
    if draft.has_adapter:
        return Fate("different", f"Megatron computes in FP8 ({kind}); the recipe in bfloat16: adapters train in it")
    fate = draft.carry(entry, "train.fp8", True)
    return Fate("different", f"{fate.words}; Megatron scales by {kind}, tunekit as torchao")


def token_loss(draft: Draft, entry: Entry) -> Fate:
    """The average over the tokens of a step, or of those of each micro-batch."""
    if draft.method != "sft" or truth(entry.value):
        words = "the loss is averaged over the tokens of a step" if draft.method == "sft" else "only used with sft"
        return Fate("silent", words)
    return Fate("different", MICRO_BATCHES)


MICRO_BATCHES = "Megatron averages the loss of each micro-batch, then these; tunekit averages over the tokens of a step"
"""The loss of Megatron without `calculate_per_token_loss`."""


def state_dtype(draft: Draft, entry: Entry) -> Fate:
    """The type of gradients or of a state of the optimizer."""
    if lower(entry.value) == "fp32":
        return Fate("silent", "is the default")
    what = {"main_grads_dtype": "gradients", "main_params_dtype": "trained weights"}.get(entry.key, "optimizer states")
    return Fate("different", f"{what} are {lower(entry.value)} in Megatron; float32 in tunekit", "train.optim")


def optimizer(draft: Draft, entry: Entry) -> Fate:
    """An optimizer of Megatron."""
    name = lower(entry.value)
    if name == "adam":
        return Fate("silent", "AdamW is the default")
    if name not in ("muon", "dist_muon"):
        raise UnfitError(f"{name}: see `tunekit explain train.optim`")
    if draft.get("muon_lr") is not None:
        raise UnfitError("muon_lr: in tunekit Muon has AdamW's learning rate")
    fate = optimizers.named(draft, replace(entry, value="muon"))
    own = "Megatron scales Muon's updates by sqrt(max(rows, columns)), tunekit by 0.2 of it"
    return Fate("different", f"{fate.words}; {own}", "train.learning_rate")
