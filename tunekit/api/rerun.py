"""A run repeated from its folder: its recipe, its plan and its rows, in a folder of its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from tunekit.api.rerun_check import Agreement, agreement_of
from tunekit.errors import RunError
from tunekit.probe.hardware import probe_hardware
from tunekit.reporting.summary import Story, story_of
from tunekit.runs import fingerprints
from tunekit.runs.available_actions import prospects
from tunekit.runs.events import Event
from tunekit.runs.lineage import check_run_code, write_code
from tunekit.runs.rank import place_of
from tunekit.runs.run import RUNS, Run, check_free
from tunekit.runs.versions import changed_texts, made_with, record_versions

VERDICT = "rerun.json"
"""File of the repetition's folder that says whether it agrees."""


def rerun(
    run: Run | str | Path, *, name: str | None = None, on_event: Callable[[Event], None] | None = None
) -> Agreement:
    """Repeat a finished run from its folder, and say whether its losses come out again.

    Args:
        run: The run, its folder, or its name in `runs/`.
        name: Name of the new folder in `runs/`; the run's name with the time behind it where left out.
        on_event: Called with every event as it happens.

    Raises:
        TunekitError: It cannot be repeated: it has not finished, it was gone on with otherwise, somebody has changed
            its recipe, plan, rows or model since, or this machine has not the devices of its plan.
    """
    from tunekit.launching.device_queue import turn
    from tunekit.launching.local import begin, launch

    story = story_of(run)
    _check(story)
    again = _made(story, name)
    if on_event is not None:
        on_event({"event": "plan", "run": again, "plan": again.plan, "notes": [f"repeats {story.run.path}"]})
    begin(again)
    with turn(again, waits=False, listener=on_event):
        launch(again, on_event)
    result = agreement_of(story.run, again)
    (again.path / VERDICT).write_text(json.dumps(result.to_dict(), indent=2), encoding="utf-8")
    return result


def _check(story: Story) -> None:
    """Refuse what cannot be repeated."""
    run, plan = story.run, story.plan
    if story.state != "finished":
        raise RunError(
            f"{run.name} is {story.state}, at step {story.step_words}: there is no whole run to repeat",
            hint=prospects(run) or "wait for its end",
        )
    if not run.result():
        raise RunError(f"{run.path / 'events.jsonl'} tells of no result", hint="the run's folder is damaged")
    anew = f"`tunekit train {run.path / 'recipe.yaml'} output.dir=null` trains by what is there now"
    for event in run.events():
        if event["event"] == "resume" and (event["changes"] or event.get("weights_only")):
            words = ", ".join(event["changes"]) or "the weights alone"
            raise RunError(
                f"{run.name} was gone on with otherwise from step {event['step']}: {words}",
                hint=f"no one recipe repeats that; {anew}",
            )
    versions = made_with(run)
    changed = [] if versions is None else [f"{run.path / name} has changed" for name in changed_texts(run, versions)]
    changed += fingerprints.changes(run, story.recipe)
    if changed:
        raise RunError(
            "\n".join((f"{run.name} is not made of the same things any more:", *changed)),
            hint=f"put back what it was; or {anew}",
        )
    check_run_code(run)
    if plan.num_nodes > 1 or place_of().num_processes > 1:
        raise RunError(f"{run.name} cannot be repeated by a launcher, or on several nodes", hint=anew)
    if plan.device.kind != "cpu":
        here = probe_hardware()
        if here.device.name != plan.device.name or here.num_accelerators < plan.layout.num_processes:
            raise RunError(f"{run.name} was planned for {plan.devices_words}, which are not here", hint=anew)


def _made(story: Story, name: str | None) -> Run:
    """The folder of the repetition, with the plan and the rows of the run."""
    run, recipe = story.run, story.recipe
    if name is not None and (not name or Path(name).name != name or name.startswith(".")):
        raise RunError(f"{name!r} is no name of a folder in {RUNS}", hint="use letters, digits, - and _")
    folder = None if name is None else str((RUNS / name).absolute())
    output = recipe.output.model_copy(update={"dir": folder})
    recipe = recipe.model_copy(update={"output": output})
    check_free(recipe)
    again = Run.create(story.plan.model_copy(update={"recipe": recipe}))
    if (run.path / "data").is_dir():
        shutil.copytree(run.path / "data", again.path / "data", dirs_exist_ok=True)
    write_code(again)
    fingerprints.record(again)
    record_versions(again)
    (again.path / "log.txt").touch()
    return again
