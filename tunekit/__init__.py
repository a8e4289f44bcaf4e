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
    from tunekit.api.background import start, start_resume
    from tunekit.api.devices import DeviceState, devices
    from tunekit.api.notebook import ui
    from tunekit.api.rerun import Agreement, rerun
    from tunekit.api.verbs import (
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
    from tunekit.data.reports.preview import DataPreview, RowPreview, ShownSequence
    from tunekit.data.reports.report import DataReport, Sample, SourceReport
    from tunekit.data.sources.files import DATA_SUFFIXES
    from tunekit.display.console import Progress
    from tunekit.display.plan import plan_figures
    from tunekit.errors import PlanError, Stopped, TunekitError
    from tunekit.estimates.hardware.machines import machines
    from tunekit.evaluation.evaluate import evaluate
    from tunekit.exporting.export import Export, export
    from tunekit.inference.chat import Talk, chat
    from tunekit.inference.generate import Generated, generate
    from tunekit.inference.reward_trial import RewardTrial
    from tunekit.inference.serve import serve
    from tunekit.launching.stop import delete_run
    from tunekit.migration.migration import migrate
    from tunekit.migration.report import Migration
    from tunekit.planner.plan import Plan, gib
    from tunekit.recipe.edits import recipe_diff
    from tunekit.recipe.entries import UNSET, Entry, recipe_entries
    from tunekit.recipe.library import ShippedRecipe, list_examples, list_recipes, recipe_text
    from tunekit.recipe.load import load_recipe, named_paths, read_text
    from tunekit.recipe.methods import MethodInfo, list_methods
    from tunekit.recipe.reading.parse import Fault
    from tunekit.recipe.reading.rewrite import edit_text, short_recipe
    from tunekit.recipe.schema import Recipe
    from tunekit.redact import redacted
    from tunekit.reporting.comparison import Comparison, compare
    from tunekit.reporting.diagnosis import Diagnosis, diagnose_run
    from tunekit.reporting.report import report
    from tunekit.runs.available_actions import stop_wish
    from tunekit.runs.checkpoints.listing import Checkpoint, checkpoints
    from tunekit.runs.evaluation_result import Estimate, Evaluation, Score, evaluations_of
    from tunekit.runs.events import Event, direction_of, judged_by
    from tunekit.runs.fingerprints import check_text
    from tunekit.runs.reader import EventReader, Series, last_events
    from tunekit.runs.run import Run, find_run, list_runs, set_tags
    from tunekit.sweeps.begin import sweep
    from tunekit.sweeps.conduct import resume_sweep, stop_sweep
    from tunekit.sweeps.folder import Sweep, find_sweep, list_sweeps
    from tunekit.training.checkpointing.resume import EditEffect, effects_of

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
    "MethodInfo",
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
    "list_methods",
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
    "Agreement": "tunekit.api.rerun",
    "DATA_SUFFIXES": "tunekit.data.sources.files",
    "Checkpoint": "tunekit.runs.checkpoints.listing",
    "Comparison": "tunekit.reporting.comparison",
    "DataPreview": "tunekit.data.reports.preview",
    "DataReport": "tunekit.data.reports.report",
    "DeviceState": "tunekit.api.devices",
    "Diagnosis": "tunekit.reporting.diagnosis",
    "EditEffect": "tunekit.training.checkpointing.resume",
    "Entry": "tunekit.recipe.entries",
    "Estimate": "tunekit.runs.evaluation_result",
    "Evaluation": "tunekit.runs.evaluation_result",
    "Event": "tunekit.runs.events",
    "EventReader": "tunekit.runs.reader",
    "Export": "tunekit.exporting.export",
    "Fault": "tunekit.recipe.reading.parse",
    "Generated": "tunekit.inference.generate",
    "MethodInfo": "tunekit.recipe.methods",
    "Migration": "tunekit.migration.report",
    "Plan": "tunekit.planner.plan",
    "PlanError": "tunekit.errors",
    "Progress": "tunekit.display.console",
    "Recipe": "tunekit.recipe.schema",
    "RewardTrial": "tunekit.inference.reward_trial",
    "RowPreview": "tunekit.data.reports.preview",
    "Sample": "tunekit.data.reports.report",
    "SourceReport": "tunekit.data.reports.report",
    "Run": "tunekit.runs.run",
    "Score": "tunekit.runs.evaluation_result",
    "Series": "tunekit.runs.reader",
    "ShippedRecipe": "tunekit.recipe.library",
    "ShownSequence": "tunekit.data.reports.preview",
    "Stopped": "tunekit.errors",
    "Sweep": "tunekit.sweeps.folder",
    "Talk": "tunekit.inference.chat",
    "TunekitError": "tunekit.errors",
    "UNSET": "tunekit.recipe.entries",
    "chat": "tunekit.inference.chat",
    "check": "tunekit.api.verbs",
    "check_text": "tunekit.runs.fingerprints",
    "checkpoints": "tunekit.runs.checkpoints.listing",
    "compare": "tunekit.reporting.comparison",
    "compare_plans": "tunekit.api.verbs",
    "data_report": "tunekit.api.verbs",
    "delete_run": "tunekit.launching.stop",
    "devices": "tunekit.api.devices",
    "diagnose_run": "tunekit.reporting.diagnosis",
    "direction_of": "tunekit.runs.events",
    "edit_text": "tunekit.recipe.reading.rewrite",
    "effects_of": "tunekit.training.checkpointing.resume",
    "evaluate": "tunekit.evaluation.evaluate",
    "evaluations_of": "tunekit.runs.evaluation_result",
    "export": "tunekit.exporting.export",
    "find_run": "tunekit.runs.run",
    "find_sweep": "tunekit.sweeps.folder",
    "fit": "tunekit.api.verbs",
    "generate": "tunekit.inference.generate",
    "gib": "tunekit.planner.plan",
    "judged_by": "tunekit.runs.events",
    "last_events": "tunekit.runs.reader",
    "launch": "tunekit.api.verbs",
    "list_examples": "tunekit.recipe.library",
    "list_methods": "tunekit.recipe.methods",
    "list_recipes": "tunekit.recipe.library",
    "migrate": "tunekit.migration.migration",
    "list_runs": "tunekit.runs.run",
    "list_sweeps": "tunekit.sweeps.folder",
    "load_recipe": "tunekit.recipe.load",
    "machines": "tunekit.estimates.hardware.machines",
    "named_paths": "tunekit.recipe.load",
    "plan": "tunekit.api.verbs",
    "plan_figures": "tunekit.display.plan",
    "preview": "tunekit.api.verbs",
    "read_text": "tunekit.recipe.load",
    "recipe_diff": "tunekit.recipe.edits",
    "recipe_entries": "tunekit.recipe.entries",
    "recipe_text": "tunekit.recipe.library",
    "redacted": "tunekit.redact",
    "rerun": "tunekit.api.rerun",
    "report": "tunekit.reporting.report",
    "resume": "tunekit.api.verbs",
    "resume_sweep": "tunekit.sweeps.conduct",
    "serve": "tunekit.inference.serve",
    "set_tags": "tunekit.runs.run",
    "short_recipe": "tunekit.recipe.reading.rewrite",
    "start": "tunekit.api.background",
    "start_resume": "tunekit.api.background",
    "stop": "tunekit.api.verbs",
    "stop_sweep": "tunekit.sweeps.conduct",
    "stop_wish": "tunekit.runs.available_actions",
    "sweep": "tunekit.sweeps.begin",
    "sweep_plans": "tunekit.api.verbs",
    "train": "tunekit.api.verbs",
    "try_rewards": "tunekit.api.verbs",
    "ui": "tunekit.api.notebook",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunekit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
