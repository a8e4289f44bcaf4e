"""Data section of recipes: sources of rows, and how the rows become tokens."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tunekit.recipe.reading.parse import Key, dotted
from tunekit.recipe.sections.section import EXPANDS_ENV, FUNCTION_PATTERN, Conflict, FunctionPath, Section

_Supervised = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "captions", "text", "tokens"]
_Compared = Literal["preference", "ranking", "unpaired_preference", "stepwise_supervision"]
SourceFormat = Literal[_Supervised, _Compared, "classification", "prompts"]
"""Shape of rows as they stand in a source."""

Format = Literal[
    "messages",
    "prompt_completion",
    "text",
    "tokens",
    "preference",
    "unpaired_preference",
    "stepwise_supervision",
    "classification",
    "prompts",
]
"""Shape of rows that a method can learn from."""

DataFormat = Literal["auto"] | SourceFormat | Annotated[FunctionPath, Field(pattern=FUNCTION_PATTERN)]
"""A shape of rows, that it is to be recognised, or a function that makes the rows."""

LossOn = Literal["assistant", "last", "all"]
"""Tokens in the loss: of assistant turns and completions, of the last turn only, or all."""

MediaKind = Literal["image", "audio", "video"]
"""Kind of media in rows."""

PromptStyle = Literal["plain", "line", "joined", "alpaca", "alpaca_turn"]
"""Text that instruction and input of an alpaca row become."""

TooLong = Literal["truncate", "truncate_turns", "drop", "refuse"]
"""Treatment of chats and completions beyond the maximum length."""

Replacements = dict[Annotated[str, Field(min_length=1)], str]
"""From texts in rows to what stands in their place."""


class DataSource(Section):
    """Source of rows. A string is short for `{path: STRING}`."""

    shorthand = "path"

    path: Annotated[str, Field(min_length=1, json_schema_extra=EXPANDS_ENV)]
    """Local file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, .feather, .txt; text formats also as .gz or .zst)
    relative to the working directory or else to the recipe's folder, folder of files of one kind, glob pattern
    (`chats/*.jsonl`), `example:NAME` for a file shipped with tunekit, URL (`https://...`, `s3://...`, `gs://...`,
    `hf://...`; patterns where files can be listed), or dataset name on the Hugging Face Hub. In a .txt file, two blank
    lines start a new document."""

    name: str | None = None
    """Configuration of a Hub dataset."""

    split: str | None = None
    """Split of a Hub dataset, slices allowed (`train[:5%]`). Default: `train` for training; for evaluation, the only
    one of `validation`, `test` and `eval` that exists."""

    revision: str | None = None
    """Branch, tag or commit of a Hub dataset."""

    format: DataFormat | None = None
    """Format of the rows of this source. Default: `data.format`."""

    columns: dict[str, str] | None = None
    """Column mapping of this source. Default: `data.columns`, which is ignored for a source with its own mapping."""

    loss_on: LossOn | None = None
    """Tokens of this source in the loss. Default: `data.loss_on`."""

    image_folder: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Image folder of this source. Default: `data.image_folder`."""

    system: Annotated[str, Field(min_length=1)] | None = None
    """System message of this source. Default: `data.system`."""

    prompt_style: PromptStyle | None = None
    """Prompts of alpaca rows of this source. Default: `data.prompt_style`."""

    replace: Replacements | None = None
    """Texts to replace in rows of this source. Default: `data.replace`."""

    max_samples: Annotated[int, Field(gt=0)] | None = None
    """Number of rows of this source to use. Default: all."""

    sampling: Literal["first", "random"] = "first"
    """Rows that `max_samples` selects: the first ones, or a random sample, the same in every run."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Sampling weight of this training source: weights of 3 and 1 give three rows of the first per row of the second
    (`data.weight_by` selects rows or tokens). Either all sources of `data.train` have a weight or none: without
    weights, every row is used once."""


def _one_or_several(value: Any) -> str:
    return "several" if isinstance(value, list) else "one"


Sources = Annotated[
    Annotated[DataSource, Tag("one")] | Annotated[list[DataSource], Field(min_length=1), Tag("several")],
    Discriminator(_one_or_several),
]
"""One source, or a list of them."""


