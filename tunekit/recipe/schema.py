"""Schema of recipes: every section, every field, every default, and the sentence that explains it.

A recipe holds intent in machine-free units; how it is carried out on a machine is the plan's. The string under a
field is its only description: `tunekit explain`, the JSON schema for editors and the reference page show that string.
A default lives here and nowhere else.

Values are strict: a number in quotes is not a number, and 2.5 is not a count. Unknown keys are errors.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from tunekit.recipe.methods import (
    CPOMethod,
    DPOMethod,
    KTOMethod,
    Method,
    OnPolicyMethod,
    PairMethod,
    RewardMethod,
    SFTMethod,
)
from tunekit.recipe.on_policy import AS_THE_MODEL, conflicts_of_answers
from tunekit.recipe.reading.source_locations import Key, dotted
from tunekit.recipe.sections.adapters import Adapter, FullAdapter, LoraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.parallel import ParallelSection
from tunekit.recipe.sections.section import EXPANDS_ENV, FUNCTION_PATTERN, Conflict, Conflicts, FunctionPath, Section
from tunekit.recipe.sections.train import TrainSection, default_learning_rate

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""What a run's name may look like: it becomes a folder's name on every system."""

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

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""What shows figures of many runs: TensorBoard, Weights & Biases, MLflow or trackio."""


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
        return self._complete("eval", self.eval) if self.eval is not None else ()

    def _complete(self, name: str, given: Sources) -> tuple[CompleteSource, ...]:
        """Fill in what the sources of a field leave out."""
        section = {field: dict(self)[field] for field in HANDED_DOWN}
        return tuple(
            CompleteSource(key=dotted(("data", *key)), **{**section, **source.model_dump(exclude_none=True)})
            for key, source in _each(name, given)
        )

    @model_validator(mode="after")
    def _agrees(self) -> "DataSection":
        conflicts = [*self._conflicts_of_sources(), *self._conflicts_of_order()]
        if conflicts:
            raise Conflicts(conflicts)
        return self

    def _conflicts_of_sources(self) -> Iterator[Conflict]:
        """Yield conflicts between sources of a mixture, and of the evaluation."""
        sources = list(_each("train", self.train))
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
        for key, source in _each("eval", self.eval) if self.eval is not None else ():
            if source.weight is not None:
                yield Conflict((*key, "weight"), "means nothing in data.eval: every row counts once", "leave it out")
        for key, source in (*sources, *(_each("eval", self.eval) if self.eval is not None else ())):
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


def _each(name: str, given: Sources) -> Iterator[tuple[Key, DataSource]]:
    """The sources of a field, each with its key in the data section."""
    if isinstance(given, list):
        yield from (((name, position), source) for position, source in enumerate(given))
    else:
        yield (name,), given


class OutputSection(Section):
    """What is written, and where."""

    dir: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Run folder, new or empty. Left out: `runs/<name>-<time>`."""

    name: Annotated[str | None, Field(pattern=NAME_PATTERN, max_length=100)] = None
    """Name of the run, used for its folder. Left out: the name of the recipe file."""

    sample_prompts: list[str] | None = None
    """Prompts answered before and after training. Left out: the first three prompts of the evaluation rows, or of
    the training rows. An empty list: none."""

    report_to: Annotated[
        list[Tracker],
        BeforeValidator(
            lambda given: [given] if isinstance(given, str) else given,
            json_schema_input_type=Tracker | list[Tracker],
        ),
    ] = []
    """Trackers that the run's figures are handed to as it goes, with the recipe as their configuration; one name or a
    list. They come with `pip install 'tunekit[tracking]'`. The run has its own name there. The project is what the
    tracker's own variable says (`WANDB_PROJECT`, `MLFLOW_EXPERIMENT_NAME`, `TRACKIO_PROJECT`), else `tunekit`. Where
    nothing names a server (`MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`; wandb has one unless `WANDB_MODE=offline`), all
    stays in the folder `trackers` of the run. A tracker that fails while the run trains neither ends it nor delays it:
    the run folder is the record."""


