"""Rows of answers and of prompts as TRL's alignment trainers read them: whole, measured, without those too long.

TRL applies the chat template and tokenises by itself when a run begins. Here the rows are only measured, by the same
rules, so that the plan knows them: answers are cut at the longest sequence, a row whose prompt alone fills it is left
out, as TRL does, and so is a prompt that leaves no room for an answer. Where TRL has rules of its own (ORPO and CPO),
`tokenised_pairs` makes the tokens, by the same rules again.

A row is kept as JSON in a single Arrow column: a column of Arrow gives every mapping in it the keys of all others, and
templates and rewards would find keys that stand in no source.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tunekit.data.formats.messages import check_calls_written, tools_of
from tunekit.data.formats.row_formats import BadRow, Row, counted
from tunekit.data.media.answers import PAIR, PictureAnswers
from tunekit.data.media.kinds import COLUMN, media_of
from tunekit.data.packing.sequences import IGNORED, Mixing, Mixture, common_prefix_length, mix, ordered
from tunekit.data.prepare import Progress, SourceShare, read_dataset, splits_of
from tunekit.data.sources.ground_truth import ground_truth_tokens
from tunekit.data.sources.load import LoadedData
from tunekit.data.sources.rows import Places, Rows
from tunekit.data.tokenization.tokenize import TokenReport
from tunekit.errors import DataError
from tunekit.probe.chat_template import template_in_time
from tunekit.recipe.sections.data import DataSection, Format, MediaKind

if TYPE_CHECKING:
    import datasets
    import numpy as np
    from transformers import PreTrainedTokenizerBase

_COLUMN = "row"
_BATCH_ROWS = 1000
_TOLD_EVERY = 500


EncodeLabels = Callable[[Row], tuple[int, list[int], list[int]]]
"""From a row to the number of tokens of its prompt, the tokens of all, and the label of each: -100 for none."""


@dataclass(frozen=True)
class Room:
    """Maximum lengths of a prompt with its answer, in tokens.

    Attributes:
        max_length: Both together; longer answers are cut.
        max_prompt_length: The prompt alone; longer ones are left out.
        cuts: Whether longer answers are cut; otherwise their rows are left out.
        prompts: Columns of prompts, each of which has to fit.
        answer: Column of a text that has to fit behind the prompt too; None where there is none.
    """

    max_length: int
    max_prompt_length: int
    cuts: bool = True
    prompts: tuple[str, ...] = ("prompt",)
    answer: str | None = None

    def has(self, prompt_tokens: int, sequences: Sequence[int]) -> bool:
        """Return whether a row fits."""
        return prompt_tokens <= self.max_prompt_length and (self.cuts or max(sequences, default=0) <= self.max_length)

    def nothing_fits(self, num_rows: int) -> str:
        """Return the error message for a source of which no row is kept."""
        if self.cuts:
            reason = f"none of {counted(num_rows, 'prompt')} leaves room for a completion"
            return f"{reason}: limit {self.max_prompt_length:,} tokens"
        reason = f"none of {counted(num_rows, 'row')} is short enough"
        return f"{reason}: limit {self.max_length:,} tokens for a prompt with its completion"

    @property
    def too_long(self) -> str:
        """Description of rows that are left out."""
        if self.cuts:
            compared = f", or with {self.answer} than {self.max_length:,}" if self.answer is not None else ""
            return f"prompt longer than {self.max_prompt_length:,} tokens{compared}"
        return f"prompt with completion longer than {self.max_length:,} tokens"


@dataclass(frozen=True)
class Measured:
    """The rows of a source that are trained on.

    Attributes:
        rows: The source.
        kept: Indices of its rows that leave room for an answer, rising.
        num_tokens: Tokens of each of them, of its answers with their prompt, or of a prompt alone.
        is_good: Whether the answer of each of them is good, where rows say so.
        num_trainable_tokens: Of all of them, those of answers, or those at which steps are scored.
        num_truncated: Rows with an answer that is cut.
        lengths: Tokens of each row before anything was cut or left out, of its longest answer with its prompt, or of a
            prompt alone.
        num_media: Media of all rows, by kind.
        num_media_tokens: Their tokens, once for each row.
    """

    rows: Rows
    kept: tuple[int, ...]
    num_tokens: "np.ndarray"
    is_good: "np.ndarray"
    num_trainable_tokens: int
    num_truncated: int
    lengths: "np.ndarray"
    num_media: Mapping[MediaKind, int] = field(default_factory=dict)
    num_media_tokens: Mapping[MediaKind, int] = field(default_factory=dict)

    @property
    def ranks(self) -> "np.ndarray":
        """The number of each kept row in the column of a curriculum."""
        import numpy as np

        assert self.rows.ranks is not None
        return np.array(self.rows.ranks)[list(self.kept)]

    @property
    def counts(self) -> TokenReport:
        """Counts of rows that were trained on, truncated and dropped, as for rows tokenized before a run."""
        return TokenReport(
            num_rows=len(self.rows),
            num_sequences=len(self.kept),
            num_truncated=self.num_truncated,
            num_dropped=self.num_dropped,
            num_tokens=int(self.num_tokens.sum()),
            num_trainable_tokens=self.num_trainable_tokens,
            longest_tokens=self.longest_tokens,
            num_media=self.num_media,
            num_media_tokens=self.num_media_tokens,
        )

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence before anything was cut or left out."""
        return int(self.lengths.max())

    @property
    def num_dropped(self) -> int:
        """Rows that are left out."""
        return len(self.rows) - len(self.kept)


