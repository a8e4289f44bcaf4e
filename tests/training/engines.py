"""Runs in several processes for tests: what is computed in them, and what their trainers look like at the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.processes import in_processes


def made(recipe: dict[str, Any], layout: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The folder of a run that is yet to be started.

    Args:
        recipe: What to run.
        layout: What to change in the layout that was planned.
        changes: What to change in the plan besides.
    """
    from tunekit.api import verbs

    run = verbs.make_run(recipe)
    path = run.path / "plan.yaml"
    plan = yaml.safe_load(path.read_text())
    plan["layout"] |= layout or {}
    path.write_text(yaml.safe_dump(plan | changes))
    return run.path.resolve()


def work_in(folder: Path, num: int, look: "Callable[..., Any] | None" = None) -> list[Any]:
    """Work on a run in `num` processes, and return what `look(trainer)` gives in each when the model is saved."""
    return in_processes(num, worked, folder, look)


def worked(folder: Path, look: "Callable[..., Any] | None" = None) -> Any:
    """What one of the processes does."""
    import tunekit.training.engines.engine
    from tunekit.runs.run import Run
    from tunekit.runs.small_files import place_of
    from tunekit.training.worker import work

    seen = []
    save_model = tunekit.training.engines.engine.save_model

    def look_and_save(trainer, plan, path):
        if look is not None:
            seen.append(look(trainer))
        save_model(trainer, plan, path)

    tunekit.training.engines.engine.save_model = look_and_save
    try:
        work(Run(folder), place=place_of())
    finally:
        tunekit.training.engines.engine.save_model = save_model
    return seen[0] if seen else None
