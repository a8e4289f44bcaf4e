"""Advice on plans that are legal but poor: the better recipe for the same machine, with its figures.

A plan is looked at that moves weights or states off the devices, that shards them over the network, or whose recipe
forces what the planner would decide better. Its method stays. Other recipes are planned as any other; one is named if
it is much faster, at both ends of the range, or if it needs half the host memory where nobody knows how much there is.
What it gives up is said with it. The recipe that gives up the least comes first, and a second one only if it is faster
still by half.
"""

import math
from collections.abc import Callable, Iterator
from itertools import chain

from tunekit.errors import PlanError
from tunekit.estimates.throughput.step import Range
from tunekit.planner.decisions.candidates import Setting
from tunekit.planner.decisions.changes import (
    LAYOUT_FIELDS,
    Change,
    as_adapter,
    change_of,
    defaults_of,
    fewer_bits,
    fits_on_devices,
    with_less_beside,
)
from tunekit.planner.plan import ADVICE, Plan, Reason, gib, used_of
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter

FASTER_FOR_NOTHING, FASTER, MUCH_FASTER = 1.25, 1.5, 2.0
"""Times as fast that a recipe has to be to be named: where the result stays as it is, where numbers have fewer bits,
and where an adapter takes the place of all weights."""

FASTER_STILL = 1.5
"""Times as fast as the first that a second one has to be."""

SAVED_HOST_SHARE = 0.5
"""Share of the host memory that another recipe may need to be named for that."""

MUCH_HOST_BYTES = 32 * 2**30
"""Host memory of a node that many machines do not have free."""

MAX_LINES = 2
"""Recipes that are named at most."""

BATCH_FIELDS = ("micro_batch_size", "gradient_checkpointing", "activation_offloading", "tiled_mlp")
"""Fields that force how a batch is computed."""

LENGTH_STEP = 128
"""Multiple that a length is rounded up to."""

PlanOf = Callable[[Recipe], Plan]
"""Makes the plan of another recipe, or raises a PlanError."""


def advice(plan: Plan, setting: Setting, plan_of: PlanOf) -> tuple[Reason, ...]:
    """Return the better recipes for a plan's machine, two at most; none where the plan is not poor.

    Args:
        plan: The plan.
        setting: The settings that it was chosen among.
        plan_of: Makes the plan of another recipe for the same machine.
    """
    lines: list[Reason] = []
    best = plan
    for much, changes in _kinds(plan, setting):
        times = FASTER_STILL if lines else much
        for change in changes:
            other = _plan_or_none(plan_of, change.recipe)
            if other is not None and _is_better(best, other, times):
                lines.append(Reason(topic=ADVICE, choice=change.words, why=_words(plan, other, change)))
                best = other
                break
        if len(lines) == MAX_LINES:
            break
    return tuple(lines) or tuple(_on_host_memory(plan, setting, plan_of))


def is_poor(plan: Plan) -> bool:
    """Return whether weights or states leave the devices, or are gathered over the network."""
    devices_per_node = plan.layout.num_processes // plan.num_nodes
    return plan.layout.offloads or plan.layout.num_shards > devices_per_node


def times_as_fast(plan: Plan, other: Plan) -> float | None:
    """Return how many times as fast another plan is, by the middle of both ranges; None where it is not known."""
    ours, theirs = _rate(plan), _rate(other)
    return None if ours is None or theirs is None else middle(theirs) / middle(ours)


def middle(span: Range) -> float:
    """Return the geometric mean of the ends of a range, whose error is a factor."""
    return math.sqrt(span.low * span.high)


def _kinds(plan: Plan, setting: Setting) -> Iterator[tuple[float, Iterator[Change]]]:
    """Yield the changes to plan for by their kind, and how many times as fast one of them has to be to be named.

    What gives up the least comes first.
    """
    yield FASTER_FOR_NOTHING, _of_nothing(plan)
    if is_poor(plan):
        is_full = isinstance(plan.recipe.adapter, FullAdapter)
        if is_full:
            yield FASTER, _that_stay(plan, setting, fewer_bits(plan.recipe, setting.dtype))
        yield MUCH_FASTER if is_full else FASTER, _that_stay(plan, setting, as_adapter(plan.recipe))


