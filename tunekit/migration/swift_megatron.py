"""Arguments of ms-swift's Megatron (`megatron sft`, `pt` and `rlhf`) -> a recipe, besides those of `swift` itself.

Megatron has names of its own for the schedule, the weights and the modules of a model. Its batch is that of a step,
whatever the number of devices.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
from tunekit.estimates.models.model_config import known_models
from tunekit.migration import images, megatron, swift
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, UnfitError, carried, names, number, text, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.migration.table import tool_table
from tunekit.recipe.methods import METHODS

_GLOBAL_BATCH = 16
"""ms-swift's default."""

_MODULES = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc2": ["down_proj"],
    "word_embeddings": ["embed_tokens"],
    "output_layer": ["lm_head"],
}
"""Modules of Megatron's models, and what they are in transformers' of the Llama and Qwen families."""


def is_megatron(draft: Draft) -> bool:
    """Return whether a configuration is of ms-swift's Megatron: by its command, else by its keys."""
    if draft.original.program is not None:
        return draft.original.program == "megatron"
    marks = {*tool_table("ms-swift-megatron").marks.split(), *megatron.SIZES}
    return not marks.isdisjoint(draft.original.values)


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
        words = "ms-swift skips the last rows where they do not fill a batch; tunekit trains on them"
        draft.differ("num_train_epochs", epochs, words)
    if draft.get("global_batch_size") is None:
        draft.assume({"train.global_batch_size": _GLOBAL_BATCH})
    if draft.has_adapter and _adapts_fused(draft):
        words = "Megatron adapts query, key and value together, with one LoRA A for the three, and so gate and up; "
        draft.differ("target_modules", draft.get("target_modules", "all-linear"), f"{words}PEFT adapts each separately")
    swift.assume_defaults(draft)
    _note_dropout(draft)
    megatron.settle_layout(draft)


def _note_dropout(draft: Draft) -> None:
    """Leave out an adapter's dropout where TRL disables it, and Megatron does not."""
    spec, dropout = METHODS[draft.method].spec, draft.values.get("adapter.dropout")
    if not dropout or not (spec.trains_on in ("pairs", "answers") or spec.disables_dropout):
        return
    words = f"ms-swift keeps the adapter's dropout of {dropout} in {draft.method}; TRL disables it"
    if draft.get("lora_dropout") is None:
        draft.differ("lora_dropout", dropout, words)
    hf.leave_out_dropout(draft, Fate("different", words))


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
