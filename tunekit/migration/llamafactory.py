"""LLaMA-Factory's YAML or JSON -> a recipe, with its dataset_info.json where it is at hand."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tunekit.migration import images, megatron, optimizers
from tunekit.migration import training as hf
from tunekit.migration.draft import Draft, UnfitError, carried, names, number, reason, text, truth, whole
from tunekit.migration.original import Entry, read_mapping
from tunekit.migration.report import Fate
from tunekit.migration.table import tool_table
from tunekit.migration.vocabulary import same_template

_METHODS = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}


def prepare(draft: Draft) -> None:
    """Lay in what several keys say together."""
    if draft.num_devices is not None and megatron.is_of_llama_factory(draft):
        # Devices that share a row add none to the batch.
        draft.num_devices = max(1, draft.num_devices // megatron.devices_per_row(draft))
    hf.set_batch(draft, "per_device_train_batch_size", default_micro=8)
    stage, loss = draft.get("stage", "sft"), draft.get("pref_loss", "sigmoid")
    if stage not in _METHODS:
        raise draft.no_method("stage", stage)
    method = {"orpo": "orpo", "simpo": "cpo"}.get(loss, "dpo") if stage == "dpo" else _METHODS[stage]
    draft.put("method.type", method, "stage")
    if method == "cpo":
        draft.put("method.loss_type", "simpo", "pref_loss")
    kind, keys = draft.get("finetuning_type"), ("finetuning_type", "quantization_bit")
    if kind in ("full", "freeze", "oft"):
        draft.put("adapter.type", "oft" if kind == "oft" else "full", *keys)
    else:
        is_by_bitsandbytes = _is_bitsandbytes(draft.get("quantization_method", "bnb"))
        hf.put_quantized(draft, draft.get("quantization_bit") if is_by_bitsandbytes else None, *keys)
    for target, key in (("data.train", "dataset"), ("data.eval", "eval_dataset")):
        hf.put_sources(draft, target, list(_sources(draft, key)), key)


_PARTS = ("adapter.last_layers", "adapter.new_layers", "adapter.unfrozen_parameters")


def _parts(draft: Draft) -> list[str]:
    """Keys of the recipe by which a part of the model is trained."""
    return [key for key in draft.values if key in _PARTS]


def trainable_layers(draft: Draft, entry: Entry) -> Fate:
    """The last layers, which are trained; a negative number means the first ones."""
    _check_freezes(draft)
    if draft.get("freeze_trainable_modules", "all") != "all":
        raise UnfitError("of all layers, or of none: name the modules in adapter.unfrozen_parameters")
    number_of = whole(entry.value)
    if _expands(draft):
        return draft.carry(entry, "adapter.new_layers", number_of)
    if number_of >= 0:
        return draft.carry(entry, "adapter.last_layers", number_of)
    first = rf"^\D*\.({'|'.join(map(str, range(-number_of)))})\."
    return draft.carry(
        entry, "adapter.unfrozen_parameters", [first, *draft.values.get("adapter.unfrozen_parameters", [])]
    )


def trainable_modules(draft: Draft, entry: Entry) -> Fate:
    """The modules of those layers: all of them."""
    _check_freezes(draft)
    if entry.value != "all":
        raise UnfitError("trains a part of each layer: name it in adapter.unfrozen_parameters")
    return Fate("silent", "is the default")


def extra_modules(draft: Draft, entry: Entry) -> Fate:
    """Modules outside of the layers, which are trained too."""
    _check_freezes(draft)
    if _expands(draft):
        raise UnfitError("only the new layers are trained")
    before = draft.values.get("adapter.unfrozen_parameters", [])
    # What lies in a layer has its number before its name.
    patterns = [*before, *(rf"^\D*{re.escape(name)}" for name in names(entry.value))]
    return draft.carry(entry, "adapter.unfrozen_parameters", patterns)


def llama_pro(draft: Draft, entry: Entry) -> Fate:
    """The new layers of a model that scripts/llama_pro.py has expanded, which alone are trained."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    _check_freezes(draft)
    draft.suspect(entry.key, "tunekit inserts the layers: set model.path to the model before scripts/llama_pro.py")
    return draft.carry(entry, "adapter.new_layers", whole(draft.get("freeze_trainable_layers", 2)))


def _expands(draft: Draft) -> bool:
    return truth(draft.get("use_llama_pro", False))


def _check_freezes(draft: Draft) -> None:
    if draft.get("finetuning_type") != "freeze":
        raise UnfitError("only used with finetuning_type freeze")


def _is_bitsandbytes(method: Any) -> bool:
    return str(method) in ("bnb", "bitsandbytes")


