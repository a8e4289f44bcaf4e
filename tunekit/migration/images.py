"""Keys of other tools about images -> `model.image_processor` and `data.image_folder`.

How large an image may be is a setting of a model's image processor, by its own names. Tools say it as pixels for all
models, and some resize images before the processor sees them; which setting comes nearest is in `tables/images.yaml`.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from tunekit.errors import RecipeError
from tunekit.estimates.models.model_config import known_models, model_types
from tunekit.migration.draft import Draft, UnfitError, data_file, names, number, text, truth, whole
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate

_READS_IMAGES = re.compile(
    r"(?:^|[^a-z])(?:vl\d*|vlm|omni|vision|vlmoe|llava\w*|bakllava|pixtral|paligemma\d*|internvl\w*|smolvlm\d*|idefics\d*|ovis\d*"
    r"|mllama|qvq|minicpm-?v|deepseek-?ocr|got-?ocr\w*|florence|molmo\w*|cogvlm\d*|(?:glm|phi|yi)-?[\d.]*-?v)(?:[^a-z]|$)",
    re.IGNORECASE,
)
"""Words in the names of models that read images: Qwen2.5-VL, Llama-3.2-11B-Vision."""

_HEARS = re.compile(
    r"(?:^|[^a-z])(?:omni|audio|tts|asr|stt|whisper\w*|voxtral|minicpm-?o|speech)(?:[^a-z]|$)", re.IGNORECASE
)
"""Words in the names of models that read or write audio."""

_TRAINED_ON_AUDIO = re.compile(
    r"qwen2-audio|qwen2\.5-omni|audio-?flamingo-?3|granite-speech|glm-asr|voxtral(?!.*(?:realtime|tts))",
    re.IGNORECASE,
)
"""Names of those among them whose rows with audio tunekit trains on."""

_IN_LANGUAGE_MODEL = re.compile(r"language_model|text_model")
_OF_TOWER = re.compile(r"vision|visual|multi_?modal|mm_projector|merger|connector|aligner|image|audio")
_TOWER = r"\b(visual|image_tower|vision_(encoder|model|tower))\b"
"""Pattern of the names of vision towers."""

_OWN = "set model.image_processor, with the processor's own names"
_FROZEN = "the vision tower and the projector are frozen by default"


class Family(BaseModel):
    """Models that read images by one kind of processor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: str
    types: str
    processor: str
    """Its class in transformers."""
    tower: str | None = None
    limits: Literal["pixels", "frames", "fixed"] | None = None
    least: int = 0
    """Pixels that the processor enlarges images to."""
    most: int | None = None
    """Pixels that it shrinks images to."""
    side: int = 0
    """Pixels of the side of a token."""
    variable: str | None = None
    """The variable by which ms-swift limits images."""
    settings: str = ""


@cache
def families() -> tuple[Family, ...]:
    """Return all families."""
    return TypeAdapter(tuple[Family, ...]).validate_python(data_file("images"))


def family(draft: Draft) -> Family | None:
    """Return the family of a configuration's model: by its config.json in a local folder, or by its name."""
    model = _model(draft)
    config = _config(Path(model))
    if config is not None:
        vision = config.get("vision_config")
        tower = vision.get("model_type") if isinstance(vision, dict) else None
        by_tower = next((kind for kind in families() if kind.tower is not None and kind.tower == tower), None)
        return by_tower or next((kind for kind in families() if config.get("model_type") in kind.types.split()), None)
    name = _last_name(model).lower().replace("_", "-")
    return next((kind for kind in families() if re.search(kind.names, name)), None)


def _model(draft: Draft) -> str:
    keys = (draft.get(key) for key in ("model_name_or_path", "base_model", "model", "model_id_or_path"))
    named = next((key for key in keys if isinstance(key, str)), "")
    return str(draft.values.get("model.path") or named)


