"""Tokens of pictures: how many, and which, without decoding one.

A processor of Transformers replaces the one token that stands for a picture in a text by as many as the picture's size
asks for, with others around and between them for some models. What it writes for a size is asked of the processor
itself, of a blank picture, once for each size. That this gives the tokens of the rows is checked by the whole processor
on rows with their real pictures, before training and for each row while it is trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tunekit.data.formats.row_formats import counted
from tunekit.data.images.pictures import Picture, read_picture
from tunekit.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ProcessorMixin

Span = tuple[int, int]


class Replacement(NamedTuple):
    """Outcome of a processor for a picture of some size."""

    text: str
    """Text that stands for the picture."""
    num_tokens: int
    num_values: int
    """Values of its pixels, of all parts that the processor cuts it into."""


@dataclass(frozen=True)
class PictureTokens:
    """The tokens `[start, stop)` of a row that are a picture."""

    picture: Picture
    start: int
    stop: int

    @property
    def words(self) -> str:
        """The picture in place of its tokens: `[image cat.png 640x480: 256 tokens]`."""
        size = f"{self.picture.width}x{self.picture.height}"
        named = " ".join(filter(None, ("image", self.picture.name, size)))
        return f"[{named}: {counted(self.stop - self.start, 'token')}]"


class ImageTokens:
    """Writes pictures as the tokens of a processor.

    Args:
        processor: Processor of the model.

    Attributes:
        processor: The processor.
        mark: The token that stands for a picture before it is replaced.
    """

    def __init__(self, processor: "ProcessorMixin") -> None:
        self.processor: Any = processor
        self.mark: str = processor.image_token
        self._by_size: dict[tuple[int, int], Replacement] = {}

    def of_size(self, width: int, height: int) -> Replacement:
        """Return what the processor makes of a picture of this size."""
        if (width, height) not in self._by_size:
            from PIL import Image

            blank = Image.new("RGB", (width, height))
            # As tensors: Ovis 2's processor reads sizes of pictures from these.
            features = self.processor(
                text=[self.mark],
                images=[[blank]],
                add_special_tokens=False,
                return_text_replacement_offsets=True,
                return_tensors="pt",
            )
            # A processor without replacements leaves the one token as it is.
            replaced = features.get("text_replacement_offsets") or [[]]
            text = replaced[0][0]["replacement"] if replaced[0] else self.mark
            num_values = features["pixel_values"].numel()
            self._by_size[width, height] = Replacement(text, len(features["input_ids"][0]), num_values)
        return self._by_size[width, height]

    def features(self, picture: Picture) -> dict[str, "Tensor"]:
        """Return what the processor makes of a picture, by name."""
        image = read_picture(picture)
        return dict(self.processor(text=[self.mark], images=[[image]], add_special_tokens=False, return_tensors="pt"))

    def num_values(self, sizes: Sequence[Sequence[tuple[int, int]]]) -> int:
        """Return the number of values of the pixels of pictures of some sizes, of texts that are read together."""
        if not any(sizes):
            return 0
        from PIL import Image

        features = self.processor(
            # A space, as some processors read no empty text.
            text=[self.mark * len(of_text) or " " for of_text in sizes],
            images=[[Image.new("RGB", size) for size in of_text] for of_text in sizes],
            add_special_tokens=False,
            padding=True,
            return_tensors="pt",
        )
        num: int = features["pixel_values"].numel()
        return num

    def expand(
        self, text: str, spans: Sequence[Span], pictures: Sequence[Picture], place: str
    ) -> tuple[str, tuple[Span, ...], int]:
        """Replace the marks of a text by the tokens of its pictures.

        Args:
            text: A conversation by the chat template.
            spans: Its characters `[start, end)` that count in the loss.
            pictures: Its pictures, in their order.
            place: Where the row stands, for messages.

        Returns:
            The text, the spans in it, without those of pictures, and the number of tokens of the pictures.

        Raises:
            DataError: The text has more or fewer marks than pictures.
        """
        pieces, num_tokens = text.split(self.mark), 0
        if len(pieces) != len(pictures) + 1:
            raise DataError(
                f"{place}: the chat template writes {counted(len(pieces) - 1, 'token')} {self.mark} for "
                f"{counted(len(pictures), 'image')}",
                hint="set model.chat_template to the model's own, and remove the token from the texts",
            )
        replaced, parts = self.spans_of(text, pictures), [pieces[0]]
        marks, before = [], len(pieces[0])
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            replacement, num, _ = self.of_size(picture.width, picture.height)
            marks.append((before, before + len(self.mark)))
            parts += [replacement, piece]
            num_tokens += num
            before += len(self.mark) + len(piece)
        return "".join(parts), tuple(_without(_moved(spans, marks, replaced), replaced)), num_tokens

    def spans_of(self, text: str, pictures: Sequence[Picture]) -> list[Span]:
        """Return the characters that are pictures in a text once its marks are replaced."""
        pieces = text.split(self.mark)
        spans, end = [], len(pieces[0])
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            start, end = end, end + len(self.of_size(picture.width, picture.height)[0])
            spans.append((start, end))
            end += len(piece)
        return spans

    def placed(
        self, text: str, pictures: Sequence[Picture], place: str, marks: Callable[[str, Span], Sequence[bool]]
    ) -> list[PictureTokens]:
        """Return the tokens that are pictures, once the marks of a text are replaced.

        Args:
            text: The text with its marks.
            pictures: Its pictures, in their order.
            place: Where the row stands, for messages.
            marks: For each token of a text whether it has a character of a span.

        Raises:
            DataError: The text has more or fewer marks than pictures.
        """
        whole, _, _ = self.expand(text, (), pictures, place)
        tokens, before = [], 0
        for picture, span in zip(pictures, self.spans_of(text, pictures), strict=True):
            inside = [index for index, is_inside in enumerate(marks(whole, span)) if is_inside]
            # Two pictures may share a token of what stands around them.
            start, before = max(before, inside[0]), inside[-1] + 1
            tokens.append(PictureTokens(picture, start, before))
        return tokens

    def check(self, text: str, pictures: Sequence[Picture], ids: Sequence[int], place: str) -> None:
        """Check that the whole processor makes the same tokens of a text with its real pictures.

        Raises:
            DataError: It does not.
        """
        images = [read_picture(picture) for picture in pictures]
        features: Any = self.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        own = features["input_ids"][0].tolist()
        if own != list(ids):
            raise DataError(
                f"{place}: {type(self.processor).__name__} returns {len(own):,} tokens for the row, "
                f"but the sizes of its images give {len(ids):,}",
                hint="this image processor is unsupported for training",
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
