"""Start of a sweep: every combination is checked and planned before the first is trained, with all faults reported."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tunekit.api.plan_inputs import Lookup
from tunekit.api.verbs import Source, check_recipe
from tunekit.data.sources.in_memory import RowData
from tunekit.errors import PlanError, RecipeError, TunekitError
from tunekit.estimates.facts import Hardware
from tunekit.estimates.throughput.step import Range
from tunekit.launching.local import when_served
from tunekit.planner.plan import Plan, gib
from tunekit.planner.variants import Variant, Variants, to_words
from tunekit.probe.hardware import probe_hardware
from tunekit.probe.model import probe_model
from tunekit.recipe.load import AnyOverrides
from tunekit.recipe.schema import Recipe
from tunekit.runs.events import Event
from tunekit.runs.fingerprints import read_recipe
from tunekit.runs.prepared_data import absolute
from tunekit.runs.record import free_bytes, place_of_run
from tunekit.sweeps.conduct import conduct
from tunekit.sweeps.folder import Search, Spec, Sweep
from tunekit.sweeps.measure import measure_of
from tunekit.sweeps.study import check_installed
from tunekit.sweeps.values import Axis, Changes, Span, axes_of, check_number, corners, drawn, grid, words_of


def sweep(
    source: Source,
    values: Mapping[str, Sequence[Any] | str | Span],
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    random: int | None = None,
    optuna: int | None = None,
    seed: int = 0,
    by: str | None = None,
    parallel: int | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Sweep:
    """Train a recipe with combinations of values, one run each, and return the sweep when all have ended.

        tunekit.sweep("mine.yaml", {"train.learning_rate": "1e-5..1e-3", "adapter.rank": [8, 32]}, random=10)

    Args:
        source: The recipe.
        values: Values to try by dotted key of the recipe: lists, or ranges such as `1e-5..1e-3`.
        overrides: Overrides of the recipe for all runs.
        train_dataset: Rows to train on instead of `data.train`, as for `tunekit.train`.
        eval_dataset: The same instead of `data.eval`.
        random: Number of combinations to sample; by default every combination of the lists is tried.
        optuna: Number of combinations for Optuna to choose, each from the results of those before.
        seed: Seed of the sampling.
        by: Metric to compare runs by, in TRL's name: `eval_loss`, `rewards/margins`. By default the metric of their
            best checkpoints, or the training loss without evaluation data.
        parallel: Runs at a time. By default one, or one per accelerator if every run fits one.
        on_event: Called with the plans, and whenever a run starts or ends.

    Raises:
        TunekitError: A value, the recipe, the model or the data is invalid. No run was started.
        Stopped: The sweep was stopped. `tunekit.resume_sweep` resumes it.
    """
    axes = axes_of(values)
    all_changes, search = _chosen(axes, random, optuna, seed)
    recipe = absolute(read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)[0])
    if recipe.output.dir is not None or "output.dir" in axes:
        problem = "output.dir: unsupported in a sweep: each run has its own folder in runs/"
        raise RecipeError(problem, hint="set output.dir=null")
    begun = _planned(recipe, corners(axes) if search == "optuna" else all_changes, parallel)
    num_runs = len(all_changes) or optuna or 0
    begun.check_disk(num_runs)
    measure = measure_of(begun.plans[0], by)
    spec = Spec(axes, search, num_runs, seed, measure, begun.parallel, begun.one_device_each)
    new_sweep = Sweep.create(recipe, spec, all_changes)
    if on_event is not None:
        plans, estimate = begun.variants(recipe), begun.total(num_runs)
        on_event({"event": "sweep", "sweep": new_sweep, "plans": plans, "estimate": estimate})
    conduct(new_sweep, on_event)
    return new_sweep


def _chosen(
    axes: Mapping[str, Axis], random: int | None, optuna: int | None, seed: int
) -> tuple[list[Changes], Search]:
    """The combinations, and how they are chosen; none yet where Optuna chooses."""
    if not axes:
        raise RecipeError("no key has several values", hint="pass a list: train.learning_rate=1e-5,1e-4")
    if random is not None and optuna is not None:
        raise RecipeError("--random and --optuna are mutually exclusive", hint="pass one of them")
    if random is not None:
        return drawn(axes, random, seed), "random"
    if optuna is None:
        return grid(axes), "grid"
    check_number(axes, optuna)
    check_installed()
    return [], "optuna"


_Made = TypeVar("_Made")


class _Planned:
    """The plans of a sweep's runs, and how many are computed at once."""

    def __init__(self, all_changes: Sequence[Changes], plans: Sequence[Plan], parallel: int, *, each: bool) -> None:
        self.all_changes, self.plans, self.parallel, self.one_device_each = all_changes, plans, parallel, each

    def variants(self, recipe: Recipe) -> Variants:
        """The plans as rows of a table."""
        pairs = zip(self.all_changes, self.plans, strict=True)
        return Variants(recipe, tuple(Variant(None, changes, plan) for changes, plan in pairs))

    def total(self, num_runs: int) -> tuple[Range | None, Range | None]:
        """Seconds, and US dollars, of so many runs; None where that is not known."""
        speeds = [plan.speed for plan in self.plans]
        seconds = [speed.seconds for speed in speeds if speed is not None and speed.seconds is not None]
        costs = [speed.cost_usd for speed in speeds if speed is not None and speed.cost_usd is not None]
        share = num_runs / len(self.plans)
        return self._sum(seconds, share / self.parallel), self._sum(costs, share)

    def check_disk(self, num_runs: int) -> None:
        """Refuse so many runs if they would fill the disk together, each of which has room alone.

        Raises:
            PlanError: They would.
        """
        place, sizes = place_of_run(self.plans[0].recipe), [plan.saving.run_bytes or 0 for plan in self.plans]
        needed, free = sum(sizes) * num_runs // len(sizes), free_bytes(place)
        if needed > free:
            problem = f"{num_runs} runs need up to {gib(needed)} on the disk of {place.absolute()}, {gib(free)} free"
            hint = f"free {gib(needed - free)} there, or try fewer combinations"
            raise PlanError(problem, hint=hint, needed_bytes=needed, limit_bytes=free)

    def _sum(self, ranges: Sequence[Range], factor: float) -> Range | None:
        if len(ranges) < len(self.plans):
            return None
        return Range(low=sum(item.low for item in ranges), high=sum(item.high for item in ranges)).times(factor)


