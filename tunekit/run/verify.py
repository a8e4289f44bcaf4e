"""A look at what was built, in every process, before the first step: is it what was planned?

Several set-ups of these libraries run something else than what they were asked for and say nothing. So nothing is
believed that can be looked at: the number of processes, the engine, the placement of real parameters, their types.
"""

from typing import TYPE_CHECKING, Any

from tunekit.errors import RunError
from tunekit.planner.plan import Plan
from tunekit.run import zero

if TYPE_CHECKING:
    from transformers import Trainer


def verify(trainer: "Trainer", plan: Plan) -> dict[str, Any]:
    """Compare the engine of a trainer whose model is wrapped with the plan.

    Returns:
        What runs, for the `engine` event.

    Raises:
        RunError: It is not what was planned.
    """
    accelerator = trainer.accelerator
    _same("processes", plan.layout.num_processes, accelerator.num_processes)
    _same("device", plan.device.kind, accelerator.device.type)
    engine: dict[str, Any] = {"num_processes": accelerator.num_processes, "strategy": plan.layout.strategy}
    if plan.layout.strategy.startswith("zero"):
        runs = zero.found(trainer, plan)
        for what, value in zero.planned(trainer, plan).items():
            _same(what, value, runs.get(what))
        engine |= runs
    return engine


def _same(what: str, planned: object, found: object) -> None:
    if planned != found:
        raise RunError(
            f"{what}: {planned} planned, {found} found", hint="this is a fault of the set-up: `tunekit doctor`"
        )
