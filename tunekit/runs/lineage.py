"""A recipe that starts from a run: which run is meant, whether it may be, and what the recipe takes from it.

`read_recipe` is how the verbs load recipes: it also finds what contradicts the run that is named. `continued` fills in
what the recipe leaves to the run; it comes before a plan, and changes nothing the second time.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunekit.errors import ModelError, PlanError, RunError, TunekitError
from tunekit.planner.facts import contradictions, taken_over
from tunekit.probe.origin import ADAPTER_CONFIG, COMMIT, check_code, code_of, is_folder, is_result, origin_of
from tunekit.recipe import load
from tunekit.recipe.load import load_recipe_with_notes
from tunekit.recipe.methods import METHODS, Method, has_teacher, is_rewarded
from tunekit.recipe.reading.phrases import show
from tunekit.recipe.reading.source_locations import Fault, Key, dotted
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.model import FullAdapter, ModelSection
from tunekit.recipe.sections.rewards import ModelReward
from tunekit.recipe.sections.section import Conflict
from tunekit.runs.available_actions import prospects
from tunekit.runs.names import called
from tunekit.runs.run import Run, list_runs
from tunekit.runs.small_files import damaged, read_object

CODE = "code.json"
"""File of a run folder with the SHA-256 of code that comes with its models, where they lie in folders."""


def read_recipe(
    source: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str] = ()
) -> tuple[Recipe, list[str]]:
    """The checked recipe, which contradicts no run that it starts from, and notes of its overrides.

    Raises:
        RecipeError: It is not valid; the message has a line for every mistake, each with its place.
    """
    return load_recipe_with_notes(source, overrides, conflicts_of=_conflicts)


def check_text(
    text: str, overrides: Sequence[str] = (), *, find_functions: bool = True
) -> tuple[Recipe | None, list[Fault]]:
    """The recipe of a YAML text, or all that is wrong with it: what the command line would say of a file that holds it.

    Args:
        text: The text, such as a draft in an editor.
        overrides: `dotted.key=value` words to lay over it.
        find_functions: Whether the user's own functions are looked up, for which their modules are imported here.

    Returns:
        The recipe and no faults, or None and at least one fault, in the order of the text.
    """
    return load.check_text(text, overrides, find_functions=find_functions, conflicts_of=_conflicts)


def _conflicts(recipe: Recipe) -> Iterator[Conflict]:
    """Yield conflicts of a recipe with the run that it starts from, or with the code of its models."""
    yield from _conflicts_of_code(recipe)
    try:
        origin = origin_of(settled(recipe.model))
    except TunekitError as error:
        yield Conflict(("model", "path"), error.problem.removeprefix("model.path: "), error.hint or "")
        return
    if origin is None:
        return
    if recipe.model.revision is not None:
        what = f"{recipe.model.revision!r} is none of a run's: {origin.name} knows its base model"
        yield Conflict(("model", "revision"), what, "leave it out")
    judges = bool(origin.runs) and METHODS[origin.runs[-1].method].spec.classifies
    if judges and not recipe.method.spec.classifies:
        what = f"{origin.name} is a reward model: it judges answers, and gives none"
        yield Conflict(("model", "path"), what, "name a run that trained a model which answers")
    if not judges and recipe.method.spec.classifies and origin.adapter is not None:
        what = f"the adapter of {origin.name} is one of a model that answers, and cannot go on in one that judges"
        yield Conflict(("model", "path"), what, "start from its base model, or from a run that trained all weights")
    for field, requested, has in contradictions(origin, recipe.adapter):
        what = f"{show(requested)} here, and {show(has)} in the adapter of {origin.name}, which is trained further"
        yield Conflict(
            ("adapter", field), what, "leave it out, or set adapter.type=full to merge that adapter and train all"
        )


def _conflicts_of_code(recipe: Recipe) -> Iterator[Conflict]:
    """Code that comes with a model and is not asked for, or whose commit is not known."""
    method = recipe.method
    second = is_rewarded(method) and method.beta > 0 and isinstance(recipe.adapter, FullAdapter)
    for key, section in models_of(recipe):
        try:
            origin = origin_of(settled(section))
        except TunekitError:
            continue  # It is told elsewhere.
        base = section if origin is None else origin.base
        where = (*key, "trust_remote_code")
        if origin is not None and base.trust_remote_code and not section.trust_remote_code:
            what = f"is false, but {origin.name} is on {base.path!r} with code that comes with it"
            yield Conflict(where, what, "read that code, then set it to true")
        if not section.trust_remote_code:
            continue
        if is_folder(base):
            try:
                code_of(base)
            except ModelError as error:
                yield Conflict(where, error.problem, error.hint or "")
            continue
        if not COMMIT.fullmatch(base.revision or ""):
            what = f"cannot be true for {base.path!r} of the hub without a commit, as its code could change under you"
            of_adapter = f"set revision in the {ADAPTER_CONFIG} of {section.path}" if origin else "set model.revision"
            commit = f"`git ls-remote https://huggingface.co/{base.path} HEAD` tells it"
            yield Conflict(where, what, f"read the code, then {of_adapter} to the full commit, 40 digits: {commit}")
        elif second and key == ("model",):
            what = f"cannot be true for {base.path!r} of the hub with a second model, whose code TRL takes at no commit"
            yield Conflict(where, what, "download the model and name its folder, or train an adapter")


def models_of(recipe: Recipe) -> Iterator[tuple[Key, ModelSection]]:
    """Every model that a recipe names, with its key."""
    yield ("model",), recipe.model
    if has_teacher(recipe.method):
        yield ("method", "teacher"), recipe.method.teacher
    if is_rewarded(recipe.method):
        for position, reward in enumerate(recipe.method.rewards):
            if isinstance(reward, ModelReward):
                yield ("method", "rewards", position, "model"), reward.model


def write_code(run: Run) -> None:
    """Write down what the code of a run's models is, where they bring any."""
    code = {key: code_found for key, section in _trusted(run) if (code_found := code_of(section))}
    if code:
        (run.path / CODE).write_text(json.dumps(code, indent=2), encoding="utf-8")


