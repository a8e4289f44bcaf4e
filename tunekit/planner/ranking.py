"""Recipes beside a recipe, ranked: all weights, LoRA and QLoRA, half and twice the length, and other machines.

Each is planned as any other; what fits comes first, the fastest at the top.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tunekit.errors import PlanError
from tunekit.planner.advice import middle
from tunekit.planner.decisions.changes import Change, as_adapter, as_full, change_of, fewer_bits, together
from tunekit.planner.plan import Plan
from tunekit.planner.variants import Planned, PlanOf, Variant
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, QloraAdapter

WELL_KNOWN = ("rtx4090", "a100-80", "h100", "8xh100")
"""Machines that a recipe is planned for where none is named."""

UNCHANGED = "unchanged"
"""Note of the recipe as it is."""


def alternatives(recipe: Recipe, plan_of: PlanOf, machine: str | None, max_length: int | None) -> Iterator[Variant]:
    """Yield a recipe as it is on a machine, and with other adapters, precisions and lengths.

    Args:
        recipe: The recipe.
        plan_of: Makes plans for the machine.
        machine: Its name.
        max_length: Positions that the model has.
    """
    yield Variant(machine, {}, plan_of(recipe), UNCHANGED)
    for change in _changes(recipe, max_length):
        yield Variant(machine, change.values, plan_of(change.recipe))


def ranked(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return variants with what fits first, the fastest at the top; notes name the best in time, money and memory."""
    best: dict[int, list[str]] = {}
    for note, cost in (("fastest", _seconds), ("cheapest", _usd), ("least memory", _memory_bytes)):
        costs = {at: cost(variant.plan) for at, variant in enumerate(variants)}
        least = min(costs, key=lambda at: costs[at], default=None)
        if least is not None and costs[least] < math.inf:
            best.setdefault(least, []).append(note)
    noted = [
        replace(variant, note=", ".join(filter(None, (variant.note, *best.get(at, ())))))
        for at, variant in enumerate(variants)
    ]
    return tuple(sorted(noted, key=lambda variant: (_seconds(variant.plan), _memory_bytes(variant.plan))))


def _changes(recipe: Recipe, max_length: int | None) -> Iterator[Change]:
    full = Change({}, recipe) if isinstance(recipe.adapter, FullAdapter) else as_full(recipe)
    if full is not None:
        if full.values:
            yield full
        for bits in fewer_bits(full.recipe, "bfloat16"):
            if bits.recipe.train.pure_bf16 and not bits.is_rare:
                yield together(full, bits)
    if isinstance(recipe.adapter, QloraAdapter):
        lora = change_of(recipe, {"adapter.type": "lora"})
        if lora is not None:
            yield lora
    yield from as_adapter(recipe)
    length = recipe.data.max_length
    for other in (length // 2, 2 * length):
        if max_length is None or other <= max_length:
            change = change_of(recipe, {"data.max_length": other})
            if change is not None:
                yield change


def _seconds(plan: Planned) -> float:
    """Return the middle of the time of a run, or that of a token where the run's is not known."""
    if isinstance(plan, PlanError) or plan.speed is None or plan.speed.tokens_per_second is None:
        return math.inf
    return middle(plan.speed.seconds) if plan.speed.seconds is not None else 1 / middle(plan.speed.tokens_per_second)


def _usd(plan: Planned) -> float:
    """Return the middle of the price of a run, or that of tokens where the run's is not known."""
    speed = None if isinstance(plan, PlanError) else plan.speed
    price = None if speed is None else speed.cost_usd or speed.usd_per_million_tokens
    return math.inf if price is None else middle(price)


def _memory_bytes(plan: Planned) -> float:
    """Return the memory of all devices."""
    return plan.memory.total_bytes * plan.layout.num_processes if isinstance(plan, Plan) else math.inf
