"""Records of finished runs: how fast this machine was, and how much memory they took."""

from pathlib import Path

import yaml

from tunekit.errors import TunekitError
from tunekit.planner.throughput.records import RunRecord
from tunekit.runs.events import Event
from tunekit.runs.run import RUNS, Run, list_runs

NUM_RUNS = 10
"""Finished runs that are looked at, the newest: each is to be read and checked, and older ones tell of older code."""


def recorded_runs(root: Path = RUNS) -> list[RunRecord]:
    """Records of the newest finished runs in a folder; of those that tell nothing, none."""
    finished = [run for run in list_runs(root) if run.status()["phase"] == "finished"][:NUM_RUNS]
    records = (_record(run) for run in finished)
    return [record for record in records if record is not None]


def _generation_share(result: Event) -> float | None:
    """Share of the steps in which answers were generated. Earlier versions did not measure it."""
    seconds = result.get("generation_seconds")
    return None if seconds is None else seconds / result["step_seconds"]


def _record(run: Run) -> RunRecord | None:
    try:
        plan, result = run.plan, run.result()
        if plan.speed is None or not result["tokens_per_second"]:
            return None
        return RunRecord(
            device=plan.device.name,
            model_type=plan.speed.model_type,
            method=plan.recipe.method.type,
            adapter=plan.recipe.adapter.type,
            dtype=plan.dtype,
            num_params=plan.num_params,
            flops_per_token=plan.speed.flops_per_token,
            tokens_per_second=result["tokens_per_second"],
            by_vllm=plan.vllm is not None,
            generation_share=_generation_share(result),
            peak_memory_bytes=result["peak_memory_bytes"],
            planned_memory_bytes=result["planned_memory_bytes"],
            planned_tensor_bytes=plan.memory.tensor_bytes,
            peak_allocated_bytes=result["peak_allocated_bytes"],
            peak_reserved_bytes=result["peak_reserved_bytes"],
            layout=plan.layout,
            num_nodes=plan.num_nodes,
        )
    except (TunekitError, ValueError, KeyError, OSError, yaml.YAMLError):
        # Written by another version, or damaged since: no reason to refuse a new plan.
        return None
