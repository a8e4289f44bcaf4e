"""Inputs of plans: machines, models, rows and finished runs, each read once for any number of plans.

And the run that a recipe has already, of which a plan may be the continuation.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tunekit.api.chain import Chain, Link
from tunekit.api.traces import Tracing, trace_model
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.sources.load import LoadedData, load_data
from tunekit.data.tokenization.first_rows import check_first_rows
from tunekit.errors import ModelError, PlanError, TunekitError
from tunekit.estimates.facts import Hardware, ModelFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.models.model_config import is_known, known_models
from tunekit.planner.plan import Plan
from tunekit.planner.ranking import alternatives
from tunekit.planner.resolve import resolve
from tunekit.planner.variants import Largest, Planned, Variant, largest_batch, largest_length, largest_models
from tunekit.probe.hardware import probe_hardware
from tunekit.probe.model import chat_template_of, known_model, sketch_model, vocabulary_of
from tunekit.probe.nodes import with_started
from tunekit.recipe.edits import edits
from tunekit.recipe.methods import has_teacher
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.available_actions import ENDED_EARLY, can_go_on
from tunekit.runs.events import Event
from tunekit.runs.fingerprints import continued, inherited, settled
from tunekit.runs.kept_inputs import with_inputs_of
from tunekit.runs.prepared_data import absolute, counted_facts
from tunekit.runs.record import free_bytes, place_of_run, recorded_runs
from tunekit.runs.run import Run, list_runs

AFTER_READING = {
    "max_length",
    "packing",
    "padding_free",
    "weight_by",
    "stopping_strategy",
    "mixing",
    "shuffle",
    "curriculum",
}
"""Fields of the data section that say what becomes of rows once they are read."""


class Lookup:
    """Inputs of plans, cached: each model and each set of rows is read once, on first use."""

    def __init__(
        self,
        machines: Sequence[str | None],
        look: Callable[[ModelSection], ModelFacts] = sketch_model,
        here: Hardware | None = None,
        *,
        shares_disk: bool = True,
        tracing: Tracing = "stored",
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        """Find the machines.

        Args:
            machines: Their names, None for this one.
            look: How facts of a model are found.
            here: Hardware of this machine. Default: probed.
            shares_disk: Whether what that writes is on the disk of the machine that asks.
            tracing: Models of whose step a trace is made.
            on_event: Called before one is made.

        Raises:
            PlanError: There is no such machine.
        """
        self._tracing, self._on_event = tracing, on_event
        self._machines = {name: find_machine(name) for name in machines if name is not None}
        self._here = here
        self._shares_disk = shares_disk
        self._look = look
        self._models: dict[str, ModelFacts] = {}
        self._data: dict[str, LoadedData] = {}
        self._checked: set[str] = set()
        self.records = recorded_runs()

    def hardware(self, machine: str | None) -> Hardware:
        """Return the facts about a machine.

        Raises:
            PlanError: There is no plan for its platform.
        """
        if machine is not None:
            return self._machines[machine].hardware()
        if self._here is None:
            self._here = probe_hardware()
        return self._here

    def hardware_for(self, recipe: Recipe, machine: str | None = None) -> Hardware:
        """The same, with what is free on the disk of a recipe's run, where that is one of this machine."""
        hardware = self.hardware(machine)
        if machine is not None or not self._shares_disk:
            return hardware
        return hardware.model_copy(update={"disk_free_bytes": free_bytes(place_of_run(recipe))})

    def model(self, section: ModelSection) -> ModelFacts:
        """Facts of a model."""
        section = settled(section)
        key = section.model_dump_json()
        if key not in self._models:
            self._models[key] = self._look(section)
        return self._models[key]

    def traced_model(self, recipe: Recipe, hardware: Hardware) -> ModelFacts:
        """Facts of a recipe's model, whose estimates a trace corrects where there is one."""
        return trace_model(self.model(recipe.model), recipe, hardware, self._tracing, self._on_event)

    def teacher(self, recipe: Recipe) -> ModelFacts | None:
        """Facts of the model that a recipe's learns from; None where there is none.

        Raises:
            ModelError: It is not there.
        """
        if not has_teacher(recipe.method):
            return None
        try:
            return self.model(recipe.method.teacher)
        except ModelError as error:
            problem = error.problem.removeprefix("model.path: ")
            raise ModelError(f"method.teacher: {problem}", hint=error.hint) from error

    def data(self, recipe: Recipe) -> LoadedData:
        """Rows. Recipes that differ only in how rows become tokens share them."""
        key = self._key(recipe)
        if key not in self._data:
            self._data[key] = load_data(recipe.data, learner_of(recipe.method.type))
        return self._data[key]

    def _check_first_rows(self, recipe: Recipe) -> None:
        """See that the model's chat template takes the first rows, once for each model and set of rows.

        Raises:
            DataError: It does not, or there is none.
        """
        key = recipe.model.model_dump_json() + self._key(recipe)
        if key in self._checked:
            return
        template = chat_template_of(recipe.model)
        if template is not None:
            check_first_rows(self.data(recipe), *template, partial(vocabulary_of, recipe.model))
        self._checked.add(key)

    @staticmethod
    def _key(recipe: Recipe) -> str:
        """Return what two recipes have in common that share rows."""
        return recipe.method.type + recipe.data.model_dump_json(exclude=AFTER_READING)

    def plan(self, recipe: Recipe, machine: str | None = None, model: ModelFacts | None = None) -> Plan:
        """A plan from rows that are counted but not yet tokenised.

        Args:
            recipe: The recipe.
            machine: Where.
            model: The model where it is known already.
        """
        recipe = continued(recipe)
        return self._plan(recipe, machine, model or self.model(recipe.model), recipe.model)

    def _plan(self, recipe: Recipe, machine: str | None, model: ModelFacts, files: ModelSection) -> Plan:
        """Plan a recipe whose model has its tokenizer and its template in some files."""
        data = counted_facts(recipe, self.data(recipe))
        self._check_first_rows(recipe.model_copy(update={"model": files}))
        hardware = self.hardware_for(recipe, machine)
        traced = trace_model(model, recipe, hardware, self._tracing, self._on_event)
        return resolve(recipe, hardware, traced, data, self.records, self.teacher(recipe))

    def chain(self, recipes: Sequence[Recipe], machine: str | None = None) -> Chain:
        """Plan recipes that run one after another, of which each may start from the result of one before.

        Args:
            recipes: The recipes, in their order.
            machine: Where.

        Raises:
            TunekitError: A recipe has no plan; the message names it.
        """
        links: list[Link] = []
        for number, recipe in enumerate(recipes, start=1):
            before = next((link for link in reversed(links) if link.is_meant_by(recipe.model.path)), None)
            try:
                if before is not None:
                    links.append(self._link(recipe, machine, before))
                elif recipe.model.path in [later.output.name for later in recipes[number:]]:
                    problem = f"model.path: {recipe.model.path} comes later in the chain"
                    raise PlanError(problem, hint=f"pass it before {recipe.output.name}")
                else:
                    links.append(Link(self.plan(recipe, machine), recipe.model))
            except TunekitError as error:
                problem = f"{recipe.output.name}: {error.problem}"
                raise PlanError(problem, hint=error.hint) from error
        return Chain(tuple(links))

    def _link(self, recipe: Recipe, machine: str | None, before: Link) -> Link:
        """Plan a recipe that starts from the result of another one."""
        origin, files = before.result(), before.files_for(recipe.model)
        model = self.model(files)
        if origin.adapter is None:
            if model.published_as is not None:
                problem = f"model.path: the types of the weights are known once {before.name} has finished"
                raise PlanError(problem, hint="plan this recipe then")
            model = model.model_copy(update={"dtype": before.plan.trained_dtype})
        model = model.model_copy(update={"origin": origin})
        return Link(self._plan(inherited(recipe, origin), machine, model, files), files, before)

    def plan_or_error(self, recipe: Recipe, machine: str | None, model: ModelFacts | None = None) -> Planned:
        """A plan, or why there is none."""
        try:
            return self.plan(recipe, machine, model)
        except PlanError as error:
            return error

    def alternatives(self, recipe: Recipe, machine: str | None) -> Iterator[Variant]:
        """Yield a recipe as it is on a machine, and with other adapters, precisions and lengths."""
        positions = self.model(recipe.model).positions_for(recipe.model)
        return alternatives(recipe, lambda other: self.plan_or_error(other, machine), machine, positions)

    def largest(self, recipe: Recipe, machine: str | None, what: Largest) -> Iterator[Variant]:
        """Variants of a recipe that show what is the largest that fits a machine."""

        def plan_of(recipe: Recipe) -> Planned:
            return self.plan_or_error(recipe, machine)

        if what == "length":
            return largest_length(recipe, plan_of, machine, self.model(recipe.model).positions_for(recipe.model))
        if what == "batch":
            num_rows = counted_facts(recipe, self.data(recipe)).num_train
            num_devices = max(1, self.hardware(machine).num_accelerators)
            return largest_batch(recipe, plan_of, machine, num_devices=num_devices, num_rows=num_rows)
        # Others have to be built by transformers, and their activations are estimates.
        models = {name: known for name, known in known_models().items() if is_known(known.config)}
        # The largest first; of one size the newer and the trained to chat first.
        sizes = {name: (-models[name].num_params, not models[name].has_chat_template) for name in reversed(models)}

        def plan_of_known(recipe: Recipe) -> Planned:
            return self.plan_or_error(recipe, machine, known_model(recipe.model.path))

        return largest_models(recipe, plan_of_known, machine, sorted(sizes, key=sizes.__getitem__))