def finish(draft: Draft) -> None:
    """Record LLaMA-Factory's defaults for what the file does not set, and what looks wrong."""
    draft.assume({"data.max_length": 2048})
    hf.trainer_defaults(draft, 5e-5)
    if draft.has_images:
        images.default_pixels(draft, 768 * 768)
    optimizers.assume_defaults(draft)
    if draft.get("finetuning_type") == "freeze" and not any(key.startswith("adapter.") for key in _parts(draft)):
        draft.assume({"adapter.last_layers": 2})
    if draft.values["adapter.type"] == "oft":
        draft.assume({"adapter.oft_block_size": 32})
    elif draft.has_adapter:
        draft.assume({"adapter.rank": 8})
        draft.assume({"adapter.alpha": 2 * draft.values["adapter.rank"]})
    if draft.get("stage") == "pt" and draft.get("packing") is None:
        draft.assume({"data.packing": True}, "LLaMA-Factory packs rows in stage pt")
    masks = (draft.get(key) for key in ("train_on_prompt", "mask_history"))
    has_media = draft.has_images or draft.has_audio
    if draft.method == "sft" and draft.get("stage", "sft") != "pt" and not has_media and not any(masks):
        draft.assume(
            {"data.too_long": "truncate_turns"}, "LLaMA-Factory truncates each turn of a row longer than cutoff_len"
        )
    elif draft.get("stage", "sft") != "pt":
        what = "LLaMA-Factory truncates all turns of a row longer than cutoff_len, questions and answers"
        draft.differ("cutoff_len", draft.values["data.max_length"], f"{what}; {reason('cut')}")
    if draft.get("stage", "sft") == "sft" and not truth(draft.get("train_on_prompt", False)):
        name = text(draft.get("template", "default")).lower()
        after = tool_table("llama-factory").words["after_answers"].get(name)
        if after is not None:
            what = f"LLaMA-Factory also trains on the {after} that {name} writes after the end token of an answer, and "
            draft.differ("train_on_prompt", False, f"{what}counts it where it truncates turns; the recipe does not")
    if draft.get("packing") is True and not draft.get("neat_packing"):
        hf.suspect_packing(draft, "packing", "neat_packing")
    if megatron.is_of_llama_factory(draft):
        _note_megatron(draft)
        megatron.settle_layout(draft)
    if draft.get("finetuning_type") == "full" and draft.get("quantization_bit"):
        words = "quantization_bit with finetuning_type full: quantized weights cannot be trained"
        draft.suspect("quantization_bit", words)


def _note_megatron(draft: Draft) -> None:
    """Note what LLaMA-Factory's trainer of Megatron does otherwise."""
    if draft.method == "sft" and draft.get("calculate_per_token_loss") is None:
        draft.differ("calculate_per_token_loss", False, megatron.MICRO_BATCHES)
    if "train.max_steps" not in draft.values:
        words = "Megatron skips rows that do not fill the last batch of an epoch; tunekit trains on them"
        draft.differ("num_train_epochs", draft.values.get("train.num_epochs"), words)
    megatron.assume_router_loss(draft)
    if draft.origins.get("train.optim") == ["optim"]:
        draft.values.pop("train.optim", None)
        draft.fates["optim"] = Fate("silent", "Megatron reads optimizer instead, AdamW by default")


def _sources(draft: Draft, key: str) -> Iterator[dict[str, Any]]:
    """The data sets that a key names, as sources of rows."""
    value = draft.get(key)
    if value is None:
        return
    folder = text(draft.get("dataset_dir", "data"))
    info = _dataset_info(draft, folder)
    weights = draft.get("interleave_probs")
    shares = [number(weight) for weight in names(weights)] if weights is not None else []
    chosen = names(value)
    interleaves = (
        str(draft.get("mix_strategy", "concat")).startswith("interleave") and len(chosen) > 1 and key == "dataset"
    )
    for place, name in enumerate(chosen):
        dataset = info.get(name)
        if not isinstance(dataset, dict):
            what = f"dataset {name} is not in a local dataset_info.json: the recipe uses {folder}/{name}.json"
            draft.suspect(key, f"{what}; check the path")
            source_values = hf.source(f"{folder}/{name}.json")
        else:
            source_values = _source(draft, dataset, folder)
        limit = draft.get("max_samples")
        if isinstance(limit, int) and limit > 0:
            source_values["max_samples"] = limit
        if interleaves:
            source_values["weight"] = shares[place] if place < len(shares) else 1
        yield source_values
    if interleaves and draft.get("mix_strategy") == "interleave_over":
        draft.put("data.stopping_strategy", "all_exhausted", "mix_strategy")


def _dataset_info(draft: Draft, folder: str) -> dict[str, Any]:
    """Read dataset_info.json, in the folder of the data or beside the configuration."""
    beside = Path(draft.original.path).parent
    for place in (Path(folder), beside / folder, beside):
        if (place / "dataset_info.json").is_file():
            return read_mapping(place / "dataset_info.json")
    return {}


