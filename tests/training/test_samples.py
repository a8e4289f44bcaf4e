"""Prompts are asked as rows are trained on: through the chat template where these are conversations."""

import json

import pytest

import tunekit
from tunekit.api import verbs
from tunekit.inference.inference_model import find_trained

ASKED, ANSWERED = "What is 3 + 1?", "3 + 1 = 4."
USER, ASSISTANT = [{"role": "user", "content": ASKED}], [{"role": "assistant", "content": ANSWERED}]
SHAPES = {
    "messages": ({"messages": USER + ASSISTANT}, True),
    "prompts and completions of messages": ({"prompt": USER, "completion": ASSISTANT}, True),
    "prompts and completions as text": ({"prompt": ASKED, "completion": ANSWERED}, False),
    "texts": ({"text": ANSWERED}, False),
}


def recipe(folder, row):
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    return {
        "model": "pico",
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "train": {"max_steps": 1, "global_batch_size": 4, "learning_rate": 1e-9},
        "output": {"dir": str(folder / "run"), "sample_prompts": [ASKED]},
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_a_plan_knows_whether_rows_are_conversations(shape, tmp_path):
    row, is_chat = SHAPES[shape]
    planned = verbs.plan(recipe(tmp_path, row))
    assert planned.data.is_chat == planned.data.is_conversational == is_chat
    assert planned.data.model_copy(update={"is_conversational": None}).is_chat == (shape == "messages")


def test_prompts_of_a_method_that_generates_may_be_texts(tmp_path):
    method = {"method": {"type": "grpo", "rewards": ["exact_match"], "num_generations": 2, "max_completion_length": 8}}
    for prompt, is_chat in ((USER, True), (ASKED, False)):
        planned = verbs.plan({**recipe(tmp_path, {"prompt": prompt, "answer": "4"}), **method})
        assert planned.data.is_chat == is_chat


def test_completions_of_messages_are_sampled_and_chatted_with_as_conversations(tmp_path):
    row, _ = SHAPES["prompts and completions of messages"]
    run = tunekit.train(recipe(tmp_path, row))
    assert [(sample["before"], sample["after"]) for sample in run.samples()] == [(ANSWERED, ANSWERED)], (
        "pico's own answer, before and after"
    )
    assert find_trained(run).is_chat
