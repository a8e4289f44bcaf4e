"""Published speeds as data: sources, and a half that is held out by a rule."""

from collections import Counter

from tests.estimates.published_speed import UNITS, rows


def test_half_of_the_rows_of_every_source_are_held_out():
    assert len(rows()) >= 160
    for name, number in Counter(row.name for row in rows()).items():
        held_out = sum(row.held_out for row in rows() if row.name == name)
        assert abs(2 * held_out - number) <= 1


def test_every_row_has_a_source_and_one_figure():
    for row in rows():
        assert row.source.startswith(("github.com/", "gist.github.com/"))
        assert sum(unit in row.setting for unit in UNITS) == 1
        assert row.tokens_per_second > 0
