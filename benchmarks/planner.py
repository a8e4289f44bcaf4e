"""How far the planner's memory estimate is from a trace of the real modules, and how long a plan takes.

    python -m benchmarks.planner [--steps KIND ...] [--set development|held-out|all] [--save]
    python -m benchmarks.planner --public [--save]

The steps are drawn by chance in `tests/estimates/grid.py` (one device), `grid_shards.py` (FSDP2 on 2 to 512) and
`grid_methods.py` (DPO and GRPO on one); a fifth of each was set aside before the formulas were fitted to the others.
Types of models that the formulas do not know are in `grid_families.py`: their plans are corrected by a trace of other
rows on one device (`tunekit plan --trace`), and compared with one of the rows and devices of the step.
The traces (`tests/estimates/oracle*.py`) run Hugging Face's modules, TRL's head, its trainers' losses, Accelerate's
FSDP2 wrapping and autograd on tensors without storage. It is agreement with a trace, not a measurement on a device: the
allocator, streams, workspaces of libraries and kernels of bitsandbytes are in neither, and are what the parts `context`
and `reserve` and the planner's margin are for. Below stands how far the estimate is from published measurements.
`--public` asks public estimators about the held-out steps instead (`benchmarks/estimators.py`).

`error` is that of the peak. `of the step` is that of what comes and goes: the peak less weights and optimizer states,
which both sides know exactly.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import estimators
from tests.estimates import grid, grid_families, grid_methods, grid_shards, oracle, oracle_methods, oracle_shards
from tests.estimates.oracle import Step, estimate_of, traced_facts_of
from tests.estimates.oracle_methods import MethodStep
from tests.estimates.oracle_shards import ShardedStep
from tests.estimates.published import print_errors
from tests.estimates.shapes import LLAMA_8B, LLAMA_405B
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate, estimate
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

RESULTS = Path(__file__).parent / "results" / "planner.json"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")

Kind = Literal["one", "many", "methods", "families", "families-many"]
STEPS: dict[Kind, Sequence[Step | ShardedStep | MethodStep]] = {
    "one": grid.STEPS,
    "many": grid_shards.STEPS,
    "methods": grid_methods.STEPS,
    "families": grid_families.STEPS,
    "families-many": grid_families.SHARDED,
}
HELD_OUT: dict[Kind, list[int]] = {
    "one": grid.HELD_OUT,
    "many": grid_shards.HELD_OUT,
    "methods": grid_methods.HELD_OUT,
    "families": list(range(len(grid_families.STEPS))),
    "families-many": list(range(len(grid_families.SHARDED))),
}
KIND_WORDS: dict[Kind, str] = {
    "one": "SFT, one device",
    "many": "SFT, FSDP2",
    "methods": "DPO and GRPO, one device",
    "families": "SFT of other types of models with a trace, one device",
    "families-many": "SFT of other types of models with a trace, FSDP2",
}
NUM_ESTIMATES = 1000


@dataclass(frozen=True)
class Row:
    """One step: what was traced and what was estimated, tensors only."""

    kind: Kind
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


def compare(kind: Kind, place: int) -> Row:
    """Trace and estimate the step at one place of a grid."""
    step = STEPS[kind][place]
    if kind == "families-many":
        assert isinstance(step, ShardedStep)
        traced, estimated = oracle_shards.trace(step), _corrected(step)
    elif kind == "families":
        assert isinstance(step, Step)
        traced, estimated = oracle.trace(step), estimate_of(step, facts=traced_facts_of(step))
    elif isinstance(step, ShardedStep):
        traced, estimated = oracle_shards.trace_deep(step), estimate_of(step.step, step.layout)
    elif isinstance(step, MethodStep):
        traced, estimated = oracle_methods.trace_deep(step), oracle_methods.estimate_of(step)
    else:
        traced, estimated = oracle.trace_deep(step), estimate_of(step)
    # What is there while answers are generated is compared with TRL's own generation, in the tests.
    phases = {phase: size for phase, size in estimated.phases.items() if phase != "generation"}
    phase = max(phases, key=phases.__getitem__)
    total = phases[phase]
    constant = traced.weights_bytes + traced.optimizer_bytes
    return Row(
        kind=kind,
        step=str(step),
        held_out=place in HELD_OUT[kind],
        traced_bytes=traced.peak_bytes,
        estimated_bytes=total,
        error=total / traced.peak_bytes - 1,
        step_error=(total - constant) / (traced.peak_bytes - constant) - 1,
        traced_phase=traced.phase,
        estimated_phase=phase,
    )


def _corrected(sharded: ShardedStep) -> MemoryEstimate:
    return estimate_of(sharded.step, sharded.layout, traced_facts_of(sharded.step, is_sharded=True))


def seconds_per_estimate() -> dict[str, float]:
    """Seconds that an estimate for a model of 405B parameters takes, by layout, after the first one."""
    found = {}
    for layout in (
        Layout(),
        Layout(strategy="fsdp2", dp_replicate_size=8, dp_shard_size=64),
        Layout(strategy="zero3", dp_shard_size=512),
    ):
        for adapter in (FullAdapter(), LoraAdapter()):
            _estimate(adapter, layout)
            began = time.perf_counter()
            for _ in range(NUM_ESTIMATES):
                _estimate(adapter, layout)
            found[f"{layout.name}, {adapter.type}"] = (time.perf_counter() - began) / NUM_ESTIMATES
    return found


def seconds_per_plan() -> dict[str, float]:
    """Seconds that a plan takes by machine, after the first one: an adapter for 8B, and for 405B."""
    recipe = Recipe.model_validate({"model": "some-model", "data": {"train": "chats.jsonl"}})
    found = {}
    for machine, model in (("h100", LLAMA_8B), ("64x8xh100", LLAMA_405B)):
        hardware = find_machine(machine).hardware()
        resolve(recipe, hardware, model, DataFacts(num_train=1000))
        began = time.perf_counter()
        resolve(recipe, hardware, model, DataFacts(num_train=1000))
        found[f"{model.path} on {machine}"] = time.perf_counter() - began
    return found


def _estimate(adapter: FullAdapter | LoraAdapter, layout: Layout) -> None:
    estimate(
        LLAMA_405B,
        adapter,
        device="cuda",
        dtype="bfloat16",
        optim="adamw_torch_fused",
        num_tokens=8192,
        mask_length=None,
        sliding_mask_length=None,
        gradient_checkpointing=True,
        accumulates=True,
        layout=layout,
        devices_per_node=8,
        reserve_share=0.03,
    )


def _one_thread() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def show(rows: list[Row]) -> None:
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
    console = Console(width=190)
    console.print(table)
    for kind, words in KIND_WORDS.items():
        for name, held_out in (("development", False), ("held out", True)):
            found = [row for row in rows if row.kind == kind and row.held_out == held_out]
            if found:
                console.print(f"{words}, {name}: {len(found)} steps; {_errors(found)}")


def _errors(rows: list[Row]) -> str:
    of_peaks, of_steps = [abs(row.error) for row in rows], [abs(row.step_error) for row in rows]
    return (
        f"error median {statistics.median(of_peaks):.2%}, most {max(of_peaks):.2%}; "
        f"of the step median {statistics.median(of_steps):.2%}, most {max(of_steps):.2%}"
    )


def main() -> None:
    """Compare, show and, where asked, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", nargs="+", choices=tuple(STEPS), default=list(STEPS))
    parser.add_argument("--set", choices=("development", "held-out", "all"), default="all")
    parser.add_argument("--public", action="store_true", help="compare public estimators with the stored traces")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}; with --public, estimators.json")
    arguments = parser.parse_args()
    if arguments.public:
        estimators.compare(save=arguments.save)
        return
    kept = {"development": {False}, "held-out": {True}, "all": {False, True}}[arguments.set]
    speeds, plan_seconds = seconds_per_estimate(), seconds_per_plan()
    began = time.monotonic()
    places = [
        (kind, place)
        for kind, steps in STEPS.items()
        for place in range(len(steps))
        if kind in arguments.steps and (place in HELD_OUT[kind]) in kept
    ]
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_one_thread) as processes:
        rows = list(processes.map(compare, *zip(*places, strict=True)))
    show(rows)
    print(f"traced in {time.monotonic() - began:.0f} s")
    print_errors()
    for name, seconds in speeds.items():
        print(f"an estimate of 405B, {name}: {1e3 * seconds:.2f} ms")
    for name, seconds in plan_seconds.items():
        print(f"a plan, {name}: {1e3 * seconds:.1f} ms")
    if arguments.save:
        traced = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {package: version(package) for package in PACKAGES},
        }
        stored = json.loads(RESULTS.read_text(encoding="utf-8"))
        results = {
            "seconds_per_estimate": speeds,
            "seconds_per_plan": plan_seconds,
            "traced": stored["traced"] | dict.fromkeys(arguments.steps, traced),
            "rows": [
                *(row for row in stored["rows"] if row["kind"] not in arguments.steps),
                *(asdict(row) for row in rows),
            ],
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
