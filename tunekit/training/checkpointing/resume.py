"""Resume of a run: its checkpoint, edits of its recipe, and notes for the user.

`decide` checks everything and changes nothing; it classifies edits of the recipe one by one. `carry_out` then sets
aside the checkpoints that are superseded, and replaces the recipe and the plan, of which the earlier ones are kept. The
processes then resume from the newest checkpoint; `resume.json` has the rest of their instructions.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tunekit.errors import RunError
from tunekit.files import leads_out
from tunekit.planner.plan import Plan
from tunekit.planner.resume import differences, obstacle, rescheduled
from tunekit.recipe.edits import Edit, Effect, edits, ruling
from tunekit.recipe.load import AnyOverrides, dump_recipe, reload_recipe
from tunekit.recipe.schema import Recipe
from tunekit.runs import fingerprints, small_files
from tunekit.runs.available_actions import TO_THE_END, begin_anew
from tunekit.runs.checkpoints.complete import CHECKPOINTS, manifest_of, newest_complete
from tunekit.runs.checkpoints.listing import Found, folders_of, named, newest_weights, steps_of
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run

WRITTEN = (".txt", ".log", ".jsonl", ".json", ".yaml")
"""Endings of the files of a run folder that a run writes to."""

LENGTH = ("train.max_steps", "train.num_epochs")
"""Fields that say how long to train."""

CONSTANT = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules whose learning rates are those of any length."""


@dataclass(frozen=True)
class Decision:
    """Decision on a resume.

    Attributes:
        run: The run.
        checkpoint: The checkpoint to resume from.
        before: The recipe of the checkpoint.
        recipe: The recipe from here on.
        plan: Its plan.
        changes: Differences from before, a phrase each.
        notes: Notes for the user, a sentence each.
        weights_only: Whether only the weights are used.
        aside: Superseded checkpoints.
    """

    run: Run
    checkpoint: Found
    before: Recipe
    recipe: Recipe
    plan: Plan
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    weights_only: bool
    aside: tuple[Path, ...]


def decide(
    run: Run,
    overrides: AnyOverrides = (),
    *,
    recipe: Recipe | None = None,
    make_plan: Callable[[Recipe, Plan], Plan],
    is_here: Callable[[Plan], bool],
    checkpoint: str | None = None,
    weights_only: bool = False,
) -> Decision:
    """Decide how a run can resume, or raise the reason why it cannot.

    Args:
        run: The run.
        overrides: Edits of its recipe, besides those in its `recipe.yaml`.
        recipe: A recipe in the place of that one.
        make_plan: Plans a recipe for the processes that resume it, on the rows of an earlier plan.
        is_here: Whether a plan is for the available devices.
        checkpoint: The checkpoint to resume from; by default the newest complete one.
        weights_only: Use only its weights.

    Raises:
        TunekitError: It cannot, or not so.
    """
    _check_free(run)
    # Its last events are a part of the result: one that cannot be read would end the run when it is trained.
    run.events()
    went_back = checkpoint is not None
    chosen, weights_only = _chosen(run, checkpoint, weights_only=weights_only)
    before, saved = made_by(run, chosen)
    recipe = recipe or reload_recipe(run.path / "recipe.yaml", overrides)
    edited = edits(before, recipe)
    again = _another_run(run, chosen)
    _refuse_edits(run, edited, before, saved, again=again, weights_only=weights_only)
    inputs = fingerprints.changes(run, before)
    if inputs:
        raise RunError("\n".join((f"the inputs of {run.name} have changed:", *inputs)), hint=f"restore them; {again}")
    replans = weights_only or any(ruling(edit, before, saved.layout.strategy).replans for edit in edited)
    if (edited and replans) or not is_here(saved):
        plan = make_plan(recipe, saved)
    else:
        plan = rescheduled(saved, recipe) if edited else saved
    _refuse_plan(run, saved, plan, again=again, weights_only=weights_only)
    _check_length(run, chosen, plan, edited, went_back=went_back, weights_only=weights_only)
    changed = (*_given(edited), *differences(saved, plan))
    notes = tuple(_notes(chosen, saved, plan, changed, edited, weights_only=weights_only))
    aside = tuple(_superseded(run, chosen, went_back=went_back, weights_only=weights_only))
    return Decision(run, chosen, before, recipe, plan, changed, notes, weights_only, aside)