def _planned(recipe: Recipe, all_changes: Sequence[Changes], parallel: int | None) -> _Planned:
    """Check and plan every combination: on one accelerator each where there are several, or on all of them.

    Raises:
        TunekitError: Some cannot be trained so. All are named.
    """
    originals = [recipe] * len(all_changes)
    recipes = _each(lambda base, changes: read_recipe(base, to_words(changes))[0], originals, all_changes)

    def plans_on(hardware: Hardware) -> list[Plan]:
        lookup = Lookup([None], probe_model, here=hardware)
        return _each(lambda changed, _: check_recipe(changed, lookup)[0], recipes, all_changes)

    whole = when_served(probe_hardware())
    num = len(whole.accelerators)
    if parallel is not None and num and parallel > num:
        raise PlanError(f"--parallel {parallel}: accelerators available: {num}", hint="each run needs at least one")
    each = num > 1 and parallel != 1
    if each:
        single = whole.model_copy(update={"accelerators": whole.freest(1)})
        try:
            plans = plans_on(single)
            return _Planned(all_changes, plans, min(parallel or num, len(plans)), each=True)
        except PlanError:
            if parallel is not None:
                raise
    return _Planned(all_changes, plans_on(whole), 1 if num else parallel or 1, each=False)


def _each(
    make: Callable[[Recipe, Changes], _Made], recipes: Sequence[Recipe], all_changes: Sequence[Changes]
) -> list[_Made]:
    """Return what is made of each combination and its recipe.

    Raises:
        TunekitError: Some have faults, of the first one's kind. One that holds for several is told once.
    """
    made: list[_Made] = []
    faults: dict[str, tuple[type[TunekitError], list[Changes]]] = {}
    for recipe, changes in zip(recipes, all_changes, strict=True):
        try:
            made.append(make(recipe, changes))
        except TunekitError as error:
            faults.setdefault(str(error), (type(error), []))[1].append(changes)
    if not faults:
        return made
    lines = [f"{_which(changes, len(all_changes))}{words}" for words, (_, changes) in faults.items()]
    kind = next(iter(faults.values()))[0]
    raise kind("\n".join(lines))


def _which(changes: Sequence[Changes], num: int) -> str:
    """Return which of so many combinations a fault holds for; nothing if all."""
    if len(changes) == num:
        return ""
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"with {words_of(changes[0])}{more}: "
