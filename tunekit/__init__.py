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
    from tunekit.accelerators import DeviceState, devices
    from tunekit.api import (
        check,
        compare_plans,
        data_report,
        fit,
        launch,
        plan,
        preview,
        resume,
        stop,
        sweep_plans,
        train,
        try_rewards,
    )
    from tunekit.data.files import DATA_SUFFIXES
    from tunekit.data.preview import DataPreview, RowPreview, ShownSequence
    from tunekit.data.report import DataReport, Sample, SourceReport
    from tunekit.detached import start, start_resume
    from tunekit.display import Progress
    from tunekit.display_plan import plan_figures
    from tunekit.errors import PlanError, Stopped, TunekitError
    from tunekit.inline import ui
    from tunekit.planner.machines import machines
    from tunekit.planner.plan import Plan, gib
    from tunekit.recipe.difference import recipe_diff
    from tunekit.recipe.entries import UNSET, Entry, recipe_entries
    from tunekit.recipe.library import ShippedRecipe, list_examples, list_recipes, recipe_text
    from tunekit.recipe.load import load_recipe, read_text
    from tunekit.recipe.migrate.migration import migrate
    from tunekit.recipe.migrate.report import Migration
    from tunekit.recipe.places import Fault
    from tunekit.recipe.reach import named_paths
    from tunekit.recipe.rewrite import edit_text, short_recipe
    from tunekit.recipe.schema import Recipe
    from tunekit.redact import redacted
    from tunekit.repetition import rerun
    from tunekit.run.agreement import Agreement
    from tunekit.run.chat import Talk, chat
    from tunekit.run.comparison import Comparison, compare
    from tunekit.run.deleting import delete_run
    from tunekit.run.diagnosis import Diagnosis, diagnose_run
    from tunekit.run.effects import EditEffect, effects_of
    from tunekit.run.evaluate import evaluate
    from tunekit.run.evaluation import Estimate, Evaluation, Score, evaluations_of
    from tunekit.run.events import Event
    from tunekit.run.export import Export, export
    from tunekit.run.generate import Generated, generate
    from tunekit.run.kept import Checkpoint, checkpoints
    from tunekit.run.measures import direction_of, judged_by
    from tunekit.run.origin import check_text
    from tunekit.run.reader import EventReader, Series, last_events
    from tunekit.run.report import report
    from tunekit.run.run import Run, find_run, list_runs, set_tags
    from tunekit.run.serve import serve
    from tunekit.run.stop import stop_wish
    from tunekit.run.trial import RewardTrial
    from tunekit.sweeps.begin import sweep
    from tunekit.sweeps.conduct import resume_sweep, stop_sweep
    from tunekit.sweeps.folder import Sweep, find_sweep, list_sweeps

__version__ = "0.1.0"

__all__ = [
    "DATA_SUFFIXES",
    "UNSET",
    "Agreement",
    "Checkpoint",
    "Comparison",
    "DataPreview",
    "DataReport",
    "DeviceState",
    "Diagnosis",
    "EditEffect",
    "Entry",
    "Estimate",
    "Evaluation",
    "Event",
    "EventReader",
    "Export",
    "Fault",
    "Generated",
    "Migration",
    "Plan",
    "PlanError",
    "Progress",
    "Recipe",
    "RewardTrial",
    "RowPreview",
    "Run",
    "Sample",
    "Score",
    "Series",
    "ShippedRecipe",
    "ShownSequence",
    "SourceReport",
    "Stopped",
    "Sweep",
    "Talk",
    "TunekitError",
    "chat",
    "check",
    "check_text",
    "checkpoints",
    "compare",
    "compare_plans",
    "data_report",
    "delete_run",
    "devices",
    "diagnose_run",
    "direction_of",
    "edit_text",
    "effects_of",
    "evaluate",
    "evaluations_of",
    "export",
    "find_run",
    "find_sweep",
    "fit",
    "generate",
    "gib",
    "judged_by",
    "last_events",
    "launch",
    "list_examples",
    "list_recipes",
    "list_runs",
    "list_sweeps",
    "load_recipe",
    "machines",
    "migrate",
    "named_paths",
    "plan",
    "plan_figures",
    "preview",
    "read_text",
    "recipe_diff",
    "recipe_entries",
    "recipe_text",
    "redacted",
    "report",
    "rerun",
    "resume",
    "resume_sweep",
    "serve",
    "set_tags",
    "short_recipe",
    "start",
    "start_resume",
    "stop",
    "stop_sweep",
    "stop_wish",
    "sweep",
    "sweep_plans",
    "train",
    "try_rewards",
    "ui",
]

