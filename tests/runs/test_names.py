"""Which run is meant by a name: the folder so called, the newest of that name, or the one that begins so."""

import pytest
from typer.testing import CliRunner

from tests.training.folders import made_run
from tunekit import TunekitError
from tunekit.api import verbs
from tunekit.api.background import start_resume
from tunekit.cli.app import app
from tunekit.errors import RunError
from tunekit.recipe.load import load_recipe
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.fingerprints import settled
from tunekit.runs.run import Run, check_free, find_run, matching
from tunekit.sweeps.conduct import resume_sweep, stop_sweep
from tunekit.sweeps.folder import SPEC, TRIALS, find_sweep

OLD, NEW = "20260101-120000", "20260102-120000"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Runs of names that begin alike, each newer than the one before it."""
    monkeypatch.chdir(tmp_path)
    names = (f"zz-{OLD}", f"zz-{OLD}-2", f"zz-x-{NEW}", f"zz2-{NEW}")
    return {
        name: made_run(tmp_path / "runs" / name, started=float(number), exit_reason="stopped", phase="interrupted")
        for number, name in enumerate(names)
    }


def test_a_name_is_that_of_its_newest_run_before_it_is_the_beginning_of_others(runs):
    assert find_run("zz").name == f"zz-{OLD}-2"
    assert find_run(f"zz-{OLD}").name == f"zz-{OLD}"
    assert find_run("zz2").name == find_run("runs/zz2-" + NEW).name == f"zz2-{NEW}"


def test_the_beginning_of_a_name_is_enough_where_one_run_begins_so(runs):
    assert find_run("zz-x-2").name == f"zz-x-{NEW}"
    with pytest.raises(RunError) as caught:
        find_run("z")
    listed = ", ".join(reversed(runs))
    assert str(caught.value) == f"'z' matches 4 runs; use one of: {listed}"


def test_an_error_lists_no_more_names_than_can_be_read():
    with pytest.raises(RunError, match=r"matches 9 runs; use one of: a0, a1, a2, a3, a4 and 4 more$"):
        matching("a", [f"a{number}" for number in range(9)], noun="run", exact=False)


@pytest.mark.parametrize(
    "verb",
    [verbs.stop, verbs.resume, start_resume, lambda name: CliRunner().invoke(app, ["runs", "tag", name, "mine"])],
)
def test_what_changes_a_run_needs_its_whole_name(runs, verb):
    with pytest.raises(TunekitError, match=rf"no run named 'zz-x-'; use the full name: zz-x-{NEW}"):
        told = verb("zz-x-")
        raise told.exception
    assert not any((run.path / "stop.json").exists() or run.tags for run in runs.values())


def test_only_a_whole_folder_name_is_deleted(runs):
    for name, why in (("zz", "no run named 'zz'"), ("zz-x-", "no run named 'zz-x-'")):
        told = CliRunner().invoke(app, ["runs", "delete", name, "--yes"])
        assert why in str(told.exception)
    assert all(run.path.is_dir() for run in runs.values())


def test_stop_means_the_run_of_a_name_that_is_under_way(runs):
    runs[f"zz-{OLD}"].update_status(phase="queued")
    with pytest.raises(RunError, match=f"^zz-{OLD} is queued: it has no running process"):
        verbs.stop("zz")
    runs[f"zz-{OLD}-2"].update_status(phase="queued")
    with pytest.raises(RunError, match=rf"2 runs named 'zz' are active; pass one of them: zz-{OLD}-2, zz-{OLD}$"):
        verbs.stop("zz")


def test_a_recipe_starts_from_the_run_that_is_wholly_so_called(runs, tmp_path):
    for run in runs.values():
        run.update_status(phase="finished")
    assert settled(ModelSection(path="zz")).path == str(tmp_path / "runs" / f"zz-{OLD}-2" / "model")
    made_run(tmp_path / "runs" / "zz", started=-1.0)
    assert settled(ModelSection(path="zz")).path == str(tmp_path / "runs" / "zz" / "model")
    assert find_run("zz").path == Run("runs/zz").path
    assert settled(ModelSection(path="z")).path == "z"


@pytest.mark.parametrize("content", [None, "", "rows.jsonl"])
def test_a_run_is_not_written_through_a_link(content, tmp_path):
    target = tmp_path / "elsewhere"
    if content is not None:
        target.mkdir()
    if content:
        (target / content).touch()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(RunError, match=f"output.dir: .*link is a link to {target}; set its target"):
        check_free(load_recipe({"model": "pico", "data": {"train": "x"}, "output": {"dir": str(tmp_path / "link")}}))


def test_a_sweep_is_found_as_a_run_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (f"s-{OLD}", f"s2-{NEW}"):
        folder = tmp_path / "sweeps" / name
        folder.mkdir(parents=True)
        (folder / TRIALS).write_text("[]")
        (folder / SPEC).write_text("{}")
    assert find_sweep("s").name == f"s-{OLD}" and find_sweep("s2-").name == f"s2-{NEW}"
    (tmp_path / "sweeps" / f"s-{OLD}").rename(tmp_path / "sweeps" / f"s1-{OLD}")
    with pytest.raises(RunError, match="'s' matches 2 sweeps"):
        find_sweep("s")
    for verb in (stop_sweep, resume_sweep):
        with pytest.raises(RunError, match=f"no sweep named 's2-'; use the full name: s2-{NEW}"):
            verb("s2-")
