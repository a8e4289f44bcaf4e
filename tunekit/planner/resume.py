"""The plan of a run that resumes from a checkpoint: of another length, or spread in another way."""

from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import metric_of
from tunekit.planner.decisions.checks import Refusal
from tunekit.planner.decisions.reasons import (
    check_restarts,
    check_stopping,
    check_warmup,
    optimizer_reason,
    schedule_of,
    speed_reason,
    steps_reason,
)
from tunekit.planner.plan import Plan
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import BLOCK_OPTIMS, Optim

WHOLE = ("single", "ddp")
"""Strategies whose processes hold all of the weights and states, so that a checkpoint is that of one of them."""


def obstacle(saved: Layout, layout: Layout, optim: Optim = "adamw_torch_fused") -> Refusal | None:
    """Return why a checkpoint of one layout cannot be resumed in another, and in which it can; None where it can.

    torch's sharded checkpoints are read by any number of processes, and so are those of processes that hold everything.
    Each is also taken apart or put together for the other. What DeepSpeed divides, it takes back as it was; and blocks
    of 8-bit or 4-bit states are those of as many parts as before.
    """
    as_before = f"parallel.strategy={saved.strategy} parallel.num_processes={saved.num_processes}"
    if saved.engine != layout.engine:
        why = f"a checkpoint of {saved.name} cannot be loaded by another engine"
        return Refusal(why, f"resume with parallel.engine={saved.engine} {as_before}")
    if layout.why_not_resumed is not None:
        return Refusal(layout.why_not_resumed, f"resume with {as_before}")
    if optim in BLOCK_OPTIMS and saved.num_shards != layout.num_shards:
        parts = f"{saved.num_shards} part{'s' * (saved.num_shards > 1)} of each weight"
        return Refusal(
            f"the {BLOCK_OPTIMS[optim]}-bit states of {optim} are in blocks of {parts}", f"resume with {as_before}"
        )
    if not saved.strategy.startswith("zero") and not layout.strategy.startswith("zero"):
        return None
    if saved.strategy == layout.strategy and _divides(saved) == _divides(layout):
        return None
    if saved.strategy.startswith("zero"):
        took = "1 process" if saved.num_processes == 1 else f"{saved.num_processes} processes"
        why = f"DeepSpeed state sharded over {took} by {saved.name} cannot be loaded in another layout"
    else:
        why = f"DeepSpeed cannot load a checkpoint of {saved.name}"
    return Refusal(why, f"resume with {as_before}")


def _divides(layout: Layout) -> tuple[int, int, bool]:
    """Return the part of a layout that the files of DeepSpeed's state depend on."""
    return layout.num_processes, layout.num_shards, layout.offloads


def rescheduled(plan: Plan, recipe: Recipe) -> Plan:
    """A plan with an edited recipe whose edits change how long it is trained, and nothing of how."""
    schedule, speed = schedule_of(recipe, plan.data), plan.speed
    check_stopping(recipe, schedule)
    check_warmup(recipe, schedule)
    check_restarts(recipe.adapter, schedule)
    if speed is not None and schedule is not None and plan.schedule is not None:
        longer = schedule.num_steps / plan.schedule.num_steps
        spans = {"seconds": speed.seconds, "cost_usd": speed.cost_usd}
        speed = speed.model_copy(update={name: span and span.times(longer) for name, span in spans.items()})
    steps, optimizer = steps_reason(recipe, plan.data, schedule), optimizer_reason(recipe)
    changed = {reason.topic: reason for reason in (steps, optimizer, speed_reason(recipe.data, plan.data, speed))}
    metric, greater = metric_of(recipe, plan.data)
    update = {
        "recipe": recipe,
        "schedule": schedule,
        "saving": plan.saving.model_copy(update={"metric_for_best_model": metric, "greater_is_better": greater}),
        "speed": speed,
        "reasons": tuple(changed.get(reason.topic, reason) for reason in plan.reasons),
    }
    return plan.model_copy(update=update)


def differences(before: Plan, now: Plan) -> list[str]:
    """Return the decisions that differ from those before, a phrase each."""
    was, is_now = _decisions(before), _decisions(now)
    return [f"{what} {was[what]} -> {is_now[what]}" for what in was if was[what] != is_now[what]]


def _decisions(plan: Plan) -> dict[str, str | int]:
    word = {True: "on", False: "off"}
    return {
        "layout": plan.layout.name,
        "processes": plan.layout.num_processes,
        "device": plan.device.name,
        "batch": plan.batch_words,
        "precision": plan.dtype,
        "attention": plan.attn_implementation,
        "kernels": plan.kernels,
        "compiled layers": word[plan.torch_compile],
        "float8": word[plan.fp8],
        "checkpointing": word[plan.gradient_checkpointing],
        "activation offloading": word[plan.activation_offloading],
        "tiled MLP": word[plan.mlp_tile_tokens is not None],
        "padding": "none" if plan.padding_free else "to the longest row",
    }
