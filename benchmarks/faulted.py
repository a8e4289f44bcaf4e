"""Runs to which something happens, and whether they go on as if it had not: what the cases of `benchmarks.faults` are.

Of each engine there are three runs from which all cases are copied: one that nothing happens to, which is what the
others are compared with and from which it is learned what files a save writes; one that was cut off after its second
checkpoint; and one that was cut off after its third.
"""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from safetensors.numpy import load_file

from benchmarks.injected import BALLAST, Fault, Happening, contents_of, go
from tests.processes import PRELOADED
from tests.tiny import save_chats, save_tiny_model

STEPS, SAVE_STEPS, EVAL_STEPS = 8, 2, 6
"""A run. At the end of its third save its first checkpoint is deleted, for two are kept."""

BROKEN_SAVE, BROKEN_STEP = 6, 5
"""Steps with which a save goes wrong, and in which something else does."""

CASE_SECONDS = 300
"""How long a run of a case may take: many times what it takes."""

DISK_BYTES = 64 << 20
"""Size of a small disk."""

CLOSE = 1e-5
"""How far weights may be off where sums were made in another order."""

NOTHING = "the fault did not happen"

GONE_SECONDS = 20
"""How long processes have to be gone once the one that they follow is."""


@dataclass(frozen=True)
class Engine:
    """What trains, and how it is spread."""

    name: str
    adapter: str
    strategy: str
    num_processes: int


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("single full", "full", "single", 1),
        Engine("single lora", "lora", "single", 1),
        Engine("ddp x2 full", "full", "ddp", 2),
        Engine("ddp x2 lora", "lora", "ddp", 2),
        Engine("fsdp2 x2 full", "full", "fsdp2", 2),
        Engine("fsdp2 x2 lora", "lora", "fsdp2", 2),
        Engine("zero2 x2 full", "full", "zero2", 2),
        Engine("zero2 x2 lora", "lora", "zero2", 2),
        Engine("zero3 x2 full", "full", "zero3", 2),
        Engine("zero3 x2 lora", "lora", "zero3", 2),
    )
}


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


