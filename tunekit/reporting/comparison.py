"""Runs side by side: in what their recipes, data and surroundings differ, what came of them, and their curves.

It is made from the run folders alone, whatever state the runs are in. Figures are ranked only where they are figures
of the same thing: losses on other rows, or of other methods, stand beside each other without a winner.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tunekit.errors import DependencyError, TunekitError
from tunekit.estimates.throughput.speed import duration
from tunekit.files import load_template
from tunekit.planner.plan import gib
from tunekit.recipe.edits import recipe_diff
from tunekit.recipe.load import asked_for
from tunekit.recipe.methods import is_rewarded
from tunekit.reporting.page import CURVES, Line, draw, page_of
from tunekit.reporting.summary import Story, story_of
from tunekit.runs.evaluation_result import evaluations_of, newest_scores
from tunekit.runs.events import direction_of, judged_by, measures, number, words_of
from tunekit.runs.reader import EventReader, Point
from tunekit.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

MAX_RUNS = 8
"""Runs that are compared at once; there are as many colors."""

COLOURS = ("#3d6f94", "#b4483c", "#2f7d5b", "#8a5fa8", "#a06a00", "#b03a7a", "#1f7f8c", "#6b6b6b")
"""Of the curves in a picture."""

NONE = "–"
"""Text in place of a figure that a run does not have."""

_Better = Literal["more", "less"] | None


@dataclass(frozen=True)
class Figure:
    """Something that can be told of every run.

    Attributes:
        what: What it is.
        key: Its name for scripts.
        values: One of each run; None where a run has none.
        words: The same as people read them.
        best: The places of the best, where one can be better than another.
    """

    what: str
    key: str
    values: tuple[float | None, ...]
    words: tuple[str, ...]
    best: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Overlay:
    """The same curve of several runs.

    Attributes:
        title: What is drawn.
        key: Its name in the log.
        lines: One of each run, without points where a run has none.
    """

    title: str
    key: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side; every tuple has a place for each run, in the order in which they were named.

    Attributes:
        stories: What the folders say.
        names: What the runs are called here.
        recipe: The fields in which the recipes differ, by dotted key; None where a recipe has no such field.
        surroundings: In what data, lineage, plan and machine differ.
        figures: What came of the runs.
        overlays: The curves that at least two of them have.
        answers: What they answer to the same prompts after training, by prompt.
        notes: What else the reader should know.
    """

    stories: tuple[Story, ...]
    names: tuple[str, ...]
    recipe: Mapping[str, tuple[str | None, ...]]
    surroundings: Mapping[str, tuple[str | None, ...]]
    figures: tuple[Figure, ...]
    overlays: tuple[Overlay, ...]
    answers: Mapping[str, tuple[str | None, ...]]
    notes: tuple[str, ...]

    def plot(self) -> "Picture":
        """The curves as a picture, a pane for each thing that is drawn.

        Raises:
            DependencyError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ModuleNotFoundError as error:
            raise DependencyError(
                "plots need matplotlib", hint="install it with: pip install 'tunekit[notebook]'"
            ) from error

        across = 2 if len(self.overlays) > 1 else 1
        down = max(1, -(-len(self.overlays) // across))
        picture, grid = pyplot.subplots(
            down, across, figsize=(5.6 * across, 3.2 * down), layout="constrained", squeeze=False
        )
        panes = list(grid.flat)
        for pane, overlay in zip(panes, self.overlays, strict=False):
            for line, colour in zip(overlay.lines, COLOURS, strict=False):
                steps, values = zip(*line.points, strict=True) if line.points else ((), ())
                pane.plot(steps, values, "o-" if line.dots else "-", color=colour, label=line.label, markersize=4)
            pane.set(title=overlay.title, xlabel="step")
            pane.grid(alpha=0.3)
        for pane in panes[len(self.overlays) :]:
            pane.axis("off")
        if self.overlays:
            handles, labels = panes[0].get_legend_handles_labels()
            picture.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 2))
        # Closed, pyplot does not draw it a second time behind a notebook's cell; it can still be shown and saved.
        pyplot.close(picture)
        return picture

    def to_html(self) -> str:
        """One HTML page that loads nothing from elsewhere."""
        return page_of(
            "comparison.html.jinja",
            **self._tables(),
            curves=[
                (overlay.title, draw(overlay.lines, title=f"{overlay.title} of each run by step"))
                for overlay in self.overlays
            ],
            answers=self.answers,
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        )

    def _repr_html_(self) -> str:
        return load_template(Path(__file__).with_name("comparison_cell.html.jinja")).render(**self._tables())

    def _tables(self) -> dict[str, Any]:
        """Return the tables of a page, by the names that templates have for them."""
        return {
            "names": self.names,
            "figures": [
                ("state", [story.state for story in self.stories], frozenset[int]()),
                ("steps", [story.step_words for story in self.stories], frozenset[int]()),
                *((figure.what, list(figure.words), figure.best) for figure in self.figures),
            ],
            "tables": [
                ("Recipe differences", "The recipes are identical.", self.recipe),
                ("Differences in data, lineage and machine", "No known differences.", self.surroundings),
            ],
            "notes": self.notes,
            "missing": NONE,
        }

    def to_dict(self) -> dict[str, Any]:
        """All but the curves as plain data."""
        return {
            "runs": [
                {"name": name, "path": str(story.run.path), "state": story.state, "step": story.status["step"]}
                for name, story in zip(self.names, self.stories, strict=True)
            ],
            "recipe": {key: list(values) for key, values in self.recipe.items()},
            "surroundings": {key: list(values) for key, values in self.surroundings.items()},
            "figures": [
                {"name": figure.key, "words": figure.what, "values": list(figure.values), "best": sorted(figure.best)}
                for figure in self.figures
            ],
            "notes": list(self.notes),
        }


def compare(runs: Sequence[Run | str | Path]) -> Comparison:
    """Runs side by side.

    Args:
        runs: Two or more: runs, their folders, or their names in `runs/`.

    Raises:
        TunekitError: There are too few or too many, one is named twice, or the folder of one is damaged.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
        raise TunekitError(f"cannot compare {count}", hint=f"pass 2 to {MAX_RUNS} runs; `tunekit runs` lists them")
    stories = tuple(story_of(run) for run in runs)
    places = [story.run.path.resolve() for story in stories]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise TunekitError(f"{twice} is listed twice", hint="pass each run once")
    pages = [_Page(story) for story in stories]
    called = [story.name for story in stories]
    names = tuple(
        name if called.count(name) == 1 else str(story.run.path) for name, story in zip(called, stories, strict=True)
    )
    return Comparison(
        stories=stories,
        names=names,
        recipe=_recipes(stories),
        surroundings=_differing([dict(_surroundings(story)) for story in stories]),
        figures=tuple(_figures(pages)),
        overlays=tuple(_overlays(pages, names)),
        answers=_answers(pages),
        notes=tuple(_notes(pages, names)),
    )


