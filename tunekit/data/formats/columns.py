"""Columns that a file calls otherwise: `data.columns` maps our names to the file's.

A column that is read under another name is no longer there under its own, and a column of the file that has one of
our names gives way to the column that is read as it.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from tunekit.data.formats.row_formats import COLUMNS, OPTIONAL_COLUMNS, Row, listed
from tunekit.errors import DataError

NEEDED = tuple(dict.fromkeys(name for names in COLUMNS.values() for name in names))
"""Columns that a row of some format must have."""

KNOWN = tuple(dict.fromkeys((*NEEDED, *(name for names in OPTIONAL_COLUMNS.values() for name in names))))
"""Every column that some format reads."""


def check_mapping(columns: Mapping[str, str]) -> None:
    """Check the names on our side, and that every column of the file is read once.

    Raises:
        DataError: No format has a column of that name, or two are read from one.
    """
    for ours, theirs in columns.items():
        if ours not in KNOWN:
            near = get_close_matches(ours, KNOWN, n=1, cutoff=0.6)
            if theirs in KNOWN:
                hint = f"our name stands first: {{{theirs}: {ours}}}"
            else:
                hint = f"did you mean '{near[0]}'?" if near else f"the columns are {', '.join(KNOWN)}"
            raise DataError(f"data.columns.{ours}: no format has a column '{ours}'", hint=hint)
        same_source = [other for other, column in columns.items() if column == theirs and other != ours]
        if same_source:
            raise DataError(f"data.columns: {listed([ours, *same_source])} are all read from the column '{theirs}'")


def missing_columns(names: Sequence[str], columns: Mapping[str, str], *, only_needed: bool) -> str | None:
    """Return an error message if a file lacks a column that `data.columns` maps, else None.

    Args:
        names: The columns of the file, or of its first row.
        columns: From our names to the file's.
        only_needed: Leave out columns that a row may lack.
    """
    for ours, theirs in columns.items():
        if theirs not in names and (ours in NEEDED or not only_needed):
            near = get_close_matches(theirs, names, n=1, cutoff=0.6)
            advice = f"did you mean {listed(near)}?" if near else f"the columns are {listed(names)}"
            return f"no column {listed([theirs])}, which data.columns reads as {ours}; {advice}"
    return None


def name_in_file(ours: str, columns: Mapping[str, str]) -> str:
    """Return the file's name for a column."""
    return columns.get(ours, ours)


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """A row under our names."""
    if not columns:
        return row
    columns_kept = {name: value for name, value in row.items() if name not in columns and name not in columns.values()}
    return {**columns_kept, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}
