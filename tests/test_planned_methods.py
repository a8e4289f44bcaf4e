"""DPO and GRPO before training: their rows are read and counted, and what cannot be trained is refused at once."""

import json
from pathlib import Path

import pytest

from tunekit.api import verbs
from tunekit.errors import DataError, TunekitError

PAIRS = [{"prompt": f"question {n}", "chosen": "good", "rejected": "bad"} for n in range(20)]
PROMPTS = [{"prompt": f"question {n}", "answer": "4"} for n in range(20)]


def recipe(folder: Path, method: str, rows: list[dict[str, str]]) -> dict[str, object]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": "pico", "data": {"train": str(folder / "rows.jsonl")}, "method": method}


DISTILLATION = {"type": "distillation", "teacher": "pico"}


@pytest.mark.parametrize(
    ("method", "rows", "kind"),
    [
        ("dpo", PAIRS, "preference"),
        ("grpo", PROMPTS, "prompts"),
        ("rloo", PROMPTS, "prompts"),
        (DISTILLATION, PROMPTS, "prompts"),
    ],
)
def test_a_plan_counts_the_rows(tmp_path, method, rows, kind):
    plan = verbs.plan(recipe(tmp_path, method, rows))
    assert (plan.data.num_train, plan.data.format) == (20, kind)
    compared = verbs.compare_plans(recipe(tmp_path, method, rows), on=["h100"])
    assert compared["h100"].data == plan.data


@pytest.mark.parametrize(
    ("method", "rows", "why"),
    [
        ("dpo", PROMPTS, r"holds prompts without completions \(prompt\), but method dpo trains on preference pairs"),
        ("grpo", PAIRS, r"holds preference pairs \(chosen, rejected\), but method grpo trains on prompts"),
        ("sft", PAIRS, "but method sft trains on conversations"),
    ],
)
def test_rows_of_another_shape_are_refused(tmp_path, method, rows, why):
    with pytest.raises(DataError, match=why):
        verbs.plan(recipe(tmp_path, method, rows))


@pytest.mark.parametrize("verb", [verbs.train, verbs.check])
@pytest.mark.parametrize(
    ("recipe", "problem"),
    [
        ({"method": "grpo"}, "method.rewards: empty, but grpo learns only from rewards"),
        ({"method": "dpo", "streaming": True}, "data.streaming: unsupported in training with dpo"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_read_or_written(
    tmp_path, monkeypatch, verb, recipe, problem
):
    monkeypatch.chdir(tmp_path)
    data = {"train": "nowhere.jsonl", "streaming": recipe.get("streaming", False)}
    with pytest.raises(TunekitError) as error:
        verb({"model": "no/such-model", "data": data, "method": recipe["method"], "train": {"max_steps": 5}})
    assert error.value.problem.startswith(problem)
    assert error.value.hint
    assert list(tmp_path.iterdir()) == []
