"""Processors of Transformers, and the kinds of media that they take beside a text."""

from inspect import signature
from typing import Any

from tunekit.recipe.sections.data import MediaKind

_PROCESSORS: dict[MediaKind, tuple[str, ...]] = {
    "image": ("image_processor",),
    "audio": ("audio_processor", "feature_extractor"),
    "video": ("video_processor",),
}
"""Attributes of a processor with what processes media of a kind."""


def kinds_of(processor: Any) -> tuple[MediaKind, ...]:
    """Return the kinds of media that a processor takes beside a text."""
    parameters = signature(type(processor).__call__).parameters
    return tuple(
        kind
        for kind, names in _PROCESSORS.items()
        if not vars(processor).keys().isdisjoint(names) and (kind != "audio" or "audio" in parameters)
    )


def sample_rate_of(processor: Any) -> int:
    """Return the sample rate of the audio that a processor takes."""
    own = vars(processor)
    rate: int = next(own[name] for name in _PROCESSORS["audio"] if name in own).sampling_rate
    return rate
