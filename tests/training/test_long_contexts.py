"""Runs on rows longer than the model's positions, against transformers and PEFT told the same scaling by hand."""

import shutil
from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

import tunekit
from tests.training.equality import SPREADS, SUBJECTS, eval_loss_of, recipe_of, train
from tunekit.inference.inference_model import find_trained, longest_of
from tunekit.probe.origin import origin_of
from tunekit.recipe.sections.model import ModelSection, RopeScaling

DDP_2, _, FSDP2_2 = SPREADS[:3]
FULL, LORA = SUBJECTS[1], SUBJECTS[3]
PARAMETERS = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
STEPS = {"max_steps": 3, "eval_steps": 3}


def recipe_in(subject, folder):
    """Rows packed to 384 tokens, for a model of 256 positions."""
    recipe = recipe_of(replace(subject, model_type="qwen3"), folder, micro_batch_size=2)
    recipe["model"] = {"path": recipe["model"], "rope_scaling": {"factor": 2}}
    recipe["data"]["max_length"] = 384
    recipe["train"] |= {**STEPS, "global_batch_size": 4, "save_steps": 2}
    return recipe


def by_hand(recipe, folder, *, scaled=True):
    """The saved model as transformers and PEFT read it; of an adapter with the base's config changed by hand."""
    if recipe["adapter"]["type"] == "full":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(recipe["model"]["path"])
    if scaled:
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **PARAMETERS}
    base = AutoModelForCausalLM.from_pretrained(recipe["model"]["path"], config=config, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize("subject", [FULL, LORA], ids=["full", "lora"])
def test_a_run_trains_and_saves_the_scaled_model(subject, tmp_path):
    recipe = recipe_in(subject, tmp_path / "files")
    alone = train(recipe, {}, tmp_path / "alone")
    for spread in (DDP_2, FSDP2_2):
        together = train(recipe, spread.parallel, tmp_path / spread.name)
        assert together.losses == pytest.approx(alone.losses, abs=1e-4)
        assert together.eval_losses == pytest.approx(alone.eval_losses, abs=1e-4)
    saved = alone.folder / "model"
    config = AutoConfig.from_pretrained(saved)
    assert config.rope_parameters == {"rope_theta": config.rope_parameters["rope_theta"], **PARAMETERS}
    assert config.max_position_embeddings == 512
    assert eval_loss_of(by_hand(recipe, saved), alone.folder) == pytest.approx(alone.eval_losses[-1], abs=1e-4)
    assert longest_of(find_trained(str(alone.folder))) == 512
    if subject is LORA:
        unscaled = eval_loss_of(by_hand(recipe, saved, scaled=False), alone.folder)
        assert abs(unscaled - alone.eval_losses[-1]) > 1e-3
        check_lineage(recipe, saved, tmp_path)
    check_continued(recipe, alone, tmp_path)


def check_lineage(recipe, saved, tmp_path):
    """The adapter's base is scaled wherever its folder lies, and as the card says."""
    scaling = RopeScaling(factor=2)
    assert origin_of(ModelSection(path=str(saved))).base.rope_scaling == scaling
    copied = shutil.copytree(saved, tmp_path / "copied")
    own = origin_of(ModelSection(path=str(copied))).base.rope_scaling
    assert (own.rope_type, own.factor, own.original_max_position_embeddings) == ("yarn", 2, 256)
    assert "AutoConfig.from_pretrained(THIS_FOLDER)" in (saved / "README.md").read_text()


def check_continued(recipe, alone, tmp_path):
    """A run that continues keeps the scaling: it begins with the loss at which the other ended, and may go further."""
    data = {**recipe["data"], "max_length": 512}
    further = {**recipe, "model": str(alone.folder), "data": data, "train": {**recipe["train"], "max_steps": 1}}
    further["train"]["eval_steps"] = 1
    second = train(further, {}, tmp_path / "second")
    first = tunekit.Run(second.folder).result()["first_eval_loss"]
    assert first == pytest.approx(eval_loss_of(by_hand(recipe, alone.folder / "model"), second.folder), abs=1e-4)
    longer = {**further, "data": {**data, "max_length": 768}}
    with pytest.raises(tunekit.PlanError, match=r"exceeds the 512 positions .* set model\.rope_scaling\.factor=3"):
        tunekit.plan(longer)
    model = {"path": str(alone.folder), "rope_scaling": {"factor": 3}}
    plan = tunekit.plan({**longer, "model": model})
    assert plan.base.rope_scaling == RopeScaling(factor=3)
