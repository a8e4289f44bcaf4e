"""Failures after which a run goes back to its newest checkpoint by itself, whatever `parallel.max_restarts` says.

A step that was not finite is left out when it comes again (see `tunekit.training.non_finite`, which also counts them).
Where memory ran out, each process computes half as many rows at once, and twice as often: once, and never again.
"""

import shutil
from pathlib import Path

from tunekit.errors import MemoryShortError, RollbackError
from tunekit.planner.decisions.shortage import with_half_the_batch
from tunekit.planner.plan import Plan
from tunekit.probe.model import probe_model
from tunekit.recipe.methods import has_teacher
from tunekit.recipe.schema import Recipe
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.record import Record
from tunekit.runs.run import Run
from tunekit.runs.small_files import read_plan

EARLIER_PLAN = "plan_out_of_memory.yaml"
"""File of a run folder with the plan that memory did not suffice for, where another one was made for it."""


def may_go_back(recipe: Recipe) -> bool:
    """Return whether a run may have to be restarted, so that another process has to watch it."""
    return recipe.train.non_finite == "rollback" or recipe.train.retry_out_of_memory


def goes_back(run: Run, record: Record, error: Exception) -> bool:
    """Return whether a failed run is to be restarted, after preparing and recording that."""
    if isinstance(error, RollbackError):
        words = "the step will be left out"
    elif isinstance(error, MemoryShortError) and run.recipe.train.retry_out_of_memory:
        smaller = _with_less(run)
        if smaller is None:
            return False
        words = f"now with micro-batches of {smaller.batch_words}, and the same global batch"
    else:
        return False
    record.update_status(phase="starting")
    attempt = 1 + sum(event["event"] == "restart" for event in run.events())
    reason = f"{error.problem}; {words}"
    record.write("restart", attempt=attempt, step=newest_complete(run.path).step, reason=reason)
    return True


def _with_less(run: Run) -> Plan | None:
    """The plan that is tried where memory ran out, written into the folder; None where there is none, or was one."""
    earlier, plan = run.path / EARLIER_PLAN, run.plan
    # A plan that was made anew since, for an edited recipe, is another one.
    if earlier.exists() and plan.micro_batch_size < _read(earlier, plan.recipe).micro_batch_size:
        return None
    method = plan.recipe.method
    teacher = probe_model(method.teacher) if has_teacher(method) else None
    smaller = with_half_the_batch(plan, probe_model(plan.recipe.model), teacher)
    if smaller is None:
        return None
    draft = run.path / ".plan.yaml"
    draft.write_text(smaller.to_yaml(), encoding="utf-8")
    shutil.copy2(run.path / "plan.yaml", earlier)
    draft.replace(run.path / "plan.yaml")
    return smaller


def _read(path: Path, recipe: Recipe) -> Plan:
    return read_plan(path, recipe)
