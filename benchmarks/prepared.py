"""The runs from which those are copied that something is to happen to, and how they are begun and gone on with.

Of each engine there are three: one that nothing happens to, which is what the others are compared with and from which
it is learned what files a save writes; one that was cut off after its second checkpoint; and one that was cut off after
its third.
"""

import contextlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.injected import BALLAST, Fault, contents_of, go
from benchmarks.noticed import Happening
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


class Place:
    """A folder with a run in it, and what is known of its processes.

    Args:
        folder: The folder; the run is `run` in it.
        notes: Folder for what its processes note of themselves. Default: the same.
    """

    def __init__(self, folder: Path, notes: Path | None = None) -> None:
        self.folder = folder
        self.notes = notes or folder
        self.run = folder / "run"
        self._mounted: list[Path] = []

    @classmethod
    def copied(cls, run: Path, folder: Path, disk: str = "", notes: Path | None = None) -> "Place":
        """A copy of a run, in a new folder.

        Args:
            run: The run.
            folder: The folder.
            disk: What the copy is on; see `benchmarks.faulted.Case`.
            notes: Folder for what its processes note of themselves.
        """
        place = cls(folder, notes)
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
            self.wait_until_gone()
        finally:
            process.kill()
            for worker in self.processes():
                worker.kill()
        answer = self.folder / "answer.json"
        return json.loads(answer.read_text()) if answer.exists() else None

    def processes(self) -> list[psutil.Process]:
        """Those that worked on the run and are still there."""
        pids = self.notes / "pids.txt"
        found = []
        for pid in map(int, pids.read_text().split()) if pids.exists() else ():
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_until_gone(self) -> None:
        """Wait until no process works on the run.

        Raises:
            TimeoutError: One still does.
        """
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


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """Have a new folder on a small disk of its own, which is gone afterwards."""
    folder.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def started(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A process forked from one that has imported the libraries."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tunekit.api.verbs"])
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
        alike: Those without changes, whose checkpoints have the same files.
    """

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        source: Path,
        changes: "Changes" = ((), ()),
        alike: "Prepared | None" = None,
    ) -> None:
        self.alike = alike
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
        happened = [Happening(**words) for words in told]
        # The second save may go on while the third one is begun; then it has ended when a run goes on from it.
        steps = [re.search(r"(?:saving|checkpoint)-(\d+)", happening.path) for happening in happened]
        return [one for one, step in zip(happened, steps, strict=True) if step is None or int(step[1]) == BROKEN_SAVE]

    @cached_property
    def files(self) -> set[str]:
        """The files of a whole checkpoint."""
        if self.alike is not None:
            return self.alike.files
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

    def run_that(self, begins: str) -> Path:
        """A run that is `made`, or that was `stopped`, or `late`."""
        return {"made": lambda: self.made, "stopped": lambda: self.stopped, "late": lambda: self.late}[begins]()


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
    from tunekit.api import verbs

    run = verbs.make_run(recipe, overrides)
    file = run.path / "plan.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | dict(planned)))


def save_source(folder: Path) -> None:
    """Save a model, and rows to train and to evaluate it on."""
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    save_chats(folder / "eval.jsonl", ((f"double {n}", f"{2 * n}") for n in range(4)))


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
