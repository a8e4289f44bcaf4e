"""What it costs to survive: time of a step with checkpoints and with each thing that watches a run, beside without.

    python -m benchmarks.survival [--repeats N] [--steps N] [--hidden N] [--batch N] [--only WORD ...] [--save]

Each comparison is of two runs of one recipe: full fine-tuning of a small Llama in float32 on a processor, one thread in
each process. They take turns, the one with first in every second turn, and each ratio is that of the two runs of a
turn; the table gives the median over the turns with the lowest and the highest. A run's time of a step is that from
the end of its first tenth to its last logged step, divided by the steps: evaluations there are none, and what a
checkpoint makes it wait is in it.

`of a step` is measured otherwise, where it can be: by a clock around what the processes do for it, in the run with it,
as a share of the time of the step. It tells more than a ratio near 1 on a machine that does other things besides.

What the model is decides what a checkpoint costs in steps: its bytes and the time of a step are told too. No figure
here is one of an accelerator.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.injected import Forked

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "survival.json"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Way:
    """One of the two ways in which the runs of a comparison are run.

    Attributes:
        train: Of the recipe's section.
        parallel: Of the recipe's section.
        plan: Changes to the plan.
        without: What is switched off, in this benchmark's processes alone: one of OFF.
        clocked: What a clock is put around: functions of `CLOCKED`.
    """

    train: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    without: str = ""
    clocked: str = ""


@dataclass(frozen=True)
class Measured:
    """A finished run.

    Attributes:
        step_seconds: Time of a step, with what comes between steps.
        share: Of that, what the clock saw; None without one.
        wait_seconds: How long the training waited for a checkpoint; median, None without checkpoints.
        checkpoint_bytes: What one takes.
    """

    step_seconds: float
    share: float | None
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


OFF: dict[str, Callable[[], None]] = {"heart": _no_thread("heart", "watchdog")}
"""What can be switched off, by name."""

CLOCKED: dict[str, Callable[[Callable[[Any], Any]], None]] = {}
"""What a clock can be put around, by name."""

DDP, FSDP2 = {"num_processes": 2, "strategy": "ddp"}, {"num_processes": 2, "strategy": "fsdp2"}

COMPARISONS: dict[str, tuple[Way, Way]] = {
    "a checkpoint every 10 steps, one process": (Way({"save_steps": 10}), Way()),
    "a checkpoint every 10 steps, DDP x2": (Way({"save_steps": 10}, DDP), Way({}, DDP)),
    "a checkpoint every 10 steps, FSDP2 x2": (Way({"save_steps": 10}, FSDP2), Way({}, FSDP2)),
    "a supervisor, one process": (Way({}, {"max_restarts": 1}), Way()),
    "signs of life and the watchdog, one process": (Way(), Way(without="heart")),
    "signs of life and the watchdog, DDP x2": (Way({}, DDP), Way({}, DDP, without="heart")),
}
"""Each with and without."""


def run_way(folder: str, without: str) -> None:
    """Train, in this process and those that are forked from it."""
    with (Path(folder).parent / "output.txt").open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    from tunekit.run import group
    from tunekit.run.launch import launch
    from tunekit.run.run import Run

    group.subprocess.Popen = Forked  # type: ignore[misc]
    if without:
        OFF[without]()
    launch(Run(folder))
