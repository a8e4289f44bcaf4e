"""The line by which a process that was started tells what became of it, as the one that started it reads it."""

import io
import json

import pytest

from tests.training.folders import made_run
from tunekit.api.background import _folder_of
from tunekit.errors import PlanError, RunError


def test_a_refused_run_is_refused_with_what_would_mend_its_recipe():
    line = {"kind": "PlanError", "problem": "it does not fit", "hint": "take less", "changes": ["data.max_length=64"]}
    with pytest.raises(PlanError, match="it does not fit") as refused:
        _folder_of(json.dumps(line), io.BytesIO())
    assert refused.value.hint == "take less" and refused.value.changes == ("data.max_length=64",)


def test_what_a_process_printed_that_told_nothing_is_the_reason():
    with pytest.raises(RunError, match="exited before it created a folder:\nkilled"):
        _folder_of("", io.BytesIO(b"killed\n"))


def test_a_run_that_is_there_is_the_one_of_the_folder(tmp_path):
    run = made_run(tmp_path / "run")
    assert _folder_of(json.dumps({"folder": str(run.path)}), io.BytesIO()) == str(run.path)
