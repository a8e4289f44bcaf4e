"""Faults of tools, environments and vLLM servers in GRPO, and what becomes of the runs that they happen to.

    python -m benchmarks.tool_faults [--only WORDS] [--list] [--folder FOLDER] [--save]

Each case is a run of `tunekit train` with a tiny model that has learned to call a tool. In its third step something
happens within the process of an environment or a tool, once (`benchmarks.tool_trouble`), or in the server that
generates. The run has to go on, stop or end, as the case says, with one line of the output that names who, what and the
remedy. Then no process of it may be left, also none that a tool has started and detached; every line of its events can
be read, and its newest checkpoint is whole. What did not go on is resumed by `tunekit resume`, and has to end with the
bits of the run that nothing happened to: weights and losses. The program ends with 1 where anything was otherwise.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faulted import Outcome, differences
from benchmarks.faults import conclude, document, exit_code, line
from benchmarks.prepared import Place
from tests.calling import save_calling_model
from tunekit.errors import RunError
from tunekit.process.watchdog import HUNG_CODE
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tool_faults.md"
TITLE = "Faults of tools, environments and servers, and what became of the runs that they happened to"
ABOUT = """\
Something happens in step 3 of 4 of a run of GRPO; a checkpoint is saved after each step. `from step`: the step of the
checkpoint that the run was resumed from, of the newest whole one; `-` where it went on by itself. A resumed run is to
end with the bits of the run that nothing happened to: weights and losses. No process may be left.
"""
MARK = "TUNEKIT_TOOL_FAULT"
"""Variable by which the processes of a case are known, whatever they are children of."""

STEPS, FAULT_STEP, EPISODES = 4, 3, 8
TIMEOUT_SECONDS = 3
LIMIT_SECONDS = 300
MAX_LOG_BYTES = 2**20
MAX_GROWTH_BYTES = 150 * 2**20
"""Memory that the trainer may have held at most beyond that without a fault."""

CODES = {"goes on": 0, "fails": 2, "is given up": HUNG_CODE, "stops": 128 + signal.SIGTERM, "killed": -signal.SIGKILL}
"""Exit codes by how a run ends."""

GAME_ROWS, PLAIN_ROWS = "prompts.jsonl", "whole_prompts.jsonl"
ROWS = {GAME_ROWS: "Guess my number.", PLAIN_ROWS: "Guess my number. Begin at {start}."}
"""Files of prompts: an environment adds the number itself, and without it the model does not call the tool."""

AHEAD = "an answer that is asked for a step ahead"

REMEDY_OF_TIME = "if it only takes long, raise method.tool_timeout_seconds"
REMEDY_OF_LOG = "see log.txt for what it printed"
SHARED = "the episode takes the mean reward of its group"
TOLD = "the model reads an error, and the tools were started again"


@dataclass(frozen=True)
class ToolCase:
    """Something that goes wrong.

    Attributes:
        group: In what.
        words: What goes wrong.
        does: What happens there, one of those of `benchmarks.tool_trouble`.
        at: In which call.
        ends: How the run ends: it `goes on`, `fails`, `is given up` by its watchdog, `stops` at a boundary, or is
            `killed`.
        says: The line that is shown, as a regular expression; nothing where none is.
        num_lost: Whether lost episodes or calls are counted.
        times: How often it happens.
    """

    group: str
    words: str
    does: str
    at: str
    ends: str = "goes on"
    says: str = ""
    loses: bool = False
    times: int = 1

    @property
    def engine(self) -> str:
        """Method and layout that train."""
        return "single full"


def cases() -> Iterator[ToolCase]:
    """All cases."""

    def lost(call: str, *, hung: bool) -> str:
        what = f"{call} did not return within {TIMEOUT_SECONDS} s" if hung else f"its process exited in {call}"
        return f"step {FAULT_STEP}: method.environment: {what}: {SHARED}; {REMEDY_OF_TIME if hung else REMEDY_OF_LOG}"

    def again(*, hung: bool) -> str:
        return lost("reset", hung=hung).replace(SHARED, "it was called again in a new process")

    for at in ("guess", "get_reward"):
        yield ToolCase("environment", f"killed in {at}", "kill", at, says=lost(at, hung=False), loses=True)
        yield ToolCase("environment", f"{at} hangs", "hang", at, says=lost(at, hung=True), loses=True)
    yield ToolCase("environment", "killed in reset", "kill", "reset", says=again(hung=False))
    yield ToolCase("environment", "reset hangs", "hang", "reset", says=again(hung=True))
    twice = rf"method.environment: reset did not return within {TIMEOUT_SECONDS} s, twice, for the row .*; "
    yield ToolCase("environment", "reset hangs twice", "hang", "reset", "fails", twice + REMEDY_OF_TIME, times=2)
    yield ToolCase("environment", "guess raises", "raise", "guess")
    raised = r"method.environment: {} raised ValueError: it is broken.*; {}"
    yield ToolCase(
        "environment", "reset raises", "raise", "reset", "fails", raised.format("reset", "reset must accept every row")
    )
    yield ToolCase(
        "environment", "get_reward raises", "raise", "get_reward", "fails",
        raised.format("get_reward", "return a finite number"),
    )  # fmt: skip
    yield ToolCase("environment", "guess returns 50 MB", "shout", "guess")
    yield ToolCase("environment", "guess prints 50 MB", "print", "guess")
    yield ToolCase("environment", "guess leaves processes behind", "fork", "guess")
    says = lost("guess", hung=False)
    yield ToolCase("environment", "leaves processes and is killed", "fork and kill", "guess", says=says, loses=True)
    yield ToolCase("environment", "all are killed at once", "kill all", "guess", says=says, loses=True)
    yield ToolCase("environment", "their host is killed", "kill host", "guess", says=says, loses=True)
    for does, reason, remedy in (
        ("kill", "its process exited in guess", REMEDY_OF_LOG),
        ("hang", f"guess did not return within {TIMEOUT_SECONDS} s", REMEDY_OF_TIME),
    ):
        says = f"step {FAULT_STEP}: method.tools: {reason}: {TOLD}; {remedy}"
        yield ToolCase("tool", "kills itself" if does == "kill" else "hangs", does, "tool", says=says, loses=True)
    yield ToolCase("tool", "raises", "raise", "tool")
    yield ToolCase("tool", "returns 50 MB", "shout", "tool")
    yield ToolCase("tool", "leaves processes behind", "fork", "tool")
    yield ToolCase("run", "SIGTERM within an episode", "stop trainer", "guess", "stops", "tunekit resume")
    yield ToolCase("run", "killed within an episode", "kill trainer", "guess", "killed")
    yield ToolCase("run", "killed, processes left behind", "fork and kill trainer", "guess", "killed")
    server = r"method.generation.vllm_server_base_url: no answer from the vLLM server at http://127.0.0.1:\d+: .*; "
    yield ToolCase("server", "killed within an answer", "kill", "server", "fails", server + "see .* `vllm serve`")
    yield ToolCase(
        "server", "killed within a later step's answer", "kill", AHEAD, "fails", server + "see .* `vllm serve`"
    )
    silent = rf"vLLM server at http://127.0.0.1:\d+ has not answered for \d+ s, in generation of step {FAULT_STEP}; see"
    yield ToolCase("server", "hangs within an answer", "hang", "server", "is given up", silent)


class ToolBench:
    """A folder in which runs go wrong.

    Args:
        folder: The folder; it is new.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num = 0
        self._whole: dict[tuple[str, str], tuple[Place, int]] = {}
        save_calling_model(folder / "model")
        for name, words in ROWS.items():
            rows = [
                {"prompt": [{"role": "user", "content": words.format(start=start)}], "start": start} for start in (1, 2)
            ]
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, case: ToolCase) -> Outcome:
        """Let a case happen, resume the run where it ended, and see what came of it."""
        self._num += 1
        began, outcome = time.monotonic(), Outcome()
        trial = _Trial(self.folder, self.folder / f"case-{self._num}", case)
        whole, whole_bytes = self._reference(case)
        try:
            code, output, most_bytes = trial.train()
            outcome.problems += trial.problems(code, output, most_bytes - whole_bytes)
            outcome.words = trial.told(output) or case.ends
            if case.ends != "goes on":
                outcome.expected = _newest_step(trial.place.run)
                if outcome.expected != FAULT_STEP - (case.ends != "stops"):
                    outcome.problems.append(f"its newest whole checkpoint is that of step {outcome.expected}")
                outcome.problems += trial.resume()
                resumed = trial.place.events("resume")
                outcome.resumed = resumed[-1]["step"] if resumed else None
                outcome.problems += differences(whole, trial.place)
        except (TimeoutError, RunError) as error:
            outcome.problems.append(str(error))
        outcome.seconds = time.monotonic() - began
        if not outcome.problems:
            shutil.rmtree(trial.place.folder)
        return outcome

    def _reference(self, case: ToolCase) -> tuple[Place, int]:
        """Return the run of a kind that nothing happened to, and the most memory that it held."""
        kind = case.group if case.group in ("tool", "server") else "environment"
        at = AHEAD if case.at == AHEAD else ""
        if (kind, at) not in self._whole:
            trial = _Trial(self.folder, self.folder / f"whole-{kind}{at}", ToolCase(kind, "nothing", "nothing", at))
            code, output, most_bytes = trial.train()
            if problems := list(trial.problems(code, output, 0)):
                raise RuntimeError(f"{trial.place.folder}: {problems}")
            self._whole[kind, at] = trial.place, most_bytes
        return self._whole[kind, at]