def _of_nothing(plan: Plan) -> Iterator[Change]:
    """Yield the changes that give up nothing: of what is forced, and of a length that no row has."""
    recipe = plan.recipe
    values = defaults_of(recipe.parallel, "parallel", LAYOUT_FIELDS)
    values |= defaults_of(recipe.train, "train", BATCH_FIELDS)
    forced = change_of(recipe, values)
    if forced is not None:
        yield forced
    longest = plan.data.longest_tokens if plan.data.tokenized and is_poor(plan) else None
    if longest is not None and (length := -(-longest // LENGTH_STEP) * LENGTH_STEP) < recipe.data.max_length:
        shorter = change_of(recipe, {"data.max_length": length})
        if shorter is not None:
            yield shorter


def _that_stay(plan: Plan, setting: Setting, changes: Iterator[Change]) -> Iterator[Change]:
    """Yield the changes that keep on the devices what a plan offloads; with a second one where it takes both."""
    for change in changes:
        if change.is_rare:
            continue
        pairs = with_less_beside(change, setting) if "adapter.type" in change.values else ()
        for either in (change, *pairs):
            if not plan.layout.offloads or fits_on_devices(setting, either.recipe):
                yield either
                break


def _plan_or_none(plan_of: PlanOf, recipe: Recipe) -> Plan | None:
    try:
        return plan_of(recipe)
    except PlanError:
        return None


def _rate(plan: Plan) -> Range | None:
    return None if plan.speed is None else plan.speed.tokens_per_second


def _is_better(plan: Plan, other: Plan, times: float) -> bool:
    """Return whether another plan is so many times as fast; where speeds are unknown, whether it offloads less.

    One that cannot be resumed is no better.
    """
    if other.layout.why_not_resumed is not None and plan.layout.why_not_resumed is None:
        return False
    ours, theirs = _rate(plan), _rate(other)
    if ours is None or theirs is None:
        return plan.layout.offloads and not other.layout.offloads
    at_both_ends = theirs.low > ours.low and theirs.high > ours.high
    return at_both_ends and middle(theirs) >= times * middle(ours)


def _words(plan: Plan, other: Plan, change: Change) -> str:
    """Return how fast another plan is and what it needs, and what it gives up."""
    times, rate = times_as_fast(plan, other), _rate(other)
    speed = "throughput unknown, but nothing is offloaded"
    if times is not None and rate is not None:
        number = f"{times:.0f}" if times >= 3 else f"{times:.1f}"
        speed = f"about {number} times as fast ({rate.words('{:,.0f}'.format)} tokens/s)"
    return f"{speed}: {_needs(other)}; {_given_up(change)}"


def _needs(plan: Plan) -> str:
    each = "" if plan.layout.num_processes == 1 else " per device"
    return f"{plan.layout_words}, {used_of(plan.memory.total_bytes, plan.memory_limit_bytes)}{each}"


def _given_up(change: Change) -> str:
    return change.gives_up or "the same result"


def _on_host_memory(plan: Plan, setting: Setting, plan_of: PlanOf) -> Iterator[Reason]:
    """Yield the adapter that needs much less host memory, where nobody knows how much the machine has."""
    host = plan.memory.host_bytes
    if setting.host_limit_bytes is not None or host < MUCH_HOST_BYTES or plan.layout.offload_param_device != "cpu":
        return
    alone = list(as_adapter(plan.recipe))
    smaller = (both for change in alone for both in with_less_beside(change, setting) if not both.is_rare)
    for change in chain(alone, smaller):
        other = _plan_or_none(plan_of, change.recipe)
        if other is not None and other.memory.host_bytes <= SAVED_HOST_SHARE * host:
            times = times_as_fast(plan, other)
            speed = "" if times is None else f", about {times:.1f} times as fast"
            saved = f"{gib(other.memory.host_bytes)} instead of {gib(host)} of host memory"
            yield Reason(topic=ADVICE, choice=change.words, why=f"{saved}{speed}: {_needs(other)}; {_given_up(change)}")
            return
