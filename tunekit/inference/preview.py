"""The first rows of a recipe's source as its model will see them, whatever is still wrong with the recipe's data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunekit.data.formats.row_formats import Learner
from tunekit.data.media.answers import PictureAnswers
from tunekit.data.media.expand import MediaTokens
from tunekit.data.reports import preview
from tunekit.data.reports.look import LOOK_RECORDS, formats_for, look_at
from tunekit.data.sources.load import LoadedData
from tunekit.data.sources.rows import Rows, shown
from tunekit.data.tokenization.alignment import BARE_PROMPTS, are_bare
from tunekit.errors import DataError, TunekitError
from tunekit.methods.rewards.load import check_rows, columns_read
from tunekit.models.load import load_processor, load_tokenizer
from tunekit.recipe.methods import generates, is_rewarded
from tunekit.recipe.methods.on_policy import RewardedMethod
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.data import CompleteSource
from tunekit.runs.fingerprints import continued
from tunekit.runs.prepared_data import answered_rows, labeled_tokens_of, room_of


@dataclass(frozen=True)
class _Tokens:
    """Tokenization of rows, if possible."""

    show: preview.Show | None = None
    notes: tuple[str, ...] = ()
    problem: preview.Problem | None = None


def preview_data(
    recipe: Recipe, learner: Learner, *, key: str | None, start: int, num_rows: int
) -> preview.DataPreview:
    """Some of the first rows of a source.

    Args:
        recipe: The recipe.
        learner: What its method learns from.
        key: Which of its sources: `data.train`, `data.eval[1]`; None for the first.
        start: The first row, counted from 0 among the good ones.
        num_rows: Rows to show, at most.

    Raises:
        DataError: There is no such source.
    """
    section = recipe.data
    source = source_of(recipe, key)
    look = look_at(
        source,
        learner,
        num_records=max(LOOK_RECORDS, start + num_rows),
        default_split="eval" if source.key.startswith("data.eval") else "train",
    )
    rows = look.rows
    tokens = _Tokens() if rows is None else _tokens(recipe, rows, is_trained=not source.key.startswith("data.eval"))
    shown_rows: tuple[preview.RowPreview, ...] = ()
    reads: dict[str, str] = {}
    if rows is not None:
        indices = range(min(start, len(rows)), min(start + num_rows, len(rows)))
        shown_rows = tuple(preview.show_rows(rows, indices, tokens.show))
        if is_rewarded(recipe.method):
            reads = columns_read(recipe.method.rewards)
            shown_rows = tuple(
                _with_fault(recipe.method, row, rows.select([index]))
                for row, index in zip(shown_rows, indices, strict=True)
            )
    return preview.DataPreview(
        key=source.key,
        sources=tuple((each.key, shown(each.path)) for each in (*section.sources, *section.eval_sources)),
        method=recipe.method.type,
        max_length=section.max_length,
        format=look.format,
        columns=look.columns,
        formats=formats_for(learner),
        rows=shown_rows,
        start=start,
        num_rows=0 if rows is None else len(rows),
        num_records=look.num_records,
        is_whole=look.is_whole,
        bad=look.bad,
        max_bad_rows=section.max_bad_rows,
        notes=(*(() if rows is None else rows.notes), *tokens.notes),
        problem=None if look.problem is None else preview.Problem(look.problem.problem, look.problem.hint),
        model_problem=tokens.problem,
        reads=reads,
    )


def source_of(recipe: Recipe, key: str | None) -> CompleteSource:
    """Return a source of a recipe; without a key, the first.

    Raises:
        DataError: There is none with this key.
    """
    sources: Sequence[CompleteSource] = (*recipe.data.sources, *recipe.data.eval_sources)
    matching = next((source for source in sources if key in (None, source.key)), None)
    if matching is None:
        keys = ", ".join(source.key for source in sources)
        raise DataError(f"the recipe has no source {key}", hint=f"available: {keys}")
    return matching


def _tokens(recipe: Recipe, rows: Rows, *, is_trained: bool) -> _Tokens:
    """Return the tokenization of rows; without a tokenizer or a template that accepts them they are shown as text."""
    try:
        recipe = continued(recipe)
        tokenizer = load_tokenizer(recipe.model)
        if not preview.is_encoded(rows.format):
            if generates(recipe.method):
                (rows,) = answered_rows(recipe.method, LoadedData((rows,), (), []), lambda: tokenizer).train
            notes = (f"{rows.source}: {BARE_PROMPTS}",) if are_bare(rows, tokenizer) else ()
            room, pictures = room_of(recipe), None
            if rows.media:
                processor = load_processor(recipe.model, tokenizer, rows.media)
                room, pictures = replace(room, cuts=False), PictureAnswers(processor)
            labeled = labeled_tokens_of(recipe, tokenizer)
            if labeled is not None and not is_trained:
                labeled = labeled.of_all
            return _Tokens(preview.answered_sequences(rows, tokenizer, room, pictures, labeled), notes)
        media = MediaTokens(load_processor(recipe.model, tokenizer, rows.media)) if rows.media else None
        show, encoder = preview.trained_sequences(
            rows, tokenizer, recipe.data.max_length, media, too_long=recipe.data.too_long
        )
    except TunekitError as error:
        return _Tokens(problem=preview.Problem(error.problem, error.hint))
    return _Tokens(show, tuple(encoder.notes))


def _with_fault(method: RewardedMethod, row: preview.RowPreview, one: Rows) -> preview.RowPreview:
    """A row with what a reward finds wrong in it."""
    try:
        check_rows(method.rewards, [one])
    except TunekitError as error:
        return replace(row, left_out=str(error).removeprefix(f"{row.place}: "))
    return row
