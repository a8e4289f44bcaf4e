"""Configurations that train on images, video or audio, of which no recipe is made.

Without its images such a configuration would become one that trains on captions alone. Its model tells it by its name,
or a key sets how images are read. Keys that only say which parts of a model are frozen stand in configurations of text
too, and are told as any other.
"""

import re

from tunekit.errors import RecipeError
from tunekit.migration.draft import Draft, is_off

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
    """Check that a configuration trains on text.

    Raises:
        RecipeError: It does not.
    """
    model = str(draft.values.get("model.path") or "")
    if _MODEL.search(model.rstrip("/").rpartition("/")[2]) is not None:
        where = _where(draft, *draft.origins.get("model.path", []))
        raise RecipeError(
            f"{where}: the model {model} is one of images, video or audio, and only text is trained on",
            hint="name a model of text in the file to train on the texts alone",
        )
    for key in _KEYS:
        if draft.get(key) is not None and not is_off(draft.get(key)):
            raise RecipeError(
                f"{_where(draft, key)}: {key} says how images, video or audio are read, and only text is trained on",
                hint=f"take {key} out of the file to train on the texts alone",
            )


def _where(draft: Draft, *keys: str) -> str:
    """The file, and the line of the first of some keys that stands in it."""
    line = next((draft.line_of(key) for key in keys if draft.line_of(key)), 0)
    return f"{draft.original.path}:{line}" if line else draft.original.path
