"""What it costs to survive: time of a step with checkpoints and with each thing that watches a run, beside without.

    python -m benchmarks.survival [--repeats N] [--steps N] [--hidden N] [--batch N] [--only WORDS] [--save]

Each comparison is of two runs of one recipe: full fine-tuning of a small Llama in float32 on a processor, one thread in
each process. They take turns, the one with first in every second turn, and each ratio is that of the two runs of a
turn; the table gives the median over the turns with the lowest and the highest. The time of a step is that from the
end of the third step to the end of the last but one, by the main process's clock, divided by the steps: what a
checkpoint makes it wait is in it, and evaluations there are none. `processor` is the same ratio of the time that its
threads had a processor, which other programs on the machine change less, but in which no waiting is.

What a checkpoint makes the training wait is told as a run tells it, as a share of the time between two checkpoints. In
how many steps it is told depends on the model: its bytes and the time of a step stand beside. What is switched off is
so in the processes of this program alone. No figure here is one of an accelerator.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.circumstances import circumstances
from benchmarks.injected import Forked, around
from benchmarks.prepared import started
from tests.tiny import save_chats, save_tiny_model

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "survival.json"
NUM_WARM = 3
"""Steps at the beginning of a run that are not counted: buffers are allocated, and one is traced."""

PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Way:
    """One of the two ways in which the runs of a comparison are run.

    Attributes:
        train: Of the recipe's section.
        parallel: Of the recipe's section.
        plan: Changes to the plan.
        without: What is switched off, in this benchmark's processes alone: one of OFF.
    """

    train: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    without: str = ""


@dataclass(frozen=True)
class Measured:
    """A finished run.

    Attributes:
        step_seconds: Time of a step, with what comes between steps.
        processor_seconds: Of that, what its threads had a processor.
        wait_seconds: How long the training waited for a checkpoint; median, None without checkpoints.
        checkpoint_bytes: What one takes.
    """

    step_seconds: float
    processor_seconds: float
    wait_seconds: float | None
    checkpoint_bytes: int | None


def _no_thread(*names: str) -> Callable[[], None]:
    """Threads of these names do nothing."""

    def switch_off() -> None:
        make = threading.Thread.__init__

        def make_idle(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("name") in names:
                kwargs["target"], kwargs["args"], kwargs["kwargs"] = (lambda: None), (), {}
            make(self, *args, **kwargs)

        threading.Thread.__init__ = make_idle  # type: ignore[method-assign]

    return switch_off


def _nothing(*names: str, result: Any = None) -> Callable[[], None]:
    """Functions of these names, `module:name` or `module:class.name`, do nothing."""

    def switch_off() -> None:
        for name in names:
            module, _, path = name.partition(":")
            *owners, function = path.split(".")
            owner: Any = importlib.import_module(module)
            for inner in owners:
                owner = vars(owner)[inner]
            if function not in vars(owner):
                raise LookupError(f"there is no {name} any more")
            setattr(owner, function, lambda *args, **kwargs: result)

    return switch_off


OFF: dict[str, Callable[[], None]] = {
    "signs of life": _no_thread("heart", "watchdog"),
    "positions": _nothing("tunekit.training.worker:follow", "tunekit.training.worker:follow_layers", result=[]),
    "guard": _nothing("tunekit.training.non_finite:Guard._watch"),
    "agreement": _nothing("tunekit.training.callbacks:Boundary._decide", result=False),
}
"""What can be switched off, by name."""

DDP, FSDP2 = {"num_processes": 2, "strategy": "ddp"}, {"num_processes": 2, "strategy": "fsdp2"}

COMPARISONS: dict[str, tuple[Way, Way]] = {
    "a checkpoint every 10 steps, one process": (Way({"save_steps": 10}), Way()),
    "a checkpoint every 10 steps, DDP x2": (Way({"save_steps": 10}, DDP), Way({}, DDP)),
    "a checkpoint every 10 steps, FSDP2 x2": (Way({"save_steps": 10}, FSDP2), Way({}, FSDP2)),
    "checkpoints while training goes on, beside training that waits, FSDP2 x2": (
        Way({"save_steps": 10}, FSDP2, {"saving": {"in_background": True}}),
        Way({"save_steps": 10}, FSDP2, {"saving": {"in_background": False}}),
    ),
    "a supervisor, one process": (Way({}, {"max_restarts": 1}), Way()),
    **{
        f"{words}, {where}": (Way({}, parallel), Way({}, parallel, without=name))
        for name, words in (
            ("signs of life", "signs of life and the watchdog"),
            ("positions", "layers that tell where they are"),
            ("guard", "a look at each loss and gradient"),
            ("agreement", "an agreement after each step whether to end"),
        )
        for where, parallel in (("one process", {}), ("DDP x2", DDP))
    },
}
"""Each with and without."""


def run_way(folder: str, without: str) -> None:
    """Train, in this process and those that are forked from it."""
    with (Path(folder).parent / "output.txt").open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    from transformers.trainer_callback import CallbackHandler

    from tunekit.launching.local import launch
    from tunekit.process import processes
    from tunekit.runs.run import Run

    processes.subprocess.Popen = Forked  # type: ignore[misc]
    if without:
        OFF[without]()
    around(CallbackHandler, "on_step_end", after=_Clock(Path(folder).parent / "clock.jsonl").tell)
    launch(Run(folder))


class _Clock:
    """Writes down when a step of the main process ended, in seconds of the clock and of its threads.

    Args:
        file: Where.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def tell(self, handler: Any, control: Any) -> None:
        """A step has ended."""
        if os.environ.get("RANK", "0") == "0":
            with self._file.open("a") as stream:
                stream.write(json.dumps([time.perf_counter(), time.process_time()]) + "\n")


