"""Rerun of a run from its folder, and the comparison of both.

A run repeated from its folder: its recipe, its plan and its rows, in a folder of its own.

Comparison of a run with its repetition: step by step, and bit by bit where nothing else differs.

On a processor the same sums in the same order give the same bits. Other versions, another processor or other threads
add in another order, and kernels of accelerators add with atomics in no fixed one: every sum is then rounded otherwise,
and each step builds on the one before. So losses may drift apart by what is stated below, and no more.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunekit.errors import RunError
from tunekit.probe.hardware import probe_hardware
from tunekit.reporting.summary import Story, story_of
from tunekit.runs import fingerprints
from tunekit.runs.available_actions import prospects
from tunekit.runs.events import Event, judged_by
from tunekit.runs.fingerprints import MadeWith, changed_texts, check_run_code, made_with, record_versions, write_code
from tunekit.runs.kept_inputs import keep_inputs
from tunekit.runs.run import RUNS, Run, check_free
from tunekit.runs.small_files import place_of

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-2, 5e-2
"""Share of a loss, and of 1 where that is more, by which losses may differ where sums are added in another order. Of
float32's rounding (2**-24) and bfloat16's (2**-8) it is far more: a difference doubles in some steps of training."""


@dataclass(frozen=True)
class Difference:
    """A value that is not what it was.

    Attributes:
        name: Its name in the log.
        step: The step.
        was: What the run logged; None where it logged none.
        is_now: What its repetition did.
    """

    name: str
    step: int
    was: float | str | None
    is_now: float | str | None

    def words(self) -> str:
        """It as people read it."""
        values = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in (self.was, self.is_now)]
        return f"{self.name} at step {self.step:,} was {values[0]}, now {values[1]}"


@dataclass(frozen=True)
class Agreement:
    """Result of comparing a repetition with its run.

    Attributes:
        run: The run.
        again: Its repetition.
        otherwise: What is otherwise, for which the last bits may differ; empty where they may not.
        tolerance: The share of a loss that may differ; 0 where nothing may.
        num_values: Losses and measures that were compared.
        first: The first that is not the same to the last bit; None where all are.
        beyond: The first that differs by more than is allowed; None where none does.
        same_weights: Whether the weights are the same to the last bit; None where the run's are gone.
    """

    run: Run
    again: Run
    otherwise: tuple[str, ...]
    tolerance: float
    num_values: int
    first: Difference | None
    beyond: Difference | None
    same_weights: bool | None

    @property
    def agrees(self) -> bool:
        """True if both agree as far as can be expected."""
        return self.beyond is None and (self.same_weights is not False or self.tolerance > 0)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        plain = {"run": str(self.run.path), "again": str(self.again.path), "otherwise": list(self.otherwise)}
        differences = {name: asdict(one) if (one := vars(self)[name]) else None for name in ("first", "beyond")}
        return {**vars(self), **plain, **differences, "agrees": self.agrees}

    def lines(self) -> Iterator[str]:
        """The verdict in sentences."""
        if self.otherwise:
            yield f"not expected to be bit-identical: {'; '.join(self.otherwise)}"
            yield f"tolerance: {self.tolerance:.0%} of a loss, since rounding errors accumulate over the steps"
        weights = {
            True: "and so are the weights",
            False: "but the weights differ",
            None: "the run's weights are missing",
        }
        if self.first is None:
            yield f"{self.num_values} losses and metrics are bit-identical, {weights[self.same_weights]}"
        else:
            yield f"first difference: {self.first.words()}"
        if self.beyond is not None and self.tolerance > 0:
            yield f"beyond the tolerance: {self.beyond.words()}"
        is_exact = self.first is None and self.same_weights is not False
        reproduced = "reproduced exactly" if is_exact else "reproduced within the tolerance"
        yield reproduced if self.agrees else "not reproduced"


def agreement_of(run: Run, again: Run) -> Agreement:
    """Compare a repetition with its run."""
    otherwise = tuple(_otherwise(run, again))
    half = run.plan.dtype != "float32"
    tolerance = (HALF_TOLERANCE if half else FLOAT32_TOLERANCE) if otherwise else 0.0
    was, now = _values(run.events()), _values(again.events())
    places = sorted(was.keys() | now.keys())
    pairs = [Difference(name, step, was.get((step, name)), now.get((step, name))) for step, name in places]
    differing = [pair for pair in pairs if pair.was != pair.is_now]
    beyond = next((difference for difference in differing if not _is_near(difference, tolerance)), None)
    weights = _weights(run.model_path)
    same = weights == _weights(again.model_path) if weights else None
    return Agreement(run, again, otherwise, tolerance, len(places), next(iter(differing), None), beyond, same)


def _values(events: Sequence[Event]) -> dict[tuple[int, str], float | str]:
    """Losses and what else a run is judged by, by step and name; the later word counts."""
    learned = judged_by(sorted({name for event in events if event["event"] == "log" for name in event}))
    names = dict.fromkeys((learned, "loss"))
    return {
        (event["step"], f"{before}{name}"): event[f"{before}{name}"]
        for event in events
        for before in ("", "eval_")
        for name in names
        if event["event"] == ("eval" if before else "log") and event.get(f"{before}{name}") is not None
    }


def _is_near(one: Difference, tolerance: float) -> bool:
    if not isinstance(one.was, float | int) or not isinstance(one.is_now, float | int):
        return False
    return math.isclose(one.was, one.is_now, rel_tol=tolerance, abs_tol=tolerance)


def _weights(folder: Path) -> list[tuple[str, str]]:
    digests = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digests.append((file.name, hashlib.file_digest(stream, "sha256").hexdigest()))
    return digests


def _otherwise(run: Run, again: Run) -> Iterator[str]:
    """Yield reasons for which the last bits of two runs may differ."""
    was, now = made_with(run), made_with(again)
    if was is None or now is None:
        yield "the run did not record its versions"
    else:
        yield from _of_versions(was, now)
    before, after = run.plan.device, again.plan.device
    if before.name != after.name or run.status()["host"] != again.status()["host"]:
        yield f"it ran on {before.name} on {run.status()['host']}"
    if after.kind != "cpu":
        yield f"{after.name} uses atomic adds in no fixed order"


def _of_versions(was: MadeWith, now: MadeWith) -> Iterator[str]:
    for name in dict.fromkeys((*was.versions, *now.versions)):
        if was.versions.get(name) != now.versions.get(name):
            before, after = (versions.get(name, "not installed") for versions in (was.versions, now.versions))
            yield f"{name} was {before}, now {after}"
    if was.commit != now.commit:
        yield f"tunekit's commit was {was.commit}, now {now.commit}"
    if was.num_threads != now.num_threads:
        yield f"the number of threads was {was.num_threads}, now {now.num_threads}"


SUFFIX = "-rerun"
"""Suffix of a repetition's name: the name alone remains that of the run."""