@dataclass(frozen=True)
class AlignmentSplit:
    """The rows of one split, and how they are mixed.

    Attributes:
        name: `train` or `eval`.
        sources: What is trained on of each source.
        mixing: How much of each, and in which order.
    """

    name: str
    sources: tuple[Measured, ...]
    mixing: Mixing

    @property
    def shares(self) -> tuple[SourceShare, ...]:
        """Share taken from each source."""
        return tuple(
            SourceShare(source.rows.source, len(rows), int(source.num_tokens[rows].sum()))
            for source, rows in self._taken()
        )

    @property
    def num_good(self) -> int:
        """Rows with a good answer, where rows say so."""
        return sum(int(source.is_good[rows].sum()) for source, rows in self._taken())

    @cached_property
    def _mixture(self) -> Mixture:
        mixture = mix([source.num_tokens for source in self.sources], self.mixing)
        return mixture if self.mixing.curriculum is None else ordered(mixture, [s.ranks for s in self.sources])

    def _taken(self) -> "Iterator[tuple[Measured, np.ndarray]]":
        """Each source, and which of the rows kept of it are in the mixture."""
        for number, source in enumerate(self.sources):
            yield source, self._mixture.index[self._mixture.source == number]

    def save(self, path: Path) -> None:
        """Write the rows in their order."""
        import pyarrow as pa  # type: ignore[import-untyped]

        chosen = self._mixture
        schema = pa.schema([(_COLUMN, pa.large_string())])
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for start in range(0, len(chosen.index), _BATCH_ROWS):
                places = slice(start, start + _BATCH_ROWS)
                texts = [
                    json.dumps(self.sources[source].rows.rows[self.sources[source].kept[index]], ensure_ascii=False)
                    for source, index in zip(chosen.source[places].tolist(), chosen.index[places].tolist(), strict=True)
                ]
                writer.write_batch(pa.record_batch([pa.array(texts, pa.large_string())], schema=schema))

    @property
    def places(self) -> Places:
        """Location of each row, in their order."""
        return Places.of(
            [source.rows for source in self.sources],
            [source.kept for source in self.sources],
            self._mixture.source,
            self._mixture.index,
        )


def measure_data(
    section: DataSection,
    data: LoadedData,
    tokenizer: "PreTrainedTokenizerBase",
    room: Room,
    on_progress: Progress | None = None,
    *,
    answers: PictureAnswers | None = None,
    labeled: Mapping[str, EncodeLabels] | None = None,
) -> tuple[AlignmentSplit, ...]:
    """Measure the rows of a recipe, and leave out those that are too long.

    Args:
        section: The data section.
        data: The rows.
        tokenizer: Tokenizer of the model.
        room: The longest prompt, and the longest prompt with an answer.
        on_progress: Told how far the rows of a source are.
        answers: Tokenizes rows, where some have pictures.
        labeled: By split, the tokens of a row with labels, and which of them are scored.

    Returns:
        `train`, and `eval` if the recipe has one.

    Raises:
        DataError: No row of a source leaves room for an answer, or the rows do not fit the chat template.
    """
    splits = []
    for name, sources, mixing in splits_of(section, data):
        encode = None if labeled is None else labeled[name]
        measured = tuple(_measure(rows, tokenizer, room, on_progress, answers, encode) for rows in sources)
        splits.append(AlignmentSplit(name, measured, mixing))
    return tuple(splits)


