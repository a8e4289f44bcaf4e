"""Many plans of one recipe: with every combination of some changes, or with the largest value that fits.

Nothing is decided here: a plan is made of each changed recipe, as of any other, and the plans stand beside each other.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from tunekit.errors import PlanError, RecipeError
from tunekit.planner.plan import Plan
from tunekit.recipe.load import load_recipe
from tunekit.recipe.reading.parse import COMMAND_LINE, YAMLProblem, read_yaml, to_inline_yaml
from tunekit.recipe.schema import Recipe

if TYPE_CHECKING:
    import pandas as pd

MAX_PLANS = 100
"""Plans in one sweep: more is no table that anybody reads."""

LENGTH_STEP = 128
"""Lengths are tried in such steps: a finer answer is worth less than the plan's own uncertainty."""

MAX_LENGTH = 2**20
"""Longest sequence that is tried for a model that does not say how many positions it has."""

Largest = Literal["batch", "length", "model"]
"""Quantity to maximize."""

NEXT = "next"
"""Note of the variant beyond the largest that fits."""

Planned = Plan | PlanError
"""A plan, or why there is none."""

PlanOf = Callable[[Recipe], Planned]
"""Makes the plan of a recipe for one machine."""


@dataclass(frozen=True)
class Variant:
    """A recipe with some of its values changed, and how it would run.

    Attributes:
        machine: Where, as it was named; None for this machine.
        changes: The values by their dotted keys.
        plan: The plan, or why there is none.
        note: What it is among the others, where it is something.
    """

    machine: str | None
    changes: Mapping[str, Any]
    plan: Planned
    note: str = ""


