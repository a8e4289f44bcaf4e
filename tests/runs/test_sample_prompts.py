"""Sample prompts with pictures: their words, their thumbnails in the run folder, and events that somebody edited."""

import base64
import io
import json
import os

import pytest
from PIL import Image

from tests.vision import COLOURS
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media.kinds import KINDS, find_medium
from tunekit.data.media.pictures import Picture
from tunekit.data.sources.load import load_data
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.data import DataSection
from tunekit.runs import sample_prompts
from tunekit.runs.prepared_data import record, save_sample_prompts
from tunekit.runs.reader import EventReader
from tunekit.runs.thumbnails import MAX_BYTES, MAX_PICTURES, MAX_SHOWN, digests_of, thumbnail_file, thumbnails

MARK = KINDS["image"].mark

DIGEST = "0123456789abcdef" * 4


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", (400 + number, 200), colour).save(tmp_path / f"{number}.png")
    return tmp_path


def write(folder, rows):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def asked(*numbers, text="what?"):
    parts = [{"type": "image", "image": f"{number}.png"} for number in numbers]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


ANSWER = [{"role": "assistant", "content": "red"}]
SAME = [asked(0), asked(0), asked(1), [{"role": "user", "content": "hi"}], asked(2)]
ROWS = {
    "sft": [{"messages": [*question, *ANSWER, *asked(3), *ANSWER]} for question in SAME],
    "kto": [{"prompt": question, "completion": ANSWER, "label": True} for question in SAME],
    "grpo": [{"prompt": question, "answer": "red"} for question in SAME],
}


@pytest.mark.parametrize("method", ROWS)
def test_the_first_different_prompts_are_taken_with_their_pictures(method, folder):
    own = {"rewards": ["exact_match"], "num_generations": 2} if method == "grpo" else {}
    wanted = {"model": "m", "data": {"train": write(folder, ROWS[method])}, "method": {"type": method, **own}}
    recipe = Recipe.model_validate(wanted)
    data = load_data(DataSection(train=wanted["data"]["train"]), learner_of(method))
    save_sample_prompts(recipe, data, folder / "run")
    prompts = sample_prompts.read(folder / "run")
    assert [prompt.words for prompt in prompts] == ["[image 0.png] what?", "[image 1.png] what?", "hi"]
    assert [prompt.content for prompt in prompts] == [f"{MARK}what?", f"{MARK}what?", "hi"]
    assert record(recipe, data).output.sample_prompts is None
    # A wish of the recipe goes before.
    texts = Recipe.model_validate(wanted | {"output": {"sample_prompts": ["hello"]}})
    save_sample_prompts(texts, data, folder / "other")
    assert sample_prompts.read(folder / "other") == []
    assert record(texts, data).output.sample_prompts == ["hello"]


def test_thumbnails_are_small_and_lie_in_the_run_folder(folder):
    pictures = tuple(find_medium("image", f"{number}.png", "image", folder) for number in (0, 1, 2, 3, 0))
    prompt = sample_prompts.SamplePrompt(f"{MARK}and {MARK * 3}\n{MARK}", pictures)
    assert prompt.words == "[image 0.png] and [image 1.png] [image 2.png] [image 3.png]\n[image 0.png]"
    assert prompt.shown == [picture.digest for picture in pictures[:MAX_PICTURES]]
    sample_prompts.save([prompt], folder / "run")
    assert sample_prompts.read(folder / "run") == [prompt]
    for number in range(4):
        (folder / f"{number}.png").unlink()
    urls = thumbnails(folder / "run", prompt.shown)
    assert list(urls) == prompt.shown
    head, _, body = urls[prompt.shown[1]].partition(",")
    assert head == "data:image/jpeg;base64"
    assert Image.open(io.BytesIO(base64.b64decode(body))).size == (160, 80)


def test_pictures_without_a_file_are_named_by_their_digest():
    picture = Picture(f"/cache/{DIGEST}", 4, 4, DIGEST)
    assert sample_prompts.SamplePrompt(f"{MARK} what?", (picture,)).words == "[image 01234567] what?"


EDITED = [
    ("../../../etc/passwd", ()),
    (["../../secret", "/etc/passwd", DIGEST[:-1] + "G", DIGEST + "\n", 7, None, {}], ()),
    ([DIGEST] * 100, (DIGEST,) * MAX_PICTURES),
    ({"0": DIGEST}, ()),
]


@pytest.mark.parametrize(("value", "expected"), EDITED)
def test_what_is_no_digest_in_an_edited_event_is_left_out(value, expected, tmp_path):
    event = {"event": "sample", "time": 1.0, "when": "after", "prompt": "hi", "answer": "a", "pictures": value}
    assert digests_of(event) == expected
    file = tmp_path / "events.jsonl"
    file.write_text(json.dumps(event) + "\n")
    reader = EventReader(file)
    reader.read()
    assert reader.pictures == ({"hi": expected} if expected else {})


def jpeg(num_bytes=0):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    return file.getvalue() + b"\0" * num_bytes


def test_only_small_pictures_in_the_run_folder_are_read(tmp_path):
    run, digests = tmp_path / "run", [f"{number:064x}" for number in range(MAX_SHOWN + 8)]
    good, large, other, linked, fifo, *more = (thumbnail_file(run, digest) for digest in digests)
    good.parent.mkdir(parents=True)
    for file in (good, *more):
        file.write_bytes(jpeg())
    large.write_bytes(jpeg(MAX_BYTES))
    other.write_bytes(b"root:x:0:0")
    (tmp_path / "secret.jpg").write_bytes(jpeg())
    linked.symlink_to(tmp_path / "secret.jpg")
    os.mkfifo(fifo)
    urls = thumbnails(run, [*digests[:6], "../secret", "x/../../../secret"])
    assert list(urls) == [digests[0], digests[5]]
    assert len(thumbnails(run, digests)) == MAX_SHOWN


def test_a_folder_of_thumbnails_that_leads_out_is_not_read(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{DIGEST}.jpg").write_bytes(jpeg())
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / "data" / "thumbnails").symlink_to(elsewhere)
    assert thumbnails(tmp_path / "run", [DIGEST]) == {}
