"""Another engine of tunekit's own for training that fits in none of Accelerate's layouts: NeMo Automodel."""

from dataclasses import replace

from tunekit.planner.decisions import automodel
from tunekit.planner.decisions.candidates import Candidate, Fit, Setting, candidates, fit
from tunekit.planner.decisions.checks import refusal
from tunekit.planner.plan import gib
from tunekit.recipe.sections.section import ParallelSection


def automodel_fit(setting: Setting) -> tuple[Candidate, Fit] | None:
    """Return the first of NeMo Automodel's layouts that fits; None without one, or where it does not run the method."""
    recipe = setting.recipe
    if setting.hardware.num_accelerators < 2 or setting.media or recipe.parallel.engine == "automodel":
        return None
    parallel = ParallelSection(engine="automodel", num_processes=recipe.parallel.num_processes)
    setting = replace(setting, recipe=recipe.model_copy(update={"parallel": parallel}))
    if next(automodel.recipe_faults(setting.recipe, setting.model), None) is not None:
        return None
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
    switched_off = [f"{automodel.ROUTER_ARG}=0"] * automodel.adds_router_loss(setting.recipe, setting.model)
    settings = " ".join(["parallel.engine=automodel", *sizes[: 1 + (layout.ep_size > 1)], *switched_off])
    needs = f"{gib(fitting.memory.total_bytes)} of {gib(limit)} per device"
    return f"NeMo Automodel can: {settings}, {needs} (estimate by formulas alone)"
