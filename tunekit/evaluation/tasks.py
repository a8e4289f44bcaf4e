"""From what is asked to what a model is evaluated on: rows of a run or of a file, metrics, and who judges.

Everything that can be wrong with what is asked is found here, before a model is loaded.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError

from tunekit.data.formats.row_formats import COLUMNS, BadRow, Learner, Row, counted
from tunekit.data.media.collate import MEDIA, documents_of
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.kinds import COLUMN, kinds_in, media_of
from tunekit.data.prepare import read_dataset, tokens_of
from tunekit.data.sources.load import LoadedData, load_rows
from tunekit.data.sources.rows import Rows, RowStore
from tunekit.data.tokenization.alignment import ANSWERS, read_rows
from tunekit.data.tokenization.classes import ClassTokens, LabeledTokens
from tunekit.data.tokenization.steps import StepTokens
from tunekit.errors import DataError, RunError, TunekitError
from tunekit.evaluation.episodes import Episodes
from tunekit.evaluation.generative import Questions, questions_in, reward_figure
from tunekit.evaluation.losses import Answered, JudgedPairs, JudgedSteps, JudgedTexts, Pairs, Part, Rated, Texts
from tunekit.evaluation.media_losses import MediaRow, MediaTexts, prepared_rows
from tunekit.inference.conversations import media_prompt, media_read
from tunekit.inference.episode_trial import HeldOut
from tunekit.inference.inference_model import (
    MediaPrompt,
    Sampling,
    Trained,
    generates_nothing,
    longest_of,
    processor_of,
    refuse_judges,
)
from tunekit.inference.prompts import prompt_ids
from tunekit.methods.rewards.load import check_rows, load_rewards
from tunekit.methods.tool_use import environment_rewards
from tunekit.recipe.functions import find_function
from tunekit.recipe.methods import Method, generates, is_rewarded
from tunekit.recipe.methods.on_policy import RewardedMethod
from tunekit.recipe.reading.phrases import near
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.data import CompleteSource, DataSource, MediaKind, SourceFormat
from tunekit.recipe.sections.rewards import FunctionReward, Reward
from tunekit.runs.evaluation_result import sliced
from tunekit.runs.prepared_data import FILES, answered_rows, labeled_tokens_of, room_of
from tunekit.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

METRICS = (
    *("exact_match", "numeric_match", "math", "code", "regex", "json_schema"),
    *("length", "repetition", "reward_model", "judge"),
)
"""Rewards that come with tunekit, by their names as metrics."""

MAX_LENGTH = 1024
"""Longest sequence of a model that no run made, in tokens, where it takes as many."""

HELD_OUT = "held-out"
"""Name of the rows that a run has held out."""


@dataclass(frozen=True)
class Wish:
    """Settings for reading rows and generating answers.

    Attributes:
        limit: Rows, at most, the first ones.
        max_new_tokens: Maximum new tokens; None: as in training, or 256.
        temperature: Sampling temperature.
        seed: Random seed for sampling.
        batch_size: Prompts per batch.
        device: Where reward models are.
    """

    limit: int | None
    max_new_tokens: int | None
    temperature: float
    seed: int
    batch_size: int
    device: str


def read_metrics(given: Iterable[str | Mapping[str, Any]]) -> list[Reward]:
    """Metrics by their names, `module:function`, or as a recipe's `method.rewards` has them.

    Raises:
        TunekitError: There is no such metric, or its settings are wrong.
    """
    adapter: TypeAdapter[Reward] = TypeAdapter(Reward)
    metrics = []
    for item in given:
        value = _read_yaml(item, "metric") if isinstance(item, str) and item.strip().startswith("{") else item
        name = value if isinstance(value, str) else value.get("type")
        if ":" not in str(name) and name not in (*METRICS, "function"):
            suggestion = near(str(name), METRICS)
            hint = (
                f"did you mean {suggestion!r}?"
                if suggestion
                else f"available: {', '.join(METRICS)}, and module:function"
            )
            raise TunekitError(f"no metric {name!r}", hint=hint)
        try:
            metric = adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"] if part != name)
            raise TunekitError(
                f"metric {name}: {place or 'settings'}: {first['msg'].lower()}",
                hint=f"write its settings as in a recipe: {{type: {name}, ...}}; `tunekit explain method.rewards`",
            ) from error
        if isinstance(metric, FunctionReward):
            find_function(metric.path)
        metrics.append(metric)
    return metrics


def _read_yaml(text: str, what: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TunekitError(f"{what} {text!r} is not valid YAML", hint="write it as {key: value, ...}") from error
    if not isinstance(value, dict):
        raise TunekitError(f"{what} {text!r} is not a YAML mapping", hint="write it as {key: value, ...}")
    return value


def parts_of_run(found: Trained, tokenizer: "Tokenizer", rewards: Sequence[Reward], wish: Wish) -> Part:
    """The rows that a run has set aside, as its method is judged on them.

    Raises:
        TunekitError: It has none, or its method says nothing of them.
    """
    run = found.run
    if run is None:
        what = f"{found.name} was not trained by a run: no held-out rows to evaluate on"
        raise DataError(what, hint="pass rows with --data, or tasks with --tasks")
    method, file = run.recipe.method, run.path / "data" / FILES["eval"]
    of = sliced(HELD_OUT, wish.limit)
    if not file.is_file():
        raise DataError(f"{run.name} has no held-out rows", hint="pass rows with --data, or train with data.eval_size")
    if method.spec.trains_on == "tokens":
        if rewards:
            what = f"{run.name} stores its rows as tokens, but a metric needs prompts with expected answers"
            raise DataError(what, hint="pass rows with --data")
        dataset = read_dataset(file)
        if MEDIA in dataset.column_names:
            documents = (document for row in dataset for document in documents_of(row))
            rows_of_run = [MediaRow(**document) for document in islice(documents, wish.limit)]
            return MediaTexts.of_rows(of, rows_of_run, processor_of(found, tokenizer))
        return _texts(of, _sequences(dataset), wish.limit)
    rows: list[Row] = [{name: value for name, value in row.items() if value is not None} for row in read_rows(file)][
        : wish.limit
    ]
    if generates(method):
        reward_list = list(rewards) or (list(method.rewards) if is_rewarded(method) else [])
        if not reward_list and not (is_rewarded(method) and method.has_own_loop):
            scorer = "features of answers" if is_rewarded(method) and method.own_rewards else "its teacher"
            raise DataError(f"{method.type} is scored by {scorer} during training only", hint="pass a --metric")
        numbers = range(1, len(rows) + 1)
        media = kinds_in(rows)
        prompts = Rows("prompts", RowStore(rows), HELD_OUT, numbers, "row", media=media)
        return _questions(prompts, reward_list, found, tokenizer, wish)
    if rewards:
        problem = f"{run.name} was trained on preferences, which no metric scores"
        raise DataError(problem, hint="pass prompts with --data")
    labeled = labeled_tokens_of(run.recipe, tokenizer)
    if labeled is not None:
        return _labeled(of, rows, labeled, run.recipe)
    columns = ("completion",) if "completion" in rows[0] else ("chosen", "rejected")
    return _answered(of, rows, columns, tokenizer, method, run.recipe.data.max_length)


def parts_of_file(
    found: Trained, data: str | Mapping[str, Any], tokenizer: "Tokenizer", rewards: Sequence[Reward], wish: Wish
) -> tuple[Part, tuple[str, ...]]:
    """The rows of a source, and what was found while they were read.

    Args:
        found: The model.
        data: The source, as a recipe's `data.eval` has it.
        tokenizer: The model's.
        rewards: What judges answers to them; none where nobody has to answer.
        wish: How they are read and answered.

    Raises:
        TunekitError: They cannot be read, or are of no use.
    """
    labeled = None if found.run is None else labeled_tokens_of(found.run.recipe, tokenizer)
    learned: tuple[SourceFormat, ...] = tuple(format for format in COLUMNS if format != "classification")
    if isinstance(labeled, ClassTokens):
        learned = ("classification",)
    rows = _load(data, wish.limit, media=media_read(found), learned=learned)
    of = sliced(rows.source, wish.limit)
    method = None if found.run is None else found.run.recipe.method
    if not rewards and rows.format == "prompts" and method is not None and is_rewarded(method):
        rewards = method.rewards
    acting = method if method is not None and is_rewarded(method) and method.has_own_loop else None
    if rewards or (acting is not None and rows.format == "prompts"):
        prompts = replace(rows, rows=RowStore(questions_in(rows)))
        if acting is not None:
            (prompts,) = answered_rows(acting, LoadedData((prompts,), (), []), lambda: tokenizer).train
        return _questions(prompts, rewards, found, tokenizer, wish), rows.notes
    if rows.format == "prompts":
        problem = f"{rows.source} has prompts, but no metric to score the answers"
        raise DataError(problem, hint="pass a --metric, such as exact_match")
    # What no run made is cut to what its tokenizer takes.
    max_length = (
        min(MAX_LENGTH, int(tokenizer.model_max_length)) if found.run is None else found.run.recipe.data.max_length
    )
    if labeled is not None and found.run is not None:
        (row_format,) = found.run.recipe.method.spec.row_formats
        if rows.format == row_format:
            return _labeled(of, list(rows.rows), labeled, found.run.recipe), rows.notes
        what = "steps alone" if isinstance(labeled, StepTokens) else "texts with labels alone"
        problem, columns = f"{found.name} scores {what}", ", ".join(COLUMNS[row_format])
        raise DataError(problem, hint=f"pass rows with columns {columns}")
    if rows.format in ("stepwise_supervision", "classification"):
        method_of = {"stepwise_supervision": "prm", "classification": "classification"}[rows.format]
        problem = f"{found.name} scores no labels of rows"
        raise DataError(problem, hint=f"pass a run of method {method_of}, or other rows")
    if rows.format in ANSWERS:
        part = _answered(of, list(rows.rows), ANSWERS[rows.format], tokenizer, method, max_length)
        return part, rows.notes
    if found.judges:
        raise DataError(generates_nothing(found), hint="pass preference pairs")
    if rows.media:
        processor = processor_of(found, tokenizer)
        rows_of_file = prepared_rows(rows, tokenizer, MediaTokens(processor), max_length)
        return MediaTexts.of_rows(of, rows_of_file, processor), rows.notes
    sequences = tokens_of(rows, tokenizer, max_length=max_length).sequences
    subset = sequences.take(np.arange(len(sequences)))
    ends = np.cumsum(subset.lengths)[:-1]
    pairs = zip(np.split(subset.ids, ends), np.split(subset.counted, ends), strict=True)
    return _texts(of, pairs, None), rows.notes


def _load(
    data: str | Mapping[str, Any],
    limit: int | None,
    *,
    media: tuple[MediaKind, ...],
    learned: tuple[SourceFormat, ...],
) -> Rows:
    value = _read_yaml(data, "data") if isinstance(data, str) and data.strip().startswith("{") else data
    try:
        parts = DataSource.model_validate({"path": value} if isinstance(value, str) else dict(value))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"data: {place}: {first['msg'].lower()}", hint="write it like data.eval of a recipe") from error
    defaults = {"key": "data", "format": "auto", "columns": {}, "loss_on": "assistant"}
    source = CompleteSource(**(defaults | parts.model_dump(exclude_none=True)))
    rows = load_rows(source, Learner("evaluate", learned, media), default_split="eval")
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def _sequences(rows: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The sequences of a run, those in packs one by one: in training they did not see each other either."""
    for row in rows.with_format("numpy"):
        ends = np.cumsum(row["seq_lengths"])[:-1] if "seq_lengths" in row else np.array([], dtype=np.int64)
        yield from zip(np.split(row["input_ids"], ends), np.split(row["labels"] >= 0, ends), strict=True)