def _source(draft: Draft, said: dict[str, Any], folder: str) -> dict[str, Any]:
    """An entry of dataset_info.json as a source of rows."""
    theirs = _mapping(said, "columns")
    hub = said.get("hf_hub_url")
    split = said.get("split")
    path = str(hub) if hub else f"{folder}/{said.get('file_name', said.get('script_url', ''))}"
    format_, columns = _shape(said, draft.values["method.type"], draft.get("stage"))
    if draft.values["method.type"] == "kto" and format_ in ("messages", "sharegpt"):
        draft.suspect("dataset", f"{path}: KTO does not read whole chats; split each into a prompt and a completion")
    image_folder = None
    media: dict[str, Any] = {name: theirs[name] for name in ("images", "audios", "videos") if name in theirs}
    if media:
        if "videos" in media and not draft.has_videos and draft.get("video_fps") is None:
            draft.differ("video_fps", 2.0, images.FRAMES, remedy="model.video_processor")
        draft.has_videos |= "videos" in media
        draft.has_images |= not {"images", "videos"}.isdisjoint(media)
        draft.has_audio |= "audios" in media
        columns |= _differing(media)
        image_folder = _image_folder(draft, folder, None if hub else path)
    return hf.source(
        path,
        name=said.get("subset"),
        split=split if hub else None,
        format=format_,
        columns=columns,
        image_folder=image_folder,
        prompt_style="line" if format_ == "alpaca" else None,
    )


def _image_folder(draft: Draft, folder: str, file: str | None) -> str | None:
    """The folder of images, where it is not that of the data file: `media_dir`, or that of all data."""
    media = draft.get("media_dir")
    if file is None or media is not None:
        return None if media is None else text(media)
    return None if Path(file).parent == Path(folder) else folder


def _shape(said: dict[str, Any], method: str, stage: Any) -> tuple[str | None, dict[str, str]]:
    """The format of rows, and their columns where they have other names than ours."""
    theirs, tags = _mapping(said, "columns"), _mapping(said, "tags")
    is_chat = said.get("formatting", "alpaca") == "sharegpt"
    columns: dict[str, Any]
    if said.get("ranking") or method in ("dpo", "orpo", "cpo", "reward"):
        messages_key = theirs.get("messages", "conversations") if is_chat else theirs.get("prompt", "instruction")
        columns = {"conversations" if is_chat else "prompt": messages_key}
        columns |= {name: theirs.get(name, name) for name in ("chosen", "rejected")}
        return "preference", _differing(columns)
    if method == "kto" and not is_chat:
        columns = {"prompt": theirs.get("prompt", "instruction"), "completion": theirs.get("response", "output")}
        return "unpaired_preference", _differing(columns | {"label": theirs.get("kto_tag", "label")})
    if stage == "pt":
        return "text", _differing({"text": theirs.get("prompt", "text")})
    if is_chat:
        kind = "messages" if tags.get("role_tag", "from") == "role" else "sharegpt"
        column = "messages" if kind == "messages" else "conversations"
        return kind, _differing({column: theirs.get("messages", "conversations")})
    ours = {"prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history"}
    return "alpaca", _differing({ours[name]: column for name, column in theirs.items() if name in ours})


def _mapping(said: dict[str, Any], key: str) -> dict[str, Any]:
    value = said.get(key)
    return value if isinstance(value, dict) else {}


def _differing(columns: dict[str, Any]) -> dict[str, str]:
    return {ours: str(theirs) for ours, theirs in columns.items() if theirs and ours != theirs}


# Single keys


def bits(draft: Draft, entry: Entry) -> Fate:
    """The bits of a quantised model."""
    if not draft.has_adapter:
        raise UnfitError("quantized weights cannot be trained: adapter: qlora trains an adapter on top of them")
    return hf.bits(draft, entry)


def quantization_method(draft: Draft, entry: Entry) -> Fate:
    """The library that quantises."""
    if _is_bitsandbytes(entry.value):
        return Fate("silent", "adapter: qlora quantizes with bitsandbytes")
    raise UnfitError(f"{entry.value} is unsupported: adapter: qlora quantizes with bitsandbytes")