class _Page:
    """A run with its curves."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.reader = EventReader(story.run.path / "events.jsonl")
        self.reader.read()

    def points(self, name: str) -> list[Point]:
        """Return the values logged under a name, by step."""
        return list(self.reader.series.get(name, ()))

    def last(self, name: str) -> float | None:
        """The newest value of a name."""
        return self.reader.series[name].last.value if name in self.reader.series else None


def _recipes(stories: Sequence[Story]) -> dict[str, tuple[str | None, ...]]:
    """In what the recipes differ; of a field that some of them do not have, only what is not its default."""
    keys = {key for story in stories for key in _keys(asked_for(story.recipe))}
    return {
        key: values
        for key, values in recipe_diff(*(story.recipe for story in stories)).items()
        if key not in ("output.dir", "output.name") and (None not in values or key in keys)
    }


def _keys(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{above}{name}.")


def _surroundings(story: Story) -> Iterator[tuple[str, str]]:
    """Yield the circumstances of a run besides its recipe."""
    yield from ((what, words) for what, words in story.facts() if what not in ("Trained", "Method", "Started"))
    yield from story.environment()
    yield "Batch", story.plan.batch_words
    yield "Layout", story.plan.layout_words
    yield from ((f"Content of {what}", f"{digest:.12}") for what, digest in story.digests().items())


def _differing(columns: Sequence[Mapping[str, str]]) -> dict[str, tuple[str | None, ...]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = {key: tuple(column.get(key) for column in columns) for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _figures(pages: Sequence[_Page]) -> Iterator[Figure]:
    """Yield the results of the runs, the most important first."""
    why_not = {split: why_unranked(pages, split) for split in ("train", "eval")}
    yield from _figures_of("loss", "training loss", ".4f", pages, ranked=why_not["train"] is None)
    yield from _figures_of("eval_loss", "evaluation loss", ".4f", pages, ranked=why_not["eval"] is None)
    logged = {name for page in pages for name in page.reader.series}
    learned = {judged_by(sorted(page.reader.series)) for page in pages} - {"loss"}
    for measure in measures():
        for name in sorted(name for name in logged if fnmatch(name, measure.name)):
            held_out = measure.held_out and any(f"eval_{name}" in page.reader.series for page in pages)
            key, split = (f"eval_{name}", "eval") if held_out else (name, "train")
            words = f"{measure.label(name)}{', eval' if held_out else ''}"
            ranked = why_not[split] is None and _same_rewards(pages, name)
            figures = _figures_of(key, words, measure.digits, pages, ranked=ranked)
            if name in learned:
                yield from figures
                continue
            first = next(figures)
            if sum(value is not None for value in first.values) > 1:
                yield first
    yield from _evaluated(pages)
    yield from _costs(pages)


def _figures_of(key: str, words: str, digits: str, pages: Sequence[_Page], *, ranked: bool) -> Iterator[Figure]:
    """The last value of something logged, and the best one, with its step."""
    logged = {name for page in pages for name in page.reader.series}
    better = direction_of(key.removeprefix("eval_"), logged)
    last = tuple(page.last(key) for page in pages)
    if all(value is None for value in last):
        if key == "loss":
            yield Figure(words, key, last, (NONE,) * len(last))
        return
    way = better if ranked else None
    yield _figure(f"{words}, last" if better else words, key, last, lambda value: number(value, digits), way)
    if better is None:
        return
    choose = min if better == "less" else max
    tops = [choose(page.points(key), key=attrgetter("value"), default=None) for page in pages]
    values = tuple(None if top is None else top.value for top in tops)
    texts = tuple(NONE if top is None else f"{number(top.value, digits)} at step {top.step:,}" for top in tops)
    yield Figure(f"{words}, best", f"best_{key}", values, texts, _best(values, way))


def _figure(
    what: str, key: str, values: tuple[float | None, ...], said: Callable[[float], str], better: _Better
) -> Figure:
    words = tuple(NONE if value is None else said(value) for value in values)
    return Figure(what, key, values, words, _best(values, better))


def _best(values: Sequence[float | None], better: _Better) -> frozenset[int]:
    """The places of the best value; none where all are alike."""
    there = [value for value in values if value is not None]
    if better is None or len(set(there)) < 2:
        return frozenset()
    best = min(there) if better == "less" else max(there)
    return frozenset(place for place, value in enumerate(values) if value == best)


def _evaluated(pages: Sequence[_Page]) -> Iterator[Figure]:
    """Yield the results of `tunekit eval`, by rows or task and metric."""
    newest = [
        {(score.of, score.name): score for _, score in newest_scores(evaluations_of(page.story.run), None)}
        for page in pages
    ]
    for key in dict.fromkeys(key for scores in newest for key in scores):
        scores = [page_scores.get(key) for page_scores in newest]
        first = next(score for score in scores if score is not None)
        values = tuple(None if score is None else score.after.value for score in scores)
        words = tuple(NONE if score is None else score.after.words(score.digits) for score in scores)
        higher = first.higher_is_better
        way: _Better = None if higher is None else "more" if higher else "less"
        name = f"{first.words}, {Path(first.of).name}"
        yield Figure(name, f"{first.of}/{first.name}", values, words, _best(values, way))


def _costs(pages: Sequence[_Page]) -> Iterator[Figure]:
    """Yield the costs of the runs."""
    results = [page.reader.newest("result") or {} for page in pages]

    def values(key: str) -> tuple[float | None, ...]:
        return tuple(result.get(key) or page.last(key) for result, page in zip(results, pages, strict=True))

    speeds, tokens = values("tokens_per_second"), values("num_tokens")
    yield _figure("tokens per second", "tokens_per_second", speeds, lambda value: f"{value:,.0f}", "more")
    peaks = values("peak_memory_bytes")
    yield _figure("peak memory per device", "peak_memory_bytes", peaks, lambda value: gib(int(value)), "less")
    seconds = tuple(result.get("seconds") for result in results)
    num_schedules = len({page.story.status["num_steps"] for page in pages})
    yield _figure("time", "seconds", seconds, duration, "less" if num_schedules == 1 else None)
    yield _figure("tokens seen", "num_tokens", tokens, lambda value: f"{value:,.0f}", None)


def why_unranked(pages: Sequence[_Page], split: str) -> str | None:
    """Return why losses and metrics of runs are not comparable; None where they are.

    Args:
        pages: The runs.
        split: `train` or `eval`, the rows that the figures are of.
    """
    methods = [page.story.recipe.method for page in pages]
    types = list(dict.fromkeys(method.type for method in methods))
    if len(types) > 1:
        return f"losses of {' and '.join(types)} are different quantities"
    if len({_rows_of(page.story, split) for page in pages}) > 1:
        words = "trained" if split == "train" else "evaluated"
        return f"{words} on different rows"
    if methods[0].spec.settings_scale_loss and any(method != methods[0] for method in methods):
        return f"{types[0]} settings differ, which scales losses and margins"
    return None


def _rows_of(story: Story, split: str) -> str:
    """Return an identity of a run's rows: the prepared ones, with their tokens and labels, where it has them."""
    of_rows = [digest for what, digest in story.digests().items() if what.startswith(f"data/{split}")]
    if of_rows:
        return of_rows[0]
    data = story.recipe.data
    return repr([source.path for source in (data.sources if split == "train" else data.eval_sources)])


