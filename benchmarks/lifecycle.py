"""A run's life at random: begun, killed, stopped, edited, damaged, moved and resumed in any order, held to a model.

    python -m benchmarks.lifecycle [--minutes N] [--steps N] [--seed N] [--only ENGINE ...] [--save]

A tiny model is trained. After random waits a process of the run is killed, or its supervisor, or it is stopped, or
somebody resumes it a second time or deletes it; while it is not running it is resumed, by two at the same moment too,
trained longer, moved to another folder, deleted, given files of another time, or loses a byte, the end of a file or a
whole file of its newest checkpoint; and while it is resumed its disk may fill up. After each of these steps it has to
hold that

- no process of the run is left once its supervisor is gone,
- its state is that of a run whose processes are there, or are not,
- the newest whole checkpoint is no earlier than before, but for those that were damaged,
- what is refused has a remedy, and a run without a checkpoint can be started over,
- a run that ends has the weights of one that nothing happened to, to the bit, after as many steps.

A seed gives the same choices again, not the same moments. The runs lie on a small disk, which only root can mount.
Lives are kept as they end (`build/lifecycle.jsonl`), so that many hours of them can be lived in parts and at once;
`--save` adds them to those of the result file, and sums them up by engine.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from benchmarks.circumstances import circumstances, commit
from benchmarks.injected import BALLAST, Fault, fill, go
from benchmarks.prepared import ENGINES, Place, Prepared, mounted, save_source, started
from tunekit.errors import TunekitError
from tunekit.launching.stop import delete_run, stop_run
from tunekit.runs.checkpoints.complete import fault_of, newest_complete, whole_in
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lifecycle.json"
STATE = ROOT / "build" / "lifecycle.jsonl"
PACKAGES = ("tunekit", "torch", "transformers", "accelerate")
LENGTHS = (8, 12, 16, 20)
"""Steps that a run is trained to, one after the other."""

WAITS = (0.0, 6.0)
"""Seconds for which nothing happens to a run that is running."""

END_SECONDS = 300
"""Seconds in which a run that nothing happens to has to end."""

LAST_LINES = 90
"""Lines of output that are shown of a run that ended without words."""

FILLED_AT = ("before", "starting", "loading", "data", "backward", "optimizer", "evaluation", "result")
"""Moments at which the disk may fill up."""


@dataclass
class Found:
    """Steps that were taken, and what did not hold."""

    steps: Counter[str] = field(default_factory=Counter)
    ended: int = 0
    broken: list[str] = field(default_factory=list)


class Life:
    """A run, what happens to it, and what is known of it.

    Args:
        engine: Its engine.
        prepared: A run that is yet to be started.
        reference: The weights after each step of a checkpoint, of a run that nothing happens to.
        folder: For the run and those that it is moved to.
        draws: What decides.
        found: What was found so far.
    """

    def __init__(
        self,
        engine: str,
        prepared: Path,
        reference: dict[int, dict[str, torch.Tensor]],
        folder: Path,
        draws: random.Random,
        found: Found,
    ) -> None:
        self.engine, self.reference, self.draws, self.found = engine, reference, draws, found
        self.folder, self.number, self.prepared = folder, 0, prepared
        # Not on the disk that fills up.
        self.notes = folder.with_name("notes")
        self.notes.mkdir()
        self.place = Place.copied(prepared, folder / "0", notes=self.notes)
        self.process: Any = None
        self.length = LENGTHS[0]
        self.told = 0
        """Step of the newest whole checkpoint that was seen, and that nothing was done to."""
        self.done: list[str] = []

    @property
    def run(self) -> Run:
        """The run."""
        return Run(self.place.run)

    @property
    def is_running(self) -> bool:
        """True if its supervisor is there."""
        return self.process is not None and self.process.is_alive()

    def step(self) -> None:
        """Let something happen, and look whether all holds."""
        running: list[Callable[[], None]] = [self.wait, self.kill, self.kill_supervisor, self.stop, self.resume_twice]
        running.append(self.delete_running)
        idle: list[Callable[[], None]] = [self.resume] * 5 + [self.move, self.touch, self.fill_disk]
        idle += [self.damage, self.resume_at_once] if self.told else []
        # Not often: it is the end of what the run has been through.
        idle += [self.delete] if self.draws.random() < 0.2 else []
        act = self.draws.choice(running if self.is_running else idle)
        self.found.steps[act.__name__] += 1
        self.done.append(act.__name__)
        act()
        self.look()

    def fail(self, words: str) -> None:
        """Note what does not hold."""
        self.found.broken.append(f"{self.engine}, after {' '.join(self.done[-8:])}: {words}")

    def look(self) -> None:
        """Note what does not hold of a run as it is now."""
        state = self.run.state
        if not self.is_running:
            self._wait_until_gone()
            state = self.run.state
            if state not in FINAL_PHASES and state != "died":
                self.fail(f"no process is there, and its state is {state}")
        elif state in FINAL_PHASES and not self._ends_soon():
            self.fail(f"processes are there, and its state is {state}")
        newest = newest_complete(self.place.run).step
        if newest < self.told:
            self.fail(f"the newest checkpoint is of step {newest}, and was of step {self.told}")
        self.told = self._intact()

    def _ends_soon(self) -> bool:
        self.process.join(END_SECONDS / 10)
        return not self.is_running

    def _wait_until_gone(self) -> None:
        try:
            self.place.wait_until_gone()
        except TimeoutError as error:
            self.fail(str(error))
            for process in self.place.processes():
                process.kill()

    # While it is running.

    def wait(self) -> None:
        """Let it run."""
        self.process.join(self.draws.uniform(*WAITS))

    def kill(self) -> None:
        """Kill one of its processes at some moment; its supervisor ends."""
        self.wait()
        workers = self.place.processes()
        if workers:
            self._signal(self.draws.choice(workers).pid)
            self.process.join(END_SECONDS)

    def kill_supervisor(self) -> None:
        """Kill its supervisor at some moment; its processes end."""
        self.wait()
        self._signal(self.process.pid)
        self.process.join(END_SECONDS)

    def _signal(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def stop(self) -> None:
        """Stop it as `tunekit stop` does."""
        self.wait()
        try:
            stop_run(self.run, now=self.draws.random() < 0.3, tell=lambda _: None)
        except TunekitError as error:
            if self.is_running and not self._ends_soon():
                self.fail(f"it cannot be stopped: {error}")
        self.process.join(END_SECONDS)

    def resume_twice(self) -> None:
        """Resume it once more, which is refused."""
        answer = self._answer_of_another(self.place.run)
        if answer is None or answer["kind"] is None:
            # It may have ended just before.
            if self.is_running:
                self.fail("it was resumed twice at a time")
        elif not answer["hint"]:
            self.fail(f"no remedy: {answer}")

    def _answer_of_another(self, run: Path) -> dict[str, Any] | None:
        beside = self.notes / "other"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        (beside / "run").symlink_to(run)
        process = started(_resume_only, str(run), str(beside / "answer.json"))
        process.join(END_SECONDS)
        answer = beside / "answer.json"
        return json.loads(answer.read_text()) if answer.exists() else None

    def delete_running(self) -> None:
        """Delete it, which is refused."""
        try:
            delete_run(self.run)
        except TunekitError as error:
            if not error.hint:
                self.fail(f"no remedy: {error}")
            return
        if self.is_running and not self._ends_soon():
            self.fail("it was deleted while it was running")
        self._begin_anew()

    # While it is not.

    def resume(self) -> None:
        """Begin it, or go on with it; where it has ended, train it longer."""
        if self._is_to_be_trained():
            self._start(None)
            self.process.join(self.draws.uniform(*WAITS))
            self._hear()

    def fill_disk(self) -> None:
        """Begin it or go on with it, and fill its disk at some moment; there is room again once it has ended."""
        if not self._is_to_be_trained():
            return
        mark = self.notes / "filled"
        mark.unlink(missing_ok=True)
        at = self.draws.choice(FILLED_AT)
        if at == "before":
            fill(self.place.run / BALLAST)
        self._start(None if at == "before" else Fault("fill the disk", at, mark=str(mark)))
        self.process.join(END_SECONDS)
        if self.is_running:
            self.fail("it does not end on a full disk")
            self._signal(self.process.pid)
            self.process.join(END_SECONDS)
        (self.place.run / BALLAST).unlink(missing_ok=True)
        self._hear()

    def resume_at_once(self) -> None:
        """Have two resume it at the same moment: one does, and the other is refused."""
        if not self._is_to_be_trained() or newest_complete(self.place.run).path is None:
            return
        self._start(None)
        other = self._answer_of_another(self.place.run)
        self.process.join(END_SECONDS)
        answers = [other, self._hear()]
        if sum(answer is not None and answer["kind"] is None for answer in answers) != 1:
            self.fail(f"two resumed it: {answers}")
        if any(answer is not None and answer["kind"] is not None and not answer["hint"] for answer in answers):
            self.fail(f"no remedy: {answers}")

    def delete(self) -> None:
        """Delete it, and begin another."""
        delete_run(self.run)
        if self.place.run.exists():
            self.fail("it was deleted, and is there")
        self._begin_anew()

    def _is_to_be_trained(self) -> bool:
        """Make a run that has ended longer; begin another where it is as long as it gets."""
        if self.run.state != "finished":
            return True
        self._compare()
        longer = [length for length in LENGTHS if length > self.length]
        if not longer:
            self._begin_anew()
            return False
        self.length = longer[0]
        text = (self.place.run / "recipe.yaml").read_text()
        (self.place.run / "recipe.yaml").write_text(re.sub(r"max_steps: \d+", f"max_steps: {self.length}", text))
        return True

    def _start(self, fault: Fault | None) -> None:
        for name in ("answer.json", "pids.txt"):
            (self.notes / name).unlink(missing_ok=True)
        has_begun = newest_complete(self.place.run).path is not None
        self.process = started(go, str(self.place.run), fault, resumes=has_begun, notes=str(self.notes))

    def _hear(self) -> dict[str, Any] | None:
        """Return how it ended; None where it has not, or was killed. An error has words and a remedy."""
        answer = self.notes / "answer.json"
        if not answer.exists():
            return None
        outcome: dict[str, Any] = json.loads(answer.read_text())
        if outcome["kind"] is not None and not outcome["is_told"]:
            lines = (self.notes / "output.txt").read_text(errors="replace").splitlines()
            self.fail("\n".join([f"it ended without words: {outcome}", *lines[-LAST_LINES:]]))
        if outcome["kind"] is not None and not outcome["hint"]:
            self.fail(f"no remedy: {outcome}")
        return outcome

    def _compare(self) -> None:
        """Compare the weights of a run that has ended, which may have been before it was to be trained longer."""
        self.found.ended += 1
        (file,) = (self.place.run / "model").glob("*model.safetensors")
        step = self.run.status()["step"]
        weights, expected = load_file(file), self.reference.get(step, {})
        if weights.keys() != expected.keys() or not all(torch.equal(weights[name], expected[name]) for name in weights):
            self.fail(f"other weights after {step} steps")

    def _begin_anew(self) -> None:
        self.told, self.length = 0, LENGTHS[0]
        self.number += 1
        shutil.rmtree(self.place.folder)
        self.place = Place.copied(self.prepared, self.folder / str(self.number), notes=self.notes)

    def move(self) -> None:
        """Move it to another folder."""
        self.number += 1
        place = Place(self.folder / str(self.number), self.notes)
        self.place.folder.rename(place.folder)
        self.place = place

    def touch(self) -> None:
        """Give its files times of the past and of the future."""
        for file in self.place.run.rglob("*"):
            at = time.time() + self.draws.uniform(-1e7, 1e7)
            os.utime(file, (at, at), follow_symlinks=False)

    def damage(self) -> None:
        """Let the newest checkpoint lose a byte, the end of a file, or a file."""
        folder = newest_complete(self.place.run).path
        assert folder is not None
        file = self.draws.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
        size = file.stat().st_size
        kind = self.draws.choice(["byte", "end", "file"])
        if kind == "file" or not size:
            file.unlink()
        elif kind == "end":
            os.truncate(file, self.draws.randrange(size))
        else:
            with file.open("r+b") as stream:
                stream.seek(self.draws.randrange(size))
                byte = stream.read(1)
                stream.seek(-1, os.SEEK_CUR)
                stream.write(bytes([byte[0] ^ 0xFF]))
        # What is left is what those before it are.
        self.told = min(self.told, self._intact())

    def _intact(self) -> int:
        """Return the step of the newest checkpoint that nothing was done to, by its contents."""
        return next((step for step, folder in whole_in(self.place.run) if fault_of(folder, contents=True) is None), 0)


def _resume_only(folder: str, answer: str) -> None:
    """Resume a run in this process, and write how that ended."""
    from tunekit.api import verbs

    os.chdir(Path(answer).parent)
    outcome: dict[str, Any] = {"kind": None}
    try:
        verbs.resume(folder)
    except TunekitError as error:
        outcome = {"kind": type(error).__name__, "problem": error.problem, "hint": error.hint}
    except BaseException as error:  # noqa: BLE001 - it is the outcome
        outcome = {"kind": type(error).__name__, "problem": str(error), "hint": None}
    Path(answer).write_text(json.dumps(outcome), encoding="utf-8")


def reference_of(prepared: Prepared, folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Return the weights after each of LENGTHS, of a run that nothing happens to."""
    place, found = Place.copied(prepared.made, folder), {}
    for length in LENGTHS:
        recipe = place.run / "recipe.yaml"
        recipe.write_text(re.sub(r"max_steps: \d+", f"max_steps: {length}", recipe.read_text()))
        answer = place.go(None, resumes=length > LENGTHS[0])
        if answer is None or answer["kind"] is not None:
            raise RuntimeError(f"the run that nothing happens to: {answer}")
        (file,) = (place.run / "model").glob("*model.safetensors")
        found[length] = load_file(file)
    return found