def _last_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _config(folder: Path) -> Mapping[str, Any] | None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def refuse_audio(draft: Draft) -> None:
    """Check that a configuration does not train on audio with a model that tunekit does not train on it.

    Raises:
        RecipeError: It does.
    """
    model, processor = _model(draft), str(draft.get("processor_type", ""))
    is_of_audio = _HEARS.search(_last_name(model)) is not None and _TRAINED_ON_AUDIO.search(_last_name(model)) is None
    if is_of_audio or processor.startswith("VoxtralRealtime"):
        key = next((key for key in draft.origins.get("model.path", []) if draft.line_of(key)), "")
        line = draft.line_of(key)
        where = f"{draft.original.path}:{line}" if line else draft.original.path
        problem = f"{where}: the model {model} processes audio, which is not migrated"
        raise RecipeError(
            problem,
            hint="audio migrates for Qwen2-Audio, Qwen2.5-Omni, Audio Flamingo 3, Granite Speech, GLM-ASR and Voxtral",
        )


def refuse_images(draft: Draft) -> None:
    """Check that completions are not to be generated for rows with images by a method of the rows of sft.

    Raises:
        RecipeError: They are.
    """
    if draft.has_images and draft.method == "gkd" and draft.values.get("method.lmbda", 0.5):
        line = draft.line_of("lmbda")
        where = f"{draft.original.path}:{line}: lmbda" if line else draft.original.path
        problem = f"{where}: completions of rows with images are unsupported in method gkd"
        raise RecipeError(problem, hint="set lmbda to 0, or distil by method distillation, from prompts with images")


def named_for_images(draft: Draft) -> bool:
    """Return whether a configuration's model says by its name that it reads images."""
    return _READS_IMAGES.search(_last_name(_model(draft))) is not None


def finish(draft: Draft) -> None:
    """Take out what rows with media do not go with, and note what other tools train of the model."""
    if draft.tool == "TRL" and named_for_images(draft):
        if draft.has_adapter:
            words = "TRL also adapts layers of the vision tower with the names of target modules; tunekit does not"
            draft.differ("model_name_or_path", _model(draft), words, remedy="adapter.vision_tower: lora")
        else:
            _train(draft, "full", "TRL trains the whole model")
    media = "images" if draft.has_images else "audio" if draft.has_audio else None
    if media is not None and draft.values.pop("data.streaming", None):
        for key in draft.origins.pop("data.streaming", []):
            draft.fates[key] = Fate("unsupported", f"data.streaming: unsupported for rows with {media}")


FRAMES = "of videos, the tool samples and scales frames by its own settings; here the model's video processor does"
"""The difference between frames of videos."""


def frames(draft: Draft, entry: Entry) -> Fate:
    """A setting of the frames of videos, which the model's own processor chooses here."""
    # ms-swift's datasets do not say what their rows have.
    if not draft.has_videos and "video" not in str(draft.get("dataset")).lower():
        return Fate("silent", "only used for videos, whose frames model.video_processor sets here")
    return Fate("different", FRAMES, remedy="model.video_processor")


def audio_in_video(draft: Draft, entry: Entry) -> Fate:
    """The wish to read the audio of videos between their frames."""
    if truth(entry.value):
        raise UnfitError("the audio of videos is not read")
    return Fate("silent", "is off")


def _reads_text_alone(draft: Draft) -> bool:
    """Return whether a configuration's model is a well-known one without a vision tower."""
    model = known_models().get(_model(draft))
    return model is not None and "vision_config" not in model.config


def paths_from_here(draft: Draft) -> None:
    """Let relative paths of media start in the working directory, where the tool looks for them."""
    sources = draft.values.get("data.train")
    sources = sources if isinstance(sources, list) else [sources]
    paths = [str(source["path"] if isinstance(source, dict) else source) for source in sources]
    is_elsewhere = any(Path(path).suffix and Path(path).parent != Path() for path in paths)
    if is_elsewhere and (draft.has_images or draft.has_audio or named_for_images(draft)):
        media = "audio" if draft.has_audio and not draft.has_images else "images"
        words = f"{draft.tool} looks for relative paths of {media} in the working directory"
        draft.assume({"data.image_folder": "."}, words)


# Single keys