def check_run_code(run: Run) -> None:
    """See that the code of a run's models is what it was.

    Raises:
        PlanError: The recipe of the run does not allow it.
        ModelError: It is not.
    """
    problems = [
        f"{dotted(conflict.key)}: {conflict.what}; {conflict.hint}" for conflict in _conflicts_of_code(run.recipe)
    ]
    if problems:
        raise PlanError("\n".join(problems))
    origin, base = origin_of(run.recipe.model), run.plan.base
    base_section = run.recipe.model if origin is None else origin.base
    if base.trust_remote_code and (base.path, base.revision) != (base_section.path, base_section.revision):
        raise PlanError(f"the plan of {run.path} trusts the code of {base.path!r}, which its recipe does not name")
    file = run.path / CODE
    recorded = read_object(file) if file.exists() else {}
    for key, section in _trusted(run):
        of_one = recorded.get(key, {})
        if not isinstance(of_one, dict):
            raise damaged(file, f"{key} is {of_one!r}")
        check_code(section, of_one)


def _trusted(run: Run) -> Iterator[tuple[str, ModelSection]]:
    """The models of a run whose code may be run, by their keys; of one with an adapter it is the base."""
    for key, section in models_of(run.recipe):
        if section.trust_remote_code:
            origin = origin_of(section)
            yield dotted(key), section if origin is None else origin.base


def continued(recipe: Recipe) -> Recipe:
    """The recipe with the run that it starts from found, and with what it leaves to it.

    Raises:
        PlanError: It contradicts the run.
        TunekitError: The run cannot be started from.
    """
    recipe = recipe.model_copy(update={"method": _with_settled(recipe.method)})
    section = settled(recipe.model)
    origin = origin_of(section)
    if origin is None:
        return recipe
    problems = [
        f"{'.'.join(map(str, conflict.key))}: {conflict.what}; {conflict.hint}" for conflict in _conflicts(recipe)
    ]
    if problems:
        raise PlanError("\n".join(problems))
    is_type_asked = "type" in recipe.adapter.model_fields_set
    adapter = taken_over(origin, recipe.adapter, is_type_asked=is_type_asked)
    section = section.model_copy(update={"trust_remote_code": origin.base.trust_remote_code})
    return recipe.model_copy(update={"model": section, "adapter": adapter})


def _with_settled(method: Method) -> Method:
    """A method whose teacher and reward models are found, where runs are named."""
    if has_teacher(method):
        return method.model_copy(update={"teacher": settled(method.teacher)})
    if not is_rewarded(method):
        return method
    rewards = [
        reward.model_copy(update={"model": settled(reward.model)}) if isinstance(reward, ModelReward) else reward
        for reward in method.rewards
    ]
    return method.model_copy(update={"rewards": rewards})


def settled(section: ModelSection) -> ModelSection:
    """A model section in which a run's name or folder is the folder of its result.

    Folders come first, and names of the hub, which have a slash.

    Raises:
        RunError: The run has not finished.
    """
    run = _run_of(section.path)
    if run is None:
        return section
    _check_finished(run)
    return section.model_copy(update={"path": str(run.model_path.resolve())})


def _run_of(path: str) -> Run | None:
    """The run that is meant by a path, if it is one."""
    folder = Path(path)
    if path == "pico":
        return None
    if folder.is_dir():
        if (folder / "status.json").is_file():
            return Run(folder)
        return Run(folder.resolve().parent) if is_result(folder.resolve()) else None
    runs = {run.name: run for run in list_runs()}
    return None if "/" in path else next((runs[candidate] for candidate in called(path, list(runs))), None)


def _check_finished(run: Run) -> None:
    state, status = run.state, run.status()
    if state == "finished":
        return
    where = f"{run.name} is {state}, after step {status['step']} of {status['num_steps']}: it has no model yet"
    raise RunError(f"model.path: {where}", hint=prospects(run) or "wait for its end")
