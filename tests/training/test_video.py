"""Rows with videos are trained on as plain Transformers and the model's own processor do."""

import json

import pytest

import tunekit
from tests.training.test_vision import compare_with_plain_transformers, recipe
from tests.video import FAMILIES, save_tiny_video_model, save_video_rows
from tunekit.errors import ModelError, PlanError, RunError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FAMILIES, reason="torchvision is not installed")]

LENGTH = {"qwen2_5_omni": 1024}
"""Tokens that rows take of families whose processors enlarge videos."""

BY_ONE = ("internvl",)
"""Families whose processor takes no videos of unlike lengths together."""


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """A folder with the model of a family and rows of videos."""
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_video_model(folder / "model", request.param)
    save_video_rows(folder / "data", mixed=request.param not in APART)
    return folder


def sizes_of(saved):
    return {"micro_batch_size": 1} if saved.name[:-1] in BY_ONE else {}


APART = ("glm4v",)
"""Families whose code does not compute images and videos together."""


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_the_first_loss_and_all_gradients_are_those_of_plain_transformers(adapter, saved, tmp_path):
    run = compare_with_plain_transformers(
        adapter, saved, tmp_path, max_length=LENGTH.get(saved.name[:-1], 512), **sizes_of(saved)
    )
    assert run.plan.data.has_videos and run.plan.data.most_pixel_values > 0


@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_packed_rows_have_the_loss_and_the_gradients_of_plain_transformers_on_each(adapter, saved, tmp_path):
    if saved.name[:-1] in BY_ONE:
        with pytest.raises(RunError, match="pack"):
            tunekit.train(recipe(saved, tmp_path, packed=True, adapter="lora"))
        return
    run = compare_with_plain_transformers(adapter, saved, tmp_path, packed=LENGTH.get(saved.name[:-1], 256))
    assert run.plan.padding_free and 1 < run.plan.data.num_train < 8


def test_videos_that_a_processor_does_not_take_together_are_refused(saved, tmp_path):
    if saved.name[:-1] in BY_ONE:
        with pytest.raises(RunError, match="InternVLProcessor refuses a batch of rows with different media") as caught:
            tunekit.train(recipe(saved, tmp_path, adapter="lora"))
        assert caught.value.hint.startswith("set train.micro_batch_size=1")


def test_a_model_that_does_not_compute_images_and_videos_together_is_refused(tmp_path):
    save_tiny_video_model(tmp_path / "model", "glm4v")
    save_video_rows(tmp_path / "data")
    with pytest.raises(RunError, match="/model does not compute images and videos together: ") as caught:
        tunekit.train(recipe(tmp_path, tmp_path, adapter="lora"))
    assert caught.value.hint == "train on rows with one kind of media"


def test_settings_of_the_video_processor_choose_the_frames(saved, tmp_path):
    """The processor saved with the result has them, and fewer frames are fewer values and tokens."""
    wanted = recipe(saved, tmp_path, adapter="lora", train=sizes_of(saved))
    # GLM-4V samples by a rate alone.
    own = {"fps": 1} if saved.name.startswith("glm4v") else {"num_frames": 2, "fps": None}
    settings = {"do_sample_frames": True, **own}
    model = {"path": str(saved / "model")}
    fewer = tunekit.train({**wanted, "model": {**model, "video_processor": settings}})
    every = tunekit.train({**wanted, "output": {"dir": str(tmp_path / "every"), "sample_prompts": []}})
    assert fewer.plan.data.num_pixel_values < every.plan.data.num_pixel_values
    assert fewer.plan.data.num_picture_tokens < every.plan.data.num_picture_tokens
    stored = [
        json.loads(file.read_text())
        for name in ("processor_config.json", "video_preprocessor_config.json")
        if (file := fewer.model_path / name).is_file()
    ]
    assert any(text.get("video_processor", text).get("do_sample_frames") for text in stored)
    with pytest.raises(ModelError, match=r"model\.video_processor\.frames: \w+VideoProcessor has no such setting"):
        tunekit.train(recipe(saved, tmp_path / "odd", model={**model, "video_processor": {"frames": 2}}))
    with pytest.raises(PlanError, match=r"model\.video_processor: no effect, the rows have no videos"):
        tunekit.plan(
            {"model": {"path": "pico", "video_processor": {"fps": 2}}, "data": {"train": "example:pirate.jsonl"}}
        )