def most_pixels(draft: Draft, entry: Entry) -> Fate:
    """The pixels to which larger images are shrunk before the processor."""
    return _resized(draft, entry, "max_pixels")


def least_pixels(draft: Draft, entry: Entry) -> Fate:
    """The pixels to which smaller images are enlarged before the processor."""
    return _resized(draft, entry, "min_pixels")


def variable(draft: Draft, entry: Entry) -> Fate:
    """A limit of the Qwen-VL processors that a variable says, in pixels or in tokens."""
    name, kind = entry.key.rpartition(".")[2].upper(), family(draft)
    if kind is None and _reads_text_alone(draft):
        return Fate("silent", "only used with images")
    draft.has_images = True
    if kind is None:
        raise UnfitError(f"unknown family of models: {_OWN}")
    in_tokens = name.endswith("TOKEN_NUM")
    if kind.variable != ("IMAGE_MAX_TOKEN_NUM" if in_tokens else "MAX_PIXELS"):
        return Fate("silent", f"not read for this model, whose images are limited by {kind.variable or 'no variable'}")
    pixels = whole(entry.value) * (kind.side**2 if in_tokens else 1)
    return _put(draft, entry, kind, "max_pixels" if "MAX" in name else "min_pixels", pixels)


def resized(draft: Draft, entry: Entry) -> Fate:
    """Axolotl's size of images: a square that they are padded to, or a width and a height."""
    draft.has_images = True
    kind, sides = family(draft), [whole(side) for side in names(entry.value)]
    if kind is not None and kind.limits == "fixed":
        words = "Axolotl pads or stretches images to it first; the processor gives every image the same size"
        return Fate("different", words)
    if kind is None or kind.limits is None or len(sides) > 2:
        raise UnfitError(_without_limit(kind))
    fate = _put(draft, entry, kind, "max_pixels", sides[0] * sides[-1])
    return Fate("different", f"{fate.words}; Axolotl pads or stretches all images to it, tunekit keeps their shape")


def algorithm(draft: Draft, entry: Entry) -> Fate:
    """The resampling of Axolotl's size of images."""
    if draft.get("image_size") is None:
        return Fate("silent", "only used with image_size")
    return Fate("different", "the processor resamples by its own algorithm; model.image_processor.resample sets it")


def processor_setting(draft: Draft, entry: Entry) -> Fate:
    """A setting that a processor is loaded with."""
    name = entry.key.partition(".")[2].partition(".")[0].partition("[")[0]
    if not name or name in ("use_fast", "trust_remote_code", "revision", "padding_side", "image_seq_length", "backend"):
        raise UnfitError("not a setting of the image processor")
    draft.has_images = True
    return draft.carry(entry, f"model.image_processor.{name}", draft.get(f"processor_kwargs.{name}"))


def frozen(draft: Draft, entry: Entry) -> Fate:
    """The wish to train a vision tower or its projector, or not to."""
    is_projector = entry.key in ("freeze_aligner", "freeze_multi_modal_projector")
    if truth(entry.value):
        return Fate("decided", _FROZEN)
    if is_projector and draft.tool == "LLaMA-Factory" and draft.has_adapter:
        return Fate("silent", "LLaMA-Factory adapts no projector")
    if _reads_text_alone(draft):
        return Fate("silent", "no effect: the model has no vision tower")
    return draft.carry(entry, f"adapter.{'projector' if is_projector else 'vision_tower'}", _training(draft))


def frozen_modules(draft: Draft, entry: Entry) -> Fate:
    """Axolotl's wish to train all that is beside the language model, or not to: `note_towers` has what it trains."""
    if truth(entry.value):
        return Fate("decided", _FROZEN)
    if draft.has_adapter and _adapts_language_model(draft):
        return Fate("silent", "lora_target_modules names layers of the language model")
    return Fate("silent", "Axolotl's default")