_HOMES = {
    "Agreement": "tunekit.run.agreement",
    "DATA_SUFFIXES": "tunekit.data.files",
    "Checkpoint": "tunekit.run.kept",
    "Comparison": "tunekit.run.comparison",
    "DataPreview": "tunekit.data.preview",
    "DataReport": "tunekit.data.report",
    "DeviceState": "tunekit.accelerators",
    "Diagnosis": "tunekit.run.diagnosis",
    "EditEffect": "tunekit.run.effects",
    "Entry": "tunekit.recipe.entries",
    "Estimate": "tunekit.run.evaluation",
    "Evaluation": "tunekit.run.evaluation",
    "Event": "tunekit.run.events",
    "EventReader": "tunekit.run.reader",
    "Export": "tunekit.run.export",
    "Fault": "tunekit.recipe.places",
    "Generated": "tunekit.run.generate",
    "Migration": "tunekit.recipe.migrate.report",
    "Plan": "tunekit.planner.plan",
    "PlanError": "tunekit.errors",
    "Progress": "tunekit.display",
    "Recipe": "tunekit.recipe.schema",
    "RewardTrial": "tunekit.run.trial",
    "RowPreview": "tunekit.data.preview",
    "Sample": "tunekit.data.report",
    "SourceReport": "tunekit.data.report",
    "Run": "tunekit.run.run",
    "Score": "tunekit.run.evaluation",
    "Series": "tunekit.run.reader",
    "ShippedRecipe": "tunekit.recipe.library",
    "ShownSequence": "tunekit.data.preview",
    "Stopped": "tunekit.errors",
    "Sweep": "tunekit.sweeps.folder",
    "Talk": "tunekit.run.chat",
    "TunekitError": "tunekit.errors",
    "UNSET": "tunekit.recipe.entries",
    "chat": "tunekit.run.chat",
    "check": "tunekit.api",
    "check_text": "tunekit.run.origin",
    "checkpoints": "tunekit.run.kept",
    "compare": "tunekit.run.comparison",
    "compare_plans": "tunekit.api",
    "data_report": "tunekit.api",
    "delete_run": "tunekit.run.deleting",
    "devices": "tunekit.accelerators",
    "diagnose_run": "tunekit.run.diagnosis",
    "direction_of": "tunekit.run.measures",
    "edit_text": "tunekit.recipe.rewrite",
    "effects_of": "tunekit.run.effects",
    "evaluate": "tunekit.run.evaluate",
    "evaluations_of": "tunekit.run.evaluation",
    "export": "tunekit.run.export",
    "find_run": "tunekit.run.run",
    "find_sweep": "tunekit.sweeps.folder",
    "fit": "tunekit.api",
    "generate": "tunekit.run.generate",
    "gib": "tunekit.planner.plan",
    "judged_by": "tunekit.run.measures",
    "last_events": "tunekit.run.reader",
    "launch": "tunekit.api",
    "list_examples": "tunekit.recipe.library",
    "list_recipes": "tunekit.recipe.library",
    "migrate": "tunekit.recipe.migrate.migration",
    "list_runs": "tunekit.run.run",
    "list_sweeps": "tunekit.sweeps.folder",
    "load_recipe": "tunekit.recipe.load",
    "machines": "tunekit.planner.machines",
    "named_paths": "tunekit.recipe.reach",
    "plan": "tunekit.api",
    "plan_figures": "tunekit.display_plan",
    "preview": "tunekit.api",
    "read_text": "tunekit.recipe.load",
    "recipe_diff": "tunekit.recipe.difference",
    "recipe_entries": "tunekit.recipe.entries",
    "recipe_text": "tunekit.recipe.library",
    "redacted": "tunekit.redact",
    "rerun": "tunekit.repetition",
    "report": "tunekit.run.report",
    "resume": "tunekit.api",
    "resume_sweep": "tunekit.sweeps.conduct",
    "serve": "tunekit.run.serve",
    "set_tags": "tunekit.run.run",
    "short_recipe": "tunekit.recipe.rewrite",
    "start": "tunekit.detached",
    "start_resume": "tunekit.detached",
    "stop": "tunekit.api",
    "stop_sweep": "tunekit.sweeps.conduct",
    "stop_wish": "tunekit.run.stop",
    "sweep": "tunekit.sweeps.begin",
    "sweep_plans": "tunekit.api",
    "train": "tunekit.api",
    "try_rewards": "tunekit.api",
    "ui": "tunekit.inline",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunekit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
