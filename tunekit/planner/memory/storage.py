"""Reasons of a plan about the disk: the files that a run writes, and whether there is room."""

from collections.abc import Iterator

from tunekit.errors import PlanError
from tunekit.planner.facts import Hardware
from tunekit.planner.layout import Layout
from tunekit.planner.memory.saving import Saving, copied_bytes, divides_files
from tunekit.planner.plan import Plan, Reason, Schedule, gib
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter


def saving_reasons(
    recipe: Recipe, layout: Layout, schedule: Schedule | None, saving: Saving, hardware: Hardware
) -> Iterator[Reason]:
    """Yield the reasons about checkpoints: how they are written, and their room on the disk."""
    if layout.why_not_resumed is not None:
        yield Reason(topic="checkpoints", choice="none", why=layout.why_not_resumed)
    else:
        yield _checkpoints_reason(layout, schedule, saving)
    yield _disk_reason(recipe, layout, saving, hardware.disk_free_bytes)


def _checkpoints_reason(layout: Layout, schedule: Schedule | None, saving: Saving) -> Reason:
    size = saving.checkpoint_bytes or 0
    often = "" if schedule is None else f"every {schedule.save_steps:,} steps, "
    if saving.in_background:
        why = f"written while training goes on; it waits for a copy, {gib(copied_bytes(size, layout))} of main memory"
        why += " in each process"
    elif divides_files(layout):
        why = "training waits: a copy to write from would not fit main memory"
    else:
        why = "training waits: one process writes all of it"
    if layout.offload_param_device == "nvme" or layout.offload_optimizer_device == "nvme":
        why = "training waits: what is offloaded to a disk is read and written again"
    return Reason(topic="checkpoints", choice=f"{often}{gib(size)} each", why=why)


def _disk_reason(recipe: Recipe, layout: Layout, saving: Saving, free_bytes: int | None) -> Reason:
    why = _words(recipe, layout, saving)
    if free_bytes is not None:
        why += f"; {gib(free_bytes)} free"
    return Reason(topic="disk space", choice=f"{gib(saving.run_bytes or 0)} at most", why=why)


def _words(recipe: Recipe, layout: Layout, saving: Saving) -> str:
    """Describe the largest use of the disk."""
    parts = ["the result", "the rows"]
    if layout.why_not_resumed is None:
        best = ["the best"] if saving.metric_for_best_model else []
        parts = [f"the newest {recipe.train.save_total_limit} checkpoints", *best, "the one being written", *parts]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def check_disk(plan: Plan, free_bytes: int, where: str) -> None:
    """Refuse a run that would fill the disk.

    Args:
        plan: The plan.
        free_bytes: What is free where the run will lie.
        where: Its folder, or the one that it will be in.

    Raises:
        PlanError: There is too little room.
    """
    recipe, needed = plan.recipe, plan.saving.run_bytes
    if needed is None or needed <= free_bytes:
        return
    ways = [f"free {gib(needed - free_bytes)} there", "set output.dir to another disk"]
    if recipe.train.save_total_limit > 2:
        ways.append("set train.save_total_limit=2")
    if isinstance(recipe.adapter, FullAdapter):
        ways.append("train an adapter (adapter.type=lora), whose checkpoints are small")
    words = _words(recipe, plan.layout, plan.saving)
    raise PlanError(
        f"output.dir: the run takes up to {gib(needed)} on the disk of {where} ({words}; a checkpoint "
        f"takes {gib(plan.saving.checkpoint_bytes or 0)}), and {gib(free_bytes)} are free",
        hint=", or ".join(ways),
        needed_bytes=needed,
        limit_bytes=free_bytes,
    )
