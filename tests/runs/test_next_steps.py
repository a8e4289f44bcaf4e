"""What is said to be done next with a run that ended before it saved anything, by doing it."""

import shlex

import pytest

from tests.tiny import save_chats, save_tiny_model
from tunekit.api import verbs
from tunekit.errors import RunError
from tunekit.process.signals import stopped
from tunekit.runs.available_actions import begin_anew, prospects
from tunekit.runs.run import Run, check_free
from tunekit.runs.small_files import Request

ASKED = Request(now=False, by="SIGINT", grace_seconds=None, time=0.0)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", hidden=32, layers=1)
    save_chats(tmp_path / "rows.jsonl", ((f"double {n}", f"{2 * n} it is") for n in range(8)))
    return tmp_path


def ended(here, phase, *, folder=None) -> Run:
    """A run that ended before its first checkpoint."""
    recipe = {
        "model": str(here / "model"),
        "data": {"train": str(here / "rows.jsonl"), "max_length": 32},
        "train": {"max_steps": 1, "global_batch_size": 2},
        "output": {"sample_prompts": [], **({"name": "mine"} if folder is None else {"dir": str(folder)})},
    }
    run = verbs.make_run(recipe)
    run.update_status(phase=phase, **({"pid": 2**30, "identity": "gone"} if phase == "loading" else {}))
    return run


def advice(run: Run) -> set[str]:
    """The commands that a run's stop, its resumption, and `runs show` name."""
    with pytest.raises(RunError) as refused:
        verbs.resume(run)
    said = [stopped(run, ASKED, "stopped").hint, refused.value.hint, prospects(run).replace("`", ": ", 1)]
    return {words.partition(": tunekit ")[2].partition("`")[0] for words in said}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("phase", "folder"), [("interrupted", None), ("loading", "a folder"), ("failed", "a folder")])
def test_a_run_that_saved_nothing_is_begun_again_by_the_command_that_is_named(phase, folder, here):
    run = ended(here, phase, folder=None if folder is None else here / folder)
    (command,) = advice(run)
    verb, recipe, *options = shlex.split(command)
    assert (verb, recipe) == ("train", str(run.path / "recipe.yaml"))
    done = verbs.train(recipe, [one for one in options if one != "--resume"], resume="--resume" in options)
    assert (done.state, done.path == run.path) == ("finished", folder is not None)


def test_a_folder_that_is_taken_by_a_run_without_a_checkpoint_names_no_resumption(here):
    run = ended(here, "failed", folder=here / "taken")
    with pytest.raises(RunError, match=r"--resume here starts it over; or set a new folder$"):
        check_free(run.recipe)
    run.update_status(phase="starting")
    with pytest.raises(RunError, match=rf"tunekit stop {run.path}; or set a new folder$"):
        check_free(run.recipe)


def test_what_is_left_of_damaged_checkpoints_is_not_begun_over(here):
    run = ended(here, "failed", folder=here / "broken")
    (run.path / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    command = f"tunekit train {run.path / 'recipe.yaml'} output.dir=null"
    assert begin_anew(run) == command and command in str(prospects(run))
    assert command in str(stopped(run, ASKED, "stopped").hint)
    with pytest.raises(RunError, match=r"`tunekit runs show .*` shows its status; or set a new folder$"):
        check_free(run.recipe)


def test_changes_that_mend_a_run_begin_in_a_new_folder(here):
    run = ended(here, "failed", folder=here / "short of memory")
    *_, folder, change = shlex.split(begin_anew(run, ["train.micro_batch_size=1"]))
    assert (folder, change) == ("output.dir=null", "train.micro_batch_size=1")