@dataclass
class _Trial:
    """The run of a case in a folder of its own."""

    source: Path
    folder: Path
    case: ToolCase
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.place = Place(self.folder)
        self.folder.mkdir()
        shutil.copy(ROOT / "benchmarks" / "tool_trouble.py", self.folder / "tool_trouble.py")
        # Without an environment, episodes are counted when they are over.
        after = (FAULT_STEP - 1) * EPISODES - (self.case.group == "tool")
        fault = {"does": self.case.does, "at": self.case.at, "after": after, "times": self.case.times}
        method = {"max_staleness": 1} if self.case.at == AHEAD else {}
        (self.folder / "fault.json").write_text(json.dumps({**fault, "answer": FAULT_STEP, "method": method}))
        (self.folder / "recipe.yaml").write_text(json.dumps(self._recipe()))

    def _recipe(self) -> dict[str, Any]:
        rows = PLAIN_ROWS if self.case.group == "tool" else GAME_ROWS
        method: dict[str, Any] = {
            "type": "grpo",
            "rewards": ["tool_trouble:judge"],
            "max_completion_length": 96,
            "num_generations": 4,
        }
        if self.case.group == "tool":
            method |= {"tools": ["tool_trouble:guess"], "tool_timeout_seconds": TIMEOUT_SECONDS}
        elif self.case.group != "server":
            method |= {"environment": "tool_trouble:Game", "tool_timeout_seconds": TIMEOUT_SECONDS}
        return {
            "model": str(self.source / "model"),
            "data": {"train": str(self.source / rows), "max_length": 200},
            "method": method,
            "adapter": "full",
            "train": {"max_steps": STEPS, "global_batch_size": EPISODES, "learning_rate": 1e-4, "save_steps": 1},
            "output": {"dir": str(self.place.run), "sample_prompts": []},
        }

    def train(self) -> tuple[int, str, int]:
        """Train; return the exit code, the output, and the most memory that the process held."""
        if self.case.group == "server":
            return self._go("-m", "benchmarks.served_run", "train", str(self.folder))
        return self._go("-m", "tunekit", "train", "recipe.yaml")

    def resume(self) -> Iterator[str]:
        """Resume it; yield what is wrong with how it ends."""
        if self.case.group == "server":
            code, output, _ = self._go("-m", "benchmarks.served_run", "resume", str(self.folder))
        else:
            code, output, _ = self._go("-m", "tunekit", "resume", str(self.place.run))
        if code:
            yield f"cannot be resumed: {output[-300:]}"
        yield from self._left()

    def _go(self, *words: str) -> tuple[int, str, int]:
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, MARK: self.folder.name, "COLUMNS": "400"}
        with (self.folder / "output.txt").open("a+") as output:
            start = output.tell()
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            until = time.monotonic() + LIMIT_SECONDS
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                if time.monotonic() > until:
                    self._end_all()
                    os.wait4(process.pid, 0)
                    raise TimeoutError(f"not ended after {LIMIT_SECONDS} s")
                time.sleep(0.05)
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(start)
            return process.returncode, output.read(), 1024 * usage.ru_maxrss

    def told(self, output: str) -> str:
        """Return the line of the output that says what happened."""
        lines = [line for line in output.splitlines() if self.case.says and re.search(self.case.says, line)]
        return lines[0].strip() if lines else ""

    def problems(self, code: int, output: str, grown_bytes: int) -> Iterator[str]:
        """Yield what is wrong with how it ended."""
        case, run = self.case, Run(self.place.run)
        if case.does != "nothing" and not (self.folder / "happened.txt").exists():
            yield "the fault did not happen"
        if code != CODES[case.ends]:
            yield f"exit code {code} instead of {CODES[case.ends]}: {output[-300:]}"
        lines = [line for line in output.splitlines() if case.says and re.search(case.says, line)]
        if bool(case.says) != (len(lines) == 1):
            yield f"{len(lines)} lines say what happened: {output[-300:]}"
        if "Traceback" in output:
            yield "there is a traceback"
        yield from self._left()
        yield from self._unreadable(run)
        if case.ends == "goes on":
            lost = [event["tools/lost"] for event in self.place.events("log") if "tools/lost" in event]
            if self.place.phase() != "finished" or (any(lost) != case.loses and case.group != "server"):
                yield f"it is {self.place.phase()}, with {lost} lost"
        if grown_bytes > MAX_GROWTH_BYTES:
            yield f"it held {grown_bytes >> 20} MiB more than without the fault"

    def _unreadable(self, run: Run) -> Iterator[str]:
        """Yield files of the run folder that cannot be read, or are too large."""
        for event in (run.path / "events.jsonl").read_text().splitlines():
            json.loads(event)
        newest = newest_complete(run.path)
        if newest.skipped:
            yield f"checkpoints are not whole: {newest.skipped}"
        for name in ("events.jsonl", "log.txt"):
            size = (run.path / name).stat().st_size
            if size > MAX_LOG_BYTES:
                yield f"{name} has {size:,} bytes"

    def _left(self) -> Iterator[str]:
        """Yield the processes that are left, and end them."""
        until = time.monotonic() + 5
        while self._processes() and time.monotonic() < until:
            time.sleep(0.05)
        for process in self._processes():
            yield f"process {process.pid} is left: {' '.join(process.cmdline())[:100]}"
        self._end_all()

    def _end_all(self) -> None:
        for process in self._processes():
            process.kill()

    def _processes(self) -> list[psutil.Process]:
        """Return the processes that have the variable of this case."""
        processes = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.folder.name and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return processes


def _newest_step(run: Path) -> int | None:
    newest = newest_complete(run).path
    return None if newest is None else int(newest.name.rpartition("-")[2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Let all happen, print the table, and with `--save` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases in whose group and words this occurs")
    parser.add_argument("--list", action="store_true", help="list the cases, and let nothing happen")
    parser.add_argument("--folder", type=Path, help="a new folder for the runs; those that fail stay there")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases() if args.only in f"{case.group}: {case.words}"]
    if args.list:
        print(*(f"{case.group}: {case.words}" for case in chosen), sep="\n")
        return
    folder = args.folder or Path(tempfile.mkdtemp(prefix="tunekit-tool-faults-"))
    folder.mkdir(exist_ok=True)
    bench = ToolBench(folder.resolve())
    outcomes = []
    for case in chosen:
        outcomes.append((case, bench.run(case)))
        print(line(*outcomes[-1]), flush=True)
    conclude(outcomes, folder, is_temporary=args.folder is None)
    if args.save:
        text = document(outcomes, title=TITLE, about=ABOUT, command="benchmarks.tool_faults")
        RESULTS.write_text(text, encoding="utf-8")
    sys.exit(exit_code(outcomes))


if __name__ == "__main__":
    main()