def frozen_language_model(draft: Draft, entry: Entry) -> Fate:
    """The wish to train a vision tower or its projector alone."""
    if not truth(entry.value):
        return Fate("decided", "the language model is trained by default")
    if draft.has_adapter:
        raise UnfitError("adapters only in the vision tower are unsupported: the language model gets some too")
    towers = ("freeze_vit", "freeze_aligner", "freeze_vision_tower", "freeze_multi_modal_projector")
    if all(draft.get(key) in (None, True, "true") for key in towers):
        raise UnfitError("nothing would be trained: the vision tower and the projector are frozen too")
    return draft.carry(entry, "adapter.language_model", "frozen")


def _training(draft: Draft) -> str:
    """Return the training of a part that is not frozen.

    Raises:
        UnfitError: It has adapters of a kind that towers do not get.
    """
    kind = draft.values.get("adapter.type")
    if kind in ("full", "lora", "qlora"):
        return "full" if kind == "full" else "lora"
    raise UnfitError(f"adapters of type {kind} are unsupported in vision towers and projectors")


def trained_modules(draft: Draft, entry: Entry) -> Fate:
    """Modules that are trained beside an adapter."""
    modules = names(entry.value)
    if any(names_tower(module) and not is_projector(module) for module in modules):
        raise UnfitError("a vision tower is not trained in full with an adapter: adapter.vision_tower=lora adapts it")
    return draft.carry(entry, "adapter.modules_to_save", modules)


def rate(draft: Draft, entry: Entry) -> Fate:
    """A learning rate of the vision tower or its projector."""
    value, is_of_projector = number(entry.value), entry.key.startswith("aligner")
    if draft.get("freeze_aligner" if is_of_projector else "freeze_vit", True) not in (False, "false"):
        return Fate("silent", f"no effect: {_FROZEN}")
    projectors = rf"\b({'|'.join(sorted(model_types().projectors))})\b"
    pattern = projectors if is_of_projector else _TOWER
    # The first pattern that matches counts, and projectors of some models are within their towers.
    rates = {**dict(draft.values.get("train.learning_rates", {})), pattern: value}
    return draft.carry(entry, "train.learning_rates", dict(sorted(rates.items(), key=lambda item: item[0] == _TOWER)))


def folder(draft: Draft, entry: Entry) -> Fate:
    """The folder of images."""
    return draft.carry(entry, "data.image_folder", text(entry.value))


def processor_type(draft: Draft, entry: Entry) -> Fate:
    """The class of processor, with which Axolotl reads images and audio."""
    if str(entry.value).startswith("Voxtral"):
        draft.has_audio = True
        return Fate("decided", "the model's own processor is loaded for rows with audio")
    draft.has_images = True
    return Fate("decided", "the model's own processor is loaded for rows with images")


def splitting(draft: Draft, entry: Entry) -> Fate:
    """The wish to cut images into parts, which the classes of processors have settled."""
    kind = family(draft)
    own = {"GotOcr2ImageProcessor": "crop_to_patches", "Gemma3ImageProcessor": "image_do_pan_and_scan"}
    if kind is None or own.get(kind.processor) != entry.key:
        return Fate("silent", "only used with " + ("InternVL" if entry.key == "crop_to_patches" else "Gemma 3"))
    is_on = entry.key == "crop_to_patches"
    if truth(entry.value) == is_on:
        return Fate("decided", f"the model's processor always has it {'on' if is_on else 'off'}")
    raise UnfitError(f"the model's processor always has it {'on' if is_on else 'off'}")


# What keys come to


def default_pixels(draft: Draft, pixels: int) -> None:
    """Note the pixels to which LLaMA-Factory shrinks images by itself."""
    kind = family(draft)
    if draft.get("image_max_pixels") is not None:
        pass
    elif kind is not None and kind.limits in ("pixels", "frames"):
        draft.assume(dict([_limit(kind, "max_pixels", pixels)]))
    elif kind is None or kind.limits is None:
        words = f"LLaMA-Factory shrinks images to {pixels:,} pixels before the processor; tunekit does not"
        draft.differ("image_max_pixels", pixels, words)
    if kind is not None and kind.types == "internvl" and draft.get("crop_to_patches") is None:
        words = "LLaMA-Factory does not crop images; the model's processor always crops them to patches"
        draft.differ("crop_to_patches", False, words)


