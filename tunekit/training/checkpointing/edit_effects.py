"""Classify edits of a run's recipe on resume, one by one and before anything is done."""

from collections.abc import Sequence
from dataclasses import dataclass

from tunekit.errors import RunError
from tunekit.recipe.edits import Effect, edits, ruling
from tunekit.recipe.load import reload_recipe
from tunekit.runs.available_actions import begin_anew
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.checkpoints.listing import folders_of
from tunekit.runs.checkpoints.reference import Found, steps_of
from tunekit.runs.run import Run
from tunekit.training.checkpointing.resume import plan_of, recipe_of


@dataclass(frozen=True)
class EditEffect:
    """Effect of an edited field.

    Attributes:
        key: Its dotted key.
        before: Its value in the checkpoint's recipe, as YAML.
        now: The edited one.
        effect: `takes effect`; `saved state`, where the checkpoint holds the earlier value, so that the edit takes
            effect only where nothing but its weights are taken; or `refused`.
        why: Why it does not take effect; empty where it does.
        replans: Whether it takes effect by a new plan for the machine.
    """

    key: str
    before: str
    now: str
    effect: Effect
    why: str
    replans: bool


def effects_of(
    run: Run, overrides: Sequence[str] = (), *, from_: str | None = None, weights_only: bool = False
) -> list[EditEffect]:
    """Return the effects of the edits with which a run is to resume; empty where there are none.

    Args:
        run: The run.
        overrides: Edits, as for `resume`; those in its `recipe.yaml` count too.
        from_: The checkpoint to go on from, by its step or its name. Whether it is whole is not looked at.
        weights_only: Whether only its weights are taken: then what its state holds takes effect.

    Raises:
        TunekitError: There is no such checkpoint, or the edits are no valid ones.
    """
    checkpoint = _meant(run, from_)
    before = recipe_of(run, checkpoint)
    strategy = plan_of(run, checkpoint, before).layout.strategy
    effects = []
    for edit in edits(before, reload_recipe(run.path / "recipe.yaml", overrides)):
        effect, why, replans = ruling(edit, before, strategy)
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
            raise RunError(f"{run.name} has no checkpoint to go on from", hint=f"begin anew: {begin_anew(run)}")
        return Found(steps_of(newest), newest)
    folder = folders.get(f"checkpoint-{name}" if name.isdigit() else name)
    if folder is None:
        raise RunError(f"{run.name} has no checkpoint {name}", hint=f"there is {', '.join(folders) or 'none'}")
    return Found(steps_of(folder), folder)
