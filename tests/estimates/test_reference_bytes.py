"""What the plan reserves for a reference model is what the run's trainer holds besides the trained model."""

import json

import pytest

from tests.methods.exact import build
from tests.tiny import save_tiny_model
from tunekit.api import verbs

CASES = {
    "dpo, full": ({"type": "dpo"}, "full", True),
    "dpo, full, computed before": ({"type": "dpo", "precompute_ref_log_probs": True}, "full", False),
    "dpo, lora": ({"type": "dpo"}, "lora", False),
    "grpo, full": ({"type": "grpo", "beta": 0.1}, "full", True),
    "grpo, lora": ({"type": "grpo", "beta": 0.1}, "lora", False),
    "grpo, full, without a reference": ({"type": "grpo"}, "full", False),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_a_second_model_is_planned_where_there_is_one(case, tmp_path):
    method, adapter, is_kept = CASES[case]
    if method["type"] == "grpo":
        how = {"num_generations": 2, "max_completion_length": 8, "rewards": ["tests.training.answers:reward"]}
        method = {**method, **how}
    save_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(4)]
    rows = [{"prompt": row["prompt"]} for row in rows] if method["type"] == "grpo" else rows
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": str(tmp_path / "model"),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 32},
        "method": method,
        "adapter": adapter,
        "train": {"max_steps": 1, "global_batch_size": 4},
        "output": {"dir": str(tmp_path / "run"), "sample_prompts": []},
    }
    planned = verbs.plan(recipe).memory.parts.get("reference", 0)
    reference = build(recipe).ref_model
    held = 0 if reference is None else sum(weight.nbytes for weight in reference.parameters())
    assert (planned > 0, held > 0) == (is_kept, is_kept)
    assert planned == held
