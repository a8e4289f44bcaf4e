"""Data section of recipes: sources of rows, and how the rows become tokens."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from tunekit.recipe.reading.parse import Key, dotted
from tunekit.recipe.sections.section import EXPANDS_ENV, FUNCTION_PATTERN, Conflict, FunctionPath, Section

SourceFormat = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "text",
    "tokens",
    "preference",
    "ranking",
    "unpaired_preference",
    "prompts",
]
"""Shape of rows as they stand in a source."""

DataFormat = Literal["auto"] | SourceFormat | Annotated[FunctionPath, Field(pattern=FUNCTION_PATTERN)]
"""A shape of rows, that it is to be recognised, or a function that makes the rows."""

LossOn = Literal["assistant", "last", "all"]
"""Which tokens count in the loss: those of the assistant's turns and completions, of the last turn only, or all."""


class DataSource(Section):
    """Rows to train or evaluate on. A string alone is short for `{path: STRING}`."""

    shorthand = "path"

    path: Annotated[str, Field(min_length=1, json_schema_extra=EXPANDS_ENV)]
    """A file (.jsonl, .json, .csv, .tsv, .parquet, .arrow, .feather, .txt; text also as .gz or .zst) relative to the
    working directory, a folder of files of one kind, a pattern (`chats/*.jsonl`), `example:NAME` for a file that ships
    with tunekit, a URL (`https://...`, `s3://...`, `gs://...`, `hf://...`; a pattern where files can be listed), or a
    dataset's name on the Hugging Face hub. In a .txt file two blank lines begin a new document."""

    name: str | None = None
    """Configuration of a hub dataset."""

    split: str | None = None
    """Split of a hub dataset, slices allowed (`train[:5%]`). Left out: `train` for training, and for evaluation
    the only one of `validation`, `test`, `eval` that exists."""

    revision: str | None = None
    """Branch, tag or commit of a hub dataset."""

    format: DataFormat | None = None
    """Shape of the rows of this source. Left out: `data.format`."""

    columns: dict[str, str] | None = None
    """The columns of this source where they have other names. Left out: `data.columns`, of which nothing holds for a
    source that gives its own."""

    loss_on: LossOn | None = None
    """Tokens of this source that count in the loss. Left out: `data.loss_on`."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of this source in training, as against the weights of the others: with 3 and 1, three rows of the one to
    a row of the other (`data.weight_by` says whether rows or tokens). All sources of `data.train` have a weight or
    none has: then every row of each is used once."""


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


HANDED_DOWN = ("format", "columns", "loss_on")
"""Fields of the data section that hold for every source that gives none of its own."""

NEED_WEIGHTS = ("weight_by", "stopping_strategy")
"""Fields of the data section that say how weights are meant."""

NEED_SEVERAL = ("mixing",)
"""Fields of the data section that say how several sources come together."""


