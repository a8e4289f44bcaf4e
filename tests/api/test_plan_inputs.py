"""What plans are made from is looked up once."""

from tunekit.api.plan_inputs import AFTER_READING, Lookup
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


def test_what_is_left_out_of_the_reading_are_fields_of_the_data():
    assert set(DataSection.model_fields) >= AFTER_READING


def test_a_plan_is_that_of_the_machine_that_is_named():
    lookup = Lookup(["h100", "t4"])
    for name in ("h100", "t4"):
        assert lookup.plan(QUICKSTART, name).device == find_machine(name).hardware().device
