"""How far the planner's memory estimate is from a trace of the real modules: peak bytes of one step on one device.

    python -m benchmarks.planner [--set development|held-out|all] [--methods] [--save]

The steps are drawn by chance in `tests/planner/grid.py`; a fifth of them was set aside before the formulas were fitted
to the others. The trace (`tests/planner/oracle.py`) runs Hugging Face's modules, TRL's head and autograd on tensors
without storage. It is agreement with a trace, not a measurement on a device: the allocator, workspaces of libraries
and kernels of bitsandbytes are in neither, and are what `fixed` and the planner's margin are for.

`error` is that of the peak. `of the step` is that of what comes and goes: the peak less weights and optimizer states,
which both sides know exactly.

`--methods` takes steps of DPO and GRPO instead, from `tests/planner/grid_methods.py` and traced with TRL's own losses;
what GRPO needs to generate answers is compared in `tests/planner/test_passes.py`, on real tensors.
"""

import argparse
import json
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.planner import grid, grid_methods, oracle, oracle_methods

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "trl", "peft")


@dataclass(frozen=True)
class Row:
    """One step: what was traced and what was estimated, tensors only."""

    step: str
    held_out: bool
    traced_bytes: int
    estimated_bytes: int
    error: float
    """Of the peak, as a share of the traced one."""
    step_error: float
    """Of the peak less weights and optimizer states."""
    traced_phase: str
    estimated_phase: str


def compare(place: int, methods: bool) -> Row:
    """Trace and estimate the step at one place of a grid."""
    if methods:
        one = grid_methods.STEPS[place]
        step, traced, estimated = str(one), oracle_methods.trace_deep(one), oracle_methods.estimate_of(one)
    else:
        alone = grid.STEPS[place]
        step, traced, estimated = str(alone), oracle.trace_deep(alone), oracle.estimate_of(alone)
    phases = {phase: size for phase, size in estimated.phases.items() if phase != "generation"}
    phase = max(phases, key=phases.__getitem__)
    total = phases[phase]
    constant = traced.weights_bytes + traced.optimizer_bytes
    return Row(
        step=step,
        held_out=place in (grid_methods if methods else grid).HELD_OUT,
        traced_bytes=traced.peak_bytes,
        estimated_bytes=total,
        error=total / traced.peak_bytes - 1,
        step_error=(total - constant) / (traced.peak_bytes - constant) - 1,
        traced_phase=traced.phase,
        estimated_phase=phase,
    )


def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def show(rows: list[Row], seconds: float) -> None:
    """Print every step, then what they come to."""
    table = Table(box=None)
    for name in ("step", "", "traced", "estimated", "error", "of the step", "peak"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("step", "", "peak") else "right")
    for row in rows:
        other = "" if row.traced_phase == row.estimated_phase else f" (traced: {row.traced_phase})"
        table.add_row(
            row.step,
            "held out" if row.held_out else "",
            f"{row.traced_bytes / 2**30:.2f} GiB",
            f"{row.estimated_bytes / 2**30:.2f} GiB",
            f"{row.error:+.2%}",
            f"{row.step_error:+.2%}",
            row.estimated_phase + other,
        )
    console = Console(width=170)
    console.print(table)
    for name, held_out in (("development", False), ("held out", True)):
        errors = [abs(row.error) for row in rows if row.held_out == held_out]
        of_steps = [abs(row.step_error) for row in rows if row.held_out == held_out]
        if errors:
            console.print(
                f"{name}: {len(errors)} steps; error median {statistics.median(errors):.2%}, most {max(errors):.2%}; "
                f"of the step median {statistics.median(of_steps):.2%}, most {max(of_steps):.2%}"
            )
    console.print(f"{seconds:.0f} s")


def main() -> None:
    """Compare, show and, where asked, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("development", "held-out", "all"), default="all")
    parser.add_argument("--methods", action="store_true", help="steps of DPO and GRPO")
    parser.add_argument("--save", action="store_true", help="write it to results/")
    arguments = parser.parse_args()
    kept = {"development": {False}, "held-out": {True}, "all": {False, True}}[arguments.set]
    began = time.monotonic()
    steps = grid_methods if arguments.methods else grid
    places = [place for place in range(len(steps.STEPS)) if (place in steps.HELD_OUT) in kept]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_one_thread) as processes:
        rows = list(processes.map(compare, places, [arguments.methods] * len(places)))
    show(rows, time.monotonic() - began)
    if arguments.save:
        found = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {package: version(package) for package in PACKAGES},
            "rows": [asdict(row) for row in rows],
        }
        (RESULTS / ("planner_methods.json" if arguments.methods else "planner.json")).write_text(
            json.dumps(found, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
