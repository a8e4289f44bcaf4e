"""Rows with pictures as people see them: each picture is one item among the tokens, as large as it is read."""

import base64
import io
import json

import pytest
from PIL import Image

from tests.vision import FAMILIES, save_rows
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media.expand import MediaTokens
from tunekit.data.media.pictures import Picture
from tunekit.data.prepare import prepare_data
from tunekit.data.reports.measure import report_data
from tunekit.data.reports.preview import show_rows, trained_sequences
from tunekit.data.sources.load import load_data
from tunekit.data.tokenization.encode import Encoder
from tunekit.recipe.sections.data import DataSection


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_rows(tmp_path / "data", num=4)
    return tmp_path / "data"


def loaded(folder, name="rows.jsonl", **section):
    section = DataSection(train=str(folder / name), max_length=512, **section)
    return section, load_data(section, learner_of("sft"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tokens_of_a_picture_are_those_that_its_processor_writes_for_it(family, folder):
    config, processor = FAMILIES[family]()
    content = [{"type": "image", "image": f"{number}.png"} for number in (0, 1)]
    content.insert(1, {"type": "text", "text": "or\n"})
    answer = {"role": "assistant", "content": "red"}
    line = json.dumps({"messages": [{"role": "user", "content": [*content, content[0]]}, answer]})
    (folder / "pair.jsonl").write_text(line + "\n", encoding="utf-8")
    rows = loaded(folder, "pair.jsonl")[1].train[0]
    encoder = Encoder(rows, processor.tokenizer, MediaTokens(processor))
    ids = encoder.encode(rows, range(1)).ids.tolist()
    placed = encoder.media_of(rows, 0)
    assert [one.medium.name for one in placed] == ["0.png", "1.png", "0.png"]
    is_inside = [any(one.start <= token < one.stop for one in placed) for token in range(len(ids))]
    of_images = [token_id == config.image_token_id for token_id in ids]
    assert all(inside for inside, image in zip(is_inside, of_images, strict=True) if image)
    for one in placed:
        blank = Image.new("RGB", (one.medium.width, one.medium.height))
        given = {"images": [[blank]], "add_special_tokens": False, "return_tensors": "pt"}
        alone = processor(text=[processor.image_token], **given)["input_ids"][0]
        num = sum(token_id == config.image_token_id for token_id in alone.tolist())
        assert sum(of_images[one.start : one.stop]) == num > 0


def test_a_report_has_a_picture_as_one_piece_with_its_size_and_its_tokens(folder):
    _, processor = FAMILIES["llava"]()
    section, data = loaded(folder)
    images = MediaTokens(processor)
    splits = prepare_data(section, data, processor.tokenizer, media=images)
    options = {"max_length": 512, "packing": False, "batch_size": 2, "num_samples": 4, "notes": (), "skipped": ()}
    report = report_data(splits, processor.tokenizer, media=images, **options)
    (source,) = report.sources
    pieces = [[piece for piece in sample.pieces if piece.medium] for sample in source.samples]
    assert [[piece.text for piece in row] for row in pieces] == [
        ["[image 0.png 20x30: 4 tokens]"],
        ["[image 1.png 27x41: 4 tokens]"],
        ["[image 2.png 34x30: 4 tokens]"],
        [],
    ]
    assert all(
        sample.num_tokens == len(splits[0].tokens[0].sequences[i]["input_ids"])
        for i, sample in enumerate(source.samples)
    )
    assert ("pictures", "3, 12 tokens, 4 each on average") in source.facts(512, is_packed=False)
    page = report.to_html()
    assert page.count('src="data:image/jpeg;base64,') == 3
    assert json.loads(json.dumps(report.to_dict()))["sources"][0]["num_media"] == {"image": 3}


def test_a_preview_has_thumbnails_and_says_that_pictures_are_never_cut(folder):
    _, processor = FAMILIES["llava"]()
    rows = loaded(folder)[1].train[0]
    show, _ = trained_sequences(rows, processor.tokenizer, 512, MediaTokens(processor))
    first, *_, last = show_rows(rows, range(4), show)
    (piece,) = [piece for piece in first.sequences[0].head.pieces if piece.medium]
    url = first.thumbnails[piece.medium.digest]
    assert Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size == (20, 30)
    assert last.thumbnails == {}
    show, _ = trained_sequences(rows, processor.tokenizer, 20, MediaTokens(processor))
    (row,) = show_rows(rows, range(1), show)
    assert row.left_out == "longer than data.max_length=20, and images are never truncated"
    assert row.sequences[0].num_tokens == 40


def test_a_long_row_shows_its_pictures_whole(folder, monkeypatch):
    from tunekit.data.reports import preview

    monkeypatch.setattr(preview, "HEAD_TOKENS", 5)
    monkeypatch.setattr(preview, "TAIL_TOKENS", 5)
    _, processor = FAMILIES["llava"]()
    rows = loaded(folder)[1].train[0]
    show, _ = trained_sequences(rows, processor.tokenizer, 512, MediaTokens(processor))
    (row,) = show_rows(rows, range(1), show)
    (sequence,) = row.sequences
    assert sequence.head.num_tokens + sequence.num_hidden + sequence.tail.num_tokens == sequence.num_tokens == 40
    assert not any("<image>" in piece.text for piece in (*sequence.head.pieces, *sequence.tail.pieces))


def test_a_picture_without_a_file_of_its_own_has_no_name():
    assert Picture("/cache/ab/abcd", 3, 4, "abcd").name == ""
    assert Picture("/data/abcd.png", 3, 4, "abcd").name == "abcd.png"
