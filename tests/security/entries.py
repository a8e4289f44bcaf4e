"""The ways in: every verb that takes a recipe. A new one is a line here, and goes through every test of this folder."""

from collections.abc import Callable
from typing import Any

import tunekit
from tunekit.api import clusters, verbs


def _slurm(recipe: Any) -> Any:
    return clusters.launch_slurm(recipe, submit=False)


def _sky(recipe: Any) -> Any:
    return clusters.launch_sky(recipe, on="h100", submit=False)


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "plan": verbs.plan,
    "compare_plans": lambda recipe: verbs.compare_plans(recipe, on=["h100", "h200"]),
    "sweep_plans": lambda recipe: verbs.sweep_plans(recipe, {"adapter.type": ["lora", "full"]}),
    "fit": lambda recipe: verbs.fit(recipe, "batch"),
    "advise": verbs.advise,
    "check": verbs.check,
    "data": verbs.data_report,
    "make_run": verbs.make_run,
    "train": verbs.train,
    "sweep": lambda recipe: tunekit.sweep(recipe, {"train.learning_rate": [1e-4, 1e-3]}),
    "slurm": _slurm,
    "sky": _sky,
}
"""Verbs by name, each of which is given a recipe."""

RUNNING = ("data", "make_run", "train", "sweep", "slurm", "sky")
"""Those of them that load what the recipe names, where the others look at headers and rows."""
