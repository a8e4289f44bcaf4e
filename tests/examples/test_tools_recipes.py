"""The shipped recipes with environments: they start from each other, and the benchmark's loop plays as they do."""

import json

import pytest

import tunekit
from benchmarks.tools import Player, guess, solve
from tunekit.methods.environments.tools import calculator

SMALL = {"train.max_steps": 1, "output.sample_prompts": [], "data.eval": None}


@pytest.mark.slow
def test_both_start_from_the_run_that_learned_to_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sums", "guess"):
        begun = tunekit.train(f"tools/{name}-sft", {**SMALL, "data.packing": False, "train.global_batch_size": 4})
        run = tunekit.train(f"tools/{name}", {**SMALL, "train.global_batch_size": 8})
        assert run.status()["phase"] == "finished"
        assert run.plan.origin.chain.split(" > ")[-1].startswith(begun.name)
    measures = solve(Player(run.model_path), with_tools=True)
    assert set(measures) >= {"right", "sums", "products", "calls, sums", "calls, products", "reward"}
    assert guess(Player(run.model_path), 8)["found"] <= 1


class Scripted(Player):
    """Asks the calculator for products alone, and halves what is left in games."""

    def __init__(self):
        pass

    def turn(self, conversations, tools):
        return [self.next_of(messages) for messages in conversations]

    def next_of(self, messages):
        first, last = messages[0]["content"], messages[-1]
        if first.startswith("Guess"):
            if last["content"] == "right" or "over" in last["content"]:
                return "done"
            low, high = (1, 3) if len(messages) == 1 else map(int, last["content"].partition(", ")[2].split(" to "))
            return self.call("guess", number=(low + high) // 2)
        expression = first.removeprefix("What is ").removesuffix("?")
        if last["role"] == "tool":
            return f"{last['content']}."
        return self.call("calculator", expression=expression) if "*" in expression else f"{calculator(expression)}."

    def call(self, name, **arguments):
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_benchmark_counts_what_a_player_does():
    solved = solve(Scripted(), with_tools=True)
    assert (solved["right"], solved["calls, sums"], solved["calls, products"]) == (1, 0, 1)
    assert solved["reward"] == pytest.approx(0.9, abs=0.02)
    played = guess(Scripted(), 64)
    assert played["found"] == 1 and played["guesses"] == pytest.approx(5 / 3, abs=0.2)
