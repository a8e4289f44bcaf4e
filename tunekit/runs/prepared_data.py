"""Prepared data of a run: token ids and labels of its rows, with their counts, and the completed recipe."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import counted
from tunekit.data.media.answers import PictureAnswers
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.in_rows import ANY_MARK
from tunekit.data.media.kinds import COLUMN, KINDS, media_of, pictures_in
from tunekit.data.packing.sequences import mix
from tunekit.data.prepare import Progress, SourceShare, Split, mixing_of, prepare_data
from tunekit.data.reports.measure import report_data, report_rows
from tunekit.data.reports.report import DataReport
from tunekit.data.sources.ground_truth import GROUND_TRUTH, with_ground_truth
from tunekit.data.sources.load import LoadedData, Rows
from tunekit.data.sources.rows import Skipped, is_url, without_user
from tunekit.data.sources.teacher_prompts import with_teacher_prompts
from tunekit.data.tokenization.alignment import BARE_PROMPTS, AlignmentSplit, Measured, Room, are_bare, measure_data
from tunekit.data.tokenization.classes import ClassTokens, LabeledTokens
from tunekit.data.tokenization.steps import StepTokens
from tunekit.data.tokenization.teacher_tokens import TeacherTokenizer
from tunekit.data.tokenization.tokenize import TokenReport
from tunekit.errors import DataError, ModelError
from tunekit.estimates.facts import DataFacts, SourceFacts
from tunekit.files import SHIPPED_MODELS
from tunekit.models.load import PROCESSORS, check_has_head, load_processor, load_tokenizer
from tunekit.recipe.chat_templates import named_template
from tunekit.recipe.methods import (
    Method,
    generates,
    has_teacher,
    is_rewarded,
)
from tunekit.recipe.methods.on_policy import OnPolicyMethod
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.data import DataSource, MediaKind, Sources
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import JsonSchemaReward, ModelReward
from tunekit.redact import redacted, without_secrets
from tunekit.runs import sample_prompts
from tunekit.runs.sample_prompts import SamplePrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SAMPLE_PROMPTS = 3
"""Prompts taken from the rows where the recipe names none."""

NUM_SAMPLES = 3
"""Sequences of each source that the report of a run shows."""

STREAM_SKIPPED = "stream_skipped.jsonl"
"""File of the bad rows that a stream left out, in the data folder of a run."""

FILES = {"train": "train.arrow", "eval": "eval.arrow"}
"""Files of the sequences in the data folder of a run, by split."""

PLACES = "train_places.npz"
"""File of where the rows that are trained on stand in their sources."""


@dataclass(frozen=True)
class PreparedData:
    """Prepared data of a run, with its counts."""

    splits: tuple[Split, ...]
    """Splits of training and evaluation; of a stream its first rows."""
    facts: DataFacts
    report: DataReport
    streaming: bool = False
    """True if the training rows are a stream."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user before the training starts, a sentence each."""
        ends = (f"{source.source}: end token: {source.end_token_words}" for source in self.report.sources)
        return (*self.report.notes, *ends)

    def save(self, folder: Path) -> None:
        """Put the tokens where the processes of the run read them, and beside them what is known of the rows."""
        folder.mkdir()
        for split in self.splits[int(self.streaming) :]:
            split.prepared.link_to(folder / FILES[split.name])
            if split.name == "train":
                split.places.save(folder / PLACES)
        (folder / "report.json").write_text(
            json.dumps(without_secrets(self.report.to_dict()), ensure_ascii=False), encoding="utf-8"
        )
        (folder / "report.html").write_text(redacted(self.report.to_html()), encoding="utf-8")
        _save_skipped(folder, self.report.skipped)


@dataclass(frozen=True)
class PreparedRows:
    """Rows of a run that TRL tokenizes itself, with their counts."""

    splits: tuple[AlignmentSplit, ...]
    facts: DataFacts
    notes: tuple[str, ...]
    """Notes for the user before the training starts, a sentence each."""
    skipped: tuple[Skipped, ...]

    def save(self, folder: Path) -> None:
        """Put the rows where the processes of the run read them."""
        folder.mkdir()
        for split in self.splits:
            split.save(folder / FILES[split.name])
            if split.name == "train":
                split.places.save(folder / PLACES)
        _save_skipped(folder, self.skipped)


