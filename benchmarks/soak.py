"""Does a run that is killed again and again end with the weights of one that is not? Bit for bit, in some minutes.

    python -m benchmarks.soak [--steps N] [--seed N] [--only NAME ...] [--save]

A tiny model is trained by `tunekit train` in one process and in two, once in peace, and once with SIGKILL after a
random number of steps and milliseconds, over and over: of a random rank, so that the supervisor starts all anew, or of
the supervisor itself, so that its workers have to end by themselves and `tunekit resume` goes on. So also checkpoints
are hit while they are written. In the end both runs must have the same weights, the same optimizer, and have logged
the same of each step.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.circumstances import in_words
from benchmarks.exact import DDP, PACKAGES, Case, differences, recipe_of
from tunekit.process.watchdog import beats_of
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.events import read_events
from tunekit.runs.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "soak.md"

SPAN_STEPS = 120
"""Most steps that an attempt is given."""

POLL_SECONDS = 0.005

JITTER_SECONDS = 0.1
"""As long as some steps, or as a checkpoint takes."""

PATIENCE_SECONDS = 300
"""How long nothing may happen."""

LAYOUTS: dict[str, dict[str, Any]] = {"one process": {}, "DDP x2": DDP}


@dataclass(frozen=True)
class Outcome:
    """How it went.

    Attributes:
        num_kills: By whom: of ranks and of the supervisor.
        num_restarts: New starts by the supervisor, and by `tunekit resume`.
        num_twice: Steps that were done more than once, each time counted.
        differences: What is not the same as without kills.
        seconds: Of the run with kills.
    """

    num_kills: tuple[int, int]
    num_restarts: tuple[int, int]
    num_twice: int
    differences: list[str]
    seconds: float


class Soak:
    """A run that is killed.

    Args:
        recipe: Its recipe.
        folder: For its recipe and what it says.
        lots: What decides when and whom.
    """

    def __init__(self, recipe: dict[str, Any], folder: Path, lots: random.Random) -> None:
        self.path = Path(recipe["output"]["dir"])
        self.lots = lots
        self.log = folder / f"{self.path.name}.log"
        self.recipe = folder / f"{self.path.name}.yaml"
        self.recipe.write_text(json.dumps(recipe), encoding="utf-8")
        self.offset = 0

    def command(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of tunekit's."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tunekit", *words], stdout=log, stderr=log, cwd=ROOT, env=environment
            )

    def run(self, max_kills: int, span_steps: int) -> tuple[int, int]:
        """Train, and kill; how often ranks and supervisors were killed."""
        kills = [0, 0]
        process = self.command("train", str(self.recipe))
        while sum(kills) < max_kills and self.wait_for_steps(process, self.lots.randint(1, span_steps)):
            time.sleep(self.lots.uniform(0, JITTER_SECONDS))
            # Without a checkpoint there is nothing to resume: only the supervisor begins from the beginning.
            whole = newest_complete(self.path).path is not None
            if whole and self.lots.random() < 0.4:
                process.kill()
                process.wait()
                kills[1] += 1
                self.wait_for_end_of_workers()
                process = self.command("resume", str(self.path))
            elif self.kill_a_rank():
                kills[0] += 1
            self.news()
        code = process.wait()
        assert code == 0, f"it ended with {code}:\n{self.log.read_text()[-3000:]}"
        return kills[0], kills[1]

    def news(self) -> list[dict[str, Any]]:
        """Events since this was asked last."""
        events, self.offset = read_events(self.path / "events.jsonl", self.offset)
        return events

    def wait_for_steps(self, process: "subprocess.Popen[bytes]", num_steps: int) -> bool:
        """Wait until an attempt that begins has logged so many steps; whether it came to that."""
        until, num_logged = time.monotonic() + PATIENCE_SECONDS, -1
        while process.poll() is None and num_logged < num_steps:
            for event in self.news():
                if event.get("phase") == "training":
                    num_logged = 0
                elif event["event"] == "log" and num_logged >= 0:
                    num_logged += 1
                elif event.get("phase") == "saving":
                    return False
            assert time.monotonic() < until, f"nothing happens:\n{self.log.read_text()[-3000:]}"
            time.sleep(POLL_SECONDS)
        return num_logged >= num_steps

    def kill_a_rank(self) -> bool:
        """Kill one of the workers; whether there was one."""
        beats = beats_of(Run(self.path))
        if not beats:
            return False
        try:
            os.kill(self.lots.choice(beats).pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def wait_for_end_of_workers(self) -> None:
        """See that workers whose supervisor is gone end by themselves."""
        _, left = psutil.wait_procs([psutil.Process(beat.pid) for beat in self.living()], timeout=PATIENCE_SECONDS)
        assert not left, f"{left} are there without their supervisor"

    def living(self) -> list[Any]:
        """Signs of life of workers that are there."""
        return [beat for beat in beats_of(Run(self.path)) if psutil.pid_exists(beat.pid)]


def soaked(
    folder: Path, parallel: dict[str, Any], *, steps: int, seed: int, max_kills: int, span_steps: int = SPAN_STEPS
) -> Outcome:
    """Train twice, once with kills, and compare."""
    folder.mkdir(parents=True, exist_ok=True)
    train = {"save_steps": max(1, span_steps // 6), "learning_rate": 1e-3, "global_batch_size": 4}
    case = Case(
        "soak", adapter={"type": "lora", "rank": 4, "dropout": 0.1}, train=train, parallel=parallel, steps=steps
    )
    recipes = [recipe_of(case, folder, name) for name in ("calm", "killed")]
    recipes[1]["parallel"] = {**parallel, "max_restarts": 1000}
    calm = Soak(recipes[0], folder, random.Random(seed))
    calm.run(0, span_steps)
    killed = Soak(recipes[1], folder, random.Random(seed))
    began = time.perf_counter()
    kills = killed.run(max_kills, span_steps)
    seconds = time.perf_counter() - began
    run = Run(killed.path)
    events = [event["event"] for event in run.events()]
    return Outcome(
        num_kills=kills,
        num_restarts=(events.count("restart"), kills[1]),
        num_twice=events.count("log") - steps,
        differences=list(differences(Run(calm.path), run)),
        seconds=seconds,
    )


def main() -> None:
    """Soak, print the table, and with `--save` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps of a run (500)")
    parser.add_argument("--span", type=int, default=SPAN_STEPS, help=f"most steps before a kill ({SPAN_STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of when and whom (0)")
    parser.add_argument("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="these layouts")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    lines = [
        "| layout | steps | ranks killed | supervisors killed | new starts by the supervisor | by `resume` | again "
        "| seconds | result |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only:
            outcome = soaked(
                Path(folder) / name.replace(" ", "-"),
                LAYOUTS[name],
                steps=args.steps,
                seed=args.seed,
                max_kills=1000,
                span_steps=args.span,
            )
            failed |= bool(outcome.differences)
            counts = (*outcome.num_kills, *outcome.num_restarts, outcome.num_twice, round(outcome.seconds))
            result = "; ".join(outcome.differences[:4]) or "the same, bit for bit"
            lines.append(f"| {name} | {args.steps} | {' | '.join(map(str, counts))} | {result} |")
            print(lines[-1], file=sys.stderr, flush=True)
    table = "\n".join(lines)
    print(table)
    if args.save:
        command = f"python -m benchmarks.soak --steps {args.steps} --span {args.span} --seed {args.seed} --save"
        text = f"# Runs that are killed again and again\n\n`{command}`: {in_words(PACKAGES)}\n\n{table}\n"
        RESULTS.write_text(text, encoding="utf-8")
    sys.exit(failed)


if __name__ == "__main__":
    main()
