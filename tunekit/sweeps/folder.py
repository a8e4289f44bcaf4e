"""A sweep's folder: its values, its runs, and their states. Its runs are among the others, in `runs/`.

    recipe.yaml   the recipe of which each run changes some values
    sweep.yaml    the values, the number of runs at a time, and the metric to compare them by
    trials.json   the combinations, each with its number; a run's name is the sweep's with that number
    conductor     locked by the process that starts the runs, while it lives
    stop.json     stop request
    study.db      Optuna's study, if it chooses the combinations: `optuna-dashboard sqlite:///study.db` shows it
    sweep.png, sweep.html   the results

The state of a run is always read from its own folder: nothing here can contradict it.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from filelock import FileLock, Timeout

from tunekit.errors import RunError
from tunekit.files import is_inside, is_name
from tunekit.recipe.load import reload_recipe
from tunekit.recipe.reading.parse import to_inline_yaml, to_yaml
from tunekit.recipe.reading.rewrite import short_recipe
from tunekit.recipe.schema import Recipe
from tunekit.reporting.diagnosis import diagnose_run
from tunekit.runs.available_actions import ENDED_EARLY
from tunekit.runs.run import MAX_TAG_LETTERS, RUNS, Run, matching, new_folder
from tunekit.runs.small_files import read_list, read_text, write_whole
from tunekit.sweeps.measure import Measure
from tunekit.sweeps.values import Axis, Changes, Span, read_span

if TYPE_CHECKING:
    import pandas

SWEEPS = Path("sweeps")
"""Folder of sweeps, in the working directory."""

RECIPE, SPEC, TRIALS, CONDUCTOR, STOP = "recipe.yaml", "sweep.yaml", "trials.json", "conductor", "stop.json"

Search = Literal["grid", "random", "optuna"]
"""Search strategy."""

WAITING, FAILED, FINISHED, PRUNED = "waiting", "failed", "finished", "pruned"
"""States of runs of a sweep besides those that a run has by itself: not begun, and ended because others do better."""

TO_DO = (WAITING, *(state for state in ENDED_EARLY if state != FAILED))
"""States of those that a sweep begins or goes on with: what failed would fail again."""


@dataclass(frozen=True)
class Trial:
    """A combination, as it is written down.

    Attributes:
        number: From 1 on.
        changes: Its values by the dotted keys of the recipe.
        problem: Why there is no run of it; None where there is one, or it is still to come.
        is_pruned: Whether its run was ended because others do better.
    """

    number: int
    changes: Changes
    problem: str | None = None
    is_pruned: bool = False


@dataclass(frozen=True)
class Outcome:
    """State of a combination.

    Attributes:
        trial: The combination.
        run: Its run; None where there is none.
        state: The run's, or one of this module's.
        step: Steps that are done.
        num_steps: Steps of the run; None where that is not known.
        value: What it is compared by; None where that was not told yet.
        tokens_per_second: Of all its processes; None where that was not told yet.
        seconds: From loading to the saved result; None of what has not finished.
        why: Why it failed.
    """

    trial: Trial
    run: Run | None
    state: str
    step: int = 0
    num_steps: int | None = None
    value: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    why: str | None = None


@dataclass(frozen=True)
class Spec:
    """Specification of a sweep.

    Attributes:
        axes: What is tried by the dotted keys of the recipe.
        search: How combinations are chosen.
        num_runs: How many.
        seed: For what is left to chance.
        measure: What they are compared by.
        parallel: Runs at once.
        one_device_each: Whether each has one accelerator to itself, rather than all that its plan uses.
    """

    axes: dict[str, Axis]
    search: Search
    num_runs: int
    seed: int
    measure: Measure
    parallel: int
    one_device_each: bool


class Sweep:
    """A sweep, by its folder; notebooks show it as a table.

    Args:
        path: The folder.

    Raises:
        RunError: It is not a sweep folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / TRIALS).is_file():
            raise RunError(f"{self.path} is not a sweep folder", hint=f"sweeps are in {SWEEPS}")

    @classmethod
    def create(cls, recipe: Recipe, spec: Spec, all_changes: Sequence[Changes]) -> "Sweep":
        """A new folder with what is to be tried.

        Raises:
            RunError: It cannot be made.
        """
        path = new_folder(SWEEPS, recipe.output.name, hint="make the folder writable")
        (path / RECIPE).write_text(short_recipe(recipe), encoding="utf-8")
        axes = {key: str(axis) if isinstance(axis, Span) else list(axis) for key, axis in spec.axes.items()}
        words = {**asdict(replace(spec, axes={})), "axes": axes, "measure": asdict(spec.measure)}
        (path / SPEC).write_text(to_yaml(words), encoding="utf-8")
        _write_trials(path, [Trial(number, changes) for number, changes in enumerate(all_changes, start=1)])
        return cls(path)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.absolute().name

    @property
    def recipe(self) -> Recipe:
        """The recipe of which each run changes some values."""
        return reload_recipe(self.path / RECIPE)

    @property
    def spec(self) -> Spec:
        """Specification of the sweep.

        Raises:
            RunError: The file that says so is damaged.
        """
        try:
            words = yaml.safe_load(read_text(self.path / SPEC))
            written = words["axes"].items()
            axes = {key: read_span(key, a) or () if isinstance(a, str) else tuple(a) for key, a in written}
            return Spec(**{**words, "axes": axes, "measure": Measure(**words["measure"])})
        except (OSError, yaml.YAMLError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise RunError(f"{self.path / SPEC} is damaged: {error}", hint="start the sweep over") from error

    @property
    def tag(self) -> str:
        """Tag of its runs: the end of a long name, which is its time."""
        return f"sweep:{self.name[-(MAX_TAG_LETTERS - len('sweep:')) :]}"

    def trials(self) -> list[Trial]:
        """Return the combinations so far.

        Raises:
            RunError: The file that holds them is damaged.
        """
        try:
            return [Trial(**words) for words in read_list(self.path / TRIALS, "start the sweep over")]
        except (OSError, TypeError) as error:
            raise RunError(f"{self.path / TRIALS} is damaged: {error}", hint="start the sweep over") from error

    def write(self, trial: Trial) -> None:
        """Write down a combination, in the place of what was known of it; readers see the old or the new."""
        remaining = [other for other in self.trials() if other.number != trial.number]
        _write_trials(self.path, sorted([*remaining, trial], key=lambda one: one.number))

    def run_path(self, trial: Trial) -> Path:
        """Folder of the run of a combination, whether it is there or not."""
        root = self.path.absolute().parent.parent / RUNS
        path = root / f"{self.name}-{trial.number:02d}"
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    def run_of(self, trial: Trial) -> Run | None:
        """The run of a combination; None where there is none."""
        path = self.run_path(trial)
        return Run(path) if (path / "status.json").is_file() else None

    def state_of(self, trial: Trial) -> str:
        """Return the state of a combination."""
        run = self.run_of(trial)
        if run is None:
            return FAILED if trial.problem is not None else WAITING
        state = run.state
        return PRUNED if trial.is_pruned and state in ENDED_EARLY else state

    def outcomes(self) -> list[Outcome]:
        """Return the states of all combinations."""
        measure = self.spec.measure
        return [self._outcome(trial, measure) for trial in self.trials()]

    def _outcome(self, trial: Trial, measure: Measure) -> Outcome:
        run, state = self.run_of(trial), self.state_of(trial)
        if run is None:
            return Outcome(trial, None, state, why=trial.problem)
        status, events = run.status(), run.events()
        result = next((event for event in reversed(events) if event["event"] == "result"), None)
        speeds = [event["tokens_per_second"] for event in events if event["event"] == "log"]
        diagnosis = diagnose_run(run) if state in (FAILED, "died", "stuck") else None
        why = None if diagnosis is None else diagnosis.what + (f"; {diagnosis.hint}" if diagnosis.hint else "")
        return Outcome(
            trial,
            run,
            state,
            step=status["step"],
            num_steps=status["num_steps"],
            value=measure.value(events),
            tokens_per_second=result["tokens_per_second"] if result else next(reversed(speeds), None),
            seconds=result["seconds"] if result and state == FINISHED else None,
            why=why,
        )

    def best(self, outcomes: Sequence[Outcome] | None = None) -> Outcome | None:
        """Return the best finished combination; None if there is none."""
        ended = [one for one in outcomes or self.outcomes() if one.state == FINISHED and one.value is not None]
        choose = max if self.spec.measure.greater_is_better else min
        return choose(ended, key=lambda one: one.value or 0.0, default=None)

    def is_conducted(self) -> bool:
        """Return whether the process that starts its runs is alive."""
        try:
            with self.conductor():
                return False
        except Timeout:
            return True

    def conductor(self) -> FileLock:
        """Return the lock of the process that starts its runs."""
        return FileLock(self.path / CONDUCTOR, timeout=0)

    def to_dict(self) -> dict[str, Any]:
        """Return its state as plain data, for JSON."""
        outcomes, spec = self.outcomes(), self.spec
        best = self.best(outcomes)
        return {
            "sweep": str(self.path),
            "search": spec.search,
            "measure": asdict(spec.measure),
            "best": None if best is None else best.trial.number,
            "runs": [
                {
                    "number": outcome.trial.number,
                    "changes": outcome.trial.changes,
                    "run": None if outcome.run is None else str(outcome.run.path),
                    **{name: value for name, value in vars(outcome).items() if name not in ("trial", "run")},
                }
                for outcome in outcomes
            ],
        }

    def to_frame(self) -> "pandas.DataFrame":
        """Return one row per combination: its values, then its state."""
        import pandas

        runs = self.to_dict()["runs"]
        return pandas.DataFrame([{**run.pop("changes"), **run} for run in runs]).set_index("number")

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(na_rep="", float_format="{:,.4g}".format)

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"


def runs_of(sweep: Sweep) -> Iterator[tuple[Trial, Run]]:
    """The runs that there are, each with its combination."""
    for trial in sweep.trials():
        run = sweep.run_of(trial)
        if run is not None:
            yield trial, run


def list_sweeps() -> list[Sweep]:
    """List the sweeps in `sweeps/`, newest first."""
    if not SWEEPS.is_dir():
        return []
    folders = [path for path in SWEEPS.iterdir() if (path / TRIALS).is_file() and is_inside(path, SWEEPS)]
    return [Sweep(path) for path in sorted(folders, key=lambda path: (path / SPEC).stat().st_mtime, reverse=True)]


def find_sweep(name: str, *, exact: bool = False) -> Sweep:
    """Find a sweep by its folder or its name in `sweeps/`: the newest of that name, else the only one with that prefix.

    Args:
        name: Its folder, its name with or without the time, or a prefix of it.
        exact: Whether a prefix is refused, as for commands that change a sweep.

    Raises:
        RunError: There is none, or the prefix is ambiguous.
    """
    existing = known_sweep(name)
    if existing is not None:
        return existing
    sweeps = {candidate.name: candidate for candidate in list_sweeps()}
    named = matching(name, list(sweeps), noun="sweep", exact=exact) if is_name(name) else []
    if not named:
        is_folder = is_name(name) and Path(name).is_dir()
        problem = f"{name} is not a sweep folder" if is_folder else f"no sweep {name!r} in {SWEEPS}"
        names = ", ".join(list(sweeps)[:5])
        hint = f"available: {names}" if names else "create one with `tunekit sweep RECIPE key=value,value`"
        raise RunError(problem, hint=hint)
    return sweeps[named[0]]


def known_sweep(name: str) -> Sweep | None:
    """A sweep by its folder or its whole name in `sweeps/`; None where that names none."""
    paths = [Path(name), SWEEPS / name] if is_name(name) else []
    return next((Sweep(path) for path in paths if (path / TRIALS).is_file()), None)


def heading(key: str) -> str:
    """A dotted key, in short."""
    return key.rpartition(".")[2]


def short_words(changes: Changes) -> str:
    """Changes in a line, their keys in short."""
    return " ".join(f"{heading(key)}={to_inline_yaml(value)}" for key, value in changes.items())


def _write_trials(path: Path, trials: Sequence[Trial]) -> None:
    write_whole(path / TRIALS, json.dumps([asdict(trial) for trial in trials], indent=1, ensure_ascii=False))