def carry_out(decision: Decision) -> tuple[str, ...]:
    """Prepare the folder of a run for the resume, and return notes for the user."""
    run, checkpoint, notes = decision.run, decision.checkpoint, decision.notes
    checkpoints, checkpoint_path = run.path / CHECKPOINTS, checkpoint.path
    if decision.aside:
        aside = next(folder for number in count(1) if not (folder := checkpoints / f"aside-{number}").exists())
        aside.mkdir()
        for folder in decision.aside:
            folder.rename(aside / folder.name)
        if checkpoint.path in decision.aside:
            checkpoint_path = aside / checkpoint.path.name
        names = ", ".join(folder.name for folder in decision.aside)
        notes += (f"set aside in {aside.relative_to(run.path)}: {names}",)
    if not decision.weights_only and checkpoint_path.parent != checkpoints:
        checkpoint_path = checkpoint_path.rename(checkpoints / checkpoint_path.name)
    weights = checkpoint_path.relative_to(run.path).as_posix() if decision.weights_only else None
    # First what does no harm where the recipe and the plan are still the earlier ones.
    small_files.write_continuation(run.path, small_files.Continuation(checkpoint.step, decision.changes, weights))
    _replace(run, decision)
    num_steps = decision.plan.schedule.num_steps if decision.plan.schedule is not None else None
    run.update_status(num_steps=num_steps, step=0 if weights is not None else checkpoint.step)
    return notes


def _replace(run: Run, decision: Decision) -> None:
    """Put the recipe and the plan in the place of the earlier ones, which are kept by a number."""
    texts = {"plan.yaml": decision.plan.to_yaml(), "recipe.yaml": dump_recipe(decision.recipe)}
    earlier = {"plan.yaml": small_files.read_text(run.path / "plan.yaml")}
    # Not by the text of the recipe: 32, where nobody asked for a number, is 32.0 when it is read.
    if run.recipe == decision.recipe == decision.before and earlier["plan.yaml"] == texts["plan.yaml"]:
        return
    # What stands there may have been edited by hand.
    earlier["recipe.yaml"] = dump_recipe(decision.before)
    number = next(number for number in count(1) if not (run.path / f"recipe-{number}.yaml").exists())
    for name, text in texts.items():
        small_files.write_whole(run.path / name.replace(".yaml", f"-{number}.yaml"), earlier[name], durable=True)
        small_files.write_whole(run.path / name, text, durable=True)


def _check_free(run: Run) -> None:
    """Refuse a run that has not ended, or whose folder is read-only."""
    state = run.state
    if state not in FINAL_PHASES and state != "died":
        status = run.status()
        problem = f"{run.name} is {state} in process {status['pid']} of {status['host']}"
        raise RunError(problem, hint=f"wait until it ends, or stop it first: tunekit stop {run.path}")
    for folder in (run.path, run.path / CHECKPOINTS):
        if folder.exists() and not os.access(folder, os.W_OK):
            what = f"cannot write to {folder}: it is read-only or owned by another user"
            raise RunError(what, hint=f"make it writable, or copy {run.path} to a writable folder and resume it there")
    check_files(run)


def check_files(run: Run) -> None:
    """Refuse a folder of which a run would write to what is no file of its own.

    Raises:
        RunError: A FIFO, on which it would wait, a folder, or a link to a file elsewhere has the name of one.
    """
    for file in (*run.path.iterdir(), *run.path.glob("ranks/*")):
        is_special = not file.is_file() and (file.suffix in WRITTEN or not file.is_dir())
        if is_special or (file.suffix in WRITTEN and leads_out(file)):
            raise RunError(f"{file} is not a regular file of the run", hint="remove it, or restore it from a copy")


def _chosen(run: Run, name: str | None, *, weights_only: bool) -> tuple[Found, bool]:
    """The checkpoint to go on from, and whether only its weights are taken."""
    anew = f"start over: {begin_anew(run)}"
    why = run.plan.layout.why_not_resumed
    if why is not None:
        raise RunError(f"{run.name} has no checkpoints: {why}", hint=anew)
    if name is not None:
        return named(run, name, weights_only=weights_only), weights_only
    newest = newest_complete(run.path)
    begun = small_files.read_continuation(run.path).weights
    if newest.path is None and begun is not None and (run.path / begun).is_dir():
        # It began with the weights of a checkpoint, and ended before the first one of its own.
        return Found(steps_of(run.path / begun), run.path / begun), True
    skipped = "".join(f"; {words}" for words in newest.skipped)
    weights = newest_weights(run)
    if weights_only:
        if weights is None:
            raise RunError(f"{run.name} has no checkpoint with intact weights{skipped}", hint=anew)
        return weights, True
    if newest.path is None:
        if weights is not None:
            anew = f"--weights-only starts from the weights of {weights.path.name} with fresh states; or {anew}"
        raise RunError(f"{run.name} has no complete checkpoint to resume from{skipped}", hint=anew)
    return Found(newest.step, newest.path, newest.skipped), False


