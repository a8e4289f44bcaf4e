"""Result of an evaluation, as stored in the run folder: figures before and after, each with its interval.

A run folder holds a file for each in `evaluations/`. Nothing here loads a model: whoever shows them reads them so.
"""

import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tunekit.errors import RunError
from tunekit.files import load_template
from tunekit.redact import without_secrets
from tunekit.runs.events import number
from tunekit.runs.run import Run, find_run
from tunekit.runs.small_files import read_object, write_whole

FOLDER = "evaluations"
"""Folder of a run that holds them."""


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% confidence interval, which is None if unknown, such as for a single row."""

    value: float
    low: float | None = None
    high: float | None = None

    def words(self, digits: str, *, sign: bool = False) -> str:
        """Format it with its interval: `0.53 [0.41, 0.64]`."""
        digits = "+" * sign + digits
        text = number(self.value, digits)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{number(self.low, digits)}, {number(self.high, digits)}]"


@dataclass(frozen=True)
class Score:
    """A figure of a model over some rows.

    Attributes:
        name: Its name in metrics.
        words: Its label.
        digits: Its format.
        of: The rows, or the task.
        num_rows: Number of rows.
        higher_is_better: Direction of improvement; None if it has none.
        interval: Method of its intervals: `bootstrap`, `Wilson` (the difference: `bootstrap`), or `normal`.
        after: Value of the model.
        before: Value of the model before training.
        difference: After minus before; paired by row unless `interval` says otherwise.
    """

    name: str
    words: str
    digits: str
    of: str
    num_rows: int
    higher_is_better: bool | None
    interval: str
    after: Estimate
    before: Estimate | None = None
    difference: Estimate | None = None

    @property
    def verdict(self) -> str:
        """Verdict on the difference: `better`, `worse`, `no clear difference`, ...; empty if there is none."""
        gap = self.difference
        if gap is not None and gap.value == 0 and gap.low is None:
            return "no difference"
        if gap is None or gap.low is None or gap.high is None or self.higher_is_better is None:
            return ""
        if gap.low <= 0 <= gap.high:
            return "no clear difference"
        return "better" if (gap.low > 0) == self.higher_is_better else "worse"

    @property
    def cells(self) -> tuple[str, str, str]:
        """Before, after and the difference, formatted."""
        before = "" if self.before is None else self.before.words(self.digits)
        gap = "" if self.difference is None else self.difference.words(self.digits, sign=True)
        return before, self.after.words(self.digits), gap


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model, and of the model before training.

    Attributes:
        model: Its name.
        step: Step of the checkpoint; None for a result, or a model without a run.
        before: Name of the model that it is compared with; None if there is none.
        what: Short description of the evaluation data.
        scores: The figures.
        settings: Settings of the computation: device, dtype, seed, lengths.
        notes: Notes for the user, a sentence each.
        began: Start, in seconds since 1970.
        seconds: Duration.
        path: The file in the run folder; None for a model without a run.
    """

    model: str
    step: int | None
    before: str | None
    what: str
    scores: tuple[Score, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    began: float = 0.0
    seconds: float = 0.0
    path: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    def _repr_html_(self) -> str:
        compares = any(score.before is not None for score in self.scores)
        return load_template(Path(__file__).with_name("evaluation.html.jinja")).render(made=self, compares=compares)

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> "Evaluation":
        """An evaluation from what `to_dict` made of it.

        Raises:
            ValueError: It is none.
        """
        return TypeAdapter(cls).validate_python(held, extra="forbid")


def save_evaluation(run: Run, made: Evaluation) -> Evaluation:
    """Write an evaluation into the folder of its run; whoever reads finds all of it or nothing.

    Raises:
        RunError: The folder cannot be written.
    """
    folder = run.path / FOLDER
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(made.began))
    stem = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', made.what).strip('-.')[:60]}-{stamp}"
    try:
        folder.mkdir(exist_ok=True)
        paths = (folder / f"{stem}{number}.json" for number in ("", *(f"-{number}" for number in range(2, 1000))))
        path = next(path for path in paths if not path.exists())
        stored = replace(made, path=str(path))
        content = {**without_secrets(stored.to_dict()), "path": path.name}
        write_whole(path, json.dumps(content, indent=2, ensure_ascii=False))
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}", hint="make the folder writable") from error
    return stored


def evaluations_of(run: Run | str | Path) -> list[Evaluation]:
    """List the evaluations of a run, oldest first.

    Args:
        run: The run, its folder, or its name in `runs/`.

    Raises:
        RunError: There is no such run, or a file in `evaluations/` is not an evaluation.
    """
    folder = (run if isinstance(run, Run) else find_run(str(run))).path / FOLDER
    read = []
    for path in folder.glob("[!.]*.json"):
        try:
            evaluation = Evaluation.from_dict(read_object(path))
        except (RunError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(f"{path} is not an evaluation, or damaged", hint="delete it and evaluate again") from error
        read.append(replace(evaluation, path=str(path)))
    return sorted(read, key=lambda made: made.began)


def newest_scores(evaluations: Iterable[Evaluation], step: int | None = None) -> list[tuple[Evaluation, Score]]:
    """Of each figure the one that was computed last, of a run's result or of one of its checkpoints.

    Args:
        evaluations: The oldest first.
        step: The checkpoint; None for the result.
    """
    newest: dict[tuple[str, str], tuple[Evaluation, Score]] = {}
    for evaluation in evaluations:
        for score in evaluation.scores if evaluation.step == step else ():
            newest.pop((score.of, score.name), None)
            newest[score.of, score.name] = (evaluation, score)
    return list(newest.values())


def sliced(of: str, limit: int | None) -> str:
    """Return the name of rows of which only the first ones are taken: `held-out[:100]`."""
    return of if limit is None else f"{of}[:{limit}]"
