"""Which format columns are read as, alone and together, and what is said where they are two."""

import itertools
import json
import typing

import pytest

from tunekit.data.formats.row_formats import (
    BECOMES,
    COLUMNS,
    OPTIONAL_COLUMNS,
    TABLES,
    BadRow,
    Format,
    learner_of,
    recognise,
)
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.estimates.facts import DataFacts
from tunekit.recipe.schema import choices_of
from tunekit.recipe.sections.data import DataSection, SourceFormat

PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ROWS: dict[str, dict] = {
    "messages": {"messages": CHAT},
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    "alpaca": {"instruction": "hi", "output": "ho"},
    "prompt_completion": {"prompt": "hi", "completion": "ho"},
    "captions": {"image": PNG, "caption": "hi"},
    "text": {"text": "hi"},
    "tokens": {"input_ids": [1, 2]},
    "preference": {"prompt": "hi", "chosen": "ho", "rejected": "he"},
    "ranking": {"prompt": "hi", "completions": ["ho", "he"], "scores": [1, 2]},
    "unpaired_preference": {"prompt": "hi", "completion": "ho", "label": True},
    "stepwise_supervision": {"prompt": "hi", "completions": ["ho", "he"], "labels": [True, False]},
    "classification": {"prompt": "hi", "label": "greeting"},
    "prompts": {"prompt": "hi", "answer": "ho"},
}
"""One good row of every format."""


def test_the_tables_of_formats_name_each_format_and_no_other():
    sources, learned = set(typing.get_args(SourceFormat)), set(typing.get_args(Format))
    assert set(COLUMNS) == sources
    assert set(BECOMES.values()) == learned
    assert set(TABLES["as_completions"]) <= sources
    assert {format for one, others in TABLES["other_method"].items() for format in (one, *others)} <= learned
    known = {name for names in (*COLUMNS.values(), *OPTIONAL_COLUMNS.values()) for name in names}
    assert {name for pair in TABLES["partners"] for name in pair} <= known


WINNERS = {
    **{frozenset({"captions", other}): other for other in COLUMNS if other not in ("captions", "text")},
    **{frozenset({"prompts", other}): other for other in COLUMNS if other != "prompts"},
    # A label of a text is read by its own method alone.
    **{frozenset({"classification", other}): other for other in COLUMNS if other not in ("classification", "prompts")},
    frozenset({"classification", "prompt_completion"}): "unpaired_preference",
    frozenset({"prompt_completion", "unpaired_preference"}): "unpaired_preference",
    frozenset({"sharegpt", "preference"}): "preference",
}
"""Pairs of formats of whose columns together one makes sense. Of all others, neither does more than the other."""


def test_the_formats_are_the_same_everywhere():
    formats = set(typing.get_args(SourceFormat))
    assert set(COLUMNS) == set(OPTIONAL_COLUMNS) == set(BECOMES) == set(ROWS) == formats
    assert set(choices_of(DataSection.model_fields["format"])) == formats | {"auto"}
    facts = choices_of(DataFacts.model_fields["format"])
    assert set(facts) == set(typing.get_args(Format)) == set(BECOMES.values())


@pytest.mark.parametrize("format", COLUMNS)
def test_a_format_is_recognised_from_its_columns_and_what_else_they_may_be(format):
    learned = [format] if format == "classification" else []
    assert recognise(COLUMNS[format], learned) == format
    assert recognise((*COLUMNS[format], *OPTIONAL_COLUMNS[format]), [BECOMES[format]]) == format
    assert recognise((*COLUMNS[format], "id", "source"), learned) == format


PAIRS = [pair for pair in itertools.combinations(COLUMNS, 2) if pair != ("classification", "prompts")]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_columns_of_two_formats_are_one_of_them_or_refused_with_both(one, other):
    columns = dict.fromkeys((*COLUMNS[one], *COLUMNS[other]))
    winner = WINNERS.get(frozenset({one, other}))
    if winner is not None:
        assert recognise(columns) == winner
        return
    with pytest.raises(BadRow) as caught:
        recognise(columns)
    assert str(caught.value) == (
        f"the columns match {one} ({', '.join(COLUMNS[one])}) or {other} ({', '.join(COLUMNS[other])}); set "
        f"data.format={one} or data.format={other}"
    )


