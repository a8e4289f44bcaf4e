"""LLaMA-Factory's v1 YAML -> a recipe: parts of it are plugins, each a section with a name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, UnfitError, carried, lower, number, reason, text, whole
from tunekit.migration.original import Entry, read_mapping
from tunekit.migration.report import Fate

_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt"}
"""Converters of rows, and ours."""


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    _set_batch(draft)
    kind = draft.get("peft_config.name")
    keys = ("peft_config.name", "quant_config.quantization_bit")
    if kind == "lora":
        hf.put_quantized(draft, draft.get("quant_config.quantization_bit"), *keys)
    else:
        draft.put("adapter.type", "full", *keys)
    for target, key in (("data.train", "train_dataset"), ("data.eval", "eval_dataset")):
        hf.put_sources(draft, target, list(_sources(draft, key)), key)


def _set_batch(draft: Draft) -> None:
    """Let the recipe say the batch of a step, which is that of a micro-batch on each device where nothing is said."""
    micro, total = draft.get("micro_batch_size", 1), draft.get("global_batch_size")
    size = whole(micro) * (draft.num_devices or 1) if total is None else whole(total)
    draft.put("train.global_batch_size", size, "micro_batch_size", "global_batch_size")
    if total is None:
        draft.comments["train.global_batch_size"] = (
            f"was micro_batch_size {micro}, for {draft.num_devices or 1} device(s)"
        )
        if draft.num_devices is None:
            what = f"the number of devices is not in the file: train.global_batch_size {size} assumes one"
            draft.suspect("micro_batch_size", f"{what}; --num-devices 8 multiplies it")


def finish(draft: Draft) -> None:
    """Record the defaults of LLaMA-Factory's v1 trainer for what the file does not set."""
    if "train.max_steps" not in draft.values:
        draft.assume({"train.num_epochs": 3})
    draft.assume(
        {
            "data.max_length": 2048,
            "train.learning_rate": 1e-4,
            "train.lr_scheduler_type": "constant",
            "train.warmup_steps": 0,
            "train.weight_decay": 0.01,
        }
    )
    if draft.get("peft_config.name") == "freeze":
        draft.assume({"adapter.last_layers": 2})


def _sources(draft: Draft, key: str) -> Iterator[dict[str, Any]]:
    """The data sets of a file that lists them, or one by its path."""
    value = draft.get(key)
    if value is None:
        return
    file = Path(text(value))
    beside = Path(draft.original.path).parent
    path = next((place for place in (file, beside / file, beside / file.name) if place.is_file()), None)
    if file.suffix not in (".yaml", ".yml"):
        yield hf.source(text(value))
        return
    if path is None:
        problem = f"{draft.original.path}:{draft.line_of(key)}: {key}: no file '{value}', which lists the datasets"
        raise RecipeError(
            problem, hint="run tunekit in the folder of LLaMA-Factory, or put the file next to the configuration"
        )
    for name, entry in read_mapping(path).items():
        if isinstance(entry, dict):
            yield _source(draft, key, str(name), entry)


def _source(draft: Draft, key: str, name: str, said: dict[str, Any]) -> dict[str, Any]:
    converter = said.get("converter")
    if converter is not None and converter not in _FORMATS:
        draft.differ(key, name, f"rows of {name} are converted by {converter}; data.format may be a function")
    if said.get("weight") is not None:
        draft.differ(
            key, name, f"LLaMA-Factory samples {said['weight']} times the rows of {name}; the recipe uses each row once"
        )
    size = said.get("size")
    if size is not None:
        draft.differ(
            key, name, f"LLaMA-Factory samples {size} rows of {name} with replacement; the recipe without replacement"
        )
    return hf.source(
        str(said.get("path", name)),
        split=said.get("split") if said.get("source") == "hf_hub" else None,
        format=_FORMATS.get(str(converter)),
        prompt_style="joined" if converter == "alpaca" else None,
        max_samples=None if size is None else whole(size),
        sampling=None if size is None else "random",
    )


# Single keys


def batch(draft: Draft, entry: Entry) -> Fate:
    """The batch of a device, or of a step."""
    whole(entry.value)
    if entry.key == "micro_batch_size" and draft.get("global_batch_size") is not None:
        return Fate("decided", "the plan splits train.global_batch_size into micro-batches that fit")
    return carried("train.global_batch_size", draft.values["train.global_batch_size"])


def batching(draft: Draft, entry: Entry) -> Fate:
    """The way rows are put together, of which two fill batches up to a number of tokens."""
    if entry.value == "normal":
        return Fate("silent", "is the default")
    if entry.value == "padding_free":
        return Fate("decided", "data.padding_free auto uses padding-free batches where flash attention is available")
    raise UnfitError(f"{entry.value}: a step has train.global_batch_size rows, however long they are")


def model_class(draft: Draft, entry: Entry) -> Fate:
    """The kind of model."""
    if entry.value == "cls":
        raise UnfitError("classifiers are not migrated; method: classification trains them")
    return Fate("decided", reason("model_class"))


def kind(draft: Draft, entry: Entry) -> Fate:
    """The kind of training: an adapter, or some layers."""
    if entry.value not in ("lora", "freeze"):
        raise UnfitError(f"{entry.value} is unsupported: the recipe trains all weights")
    return carried("adapter.type", draft.values["adapter.type"])


def trained(draft: Draft, entry: Entry) -> Fate:
    """The last layers, which are trained whole."""
    if draft.get("peft_config.name") != "freeze":
        return Fate("silent", "only used with freeze")
    if entry.key.endswith("freeze_trainable_modules"):
        if entry.value != "all":
            raise UnfitError("trains a part of each layer: name it in adapter.unfrozen_parameters")
        return Fate("silent", "is the default")
    if whole(entry.value) < 1:
        raise UnfitError("the first layers: name them in adapter.unfrozen_parameters")
    return draft.carry(entry, "adapter.last_layers", whole(entry.value))


def quantization(draft: Draft, entry: Entry) -> Fate:
    """The base below an adapter in 4 bits."""
    if draft.values["adapter.type"] != "qlora":
        raise UnfitError("adapter: qlora uses a base of 4 or 8 bits by bitsandbytes")
    if not entry.key.endswith("name"):
        return hf.bits(draft, entry)
    if lower(entry.value) not in ("auto", "bnb"):
        raise UnfitError(f"{entry.value} is unsupported: adapter: qlora quantizes with bitsandbytes")
    return carried("adapter.type", "qlora")


def dist(draft: Draft, entry: Entry) -> Fate:
    """The devices that share a row."""
    if number(entry.value) == 1:
        return Fate("silent", "is the default")
    field = "parallel.sp_size" if draft.get("dist_config.cp_mode", "ulysses") == "ulysses" else "parallel.cp_size"
    return draft.carry(entry, field, whole(entry.value))


def optimizer(draft: Draft, entry: Entry) -> Fate:
    """An optimizer by its plugin; AdamW is the default."""
    name = lower(draft.get("optim_config.name", "adamw"))
    if entry.key.endswith("name") and name == "adamw":
        return draft.carry(entry, "train.optim", "adamw_torch_fused")
    if entry.key.endswith("name") and name == "muon":
        return draft.carry(entry, "train.optim", "muon")
    raise UnfitError("unsupported: see `tunekit explain train.optim`")