def has_choice(key: tuple[str, ...], method: str) -> bool:
    """Return whether a field may differ from its default with a method; a form leaves out those that may not.

    Args:
        key: The field's key without positions in lists.
        method: `method.type`.
    """
    if key[0] == "data" and key[-1] in ("packing", "padding_free", "loss_on"):
        return method == "sft"
    if key == ("output", "sample_prompts"):
        return method != "reward"
    return key != ("data", "eval", "weight") and not (key[:2] == ("method", "teacher") and key[-1] in AS_THE_MODEL)


def _conflicts_of_rows(method: Method, data: DataSection) -> Iterator[Conflict]:
    """Yield conflicts between a method and rows: only sft lays them out and masks them as the data section says."""
    if isinstance(method, SFTMethod):
        return
    with_it = f"with method {method.type}"
    if data.packing:
        yield Conflict(("data", "packing"), f"cannot be true {with_it}", "leave it out")
    if data.padding_free is True:
        yield Conflict(("data", "padding_free"), f"cannot be true {with_it}: TRL pads its batches", "leave it out")
    sources = [*_each("train", data.train), *(_each("eval", data.eval) if data.eval is not None else ())]
    settings = [(("loss_on",), data.loss_on), *(((*key, "loss_on"), source.loss_on) for key, source in sources)]
    for key, loss_on in settings:
        if loss_on not in (None, "assistant"):
            what = f"cannot be {loss_on} {with_it}, which learns from whole answers and from nothing else"
            yield Conflict(("data", *key), what, "leave it out")


def _conflicts_of_adapter(method: Method, adapter: Adapter) -> Iterator[Conflict]:
    """Yield conflicts between a method and an adapter."""
    if not isinstance(method, PairMethod | KTOMethod) or not isinstance(adapter, LoraAdapter) or not adapter.dropout:
        return
    if method.trainer_args.get("disable_dropout", True):
        what = f"means nothing with method {method.type}, for which TRL switches dropout off"
        if isinstance(method, DPOMethod | KTOMethod):
            what += ": it would move the model from itself"
        hint = "leave it out, or set method.trainer_args.disable_dropout=false"
        yield Conflict(("adapter", "dropout"), what, hint)


def _conflicts_of_numbers(
    method: Method, data: DataSection, train: TrainSection, adapter: Adapter
) -> Iterator[Conflict]:
    """Yield conflicts between a method and other numbers in the recipe."""
    if isinstance(method, DPOMethod | KTOMethod) and method.precompute_ref_log_probs and data.streaming:
        what = "cannot be true with data.streaming: the rows of a stream are not known before training"
        yield Conflict(("method", "precompute_ref_log_probs"), what, "leave it out")
    if isinstance(method, OnPolicyMethod):
        yield from conflicts_of_answers(
            method,
            max_length=data.max_length,
            global_batch_size=train.global_batch_size,
            save_steps=train.save_steps,
            full=isinstance(adapter, FullAdapter),
        )


def _conflicts_of_losses(method: Method) -> Iterator[Conflict]:
    """Yield the fields that losses do not read, or require."""
    if isinstance(method, DPOMethod):
        losses = ", ".join(method.loss_type)
        if method.loss_weights is not None and len(method.loss_weights) != len(method.loss_type):
            what = f"has {len(method.loss_weights)} weights for {len(method.loss_type)} losses ({losses})"
            yield Conflict(("method", "loss_weights"), what, "give one for each loss, in their order")
        if method.label_smoothing and not set(method.loss_type) & SMOOTHED_LOSSES:
            what = f"means nothing with {losses}"
            yield Conflict(("method", "label_smoothing"), what, f"leave it out, or use {_any_of(SMOOTHED_LOSSES)}")
        if "exo_pair" in method.loss_type and not method.label_smoothing:
            what = "must be more than 0 with the loss exo_pair"
            yield Conflict(("method", "label_smoothing"), what, "its paper recommends 1e-3")
    if isinstance(method, KTOMethod) and method.desirable_weight == method.undesirable_weight == 0:
        what = "is 0, and so is undesirable_weight: nothing would be learned"
        yield Conflict(("method", "desirable_weight"), what, "give one of them a weight")
    if isinstance(method, CPOMethod):
        yield from _conflicts_of_cpo(method)