def _save_skipped(folder: Path, skipped: Sequence[Skipped]) -> None:
    if skipped:
        lines = (json.dumps(without_secrets(asdict(bad)), ensure_ascii=False) + "\n" for bad in skipped)
        (folder / "skipped.jsonl").write_text("".join(lines), encoding="utf-8")


def prepare(
    recipe: Recipe, data: LoadedData, on_progress: Progress | None = None, *, num_samples: int = NUM_SAMPLES
) -> PreparedData:
    """Tokenize, mask, mix and pack the rows, or find them in the cache, and report on them.

    Args:
        recipe: The recipe.
        data: Its rows.
        on_progress: Told how far the rows of a source are.
        num_samples: Sequences of each source to take as samples.

    Raises:
        DataError: No token would be trained on, or the rows do not fit the chat template.
        ModelError: The tokenizer of the model or of its teacher cannot be read, or they are not the same.
    """
    (tokenizer, teacher), media = tokenizers_of(recipe), None
    if media_in(data):
        media = MediaTokens(load_processor(recipe.model, tokenizer, media_in(data)))
        if has_teacher(recipe.method):
            _check_teacher_reads(recipe.method.teacher, recipe, media, (*data.train, *data.eval))
    splits = prepare_data(recipe.data, data, tokenizer, on_progress, media=media, teacher=teacher)
    report = report_data(
        splits,
        tokenizer,
        max_length=recipe.data.max_length,
        packing=recipe.data.packing,
        batch_size=recipe.train.micro_batch_size or recipe.train.global_batch_size,
        num_samples=num_samples,
        notes=data.notes,
        skipped=data.skipped,
        media=media,
    )
    return PreparedData(splits, _facts(splits), report, recipe.data.streaming)


def tokenizers_of(recipe: Recipe) -> tuple["PreTrainedTokenizerBase", TeacherTokenizer | None]:
    """Return the tokenizer of the model, and that of a teacher that reads its own tokens; None where there is none.

    Raises:
        ModelError: One of them cannot be read; or they are not the same, or cannot be aligned, as the method needs it.
    """
    tokenizer = load_tokenizer(recipe.model)
    if not has_teacher(recipe.method):
        return tokenizer, None
    section = recipe.method.teacher
    with _errors_of_teacher():
        its = load_tokenizer(section)
    if recipe.method.spec.teacher_reads_own_tokens:
        return tokenizer, TeacherTokenizer.of(tokenizer, recipe.model.path, its, section.path)
    from tunekit.methods.distillation import check_tokens

    check_tokens(tokenizer, its, section.path)
    return tokenizer, None


def _facts(splits: tuple[Split, ...]) -> DataFacts:
    """Return the facts that the plan needs."""
    train, reports = splits[0].prepared, splits[0].prepared.reports
    return DataFacts(
        num_train=train.num_sequences,
        num_eval=splits[1].prepared.num_sequences if len(splits) > 1 else None,
        tokenized=True,
        format=splits[0].rows[0].format,
        is_conversational=splits[0].rows[0].is_conversational,
        sources=_sources_of(train.shares),
        num_train_tokens=train.num_tokens,
        num_trainable_tokens=train.num_trainable_tokens,
        longest_tokens=max(report.longest_tokens for report in reports),
        num_rows=sum(report.num_rows for report in reports),
        num_truncated=sum(report.num_truncated for report in reports),
        num_split=sum(report.num_split for report in reports),
        num_dropped=sum(report.num_dropped for report in reports),
        **_media_facts(reports),
        num_pixel_values=sum(report.num_pixel_values for report in reports) or None,
        most_pixel_values=train.most_pixel_values or None,
    )


