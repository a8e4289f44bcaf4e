"""Errors that a process tells another: they come out as they went in, whatever their class."""

import io
import json
import os

import pytest

from tests.training.folders import made_run
from tunekit import errors
from tunekit.api import background
from tunekit.errors import MemoryShortError, ModelError, PlanError, TunekitError
from tunekit.launching.local import raised
from tunekit.probe.model import _hub_errors, _HubError
from tunekit.recipe.sections.model import ModelSection
from tunekit.reporting.diagnosis import diagnose_run
from tunekit.runs.record import Record, errors_of
from tunekit.runs.small_files import Place


def subclasses(kind):
    return [kind, *(one for below in kind.__subclasses__() for one in subclasses(below))]


def hub_error():
    """The error of a hub that cannot be reached, as the probe raises it."""
    with pytest.raises(ModelError) as caught, _hub_errors(ModelSection(path="Qwen/Qwen3-0.6B")):
        raise OSError("no route to host")
    return caught.value


def through_a_pipe(error):
    """The error that a starter raises which is told of this one."""
    reading, writing = os.pipe()
    background.Announcer(writing).refuse(error)
    with os.fdopen(reading) as told, pytest.raises(TunekitError) as caught:
        background._folder_of(told.readline(), io.BytesIO())
    return caught.value


@pytest.mark.parametrize("kind", subclasses(TunekitError), ids=lambda kind: kind.__name__)
def test_an_error_of_every_class_crosses_to_a_starter_with_problem_hint_and_changes(kind):
    error = kind("it is wrong", hint="mend it", changes=["train.seed=3"])
    there = through_a_pipe(error)
    assert isinstance(error, type(there)), "what is caught here is caught there"
    assert type(there) is kind or kind.__module__ != errors.__name__
    assert (there.problem, there.hint, there.changes) == ("it is wrong", "mend it", ("train.seed=3",))


def test_a_hub_that_cannot_be_reached_is_told_to_a_starter():
    error = hub_error()
    assert type(error) is _HubError
    there = through_a_pipe(error)
    assert type(there) is ModelError and str(there) == str(error)
    assert "the Hub cannot be reached" in there.problem and there.hint is not None


def test_a_plan_that_does_not_fit_crosses_with_its_sizes():
    there = through_a_pipe(PlanError("too large", needed_bytes=3, limit_bytes=2))
    assert isinstance(there, PlanError) and (there.needed_bytes, there.limit_bytes) == (3, 2)


@pytest.mark.parametrize("name", ["FutureError", "Path", "writing", "__name__"])
def test_a_kind_that_is_none_is_an_error_with_its_words_all_the_same(name):
    there = errors.from_words({"kind": name, "problem": "it is wrong", "hint": None})
    assert type(there) is TunekitError and there.problem == "it is wrong"


def test_an_error_of_a_private_class_is_told_by_the_process_that_had_it_and_diagnosed(tmp_path):
    run = made_run(tmp_path / "run", phase="failed")
    Record(run, Place()).write_error(hub_error())
    (words,) = errors_of(run)
    assert type(raised(words)) is ModelError and raised(words).problem == hub_error().problem
    found = diagnose_run(run)
    assert found is not None and found.cause == "model"


def test_changes_that_mend_a_run_come_out_of_its_folder(tmp_path):
    run = made_run(tmp_path / "run", phase="failed")
    Record(run, Place()).write_error(MemoryShortError("step 5: out of memory", changes=["train.micro_batch_size=1"]))
    error = raised(json.loads((run.path / "errors" / "rank-0.json").read_text()))
    assert type(error) is MemoryShortError and error.changes == ("train.micro_batch_size=1",)
