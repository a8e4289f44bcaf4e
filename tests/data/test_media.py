"""Rows with images, video or audio are refused; texts that talk of them are texts."""

import json
from pathlib import Path

import datasets
import pytest

from tests.rows import check_row
from tunekit.data.formats.convert import asked_in
from tunekit.data.formats.row_formats import BadRow, Learner
from tunekit.data.reports.look import look_at
from tunekit.data.sources.hub import open_dataset, open_stream
from tunekit.data.sources.load import load_data, stream_rows
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

ASK, SAY = {"role": "user", "content": "<image>what is it?"}, {"role": "assistant", "content": "a cat"}
CHAT = {"messages": [ASK, SAY]}
ALONE = "remove the column to train on the text only"

ROWS = {
    "messages": CHAT,
    "sharegpt": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    "alpaca": {"instruction": "hi", "output": "ho"},
    "prompt_completion": {"prompt": "hi", "completion": "ho"},
    "text": {"text": "a cat"},
    "tokens": {"input_ids": [1, 2]},
    "preference": {"prompt": "hi", "chosen": "ho", "rejected": "no"},
    "ranking": {"prompt": "hi", "completions": ["ho", "no"], "scores": [2, 1]},
    "unpaired_preference": {"prompt": "hi", "completion": "ho", "label": True},
    "stepwise_supervision": {"prompt": "hi", "completions": ["ho"], "labels": [True]},
    "prompts": {"prompt": "hi", "answer": "ho"},
}


@pytest.mark.parametrize("format", ROWS)
@pytest.mark.parametrize(
    ("column", "held", "kind"),
    [
        ("images", ["cat.png"], "images"),
        ("image", "cat.png", "images"),
        ("Image", {"bytes": "…", "path": None}, "images"),
        ("videos", ["cat.mp4"], "videos"),
        ("audio", {"array": [0.1], "sampling_rate": 16000}, "audio"),
        ("audios", ["cat.wav"], "audio"),
        ("pixel_values", [[0.1]], "images"),
    ],
)
def test_a_column_of_media_is_refused_in_every_format(format, column, held, kind):
    with pytest.raises(BadRow) as caught:
        check_row({**ROWS[format], column: held}, format)
    assert str(caught.value) == f"column {column} holds {kind}, but only text is supported; {ALONE}"


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image"}, "image"),
        ({"type": "image_url", "image_url": {"url": "cat.png"}}, "image"),
        ({"type": "input_audio", "input_audio": {"data": "…"}}, "audio"),
        ({"type": "audio", "path": "cat.wav"}, "audio"),
        ({"type": "video_url", "video_url": {"url": "cat.mp4"}}, "video"),
        ({"image": "cat.png"}, "image"),
    ],
)
def test_a_part_that_is_no_text_is_refused(part, kind):
    asked = {"role": "user", "content": [{"type": "text", "text": "what?"}, part]}
    with pytest.raises(BadRow) as caught:
        check_row({"messages": [asked, SAY]}, "messages")
    assert str(caught.value) == (
        f"messages[0].content[1] is of type {kind}, but only text is supported; "
        "make the content a string to train on the text only"
    )


def test_a_message_with_an_image_of_its_own_is_refused():
    with pytest.raises(
        BadRow, match=r"^messages\[0\]\.images holds images, but only text is supported; remove the key"
    ):
        check_row({"messages": [{**ASK, "images": ["cat.png"]}, SAY]}, "messages")


@pytest.mark.parametrize("column", ["image_path", "images", "video_url"])
def test_a_placeholder_with_a_column_that_names_its_medium_is_refused(column):
    kind = column.partition("_")[0].removesuffix("s")
    chat = {"messages": [{"role": "user", "content": f"<{kind}>what is it?"}, SAY]}
    with pytest.raises(BadRow) as caught:
        check_row({**chat, column: "" if column == "images" else "cat"}, "messages")
    assert str(caught.value) == (
        f"the text has <{kind}> placeholders for column {column}, but only text is supported; "
        "remove both to train on the text only"
    )


@pytest.mark.parametrize(
    "row",
    [
        CHAT,
        {"text": "<svg><image></svg> <video> and <audio>"},
        {**CHAT, "images": None, "tool": "<image>"},
        {"text": "a cat", "images": [], "audio": "", "videos": [None]},
        {"text": "a <video>", "image_url": "cat.png", "num_images": 3, "image": False},
        {"messages": [{**ASK, "images": []}, SAY]},
    ],
    ids=["chat", "markup", "null", "empty", "another kind", "empty key"],
)
def test_a_text_that_talks_of_images_is_a_text(row):
    check_row(row, "messages" if "messages" in row else "text")
    asked_in(row)


def write(path: Path, rows: list[dict]) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        datasets.Dataset.from_list(rows).to_parquet(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("how", ["trained on", "streamed", "held out", "looked at"])
def test_wherever_rows_are_read_an_image_is_refused_with_its_place(name, how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [{**CHAT, "images": []}] if name == "rows.jsonl" else [{**CHAT, "images": None}]
    if name == "rows.jsonl":
        texts[0] = {"messages": [{**ASK, "content": "hi"}, SAY], "images": []}
    write(Path(name), [*texts, {**CHAT, "images": ["cat.png"]}])
    write(Path("texts.jsonl"), [CHAT])
    learner = Learner("sft", ("messages",))
    place = "rows.jsonl:2" if name == "rows.jsonl" else "rows.parquet row 2"
    expected = f"{place}: column images holds images, but only text is supported; {ALONE}"
    if how == "looked at":
        (source,) = DataSection(train=name).sources
        look = look_at(source, learner, num_records=10, default_split="train")
        assert [f"{bad.place}: {bad.reason}" for bad in look.bad] == [expected]
        return
    with pytest.raises(DataError) as caught:
        if how == "streamed":
            (source,) = DataSection(train=name, streaming=True).sources
            list(stream_rows(source, learner, max_bad_rows=0, num_rows=10))
        elif how == "held out":
            load_data(DataSection(train="texts.jsonl", eval=name), learner)
        else:
            load_data(DataSection(train=name), learner)
    assert str(caught.value) == expected


def test_rows_with_images_may_be_left_out_of_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("rows.jsonl"), [CHAT, {**CHAT, "images": ["cat.png"]}, {**CHAT, "images": ["dog.png"]}])
    data = load_data(DataSection(train="rows.jsonl", max_bad_rows=2))
    assert len(data.train[0]) == 1 and len(data.skipped) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_images_of_a_hub_dataset_are_found_without_being_decoded(streamed):
    features = datasets.Features({"text": datasets.Value("string"), "images": datasets.List(datasets.Image())})
    rows = {"text": ["a", "b"], "images": [[], [{"bytes": b"no picture", "path": None}]]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    table = open_stream(dataset.to_iterable_dataset(), "cats") if streamed else open_dataset(dataset)
    first, second = table.read(("text", "images"))
    check_row(first.value, "text")
    with pytest.raises(BadRow, match="column images holds images"):
        check_row(second.value, "text")
    assert [record.value for record in table.read(("text",))] == [{"text": "a"}, {"text": "b"}]