def template(draft: Draft, entry: Entry) -> Fate:
    """A template by name: tunekit's where that writes the same, else the model's own is taken."""
    name, model = text(entry.value).lower(), str(draft.get("model_name_or_path", "")).lower()
    if name in ("default", "empty", "alpaca", "vicuna"):
        words = f"template {name} is not the model's own, which the recipe uses: the chat format changes"
        draft.suspect(entry.key, words)
    for beginning, family in tool_table("llama-factory").words["templates"].items():
        if name.startswith(beginning) and family not in model.replace("_", "-") and "/" in model:
            words = f"template {name} is for another family than the model {draft.get('model_name_or_path')}"
            draft.suspect(entry.key, words)
            break
    fate = None if draft.get("stage", "sft") == "pt" else same_template(draft, entry, "llama-factory")
    if fate is not None:
        return fate
    words = f"LLaMA-Factory formats rows with its template {entry.value}; {reason('other_template')}"
    return Fate("different", words, "model.chat_template")


def max_samples(draft: Draft, entry: Entry) -> Fate:
    """Rows that are taken of a data set."""
    return carried("data.train.max_samples", whole(entry.value))


def mix(draft: Draft, entry: Entry) -> Fate:
    """The mixture of several data sets."""
    if text(entry.value) == "concat":
        return Fate("silent", "sources without weights are used in full")
    if "data.stopping_strategy" in draft.values:
        return carried("data.stopping_strategy", "all_exhausted")
    return Fate("carried", "data.train: weights of its sources")


def packing(draft: Draft, entry: Entry) -> Fate:
    """Packing, in either of its two forms."""
    if truth(entry.value):
        return draft.carry(entry, "data.packing", True)
    if draft.get("neat_packing"):
        return Fate("silent", "neat_packing packs")
    draft.put("data.packing", False, entry.key)
    return Fate("silent", "is off")


def loss(draft: Draft, entry: Entry) -> Fate:
    """The loss over pairs, which may be that of another method."""
    if draft.method in ("orpo", "cpo"):
        return carried("method.type", draft.method)
    if draft.method != "dpo":
        return Fate("silent", "only used with stage dpo")
    if entry.value == "kto_pair":
        raise UnfitError("kto_pair was removed from TRL; stage kto trains on unpaired answers")
    is_mixed = number(draft.get("pref_ftx", 0))
    return draft.carry(entry, "method.loss_type", [entry.value, "sft"] if is_mixed else entry.value)


def mixed(draft: Draft, entry: Entry) -> Fate:
    """The weight of the loss of supervised fine-tuning beside that over pairs."""
    weight = number(entry.value)
    if not weight or draft.method != "dpo":
        return Fate("silent", "is off")
    draft.put("method.loss_type", [draft.get("pref_loss", "sigmoid"), "sft"], entry.key)
    return draft.carry(entry, "method.loss_weights", [1.0, float(weight)])


def beta(draft: Draft, entry: Entry) -> Fate:
    """The weight of what holds a model to its reference."""
    if draft.method not in ("dpo", "kto", "orpo", "cpo"):
        return Fate("silent", "only used with stages dpo and kto")
    return hf.beta(draft, entry)


def media_dir(draft: Draft, entry: Entry) -> Fate:
    """The folder of images, which the sources with images have, and those that nothing is known of."""
    folder, info = text(entry.value), _dataset_info(draft, text(draft.get("dataset_dir", "data")))
    sources = draft.values.get("data.train")
    listed = sources if isinstance(sources, list) else []
    if "data.image_folder" in draft.values or any("image_folder" in source for source in listed):
        return carried("image_folder", folder)
    if all(name in info for name in names(draft.get("dataset", ""))):
        return Fate("silent", "only used for images, videos and audio")
    return draft.carry(entry, "data.image_folder", folder)


def oft(draft: Draft, entry: Entry) -> Fate:
    """A setting of OFT, by the tool's name."""
    if draft.values["adapter.type"] != "oft":
        return Fate("silent", "only used with finetuning_type oft")
    if entry.key == "oft_target":
        value = names(entry.value)
        return draft.carry(entry, "adapter.target_modules", "all-linear" if value == ["all"] else value)
    if whole(entry.value) == 0:
        return Fate("silent", "follows from the other setting")
    if entry.key == "oft_rank":
        raise UnfitError("a number of blocks is unsupported: set adapter.oft_block_size")
    return draft.carry(entry, "adapter.oft_block_size", whole(entry.value))


def fp8(draft: Draft, entry: Entry) -> Fate:
    """Linear layers in 8-bit floating point: a switch, or a format of Megatron's."""
    if str(entry.value) in ("e4m3", "hybrid"):
        return megatron.fp8(draft, entry)
    return draft.carry(entry, "train.fp8", True) if truth(entry.value) else Fate("silent", "is off")


def pissa(draft: Draft, entry: Entry) -> Fate:
    """The wish to begin with parts of the base weights, by 16 iterations or by a whole SVD."""
    if not truth(entry.value):
        return Fate("silent", "is off")
    iterations = whole(draft.get("pissa_iter", 16))
    start = "pissa" if iterations < 0 else f"pissa_niter_{iterations}"
    return hf.first_weights(draft, replace(entry, value=start))