@dataclass(frozen=True)
class Variants:
    """Plans of one recipe with changes; a notebook shows them as a table."""

    recipe: Recipe
    variants: tuple[Variant, ...]

    def __iter__(self) -> Iterator[Variant]:
        return iter(self.variants)

    def __len__(self) -> int:
        return len(self.variants)

    def __getitem__(self, position: int) -> Variant:
        return self.variants[position]

    def to_dict(self) -> dict[str, Any]:
        """The recipe and the plans as plain data, for JSON; for a variant without a plan why there is none."""
        return {
            "recipe": self.recipe.model_dump(mode="json"),
            "variants": [
                {"machine": one.machine, "note": one.note, "changes": dict(one.changes), **_plain(one.plan)}
                for one in self.variants
            ],
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row for each plan: the changes, then what the plan needs and how fast it is."""
        import pandas as pd

        return pd.DataFrame([_row(variant) for variant in self.variants])

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, na_rep="", float_format="{:,.4g}".format)


def _plain(plan: Planned) -> dict[str, Any]:
    return {"refused": str(plan)} if isinstance(plan, PlanError) else {"plan": plan.model_dump(mode="json")}


def _row(variant: Variant) -> dict[str, Any]:
    """A variant in the columns of a table."""
    plan = variant.plan
    row: dict[str, Any] = {"machine": variant.machine or "here", "note": variant.note, **variant.changes}
    if isinstance(plan, PlanError):
        return {**row, "fits": False, "why not": str(plan)}
    return {**row, "fits": True, **plan_columns(plan)}


def plan_columns(plan: Plan) -> dict[str, Any]:
    """A plan's figures in the columns of a table."""
    row: dict[str, Any] = {
        "layout": plan.layout_words,
        "memory_gib": plan.memory.total_bytes / 2**30,
        "limit_gib": plan.memory_limit_bytes / 2**30,
        "batch": plan.batch_words,
    }
    speed = {} if plan.speed is None else dict(plan.speed)
    for name in ("tokens_per_second", "seconds", "cost_usd"):
        span = speed.get(name)
        if span is not None:
            row |= {f"{name}_low": span.low, f"{name}_high": span.high}
    return row


def read_values(words: Sequence[str]) -> dict[str, list[Any]]:
    """Values to sweep over by their keys, from words such as `data.max_length=2048,8192`.

    What stands behind the equals sign is a list in YAML without its brackets.

    Raises:
        RecipeError: A word is no such list.
    """
    values_by_key: dict[str, list[Any]] = {}
    for word in words:
        key, equals, written = word.partition("=")
        try:
            values, _, problems = read_yaml(f"[{written}]", COMMAND_LINE)
        except YAMLProblem:
            values, problems = None, []
        if not equals or not isinstance(values, list) or not values or problems:
            raise RecipeError(
                f"--sweep {word}: invalid values", hint="write key=value,value, such as adapter.rank=8,16"
            )
        values_by_key.setdefault(key.strip(), []).extend(values)
    return values_by_key


def combinations(
    recipe: Recipe, values: Mapping[str, Sequence[Any]], *, num_machines: int = 1
) -> list[tuple[dict[str, Any], Recipe]]:
    """Every combination of values, with the recipe that it makes. The last key changes fastest.

    Args:
        recipe: What is changed.
        values: The values to try by the dotted keys of the recipe.
        num_machines: Machines that each of them is planned for.

    Raises:
        RecipeError: A value is not valid, which it is refused with, or there are more combinations than a table holds.
    """
    numbers = [*map(len, values.values()), *([num_machines] if num_machines > 1 else [])]
    if prod(numbers) > MAX_PLANS:
        product_words = " x ".join(map(str, numbers))
        raise RecipeError(
            f"a sweep over {product_words} = {prod(numbers)} plans exceeds the limit of {MAX_PLANS}",
            hint="try fewer values",
        )
    all_changes = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    return [(changes, changed(recipe, changes)) for changes in all_changes]


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """The recipe with some values changed.

    Raises:
        RecipeError: It is not valid so; the message names the changes.
    """
    words = to_words(changes)
    try:
        return load_recipe(recipe, words)
    except RecipeError as error:
        raise RecipeError(f"with {' '.join(words)}: {error.problem}", hint=error.hint) from None


def to_words(changes: Mapping[str, Any]) -> list[str]:
    """Changes as the words of a command line."""
    return [f"{key}={to_inline_yaml(value)}" for key, value in changes.items()]


def largest_length(recipe: Recipe, plan_of: PlanOf, machine: str | None, max_length: int | None) -> Iterator[Variant]:
    """The recipe as it is, with the longest `data.max_length` that fits, and with the next, which does not.

    Args:
        recipe: The recipe. If its own plan moves no weights and states off the devices, those of longer rows do not
            either.
        plan_of: Makes plans for the machine.
        machine: Its name.
        max_length: Positions that the model has.
    """
    most = max_length or MAX_LENGTH
    # One step beyond what the model has, of which the plan says so.
    lengths = [*range(LENGTH_STEP, most, LENGTH_STEP), most, most + LENGTH_STEP]
    plan = plan_of(recipe)
    yield Variant(machine, {"data.max_length": recipe.data.max_length}, plan, "unchanged")
    yield from _largest(_held(recipe, plan), plan_of, machine, lengths, lambda length: {"data.max_length": length})


def largest_batch(
    recipe: Recipe, plan_of: PlanOf, machine: str | None, *, num_devices: int, num_rows: int
) -> Iterator[Variant]:
    """The recipe as it is, with the largest `train.micro_batch_size` that fits, and with the next, which does not.

    The global batch grows with it, so that each device computes one micro-batch a step.

    Args:
        recipe: The recipe. The strategy of its own plan is kept, if it has one.
        plan_of: Makes plans for the machine.
        machine: Its name.
        num_devices: Devices that it has.
        num_rows: Rows that there are; a larger batch means nothing.
    """
    plan = plan_of(recipe)
    plan_state = _held(recipe, plan)
    if isinstance(plan, Plan):
        plan_state = _parallel(plan_state, strategy=plan.layout.strategy)

    def changes(size: int) -> dict[str, Any]:
        return {"train.micro_batch_size": size, "train.global_batch_size": size * num_devices}

    def plan_of_batch(recipe: Recipe) -> Planned:
        if recipe.train.global_batch_size > max(num_rows, num_devices):
            return PlanError(f"there are only {num_rows:,} training rows")
        return plan_of(recipe)

    train = recipe.train
    own = {"train.micro_batch_size": train.micro_batch_size, "train.global_batch_size": train.global_batch_size}
    yield Variant(machine, own, plan, "unchanged")
    yield from _largest(plan_state, plan_of_batch, machine, range(1, num_rows // num_devices + 2), changes)


def largest_models(recipe: Recipe, plan_of: PlanOf, machine: str | None, names: Sequence[str]) -> Iterator[Variant]:
    """The last of some models that is too large, then the largest that fits of each maker.

    Args:
        recipe: The recipe. Nothing is moved off the devices if it does not say so.
        plan_of: Makes plans for the machine.
        machine: Its name.
        names: The models, the largest first. What stands before the slash is the maker.
    """
    plan_state = _held(recipe)
    too_large: Variant | None = None
    makers: set[str] = set()
    for name in names:
        maker = name.partition("/")[0]
        if maker in makers:
            continue
        model = recipe.model.model_copy(update={"path": name, "revision": None})
        planned = plan_of(plan_state.model_copy(update={"model": model}))
        if isinstance(planned, PlanError):
            too_large = Variant(machine, {"model.path": name}, planned, NEXT) if not makers else too_large
            continue
        if not makers and too_large is not None:
            yield too_large
        yield Variant(machine, {"model.path": name}, planned, "" if makers else "largest")
        makers.add(maker)
    if not makers and too_large is not None:
        yield too_large


def _held(recipe: Recipe, planned: Planned | None = None) -> Recipe:
    """The recipe with weights and states held on the devices, if it asks for nothing else and its plan does so too.

    With enough host memory or disk almost everything fits, slowly; that is not what somebody looks for who asks how
    much a device holds.
    """
    names = ("offload_param_device", "offload_optimizer_device")
    if isinstance(planned, Plan) and any(dict(planned.layout)[name] != "none" for name in names):
        return recipe
    return _parallel(recipe, **{name: "none" for name in names if dict(recipe.parallel)[name] == "auto"})


def _parallel(recipe: Recipe, **values: str) -> Recipe:
    """The recipe with some values of its section on devices changed."""
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=values)})


def _largest(
    recipe: Recipe, plan_of: PlanOf, machine: str | None, values: Sequence[int], change: Callable[[int], dict[str, Any]]
) -> Iterator[Variant]:
    """A recipe with the largest of ascending values that fits, and with the next one."""

    @cache
    def planned(value: int) -> Planned:
        return plan_of(changed(recipe, change(value)))

    num_fitting = bisect_left(values, True, key=lambda value: isinstance(planned(value), PlanError))
    if num_fitting:
        largest = values[num_fitting - 1]
        yield Variant(machine, change(largest), planned(largest), "largest")
    if num_fitting < len(values):
        beyond = values[num_fitting]
        yield Variant(machine, change(beyond), planned(beyond), NEXT)
