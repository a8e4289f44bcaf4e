"""Knowledge distillation on rows with pictures: loss and gradients are those of plain Transformers with both models."""

import pytest
import torch

import tunekit
from tests.training.test_vision import compare_with_plain_transformers, converted, recipe
from tests.training.test_vision_distillation import BY_OWN_LOGITS, save_models
from tests.vision import FAMILIES, save_rows
from tunekit.errors import PlanError, RunError

BETA = 0.3
NO_MIXED_ROWS = ("mllama",)
"""Families that read texts otherwise beside pictures."""


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_models(folder, request.param)
    save_rows(folder / "data", without=None if request.param in NO_MIXED_ROWS else 3)
    return folder, request.param


def method(folder, **settings):
    return {"type": "gkd", "teacher": str(folder / "teacher"), "lmbda": 0, "beta": BETA, **settings}


def divergence(model, processor, folder):
    """The mean over the answers' tokens of the divergence that TRL's GKDTrainer computes from whole logits."""
    from transformers import AutoModelForImageTextToText
    from trl.experimental.gkd import GKDTrainer

    teacher = AutoModelForImageTextToText.from_pretrained(folder / "teacher", dtype=torch.float32)
    total, num_tokens = torch.zeros(()), 0
    for inputs, labels in converted(processor, folder):
        with torch.no_grad():
            its = teacher(**inputs).logits[:, :-1]
        own = model(**inputs).logits[:, :-1]
        shifted = labels[None, 1:]
        total = total + GKDTrainer.generalized_jsd_loss(own, its, shifted, beta=BETA, reduction="sum")
        num_tokens += int((shifted != -100).sum())
    return total / num_tokens


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_the_first_loss_and_all_gradients_are_those_of_plain_transformers(adapter, saved, tmp_path):
    folder, family = saved
    if family in BY_OWN_LOGITS:
        with pytest.raises(RunError, match="TRL's distillation only compares logits of a fused head"):
            tunekit.train(recipe(folder, tmp_path, method=method(folder)))
        return
    compare_with_plain_transformers(adapter, folder, tmp_path, method=method(folder), loss_of=divergence)


@pytest.mark.slow
def test_completions_and_packs_of_rows_with_pictures_are_refused(tmp_path):
    save_models(tmp_path, "llava")
    save_rows(tmp_path / "data")
    with pytest.raises(PlanError, match=r"method\.lmbda: completions of rows with images are unsupported"):
        tunekit.plan(recipe(tmp_path, tmp_path, method=method(tmp_path, lmbda=0.5)))
    with pytest.raises(PlanError, match=r"data\.packing: unsupported for rows with images with a teacher"):
        tunekit.plan(recipe(tmp_path, tmp_path, packed=True, method=method(tmp_path)))