def _resized(draft: Draft, entry: Entry, setting: Literal["min_pixels", "max_pixels"]) -> Fate:
    pixels, kind = whole(entry.value), family(draft)
    draft.has_images = True
    if kind is not None and kind.limits == "fixed":
        words = f"{draft.tool} resizes images to it first; the processor gives every image the same size"
        return Fate("different", words)
    if kind is None or kind.limits is None:
        raise UnfitError(_without_limit(kind))
    if setting == "max_pixels" and kind.most is not None and pixels >= kind.most:
        return Fate("silent", f"the processor shrinks images to {kind.most:,} pixels")
    if setting == "min_pixels" and pixels <= kind.least:
        return Fate("silent", f"the processor enlarges images to {kind.least:,} pixels")
    words = f"{draft.tool} resizes images before the processor rounds their sides: each may differ by one token"
    return Fate("different", f"{_put(draft, entry, kind, setting, pixels).words}; {words}")


def _put(draft: Draft, entry: Entry, kind: Family, setting: Literal["min_pixels", "max_pixels"], pixels: int) -> Fate:
    """Let the recipe limit images; the narrower of two limits counts."""
    target, value = _limit(kind, setting, pixels)
    if target.endswith("_pixels"):
        value = (min if setting == "max_pixels" else max)(draft.values.get(target, value), value)
    return draft.carry(entry, target, value)


def _limit(kind: Family, setting: Literal["min_pixels", "max_pixels"], pixels: int) -> tuple[str, Any]:
    """The field of the recipe that limits images, and its value."""
    if kind.limits == "frames" and setting == "max_pixels":
        return "model.image_processor.size", {"shortest_edge": kind.least, "longest_edge": 2 * pixels}
    if kind.limits == "frames":
        raise UnfitError(_without_limit(kind))
    return f"model.image_processor.{setting}", pixels


def _without_limit(kind: Family | None) -> str:
    if kind is None:
        return f"unknown family of models: {_OWN}"
    return f"{kind.processor} does not limit pixels: set {kind.settings} in model.image_processor"


# LoRA


def language_model_regex(pattern: str) -> str:
    """Return a regular expression of modules by the names that transformers 5 has for those of a language model."""
    return re.sub(r"^(\^?)language_model(\\?\.)model(\\?\.)", r"\1model\2language_model\3", pattern)


def is_projector(name: str) -> bool:
    """Return whether a module is a projector by its name."""
    return not model_types().projectors.isdisjoint(name.split("."))


def _train(draft: Draft, how: str, words: str) -> None:
    """Let the recipe train towers and projectors as a tool does by itself."""
    draft.assume(dict.fromkeys(("adapter.vision_tower", "adapter.projector"), how), words)


def names_tower(pattern: str) -> bool:
    """Return whether a pattern of parameters names a tower or a projector."""
    return _OF_TOWER.search(pattern) is not None


def _adapts_language_model(draft: Draft) -> bool:
    pattern = draft.get("lora_target_modules")
    return isinstance(pattern, str) and _IN_LANGUAGE_MODEL.search(pattern) is not None


def note_towers(draft: Draft) -> None:
    """Note that Axolotl trains towers and projectors as it does the language model, unless it is told not to."""
    if draft.get("freeze_mm_modules") is True or _adapts_language_model(draft):
        return
    if draft.has_audio:
        if draft.get("unfrozen_parameters") is None:
            words = "Axolotl trains the audio tower and the projector too; tunekit freezes them for rows with audio"
            draft.differ("freeze_mm_modules", False, words)
        return
    if draft.has_adapter and draft.get("lora_target_linear") and not draft.get("lora_target_modules"):
        _train(draft, "lora", "lora_target_linear adapts the vision tower and the projector too")
    elif draft.has_adapter:
        words = (
            "Axolotl also adapts layers of the vision tower with these names; tunekit adapts only the language model"
        )
        draft.differ("freeze_mm_modules", False, words, remedy="adapter.vision_tower: lora")
    elif draft.get("unfrozen_parameters") is None:
        _train(draft, "full", "Axolotl trains the whole model")