def _texts(of: str, sequences: Iterable[tuple[np.ndarray, np.ndarray]], limit: int | None) -> Texts:
    limited = list(sequences)[:limit]
    if not any(counts[1:].any() for _, counts in limited):
        raise DataError(f"{of}: no token counts in the loss", hint="add answers to the rows, or set data.loss_on=all")
    return Texts(of, [ids for ids, _ in limited], [counts for _, counts in limited])


def _refuse_pictures(of: str, rows: Sequence[Row]) -> None:
    """Refuse pairs with pictures, whose tokens alone would be scored."""
    if kinds_in(rows):
        problem = f"{of}: pairs with images are scored only during training"
        raise DataError(problem, hint="see eval_loss and the rewards in the run's metrics")


def _answered(
    of: str, rows: Sequence[Row], columns: Sequence[str], tokenizer: "Tokenizer", method: Method | None, max_length: int
) -> Part:
    _refuse_pictures(of, rows)
    encoded = [(row, Answered.of_row(row, columns, tokenizer, max_length)) for row in rows]
    complete = [(row, answers) for row, answers in encoded if answers is not None]
    if not complete:
        problem = f"{of}: none of {counted(len(rows), 'prompt')} leaves room for an answer: limit {max_length:,} tokens"
        raise DataError(problem, hint="pass shorter ones")
    if len(columns) == 1:
        good = np.array([bool(row["label"]) for row, _ in complete])
        return Rated(of, [answers[0] for _, answers in complete], good, method)
    chosen, rejected = ([answers[place] for _, answers in complete] for place in (0, 1))
    if method is not None and method.spec.classifies:
        return JudgedPairs(of, chosen, rejected)
    return Pairs(of, chosen, rejected, method)