def run_of(recipe: Recipe) -> Run | None:
    """Return the run that a recipe may mean to resume; None where it has none.

    That is the one in its `output.dir`, whatever has become of it. Where it names none, it is the newest run of its
    name with the same recipe, if that has ended early and can be resumed.
    """
    if recipe.output.dir is not None:
        path = Path(recipe.output.dir)
        return Run(path) if (path / "status.json").is_file() else None
    mine = re.compile(rf"{re.escape(str(recipe.output.name))}-\d{{8}}-\d{{6}}(-\d+)?")
    for run in list_runs():
        if mine.fullmatch(run.name) and is_same(recipe, run):
            return run if run.state in ENDED_EARLY and can_go_on(run) else None
    return None


def is_same(recipe: Recipe, run: Run) -> bool:
    """Return whether a run was made from a recipe."""
    stored = run.recipe
    return not edits(stored, as_stored(recipe, stored))


def as_stored(recipe: Recipe, stored: Recipe) -> Recipe:
    """A recipe as a run would keep it that keeps another one: what a run fills in is taken from there."""
    recipe = with_inputs_of(absolute(continued(with_started(recipe, os.environ))), stored)
    written_output = recipe.output
    prompts = stored.output.sample_prompts if written_output.sample_prompts is None else written_output.sample_prompts
    output = written_output.model_copy(
        update={"sample_prompts": prompts, "dir": stored.output.dir, "name": stored.output.name}
    )
    return recipe.model_copy(update={"output": output})