@pytest.mark.parametrize(
    ("columns", "format"),
    [
        ("prompt chosen rejected score_chosen score_rejected", "preference"),
        ("conversations chosen rejected", "preference"),
        ("prompt response", "prompts"),
        ("prompt solution tests", "prompts"),
        ("input_ids attention_mask labels", "tokens"),
        ("prompt completion score", "prompt_completion"),
        ("instruction input output text", "alpaca or text"),
        ("messages chosen rejected prompt", "messages or preference"),
    ],
)
def test_columns_of_well_known_datasets(columns, format):
    if " or " not in format:
        assert recognise(columns.split()) == format
        return
    with pytest.raises(BadRow) as caught:
        recognise(columns.split())
    assert str(caught.value).endswith("; set data.format=" + format.replace(" or ", " or data.format="))


@pytest.mark.parametrize(
    ("method", "columns", "format"),
    [
        ("dpo", "messages chosen rejected", "preference"),
        ("dpo", "prompt prompt_id chosen rejected messages score_chosen score_rejected", "preference"),
        ("sft", "prompt prompt_id chosen rejected messages score_chosen score_rejected", "messages"),
        ("sft", "prompt completion label", "unpaired_preference"),
        ("classification", "prompt completion label", "classification"),
        ("classification", "messages prompt label", "classification"),
    ],
)
def test_of_two_formats_the_one_that_the_method_learns_from_is_meant(method, columns, format):
    assert recognise(columns.split(), learner_of(method).formats) == format


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        ("prompt label", "column label requires a column completion; data.format=prompts reads the prompt and "
                         "passes label to the rewards"),
        ("prompt chosen", "column chosen requires a column rejected; data.format=prompts reads the prompt and "
                          "passes chosen to the rewards"),
        ("prompt completions", "column completions requires a column scores or labels; data.format=prompts reads the "
                               "prompt"),
        ("prompt chosen rejectd", "rename rejectd to rejected; data.format=prompts reads the prompt and passes "
                                  "chosen to the rewards"),
        ("chosen rejectd", "rename rejectd to rejected"),
        ("chosen", "column chosen requires a column rejected"),
        ("completion", "column completion requires a column prompt"),
        ("inputids", "rename inputids to input_ids"),
    ],
)  # fmt: skip
def test_a_part_of_a_format_is_refused_with_what_is_missing(columns, advice):
    with pytest.raises(BadRow) as caught:
        recognise(columns.split())
    assert str(caught.value) == f"no format matches the columns {columns.replace(' ', ', ')}; {advice}"


def write(path, *rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


UNLABELED = [format for format in ROWS if format != "classification"]
"""Formats that are told apart whatever the method; the rows of a classifier are read as such by no other."""


@pytest.mark.parametrize(("first", "later"), list(itertools.permutations(UNLABELED, 2)))
def test_a_file_or_folder_of_two_formats_is_refused_with_both_and_the_place(first, later, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    write(tmp_path / "mixed.jsonl", ROWS[first], ROWS[first], ROWS[later])
    write(tmp_path / "folder" / "a.jsonl", ROWS[first])
    write(tmp_path / "folder" / "b.jsonl", ROWS[later])
    for source, place in (("mixed.jsonl", "mixed.jsonl:3"), ("folder", "folder/b.jsonl:1")):
        with pytest.raises(DataError) as caught:
            load_data(DataSection(train=source))
        message = str(caught.value)
        assert message.startswith(f"{place}: ")
        for format in (first, later):
            assert f"{format} ({', '.join(COLUMNS[format])})" in message


def test_a_row_that_reads_as_two_formats_is_refused_wherever_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", ROWS["text"], {**ROWS["text"], **ROWS["messages"]})
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train="rows.jsonl"))
    assert str(caught.value) == (
        "rows.jsonl:2: the columns match messages (messages) or text (text), but earlier rows match text (text); a "
        "source must have one format (data.format=text reads all rows as that format)"
    )
    data = load_data(DataSection(train="rows.jsonl", format="text"))
    assert data.notes == ["rows.jsonl: 2 rows of text; ignored: messages"]


def test_tables_of_two_formats_are_told_by_their_headers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("prompt,completion\nhi,ho\n")
    (tmp_path / "b.csv").write_text("prompt,completion,label\nhi,ho,true\n")
    with pytest.raises(DataError) as caught:
        load_data(DataSection(train="*.csv"))
    assert str(caught.value) == (
        "b.csv:1: the columns match unpaired_preference (prompt, completion, label), but earlier rows match "
        "prompt_completion (prompt, completion); a source must have one format (data.format=prompt_completion "
        "reads all rows as that format)"
    )
