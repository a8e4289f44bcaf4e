"""GRPO on a tiny model: rewards of the user's own, whole groups, what it learns, alone and in two processes."""

import json

import pytest

import tunekit
from tests.processes import in_processes
from tests.tiny import save_tiny_model
from tests.training.test_dpo import logged, work_in
from tunekit.api import verbs
from tunekit.errors import DataError, RecipeError, RunError, TunekitError
from tunekit.methods.rewards.load import load_rewards
from tunekit.recipe.sections.rewards import FunctionReward

REWARDS = """
import json, os
from pathlib import Path

def _text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]

def low(completions, **columns):
    # Something that a model of random weights can learn in a few steps.
    return [sum(letter < "@" for letter in _text(one)) / 16 for one in completions]

def seen(prompts, completions, answer, **columns):
    with Path(f"seen-{os.environ.get('RANK', 0)}.jsonl").open("a") as file:
        file.write(json.dumps([prompts, answer]) + "\\n")
    return [None] * len(completions)

def raises(prompts, **columns):
    return [1 / (int(prompt.split()[1]) - 3) for prompt in prompts]

def short(completions, **columns):
    return [1.0]

def nothing(completions, **columns):
    return None

def nan(completions, **columns):
    return [float("nan") if number == 2 else 1.0 for number in range(len(completions))]

def words(completions, **columns):
    return ["good"] * len(completions)
"""

ANSWERS = [n if n % 2 else {"half": n} for n in range(12)]
"""A column whose values have different types, as a reward may want them."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    save_tiny_model(folder / "model")
    (folder / "grpo_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"double {n}", "answer": answer} for n, answer in enumerate(ANSWERS)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    yield workspace
    for file in workspace.glob("seen-*.jsonl"):
        file.unlink()


def recipe(*rewards, rows="texts", **sections):
    return {
        "model": "model",
        "data": {"train": f"{rows}.jsonl", "max_length": 64, **sections.pop("data", {})},
        "method": {
            "type": "grpo",
            "num_generations": 4,
            "max_completion_length": 16,
            "rewards": [f"grpo_rewards:{name}" for name in rewards],
            **sections.pop("method", {}),
        },
        "train": {"max_steps": 2, "global_batch_size": 8, "learning_rate": 1e-2, **sections.pop("train", {})},
        "output": {"sample_prompts": []},
        **sections,
    }


@pytest.mark.slow
def test_the_reward_rises_and_is_in_the_events_and_at_the_end(here):
    steps = {"max_steps": 20, "global_batch_size": 16, "eval_steps": 20}
    run = tunekit.train(recipe("low", rows="chats", data={"eval": "chats.jsonl"}, train=steps, output={}))
    rewards = [event["reward"] for event in logged(run)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1
    last = logged(run)[-1]
    assert {"rewards/low/mean", "reward_std", "frac_reward_zero_std", "completions/mean_length"} <= set(last)
    assert last["num_tokens"] > 0 and last["tokens_per_second"] > 0
    held_out = [event["eval_reward"] for event in logged(run, "eval")]
    assert run.result()["measures"]["reward"] == [held_out[0], held_out[-1]]
    assert "| reward |" in (run.model_path / "README.md").read_text()
    assert [sample["prompt"] for sample in run.samples()] == ["double 0", "double 1", "double 2"]


def test_a_reward_gets_the_columns_as_they_stand_in_the_rows_in_whole_groups(here):
    tunekit.train(recipe("low", "seen", train={"global_batch_size": 8, "micro_batch_size": 2}))
    calls = [json.loads(line) for line in (here / "seen-0.jsonl").read_text().splitlines()]
    assert [len(prompts) for prompts, _ in calls] == [8, 8], "all answers of a step are generated at once"
    for prompts, answers in calls:
        assert answers == [ANSWERS[int(prompt.split()[1])] for prompt in prompts]
        assert all(prompts.count(prompt) == 4 for prompt in prompts)


def test_a_reward_that_fails_ends_the_run_and_is_named_with_its_row(here):
    what = r"raised ZeroDivisionError: division by zero \(.*grpo_rewards.py:\d+\) for prompt 'double 3'"
    with pytest.raises(RunError, match=f"method.rewards: grpo_rewards:raises {what}") as error:
        tunekit.train(recipe("raises", method={"max_completion_length": 4}, train={"global_batch_size": 48}))
    assert error.value.hint


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ("short", "returned 1 values for 4 completions; the first was prompt 'double 0', completion '0'"),
        ("nothing", "returned a value of type NoneType, not a list"),
        ("nan", "returned nan for prompt 'double 2', completion '2'"),
        ("words", "returned good for prompt 'double 0', completion '0'"),
    ],
)
def test_what_is_no_number_for_each_answer_is_refused_by_name(here, reward, problem):
    (judge,) = load_rewards([FunctionReward(path=f"grpo_rewards:{reward}")], device="cpu")
    with pytest.raises(RunError, match=f"method.rewards: grpo_rewards:{reward} {problem}") as error:
        judge(prompts=[f"double {n}" for n in range(4)], completions=["0", "1", "2", "3"])
    assert error.value.hint


def test_a_reward_is_looked_for_when_the_recipe_is_loaded(here):
    with pytest.raises(RecipeError, match=r"method.rewards\[0\]: module 'grpo_rewards' has no function 'lwo'"):
        verbs.plan(recipe("lwo"))
    with pytest.raises(TunekitError, match=r"method.rewards: empty, but grpo learns only from rewards"):
        tunekit.train(recipe())


def test_a_prompt_that_leaves_no_room_for_the_longest_answer_is_left_out(here):
    rows = [{"prompt": "x" * length, "answer": 1} for length in (48, 49, 10, 11)]
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tunekit.train(recipe("low", rows="long", train={"max_steps": 1}))
    assert (run.plan.data.num_train, run.plan.data.num_dropped) == (3, 1)
    with pytest.raises(DataError, match="none of 4 prompts leaves room for a completion: limit 4 tokens"):
        tunekit.train(recipe("low", rows="long", data={"max_length": 20}))


def test_nothing_has_moved_from_the_reference_in_the_first_step(here):
    for adapter in ("lora", "full"):
        run = tunekit.train(recipe("low", adapter=adapter, method={"beta": 0.1}, train={"warmup_steps": 0}))
        first, second = (event["kl"] for event in logged(run))
        assert first == pytest.approx(0, abs=1e-9)
        assert second > 1e-6


def test_answers_are_used_for_as_many_steps_as_the_recipe_says(here):
    run = tunekit.train(recipe("low", "seen", method={"num_iterations": 2}, train={"max_steps": 4}))
    assert len((here / "seen-0.jsonl").read_text().splitlines()) == 2
    assert len(logged(run)) == 4


@pytest.mark.slow
def test_two_processes_share_the_groups_of_a_step(here):
    run = verbs.make_run(recipe("low", "seen", parallel={"num_processes": 2, "strategy": "ddp"}))
    in_processes(2, work_here, str(here), str(run.path.resolve()))
    assert run.state == "finished"
    ranks = [[json.loads(line) for line in (here / f"seen-{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    for (one, _), (other, _) in zip(*ranks, strict=True):
        assert len(one) == len(other) == 4
        assert len(set(one)) == len(set(other)) == 1, "each has a whole group"
        assert one[0] != other[0]
    assert all(0 < event["grad_norm"] < 100 for event in logged(run))


def work_here(folder: str, run: str) -> None:
    """Work in a run as one of its processes, where its rewards are found."""
    import os

    os.chdir(folder)
    work_in(run)
