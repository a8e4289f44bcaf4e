"""What a plan has decided is what TRL's trainer gets."""

from typing import NoReturn

import pytest
import torch
from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from tests.runs.test_lineage import save_adapter
from tests.tiny import make_tokenizer, save_chats, save_tiny_model_like, saved_weights
from tunekit.api import verbs
from tunekit.methods import sft
from tunekit.methods.arguments import Parts, settle_reference
from tunekit.models.load import load_model


def unused(*given: object) -> NoReturn:
    raise AssertionError("supervised fine-tuning has neither a reference nor a teacher")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("arguments")
    save_tiny_model_like(folder / "experts", "qwen2_moe")
    save_chats(folder / "chats.jsonl", [("a", "b")] * 8)
    return folder


@pytest.mark.parametrize(("given", "wanted"), [({}, 0.25), ({"router_aux_loss_coef": 0.5}, 0.5)])
def test_the_trainer_weighs_the_loss_of_routers_as_its_plan_says(folder, tmp_path, given, wanted):
    data = {"train": str(folder / "chats.jsonl"), "max_length": 64}
    method = {"type": "sft", "trainer_args": given}
    plan = verbs.plan({"model": str(folder / "experts"), "data": data, "method": method})
    assert plan.router_aux_loss_coef == given.get("router_aux_loss_coef", 0.001)  # the default of Qwen2MoeConfig
    if not given:
        plan = plan.model_copy(update={"router_aux_loss_coef": 0.25})
    model = load_model(plan.recipe.model, dtype="float32", attn_implementation="sdpa", device="cpu", quantization=None)
    row = {"input_ids": list(range(8, 24)), "labels": list(range(8, 24))}
    parts = Parts(
        train=plan.recipe.train,
        data=plan.recipe.data,
        plan=plan,
        schedule=plan.schedule,
        model=model,
        tokenizer=make_tokenizer(),
        train_dataset=Dataset.from_list([row] * 16),
        eval_dataset=None,
        checkpoints=tmp_path,
        callbacks=[],
        engine={},
        load_reference=unused,
        load_teacher=unused,
    )
    trainer = sft.build(plan.recipe.method, parts)
    assert (trainer.router_aux_loss_coef, trainer.aux_loss_enabled) == (wanted, True)


@pytest.mark.parametrize("reference", ["none", "without adapter", "copied adapter"])
def test_an_adapter_that_is_trained_further_and_its_copy_are_what_was_saved(folder, tmp_path, reference):
    """TRL rounds the first where the base is quantized, and copies it (trl 1.16, `DPOTrainer.__init__`)."""
    adapter = save_adapter(tmp_path / "adapter", folder / "experts", target_modules=["q_proj"])
    base = AutoModelForCausalLM.from_pretrained(folder / "experts")
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    model.add_adapter("ref", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16().float()
    settle_reference(model, reference, adapter)
    saved = saved_weights(adapter)
    names = ["default", "ref"] if reference == "copied adapter" else ["default"]
    assert list(model.peft_config) == names
    for name in names:
        weights = get_peft_model_state_dict(model, adapter_name=name)
        assert all(torch.equal(weights[key], value) for key, value in saved.items())
    assert {".ref." in name for name, each in model.named_parameters() if each.requires_grad} == {False}