def made_by(run: Run, found: Found) -> tuple[Recipe, Plan]:
    """The recipe and the plan that a checkpoint was made by: it may hold copies, as the run's own may be edited."""
    copies = {name: found.path / name for name in ("recipe.yaml", "plan.yaml")}
    files = {name: copy if copy.is_file() else run.path / name for name, copy in copies.items()}
    recipe = reload_recipe(files["recipe.yaml"])
    return recipe, small_files.read_plan(files["plan.yaml"], recipe)


def _another_run(run: Run, found: Found) -> str:
    """Describe how another run can do what this one cannot."""
    is_finished = run.state == "finished"
    source = found.path if not is_finished and any(found.path.glob("*.safetensors")) else run.path
    when = "" if is_finished or source == found.path else " once it has finished"
    return f"another run can start from its weights{when}: model: {source} in a new recipe"


def _refuse_edits(
    run: Run, edited: Sequence[Edit], before: Recipe, plan: Plan, *, again: str, weights_only: bool
) -> None:
    lines, all_in_state = [], True
    for edit in edited:
        effect = ruling(edit, before, plan.layout.strategy)
        if effect.effect == "refused" or (effect.effect == "saved state" and not weights_only):
            lines.append(f"{edit.words}: {effect.why}")
            all_in_state = all_in_state and effect.effect == "saved state"
    if lines:
        hint = again
        if all_in_state:
            hint = f"revert it, or add --weights-only to start over from the weights with it; {again}"
        raise RunError("\n".join((f"{run.name} cannot resume with these edits of its recipe:", *lines)), hint=hint)


def _refuse_plan(run: Run, saved: Plan, plan: Plan, *, again: str, weights_only: bool) -> None:
    """Refuse a plan that a checkpoint does not fit."""
    if weights_only and plan.layout.strategy == "zero3":
        problem = f"{run.name}: ZeRO-3 shards weights before those of a checkpoint can be loaded into them"
        raise RunError(problem, hint="set parallel.strategy=fsdp2, or zero2")
    if weights_only and plan.layout.engine != "accelerate":
        problem = f"{run.name}: {plan.layout.name} cannot start from the weights of a checkpoint"
        raise RunError(problem, hint=f"resume without --weights-only; {again}")
    barrier = None if weights_only else obstacle(saved.layout, plan.layout, plan.recipe.train.optimizer)
    if barrier is not None:
        num, name = plan.layout.num_processes, plan.layout.name
        spread = f"{name} in {num} process{'es' * (num > 1)}"
        raise RunError(f"{run.name} cannot resume with {spread}: {barrier.why}", hint=barrier.hint)
    if plan.reference != saved.reference:
        raise RunError(f"the reference of {run.name} was {saved.reference}, now {plan.reference}", hint=again)


def _check_length(
    run: Run, found: Found, plan: Plan, edited: Sequence[Edit], *, went_back: bool, weights_only: bool
) -> None:
    """Refuse a length that is reached."""
    if plan.schedule is None or weights_only:
        return
    num_steps, is_edited = plan.schedule.num_steps, any(edit.name in LENGTH for edit in edited)
    patience, limit = manifest_of(found.path).patience, plan.recipe.train.early_stopping_patience
    if run.state == "finished" and num_steps > found.step and patience and limit and patience.counter >= limit:
        why = f"{plan.saving.metric_for_best_model} had not improved for {patience.counter} evaluations"
        more = f"train further: tunekit resume {run.path} {TO_THE_END}"
        raise RunError(f"{run.name} stopped early after {found.step} steps: {why}", hint=more)
    if num_steps > found.step or (num_steps == found.step and run.state != "finished" and not is_edited):
        return
    more = f"train further: tunekit resume {run.path} train.max_steps={2 * found.step}"
    if not is_edited:
        raise RunError(f"{run.name} is finished, after {found.step} steps", hint=more)
    back = "" if went_back else "; or go back to an earlier checkpoint with --from"
    raise RunError(f"{run.name} has trained {found.step} steps, {num_steps} are requested", hint=more + back)


def _given(edited: Sequence[Edit]) -> Iterator[str]:
    """Edits in words, without the length that another one took the place of."""
    lengths = [edit for edit in edited if edit.name in LENGTH]
    for edit in edited:
        if len(lengths) < 2 or edit not in lengths or edit.now is not None:
            yield edit.words


