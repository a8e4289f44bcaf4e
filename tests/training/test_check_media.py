"""Documents that see each other, or other pictures than alone, are seen before training."""

from types import SimpleNamespace

import pytest
import torch

from tests.tiny import plain_accelerator
from tests.vision import FAMILIES, save_rows, tiny_vision_model
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media.collate import MediaCollator
from tunekit.data.media.expand import MediaTokens
from tunekit.data.prepare import prepare_data
from tunekit.data.sources.load import load_data
from tunekit.errors import RunError
from tunekit.models.documents import run_by_document, tell_documents_apart
from tunekit.recipe.sections.data import DataSection
from tunekit.training.check_media import check_packed_rows

OTHER_LOGITS = "^m: packed documents with images have other logits than each alone; set data.packing=false$"


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Return a function that makes as much of a trainer as the check looks at."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_rows(tmp_path / "data")

    def make(family, *, told=True):
        model, processor = tiny_vision_model(family)
        if told:
            tell_documents_apart(model)
        section = DataSection(train=str(tmp_path / "data" / "rows.jsonl"), max_length=160, packing=True)
        data = load_data(section, learner_of("sft"))
        (train,) = prepare_data(section, data, processor.tokenizer, media=MediaTokens(processor))
        collator = MediaCollator(processor, scores_positions=True, packs=True)
        rows = {"train_dataset": train.prepared.dataset(), "data_collator": collator}
        return SimpleNamespace(model=model, model_wrapped=model, accelerator=plain_accelerator(), **rows)

    return make


def check(trainer, dtype="float32"):
    model, data = SimpleNamespace(path="m"), SimpleNamespace(media=("image",))
    plan = SimpleNamespace(dtype=dtype, recipe=SimpleNamespace(model=model), data=data)
    trainer.model.to(getattr(torch, dtype))
    check_packed_rows(trainer, plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [name for name in sorted(FAMILIES) if name not in ("mllama", "qwen3_5")])
def test_rounding_is_not_taken_for_another_document(family, dtype, trainer):
    made = trainer(family)
    before = torch.get_rng_state()
    check(made, dtype)
    assert torch.equal(before, torch.get_rng_state()) and made.model.training


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_that_leaks_is_seen(dtype, trainer, monkeypatch):
    from transformers.models.llama import modeling_llama

    original = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **given: original(**{**given, "position_ids": None})
    )
    with pytest.raises(RunError, match=OTHER_LOGITS):
        check(trainer("llava"), dtype)


@pytest.mark.parametrize("family", sorted({"gemma3", "qwen2_5_vl", "qwen3_vl", "glm4v"} & set(FAMILIES)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_and_positions_of_one_document_are_seen(family, dtype, trainer):
    with pytest.raises(RunError, match=OTHER_LOGITS):
        check(trainer(family, told=False), dtype)


def test_pixels_in_another_order_are_seen(trainer, monkeypatch):
    made = trainer("llava")
    forward = made.model.model.get_image_features

    def reversed_features(pixel_values, **given):
        return forward(pixel_values.flip(0), **given)

    monkeypatch.setattr(made.model.model, "get_image_features", reversed_features)
    with pytest.raises(RunError, match=OTHER_LOGITS):
        check(made)


def test_what_the_code_of_a_model_says_of_a_packed_row_is_passed_on(trainer):
    """Llama 3.2 Vision has a mask for each row between its tokens and its pictures."""
    with pytest.raises(
        RunError, match=r"^m does not support packed documents with images: .*; set data\.packing=false$"
    ):
        check(trainer("mllama"))


@pytest.mark.skipif("qwen3_5" not in FAMILIES, reason="needs torchvision")
def test_a_state_that_passes_to_the_next_document_is_seen(trainer):
    made = trainer("qwen3_5")
    with pytest.raises(RunError, match=OTHER_LOGITS):
        check(made)
    assert run_by_document(made.model) > 0
    check(made)
