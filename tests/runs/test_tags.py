"""Tags and notes that a user gives a run."""

import pytest

import tunekit
from tests.commands import run_command
from tests.training.folders import made_run
from tunekit.errors import RunError


def test_a_run_keeps_the_tags_that_it_was_given_last(tmp_path):
    run = made_run(tmp_path / "run")
    assert run.tags == []
    tunekit.set_tags(run, [" good ", "lora", "good"])
    assert tunekit.Run(run.path).tags == ["good", "lora"]
    tunekit.set_tags(run, ["别的"])
    assert run.tags == ["别的"]
    tunekit.set_tags(run, [])
    assert run.tags == []


@pytest.mark.parametrize("tag", ["", "  ", "two\nlines", "x" * 41])
def test_what_is_no_tag_is_refused_and_changes_nothing(tmp_path, tag):
    run = made_run(tmp_path / "run")
    tunekit.set_tags(run, ["kept"])
    with pytest.raises(RunError, match="invalid tag"):
        tunekit.set_tags(run, ["fine", tag])
    assert run.tags == ["kept"]


def test_the_command_tags_a_run_and_lists_show_it(tmp_path):
    made_run(tmp_path / "runs" / "mine")

    def tunekit_runs(*words):
        answer = run_command("runs", *words, cwd=tmp_path)
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    assert tunekit_runs("tag", "mine", "a", "b") == "mine: a, b\n"
    assert tunekit_runs("tag", "mine") == "mine: a, b\n"
    assert "a, b" in tunekit_runs()
    assert "tags: a, b" in tunekit_runs("show", "mine")
    assert tunekit_runs("tag", "mine", "--clear") == "mine: no tags\n"


def test_a_run_keeps_the_note_that_it_was_given_last(tmp_path):
    run = made_run(tmp_path / "run")
    assert run.note == ""
    tunekit.set_note(run, " best so far:\r\n\tlower rank, 别的 \n")
    assert tunekit.Run(run.path).note == "best so far:\n\tlower rank, 别的"
    for bad, problem in (("x" * 10_001, "10,001 characters"), ("a\x1b[31m", "control characters")):
        with pytest.raises(RunError, match=problem):
            tunekit.set_note(run, bad)
    assert run.note.startswith("best so far")
    tunekit.set_note(run, "")
    assert run.note == ""


def test_the_command_sets_a_note_and_shows_it(tmp_path):
    made_run(tmp_path / "runs" / "mine")

    def tunekit_runs(*words, code=0):
        answer = run_command("runs", *words, cwd=tmp_path)
        assert answer.returncode == code, answer.stderr
        return answer.stdout + answer.stderr

    assert tunekit_runs("note", "mine", "keep: best rank") == "mine: keep: best rank\n"
    assert tunekit_runs("note", "mine") == "mine: keep: best rank\n"
    assert "note: keep: best rank" in tunekit_runs("show", "mine")
    assert "exclude each other" in tunekit_runs("note", "mine", "other", "--clear", code=2)
    assert tunekit_runs("note", "mine", "--clear") == "mine: no note\n"
