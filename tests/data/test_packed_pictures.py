"""Packed rows keep the pictures of their documents, in the order of the tokens that stand for them."""

import json

import numpy as np
import pytest
import torch

from tests.vision import FAMILIES, save_rows, tiny_vision_model
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media.collate import MEDIA, TEXT, MediaCollator, documents_of
from tunekit.data.media.expand import MediaTokens
from tunekit.data.prepare import prepare_data
from tunekit.data.sources.load import load_data
from tunekit.methods.run_trainer import filled
from tunekit.models.documents import run_by_document, tell_documents_apart
from tunekit.recipe.sections.data import DataSection

PACKED = sorted(set(FAMILIES) - {"mllama"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_rows(tmp_path / "data")
    return tmp_path / "data"


def prepared(folder, processor, *, packing, max_length=160, loss_on="assistant"):
    section = DataSection(train=str(folder / "rows.jsonl"), max_length=max_length, packing=packing, loss_on=loss_on)
    images = MediaTokens(processor)
    (train,) = prepare_data(section, load_data(section, learner_of("sft")), processor.tokenizer, media=images)
    return train


def by_text(documents):
    return sorted(documents, key=lambda row: (row[MEDIA], row[TEXT]))


def test_the_documents_of_packed_rows_are_the_rows_that_are_not_packed(folder):
    _, processor = FAMILIES["llava"]()
    rows = prepared(folder, processor, packing=False).prepared.dataset()
    packs = prepared(folder, processor, packing=True).prepared
    assert 1 < packs.num_sequences == len(packs.dataset()) < len(rows) == 8
    documents = [document for row in packs.dataset() for document in documents_of(row)]
    assert by_text(documents) == by_text(list(rows)) == by_text([one for row in rows for one in documents_of(row)])
    assert sum(bool(document[MEDIA]) for document in documents) == 7
    for row in packs.dataset():
        assert sum(row["seq_lengths"]) == len(row["input_ids"]) <= 160


@pytest.mark.parametrize("family", PACKED)
def test_a_batch_is_one_row_with_the_pixels_that_the_plan_counts(family, folder):
    _, processor = FAMILIES[family]()
    train = prepared(folder, processor, packing=True, loss_on="all")
    collator = MediaCollator(processor, scores_positions=True, packs=True)
    most = 0
    for row in train.prepared.dataset():
        batch = collator([row])
        assert "attention_mask" not in batch
        assert batch["input_ids"].tolist() == [row["input_ids"]]
        starts = np.cumsum([0, *row["seq_lengths"]])[:-1]
        assert torch.nonzero(batch["position_ids"][0] == 0).flatten().tolist() == starts.tolist()
        labels = np.array(row["labels"])
        assert (labels[starts] == -100).all()
        assert batch["labels"].tolist() == [labels.tolist()]
        assert batch["scored_positions"].tolist() == (np.flatnonzero(labels >= 0) - 1).tolist()
        most = max(most, batch["pixel_values"].numel() if "pixel_values" in batch else 0)
    assert train.prepared.most_pixel_values == most


def test_rows_that_fill_a_step_have_no_picture(folder):
    _, processor = FAMILIES["llava"]()
    rows = filled(prepared(folder, processor, packing=True).prepared.dataset(), 7, processor.tokenizer.pad_token_id)
    assert len(rows) == 7
    *_, last = rows
    (document,) = documents_of(last)
    assert document == {"input_ids": [processor.tokenizer.pad_token_id], "labels": [-100], TEXT: None, MEDIA: []}
    batch = MediaCollator(processor, scores_positions=False, packs=True)([last])
    assert batch["input_ids"].shape == (1, 1) and "pixel_values" not in batch


def test_each_document_has_the_picture_of_its_row(folder):
    """Another picture in one document changes the logits of no other one."""
    model, processor = tiny_vision_model("llava")
    tell_documents_apart(model)
    assert run_by_document(model.eval()) == 0
    train = prepared(folder, processor, packing=True, max_length=512)
    (row,) = train.prepared.dataset()
    collator = MediaCollator(processor, scores_positions=False, packs=True)
    pictured = [number for number, pictures in enumerate(row[MEDIA]) if pictures]
    names = [json.loads(row[MEDIA][number][0])["path"] for number in pictured]
    assert len({*names}) == len(pictured) == 7

    def logits(batch):
        with torch.no_grad():
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            whole = model(**inputs, use_cache=False).logits[0]
        return whole.split(row["seq_lengths"])

    batch = collator([row])
    before = logits(batch)
    for place, number in enumerate(pictured):
        changed = batch["pixel_values"].clone()
        changed[place] += 1.0
        after = logits({**batch, "pixel_values": changed})
        pairs = enumerate(zip(before, after, strict=True))
        moved = [n for n, (one, other) in pairs if not torch.equal(one, other)]
        assert moved == [number]