def _measure(
    rows: Rows,
    tokenizer: "PreTrainedTokenizerBase",
    room: Room,
    on_progress: Progress | None,
    answers: PictureAnswers | None,
    encode_labels: EncodeLabels | None,
) -> Measured:
    import numpy as np

    indices: list[int] = []
    sizes: list[int] = []
    good: list[bool] = []
    longest: list[int] = []
    num_trainable = num_truncated = 0
    num_media: Counter[MediaKind] = Counter()
    num_media_tokens: Counter[MediaKind] = Counter()
    for index, row in enumerate(rows.rows):
        answered: Sequence[Sequence[int]]
        num_labels: int | None = None
        try:
            if encode_labels is not None:
                prompt_tokens, ids, labels = encode_labels(row)
                answered, num_labels = (ids,), len(labels) - labels.count(IGNORED)
            elif answers is None:
                check_calls(row, ANSWERS[rows.format], tokenizer, rows.place(index))
                prompt_tokens, answered = tokens_of(row, ANSWERS[rows.format], tokenizer)
                prompt_tokens = longest_prompt(row, prompt_tokens, room, tokenizer)
            else:
                if row.get(COLUMN) and not num_media:
                    answers.check(row, ANSWERS[rows.format], rows.place(index))
                prompt_tokens, answered, num_of_row = answers.tokens(row, ANSWERS[rows.format], rows.place(index))
                num_media.update(medium.kind for medium in media_of(row))
                num_media_tokens.update(num_of_row)
        except DataError:
            raise
        except BadRow as error:
            raise DataError(f"{rows.place(index)}: {error}") from None
        except Exception as error:  # a template is the model's or the user's: it may raise anything
            problem = f"{rows.place(index)}: the chat template cannot render the row: {error}"
            raise DataError(problem, hint="set another model.chat_template, or write prompts as text") from error
        sequences = [len(sequence) for sequence in answered]
        longest.append(max(prompt_tokens, *sequences) if sequences else prompt_tokens)
        if room.has(prompt_tokens, sequences):
            cut = [min(length, room.max_length) for length in sequences]
            indices.append(index)
            sizes.append(sum(cut) or prompt_tokens)
            good.append(row.get("label") is True)
            num_trainable += sum(cut) - prompt_tokens * len(cut) if num_labels is None else num_labels
            num_truncated += cut != sequences
        if on_progress is not None and ((index + 1) % _TOLD_EVERY == 0 or index + 1 == len(rows)):
            on_progress(rows.source, index + 1, len(rows))
    if not indices:
        problem = f"{rows.source}: {room.nothing_fits(len(rows))}, longest row {max(longest):,}"
        raise DataError(problem, hint="raise data.max_length")
    num_tokens, lengths = np.array(sizes, dtype=np.int64), np.array(longest, dtype=np.int64)
    is_good = np.array(good, dtype=bool)
    return Measured(
        rows=rows,
        kept=tuple(indices),
        num_tokens=num_tokens,
        is_good=is_good,
        num_trainable_tokens=num_trainable,
        num_truncated=num_truncated,
        lengths=lengths,
        num_media=dict(num_media),
        num_media_tokens=dict(num_media_tokens),
    )


ANSWERS: dict[Format, tuple[str, ...]] = {
    "preference": PAIR,
    "unpaired_preference": ("completion",),
    "stepwise_supervision": ("completions",),
    "classification": (),
    "prompts": (),
}
"""Columns of answers by format. What stands beside prompts is for the rewards, whatever it is called."""


BARE_PROMPTS = (
    "prompts are plain text and bypass the chat template; for a chat model, write each prompt as a list of messages"
)
"""Note for rows for which `are_bare` holds."""


