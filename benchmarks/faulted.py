"""Runs to which something happens, and whether they go on as if it had not: the cases of `benchmarks.faults`."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from benchmarks.injected import Fault, contents_of
from benchmarks.prepared import CASE_SECONDS, ENGINES, Changes, Place, Prepared, save_source, started, whole_in

CLOSE = 1e-5
"""How far weights may be off where sums were made in another order."""

NOTHING = "the fault did not happen"

TRIES = 3
"""How often a case is begun in which it did not."""


@dataclass(frozen=True)
class Damage:
    """What is done to the newest checkpoint of a run that was cut off.

    Attributes:
        how: One of those of `_damage`.
        file: To which of its files.
        both: Whether the one before it is damaged in the same way.
    """

    how: str
    file: str
    both: bool = False


@dataclass(frozen=True)
class Case:
    """Something that goes wrong, and what it goes wrong with.

    Attributes:
        group: What kind of case it is.
        engine: What trains.
        words: What goes wrong.
        fault: What happens to the processes.
        damage: What is done to the files afterwards.
        begins: What it begins with: a run that is `made`, or that was `stopped` after its second checkpoint or `late`,
            after its third.
        recipe: Changes to the recipe.
        plan: Changes to the plan.
        disk: What the run folder is on: a disk of its own that is `small`, one that can only be read (`read-only`), or
            one of which that is true of the checkpoints once the fault says so (`turns read-only`).
        says: What the error is to say, as regular expressions; without any, none is expected or the process is killed.
        ends: How well the run ends, where it is to end in spite of all: with the `same` weights, with weights that are
            `close` to them, as another order of sums makes them, or `finite`.
        leaves_stacks: Whether it is to be found in the run folder what its processes were at.
        within_seconds: How long the processes may take to end.
    """

    group: str
    engine: str
    words: str
    fault: Fault | None = None
    damage: Damage | None = None
    begins: str = "stopped"
    recipe: tuple[str, ...] = ()
    plan: tuple[tuple[str, Any], ...] = ()
    disk: str = ""
    says: tuple[str, ...] = ()
    ends: str = ""
    leaves_stacks: bool = False
    within_seconds: float = CASE_SECONDS


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        expected: The newest step of which there was a whole checkpoint; None where there was none.
        resumed: The step that it went on from; None where it did not.
        words: What it said, or how it ended.
        problems: What is not as it should be; nothing where all is.
        seconds: How long it took.
    """

    expected: int | None = None
    resumed: int | None = None
    words: str = ""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    not_run: str = ""
    """Why it did not happen here, where it did not."""