class Place:
    """A folder with a run in it, and what is known of its processes.

    Args:
        folder: The folder; the run is `run` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        self._mounted: list[Path] = []

    @classmethod
    def copied(cls, run: Path, folder: Path, disk: str = "") -> "Place":
        """A copy of a run, in a new folder.

        Args:
            run: The run.
            folder: The folder.
            disk: What the copy is on; see `Case`.
        """
        place = cls(folder)
        place.run.mkdir(parents=True)
        if disk:
            place._mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", folder=place.run)
        shutil.copytree(run, place.run, dirs_exist_ok=True)
        if disk == "turns read-only":
            place._mount("--bind", str(place.checkpoints), folder=place.checkpoints)
        elif disk == "read-only":
            _mount("-o", "remount,ro", str(place.run))
        return place

    def _mount(self, *options: str, folder: Path) -> None:
        _mount(*options, str(folder))
        self._mounted.append(folder)

    def mend_disk(self) -> None:
        """Let there be room again, and let it be written."""
        for folder in self._mounted:
            _mount("-o", "remount,rw" + ",bind" * (folder == self.checkpoints), str(folder))
        (self.run / BALLAST).unlink(missing_ok=True)

    def unmount(self) -> None:
        """Give back the disks."""
        for folder in reversed(self._mounted):
            subprocess.run(["umount", "-l", str(folder)], check=True)
        self._mounted.clear()

    def go(self, fault: Fault | None, *, resumes: bool, seconds: float = CASE_SECONDS) -> dict[str, Any] | None:
        """Begin the run or go on with it until all its processes are gone; how it ended, None where it was killed.

        Raises:
            TimeoutError: It did not end, or left processes behind.
        """
        for name in ("answer.json", "before_training.json", "pids.txt"):
            (self.folder / name).unlink(missing_ok=True)
        process = started(go, str(self.run), fault, resumes=resumes)
        process.join(seconds)
        try:
            if process.is_alive():
                raise TimeoutError(f"not ended after {seconds:.0f} s")
            self._wait_until_gone()
        finally:
            process.kill()
            for worker in self.processes():
                worker.kill()
        answer = self.folder / "answer.json"
        return json.loads(answer.read_text()) if answer.exists() else None

    def processes(self) -> list[psutil.Process]:
        """Those that worked on the run and are still there."""
        pids = self.folder / "pids.txt"
        found = []
        for pid in map(int, pids.read_text().split()) if pids.exists() else ():
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def _wait_until_gone(self) -> None:
        until = time.monotonic() + GONE_SECONDS
        while left := self.processes():
            if time.monotonic() > until:
                raise TimeoutError(f"{len(left)} processes were still there {GONE_SECONDS} s after their supervisor")
            time.sleep(0.05)

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints."""
        return self.run / "checkpoints"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What it told, of one kind."""
        file = self.run / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines if line.startswith(f'{{"event": "{kind}"')]
        return [event for event in events if event["event"] == kind]

    def phase(self) -> str:
        """What its status says."""
        phase: str = json.loads((self.run / "status.json").read_text())["phase"]
        return phase


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def started(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A process forked from one that has imported the libraries."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [*PRELOADED, "deepspeed", "tunekit.run.worker", "tunekit.run.callback", "tunekit.api"]
    )
    process = context.Process(target=function, args=args, kwargs=kwargs)
    process.start()
    return process


Changes = tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]
"""Changes to a recipe and to a plan."""


class Prepared:
    """The runs of an engine from which its cases are copied.

    Args:
        engine: The engine.
        folder: Where they are to be.
        source: A folder with `model` and `rows.jsonl`.
        changes: To the recipe and to the plan.
    """

    def __init__(self, engine: Engine, folder: Path, source: Path, changes: "Changes" = ((), ())) -> None:
        self.engine = engine
        self.folder = folder
        self.source = source
        self.changes = changes

    @cached_property
    def made(self) -> Path:
        """A run that is yet to be started."""
        place = Place(self.folder / "made")
        process = started(_make, recipe_for(self.engine, self.source, place.run), *self.changes)
        process.join()
        if process.exitcode:
            raise RuntimeError(f"no run of {self.engine.name} can be made")
        return place.run

    @cached_property
    def whole(self) -> Place:
        """A run that nothing happened to."""
        place = Place.copied(self.made, self.folder / "whole")
        record = Fault("record", "file", step=BROKEN_SAVE, mark=str(place.folder / "happened.json"))
        answer = place.go(record, resumes=False)
        if answer is None or answer["kind"] is not None:
            raise RuntimeError(f"{self.engine.name} alone: {answer}; see {place.folder / 'output.txt'}")
        return place

    @cached_property
    def happenings(self) -> list[Happening]:
        """What is done to files with the third save, and when the result is saved."""
        told = json.loads((self.whole.folder / "happened.json").read_text())
        return [Happening(**words) for words in told]

    @cached_property
    def files(self) -> set[str]:
        """The files of a whole checkpoint."""
        return set(map(_of_any_step, contents_of(self.whole.checkpoints / f"checkpoint-{STEPS}")))

    @cached_property
    def stopped(self) -> Path:
        """A run that was killed after its second checkpoint."""
        return self._stopped("stopped", BROKEN_STEP)

    @cached_property
    def late(self) -> Path:
        """A run that was killed after its third checkpoint."""
        return self._stopped("late", BROKEN_SAVE + 1)

    def _stopped(self, name: str, step: int) -> Path:
        place = Place.copied(self.made, self.folder / name)
        saved = f"checkpoints/checkpoint-{step - 1}"
        place.go(Fault("kill", "data", step=step, path=saved, mark=str(place.folder / "mark")), resumes=False)
        wanted = {step - 1 - SAVE_STEPS, step - 1}
        found = set(whole_in(place.checkpoints, self.files))
        if found != wanted:
            raise RuntimeError(f"{self.engine.name}: {found} instead of {wanted}; see {place.folder / 'output.txt'}")
        return place.run

    def run_for(self, case: Case) -> Path:
        """What a case begins with."""
        return {"made": lambda: self.made, "stopped": lambda: self.stopped, "late": lambda: self.late}[case.begins]()


def recipe_for(engine: Engine, source: Path, output: Path) -> dict[str, Any]:
    """What is trained."""
    rows = str(source / "rows.jsonl")
    return {
        "model": str(source / "model"),
        "data": {"train": rows, "eval": str(source / "eval.jsonl"), "max_length": 64},
        "adapter": engine.adapter,
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "save_steps": SAVE_STEPS,
            "eval_steps": EVAL_STEPS,
        },
        "parallel": {"strategy": engine.strategy, "num_processes": engine.num_processes},
        "output": {"sample_prompts": [], "dir": str(output)},
    }


def _make(recipe: dict[str, Any], overrides: tuple[str, ...], planned: tuple[tuple[str, Any], ...]) -> None:
    from tunekit import api

    run = api.make_run(recipe, overrides)
    file = run.path / "plan.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | dict(planned)))


class Bench:
    """A folder in which runs go wrong.

    Args:
        folder: The folder; it is new.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num = 0
        self._source = folder / "source"
        process = started(_save_source, self._source)
        process.join()
        self._prepared: dict[tuple[str, Changes], Prepared] = {}

    def prepared(self, engine: str, changes: Changes = ((), ())) -> Prepared:
        """The runs of an engine."""
        if (engine, changes) not in self._prepared:
            folder = self.folder / "prepared" / str(len(self._prepared))
            self._prepared[engine, changes] = Prepared(ENGINES[engine], folder, self._source, changes)
        return self._prepared[engine, changes]

    def run(self, case: Case) -> Outcome:
        """Let a case happen, go on with the run, and see what came of it. The folder stays where it went wrong."""
        began = time.monotonic()
        self._num += 1
        outcome = Outcome()
        if case.disk and os.geteuid() != 0:
            outcome.not_run = "only root can mount a disk"
            return outcome
        prepared = self.prepared(case.engine)
        begin = self.prepared(case.engine, (case.recipe, case.plan)).run_for(case)
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


