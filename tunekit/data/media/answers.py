"""Prompts with pictures and their answers, as text and as tokens.

Rows of preference and reinforcement methods are kept as they were read, with marks for their pictures. Here they are
rendered by the chat template, in which each picture is one token, and measured with all tokens of their pictures.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.messages import tools_of
from tunekit.data.formats.row_formats import Row
from tunekit.data.media.collate import MEDIA, as_json
from tunekit.data.media.expand import MediaTokens, MediumTokens, Span
from tunekit.data.media.in_rows import as_parts
from tunekit.data.media.kinds import COLUMN, Medium, media_of, pictures_in
from tunekit.data.media.pictures import read_picture
from tunekit.data.packing.sequences import common_prefix_length
from tunekit.data.tokenization.render import ChatRenderer, Rendered, in_loss
from tunekit.errors import DataError
from tunekit.recipe.sections.data import MediaKind

if TYPE_CHECKING:
    import datasets
    from transformers import ProcessorMixin


PAIR = ("chosen", "rejected")
"""Columns of the answers of a pair."""

RATED = ("completion",)
"""Column of an answer that is good or bad."""


class PictureAnswers:
    """Renders and tokenizes prompts with pictures, with their answers.

    Args:
        processor: Processor of the model.

    Attributes:
        images: The tokens of pictures.
    """

    def __init__(self, processor: "ProcessorMixin") -> None:
        self.images = MediaTokens(processor)
        self._tokenizer = self.images.processor.tokenizer
        self._chat = ChatRenderer(self._tokenizer, in_parts=True)

    @property
    def input_names(self) -> set[str]:
        """Names of what the processor makes of a text with a picture."""
        return set(self._blank(return_tensors="pt"))

    @property
    def why_no_lists(self) -> str | None:
        """The reason why the processor cannot return lists; None where it can."""
        try:
            self._blank()
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        return None

    def _blank(self, **options: Any) -> Any:
        from PIL import Image

        processor = self.images.processor
        return processor(text=[processor.image_token], images=[[Image.new("RGB", (64, 64))]], **options)

    def texts(self, row: Row, columns: Sequence[str], place: str) -> tuple[str, list[str]]:
        """Return a prompt, and the prompt with each answer, as texts in which each picture is one token.

        Raises:
            DataError: The chat template refuses the row, or leaves out a call of a tool in an answer.
        """
        prompt, tools = row["prompt"], tools_of(row.get("tools")) or None
        if isinstance(prompt, str):
            problem = f"{place}: prompt is plain text, but other rows have images"
            raise DataError(problem, hint="make it a list of messages")
        question = self._chat.text(prompt, place, tools=tools, add_generation_prompt=True)
        answered = []
        for column in columns:
            whole = [*prompt, *row[column]]
            text = self._chat.text(whole, place, tools=tools)
            self._chat.check_calls(whole, place, Rendered(text, ()), num_prompt=len(prompt), tools=tools)
            answered.append(text)
        return question, answered

    def tokens(self, row: Row, columns: Sequence[str], place: str) -> tuple[int, list[list[int]], Counter[MediaKind]]:
        """Return the number of tokens of the prompt, the tokens of it with each answer, and numbers of those of media.

        The prompt ends where its tokens and those of an answer part, as TRL has it (trl 1.16, `DPOTrainer`).

        Raises:
            DataError: As for `texts`, or there are more or fewer tokens for pictures than pictures.
        """
        return self._tokens(self.texts(row, columns, place), media_of(row), place)

    def _tokens(
        self, texts: tuple[str, list[str]], pictures: Sequence[Medium], place: str
    ) -> tuple[int, list[list[int]], Counter[MediaKind]]:
        question, answered = texts
        num_media_tokens: Counter[MediaKind] = Counter()
        for picture in pictures:
            num_media_tokens[picture.kind] += self.images.of(picture).num_tokens
        prompt_ids, *wholes = (self._encode(text, pictures, place) for text in (question, *answered))
        num_prompt = min((common_prefix_length(prompt_ids, ids) for ids in wholes), default=len(prompt_ids))
        return num_prompt, wholes, num_media_tokens

    def prompt_ids(self, row: Row, place: str) -> list[int]:
        """Return the tokens of a prompt by itself."""
        question, _ = self.texts(row, (), place)
        return self._encode(question, media_of(row), place)

    def places(self, row: Row, columns: Sequence[str], place: str) -> list[list[MediumTokens]]:
        """Return the tokens that are pictures, of the prompt with each answer, or of the prompt where there is none."""
        question, answered = self.texts(row, columns, place)
        pictures = media_of(row)
        return [self.images.placed(text, pictures, place, self._marks) for text in answered or [question]]

    def check(self, row: Row, columns: Sequence[str], place: str) -> None:
        """Check that the tokens of a row are those that the whole processor makes of its pictures.

        Raises:
            DataError: They are not.
        """
        question, answered = self.texts(row, columns, place)
        text = answered[0] if answered else question
        pictures = media_of(row)
        self.images.check(text, pictures, self._encode(text, pictures, place), place)

    def pairs(self, rows: "datasets.Dataset") -> "datasets.Dataset":
        """Return pairs as token ids by TRL's names, with the texts and pictures that a processor reads."""

        def columns(row: Row) -> dict[str, object]:
            texts = self.texts(row, PAIR, "a row")
            num_prompt, (chosen, rejected), _ = self._tokens(texts, media_of(row), "a row")
            return {
                "prompt_ids": chosen[:num_prompt],
                "chosen_ids": chosen[num_prompt:],
                "rejected_ids": rejected[num_prompt:],
                **{f"{name}_text": text for name, text in zip(PAIR, texts[1], strict=True)},
                MEDIA: as_json(row),
            }

        return rows.map(columns, remove_columns=rows.column_names).with_format(None)

    def rated(self, rows: "datasets.Dataset", num_together: int | None) -> "datasets.Dataset":
        """Return answers that are good or bad as token ids by TRL's names, with their texts, pictures and labels.

        For the estimate of a divergence each prompt, with its own pictures, also comes with the answer before it, as
        TRL pairs them (trl 1.16, `DataCollatorForVisionUnpairedPreference`).

        Args:
            rows: Rows with columns `prompt`, `completion` and `label`, in the order of training.
            num_together: Rows that give each other their answers; None where no divergence is estimated.
        """

        def columns(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
            together = _rows_of(batch)
            results = [self._rated(row) for row in together]
            if num_together is not None:
                for row, other, result in zip(together, [together[-1], *together[:-1]], results, strict=True):
                    result |= self._mismatched(row, other)
            return {name: [result[name] for result in results] for name in results[0]}

        prepared = rows.map(columns, batched=True, batch_size=num_together or 1, remove_columns=rows.column_names)
        return prepared.with_format(None)

    def _rated(self, row: Row) -> dict[str, object]:
        texts = self.texts(row, RATED, "a row")
        num_prompt, (ids,), _ = self._tokens(texts, media_of(row), "a row")
        return {
            "prompt_ids": ids[:num_prompt],
            "completion_ids": ids[num_prompt:],
            "completion_text": texts[1][0],
            MEDIA: as_json(row),
            "label": row["label"],
        }

    def _mismatched(self, row: Row, other: Row) -> dict[str, object]:
        """A prompt with the answer to another one."""
        mismatched = row | {"completion": other["completion"]}
        texts = self.texts(mismatched, RATED, "a row")
        num_prompt, (ids,), _ = self._tokens(texts, media_of(row), "a row")
        return {"KL_ids": ids, "KL_num_prompt": num_prompt, "KL_text": texts[1][0]}

    def _encode(self, text: str, pictures: Sequence[Medium], place: str) -> list[int]:
        whole, _ = self.images.expand(text, (), pictures, place)
        ids: list[int] = self._tokenizer(whole, add_special_tokens=False)["input_ids"]
        return ids

    def _marks(self, text: str, span: Span) -> list[bool]:
        encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return in_loss(encoding["offset_mapping"], (span,))


def with_pictures(rows: "datasets.Dataset") -> "datasets.Dataset":
    """Return prompts as TRL reads them: contents as lists of parts, and a column `images` of decoded pictures."""
    # Rows are decoded when they are asked for.
    decode = rows.format["format_kwargs"]["transform"]

    def read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        columns = decode(batch)
        rows = [with_images(row) for row in _rows_of(columns)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    return rows.with_transform(read)


def _rows_of(columns: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return the rows of a batch of columns."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def with_images(row: Row) -> Row:
    """Return a prompt with pictures as TRL reads it, with `images` decoded; any other row as it is."""
    pictures = pictures_in(row)
    if not pictures:
        return dict(row)
    remainder = {name: value for name, value in row.items() if name != COLUMN}
    return {**remainder, "prompt": as_parts(row["prompt"]), "images": [read_picture(picture) for picture in pictures]}
