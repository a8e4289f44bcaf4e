"""The verbs: the single path that the command line, notebooks and every other door go through."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from tunekit.data.load import LoadedData, load_data
from tunekit.data.prepare import Progress
from tunekit.data.report import DataReport
from tunekit.errors import PlanError
from tunekit.methods import sft
from tunekit.planner.facts import Hardware, ModelFacts
from tunekit.planner.machines import find_machine
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.planner.speed import RunRecord
from tunekit.probe.hardware import probe_hardware
from tunekit.probe.model import probe_model, sketch_model
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import ModelSection, Recipe
from tunekit.run.events import Event
from tunekit.run.history import recorded_runs
from tunekit.run.prepare import counted_facts, prepare, record
from tunekit.run.quiet import library_words_to
from tunekit.run.run import Run

Source = str | Path | Mapping[str, Any] | Recipe
"""A recipe: a file's path, the name of a shipped one, a mapping of its sections, or a loaded one."""


def plan(source: Source, overrides: Sequence[str] = (), *, on: str | None = None) -> Plan:
    """How a recipe would run. Reads the rows and the model's headers; loads neither weights nor torch.

    A model without weights is planned for from its config.json, and where the hub cannot be reached, a well-known one
    from tunekit's own table; training needs the files.

    Args:
        source: The recipe.
        overrides: Changes to it, such as `train.max_steps=10`.
        on: Another machine than this one: `h200`, `8xh100`, `2x8xrtx5090`, or a YAML file that describes one.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, there is no such machine, or nothing fits it.
    """
    recipe = load_recipe(source, overrides)
    hardware = None if on is None else find_machine(on).hardware()
    return _look(recipe, hardware, sketch_model).plan(recipe)


def compare(source: Source, overrides: Sequence[str] = (), *, on: Sequence[str]) -> dict[str, Plan | PlanError]:
    """How a recipe would run on each of several machines, or why it would not.

    Args:
        source: The recipe.
        overrides: Changes to it.
        on: The machines, named as for `plan`.

    Raises:
        TunekitError: The recipe, the model or the data has a fault, or there is no such machine.
    """
    recipe = load_recipe(source, overrides)
    machines = {name: find_machine(name) for name in on}
    model, data, records = sketch_model(recipe.model), load_data(recipe.data, sft.LEARNER), recorded_runs()
    plans: dict[str, Plan | PlanError] = {}
    for name, machine in machines.items():
        try:
            plans[name] = _Found(machine.hardware(), model, data, records).plan(recipe)
        except PlanError as error:
            plans[name] = error
    return plans


def check(source: Source, overrides: Sequence[str] = ()) -> list[str]:
    """Check a recipe, its model, its data and whether they fit this machine; return what is worth knowing.

    Raises:
        TunekitError: There is a fault.
    """
    recipe = load_recipe(source, overrides)
    found = _look(recipe)
    found.plan(recipe)
    return found.data.notes


def train(
    source: Source | Plan, overrides: Sequence[str] = (), *, on_event: Callable[[Event], None] | None = None
) -> Run:
    """Train, in this process, and return the finished run.

    Args:
        source: The recipe, or a plan of it.
        overrides: Changes to the recipe.
        on_event: Called with every event of the run as it happens; `tunekit.Progress()` shows them.

    Raises:
        TunekitError: Something that the user can mend went wrong. The run folder's status says so too.
    """
    from tunekit.run.worker import work

    recipe = load_recipe(source.recipe if isinstance(source, Plan) else source, overrides)
    found = _look(recipe)
    _check_runs(found.plan(recipe))
    words = StringIO()
    with library_words_to(words):
        prepared = prepare(recipe, found.data, _progress_to(on_event))
        final = resolve(record(recipe, found.data), found.hardware, found.model, prepared.facts, found.records)
        run = Run.create(final)
        prepared.save(run.path / "data")
    (run.path / "log.txt").write_text(words.getvalue(), encoding="utf-8")
    if on_event is not None:
        on_event({"event": "plan", "run": run, "plan": final, "notes": prepared.notes})
    work(run, on_event)
    return run


def _check_runs(plan: Plan) -> None:
    """Refuse to train in a layout that is only planned for so far."""
    if plan.layout.strategy != "single":
        raise PlanError(
            f"{plan.layout.name} over {plan.layout.num_processes} devices can be planned, but not trained in yet",
            hint="set parallel.strategy=single to train on one device",
        )


def data_report(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    num_samples: int = 3,
    on_event: Callable[[Event], None] | None = None,
) -> DataReport:
    """What a recipe trains and evaluates on, as its model will see it. Loads the tokenizer and no weights.

    Args:
        source: The recipe.
        overrides: Changes to it, such as `data.max_length=512`.
        num_samples: Sequences of each source to take as samples.
        on_event: Told how far the rows are; `tunekit.Progress()` shows it.

    Raises:
        TunekitError: The recipe, the tokenizer or the data has a fault.
    """
    recipe = load_recipe(source, overrides)
    data = load_data(recipe.data, sft.LEARNER)
    with library_words_to(StringIO()):
        return prepare(recipe, data, _progress_to(on_event), num_samples=num_samples).report


def _progress_to(on_event: Callable[[Event], None] | None) -> Progress | None:
    """What tells a listener how far the rows of a source are, if there is one."""
    if on_event is None:
        return None
    return lambda source, done, total: on_event({"event": "rows", "source": source, "done": done, "total": total})


@dataclass(frozen=True)
class _Found:
    """What a plan is made from, looked up once."""

    hardware: Hardware
    model: ModelFacts
    data: LoadedData
    records: list[RunRecord]

    def plan(self, recipe: Recipe) -> Plan:
        """A plan from rows that are counted but not yet tokenised."""
        return resolve(recipe, self.hardware, self.model, counted_facts(recipe, self.data), self.records)


def _look(
    recipe: Recipe, hardware: Hardware | None = None, probe: Callable[[ModelSection], ModelFacts] = probe_model
) -> _Found:
    """What there is to plan from, on this machine where no other is given."""
    return _Found(
        model=probe(recipe.model),
        data=load_data(recipe.data, sft.LEARNER),
        hardware=hardware or probe_hardware(),
        records=recorded_runs(),
    )