def _notes(
    found: Found, saved: Plan, plan: Plan, changed: Sequence[str], edited: Sequence[Edit], *, weights_only: bool
) -> Iterator[str]:
    """Yield notes on the resume, a sentence each."""
    num_steps = None if plan.schedule is None else plan.schedule.num_steps
    yield from (f"skipped {words}" for words in found.skipped)
    if weights_only:
        yield (
            f"starting over from the weights of step {found.step}, for {num_steps} steps, with fresh optimizer, "
            "schedule, random state and data order"
        )
    else:
        yield f"resuming from step {found.step} of {num_steps}"
    if changed:
        yield f"applied: {', '.join(changed)}"
    if weights_only:
        return
    if libraries := _other_versions(found):
        yield f"other versions than at the checkpoint, so losses may differ in rounding: {', '.join(libraries)}"
    if changed:
        yield "restored from the checkpoint: optimizer and its peak learning rate, random state and data position"
    was = None if saved.schedule is None else saved.schedule.num_steps
    scheduler = plan.recipe.train.lr_scheduler_type
    if was != num_steps and scheduler not in CONSTANT:
        yield f"the learning rate follows the new length from here ({scheduler})"
    elif any(edit.name in ("train.lr_scheduler_type", "train.warmup_steps") for edit in edited):
        yield f"the learning rate follows the new schedule from here ({scheduler})"
    if saved.layout.num_processes != plan.layout.num_processes:
        yield (
            f"the checkpoint has the random state of {saved.layout.num_processes} processes: for "
            f"{plan.layout.num_processes} processes it is derived from the seed, and sums are rounded in a different "
            "order"
        )


def _other_versions(found: Found) -> list[str]:
    """Return the libraries whose versions have changed since a checkpoint."""
    was, now = manifest_of(found.path).versions, fingerprints.versions()
    names = [name for name in dict.fromkeys((*was, *now)) if was.get(name) != now.get(name)]
    return [f"{name} {was.get(name, 'not installed')} → {now.get(name, 'not installed')}" for name in names]


def _superseded(run: Run, found: Found, *, went_back: bool, weights_only: bool) -> Iterator[Path]:
    """Checkpoints that are no part of what follows."""
    if not went_back and not weights_only:
        return
    for folder in sorted((run.path / CHECKPOINTS).glob("checkpoint-*"), key=steps_of):
        later = steps_of(folder) > found.step or (steps_of(folder) == found.step and folder != found.path)
        if folder.suffix == "" and (weights_only or later):
            yield folder


@dataclass(frozen=True)
class EditEffect:
    """Effect of an edited field.

    Attributes:
        key: Its dotted key.
        before: Its value in the checkpoint's recipe, as YAML.
        now: The edited one.
        effect: `takes effect`; `saved state` if the checkpoint holds the earlier value, so that the edit takes effect
            only with `weights_only`; or `refused`.
        why: Why it does not take effect; empty if it does.
        replans: Whether it needs a new plan.
    """

    key: str
    before: str
    now: str
    effect: Effect
    why: str
    replans: bool


def effects_of(
    run: Run, overrides: AnyOverrides = (), *, from_: str | None = None, weights_only: bool = False
) -> list[EditEffect]:
    """Return the effects of recipe edits on a resume; empty if there are none.

    Args:
        run: The run.
        overrides: Edits, as for `resume`, besides those in its `recipe.yaml`.
        from_: The checkpoint to resume from, by its step or its name. It is not checked for completeness.
        weights_only: Start from its weights alone: then edits of what its state holds take effect.

    Raises:
        TunekitError: There is no such checkpoint, or the edits are invalid.
    """
    before, saved = made_by(run, _meant(run, from_))
    effects = []
    for edit in edits(before, reload_recipe(run.path / "recipe.yaml", overrides)):
        effect, why, replans = ruling(edit, before, saved.layout.strategy)
        if effect == "saved state" and weights_only:
            effect, why = "takes effect", ""
        effects.append(EditEffect(edit.name, edit.shown_before, edit.shown_now, effect, why, replans))
    return effects


def _meant(run: Run, name: str | None) -> Found:
    """The checkpoint that is meant."""
    folders = folders_of(run)
    if name is None:
        newest = newest_complete(run.path).path or next(iter(folders.values()), None)
        if newest is None:
            raise RunError(f"{run.name} has no checkpoint to resume from", hint=f"start over: {begin_anew(run)}")
        return Found(steps_of(newest), newest)
    folder = folders.get(f"checkpoint-{name}" if name.isdigit() else name)
    if folder is None:
        raise RunError(f"{run.name} has no checkpoint {name}", hint=f"available: {', '.join(folders) or 'none'}")
    return Found(steps_of(folder), folder)
