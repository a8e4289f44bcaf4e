"""Pictures of compared answers and of prompts: every way to write them, and where they do not fit together."""

import json

import datasets
import pytest
from PIL import Image

from tests.vision import FAMILIES
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media.answers import PictureAnswers
from tunekit.data.media.collate import RatedPictureCollator
from tunekit.data.media.kinds import KINDS, find_medium
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

MARK = KINDS["image"].mark

IMAGE, OTHER = ({"type": "image", "image": name} for name in ("a.png", "b.png"))
TEXT = {"type": "text", "text": "what?"}
QUESTION = {"role": "user", "content": [IMAGE, TEXT]}
RED, BLUE = ({"role": "assistant", "content": content} for content in ("red", "blue"))
IN_PARTS = [{"role": "assistant", "content": [{"type": "text", "text": "red"}]}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, size in (("a.png", (4, 6)), ("b.png", (8, 4))):
        Image.new("RGB", size).save(tmp_path / name)
    return tmp_path


def load(folder, row, method):
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return load_data(DataSection(train=str(file)), learner_of(method)).train[0]


PAIRS = {
    "a prompt with parts": {"prompt": [QUESTION], "chosen": [RED], "rejected": [BLUE]},
    "answers in parts, as TRL writes them": {"prompt": [QUESTION], "chosen": IN_PARTS, "rejected": [BLUE]},
    "whole conversations": {"chosen": [QUESTION, RED], "rejected": [QUESTION, BLUE]},
    "whole conversations beside their prompt": {
        "prompt": [QUESTION],
        "chosen": [QUESTION, RED],
        "rejected": [QUESTION, BLUE],
    },
    "whole conversations with marks": {
        "images": ["a.png"],
        "chosen": [{"role": "user", "content": "<image>what?"}, RED],
        "rejected": [{"role": "user", "content": "<image>what?"}, BLUE],
    },
    "TRL's column": {
        "images": ["a.png"],
        "prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}],
        "chosen": [RED],
        "rejected": [BLUE],
    },
    "without a mark, as TRL takes it": {
        "images": ["a.png"],
        "prompt": [{"role": "user", "content": "what?"}],
        "chosen": [RED],
        "rejected": [BLUE],
    },
    "LLaMA-Factory's": {
        "images": ["a.png"],
        "conversations": [{"from": "human", "value": "<image>what?"}],
        "chosen": {"from": "gpt", "value": "red"},
        "rejected": {"from": "gpt", "value": "blue"},
    },
}


@pytest.mark.parametrize("way", PAIRS)
def test_every_way_to_write_a_pair_is_read_alike(way, folder):
    rows = load(folder, PAIRS[way], "dpo")
    (row,) = list(rows.rows)
    assert rows.format == "preference"
    assert row["prompt"] == [{"role": "user", "content": f"{MARK}what?"}]
    assert (row["chosen"], row["rejected"]) == ([RED], [BLUE])
    assert [picture["path"] for picture in row["__media__"]] == [str((folder / "a.png").resolve())]
    assert "1 image" in rows.notes[0]


BROKEN = {
    "answers to different images": (
        {"chosen": [QUESTION, RED], "rejected": [{"role": "user", "content": [OTHER, TEXT]}, BLUE]},
        "chosen and rejected have different images",
    ),
    "an answer to another picture than the prompt's": (
        {
            "prompt": [QUESTION],
            "chosen": [{"role": "user", "content": [OTHER, TEXT]}, RED],
            "rejected": [QUESTION, BLUE],
        },
        "chosen and prompt have different images",
    ),
    "an answer with a picture": (
        {"prompt": [QUESTION], "chosen": [{"role": "assistant", "content": [OTHER]}], "rejected": [BLUE]},
        "chosen[0] is an assistant message with an image; models answer in text",
    ),
    "an image that is not there": (
        {
            "prompt": [{"role": "user", "content": [{"type": "image", "image": "c.png"}]}],
            "chosen": [RED],
            "rejected": [BLUE],
        },
        "prompt[0].content[0]: ",
    ),
    "a picture too many": (
        {
            "images": ["a.png", "b.png"],
            "prompt": [{"role": "user", "content": "<image>?"}],
            "chosen": [RED],
            "rejected": [BLUE],
        },
        "1 <image> mark in the texts, but 2 images in column images",
    ),
    "a mark in a text prompt": (
        {"images": ["a.png"], "prompt": "<image>what?", "chosen": "red", "rejected": "blue"},
        "prompt is a plain text, but images need messages; make it a list of messages",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_pair_whose_pictures_do_not_fit_is_refused(kind, folder):
    row, problem = BROKEN[kind]
    with pytest.raises(DataError) as error:
        load(folder, row, "dpo")
    assert str(error.value).startswith(f"{folder / 'rows.jsonl'}:1: ") or "rows.jsonl:1: " in str(error.value)
    assert problem in str(error.value)


RATED = {
    "a prompt with parts": {"prompt": [QUESTION], "completion": [RED], "label": True},
    "an answer in parts, as TRL writes it": {"prompt": [QUESTION], "completion": IN_PARTS, "label": True},
    "TRL's column": {
        "image": "a.png",
        "prompt": [{"role": "user", "content": [{"type": "image"}, TEXT]}],
        "completion": [RED],
        "label": True,
    },
    "a column with marks": {
        "images": ["a.png"],
        "prompt": [{"role": "user", "content": "<image>what?"}],
        "completion": [RED],
        "label": 1,
    },
}


@pytest.mark.parametrize("way", RATED)
def test_every_way_to_write_a_rated_answer_is_read_alike(way, folder):
    rows = load(folder, RATED[way], "kto")
    (row,) = list(rows.rows)
    assert rows.format == "unpaired_preference"
    assert row["prompt"] == [{"role": "user", "content": f"{MARK}what?"}]
    assert (row["completion"], row["label"]) == ([RED], True)
    assert [picture["path"] for picture in row["__media__"]] == [str((folder / "a.png").resolve())]


def test_a_rated_answer_with_a_picture_is_refused(folder):
    row = {"prompt": [QUESTION], "completion": [{"role": "assistant", "content": [OTHER]}], "label": False}
    with pytest.raises(DataError, match=r"completion\[0\] is an assistant message with an image"):
        load(folder, row, "kto")


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_prompts_with_answers_to_others_have_their_own_pictures_and_are_cut(family, tmp_path):
    """Each prompt gets the answer before it, of the rows that are computed together, and the last one's first."""
    _, processor = FAMILIES[family]()
    Image.effect_noise((20, 30), 60).convert("RGB").save(tmp_path / "a.png")
    images = [find_medium("image", "a.png", "image", tmp_path).to_row()]
    asked = ({"content": f"{MARK}what?", "images": images}, {"content": "say hi", "images": None})
    answers = ["red", "a very long answer", "green", "blue"]
    rows = [
        {
            "prompt": [{"role": "user", "content": asked[number % 2]["content"]}],
            "completion": [{"role": "assistant", "content": answer}],
            "label": number == 0,
            "__media__": asked[number % 2]["images"],
        }
        for number, answer in enumerate(answers)
    ]
    prepared = PictureAnswers(processor).rated(datasets.Dataset.from_list(rows), 2)
    texts = [text.removesuffix("<|im_end|>\n").split("\n")[-1] for text in prepared["KL_text"]]
    assert texts == [answers[number] for number in (1, 0, 3, 2)]
    longest = len(prepared["KL_ids"][0]) - 5
    batch = RatedPictureCollator(processor, max_length=longest)([prepared[0], prepared[1]])
    assert len(batch["pixel_values"]) == 1, "the first row's picture, once"
    assert batch["KL_input_ids"].shape == batch["input_ids"].shape == (2, longest)
    assert batch["KL_input_ids"][0].tolist() == prepared["KL_ids"][0][:longest]
    num_prompt, num_own = (len(prepared[f"{part}_ids"][0]) for part in ("prompt", "completion"))
    num_padding = longest - num_prompt - num_own
    assert batch["completion_mask"][0].tolist() == [0] * num_prompt + [1] * num_own + [0] * num_padding
    assert batch["KL_completion_mask"][0].tolist() == [0] * num_prompt + [1] * (num_own + num_padding)
    assert batch["label"].tolist() == [True, False]


def test_prompts_keep_their_columns_beside_pictures(folder):
    rows = load(folder, {"prompt": [QUESTION], "answer": "red"}, "grpo")
    (row,) = list(rows.rows)
    assert row["prompt"] == [{"role": "user", "content": f"{MARK}what?"}]
    assert row["answer"] == "red"
    assert row["__media__"][0]["size"] == [4, 6]


def test_a_method_without_pictures_refuses_them(folder):
    with pytest.raises(DataError, match="is of type image"):
        load(folder, PAIRS["a prompt with parts"], "orpo")
