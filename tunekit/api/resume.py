"""A run made ready to go on, by the processes and on the machines that are there, and the run that a recipe has."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tunekit.api.plan_inputs import Lookup
from tunekit.errors import PlanError, RunError
from tunekit.launching.ssh_hosts import for_hosts
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.probe.model import probe_model
from tunekit.probe.nodes import check_may_go_back, with_started
from tunekit.recipe.edits import edits
from tunekit.recipe.schema import Recipe
from tunekit.runs.available_actions import ENDED_EARLY, can_go_on, has_checkpoints
from tunekit.runs.events import Event
from tunekit.runs.fingerprints import continued
from tunekit.runs.prepared_data import absolute
from tunekit.runs.run import Run, list_runs
from tunekit.runs.small_files import place_of
from tunekit.training.checkpointing.resume import carry_out, decide


def run_of(recipe: Recipe) -> Run | None:
    """The run that a recipe may mean to go on with; None where it has none.

    That is the one in its `output.dir`, whatever has become of it. Where it names none, it is the newest run of its
    name with the same recipe, if that has ended early and can be gone on with.
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
    recipe = absolute(continued(with_started(recipe, os.environ)))
    written_output = recipe.output
    prompts = stored.output.sample_prompts if written_output.sample_prompts is None else written_output.sample_prompts
    output = written_output.model_copy(
        update={"sample_prompts": prompts, "dir": stored.output.dir, "name": stored.output.name}
    )
    return recipe.model_copy(update={"output": output})


def resumed(
    run: Run,
    overrides: Sequence[str] = (),
    *,
    recipe: Recipe | None = None,
    from_: str | None = None,
    weights_only: bool = False,
    nodes: Sequence[str] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """A run that its processes can go on with, as it was or edited.

    Args:
        run: The run.
        overrides: Edits of its recipe.
        recipe: Another recipe in the place of its own. It may be one of a run that has no checkpoint yet.
        from_: The checkpoint to go on from.
        weights_only: Begin anew with the weights of that checkpoint.
        nodes: Machines that are named.
        on_event: Told the plan.

    Raises:
        TunekitError: It cannot be gone on with, or not so.
    """
    if recipe is not None and not has_checkpoints(run) and run.state in ENDED_EARLY:
        return _begun_again(run, recipe, on_event)
    started = place_of().num_processes
    planned = run.recipe.parallel.num_processes
    if started > 1 and started not in (planned, run.plan.layout.num_processes):
        overrides = (*overrides, f"parallel.num_processes={started}")
    lookup = Lookup([None], probe_model)

    def make_plan(recipe: Recipe, earlier: Plan) -> Plan:
        hardware = for_hosts(recipe, nodes)[1] if nodes else lookup.hardware(None)
        model, teacher = lookup.model(recipe.model), lookup.teacher(recipe)
        return resolve(recipe, hardware, model, earlier.data, lookup.records, teacher)

    def is_here(plan: Plan) -> bool:
        """Return whether the plan's devices are here: where others start the processes, and where it has none, they
        are.
        """
        if nodes:
            return len(nodes) == plan.num_nodes
        if started > 1 or plan.num_nodes > 1 or plan.device.kind == "cpu":
            return started in (1, plan.layout.num_processes)
        here = lookup.hardware(None)
        return here.device.name == plan.device.name and here.num_accelerators >= plan.layout.num_processes

    decision = decide(
        run,
        overrides,
        recipe=None if recipe is None else as_stored(recipe, run.recipe),
        make_plan=make_plan,
        is_here=is_here,
        checkpoint=from_,
        weights_only=weights_only,
    )
    plan = decision.plan
    if started not in (1, plan.layout.num_processes):
        raise PlanError(
            f"{run.name} is planned for {plan.layout.num_processes} processes, and the launcher started {started}",
            hint="start as many, or leave it to `tunekit resume` alone",
        )
    if started > 1:
        check_may_go_back(run.recipe, "a launcher")
    if plan.num_nodes > 1 and started == 1 and not nodes:
        raise PlanError(f"{run.name} was planned for {plan.num_nodes} nodes", hint="name them with --nodes HOST,HOST")
    notes = carry_out(decision)
    if on_event is not None:
        on_event({"event": "plan", "run": run, "plan": plan, "notes": list(notes)})
    return run


def _begun_again(run: Run, recipe: Recipe, on_event: Callable[[Event], None] | None) -> Run:
    """A run that ended before its first checkpoint, to begin from the beginning."""
    if not is_same(recipe, run):
        raise RunError(
            f"{run.path} has a run of another recipe, without a checkpoint", hint="name a new folder in output.dir"
        )
    if on_event is not None:
        on_event({"event": "plan", "run": run, "plan": run.plan, "notes": ["begins: there is no checkpoint yet"]})
    return run
