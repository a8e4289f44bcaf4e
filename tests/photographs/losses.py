"""The numbers of a short run that are recorded, and what it logs; the smoke tests compare those of their runs.

A recorded number may be missed by 1e-4 of it. Torch sums products in another order with each instruction set and
number of threads, and three steps of Adam carry that on: with `ATEN_CPU_CAPABILITY=default`, which leaves out AVX2, the
numbers of one process move by 7e-6 of them at most. Another loss, order of rows or learning rate moves them far more.
"""

from tests.photographs.recorded import check_run_recorded
from tunekit.runs.run import Run

LOGGED = ("loss", "grad_norm", "learning_rate", "reward")
RELATIVE_TOLERANCE = 1e-4
ABSOLUTE_TOLERANCE = 1e-6
"""For losses that are zero but for rounding, as GRPO's are at first."""


def check_losses(key: str, run: Run) -> None:
    """Assert that a run has the recorded numbers, metrics and kinds of events.

    Args:
        key: Names it in `losses.yaml`.
        run: It, finished.
    """
    events = run.events()
    logged = [event for event in events if event["event"] == "log"]
    evaluated = [event for event in events if event["event"] == "eval"]
    numbers = {name: [event[name] for event in logged] for name in LOGGED if name in logged[0]}
    numbers["eval_loss"] = [event["eval_loss"] for event in evaluated]
    names = {
        "logged": sorted({name for event in logged for name in event}),
        "evaluated": sorted({name for event in evaluated for name in event}),
        "events": sorted({event["event"] for event in events}),
    }
    check_run_recorded(
        key, {name: found for name, found in numbers.items() if found}, names, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE
    )