def _same_rewards(pages: Sequence[_Page], name: str) -> bool:
    """Return whether a metric of rewards is of the same rewards in all runs."""
    methods = [page.story.recipe.method for page in pages]
    rewards = [method.rewards for method in methods if is_rewarded(method)]
    return not name.startswith("reward") or all(reward == rewards[0] for reward in rewards)


def _overlays(pages: Sequence[_Page], names: Sequence[str]) -> Iterator[Overlay]:
    """Curves that at least two runs have."""
    learned = dict.fromkeys(judged_by(sorted(page.reader.series)) for page in pages)
    drawn = []
    for name in (*learned, *(() if "loss" in learned else ("loss",))):
        words = "loss" if name == "loss" else words_of(name)
        drawn += [(name, f"Training {words}"), (f"eval_{name}", f"Evaluation {words}")]
    for key, title in (*drawn, *CURVES):
        lines = tuple(
            Line(name, [(float(point.step), point.value) for point in page.points(key)], dots=key.startswith("eval_"))
            for name, page in zip(names, pages, strict=True)
        )
        if sum(bool(line.points) for line in lines) > 1:
            yield Overlay(title, key, lines)


def _answers(pages: Sequence[_Page]) -> dict[str, tuple[str | None, ...]]:
    """Answers after training to the prompts that at least two runs were asked."""
    answers = [
        {prompt: answer_texts.get("after") for prompt, answer_texts in page.reader.answers.items()} for page in pages
    ]
    prompts = dict.fromkeys(prompt for page_answers in answers for prompt in page_answers)
    rows = {prompt: tuple(page_answers.get(prompt) for page_answers in answers) for prompt in prompts}
    return {prompt: row for prompt, row in rows.items() if sum(answer is not None for answer in row) > 1}


def _notes(pages: Sequence[_Page], names: Sequence[str]) -> Iterator[str]:
    for name, page in zip(names, pages, strict=True):
        if page.story.state != "finished":
            yield f"{name} is {page.story.state}, at step {page.story.step_words}: results so far"
    has_eval = any("eval_loss" in page.reader.series for page in pages)
    reasons = [why_unranked(pages, split) for split in ("train", *(("eval",) if has_eval else ()))]
    for reason in dict.fromkeys(filter(None, reasons)):
        yield f"not ranked: {reason}"
