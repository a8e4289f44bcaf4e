"""The plan of a run that goes on from a checkpoint: of another length, or spread in another way."""

from typing import NamedTuple

from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import metric_of
from tunekit.estimates.throughput.step import Range
from tunekit.planner.decisions.reasons import optimizer_reason, schedule_of, speed_reason, steps_reason
from tunekit.planner.plan import Plan, Reason
from tunekit.recipe.schema import Recipe

WHOLE = ("single", "ddp")
"""Strategies whose processes hold all of the weights and states, so that a checkpoint is that of one of them."""


class Obstacle(NamedTuple):
    """Reason that a checkpoint cannot be resumed in a layout, and the nearest in which it can."""

    why: str
    hint: str


def obstacle(saved: Layout, layout: Layout) -> Obstacle | None:
    """Return why a checkpoint of one layout cannot be resumed in another; None where it can.

    torch's sharded checkpoints are read by any number of processes, and so are those of processes that hold everything.
    Each is also taken apart or put together for the other. What DeepSpeed divides, it takes back as it was.
    """
    as_before = f"parallel.strategy={saved.strategy} parallel.num_processes={saved.num_processes}"
    if layout.why_not_resumed is not None:
        return Obstacle(layout.why_not_resumed, f"go on with {as_before}")
    if not saved.strategy.startswith("zero") and not layout.strategy.startswith("zero"):
        return None
    if saved.strategy == layout.strategy and _divides(saved) == _divides(layout):
        return None
    if saved.strategy.startswith("zero"):
        took = "1 process" if saved.num_processes == 1 else f"{saved.num_processes} processes"
        why = f"DeepSpeed divided the state over {took} by {saved.name} and takes it back in no other way"
    else:
        why = f"DeepSpeed reads no checkpoint of {saved.name}"
    return Obstacle(why, f"go on with {as_before}")


def _divides(layout: Layout) -> tuple[int, int, bool]:
    """Return the part of a layout that the files of DeepSpeed's state depend on."""
    return layout.num_processes, layout.num_shards, layout.offloads


def rescheduled(plan: Plan, recipe: Recipe) -> Plan:
    """A plan with an edited recipe whose edits change how long it is trained, and nothing of how."""
    schedule, speed = schedule_of(recipe, plan.data), plan.speed
    if speed is not None and schedule is not None and plan.schedule is not None:
        longer = schedule.num_steps / plan.schedule.num_steps
        speed = speed.model_copy(
            update={"seconds": _times(speed.seconds, longer), "cost_usd": _times(speed.cost_usd, longer)}
        )
    changed: dict[str, Reason] = {
        reason.topic: reason
        for reason in (
            steps_reason(recipe, plan.data, schedule),
            optimizer_reason(recipe),
            speed_reason(recipe.data, plan.data, speed),
        )
    }
    metric, greater = metric_of(recipe, plan.data)
    update = {
        "recipe": recipe,
        "schedule": schedule,
        "saving": plan.saving.model_copy(update={"metric_for_best_model": metric, "greater_is_better": greater}),
        "speed": speed,
        "reasons": tuple(changed.get(reason.topic, reason) for reason in plan.reasons),
    }
    return plan.model_copy(update=update)


def _times(of: Range | None, factor: float) -> Range | None:
    return None if of is None else of.times(factor)


def differences(before: Plan, now: Plan) -> list[str]:
    """Return the decisions that differ from those before, a phrase each."""
    pairs = (
        ("layout", before.layout.name, now.layout.name),
        ("processes", before.layout.num_processes, now.layout.num_processes),
        ("device", before.device.name, now.device.name),
        ("batch", before.batch_words, now.batch_words),
        ("precision", before.dtype, now.dtype),
        ("attention", before.attn_implementation, now.attn_implementation),
        ("kernels", before.kernels, now.kernels),
        ("compiled layers", _word(before.torch_compile), _word(now.torch_compile)),
        ("float8", _word(before.fp8), _word(now.fp8)),
        ("checkpointing", _word(before.gradient_checkpointing), _word(now.gradient_checkpointing)),
        ("padding", _padding(before), _padding(now)),
    )
    return [f"{what} {was} -> {is_now}" for what, was, is_now in pairs if was != is_now]


def _word(is_on: bool) -> str:
    return "on" if is_on else "off"


def _padding(plan: Plan) -> str:
    return "none" if plan.padding_free else "to the longest row"
