"""Runs that add tokens: alone and in two processes, cut off and resumed, saved and read again as others read them."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tunekit
from tests.training.equality import SPREADS, SUBJECTS, eval_loss_of, recipe_of, train
from tests.training.test_resume import whole_and_resumed

DDP_2, _, FSDP2_2 = SPREADS[:3]
FULL, LORA = SUBJECTS[0], SUBJECTS[5]


def recipe_in(folder, adapter):
    """Answers with a token of a tool's around them, for an untied Llama."""
    recipe = recipe_of(LORA, folder, micro_batch_size=2)
    rows = [{"prompt": "?" * (1 + n % 5), "completion": f"<tool>{n}</tool>"} for n in range(21)]
    for name, num in (("rows", 21), ("eval", 7)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:num]))
    tokens = {"add_tokens": ["<tool>", "</tool>"], "special_tokens": {"pad_token": "<pad>"}}
    recipe["model"] = {"path": recipe["model"], **tokens}
    recipe["data"] = {"train": str(folder / "rows.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 64}
    recipe["method"], recipe["adapter"] = {"type": "sft"}, adapter
    recipe["train"] |= {"max_steps": 6, "save_steps": 2, "eval_steps": 3}
    return recipe


def by_hand(recipe, folder):
    """The saved model as its card says that others read it."""
    if recipe["adapter"]["type"] == "full":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(recipe["model"]["path"], dtype=torch.float32)
    base.resize_token_embeddings(262)
    return PeftModel.from_pretrained(base, folder).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "spreads"),
    [({"type": "full"}, (DDP_2, FSDP2_2)), ({"type": "lora", "rank": 4}, (DDP_2,))],
    ids=["full", "lora"],
)
def test_new_tokens_are_trained_and_saved(adapter, spreads, tmp_path):
    recipe = recipe_in(tmp_path / "files", adapter)
    alone = train(recipe, {}, tmp_path / "alone")
    assert not [event for event in tunekit.Run(alone.folder).events() if event["event"] == "warning"]
    for spread in spreads:
        together = train(recipe, spread.parallel, tmp_path / spread.name)
        assert together.losses == pytest.approx(alone.losses, abs=1e-4)
        assert together.eval_losses == pytest.approx(alone.eval_losses, abs=1e-4)
    saved = alone.folder / "model"
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer("<tool></tool>")["input_ids"] == [259, 260]
    assert tokenizer.pad_token_id == 261
    assert eval_loss_of(by_hand(recipe, saved), alone.folder) == pytest.approx(alone.eval_losses[-1], abs=1e-4)
    assert alone.losses[-1] < alone.losses[0]
    further = {**recipe, "model": str(alone.folder), "train": {**recipe["train"], "max_steps": 1, "eval_steps": 1}}
    second = train(further, {}, tmp_path / "second")
    assert tunekit.Run(second.folder).result()["first_eval_loss"] == pytest.approx(alone.eval_losses[-1], abs=1e-4)


@pytest.mark.slow
def test_a_run_with_new_tokens_resumes_exactly(tmp_path):
    recipe = recipe_in(tmp_path / "files", {"type": "lora", "rank": 4})
    runs = whole_and_resumed(recipe, tmp_path)
    weights = [load_file(run.model_path / "adapter_model.safetensors") for run in runs]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name
