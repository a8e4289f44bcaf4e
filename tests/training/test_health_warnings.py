"""Warnings from the figures of a run: of real short runs set up to go wrong, and none of those that go well."""

import json
import random

import pytest
import torch

import tunekit
from tests.tiny import make_tokenizer, save_chats, save_tiny_model
from tests.training.test_dpo import logged
from tunekit.recipe.methods.dpo import DPOMethod
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.methods.sft import SFTMethod
from tunekit.runs.run import Run
from tunekit.training.health_warnings import FINDERS, RECURRING, Trends, words

REWARDS = """
from itertools import count

NUMBERS = count()

def constant(completions, **columns):
    return [1.0] * len(completions)

def of_the_prompt(prompts, **columns):
    return [float(len(prompt)) for prompt in prompts]

def long(completions, **columns):
    return [len(one) / 16 for one in completions]

def brief(completions, **columns):
    return [-len(one) / 16 for one in completions]

def chance(completions, **columns):
    # Whatever the answer is, so that none becomes better.
    return [next(NUMBERS) * 0.6180339887 % 1 for one in completions]
"""

LONGEST, NUM_STEPS = 24, 24


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trends")
    save_tiny_model(folder / "model")
    (folder / "trend_rewards.py").write_text(REWARDS)
    draw = random.Random(0)

    def text(length):
        return "".join(draw.choices("abcdefgh", k=length))

    pairs = []
    for _ in range(32):
        # Pairs that are alike but for a letter: what makes one less likely does so with the other.
        better, place = text(16), draw.randrange(16)
        worse = f"{better[:place]}z{better[place + 1 :]}"
        pairs.append({"prompt": text(5), "chosen": better, "rejected": worse})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    prompts = [{"prompt": text(draw.randint(3, 9))} for _ in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    save_chats(folder / "chats.jsonl", [(text(5), text(5)) for _ in range(32)])
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    """In a folder where answers end now and then: those of random weights would hardly ever."""
    drawn, end = torch.multinomial, make_tokenizer().eos_token_id

    def draw(probabilities, num_samples, **how):
        likelier = probabilities.clone()
        likelier[:, end] *= 20
        return drawn(likelier, num_samples, **how)

    monkeypatch.setattr(torch, "multinomial", draw)
    monkeypatch.chdir(workspace)
    return workspace


def trained(rows, method, learning_rate, adapter="lora") -> Run:
    return tunekit.train(
        {
            "model": "model",
            "data": {"train": f"{rows}.jsonl", "max_length": 64},
            "method": method,
            "adapter": adapter,
            "train": {"max_steps": NUM_STEPS, "global_batch_size": 8, "learning_rate": learning_rate},
            "output": {"sample_prompts": []},
        }
    )


def grpo(*rewards, **fields):
    named = [f"trend_rewards:{name}" for name in rewards]
    return {"type": "grpo", "num_generations": 4, "max_completion_length": LONGEST, "rewards": named, **fields}


def warned(run) -> set[str]:
    recurring = {find.__name__ for find in RECURRING}
    names = [event["trend"] for event in logged(run, "warning") if event["trend"] not in recurring]
    assert len(set(names)) == len(names), "each is told once"
    return set(names)


def test_every_warning_has_its_words():
    assert [find.__name__ for find in FINDERS if find.__name__ not in words()] == []
    assert len(words()) == len(FINDERS)


@pytest.mark.slow
def test_pairs_that_are_learned_well_are_no_reason_to_warn(here):
    run = trained("pairs", "dpo", 2e-3)
    assert warned(run) == set()
    assert logged(run)[-1]["rewards/margins"] > 0.5


@pytest.mark.slow
def test_better_answers_that_become_less_likely_are_told_with_the_margin_that_grows(here):
    run = trained("pairs", "dpo", 0.1, "full")
    assert warned(run) == {"chosen_falls", "margins_saturate"}
    (words,) = (event["message"] for event in logged(run, "warning") if event["trend"] == "chosen_falls")
    assert "method.loss_type: [sigmoid, sft]" in words


@pytest.mark.slow
def test_answers_that_are_learned_well_are_no_reason_to_warn(here):
    run = trained("prompts", grpo("brief", beta=0.04), 1e-2)
    assert warned(run) == set()
    rewards = [event["reward"] for event in logged(run)]
    assert sum(rewards[-5:]) > sum(rewards[:5])


@pytest.mark.slow
def test_best_and_worst_answers_are_written_with_what_each_reward_gave_them(here):
    run = trained("prompts", grpo("brief", "constant"), 1e-2)
    told = logged(run, "completions")
    assert [event["step"] for event in told] == list(range(1, NUM_STEPS + 1))
    prompts = {json.loads(line)["prompt"] for line in (here / "prompts.jsonl").read_text().splitlines()}
    for event in told:
        assert event["prompt"] in prompts
        for answer in (event["best"], event["worst"]):
            given = {"brief": pytest.approx(-len(answer["answer"]) / 16), "constant": 1}
            assert answer["rewards"] == given
        assert len(event["best"]["answer"]) < len(event["worst"]["answer"])
        assert event["best"]["advantage"] > 0 > event["worst"]["advantage"]
    assert warned(run) == {"reward_is_constant"}


@pytest.mark.slow
def test_rewards_that_tell_no_answers_of_a_group_apart_are_told(here):
    assert warned(trained("prompts", grpo("of_the_prompt"), 1e-2)) == {"no_signal"}


@pytest.mark.slow
def test_a_reward_for_length_makes_answers_run_away(here):
    run = trained("prompts", grpo("long"), 1e-2)
    assert warned(run) == {"answers_run_away"}
    (warning,) = logged(run, "warning")
    assert f"of the answers are truncated at {LONGEST} tokens" in warning["message"]


@pytest.mark.slow
def test_a_learning_rate_that_is_far_too_high_loses_the_reference_and_what_to_try(here):
    # With a rate of 0.1 the entropy may end on either side of its limit, by the rounding of the processor.
    found = warned(trained("prompts", grpo("chance", beta=0.001), 1.0, "full"))
    assert {"kl_explodes", "entropy_collapses"} <= found
    assert "loss_rises" in warned(trained("chats", "sft", 2.0, "full"))


def told(method, values) -> dict[str, int]:
    """What is warned of and at which step, where something is logged in each of 30 steps."""
    trends, found = Trends(method), {}
    for step in range(1, 31):
        log = {name: value(step) if callable(value) else value for name, value in values.items()}
        found |= {name: step for name, _ in trends.add(step, log)}
    return found


def test_what_is_warned_of_is_known_by_numbers():
    sft, dpo, grpo = SFTMethod(), DPOMethod(beta=0.1), GRPOMethod(max_completion_length=100, beta=0.1)
    # 1.5 times the first five losses, over ten: from the step on in which all ten are above.
    assert told(sft, {"loss": lambda step: 1.0 if step <= 15 else 1.51}) == {"loss_rises": 25}
    assert told(sft, {"loss": lambda step: 1.0 if step <= 15 else 1.49}) == {}
    # From 5, the mean of the first five, down to 2, and half of the way back.
    assert told(sft, {"loss": lambda step: max(2.0, 8.0 - step) if step <= 20 else 3.6}) == {"loss_rises": 30}
    assert told(sft, {"loss": lambda step: max(2.0, 8.0 - step) if step <= 20 else 3.4}) == {}
    assert told(grpo, {"loss": lambda step: step}) == {}
    # Three in a row of ten times what nine of ten had.
    assert told(sft, {"loss": 1.0, "grad_norm": lambda step: 1.0 if step <= 25 else 31.0}) == {"gradient_grows": 26}
    assert told(sft, {"loss": 1.0, "grad_norm": lambda step: 1.0 + step % 5}) == {}
    # Of 50 nats 10 are a fifth; a reward is beta times as many. The mean of ten steps counts.
    falls = {"rewards/chosen": lambda step: -0.1 * step, "logps/chosen": lambda step: -50.0 - step}
    assert told(dpo, falls) == {"chosen_falls": 15}
    stays = {"rewards/chosen": -1.5, "logps/chosen": -65.0}
    assert told(dpo, stays) == {}
    margins = {"rewards/accuracies": 1.0, "rewards/margins": lambda step: step}
    assert told(dpo, margins) == {"margins_saturate": 15}
    assert told(dpo, {**margins, "rewards/accuracies": lambda step: 1.0 if step % 5 else 0.9}) == {}
    silent = {"reward": 0.0, "reward_std": 0.0, "rewards/one/mean": 0.0, "rewards/one/std": 0.0}
    assert told(grpo, {**silent, "frac_reward_zero_std": 1.0}) == {"reward_is_constant": 10}
    some = {"reward": 0.1, "reward_std": 0.3, "rewards/one/mean": 0.1, "rewards/one/std": 0.3}
    assert told(grpo, {**some, "frac_reward_zero_std": 0.85}) == {"no_signal": 10}
    assert told(grpo, {**some, "frac_reward_zero_std": 0.75}) == {}
    falls = {**some, "reward": lambda step: 0.2 if step <= 10 else 0.04}
    assert told(grpo, falls) == {"reward_falls": 20}
    assert told(grpo, {**falls, "reward_std": 0.33}) == {}
    # What has been learned needs no signal.
    learned = {**some, "reward": lambda step: min(1.0, step / 10), "frac_reward_zero_std": 0.85}
    assert told(grpo, learned) == {}
    lengths = {"completions/mean_length": lambda step: 3.0 * step, "completions/clipped_ratio": 0.1}
    assert told(grpo, lengths) == {"answers_run_away": 26}
    assert told(grpo, {"kl": 2.9}) == {}
    assert told(grpo, {"kl": 3.1}) == {"kl_explodes": 10}
    assert told(grpo, {"kl": lambda step: 0.01 if step <= 22 else 1.0}) == {"kl_explodes": 25}
    collapse = {"entropy": lambda step: 2.0 if step <= 10 else 0.1, **some}
    assert told(grpo, collapse) == {"entropy_collapses": 20}
    assert told(grpo, {**collapse, "reward": lambda step: step / 30}) == {}


def occurrences(logs, method=None) -> list[tuple[int, str]]:
    """What is warned of and at which steps, each time, where these are logged from step 1 on."""
    trends = Trends(method or SFTMethod())
    return [(step, name) for step, log in enumerate(logs, start=1) for name, _ in trends.add(step, log)]


def test_a_loss_far_above_the_last_ones_is_told_each_time_that_it_comes():
    def losses(**spikes):
        return [{"loss": spikes.get(f"at_{step}", 1.0 + 0.05 * (step % 3))} for step in range(1, 51)]

    # The middle of the last ones is 1.05, and half of them are within 0.05 of that.
    assert occurrences(losses(at_30=2.2)) == [(30, "loss_spikes")]
    assert occurrences(losses(at_30=2.05)) == []
    # Two in a row are one spike.
    assert occurrences(losses(at_30=2.2, at_31=2.3, at_45=5.0)) == [(30, "loss_spikes"), (45, "loss_spikes")]
    # Twice as much is nothing where losses differ so much anyway.
    spread = [{"loss": 1.0 + 0.2 * (step % 4) + 1.3 * (step == 30)} for step in range(1, 51)]
    assert occurrences(spread) == []
    assert occurrences(losses(at_30=50.0), GRPOMethod()) == []
    # Before there are enough to compare with.
    assert occurrences(losses(at_15=3.0)) == []


def test_a_gradient_that_grows_again_after_it_was_mended_is_told_again():
    logs = [{"loss": 1.0, "grad_norm": 31.0 if step in (*range(26, 30), *range(70, 74)) else 1.0} for step in range(99)]
    assert [name for _, name in occurrences(logs)] == ["gradient_grows", "gradient_grows"]
    # What is told once is of the whole run.
    assert occurrences([{"kl": 5.0} for _ in range(99)], GRPOMethod(beta=0.1)) == [(10, "kl_explodes")]


def test_steps_that_become_slow_are_told_with_what_they_wait_for():
    def timed(step, *, slow):
        # 1000 tokens in a second, of which 100 ms update weights; rows are there in 10 ms, or in 1.5 s.
        return {
            "tokens_per_second": 1000.0,
            "step_seconds": 1.0 + 0.3 * (step % 2),
            "optimizer_seconds": 0.1,
            "data_seconds": 1.5 if slow else 0.01,
        }

    logs = [timed(step, slow=41 <= step <= 55 or 70 <= step <= 78) for step in range(1, 101)]
    # Ten slow steps in a row are needed, and the second time there are nine.
    assert occurrences(logs) == [(50, "throughput_stalls")]
    trends = Trends(SFTMethod())
    told = [words for step, log in enumerate(logs, start=1) for _, words in trends.add(step, log)]
    # Of the slow steps, those of 1300 tokens are the fastest, and three of four earlier ones had 1.01 s for 1000.
    assert told[0].startswith("throughput dropped to at most 464 tokens per second in the last 10 logged steps; three")
    assert "of four before had 990 or more;" in told[0]
    assert told[0].endswith("grown, in ms per token: waiting for data 0.01 → 1.33")


def test_a_run_that_goes_on_knows_what_was_logged_and_told_before():
    earlier = [{"step": step, "kl": 5.0} for step in range(1, 10)]
    method = GRPOMethod(beta=0.1)
    assert [name for name, _ in Trends(method, earlier).add(10, {"kl": 5.0})] == ["kl_explodes"]
    assert list(Trends(method, earlier, ["kl_explodes"]).add(10, {"kl": 5.0})) == []
    # From a checkpoint of step 5, what was logged behind it is logged anew.
    assert list(Trends(method, earlier).add(6, {"kl": 5.0})) == []