def _save_source(folder: Path) -> None:
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    save_chats(folder / "eval.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))


def _judge(case: Case, prepared: Prepared, place: Place, outcome: Outcome) -> None:
    if case.fault is not None or case.disk == "read-only":
        _let_happen(case, prepared, place, outcome)
        if case.ends or (outcome.problems and outcome.problems[0] == NOTHING):
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
    outcome.words = outcome.words or ("killed" if answer is None else answer["kind"] or "finished")
    outcome.problems += list(_problems(prepared, place, outcome, answer, num_resumes, was_finished=was_finished))
    outcome.problems += list(_lost(place, whole, aside, outcome))


def _let_happen(case: Case, prepared: Prepared, place: Place, outcome: Outcome) -> None:
    """Let the fault happen, and see that it is told of as it is to be."""
    mark, began = place.folder / "mark", time.monotonic()
    fault = None if case.fault is None else replace(case.fault, mark=str(mark))
    answer = place.go(fault, resumes=case.begins != "made")
    seconds = time.monotonic() - began
    if fault is not None and not mark.exists():
        outcome.problems.append(NOTHING)
        return
    if seconds > case.within_seconds:
        outcome.problems.append(f"it took {seconds:.0f} s to end instead of {case.within_seconds:.0f}")
    if case.ends:
        outcome.words = "finished"
        outcome.problems += _misses(case, prepared, place, answer)
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
        outcome.words = outcome.words or f"{answer['kind']}: {answer['problem']}"
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


def whole_in(checkpoints: Path, files: set[str]) -> dict[int, dict[str, str]]:
    """The checkpoints that have all files, by step, with the checksums of these."""
    found = {}
    for folder in checkpoints.glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and folder.is_dir():
            contents = contents_of(folder)
            if set(map(_of_any_step, contents)) >= files:
                found[int(match[1])] = contents
    return found


def _of_any_step(file: str) -> str:
    return re.sub(r"global_step\d+", "global_step", file)


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
