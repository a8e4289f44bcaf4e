"""Tokens of media: how many, and which, without decoding one.

A processor of Transformers replaces the one token that stands for a medium in a text by as many as its size asks for,
with others around and between them for some models. What it writes for a size is asked of the processor itself, of a
blank picture or of silence, once for each size. That this gives the tokens of the rows is checked by the whole
processor on rows with their real media, before training and for each row while it is trained on.

Of a longer clip a processor makes as many tokens or more, so lengths between two of the same tokens are not asked. Some
processors leave out what is behind a number of seconds, without a word: the features of a clip have to change with its
end.
"""

import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tunekit.data.formats.row_formats import counted
from tunekit.data.media.clips import Clip
from tunekit.data.media.kinds import KINDS, Medium, blank_medium, nouns_of, num_values_in, read_medium
from tunekit.data.media.videos import Video, decoding
from tunekit.errors import DataError
from tunekit.probe.processors import kinds_of, sample_rate_of
from tunekit.recipe.sections.data import MediaKind

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BatchFeature, ProcessorMixin

Span = tuple[int, int]


class Replacement(NamedTuple):
    """Outcome of a processor for a medium of some size."""

    text: str
    """Text that stands for the medium."""
    num_tokens: int
    num_values: int
    """Values of its pixels, of all parts that the processor cuts it into; 0 of audio."""


@dataclass(frozen=True)
class MediumTokens:
    """The tokens `[start, stop)` of a row that are a medium."""

    medium: Medium
    start: int
    stop: int

    @property
    def words(self) -> str:
        """The medium in place of its tokens: `[image cat.png 640x480: 256 tokens]`."""
        return f"[{self.medium.words}: {counted(self.stop - self.start, 'token')}]"


def marks_of(processor: Any) -> dict[str, MediaKind]:
    """Return the tokens that stand for media in a text before a processor replaces them, with the kind of each."""
    tokens: dict[MediaKind, str | None] = {
        kind: getattr(processor, f"{kind}_token", None) for kind in kinds_of(processor)
    }
    return {token: kind for kind, token in tokens.items() if token is not None}


def features_of(
    processor: Any,
    texts: Sequence[str],
    media: Sequence[Sequence[Medium]],
    *,
    read: Callable[[Medium, Any], Any] = read_medium,
    padding_side: str | None = None,
    **options: Any,
) -> "BatchFeature":
    """Return what a processor makes of texts with their media, as tensors.

    Args:
        processor: The processor.
        texts: Texts, in which each medium is one token.
        media: The media of each text.
        read: Reads a medium for the processor.
        padding_side: Where shorter texts are padded; None where none is.
        options: Other arguments of the processor.

    Raises:
        DataError: A medium is not the one that was looked at, or cannot be decoded.
    """
    arguments: dict[str, Any] = {}
    images = [[read(medium, processor) for medium in of_text if medium.kind == "image"] for of_text in media]
    if any(images):
        arguments["images"] = images
    # Clips are one list, whatever their texts.
    clips = [read(medium, processor) for of_text in media for medium in of_text if medium.kind == "audio"]
    if clips:
        arguments |= {"audio": clips, "audio_kwargs": {"sampling_rate": sample_rate_of(processor)}}
    videos = [(medium, read(medium, processor)) for of_text in media for medium in of_text if isinstance(medium, Video)]
    padding = {} if padding_side is None else {"padding": True, "padding_side": padding_side}
    with decoding(processor, videos) as keys:
        if keys:
            arguments["videos"] = keys
        features: BatchFeature = processor(
            text=list(texts),
            **arguments,
            # Of the text alone: some processors would pad media by it too.
            text_kwargs={"add_special_tokens": False, **padding},
            # As tensors: Ovis 2's processor reads sizes of pictures from these.
            return_tensors="pt",
            **options,
        )
    # What a text says of a video's times is in it.
    features.pop("video_metadata", None)
    return features