class Bench:
    """A folder in which runs go wrong.

    Args:
        folder: The folder; it is new.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num = 0
        self._source = folder / "source"
        process = started(save_source, self._source)
        process.join()
        self._prepared: dict[tuple[str, Changes], Prepared] = {}

    def prepared(self, engine: str, changes: Changes = ((), ())) -> Prepared:
        """The runs of an engine."""
        if (engine, changes) not in self._prepared:
            alike = None if changes == ((), ()) else self.prepared(engine)
            folder = self.folder / "prepared" / str(len(self._prepared))
            self._prepared[engine, changes] = Prepared(ENGINES[engine], folder, self._source, changes, alike)
        return self._prepared[engine, changes]

    def run(self, case: Case) -> Outcome:
        """Let a case happen, go on with the run, and see what came of it. The folder stays where it went wrong.

        What is done to files is seen a moment later, and a file may be gone on from by then: where the fault missed it,
        nothing was tried, and it is tried again.
        """
        for _ in range(TRIES):
            outcome = self._run_once(case)
            if NOTHING not in outcome.problems:
                break
        return outcome

    def _run_once(self, case: Case) -> Outcome:
        began = time.monotonic()
        self._num += 1
        outcome = Outcome()
        if case.disk and os.geteuid() != 0:
            outcome.not_run = "only root can mount a disk"
            return outcome
        prepared = self.prepared(case.engine)
        try:
            begin = self.prepared(case.engine, (case.recipe, case.plan)).run_that(case.begins)
        except RuntimeError as error:
            outcome.problems.append(str(error))
            return outcome
        place = Place.copied(begin, self.folder / "cases" / str(self._num), case.disk)
        try:
            _judge(case, prepared, place, outcome)
        except TimeoutError as error:
            outcome.problems.append(str(error))
        finally:
            if outcome.problems and case.disk:
                shutil.copytree(place.run, place.folder / "kept")
            place.unmount()
        outcome.seconds = time.monotonic() - began
        if outcome.problems:
            (place.folder / "case.txt").write_text(f"{case}\n{outcome}\n")
        else:
            shutil.rmtree(place.folder)
        return outcome


def _judge(case: Case, prepared: Prepared, place: Place, outcome: Outcome) -> None:
    if case.fault is not None or case.disk == "read-only":
        has_ended = _let_happen(case, prepared, place, outcome)
        if has_ended or (outcome.problems and outcome.problems[0] == NOTHING):
            return
    whole = whole_in(place.checkpoints, prepared.files)
    aside: dict[str, dict[str, str]] = {}
    if case.damage is not None:
        for step in sorted(whole, reverse=True)[: 2 if case.damage.both else 1]:
            folder = place.checkpoints / f"checkpoint-{step}"
            if not _damage(folder, case.damage):
                continue
            del whole[step]
            aside[folder.name] = contents_of(folder)
    outcome.expected = max(whole, default=None)
    was_finished = place.phase() == "finished"
    num_resumes = len(place.events("resume"))
    answer = place.go(None, resumes=True)
    outcome.words = outcome.words or _words_of(answer)
    outcome.problems += list(_problems(prepared, place, outcome, answer, num_resumes, was_finished=was_finished))
    outcome.problems += list(_lost(place, whole, aside, outcome))


def _words_of(answer: dict[str, Any] | None) -> str:
    """How a run ended."""
    if answer is None:
        return "killed"
    return "finished" if answer["kind"] is None else f"{answer['kind']}: {answer['problem']}"


def _let_happen(case: Case, prepared: Prepared, place: Place, outcome: Outcome) -> bool:
    """Let the fault happen, see that it is told of as it is to be, and return whether the run came to its end so."""
    mark, began = place.folder / "mark", time.monotonic()
    fault = None if case.fault is None else replace(case.fault, mark=str(mark))
    answer = place.go(fault, resumes=case.begins != "made")
    seconds = time.monotonic() - began
    if fault is not None and not mark.exists():
        outcome.problems.append(NOTHING)
        return False
    # A full disk has room again where an earlier checkpoint is deleted: then all may have been saved after all.
    survives = case.disk == "small" and answer is not None and answer["kind"] is None
    if seconds > case.within_seconds:
        outcome.problems.append(f"it took {seconds:.0f} s to end instead of {case.within_seconds:.0f}")
    if case.ends or survives:
        outcome.words = "finished"
        outcome.problems += _misses(replace(case, ends=case.ends or "same"), prepared, place, answer)
    elif case.says:
        told = {"kind": "nothing", "problem": "", "hint": None, "is_told": False} if answer is None else answer
        outcome.words = f"{told['kind']}: {told.get('problem')}"
        said = f"{told.get('problem')}\n{told.get('hint')}"
        missing = [pattern for pattern in case.says if not re.search(pattern, said)]
        if missing or not told["is_told"] or not told["hint"]:
            what = ", ".join(missing) or "what to do"
            outcome.problems.append(f"not said: {what}, but {outcome.words}")
    if case.leaves_stacks and not list(_stacks(place.run)):
        outcome.problems.append("no stacks were left")
    place.mend_disk()
    return bool(case.ends) or survives


def _misses(case: Case, prepared: Prepared, place: Place, answer: dict[str, Any] | None) -> Iterator[str]:
    """What a run lacks that was to end well."""
    if answer is None or answer["kind"] is not None:
        yield "killed" if answer is None else f"{answer['kind']}: {answer['problem']}"
    elif case.ends == "same":
        yield from differences(prepared.whole, place)
    else:
        wanted, found = (_weights(one.run / "model") for one in (prepared.whole, place))
        if not all(np.isfinite(value).all() for value in found.values()):
            yield "weights are not finite"
        furthest = max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
        if case.ends == "close" and furthest > CLOSE:
            yield f"weights are {furthest:.1g} off"
        if case.ends == "finite" and furthest == 0:
            yield "its weights are those of the run that nothing happened to"


def _weights(folder: Path) -> dict[str, Any]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def _stacks(run: Path) -> Iterator[Path]:
    """Files of a run folder in which stands what processes were at."""
    for file in run.rglob("*"):
        if file.is_file() and not {"checkpoints", "data", "model", "errors"} & set(file.relative_to(run).parts):
            text = file.read_text(errors="replace")
            if "injected.py" in text and "most recent call first" in text:
                yield file


def _problems(
    prepared: Prepared,
    place: Place,
    outcome: Outcome,
    answer: dict[str, Any] | None,
    num_resumes: int,
    *,
    was_finished: bool,
) -> Iterator[str]:
    """What is wrong with how a run went on."""
    if answer is None:
        yield "it was killed"
        return
    resumed = place.events("resume")[num_resumes:]
    outcome.resumed = resumed[0]["step"] if resumed else None
    if answer["kind"] is not None:
        explained = answer["is_told"] and answer["hint"]
        if not explained:
            yield f"{answer['kind']}: {answer['problem']}"
        elif not was_finished:
            if outcome.expected is not None:
                yield f"not gone on with: {answer['problem']}"
            return
    elif outcome.resumed != outcome.expected:
        yield f"it went on from {outcome.resumed} instead of {outcome.expected}"
    if answer["kind"] is None or was_finished:
        yield from differences(prepared.whole, place)


def differences(whole: Place, place: Place) -> Iterator[str]:
    """In what a finished run differs from the one that nothing happened to."""
    if place.phase() != "finished":
        yield f"it is {place.phase()}"
    wanted, found = contents_of(whole.run / "model"), contents_of(place.run / "model")
    if set(wanted) != set(found):
        yield f"files of the model: {sorted(set(wanted) ^ set(found))}"
    weights = [name for name in wanted if name.endswith(".safetensors")]
    if any(wanted[name] != found.get(name) for name in weights):
        yield "its weights are others"
    losses = [{event["step"]: event["loss"] for event in one.events("log")} for one in (whole, place)]
    if losses[0] != losses[1]:
        yield "its losses are others"


def _lost(
    place: Place, whole: dict[int, dict[str, str]], aside: dict[str, dict[str, str]], outcome: Outcome
) -> Iterator[str]:
    """What was lost that was there when the run was gone on with."""
    seen = place.folder / "before_training.json"
    found = json.loads(seen.read_text()) if seen.exists() else contents_of(place.checkpoints)
    for step, files in whole.items():
        if any(found.get(f"checkpoint-{step}/{name}") != checksum for name, checksum in files.items()):
            yield f"checkpoint-{step} was whole and is not"
    kept = [contents_of(folder) for folder in _folders_aside(place.checkpoints, outcome)]
    for name, files in aside.items():
        if files and files not in kept:
            yield f"the damaged {name} is gone"


def _folders_aside(checkpoints: Path, outcome: Outcome) -> Iterator[Path]:
    """Folders that are no checkpoints any more; all of them where the run did not go on."""
    for folder in checkpoints.iterdir():
        if folder.is_dir() and (outcome.resumed is None or not re.fullmatch(r"checkpoint-\d+", folder.name)):
            yield folder


def _damage(folder: Path, damage: Damage) -> bool:
    """Damage a checkpoint; whether it is whole no more."""
    step = folder.name.rpartition("-")[2]
    file = folder / re.sub(r"global_step(?=/)", f"global_step{step}", damage.file)
    content = file.read_bytes() if file.is_file() else b""
    match damage.how:
        case "emptied":
            file.write_bytes(b"")
        case "cut in half":
            file.write_bytes(content[: len(content) // 2])
        case "a byte short":
            file.write_bytes(content[:-1])
        case "a byte changed":
            middle = len(content) // 2
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        case "removed":
            file.unlink()
        case "lists a file outside":
            # What is outside is what is inside, so that its size and checksum are right.
            shutil.copy(folder / "trainer_state.json", folder.parents[1] / "outside.json")
            manifest = json.loads(content)
            manifest["files"]["../../outside.json"] = manifest["files"]["trainer_state.json"]
            file.write_text(json.dumps(manifest))
        case "is no object":
            file.write_text("[]")
        case "lacks its files":
            file.write_text(json.dumps({key: value for key, value in json.loads(content).items() if key != "files"}))
        case "of another step":
            file.write_text(json.dumps({**json.loads(content), "step": 2}))
        case "all files removed":
            shutil.rmtree(folder)
            folder.mkdir()
        case "a foreign file in it":
            file.write_bytes(b"mine")
            return False
        case "a foreign file beside it":
            (folder.parent / damage.file).write_bytes(b"mine")
            return False
        case "a foreign folder beside it":
            (folder.parent / damage.file).mkdir()
            (folder.parent / damage.file / "mine.txt").write_bytes(b"mine")
            return False
        case _:
            raise ValueError(damage.how)
    return True