class CompleteSource(DataSource):
    """A source as the data code takes it: what it leaves out is filled in from the data section."""

    key: str
    """Where the recipe has it: `data.train`, or `data.train[1]` in a list."""

    format: DataFormat
    """Shape of the rows."""

    columns: dict[str, str]
    """From our names of columns to those of the source, where they differ."""

    loss_on: LossOn
    """Tokens that count in the loss."""

    prompt_style: PromptStyle = "plain"
    """Prompts of alpaca rows."""

    replace: Replacements = {}
    """Texts to replace in rows."""

    curriculum_column: str | None = None
    """Column of numbers by which rows to train on are ordered."""


HANDED_DOWN = ("format", "columns", "loss_on", "image_folder", "system", "prompt_style", "replace")
"""Fields of the data section that hold for every source that gives none of its own."""

NEED_WEIGHTS = ("weight_by", "stopping_strategy")
"""Fields of the data section that say how weights are meant."""

NEED_SEVERAL = ("mixing",)
"""Fields of the data section that say how several sources come together."""


class DataSection(Section):
    """Data and its tokenization."""

    train: Sources
    """Training rows. A list of sources is mixed in proportion to their `weight`."""

    eval: Sources | None = None
    """Evaluation rows, used before, during and after training. For a list of sources, all rows of each."""

    format: DataFormat = "auto"
    """Format of the rows: `messages` (list of {role, content}), `sharegpt` (conversations, list of {from, value}),
    `alpaca` (instruction, output, and optional input, system and history), `prompt_completion` (columns prompt and
    completion), `captions` (image or file_name, caption or text, and optional prompt), `text` (column text),
    `tokens` (input_ids, labels), `preference` (chosen, rejected, and prompt unless they contain it), `ranking`
    (prompt, completions, scores), `unpaired_preference` (prompt, completion, label), `stepwise_supervision` (prompt,
    completions, a list of steps, and labels, one per step), `classification` (prompt, text or messages, and label, a
    list of them where a row has several) or `prompts` (prompt, and columns for rewards). `auto` detects it from the
    columns and reports it. `my_module:my_function` converts rows: it receives each row as a dict and returns a row of
    a format above, or None to skip it; the working directory is on the module path."""

    loss_on: LossOn = "assistant"
    """Tokens in the loss. `assistant`: assistant turns or completions; `last`: the last assistant turn, or completions;
    `all`: every token. Plain text always counts fully. Turns with `weight: 0`, `train: false` or `loss: false` are
    masked."""

    max_length: Annotated[int, Field(ge=8)] = 1024
    """Maximum sequence length in tokens. Longer chats and completions are truncated at the end unless `too_long` says
    otherwise, longer texts continue in the next sequence; the plan reports how many."""

    too_long: TooLong = "truncate"
    """Treatment of chats and completions longer than `max_length`. `truncate`: truncate at the end; `truncate_turns`:
    truncate each answer and its context at their ends, in proportion if both are long (LLaMA-Factory); `drop`: drop the
    row (Axolotl, ms-swift); `refuse`: fail."""

    packing: bool = False
    """Pack several documents into one sequence of `max_length` tokens, without attention across documents. Models that
    cannot isolate them are refused."""

    padding_free: Literal["auto"] | bool = "auto"
    """Concatenate the rows of a micro-batch instead of padding them, without attention across rows. `auto`: on CUDA
    with flash attention; padded elsewhere. Packed batches never have padding."""

    columns: dict[str, str] = {}
    """Column mapping: `{prompt: question, completion: answer}` reads column question as prompt and answer as
    completion; `images` and `audios` name the columns of images and audio. Applies to every source of `train` and
    `eval` without its own mapping."""

    image_folder: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Folder that relative paths of images and audio in rows start from; files outside of it are refused. Default: the
    folder of each data file."""

    system: Annotated[str, Field(min_length=1)] | None = None
    """System message of conversations and prompts without one. Default: none is added."""

    prompt_style: PromptStyle = "plain"
    """Prompt built from instruction and input of `alpaca` rows. `plain`: a user turn, with a blank line between them;
    `line`: with a line break (LLaMA-Factory); `joined`: without a separator; `alpaca`: plain text under the headings of
    Stanford Alpaca, such as `### Instruction:`, without the chat template (Axolotl); `alpaca_turn`: that text as a user
    turn (torchtune)."""

    replace: Replacements = {}
    """Texts to replace in every string of a row, such as `{"{{NAME}}": Ada}`, before its format is read."""

    max_bad_rows: Annotated[int, Field(ge=0)] = 0
    """Maximum number of invalid rows to skip per source; above it, the run fails."""

    eval_size: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Share of `train` rows to hold out for evaluation, instead of `eval`. Rows are selected by a hash of their
    content: the same rows stay held out when the file grows or is reordered, and duplicates never leak across the
    split."""

    weight_by: Literal["rows", "tokens"] = "rows"
    """Unit of `weight`: rows (each part of a text longer than `max_length` counts as one), or tokens."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """End of an epoch of weighted sources, as in datasets.interleave_datasets. `first_exhausted`: when the first source
    is exhausted; no row repeats, surplus rows are skipped. `all_exhausted`: when the last one is; every row is used at
    least once, and rows of smaller sources repeat."""

    mixing: Literal["interleave", "concatenate"] = "interleave"
    """Order of several sources. `interleave`: in turns, in proportion; `concatenate`: one after another, in the order
    of the list. Irrelevant for shuffled rows."""

    shuffle: bool = True
    """Train on rows in random order, reshuffled every epoch. false: in the order of the data."""

    curriculum: Literal["length"] | None = None
    """Order of training rows, the same in every epoch. `length`: ascending by number of tokens; rows of equal length
    stay in the order of the data. Requires `data.shuffle: false`. Default: the order of the data."""

    curriculum_column: Annotated[str, Field(min_length=1)] | None = None
    """Column of numbers in every source of `train` to sort training rows by, ascending, the same in every epoch; ties
    stay in the order of the data. Requires `data.shuffle: false`. Default: none."""

    streaming: bool = False
    """Read and tokenize rows during training instead of before, for data that does not fit on disk. Requires
    `train.max_steps`, since the number of rows is unknown."""

    @property
    def sources(self) -> tuple[CompleteSource, ...]:
        """The sources of `train`, one or several, with what they leave out filled in."""
        return self._complete("train", self.train, curriculum_column=self.curriculum_column)

    @property
    def eval_sources(self) -> tuple[CompleteSource, ...]:
        """The same for `eval`; empty without."""
        return self._complete("eval", self.eval)

    def _complete(
        self, name: str, given: Sources | None, *, curriculum_column: str | None = None
    ) -> tuple[CompleteSource, ...]:
        """Fill in what the sources of a field leave out."""
        section = {field: dict(self)[field] for field in HANDED_DOWN} | {"curriculum_column": curriculum_column}
        return tuple(
            CompleteSource(key=dotted(("data", *key)), **{**section, **source.model_dump(exclude_none=True)})
            for key, source in each_source(name, given)
        )

    def _conflicts_within(self) -> Iterator[Conflict]:
        """Yield conflicts between sources, and between the order of the rows and streaming."""
        yield from self._conflicts_of_sources()
        yield from self._conflicts_of_order()

    def _conflicts_of_sources(self) -> Iterator[Conflict]:
        """Yield conflicts between sources of a mixture, and of the evaluation."""
        sources = list(each_source("train", self.train))
        num_weights = sum(source.weight is not None for _, source in sources)
        for key, source in sources:
            if source.weight is None and num_weights:
                what = f"missing for '{source.path}', but other sources have one"
                yield Conflict((*key, "weight"), what, "give all sources a weight, or none")
            if source.weight is not None and len(sources) == 1:
                yield Conflict((*key, "weight"), "has no effect with a single source", "unset it")
        unread: tuple[str, ...] = () if num_weights else NEED_WEIGHTS
        why, hint = "without weights", "give all sources of data.train a weight, or unset it"
        if len(sources) == 1:
            unread, why, hint = (*NEED_WEIGHTS, *NEED_SEVERAL), "with a single source", "unset it"
        for name in unread:
            # A recipe that was written out states the defaults too.
            if dict(self)[name] != type(self).model_fields[name].default:
                yield Conflict((name,), f"has no effect {why}", hint)
        for key, source in each_source("eval", self.eval):
            if source.weight is not None:
                yield Conflict((*key, "weight"), "has no effect in data.eval: every row is used once", "unset it")
        for key, source in (*sources, *each_source("eval", self.eval)):
            if source.sampling == "random" and source.max_samples is None:
                yield Conflict((*key, "sampling"), "has no effect without max_samples", "set max_samples, or unset it")
            elif source.sampling == "random" and self.streaming and key[0] == "train":
                what = "cannot be random with data.streaming: the number of rows is unknown"
                yield Conflict((*key, "sampling"), what, "set it to first")
            columns = self.columns if source.columns is None else source.columns
            if columns and ":" in (source.format or self.format):
                what = "has no effect with a row function, which reads the columns itself"
                where = ("columns",) if source.columns is None else (*key, "columns")
                yield Conflict(where, what, "unset it")
        if self.eval is not None and self.eval_size is not None:
            yield Conflict(("eval_size",), "mutually exclusive with data.eval", "keep one of them")

    def _conflicts_of_order(self) -> Iterator[Conflict]:
        """Yield conflicts between the order of the rows and streaming."""
        if self.packing and not self.shuffle:
            what = "cannot be false with data.packing, which reorders the rows"
            yield Conflict(("shuffle",), what, "unset one of them")
        if self.packing and self.padding_free is False:
            what = "cannot be false with data.packing: packed batches have no padding"
            yield Conflict(("padding_free",), what, "unset it")
        if self.curriculum is not None and self.curriculum_column is not None:
            yield Conflict(("curriculum_column",), "mutually exclusive with data.curriculum", "keep one of them")
        elif self.curriculum is not None:
            yield from self._conflicts_of_curriculum("curriculum")
        elif self.curriculum_column is not None:
            yield from self._conflicts_of_curriculum("curriculum_column")
        if not self.streaming:
            if self.mixing == "concatenate" and self.shuffle:
                what = "cannot be concatenate with data.shuffle, which reorders the rows"
                yield Conflict(("mixing",), what, "set data.shuffle to false, or unset mixing")
            return
        if self.eval_size is not None:
            what = "unsupported with data.streaming: no rows can be held out of a stream"
            yield Conflict(("eval_size",), what, "set data.eval")
        if self.weight_by == "tokens":
            what = "cannot be tokens with data.streaming: row lengths are unknown in advance"
            yield Conflict(("weight_by",), what, "set it to rows")
        if self.stopping_strategy == "all_exhausted":
            what = "cannot be all_exhausted with data.streaming: training ends after train.max_steps"
            yield Conflict(("stopping_strategy",), what, "unset it")

    def _conflicts_of_curriculum(self, field: str) -> Iterator[Conflict]:
        """Yield settings that reorder the rows of a curriculum, or that it makes void."""
        if self.packing:
            what = "unsupported with data.packing, which combines sequences by length"
            yield Conflict((field,), what, "unset one of them")
        elif self.shuffle:
            what = "requires data.shuffle=false: shuffling would undo the order"
            yield Conflict((field,), what, "set data.shuffle to false, or unset it")
        if self.streaming:
            unknown = "row lengths" if field == "curriculum" else "values of later rows"
            what = f"unsupported with data.streaming: {unknown} are unknown in advance"
            yield Conflict((field,), what, "unset one of them")
        elif self.mixing == "concatenate":
            yield Conflict(("mixing",), f"has no effect with data.{field}, which orders the rows", "unset it")


def each_source(name: str, given: Sources | None) -> Iterator[tuple[Key, DataSource]]:
    """The sources of a field, each with its key in the data section; none where it is left out."""
    if isinstance(given, list):
        yield from (((name, position), source) for position, source in enumerate(given))
    elif given is not None:
        yield (name,), given