SMOOTHED_LOSSES = frozenset({"aot", "aot_unpaired", "exo_pair", "robust"})
"""Losses of DPO that read `label_smoothing`."""


def _any_of(names: frozenset[str]) -> str:
    *most, last = sorted(names)
    return f"{', '.join(most)} or {last}"


def _conflicts_of_cpo(method: CPOMethod) -> Iterator[Conflict]:
    loss, has_margin = method.loss_type, method.loss_type in ("simpo", "alphapo")
    if method.label_smoothing and loss in ("hinge", "ipo"):
        yield Conflict(("method", "label_smoothing"), f"means nothing with {loss}", "leave it out")
    # A recipe that was written out states the defaults too.
    if method.simpo_gamma != type(method).model_fields["simpo_gamma"].default and not has_margin:
        what = f"means nothing with {loss}"
        yield Conflict(("method", "simpo_gamma"), what, "leave it out, or set method.loss_type=simpo")
    if loss != "alphapo":
        return
    if method.cpo_alpha:
        what = "must be 0 with alphapo: TRL leaves the likelihood out"
        yield Conflict(("method", "cpo_alpha"), what, "leave it out, or set method.loss_type=simpo")
    if not method.trainer_args.get("alpha"):
        what = "alphapo without an alpha is simpo"
        yield Conflict(("method", "loss_type"), what, "set method.trainer_args.alpha, or use simpo")


def _conflicts_of_batch(method: Method, train: TrainSection) -> Iterator[Conflict]:
    """Yield conflicts between a method and the batch."""
    if not isinstance(method, KTOMethod) or method.loss_type != "kto":
        return
    for name in ("global_batch_size", "micro_batch_size"):
        if dict(train)[name] == 1:
            what = "must be 2 or more with method kto, which holds an answer against others of its micro-batch"
            hint = "raise it, or use method.loss_type=apo_zero_unpaired, which compares none"
            yield Conflict(("train", name), what, hint)


def _conflicts_of_output(method: Method, output: OutputSection) -> Iterator[Conflict]:
    """Yield conflicts between a method's model and its output."""
    if isinstance(method, RewardMethod) and output.sample_prompts:
        what = "means nothing with method reward, whose model judges and does not answer"
        yield Conflict(("output", "sample_prompts"), what, "leave it out")


class Recipe(Section):
    """What the user wants, with no machine in it."""

    model: ModelSection
    """The model to start from."""

    data: DataSection
    """The rows, and how they become tokens."""

    method: Method = SFTMethod()
    """The training method."""

    adapter: Adapter = LoraAdapter()
    """What is trained: all weights (`full`), or low-rank updates (`lora`, `qlora`)."""

    train: TrainSection = TrainSection()
    """The optimisation."""

    parallel: ParallelSection = ParallelSection()
    """How the run is spread over devices."""

    output: OutputSection = OutputSection()
    """What is written, and where."""

    @property
    def learning_rate(self) -> float:
        """Peak learning rate: the one given, or the default of the method and the adapter."""
        return self.train.learning_rate or default_learning_rate(self.method.type, self.adapter.type)

    @model_validator(mode="after")
    def _method_and_data_agree(self) -> "Recipe":
        conflicts = [
            *_conflicts_of_rows(self.method, self.data),
            *_conflicts_of_numbers(self.method, self.data, self.train, self.adapter),
            *_conflicts_of_adapter(self.method, self.adapter),
            *_conflicts_of_losses(self.method),
            *_conflicts_of_batch(self.method, self.train),
            *_conflicts_of_output(self.method, self.output),
        ]
        if conflicts:
            raise Conflicts(conflicts)
        return self

    @model_validator(mode="after")
    def _a_stream_has_an_end(self) -> "Recipe":
        if not self.data.streaming:
            return self
        if self.train.num_epochs is not None:
            what = "means nothing with data.streaming: nobody knows how many rows an epoch has"
            raise Conflicts([Conflict(("train", "num_epochs"), what, "give train.max_steps instead")])
        if self.train.max_steps is None:
            what = "needs train.max_steps: nobody knows how many rows an epoch has"
            raise Conflicts([Conflict(("data", "streaming"), what, "say how many steps to train")])
        return self
