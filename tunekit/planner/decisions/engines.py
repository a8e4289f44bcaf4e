"""Another engine of tunekit's own for training that fits in none of Accelerate's layouts: NeMo Automodel."""

from dataclasses import replace

from tunekit.planner.decisions.candidates import Candidate, Fit, Setting, candidates, fit
from tunekit.planner.decisions.checks import refusal
from tunekit.planner.plan import gib
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.recipe.sections.section import ParallelSection


def automodel_fit(setting: Setting) -> tuple[Candidate, Fit] | None:
    """Return the first of NeMo Automodel's layouts that fits; None without one, or where it does not run the method."""
    recipe = setting.recipe
    is_full = isinstance(recipe.adapter, FullAdapter) and not recipe.adapter.is_partial
    if recipe.method.type != "sft" or not is_full or setting.hardware.num_accelerators < 2 or setting.media:
        return None
    if recipe.parallel.engine == "automodel" or recipe.parallel.nvme_path is not None:
        return None
    parallel = ParallelSection(engine="automodel", num_processes=recipe.parallel.num_processes)
    setting = replace(setting, recipe=recipe.model_copy(update={"parallel": parallel}))
    for candidate in candidates(setting):
        if refusal(setting, candidate.layout) is not None:
            continue
        fitting = fit(setting, candidate.layout, candidate.num_nodes)
        if fitting is not None:
            return candidate, fitting
    return None


def automodel_words(setting: Setting) -> str | None:
    """Return the settings of a layout that fits by NeMo Automodel, and its memory; None without one."""
    solution = automodel_fit(setting)
    if solution is None:
        return None
    candidate, fitting = solution
    layout, limit = fitting.layout, setting.limit_bytes(candidate.devices_per_node)
    sizes = [f"parallel.{name}={size}" for name, size in (("pp_size", layout.pp_size), ("ep_size", layout.ep_size))]
    settings = " ".join(["parallel.engine=automodel", *sizes[: 1 + (layout.ep_size > 1)]])
    needs = f"{gib(fitting.memory.total_bytes)} of {gib(limit)} per device"
    return f"NeMo Automodel can: {settings}, {needs} (estimate by formulas alone)"