class MediaTokens:
    """Writes media as the tokens of a processor.

    Args:
        processor: Processor of the model.

    Attributes:
        processor: The processor.
        marks: The tokens that stand for media before they are replaced, with the kind of each.
    """

    def __init__(self, processor: "ProcessorMixin") -> None:
        self.processor: Any = processor
        self.marks: Mapping[str, MediaKind] = marks_of(processor)
        self._tokens = {kind: token for token, kind in self.marks.items()}
        self._by_size: dict[tuple[float, ...], Replacement] = {}
        self._clips: dict[int, Replacement] = {}
        self._lengths: list[int] = []
        """Numbers of samples that the processor was asked, rising."""
        self._heard = sys.maxsize, 0
        """Samples of the shortest and the longest clip of which the processor reads the end."""
        self._counts: set[tuple[MediaKind, ...]] = set()
        """Media of texts that the processor takes."""

    def of(self, medium: Medium) -> Replacement:
        """Return what the processor makes of a medium of this size."""
        if isinstance(medium, Clip):
            return self._of_clip(medium)
        if medium.size not in self._by_size:
            self._by_size[medium.size] = self._ask(medium)
        return self._by_size[medium.size]

    def _of_clip(self, clip: Clip) -> Replacement:
        num = clip.num_samples(sample_rate_of(self.processor))
        if num not in self._clips:
            at = bisect_left(self._lengths, num)
            between = {self._clips[length] for length in self._lengths[max(0, at - 1) : at + 1]}
            if 0 < at < len(self._lengths) and len(between) == 1:
                self._clips[num] = between.pop()
            else:
                self._clips[num] = self._ask(clip)
                self._lengths.insert(at, num)
        return self._clips[num]

    def _ask(self, medium: Medium) -> Replacement:
        token = self._tokens[medium.kind]
        features: Any = features_of(
            self.processor, [token], [[medium]], read=blank_medium, return_text_replacement_offsets=True
        )
        # A processor without replacements leaves the one token as it is.
        replaced = features.get("text_replacement_offsets") or [[]]
        text = replaced[0][0]["replacement"] if replaced[0] else token
        num_values = num_values_in(features)
        return Replacement(text, len(features["input_ids"][0]), num_values)

    def features(self, medium: Medium) -> dict[str, "Tensor"]:
        """Return what the processor makes of a medium, by name."""
        return dict(features_of(self.processor, [self._tokens[medium.kind]], [[medium]]))

    def num_values(self, media: Sequence[Sequence[Medium]]) -> int:
        """Return the number of values of the pixels of the media of texts that are read together."""
        media = [[medium for medium in of_text if not isinstance(medium, Clip)] for of_text in media]
        if not any(media):
            return 0
        # A space, as some processors read no empty text.
        texts = ["".join(self._tokens[medium.kind] for medium in of_text) or " " for of_text in media]
        features = features_of(self.processor, texts, media, read=blank_medium, padding_side="right")
        return num_values_in(features)

    def expand(
        self, text: str, spans: Sequence[Span], media: Sequence[Medium], place: str
    ) -> tuple[str, tuple[Span, ...]]:
        """Replace the marks of a text by the tokens of its media.

        Args:
            text: A conversation by the chat template.
            spans: Its characters `[start, end)` that count in the loss.
            media: Its media, in their order.
            place: Where the row stands, for messages.

        Returns:
            The text, and the spans in it, without those of media.

        Raises:
            DataError: The text has other marks than those of its media.
        """
        pieces = self._pieces(text)
        self._check_marks([self.marks[mark] for mark in pieces[1::2]], media, place)
        self._check_count(media, place)
        for medium in media:
            if isinstance(medium, Clip):
                self._check_clip(medium, place)
        replaced, parts = self.spans_of(text, media), [pieces[0]]
        marks, before = [], len(pieces[0])
        for medium, mark, piece in zip(media, pieces[1::2], pieces[2::2], strict=True):
            marks.append((before, before + len(mark)))
            parts += [self.of(medium).text, piece]
            before += len(mark) + len(piece)
        return "".join(parts), tuple(_without(_moved(spans, marks, replaced), replaced))

    def spans_of(self, text: str, media: Sequence[Medium]) -> list[Span]:
        """Return the characters that are media in a text once its marks are replaced."""
        pieces = self._pieces(text)
        spans, end = [], len(pieces[0])
        for medium, piece in zip(media, pieces[2::2], strict=True):
            start, end = end, end + len(self.of(medium).text)
            spans.append((start, end))
            end += len(piece)
        return spans

    def _pieces(self, text: str) -> list[str]:
        """Return the parts of a text between its marks, and the marks between them."""
        return re.split(f"({'|'.join(map(re.escape, self.marks))})", text)

    def _check_marks(self, marked: Sequence[MediaKind], media: Sequence[Medium], place: str) -> None:
        """Check that the marks of a text are those of its media.

        Raises:
            DataError: They are not.
        """
        for token, kind in self.marks.items():
            num = sum(medium.kind == kind for medium in media)
            if marked.count(kind) != num:
                raise DataError(
                    f"{place}: the chat template writes {counted(marked.count(kind), 'token')} {token} for "
                    f"{counted(num, KINDS[kind].noun)}",
                    hint="set model.chat_template to the model's own, and remove the token from the texts",
                )
        for medium in media:
            if medium.kind not in self._tokens:
                noun = KINDS[medium.kind].noun
                raise DataError(f"{place}: {type(self.processor).__name__} has no token for {noun}s")
        if [medium.kind for medium in media] != marked:
            raise DataError(
                f"{place}: the chat template writes images and other media in another order",
                hint="set model.chat_template to one that keeps their order, or put them in its order",
            )

    def _check_count(self, media: Sequence[Medium], place: str) -> None:
        """Check that the processor takes a text with so many media.

        Raises:
            DataError: It does not.
        """
        kinds = tuple(medium.kind for medium in media)
        if "audio" not in kinds or kinds in self._counts:
            return
        try:
            features_of(self.processor, ["".join(map(self._tokens.__getitem__, kinds))], [media], read=blank_medium)
        except ValueError as error:
            num = " and ".join(counted(kinds.count(kind), KINDS[kind].noun) for kind in dict.fromkeys(kinds))
            problem = f"{place}: {type(self.processor).__name__} refuses a row with {num}: {error}"
            raise DataError(problem, hint="change the row, or remove it") from error
        self._counts.add(kinds)

    def _check_clip(self, clip: Clip, place: str) -> None:
        """Check that a clip is neither too short to be any tokens, nor longer than the processor reads.

        Raises:
            DataError: It is.
        """
        rate, reader = sample_rate_of(self.processor), type(self.processor).__name__
        num = clip.num_samples(rate)
        if self._heard[0] <= num <= self._heard[1]:
            return
        try:
            is_read = self._tokens["audio"] in self.of(clip).text and self._hears_end(num)
        except (ValueError, RuntimeError) as error:
            problem = f"{place}: {reader} cannot read {clip.words}: {error}"
            raise DataError(problem, hint="remove the clip, or change its length") from error
        if is_read:
            self._heard = min(self._heard[0], num), max(self._heard[1], num)
            return
        low, high = self._heard[1], num
        while high - low > rate // 10:
            middle = (low + high) // 2
            low, high = (middle, high) if self._hears_end(middle) else (low, middle)
        if not low or low > num:
            problem = f"{place}: {clip.words} is too short: {reader} makes nothing of it"
            raise DataError(problem, hint="remove the clip, or join it with others")
        problem = f"{place}: {clip.words} is too long: {reader} reads the first {low / rate:,.1f} s of a clip"
        raise DataError(problem, hint="split the clip")

    def _hears_end(self, num: int) -> bool:
        """Return whether the features of a clip of so many samples change with its last tenth of a second."""
        import numpy as np

        silent = np.zeros(num, dtype=np.float32)
        noisy = silent.copy()
        tail = min(num, sample_rate_of(self.processor) // 10)
        noisy[-tail:] = np.random.default_rng(0).standard_normal(tail)
        token, blank = self._tokens["audio"], Clip("", num, 1, "")
        features, changed = (
            features_of(self.processor, [token], [[blank]], read=lambda *_, samples=samples: samples)
            for samples in (silent, noisy)
        )
        return not all(value.equal(changed[name]) for name, value in features.items())

    def placed(
        self, text: str, media: Sequence[Medium], place: str, marks: Callable[[str, Span], Sequence[bool]]
    ) -> list[MediumTokens]:
        """Return the tokens that are media, once the marks of a text are replaced.

        Args:
            text: The text with its marks.
            media: Its media, in their order.
            place: Where the row stands, for messages.
            marks: For each token of a text whether it has a character of a span.

        Raises:
            DataError: The text has other marks than those of its media.
        """
        whole, _ = self.expand(text, (), media, place)
        tokens, before = [], 0
        for medium, span in zip(media, self.spans_of(text, media), strict=True):
            inside = [index for index, is_inside in enumerate(marks(whole, span)) if is_inside]
            # Two media may share a token of what stands around them.
            start, before = max(before, inside[0]), inside[-1] + 1
            tokens.append(MediumTokens(medium, start, before))
        return tokens

    def check(self, text: str, media: Sequence[Medium], ids: Sequence[int], place: str) -> None:
        """Check that the whole processor makes the same tokens of a text with its real media.

        Raises:
            DataError: It does not.
        """
        own = features_of(self.processor, [text], [media])["input_ids"][0].tolist()
        if own != list(ids):
            nouns = nouns_of(medium.kind for medium in media)
            raise DataError(
                f"{place}: {type(self.processor).__name__} returns {len(own):,} tokens for the row, "
                f"but the sizes of its {nouns} give {len(ids):,}",
                hint="this processor is unsupported for training",
            )


def _moved(spans: Sequence[Span], marks: Sequence[Span], replaced: Sequence[Span]) -> list[Span]:
    """Return spans of a text, which begin and end outside of its marks, in the text whose marks were replaced."""

    def moved(position: int) -> int:
        behind = [after[1] - before[1] for before, after in zip(marks, replaced, strict=True) if before[1] <= position]
        return position + (behind[-1] if behind else 0)

    return [(moved(start), moved(end)) for start, end in spans]


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Spans without the characters of others; both in order, each without overlaps."""
    parts = []
    for start, end in spans:
        for first, last in holes:
            if first < end and last > start:
                parts += [(start, first)] * (start < first)
                start = max(start, last)
        parts += [(start, end)] * (start < end)
    return parts