def make_run(recipe: dict[str, Any], planned: dict[str, Any]) -> None:
    """Make the folder of a run."""
    from tunekit.api import verbs

    file = verbs.make_run(recipe).path / "plan.yaml"
    plan = yaml.safe_load(file.read_text())
    for section, changes in planned.items():
        plan[section] |= changes
    file.write_text(yaml.safe_dump(plan))


def save_source(folder: Path, hidden: int) -> None:
    """A model, and rows of one length, so that no step and no process has more to do than another."""
    save_tiny_model(folder / "model", hidden=hidden, layers=4)
    save_chats(folder / "rows.jsonl", ((f"{n:04} " + "say it " * 10, f"{n:04} " + "said " * 24) for n in range(64)))


class Bench:
    """A folder with a model and rows, and what is run on them.

    Args:
        folder: Where.
        hidden: Width of the model.
        batch: Rows of a step.
        num_steps: Steps of a run.
    """

    def __init__(self, folder: Path, *, hidden: int, batch: int, num_steps: int) -> None:
        self.folder = folder
        self.batch = batch
        self.num_steps = num_steps
        self._num_runs = 0
        _in_process(save_source, folder, hidden)

    def run(self, way: Way) -> Measured:
        """Train, and say how long it took."""
        self._num_runs += 1
        folder = self.folder / str(self._num_runs)
        train = {"max_steps": self.num_steps, "global_batch_size": self.batch, "learning_rate": 1e-4}
        train |= {"logging_steps": 1, "gradient_checkpointing": False, "save_steps": self.num_steps}
        recipe = {
            "model": str(self.folder / "model"),
            "data": {"train": str(self.folder / "rows.jsonl"), "max_length": 256},
            "adapter": "full",
            "train": train | way.train,
            "parallel": {"strategy": "single", "num_processes": 1} | way.parallel,
            "output": {"dir": str(folder / "run"), "sample_prompts": []},
        }
        _in_process(make_run, recipe, way.plan)
        _in_process(run_way, str(folder / "run"), way.without)
        measured = _measured(folder)
        shutil.rmtree(folder)
        return measured


def _measured(folder: Path) -> Measured:
    """What a run tells that has ended."""
    clock = [json.loads(line) for line in (folder / "clock.jsonl").read_text().splitlines()]
    first, last = clock[NUM_WARM - 1], clock[-2]
    num = len(clock) - 1 - NUM_WARM
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    # The last one is that of the end, behind the last step.
    saved = [event for event in events if event["event"] == "checkpoint"][:-1]
    return Measured(
        step_seconds=(last[0] - first[0]) / num,
        processor_seconds=(last[1] - first[1]) / num,
        wait_seconds=statistics.median(event["wait_seconds"] for event in saved) if saved else None,
        checkpoint_bytes=saved[-1]["bytes"] if saved else None,
    )


