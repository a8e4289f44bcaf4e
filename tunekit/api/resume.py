"""Preparation of a run to be resumed by the processes and on the machines at hand."""

from collections.abc import Callable, Sequence

from tunekit.api.plan_inputs import Lookup, as_stored, is_same
from tunekit.errors import PlanError, RunError
from tunekit.launching.ssh_hosts import for_hosts
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.probe.model import probe_model
from tunekit.probe.nodes import check_for_launcher
from tunekit.recipe.load import AnyOverrides, override_words
from tunekit.recipe.schema import Recipe
from tunekit.runs.available_actions import ENDED_EARLY, has_checkpoints
from tunekit.runs.events import Event
from tunekit.runs.run import Run
from tunekit.runs.small_files import place_of
from tunekit.training.checkpointing.resume import carry_out, check_files, decide


def resumed(
    run: Run,
    overrides: AnyOverrides = (),
    *,
    recipe: Recipe | None = None,
    from_: str | None = None,
    weights_only: bool = False,
    nodes: Sequence[str] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Prepare a run to be resumed by its processes, unchanged or edited.

    Args:
        run: The run.
        overrides: Edits of its recipe.
        recipe: Another recipe in the place of its own. It may be one of a run that has no checkpoint yet.
        from_: The checkpoint to resume from.
        weights_only: Start over with the weights of that checkpoint.
        nodes: Machines that are named.
        on_event: Called with the plan.

    Raises:
        TunekitError: It cannot be resumed, or not with these edits.
    """
    if recipe is not None and not has_checkpoints(run) and run.state in ENDED_EARLY:
        # It ended before its first checkpoint, and begins from the beginning.
        if not is_same(recipe, run):
            problem = f"{run.path} has a run of another recipe, without a checkpoint"
            raise RunError(problem, hint="set output.dir to a new folder")
        check_files(run)
        if on_event is not None:
            on_event({"event": "plan", "run": run, "plan": run.plan, "notes": ["starts over: no checkpoint yet"]})
        return run
    started = place_of().num_processes
    planned = run.recipe.parallel.num_processes
    if started > 1 and started not in (planned, run.plan.layout.num_processes):
        overrides = (*override_words(overrides), f"parallel.num_processes={started}")
    lookup = Lookup([None], probe_model, tracing="unknown", on_event=on_event)

    def make_plan(recipe: Recipe, earlier: Plan) -> Plan:
        hardware = for_hosts(recipe, nodes)[1] if nodes else lookup.hardware(None)
        model, teacher = lookup.traced_model(recipe, hardware), lookup.teacher(recipe)
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
        problem = f"{run.name} is planned for {plan.layout.num_processes} processes, but the launcher started {started}"
        raise PlanError(problem, hint="start as many, or run `tunekit resume` without a launcher")
    if started > 1:
        check_for_launcher(run.recipe, "a launcher")
    if plan.num_nodes > 1 and started == 1 and not nodes:
        raise PlanError(f"{run.name} was planned for {plan.num_nodes} nodes", hint="pass them with --nodes HOST,HOST")
    notes = carry_out(decision)
    if on_event is not None:
        on_event({"event": "plan", "run": run, "plan": plan, "notes": list(notes)})
    return run