def _media_facts(sources: Iterable[TokenReport | Measured]) -> dict[str, Any]:
    """Return the facts about the media of sources."""
    num_media: Counter[MediaKind] = Counter()
    num_tokens: Counter[MediaKind] = Counter()
    for source in sources:
        num_media.update(source.num_media)
        num_tokens.update(source.num_media_tokens)
    return {
        "has_pictures": num_media["image"] + num_media["video"] > 0,
        "has_videos": num_media["video"] > 0,
        "num_pictures": num_media["image"] + num_media["video"] or None,
        "num_picture_tokens": num_tokens["image"] + num_tokens["video"] or None,
        "has_audio": num_media["audio"] > 0,
        "num_clips": num_media["audio"] or None,
        "num_clip_tokens": num_tokens["audio"] or None,
    }


def _sources_of(shares: Iterable[SourceShare]) -> tuple[SourceFacts, ...]:
    return tuple(
        SourceFacts(name=share.source, num_rows=share.num_sequences, size=share.num_tokens) for share in shares
    )


def prepare_rows(recipe: Recipe, data: LoadedData, on_progress: Progress | None = None) -> PreparedRows:
    """Measure the rows of a method whose trainer tokenizes them, and skip those that are too long.

    Args:
        recipe: The recipe.
        data: Its rows.
        on_progress: Told how far the rows of a source are.

    Raises:
        DataError: No row is left, the rows do not fit the chat template, or rated answers are all alike.
        ModelError: The tokenizer of the model or of its teacher cannot be read, or they are not the same.
    """
    tokenizer, _ = tokenizers_of(recipe)
    if generates(recipe.method):
        data = answered_rows(recipe.method, data, lambda: tokenizer)
    room, answers = room_of(recipe), None
    if media_in(data):
        # What is left of a picture whose tokens are cut is none.
        room, answers = replace(room, cuts=False), PictureAnswers(load_processor(recipe.model, tokenizer, ["image"]))
        if generates(recipe.method):
            from tunekit.methods.generation import check_pictures

            check_pictures(recipe.method, answers.input_names, answers.why_no_lists, recipe.model.path)
            _check_all_have_pictures((*data.train, *data.eval))
            if has_teacher(recipe.method):
                _check_teacher_reads(recipe.method.teacher, recipe, answers.images, (*data.train, *data.eval))
    head, labeled = recipe.method.score_head, labeled_tokens_of(recipe, tokenizer)
    if head is not None:
        check_has_head(recipe.model, head)
    if isinstance(labeled, StepTokens):
        labeled.check()
    by_split = None if labeled is None else labeled.by_split
    splits = measure_data(recipe.data, data, tokenizer, room, on_progress, answers=answers, labeled=by_split)
    train, shares = splits[0], splits[0].shares
    evaluated = sum(len(source.kept) for source in splits[1].sources) if len(splits) > 1 else None
    facts = DataFacts(
        num_train=sum(share.num_sequences for share in shares),
        num_eval=evaluated,
        tokenized=True,
        format=train.sources[0].rows.format,
        is_conversational=train.sources[0].rows.is_conversational,
        sources=_sources_of(shares),
        num_train_tokens=sum(share.num_tokens for share in shares),
        num_trainable_tokens=sum(source.num_trainable_tokens for source in train.sources),
        longest_tokens=max(source.longest_tokens for source in train.sources),
        num_rows=sum(len(source.rows) for source in train.sources),
        num_truncated=sum(source.num_truncated for source in train.sources),
        num_split=0,
        num_dropped=sum(source.num_dropped for source in train.sources),
        num_good=train.num_good if recipe.method.spec.trains_on == "answers" else None,
        **_media_facts(train.sources),
    )
    if facts.num_good in (0, facts.num_train):
        raise _one_sided(train, facts)
    bare = [f"{rows.source}: {BARE_PROMPTS}" for rows in data.train if are_bare(rows, tokenizer)]
    skipped = (
        f"{source.rows.source}: {counted(source.num_dropped, 'row')} skipped: {room.too_long}"
        for split in splits
        for source in split.sources
        if source.num_dropped
    )
    about_labels: Iterable[str] = ()
    if isinstance(labeled, StepTokens):
        about_labels = _divided_steps(labeled, data.train)
    elif labeled is not None:
        about_labels = labeled.notes(data.train)
    return PreparedRows(splits, facts, (*data.notes, *bare, *skipped, *about_labels), data.skipped)