def _in_process(function: Callable[..., None], *args: Any) -> None:
    process = started(function, *args)
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__}: exit code {process.exitcode}")


def compared(turns: Sequence[tuple[Measured, Measured]], save_steps: int | None) -> dict[str, Any]:
    """The figures of a comparison, medians over its turns.

    Args:
        turns: The runs with and without.
        save_steps: Steps between two checkpoints in those with.
    """
    ratios = sorted(one.step_seconds / other.step_seconds for one, other in turns)
    processor = sorted(one.processor_seconds / other.processor_seconds for one, other in turns)
    found: dict[str, Any] = {
        "ratio": statistics.median(ratios),
        "lowest": ratios[0],
        "highest": ratios[-1],
        "processor_ratio": statistics.median(processor),
        "lowest_processor_ratio": processor[0],
        "highest_processor_ratio": processor[-1],
        "step_seconds": statistics.median(one.step_seconds for one, _ in turns),
        "step_seconds_without": statistics.median(other.step_seconds for _, other in turns),
    }
    for number, end in enumerate(("", "_without")):
        waits = [turn[number].wait_seconds for turn in turns]
        if save_steps is not None and None not in waits:
            wait = statistics.median(seconds for seconds in waits if seconds is not None)
            steps = statistics.median(turn[number].step_seconds for turn in turns)
            found |= {
                f"wait_seconds{end}": wait,
                # The wait is in the time of the steps.
                f"wait_share{end}": wait / (save_steps * steps),
                "checkpoint_bytes": turns[0][number].checkpoint_bytes,
            }
    return found


def show(table: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    shown = Table("with", caption="each ratio: with to without; where both have checkpoints, waits of both")
    for column in ("ratio", "processor", "step", "without", "wait", "share", "checkpoint"):
        shown.add_column(column, justify="right")
    for name, row in table.items():
        ends = [end for end in ("", "_without") if f"wait_seconds{end}" in row]
        shown.add_row(
            name,
            _spread(row["ratio"], row["lowest"], row["highest"]),
            _spread(row["processor_ratio"], row["lowest_processor_ratio"], row["highest_processor_ratio"]),
            f"{row['step_seconds'] * 1e3:.0f} ms",
            f"{row['step_seconds_without'] * 1e3:.0f} ms",
            " / ".join(f"{row[f'wait_seconds{end}'] * 1e3:.0f} ms" for end in ends),
            " / ".join(f"{row[f'wait_share{end}']:.1%}" for end in ends),
            f"{row['checkpoint_bytes'] / 2**20:.0f} MiB" if ends else "",
        )
    Console(width=180).print(shown)


def _spread(value: float, lowest: float, highest: float) -> str:
    return f"{value:.3f} ({lowest:.3f} to {highest:.3f})"


def main() -> None:
    """Measure, print the table, and with `--save` keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each comparison (5)")
    parser.add_argument("--steps", type=int, default=50, help="steps of a run, six or more (50)")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model (128)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step (8)")
    parser.add_argument("--only", default="", help="comparisons in whose names this occurs")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()

    chosen = {name: ways for name, ways in COMPARISONS.items() if args.only in name}
    turns: dict[str, list[tuple[Measured, Measured]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder).resolve(), hidden=args.hidden, batch=args.batch, num_steps=args.steps)
        for turn in range(args.repeats):
            for name, ways in chosen.items():
                if turn % 2:
                    second, first = bench.run(ways[1]), bench.run(ways[0])
                else:
                    first, second = bench.run(ways[0]), bench.run(ways[1])
                turns[name].append((first, second))
                ratio = first.step_seconds / second.step_seconds
                print(f"turn {turn + 1} of {args.repeats}, {name}: {ratio:.3f}", file=sys.stderr, flush=True)

    table = {name: compared(found, chosen[name][0].train.get("save_steps")) for name, found in turns.items()}
    where = circumstances(PACKAGES)
    print(f"commit {where['commit']}, {where['date']}, {where['machine']}, load {where['load'][0]:.1f}")
    show(table)
    if args.save:
        settings = {key: value for key, value in vars(args).items() if key not in ("only", "save")}
        RESULTS.write_text(json.dumps({**where, "settings": settings, "comparisons": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
