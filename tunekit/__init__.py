"""tunekit: fine-tune and align open-weight language models. Recipe → Plan → Run.

    import tunekit

    plan = tunekit.plan("sft/quickstart")
    run = tunekit.train(plan, on_event=tunekit.Progress())
    run.metrics()

The names load when they are first used, so that importing tunekit costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunekit.api import compare, data_report, fit, launch, plan, resume, stop, sweep, train, try_rewards
    from tunekit.data.report import DataReport
    from tunekit.display import Progress
    from tunekit.errors import Stopped, TunekitError
    from tunekit.planner.plan import Plan
    from tunekit.recipe.load import load_recipe
    from tunekit.recipe.schema import Recipe
    from tunekit.run.chat import Talk, chat, checkpoints
    from tunekit.run.export import Export, export
    from tunekit.run.report import report
    from tunekit.run.run import Run, find_run, list_runs

__version__ = "0.1.0"

__all__ = [
    "DataReport",
    "Export",
    "Plan",
    "Progress",
    "Recipe",
    "Run",
    "Stopped",
    "Talk",
    "TunekitError",
    "chat",
    "checkpoints",
    "compare",
    "data_report",
    "export",
    "find_run",
    "fit",
    "launch",
    "list_runs",
    "load_recipe",
    "plan",
    "report",
    "resume",
    "stop",
    "sweep",
    "train",
    "try_rewards",
]

_HOMES = {
    "DataReport": "tunekit.data.report",
    "Export": "tunekit.run.export",
    "Plan": "tunekit.planner.plan",
    "Progress": "tunekit.display",
    "Recipe": "tunekit.recipe.schema",
    "Run": "tunekit.run.run",
    "Stopped": "tunekit.errors",
    "Talk": "tunekit.run.chat",
    "TunekitError": "tunekit.errors",
    "chat": "tunekit.run.chat",
    "checkpoints": "tunekit.run.chat",
    "compare": "tunekit.api",
    "data_report": "tunekit.api",
    "export": "tunekit.run.export",
    "find_run": "tunekit.run.run",
    "fit": "tunekit.api",
    "launch": "tunekit.api",
    "list_runs": "tunekit.run.run",
    "load_recipe": "tunekit.recipe.load",
    "plan": "tunekit.api",
    "report": "tunekit.run.report",
    "resume": "tunekit.api",
    "stop": "tunekit.api",
    "sweep": "tunekit.api",
    "train": "tunekit.api",
    "try_rewards": "tunekit.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunekit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