VERDICT = "rerun.json"
"""File of the repetition's folder that says whether it agrees."""


def rerun(
    run: Run | str | Path, *, name: str | None = None, on_event: Callable[[Event], None] | None = None
) -> Agreement:
    """Repeat a finished run from its folder, and report whether its losses are reproduced.

    Args:
        run: The run, its folder, or its name in `runs/`.
        name: Name of the new folder in `runs/`. Default: the run's name with `-rerun` and the time.
        on_event: Called with every event as it happens.

    Raises:
        TunekitError: It cannot be repeated: it has not finished, it was resumed with changes, its recipe, plan, rows or
            model have changed since, or this machine lacks the devices of its plan.
    """
    from tunekit.launching.local import begin, launch, turn

    story = story_of(run)
    for problem, hint in _obstacles(story):
        raise RunError(problem, hint=hint)
    again = _made(story, name)
    if on_event is not None:
        on_event({"event": "plan", "run": again, "plan": again.plan, "notes": [f"repeats {story.run.path}"]})
    begin(again)
    with turn(again, waits=False, listener=on_event):
        launch(again, on_event)
    result = agreement_of(story.run, again)
    (again.path / VERDICT).write_text(json.dumps(result.to_dict(), indent=2), encoding="utf-8")
    return result


def _obstacles(story: Story) -> Iterator[tuple[str, str]]:
    """Yield what a run cannot be repeated for, each with its remedy."""
    run, plan = story.run, story.plan
    if story.state != "finished":
        problem = f"{run.name} is {story.state}, at step {story.step_words}: only finished runs can be repeated"
        yield problem, prospects(run) or "wait until it finishes"
    if not run.result():
        yield f"{run.path / 'events.jsonl'} has no result", "the run's folder is damaged"
    anew = f"`tunekit train {run.path / 'recipe.yaml'} output.dir=null` trains with the current files"
    for event in run.events():
        if event["event"] == "resume" and (event["changes"] or event.get("weights_only")):
            words = ", ".join(event["changes"]) or "weights only"
            problem = f"{run.name} was resumed with changes from step {event['step']}: {words}"
            yield problem, f"that cannot be repeated from one recipe; {anew}"
    versions = made_with(run)
    changed = [] if versions is None else [f"{run.path / name} has changed" for name in changed_texts(run, versions)]
    changed += fingerprints.changes(run, story.recipe)
    if changed:
        problem = "\n".join((f"inputs of {run.name} have changed:", *changed))
        yield problem, f"restore them; or {anew}"
    check_run_code(run)
    if plan.num_nodes > 1 or place_of().num_processes > 1:
        yield f"{run.name} cannot be repeated under a launcher or on several nodes", anew
    if plan.device.kind != "cpu":
        here = probe_hardware()
        if here.device.name != plan.device.name or here.num_accelerators < plan.layout.num_processes:
            yield f"{run.name} was planned for {plan.devices_words}, which this machine lacks", anew


def _made(story: Story, name: str | None) -> Run:
    """The folder of the repetition, with the plan and the rows of the run."""
    run, recipe = story.run, story.recipe
    if name is not None and (not name or Path(name).name != name or name.startswith(".")):
        raise RunError(f"{name!r} is not a valid folder name in {RUNS}", hint="use letters, digits, - and _")
    folder = None if name is None else str((RUNS / name).absolute())
    own_name = f"{str(recipe.output.name).removesuffix(SUFFIX)}{SUFFIX}"
    output = recipe.output.model_copy(update={"dir": folder, "name": own_name})
    recipe = recipe.model_copy(update={"output": output})
    check_free(recipe)
    again = Run.create(story.plan.model_copy(update={"recipe": recipe}))
    if (run.path / "data").is_dir():
        shutil.copytree(run.path / "data", again.path / "data", dirs_exist_ok=True)
    keep_inputs(again, run)
    write_code(again)
    fingerprints.record(again)
    record_versions(again)
    (again.path / "log.txt").touch()
    return again