def are_bare(rows: Rows, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Return whether prompts are texts, which TRL passes unchanged to a model that has a chat template."""
    return tokenizer.chat_template is not None and not rows.is_conversational


def tokens_of(
    row: Row, columns: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[int, Sequence[Sequence[int]]]:
    """Return the number of tokens of the prompt, and the tokens of the prompt with each answer, as TRL makes them."""
    prompt, answers = row["prompt"], [row[column] for column in columns]
    prompt_ids = prompt_tokens(row, tokenizer, "a row")
    if isinstance(prompt, list):
        whole = [_chat_tokens([*prompt, *answer], row, tokenizer, "a row") for answer in answers]
    else:
        end = tokenizer.eos_token or ""
        whole = [tokenizer(prompt + answer.removesuffix(end) + end)["input_ids"] for answer in answers]
    shared = min((common_prefix_length(prompt_ids, answer_ids) for answer_ids in whole), default=len(prompt_ids))
    return shared, whole


def longest_prompt(row: Row, num_tokens: int, room: Room, tokenizer: "PreTrainedTokenizerBase") -> int:
    """Return the tokens of the longest prompt of a row, each of which has to fit.

    A prompt whose own answer is longer than the room for a completion counts as longer by the difference.

    Args:
        row: The row.
        num_tokens: Tokens of its column `prompt`.
        room: The columns of prompts, and of an answer.
        tokenizer: Tokenizer of the model.
    """
    if room.answer is not None:
        num_answer = len(ground_truth_tokens(row[room.answer], tokenizer))
        return num_tokens + max(0, num_answer - (room.max_length - room.max_prompt_length))
    others = ({"prompt": row[column]} for column in room.prompts if column != "prompt")
    return max([num_tokens, *(len(prompt_tokens(prompt, tokenizer, "a row")) for prompt in others)])


def prompt_tokens(
    row: Row, tokenizer: "PreTrainedTokenizerBase", place: str, *, add_generation_prompt: bool = True
) -> Sequence[int]:
    """The tokens of a prompt by itself, as TRL makes them."""
    if isinstance(row["prompt"], list):
        return _chat_tokens(row["prompt"], row, tokenizer, place, add_generation_prompt=add_generation_prompt)
    return cast(Sequence[int], tokenizer(row["prompt"])["input_ids"])


def _chat_tokens(
    messages: list[Row],
    row: Row,
    tokenizer: "PreTrainedTokenizerBase",
    place: str,
    *,
    add_generation_prompt: bool = False,
) -> Sequence[int]:
    with template_in_time(place):
        encoded: Any = tokenizer.apply_chat_template(
            messages,
            tools=tools_of(row.get("tools")) or None,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
        )
    return cast(Sequence[int], encoded["input_ids"])


def check_calls(row: Row, columns: Sequence[str], tokenizer: "PreTrainedTokenizerBase", place: str) -> None:
    """Check that the chat template writes the calls of tools in the answers of a row.

    Raises:
        DataError: It leaves out one.
    """
    prompt = row["prompt"]
    if not isinstance(prompt, list):
        return
    tools = cast(Any, tools_of(row.get("tools")) or None)

    def render(messages: list[Row]) -> str:
        return cast(str, tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))

    for column in columns:
        answered = [i for i, message in enumerate(row[column], start=len(prompt)) if message["role"] == "assistant"]
        check_calls_written([*prompt, *row[column]], answered, place, render)


def tokenised_pairs(
    rows: "datasets.Dataset", tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> "datasets.Dataset":
    """Pairs as token ids and labels (-100 for the prompt), cut at the longest sequence, by TRL's experimental names."""

    def columns(row: Row) -> dict[str, list[int]]:
        prompt_tokens, answered = tokens_of(row, PAIR, tokenizer)
        column_lists: dict[str, list[int]] = {}
        for name, sequence in zip(PAIR, answered, strict=True):
            ids = list(sequence[:max_length])
            column_lists[f"{name}_input_ids"] = ids
            column_lists[f"{name}_attention_mask"] = [1] * len(ids)
            column_lists[f"{name}_labels"] = [-100] * prompt_tokens + ids[prompt_tokens:]
        return column_lists

    return rows.map(columns, remove_columns=rows.column_names).with_format(None)


def read_rows(path: Path) -> "datasets.Dataset":
    """Rows that were saved, with what stood in them: memory-mapped, and decoded when they are asked for."""
    return read_dataset(path).with_transform(_decoded)


def _decoded(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns of rows; those that TRL made of them stay as they are."""
    rows = [json.loads(text) for text in batch.get(_COLUMN, ())]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return {**columns, **{name: values for name, values in batch.items() if name != _COLUMN}}
