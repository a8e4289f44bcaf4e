"""What plans are made from is looked up once."""

import json

import pytest

from tests.rows import row_for
from tests.training.folders import made_run
from tunekit.api import plan_inputs
from tunekit.api.plan_inputs import AFTER_READING, Lookup, run_of
from tunekit.estimates.hardware.machines import find_machine
from tunekit.recipe.load import load_recipe
from tunekit.recipe.sections.data import DataSection

QUICKSTART = load_recipe("sft/quickstart")


def test_rows_are_read_again_only_where_other_rows_are_read():
    lookup = Lookup(["h100"])
    rows = lookup.data(QUICKSTART)
    for overrides in (["data.max_length=64"], ["data.packing=true"], ["data.shuffle=false"]):
        assert lookup.data(load_recipe("sft/quickstart", overrides)) is rows
    for overrides in (["data.eval=null"], ["data.max_bad_rows=1"], ["data.train=example:tales.txt"]):
        assert lookup.data(load_recipe("sft/quickstart", overrides)) is not rows


def test_rows_are_read_again_for_a_method_that_reads_them_otherwise(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row_for("dpo", 1), **row_for("sft", 1)}) + "\n")
    source = {"model": "pico", "data": {"train": str(tmp_path / "rows.jsonl")}}
    lookup = Lookup([])
    formats = [lookup.data(load_recipe({**source, "method": method})).train[0].format for method in ("sft", "dpo")]
    assert formats == ["messages", "preference"]


def test_what_is_left_out_of_the_reading_are_fields_of_the_data():
    assert set(DataSection.model_fields) >= AFTER_READING


def test_a_plan_is_that_of_the_machine_that_is_named():
    lookup = Lookup(["h100", "t4"])
    for name in ("h100", "t4"):
        assert lookup.plan(QUICKSTART, name).device == find_machine(name).hardware().device


@pytest.mark.parametrize(
    ("phase", "has_checkpoint", "is_resumed"),
    [("interrupted", True, True), ("failed", True, True), ("failed", False, False), ("finished", True, False)],
)
def test_a_recipe_resumes_its_newest_run_where_that_ended_early(
    phase, has_checkpoint, is_resumed, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_inputs, "can_go_on", lambda run: has_checkpoint)
    run = made_run(tmp_path / "runs" / "mine-20260101-120000", phase=phase)
    kept = run.recipe
    recipe = kept.model_copy(update={"output": kept.output.model_copy(update={"dir": None, "name": "mine"})})
    resumed = run_of(recipe)
    assert (None if resumed is None else resumed.name) == (run.name if is_resumed else None)