def live(engine: str, num_steps: int, seed: int, console: Console) -> Found:
    """Let steps happen to runs of an engine."""
    found = Found()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        save_source(folder / "source")
        prepared = Prepared(ENGINES[engine], folder / "prepared", folder / "source")
        reference = reference_of(prepared, folder / "reference")
        with mounted(folder / "disk"):
            life = Life(engine, prepared.made, reference, folder / "disk", random.Random(seed), found)
            for _ in range(num_steps):
                life.step()
            if life.is_running:
                life.kill_supervisor()
                life.look()
    console.print(f"{engine}: {sum(found.steps.values()):,} steps, {found.ended} ends, {len(found.broken)} broken")
    return found


def summed() -> dict[str, Any]:
    """Return all lives, those of earlier results too, and their sums by engine."""
    lives = json.loads(RESULTS.read_text(encoding="utf-8"))["lives"] if RESULTS.exists() else []
    lives += [json.loads(line) for line in STATE.read_text(encoding="utf-8").splitlines()]
    by_key = {(list(ENGINES).index(life["engine"]), life["seed"], life["commit"]): life for life in lives}
    lives = [by_key[key] for key in sorted(by_key)]
    engines: dict[str, dict[str, Any]] = {}
    for life in lives:
        engine = engines.setdefault(life["engine"], {"lives": 0, "steps": Counter(), "ended": 0, "broken": 0})
        engine["lives"] += 1
        engine["steps"].update(life["steps"])
        engine["ended"] += life["ended"]
        engine["broken"] += len(life["broken"])
    num_steps = sum(sum(engine["steps"].values()) for engine in engines.values())
    return {"num_steps": num_steps, "engines": engines, "lives": lives}


def main() -> int:
    """Let it live, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="lives are begun for so long; default: one an engine"
    )
    parser.add_argument("--steps", type=int, default=100, help="of each life")
    parser.add_argument("--seed", type=int, default=0, help="of the first life; the next ones have the next seeds")
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    console, until, is_whole = Console(width=150), time.monotonic() + 60 * options.minutes, True
    for number in itertools.count():
        engine = options.only[number % len(options.only)]
        if number >= len(options.only) and time.monotonic() >= until:
            break
        found = live(engine, options.steps, options.seed + number, console)
        STATE.parent.mkdir(exist_ok=True)
        with STATE.open("a", encoding="utf-8") as file:
            life = {"commit": commit(), "engine": engine, "seed": options.seed + number, **vars(found)}
            file.write(json.dumps(life) + "\n")
        for line in found.broken[:10]:
            console.print(line)
        is_whole &= not found.broken
    if options.save:
        RESULTS.write_text(json.dumps({**circumstances(PACKAGES), **summed()}, indent=2), encoding="utf-8")
    return int(not is_whole)


if __name__ == "__main__":
    sys.exit(main())
