"""Pictures of rows: every way to write them, and every way in which they are broken."""

import base64
import io
import json
import os
from collections import Counter

import pytest
from PIL import Image

from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media import files, pictures
from tunekit.data.media.expand import _moved, _without
from tunekit.data.media.in_rows import as_parts
from tunekit.data.media.kinds import KINDS
from tunekit.data.media.pictures import Picture, read_picture
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

MARK = KINDS["image"].mark
ANSWER = {"role": "assistant", "content": "red"}


def png(size=(4, 6), mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, size).save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.png").write_bytes(png())
    (tmp_path / "data" / "b.jpg").write_bytes(png((8, 4), format="JPEG"))
    (tmp_path / "outside.png").write_bytes(png())
    return tmp_path / "data"


def load(folder, *rows, **section):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_data(DataSection(train=str(file), **section), learner_of("sft")).train[0]


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def image(value):
    return {"type": "image", "image": value}


TEXT = {"type": "text", "text": "what?"}
DATA_URL = "data:image/png;base64," + base64.b64encode(png((3, 5))).decode()

WAYS = {
    "a part with a path": asked(image("a.png"), TEXT),
    "a part with a path of its own name": asked({"type": "image", "path": "a.png"}, TEXT),
    "a part without a type": asked({"image": "a.png"}, {"text": "what?"}),
    "a part with nulls, as Parquet has it": asked(
        {"type": "image", "image": "a.png", "text": None}, {"type": "text", "text": "what?", "image": None}
    ),
    "an absolute path": None,
    "a file URL": None,
    "Axolotl's base64": asked({"type": "image", "base64": base64.b64encode(png()).decode()}, TEXT),
    "OpenAI's image_url": asked({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT),
    "a column of pictures with parts": {
        "messages": asked({"type": "image"}, TEXT)["messages"],
        "images": ["a.png"],
    },
    "LLaVA": {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}],
    },
    "LLaMA-Factory": {"images": ["a.png"], "instruction": "<image>what?", "output": "red"},
    "without a mark, as TRL takes it": {
        "images": ["a.png"],
        "messages": [{"role": "user", "content": "what?"}, ANSWER],
    },
    "prompt and completion": {
        "prompt": [{"role": "user", "content": [image("a.png"), TEXT]}],
        "completion": [ANSWER],
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_picture_is_read_alike(way, folder):
    row = WAYS[way]
    if row is None:
        path = str((folder / "a.png").resolve())
        row = asked(image(path if way == "an absolute path" else f"file://{path}"), TEXT)
    rows = load(folder, row)
    (read,) = list(rows.rows)
    question = (read["messages"] if "messages" in read else read["prompt"])[0]
    assert question == {"role": "user", "content": f"{MARK}what?"}
    (picture,) = map(Picture.of_row, read["__media__"])
    assert (picture.width, picture.height) == (4, 6)
    assert picture.path == str((folder / "a.png").resolve()) or "base64" in way
    assert read_picture(picture).size == (4, 6)
    assert rows.media
    assert "1 image" in rows.notes[0]
    assert "ignored" not in rows.notes[0]


@pytest.mark.parametrize("value", [DATA_URL, {"type": "image_url", "image_url": {"url": DATA_URL}}])
def test_a_picture_in_a_data_url_is_kept_as_a_file(value, folder):
    part = value if isinstance(value, dict) else image(value)
    (picture,) = map(Picture.of_row, load(folder, asked(part, TEXT)).rows[0]["__media__"])
    assert (picture.width, picture.height) == (3, 5)
    assert read_picture(picture).size == (3, 5)


def test_pictures_in_columns_of_bytes_are_kept_as_files(folder):
    import datasets

    rows = {
        "messages": [[{"role": "user", "content": "<image> or <image>?"}, ANSWER]],
        "images": [[{"bytes": png((4, 6)), "path": None}, {"bytes": png((8, 9)), "path": "lost.png"}]],
    }
    datasets.Dataset.from_dict(rows).to_parquet(str(folder / "rows.parquet"))
    section = DataSection(train=str(folder / "rows.parquet"))
    row = load_data(section, learner_of("sft")).train[0].rows[0]
    assert row["messages"][0]["content"] == f"{MARK} or {MARK}?"
    assert [picture["size"] for picture in row["__media__"]] == [[4, 6], [8, 9]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_of_pictures_may_have_another_name(kind, folder):
    import datasets

    row = {"pics": ["a.png"], "messages": [{"role": "user", "content": "<image>what?"}, ANSWER]}
    rows = datasets.Dataset.from_list([row])
    path = str(folder / f"rows.{kind}")
    rows.to_parquet(path) if kind == "parquet" else rows.to_json(path)
    section = DataSection(train=path, columns={"images": "pics"}, image_folder=str(folder))
    data = load_data(section, learner_of("sft")).train[0]
    assert data.rows[0]["__media__"][0]["path"] == str((folder / "a.png").resolve())
    assert "ignored" not in data.notes[0]
    pair = {"pics": ["a.png"], "prompt": row["messages"][:1], "chosen": [ANSWER], "rejected": [ANSWER]}
    rows = datasets.Dataset.from_list([pair])
    rows.to_parquet(path) if kind == "parquet" else rows.to_json(path)
    with pytest.raises(DataError, match="only text is supported"):
        load_data(section, learner_of("reward"))


def test_a_picture_is_as_large_as_it_is_shown(folder):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    (folder / "turned.jpg").write_bytes(png((8, 4), format="JPEG", exif=exif))
    (picture,) = map(Picture.of_row, load(folder, asked(image("turned.jpg"), TEXT)).rows[0]["__media__"])
    assert (picture.width, picture.height) == (4, 8)
    assert read_picture(picture).size == (4, 8)


def test_a_column_of_text_that_talks_of_images_is_text(folder):
    row = {"messages": [{"role": "user", "content": "write <image> in HTML"}, ANSWER]}
    rows = load(folder, row)
    assert rows.rows[0] == row
    assert not rows.media


def test_the_character_of_a_mark_is_text_where_a_row_has_no_pictures(folder):
    row = {"messages": [{"role": "user", "content": f"from a PDF: {MARK}"}, ANSWER]}
    assert list(load(folder, row).rows) == [row]


def test_messages_become_parts_for_a_chat_template():
    assert as_parts([{"role": "user", "content": f"a{MARK}{MARK}b"}, {"role": "assistant", "content": ""}]) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image"},
                {"type": "image"},
                {"type": "text", "text": "b"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
    ]


def test_spans_move_with_what_replaces_marks_and_leave_it_out():
    marks, replaced = [(2, 5), (7, 10)], [(2, 12), (14, 15)]
    assert _moved([(0, 2), (5, 7), (10, 12)], marks, replaced) == [(0, 2), (12, 14), (15, 17)]
    assert _without([(0, 17)], replaced) == [(0, 2), (12, 14), (15, 17)]


def damaged(data, at):
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def gif():
    file = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


FILES = {
    "empty.png": b"",
    "text.png": b"not a picture",
    "cut.png": png((64, 64))[:60],
    "cut.jpg": png((64, 64), format="JPEG")[:-40],
    "flipped.png": damaged(png((64, 64)), 45),
    "animated.gif": gif(),
    "page.html": b"<html></html>",
    "vector.svg": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
}

AT = "messages[0].content[0]"
BROKEN = {
    "missing": (asked(image("no.png")), f"{AT}: no image 'no.png' in"),
    "missing folder": (asked(image("no/a.png")), f"{AT}: no image 'no/a.png' in"),
    "empty name": (asked(image("")), f"{AT} must be a path, a data URL or an image, got a string"),
    "a number": (asked(image(5)), f"{AT} must be a path, a data URL or an image, got the number 5"),
    "a list": (asked(image(["a.png"])), f"{AT} must be a path, a data URL or an image, got a list"),
    "no image in an object": (
        asked(image({"width": 5})),
        f"{AT} must be a path, a data URL or an image, got null",
    ),
    "outside": (asked(image("../outside.png")), f"{AT}: '../outside.png' is outside of"),
    "an absolute path outside": (asked(image("/etc/hostname")), f"{AT}: '/etc/hostname' is outside of"),
    "a link outside": (asked(image("link.png")), f"{AT}: 'link.png' is outside of"),
    "a folder": (asked(image("folder")), f"{AT}: 'folder' is not a regular file"),
    "a pipe": (asked(image("pipe")), f"{AT}: 'pipe' is not a regular file"),
    "a URL": (asked(image("https://example.com/a.png")), "is a URL; download the image and name its file"),
    "empty": (asked(image("empty.png")), f"{AT}: 'empty.png' is empty"),
    "text": (asked(image("text.png")), f"{AT}: 'text.png' is not an image that can be read"),
    "a page": (asked(image("page.html")), f"{AT}: 'page.html' is not an image that can be read"),
    "a drawing": (asked(image("vector.svg")), f"{AT}: 'vector.svg' is not an image that can be read"),
    "a PNG that ends early": (asked(image("cut.png")), f"{AT}: 'cut.png' is damaged"),
    "a JPEG that ends early": (
        asked(image("cut.jpg")),
        f"{AT}: 'cut.jpg' is damaged: the file ends within the image",
    ),
    "a PNG with a wrong byte": (asked(image("flipped.png")), f"{AT}: 'flipped.png' is damaged"),
    "animated": (asked(image("animated.gif")), f"{AT}: 'animated.gif' is animated"),
    "a bomb": (asked(image("large.png")), f"{AT}: 'large.png' has 40 x 60 pixels, more than 1,000; shrink it"),
    "a large file": (asked(image("heavy.png")), f"{AT}: 'heavy.png' is larger than 0 MiB"),
    "a data URL without a comma": (asked(image("data:image/png;base64")), f"{AT} is a data URL without a comma"),
    "a data URL not in base64": (
        asked(image("data:image/png;base64,!!")),
        f"{AT} is a data URL without base64 encoding",
    ),
    "a data URL without a picture": (asked(image("data:,hi")), f"{AT} is not an image that can be read"),
    "an empty data URL": (asked(image("data:image/png;base64,")), f"{AT} is empty"),
    "a mark too many": (
        {"images": ["a.png"], "messages": [{"role": "user", "content": "<image><image>"}, ANSWER]},
        "2 <image> marks in the texts, but 1 image in column images",
    ),
    "a picture too many": (
        {"images": ["a.png", "b.jpg"], "messages": [{"role": "user", "content": "<image>"}, ANSWER]},
        "1 <image> mark in the texts, but 2 images in column images",
    ),
    "a part too many": (
        {"images": ["a.png"], **asked({"type": "image"}, {"type": "image"})},
        "2 <image> marks in the texts, but 1 image in column images",
    ),
    "a part without a picture": (
        asked({"type": "image"}),
        "1 <image> mark in the texts, but 0 images in column images",
    ),
    "two columns": (
        {"images": ["a.png"], "image": "b.jpg", "messages": [{"role": "user", "content": "<image>"}, ANSWER]},
        "columns images and image both contain images; keep one of them",
    ),
    "no place": (
        {"images": ["a.png"], "messages": [{"role": "system", "content": "hi"}, ANSWER]},
        "column images contains images, but the row has no user message for them",
    ),
    "an answer with a picture": (
        {"messages": [{"role": "user", "content": "draw"}, {"role": "assistant", "content": [image("a.png")]}]},
        "messages[1] is an assistant message with an image; models answer in text",
    ),
    "a document": (
        asked({"type": "file", "file": "a.pdf"}),
        "is of type file, but only text, images, audio clips and videos",
    ),
    "a part that is a number": (asked(5), f"{AT} must be an object {{type}}, got the number 5"),
    "a text that is a number": (
        asked({"type": "text", "text": 5}),
        f"{AT}.text must be a string, got the number 5",
    ),
    "the character that stands for a picture": (
        {"images": ["a.png"], "messages": [{"role": "user", "content": f"<image>{MARK}"}, ANSWER]},
        "the text contains U+FFFC, which marks images here; remove it",
    ),
    "a text to complete": (
        {"images": ["a.png"], "prompt": "<image>what?", "completion": "red"},
        "prompt is a plain text, but images need messages; make it a list of messages",
    ),
    "boxes of ms-swift": (
        {
            "images": ["a.png"],
            "messages": [{"role": "user", "content": "<image><bbox>"}, ANSWER],
            "objects": {"ref": [], "bbox": [[1, 2]]},
        },
        "column objects contains boxes; write them into the texts in the model's format, and remove it",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_told_with_its_line_and_its_picture(kind, folder, monkeypatch):
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "large.png").write_bytes(png((40, 60)))
    (folder / "heavy.png").write_bytes(png() + bytes(20_000))
    monkeypatch.setattr(pictures, "MAX_PIXELS", 64 * 64 if kind != "a bomb" else 1000)
    if kind == "a large file":
        monkeypatch.setattr(files, "MAX_FILE_BYTES", 10_000)
    row, message = BROKEN[kind]
    fine = asked(image("a.png"), TEXT) if "prompt" not in row else {**row, "prompt": [{"role": "user", "content": "a"}]}
    if "prompt" in row:
        fine = {"prompt": [{"role": "user", "content": [image("a.png")]}], "completion": [ANSWER]}
    with pytest.raises(DataError) as caught:
        load(folder, fine, row)
    assert str(caught.value).startswith(f"{folder / 'rows.jsonl'}:2: ")
    assert message in str(caught.value)
    assert len(load(folder, fine, row, max_bad_rows=1)) == 1


def test_pictures_start_from_the_folder_that_the_recipe_names(folder):
    rows = load(folder, asked(image("data/a.png"), image("outside.png"), TEXT), image_folder=str(folder.parent))
    assert [picture["path"] for picture in rows.rows[0]["__media__"]] == [
        str((folder / "a.png").resolve()),
        str((folder.parent / "outside.png").resolve()),
    ]
    with pytest.raises(DataError, match=r"data\.image_folder: no folder"):
        load(folder, asked(image("a.png"), TEXT), image_folder=str(folder / "no"))


def test_a_picture_that_is_gone_or_another_one_is_told(folder):
    picture = Picture.of_row(load(folder, asked(image("a.png"), TEXT)).rows[0]["__media__"][0])
    (folder / "a.png").write_bytes(png((5, 5)))
    with pytest.raises(DataError, match="the image changed since the rows were prepared"):
        read_picture(picture)
    (folder / "a.png").unlink()
    with pytest.raises(DataError, match="cannot read the image: No such file"):
        read_picture(picture)


def test_other_methods_refuse_pictures(folder):
    row = {"prompt": [{"role": "user", "content": [image("a.png"), TEXT]}], "chosen": [ANSWER], "rejected": [ANSWER]}
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="only text is supported"):
        load_data(DataSection(train=str(file)), learner_of("orpo"))


def test_rows_with_pictures_that_are_too_long_are_left_out_whole():
    import numpy as np

    from tunekit.data.tokenization.encode import Encoded, Observed
    from tunekit.data.tokenization.tokenize import TokenReport

    report, lengths = TokenReport(), np.array([4, 6, 6, 3], dtype=np.int32)
    ids = np.arange(lengths.sum(), dtype=np.int32)
    flags = np.array([True, True, False, False])
    encoded = Encoded(ids, np.ones(len(ids), dtype=np.bool_), lengths, Observed(num_media=Counter({"image": 2})), flags)
    batch, rows = report.cut(encoded, 5, splits=False)
    assert (batch.lengths.tolist(), rows.tolist()) == ([4, 5, 3], [0, 2, 3])
    assert (report.num_too_long, report.num_truncated, report.num_dropped) == (1, 1, 1)
    assert report.notes_of_rows("a", 5, "truncate")[1] == (
        "a: 1 row with images skipped: longer than data.max_length=5, and images are never truncated"
    )


def test_a_template_that_reads_parts_alone_writes_texts_too():
    from tests.tiny import TEMPLATE, make_tokenizer
    from tests.vision import PARTS_TEMPLATE
    from tunekit.probe.chat_template import take_texts

    tokenizer = make_tokenizer()
    take_texts(tokenizer)
    assert tokenizer.chat_template == TEMPLATE
    tokenizer.chat_template = PARTS_TEMPLATE.format(mark="<image>")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]
    expected = tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
    take_texts(tokenizer)
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected
    assert tokenizer.apply_chat_template(parts, tokenize=False, add_generation_prompt=True) == expected
    assert "hi" in expected