def labeled_tokens_of(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> LabeledTokens | None:
    """Return the tokens of rows with labels by a recipe; None for a method that predicts tokens or compares answers."""
    head, steps = recipe.method.score_head, recipe.method.step_settings
    if steps is not None:
        return StepTokens(tokenizer, steps.separator, steps.only_last)
    if head is not None and head.scores == "classes":
        return ClassTokens(tokenizer, head, recipe.data.max_length)
    return None


def _divided_steps(steps: StepTokens, sources: Iterable[Rows]) -> Iterator[str]:
    """Yield notes on steps that would be several in a text of completions."""
    for rows in sources:
        num = sum(any(len(steps.split(step)) > 1 for step in row["completions"]) for row in rows.rows)
        if num:
            words = f"{rows.source}: {counted(num, 'row')} with the separator {steps.separator!r} within a step"
            yield f"{words}: as a reward, the model would score each part of it as a step"


def answered_rows(
    method: OnPolicyMethod, data: LoadedData, tokenizer: "Callable[[], PreTrainedTokenizerBase]"
) -> LoadedData:
    """Return rows as completions are generated to them: with tools, the prompts of a teacher, or their own answers.

    Args:
        method: The method.
        data: The rows.
        tokenizer: Loads the tokenizer of the model.

    Raises:
        DataError: Rows or the chat template are not fit for tools or a teacher, rows have tools of their own, or no
            answer to compare with.
    """
    from tunekit.methods.tool_use import check_own_tools, with_tools

    if method.acting is not None:
        return with_tools(data, method.acting, tokenizer())
    if method.teacher_template is not None:
        return with_teacher_prompts(data, method.teacher_template)
    if method.matches_answers:
        return with_ground_truth(data)
    check_own_tools(data)
    return data


def _check_teacher_reads(teacher: ModelSection, recipe: Recipe, images: MediaTokens, sources: Iterable[Rows]) -> None:
    """Refuse a teacher whose processor, with the settings of the model's, makes others of pictures."""
    from tunekit.methods.distillation import check_images

    section = teacher.model_copy(update={name: dict(recipe.model)[name] for name in PROCESSORS})
    with _errors_of_teacher():
        processor = load_processor(section, load_tokenizer(teacher), ["image"])
    pictures = (picture for rows in sources for row in rows.rows for picture in pictures_in(row))
    check_images(images, MediaTokens(processor), pictures, teacher.path)


@contextmanager
def _errors_of_teacher() -> Iterator[None]:
    """Within it, errors of loading a model name the teacher."""
    try:
        yield
    except ModelError as error:
        problem = error.problem.removeprefix("model.path: ")
        raise ModelError(f"method.teacher: {problem}", hint=error.hint) from error


def _check_all_have_pictures(sources: Iterable[Rows]) -> None:
    """Refuse prompts without pictures beside others: TRL gives processors None for them (trl 1.16, GRPOTrainer)."""
    for rows in sources:
        bare = next((index for index, row in enumerate(rows.rows) if not row.get(COLUMN)), None)
        if bare is not None:
            problem = f"{rows.place(bare)}: a prompt without images, but other prompts have images"
            raise DataError(problem, hint="add images to all prompts, or to none")


def report_on_rows(
    recipe: Recipe, data: LoadedData, on_progress: Progress | None = None, *, num_samples: int = NUM_SAMPLES
) -> DataReport:
    """Measure the rows of a method whose trainer tokenizes them, and report on them.

    Args:
        recipe: The recipe.
        data: Its rows.
        on_progress: Told how far the rows of a source are.
        num_samples: Rows of each source to take as samples.

    Raises:
        DataError: No row is left, or the rows do not fit the chat template.
    """
    prepared = prepare_rows(recipe, data, on_progress)
    tokenizer, pictures = load_tokenizer(recipe.model), None
    if prepared.facts.media:
        pictures = PictureAnswers(load_processor(recipe.model, tokenizer, ["image"]))
    return report_rows(
        prepared.splits,
        tokenizer,
        max_length=recipe.data.max_length,
        num_samples=num_samples,
        notes=prepared.notes,
        skipped=prepared.skipped,
        pictures=pictures,
        labeled=labeled_tokens_of(recipe, tokenizer),
    )


def _one_sided(train: AlignmentSplit, facts: DataFacts) -> DataError:
    """Answers that are all good, or all bad."""
    label, what = ("true", "good") if facts.num_good else ("false", "bad")
    first = train.sources[0]
    hint = "to train on good answers alone, use method sft with data.format=prompt_completion"
    return DataError(
        f"{first.rows.place(first.kept[0])}: label is {label}, as in all {counted(facts.num_train, 'row')}: kto "
        f"needs both good and bad answers, and all are {what}",
        hint=hint if facts.num_good else "add rows with good answers (label true)",
    )


def room_of(recipe: Recipe) -> Room:
    """Return the maximum lengths of rows of answers, or of prompts alone."""
    method, max_length = recipe.method, recipe.data.max_length
    if method.spec.classifies:
        # Half an answer is not judged, so a pair with a longer one is left out, as TRL does; a text is read as far as
        # the recipe lets it.
        cuts = method.spec.classifies == "classes" and recipe.data.too_long == "truncate"
        return Room(max_length, max_length, cuts=cuts)
    if generates(method):
        # TRL cuts no prompt, so that each has to leave room for the longest answer.
        compared = GROUND_TRUTH if method.matches_answers else None
        longest = max_length - method.max_completion_length
        return Room(max_length, longest, prompts=method.prompt_columns, answer=compared)
    # A prompt leaves room for one token of an answer at least: else TRL leaves the row out, or has no mean of it.
    return Room(max_length, max_length - 1)


def media_in(data: LoadedData) -> tuple[MediaKind, ...]:
    """Return the kinds of media of rows."""
    kinds = {kind for rows in (*data.train, *data.eval) for kind in rows.media}
    return tuple(kind for kind in KINDS if kind in kinds)


def counted_facts(recipe: Recipe, data: LoadedData) -> DataFacts:
    """Return the facts about rows before they are tokenized: their number, and the amount of text."""
    sources = list(_counted_sources(recipe, data)) if len(data.train) > 1 else []
    return DataFacts(
        num_train=sum(source.num_rows for source in sources) or len(data.train[0]),
        num_eval=sum(len(rows) for rows in data.eval) if data.eval else None,
        format=data.train[0].format,
        is_conversational=data.train[0].is_conversational,
        sources=tuple(sources),
        has_pictures=not {"image", "video"}.isdisjoint(media_in(data)),
        has_videos="video" in media_in(data),
        has_audio="audio" in media_in(data),
    )


def _counted_sources(recipe: Recipe, data: LoadedData) -> Iterator[SourceFacts]:
    chosen = mix([rows.rows.sizes_bytes for rows in data.train], mixing_of(recipe.data))
    for number, rows in enumerate(data.train):
        taken_rows = chosen.index[chosen.source == number]
        size = int(rows.rows.sizes_bytes[taken_rows].sum())
        yield SourceFacts(name=rows.source, num_rows=len(taken_rows), size=size)


def record(recipe: Recipe, data: LoadedData) -> Recipe:
    """The recipe as the run folder keeps it: paths absolute, the sample prompts named."""
    prompts = recipe.output.sample_prompts
    if recipe.method.spec.classifies:
        prompts = []
    elif prompts is None:
        of_rows = _prompts((*data.eval, *data.train)[0])
        # Those with media are kept beside the rows; a recipe has texts.
        prompts = [prompt.content for prompt in of_rows]
        prompts = None if any(prompt.media for prompt in of_rows) else without_secrets(prompts)
    output = recipe.output.model_copy(update={"sample_prompts": prompts})
    return absolute(recipe).model_copy(update={"output": output})


def absolute(recipe: Recipe) -> Recipe:
    """The recipe with absolute paths."""
    evaluated = None if recipe.data.eval is None else _absolute_sources(recipe.data.eval)
    data = recipe.data.model_copy(update={"train": _absolute_sources(recipe.data.train), "eval": evaluated})
    method = with_models(recipe.method, _absolute_model)
    if is_rewarded(method):
        rewards = [
            item.model_copy(update={"path": _absolute(item.path)}) if isinstance(item, JsonSchemaReward) else item
            for item in method.rewards
        ]
        method = method.model_copy(update={"rewards": rewards})
    return recipe.model_copy(update={"model": _absolute_model(recipe.model), "data": data, "method": method})


def _absolute_model(section: ModelSection) -> ModelSection:
    path = section.path if section.path in SHIPPED_MODELS else _absolute(section.path)
    template = section.chat_template if named_template(section.chat_template) else _absolute(section.chat_template)
    return section.model_copy(update={"path": path, "chat_template": template})


def with_models(method: Method, change: Callable[[ModelSection], ModelSection]) -> Method:
    """A method whose teacher and reward models are changed."""
    if has_teacher(method):
        return method.model_copy(update={"teacher": change(method.teacher)})
    if not is_rewarded(method):
        return method
    rewards = [
        reward.model_copy(update={"model": change(reward.model)}) if isinstance(reward, ModelReward) else reward
        for reward in method.rewards
    ]
    return method.model_copy(update={"rewards": rewards})


def _absolute_sources(given: Sources) -> Sources:
    return [_absolute_source(source) for source in given] if isinstance(given, list) else _absolute_source(given)


def _absolute_source(source: DataSource) -> DataSource:
    if is_url(source.path):
        # What a run writes down is shown to others, so it keeps no password.
        return source.model_copy(update={"path": redacted(without_user(source.path))})
    path = _absolute(source.path)
    if path == source.path and any(sign in path for sign in "*?["):
        path = str(Path(path).resolve())
    return source.model_copy(update={"path": path})


def _absolute(path: str | None) -> str | None:
    return str(Path(path).resolve()) if path is not None and Path(path).exists() else path


def save_sample_prompts(recipe: Recipe, data: LoadedData, run: Path) -> None:
    """Put the sample prompts in the folder of a run, where the recipe names none and some have media.

    Raises:
        DataError: A medium is not the one that was looked at.
    """
    if recipe.output.sample_prompts is None and not recipe.method.spec.classifies:
        prompts = _prompts((*data.eval, *data.train)[0])
        if any(prompt.media for prompt in prompts):
            clean = [replace(prompt, content=without_secrets(prompt.content)) for prompt in prompts]
            sample_prompts.save(clean, run)


def _prompts(rows: Rows) -> list[SamplePrompt]:
    """The first different prompts of the rows: first user turns, or prompts that are plain text."""
    prompts: dict[str, SamplePrompt] = {}
    for row in rows.rows:
        turns = row["messages"] if rows.format == "messages" else row.get("prompt")
        if isinstance(turns, list):
            # A conversation of one question.
            is_question = rows.format != "prompt_completion" and [turn["role"] for turn in turns] == ["user"]
            question = next((turn["content"] for turn in turns if turn["role"] == "user"), None)
            turns = question if is_question or rows.format == "messages" else None
        if turns:
            # Media stand in a row in the order of their marks, the first ones in the first question.
            prompt = SamplePrompt(turns, tuple(media_of(row)[: len(re.findall(ANY_MARK, turns))]))
            prompts.setdefault(prompt.words, prompt)
        if len(prompts) == NUM_SAMPLE_PROMPTS:
            break
    return list(prompts.values())
