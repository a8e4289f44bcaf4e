"""The tables of keys: each is read, and says of every key something that a recipe or the report knows."""

from typing import get_args

import pytest
from pydantic import ValidationError

from tunekit.migration.draft import reason
from tunekit.migration.report import TOOLS
from tunekit.migration.table import Table, tool_table
from tunekit.recipe.schema import holders_along
from tunekit.recipe.sections.section import Tracker


def fields_of(table: Table) -> set[str]:
    rows = [*table.fields.values(), *(row for rows in table.methods.values() for row in rows.values())]
    rows += [side for switch in table.switches.values() for side in (switch.when_on, switch.when_off)]
    named = {row if isinstance(row, str) else row.model_dump().get("field") for row in rows}
    named |= {row if isinstance(row, str) else row.prepared for row in table.prepared.values()}
    below = [fields_of(part) for part in (table.adapter, table.rows) if part is not None]
    return (named - {None}).union(*below)


@pytest.mark.parametrize("name", ["trainer", "megatron", "ms-swift-megatron", "llama-factory-v1", *TOOLS])
def test_every_field_that_a_table_names_is_one_of_a_recipe(name) -> None:
    table = tool_table(name)
    assert table.rules()
    for field in fields_of(table):
        parts = tuple(field.split("."))
        expected = parts[:2] if parts[:2] == ("method", "trainer_args") else parts
        assert len(holders_along(parts)) == len(expected), field


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"fields": {"rank": "adapter.rnak"}}, "adapter.rnak: not a recipe field"),
        ({"fields": {"rank": "adapter.rank"}, "trainer_args": {"rank": "rank"}}, "set twice, .*: rank"),
        ({"suspicious": {"rank": "is old"}}, "only suspicious: rank"),
        ({"field": {"rank": "adapter.rank"}}, "Extra inputs are not permitted"),
        ({"computed": {"training.nothing": "rank"}}, "nothing"),
        ({"silent": [{"why": "nothing", "keys": "rank"}]}, "nothing"),
    ],
)
def test_a_slip_in_a_table_is_told_when_it_is_read(table, message) -> None:
    with pytest.raises((ValidationError, AttributeError, KeyError), match=message):
        Table.model_validate(table)


def test_the_reason_for_other_trackers_names_those_that_there_are() -> None:
    *others, last = get_args(Tracker)
    assert (
        reason("no_tracker")
        == f"metrics are kept in the run folder; output.report_to supports {', '.join(others)} and {last}"
    )
