"""A run made ready to go on, by the processes and on the machines that are there: between `api` and `run.resume`."""

from collections.abc import Callable, Sequence

from tunekit.errors import PlanError
from tunekit.lookup import Lookup
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.probe.model import probe_model
from tunekit.probe.nodes import check_may_go_back
from tunekit.recipe.schema import Recipe
from tunekit.run.events import Event
from tunekit.run.launch_hosts import for_hosts
from tunekit.run.place import place_of
from tunekit.run.resume import carry_out, decide
from tunekit.run.run import Run


def resumed(
    run: Run,
    overrides: Sequence[str] = (),
    *,
    from_: str | None = None,
    weights_only: bool = False,
    nodes: Sequence[str] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """A run that its processes can go on with, as it was or edited.

    Args:
        run: The run.
        overrides: Edits of its recipe.
        from_: The checkpoint to go on from.
        weights_only: Begin anew with the weights of that checkpoint.
        nodes: Machines that are named.
        on_event: Told the plan.

    Raises:
        TunekitError: It cannot be gone on with, or not so.
    """
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
        """Whether the devices are those of a plan: where others start processes, and where there are none, they are."""
        if nodes:
            return len(nodes) == plan.num_nodes
        if started > 1 or plan.num_nodes > 1 or plan.device.kind == "cpu":
            return started in (1, plan.layout.num_processes)
        here = lookup.hardware(None)
        return here.device.name == plan.device.name and here.num_accelerators >= plan.layout.num_processes

    decision = decide(run, overrides, make_plan=make_plan, is_here=is_here, checkpoint=from_, weights_only=weights_only)
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