def _labeled(of: str, rows: Sequence[Row], labeled: LabeledTokens, recipe: Recipe) -> Part:
    """Return rows with labels; those that are too long are left out or cut, as in training."""
    room, tokens = room_of(recipe), labeled.of_all
    try:
        encoded = [(row, *tokens.of_row(row)) for row in rows]
    except BadRow as error:
        raise DataError(f"{of}: {error}") from None
    complete = [(row, ids, labels) for row, num_given, ids, labels in encoded if room.has(num_given, [len(ids)])]
    if not complete:
        problem = f"{of}: none of {counted(len(rows), 'row')} is short enough: limit {room.max_length:,} tokens"
        raise DataError(problem, hint="pass shorter ones")
    if isinstance(tokens, StepTokens):
        return JudgedSteps(of, [ids for _, ids, _ in complete], [labels for *_, labels in complete])
    texts = [ids[: room.max_length] for _, ids, _ in complete]
    return JudgedTexts(of, texts, [tokens.target(row) for row, *_ in complete])


def _questions(rows: Rows, rewards: Sequence[Reward], found: Trained, tokenizer: "Tokenizer", wish: Wish) -> Part:
    refuse_judges(found)
    try:
        check_rows(rewards, [rows])
    except DataError as error:
        raise DataError(error.problem.replace("method.rewards: ", ""), hint=error.hint) from error
    method = None if found.run is None else found.run.recipe.method
    if found.run is not None and method is not None and is_rewarded(method) and method.has_own_loop:
        return _episodes(rows, rewards, found.run, method, wish)
    longest, encoded = longest_of(found), []
    tokens = MediaTokens(processor_of(found, tokenizer)) if rows.media else None
    with_media: dict[int, MediaPrompt] = {}
    for index, row in enumerate(rows.rows):
        prompt = row["prompt"]
        if isinstance(prompt, str) and method is not None and generates(method):
            # In training a prompt that is a text is given to the model as it stands.
            ids = list(tokenizer(prompt)["input_ids"])
        else:
            try:
                if tokens is not None and COLUMN in row:
                    media, place = media_of(row), rows.place(index)
                    ids, with_media[index] = media_prompt(
                        found, tokenizer, tokens, prompt, media, place, row.get("tools")
                    )
                else:
                    ids = prompt_ids(found, tokenizer, prompt, row.get("tools"))
            except RunError as error:
                raise DataError(f"{rows.place(index)}: {error.problem}", hint=error.hint) from error
        if not ids or (longest is not None and len(ids) >= longest):
            room = "" if longest is None else f"; {found.name} accepts {longest:,} including the answer"
            problem = f"{rows.place(index)}: the prompt has {counted(len(ids), 'token')}{room}"
            raise DataError(problem, hint="remove the row")
        encoded.append(ids)
    of_run = method.max_completion_length if method is not None and generates(method) else 256
    sampling = Sampling(temperature=wish.temperature, max_new_tokens=wish.max_new_tokens or of_run, seed=wish.seed)
    functions = load_rewards(rewards, device=wish.device)
    return Questions(
        sliced(rows.source, wish.limit),
        list(rows.rows),
        rewards,
        functions,
        encoded,
        sampling,
        wish.batch_size,
        with_media,
    )


def _episodes(rows: Rows, rewards: Sequence[Reward], run: Run, method: RewardedMethod, wish: Wish) -> Episodes:
    """Return prompts that a model answers by the loop of its trainer."""
    temperature = wish.temperature or method.generation.temperature
    generation = method.generation.model_copy(update={"temperature": temperature})
    length = wish.max_new_tokens or method.max_completion_length
    own = [reward_figure(name) for name in environment_rewards(method)]
    return Episodes(
        sliced(rows.source, wish.limit),
        list(rows.rows),
        run.plan,
        method.model_copy(update={"rewards": list(rewards), "generation": generation, "max_completion_length": length}),
        load_rewards(rewards, device=wish.device),
        own,
        HeldOut(wish.batch_size, is_greedy=wish.temperature == 0),
        wish.seed,
    )