class DataSection(Section):
    """The rows, and how they become tokens."""

    train: Sources
    """Rows to train on. The sources of a list are trained on together, `weight` says in which proportion."""

    eval: Sources | None = None
    """Rows to evaluate on before, during and after training; those of all sources of a list, each once."""

    format: DataFormat = "auto"
    """Shape of the rows: `messages` (a list of {role, content}), `sharegpt` (conversations, a list of {from, value}),
    `alpaca` (instruction, output, and input, system and history where they hold something), `prompt_completion`
    (columns prompt and completion), `text` (a column text), `tokens` (input_ids, and labels), `preference` (chosen,
    rejected, and prompt if they do not begin with it), `ranking` (prompt, completions, scores), `unpaired_preference`
    (prompt, completion, label) or `prompts` (prompt, and what rewards look at). `auto` recognises it from the columns
    and says which. `my_module:my_function` makes the rows: it gets each row as a dict and returns one of a shape
    above, or None to leave it out; the working directory is searched for the module."""

    loss_on: LossOn = "assistant"
    """Tokens that count in the loss. `assistant`: assistant turns, or completions; `last`: only the last assistant
    turn, or completions; `all`: every token. Plain text always counts wholly. A turn with `weight: 0`, `train: false`
    or `loss: false` is read and never counts."""

    max_length: Annotated[int, Field(ge=8)] = 1024
    """Longest sequence, in tokens. A longer chat or completion is cut at the end, a longer text goes on in the next
    sequence; the plan says how many."""

    packing: bool = False
    """Put several documents into one sequence of `max_length` tokens. They do not see each other; a model that cannot
    keep them apart is refused."""

    padding_free: Literal["auto"] | bool = "auto"
    """Lay the rows of a micro-batch one behind the other instead of padding them to the longest. They do not see each
    other. `auto`: on CUDA where flash attention runs; elsewhere they are padded. Packed
    batches have no padding anyway."""

    columns: dict[str, str] = {}
    """The columns of the rows where they have other names: `{prompt: question, completion: answer}` reads the column
    question as prompt and answer as completion. It holds for every source of `train` and `eval` that gives none of its
    own."""

    max_bad_rows: Annotated[int, Field(ge=0)] = 0
    """So many rows of a source may be bad; they are left out, and said. One more, and nothing is trained."""

    eval_size: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Share of the rows of `train` to hold out for evaluation, instead of `eval`. A row is chosen by its content alone:
    the same rows stay held out when the file grows or is reordered, and equal rows stand on the same side."""

    weight_by: Literal["rows", "tokens"] = "rows"
    """What `weight` counts: rows (each part of a text that is longer than `max_length` is one), or their tokens."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    """Where weighted sources end, by the names of datasets.interleave_datasets. `first_exhausted`: with the first that
    is used up; no row is used twice, and what is too much of the others is left out. `all_exhausted`: with the last;
    every row is used at least once, and rows of the smaller sources are repeated."""

    mixing: Literal["interleave", "concatenate"] = "interleave"
    """Order of several sources. `interleave`: they take turns, in proportion; `concatenate`: one after another, in the
    order of the list. Rows that are shuffled have no such order."""

    shuffle: bool = True
    """Train on the rows in random order, another one each epoch. false: in the order of the data."""

    streaming: bool = False
    """Read and tokenise the rows while training instead of before it, for data that does not fit on the disk. Needs
    `train.max_steps`, as nobody knows how many rows there will be."""

    @property
    def sources(self) -> tuple[CompleteSource, ...]:
        """The sources of `train`, one or several, with what they leave out filled in."""
        return self._complete("train", self.train)

    @property
    def eval_sources(self) -> tuple[CompleteSource, ...]:
        """The same for `eval`; empty without."""
        return self._complete("eval", self.eval)

    def _complete(self, name: str, given: Sources | None) -> tuple[CompleteSource, ...]:
        """Fill in what the sources of a field leave out."""
        section = {field: dict(self)[field] for field in HANDED_DOWN}
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
                what = f"is missing for '{source.path}', while other sources have one"
                yield Conflict((*key, "weight"), what, "give every source a weight, or none")
            if source.weight is not None and len(sources) == 1:
                yield Conflict((*key, "weight"), "means nothing with a single source", "leave it out")
        unread: tuple[str, ...] = () if num_weights else NEED_WEIGHTS
        why, hint = "without weights", "give every source of data.train a weight, or leave it out"
        if len(sources) == 1:
            unread, why, hint = (*NEED_WEIGHTS, *NEED_SEVERAL), "with a single source", "leave it out"
        for name in unread:
            # A recipe that was written out states the defaults too.
            if dict(self)[name] != type(self).model_fields[name].default:
                yield Conflict((name,), f"means nothing {why}", hint)
        for key, source in each_source("eval", self.eval):
            if source.weight is not None:
                yield Conflict((*key, "weight"), "means nothing in data.eval: every row counts once", "leave it out")
        for key, source in (*sources, *each_source("eval", self.eval)):
            columns = self.columns if source.columns is None else source.columns
            if columns and ":" in (source.format or self.format):
                what = "says nothing to a row function, which reads the columns itself"
                where = ("columns",) if source.columns is None else (*key, "columns")
                yield Conflict(where, what, "leave it out")
        if self.eval is not None and self.eval_size is not None:
            yield Conflict(("eval_size",), "cannot be given together with data.eval", "keep one of them")

    def _conflicts_of_order(self) -> Iterator[Conflict]:
        """Yield conflicts between the order of the rows and streaming."""
        if self.packing and not self.shuffle:
            what = "cannot be false with data.packing, which puts the rows into another order"
            yield Conflict(("shuffle",), what, "leave one of them out")
        if self.packing and self.padding_free is False:
            what = "cannot be false with data.packing: packed batches have no padding"
            yield Conflict(("padding_free",), what, "leave it out")
        if not self.streaming:
            if self.mixing == "concatenate" and self.shuffle:
                what = "cannot be concatenate with data.shuffle, which puts the rows into another order"
                yield Conflict(("mixing",), what, "set data.shuffle to false, or leave mixing out")
            return
        if self.eval_size is not None:
            what = "cannot be given with data.streaming: from a stream nothing is held out"
            yield Conflict(("eval_size",), what, "name rows to evaluate on in data.eval")
        if self.weight_by == "tokens":
            what = "cannot be tokens with data.streaming: how long the rows of a stream are is not known before"
            yield Conflict(("weight_by",), what, "weigh by rows")
        if self.stopping_strategy == "all_exhausted":
            what = "cannot be all_exhausted with data.streaming: training ends after train.max_steps"
            yield Conflict(("stopping_strategy",), what, "leave it out")


def each_source(name: str, given: Sources | None) -> Iterator[tuple[Key, DataSource]]:
    """The sources of a field, each with its key in the data section; none where it is left out."""
    if isinstance(given, list):
        yield from (((name, position), source) for position, source in enumerate(given))
    elif given is not None:
        yield (name,), given
