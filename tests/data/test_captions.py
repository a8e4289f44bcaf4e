"""Pictures with captions: folders as Hugging Face's ImageFolder has them, lists of JSON, and columns of images."""

import csv
import json

import pytest
from PIL import Image

from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media.kinds import KINDS
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

MARK = KINDS["image"].mark


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "pictures" / "cats").mkdir(parents=True)
    for name, size in (("a.png", (4, 6)), ("b.JPG", (8, 4)), ("cats/c.png", (5, 5))):
        Image.new("RGB", size).save(tmp_path / "pictures" / name)
    return tmp_path / "pictures"


def load(path, method="sft", **section):
    return load_data(DataSection(train=str(path), **section), learner_of(method)).train[0]


def metadata(folder, *rows, name="metadata.csv"):
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        if name.endswith(".csv"):
            csv.writer(file).writerows(rows)
        else:
            head, *others = rows
            file.writelines(json.dumps(dict(zip(head, row, strict=True))) + "\n" for row in others)
    return folder


ROWS = (("file_name", "text"), ("a.png", "a cat"), ("cats/c.png", "two cats, one dog"))


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_a_folder_of_pictures_with_its_metadata_is_rows_of_captions(name, folder):
    rows = load(metadata(folder, *ROWS, name=name))
    assert [row["messages"] for row in rows.rows] == [
        [{"role": "user", "content": MARK}, {"role": "assistant", "content": caption}] for _, caption in ROWS[1:]
    ]
    assert [row["__media__"][0]["size"] for row in rows.rows] == [[4, 6], [5, 5]]
    (note,) = rows.notes
    assert "2 rows of captions: image -> user, caption -> assistant; 2 images" in note
    assert "ignored" not in note
    assert "file_name -> image, text -> caption" in note


@pytest.mark.parametrize(
    ("columns", "mapping"),
    [
        (("image", "caption"), {}),
        (("image", "text"), {}),
        (("file_name", "caption"), {}),
        (("photo", "words"), {"image": "photo", "caption": "words"}),
        (("file_name", "words"), {"caption": "words"}),
    ],
)
def test_columns_of_captions_have_several_names(columns, mapping, folder):
    rows = load(metadata(folder, columns, ("a.png", "a cat")), columns=mapping)
    assert rows.read_as == "captions"
    assert rows.rows[0]["messages"][1]["content"] == "a cat"


def test_a_prompt_of_its_own_stands_behind_the_picture(folder):
    head, row = (*ROWS[0], "prompt"), (*ROWS[1], "Describe it <image>.")
    rows = load(metadata(folder, head, row))
    assert rows.rows[0]["messages"][0]["content"] == f"{MARK}Describe it <image>."


def test_a_column_of_images_with_text_is_one_of_captions(folder):
    import datasets

    image = {"bytes": (folder / "a.png").read_bytes(), "path": None}
    datasets.Dataset.from_dict({"image": [image], "text": ["a cat"]}).to_parquet(str(folder / "rows.parquet"))
    (row,) = load(folder / "rows.parquet").rows
    assert row["__media__"][0]["size"] == [4, 6]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (("no.png", "a cat"), "file_name: no image 'no.png' in "),
        (("../x.png", "a cat"), "file_name: '../x.png' is outside of "),
        (("", "a cat"), "file_name must be a path, a data URL or an image, got a string"),
        (("a.png", " "), "text is empty"),
        (("a.png", f"a {MARK}"), "the text contains U+FFFC"),
        (
            ("main.py", "print()"),
            "file_name: no image 'main.py' in {folder} (data.format=text reads only the texts)",
        ),
    ],
)
def test_a_bad_caption_is_told_with_its_file_and_its_line(row, problem, folder):
    with pytest.raises(DataError) as caught:
        load(metadata(folder, *ROWS[:2], row))
    assert str(caught.value).startswith(f"{folder}/metadata.csv:3: {problem.format(folder=folder.resolve())}")


def test_a_folder_of_pictures_alone_says_what_it_lacks(folder):
    with pytest.raises(DataError, match="no supported files in folder") as caught:
        load(folder)
    assert caught.value.hint == (
        "add a metadata.csv with the columns file_name and text: the name and the caption of each image"
    )


def test_texts_with_the_names_of_their_files_are_texts_where_the_recipe_says_so(folder):
    assert load(metadata(folder, *ROWS), format="text").rows[0] == {"text": "a cat"}


def test_a_conversation_beside_a_caption_is_a_conversation(folder):
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}]
    row = {"image": "a.png", "caption": "a cat", "conversations": turns}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = load(folder / "rows.jsonl")
    assert rows.read_as == "sharegpt"
    assert rows.media


def test_methods_without_pictures_refuse_captions(folder):
    with pytest.raises(DataError, match=r"holds images with captions \(image, caption\), but method dpo trains on"):
        load(metadata(folder, *ROWS), "dpo")
