"""Rows that a user's own function makes of the rows of a source.

`data.format: my_rows:convert` names it. It gets each row with all its columns, as a plain dict, and returns a row of
one of the known formats, or None to leave the row out. What it returns must be what JSON can hold.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tunekit.data.formats.row_formats import described
from tunekit.data.sources.files import Fault, Record, Table


@dataclass(frozen=True)
class LeftOut:
    """Stands for a row that the function left out."""


def converted(table: Table, function: Callable[[Any], Any]) -> Table:
    """A source whose records are what the function makes of those of another."""

    def read(_: Sequence[str]) -> Iterator[Record]:
        for record in table.read(table.columns or ()):
            value = _called(function, record.value) if isinstance(record.value, dict) else record.value
            yield Record(record.number, value)

    return Table(columns=None, read=read, unit=table.unit)


def _called(function: Callable[[Any], Any], row: dict[str, Any]) -> object:
    try:
        result = function(row)
    except Exception as error:  # noqa: BLE001  (the function is the user's: it may raise anything, and the row is bad)
        message = " ".join(str(error).split())
        return Fault(f"the row function raised {type(error).__name__}" + (f": {message[:200]}" if message else ""))
    if result is None:
        return LeftOut()
    if not isinstance(result, dict):
        return Fault(f"the row function must return a row (a dict) or None, got {described(result)}")
    try:
        return json.loads(json.dumps(result))  # its own objects, and lists where it has tuples
    except (TypeError, ValueError) as error:
        return Fault(f"the row function returned what JSON cannot hold: {error}")
