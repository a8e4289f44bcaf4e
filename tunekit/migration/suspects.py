"""Suspicious values of a configuration of any tool: far from those that others train with, or images.

A configuration that trains on images, video or audio would become a recipe that trains on captions alone. Its model
tells it by its name, or a key sets how images are read. Keys that only say which parts of a model are frozen stand in
configurations of text too, and are told as any other.
"""

import re

from tunekit.errors import RecipeError
from tunekit.migration.draft import Draft, is_off
from tunekit.migration.report import Suspicion
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import LoraAdapter

_MODEL = re.compile(
    r"(?:^|[^a-z])(?:vl\d*|vlm|vision|vlmoe|llava\w*|bakllava|omni|audio|tts|asr|stt|whisper\w*|voxtral|pixtral|paligemma\d*"
    r"|internvl\w*|smolvlm\d*|idefics\d*|ovis\d*|mllama|qvq|minicpm-?[vo]|deepseek-?ocr|got-?ocr\w*|florence|molmo\w*"
    r"|cogvlm\d*|kimi-?vl|speech|(?:glm|phi|yi)-?[\d.]*-?v)(?:[^a-z]|$)",
    re.IGNORECASE,
)
"""Words in the names of models that read or write images, video or audio: Qwen2.5-VL, Llama-3.2-11B-Vision."""

_KEYS = (
    *("processor_type", "image_size", "image_resize_algorithm", "processor_kwargs"),
    *("image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen"),
    *("audio_sampling_rate", "use_audio_in_video", "image_do_pan_and_scan", "crop_to_patches", "image_resolution"),
    *("max_pixels", "norm_bbox", "vit_lr", "aligner_lr", "vit_gradient_checkpointing"),
)
"""Keys that say how images, video and audio are read."""


def refuse_media(draft: Draft) -> None:
    """Check that a configuration trains on text alone.

    Raises:
        RecipeError: It does not.
    """
    model = str(draft.values.get("model.path") or "")
    if _MODEL.search(model.rstrip("/").rpartition("/")[2]) is not None:
        where = _where(draft, *draft.origins.get("model.path", []))
        problem = f"{where}: the model {model} processes images, video or audio, which is not migrated"
        raise RecipeError(problem, hint="write a recipe: rows with images train with method.type=sft")
    for key in _KEYS:
        if draft.get(key) is not None and not is_off(draft.get(key)):
            problem = f"{_where(draft, key)}: {key} configures images, video or audio, which is not migrated"
            raise RecipeError(problem, hint="write a recipe: rows with images train with method.type=sft")


def _where(draft: Draft, *keys: str) -> str:
    """The file, and the line of the first of some keys that stands in it."""
    line = next((draft.line_of(key) for key in keys if draft.line_of(key)), 0)
    return f"{draft.original.path}:{line}" if line else draft.original.path


LOW_FOR_LORA = 1e-5
"""Below this LoRA hardly moves in supervised fine-tuning: it takes about ten times the rate of full fine-tuning
(arXiv 2106.09685 trains with 1e-4 to 2e-3)."""

HIGH_FOR_FULL = 2e-4
"""Above this full fine-tuning forgets what the model knew."""

HIGH_FOR_ANSWERS = 5e-5
"""Above this methods that hold a model to a reference leave it (arXiv 2305.18290 trains with 1e-6)."""

MANY_EPOCHS = 10


def suspects(draft: Draft, recipe: Recipe) -> None:
    """Note what is far from usual in a recipe, at the line that it comes from."""

    def note(target: str, words: str) -> None:
        lines = [draft.line_of(key) for key in draft.origins.get(target, [])]
        draft.suspicious.append(Suspicion(min(filter(None, lines), default=0), words))

    rate, adapter, method, epochs = recipe.learning_rate, recipe.adapter, recipe.method, recipe.train.num_epochs or 0
    is_lora, is_sft = isinstance(adapter, LoraAdapter), method.spec.trains_on == "tokens"
    if is_lora and is_sft and rate < LOW_FOR_LORA:
        note("train.learning_rate", f"learning rate {rate:g} is low for LoRA (typical: 1e-4 to 5e-4)")
    if not is_lora and is_sft and rate > HIGH_FOR_FULL:
        note("train.learning_rate", f"learning rate {rate:g} is high for full fine-tuning (typical: 1e-5)")
    if not is_sft and not method.spec.classifies and rate > HIGH_FOR_ANSWERS:
        note("train.learning_rate", f"learning rate {rate:g} is high for {method.type} (typical: below 1e-5)")
    if epochs > MANY_EPOCHS:
        note("train.num_epochs", f"{epochs:g} epochs: the model may memorize the rows")
    if isinstance(adapter, LoraAdapter) and adapter.rank > 256:
        note("adapter.rank", f"rank {adapter.rank}: unusually large; adapter: full may cost little more")
    if is_rewarded(method) and not method.rewards:
        note("method.type", f"{method.type} has no rewards yet: training needs at least one (method.rewards)")
    if recipe.model.trust_remote_code:
        note("model.trust_remote_code", "the model's own code will run: read it first")
