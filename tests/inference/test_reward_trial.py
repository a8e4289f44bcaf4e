"""Rewards tried before training: what shows is what a run would learn from, the same each time."""

import json
import re
import statistics
from pathlib import Path

import pytest

import tunekit
from tests.commands import run_command
from tests.tiny import save_tiny_model
from tests.training.test_dpo import logged
from tunekit.api import verbs
from tunekit.data.tokenization.alignment import read_rows
from tunekit.display.rewards import trial_parts
from tunekit.errors import DataError, TunekitError
from tunekit.runs.prepared_data import FILES

REWARDS = """
def low(completions, **columns):
    return [sum(letter < "@" for letter in one[0]["content"]) / 16 for one in completions]

def texts_low(completions, **columns):
    return [float(sum(letter < "@" for letter in one)) for one in completions]

def some(completions, **columns):
    return [None if " " in one else 1.0 for one in completions]

def same(prompts, **columns):
    return [1.0] * len(prompts)

def unsaid(completions, answer, trainer_state, log_metric, **columns):
    log_metric("x", trainer_state.global_step)
    return [None if number == "0" else float(number) for number in answer]

def raises(prompts, **columns):
    return [1 / (int(prompt[0]["content"].split()[1]) - 3) for prompt in prompts]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    save_tiny_model(folder / "model")
    (folder / "trial_rewards.py").write_text(REWARDS)
    rows = [{"prompt": [{"role": "user", "content": f"double {n}"}], "answer": str(n)} for n in range(12)]
    rows.insert(1, {"prompt": [{"role": "user", "content": "x" * 200}], "answer": "1"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def recipe(*rewards, **method):
    given = {"type": "grpo", "num_generations": 4, "max_completion_length": 8, "rewards": [*rewards], **method}
    return {
        "model": "model",
        "data": {"train": "rows.jsonl", "max_length": 64},
        "method": given,
        "train": {"max_steps": 1, "global_batch_size": 8, "learning_rate": 1e-9},
        "output": {"sample_prompts": []},
    }


def test_each_reward_is_told_by_what_its_values_are(here):
    both = recipe("trial_rewards:low", {"type": "function", "path": "trial_rewards:unsaid", "weight": 2.0})
    trial = tunekit.try_rewards(both, num_prompts=5)
    assert [group.prompt for group in trial.groups] == [f"double {n}" for n in range(5)], "no room for the second row"
    assert [group.place for group in trial.groups] == [f"rows.jsonl:{line}" for line in (1, 3, 4, 5, 6)]
    low, unsaid = trial.rewards
    values = [answer.values[0] for answer in trial.answers]
    assert low.mean == pytest.approx(statistics.fmean(values))
    assert low.spread == pytest.approx(statistics.pstdev(values))
    groups = [values[start : start + 4] for start in range(0, 20, 4)]
    assert low.group_spread == pytest.approx(statistics.fmean(map(statistics.pstdev, groups)))
    assert (unsaid.none_share, unsaid.mean, unsaid.group_spread) == (pytest.approx(0.2), 2.5, 0)
    for answer in trial.answers:
        assert answer.total == pytest.approx(answer.values[0] + 2 * (answer.values[1] or 0))
        assert answer.num_tokens <= 8
        assert answer.values[0] == sum(letter < "@" for letter in answer.text) / 16
    assert trial.no_signal_share == sum(len({one.total for one in group.answers}) == 1 for group in trial.groups) / 5
    assert all(group.best.total >= group.worst.total for group in trial.groups)


def test_a_trial_is_the_same_each_time_and_another_with_another_seed(here):
    def said(*overrides):
        return [
            answer.text for answer in tunekit.try_rewards(recipe("trial_rewards:low"), overrides, num_prompts=3).answers
        ]

    assert said() == said() != said("train.seed=5")


def test_what_a_trial_shows_is_near_what_a_run_then_has(here):
    """Sampling differs, so the mean of many answers is compared, with a model that does not move."""
    given = recipe("trial_rewards:low", num_generations=32)
    given["train"] |= {"global_batch_size": 320, "micro_batch_size": 32}
    trial = tunekit.try_rewards(given, num_prompts=12)
    (event,) = logged(tunekit.train(given))
    deviation = trial.total.spread / 320**0.5
    assert event["reward"] == pytest.approx(trial.total.mean, abs=6 * deviation)
    assert event["completions/mean_length"] == pytest.approx(
        statistics.fmean(answer.num_tokens for answer in trial.answers), abs=0.5
    )
    assert event["completions/clipped_ratio"] == pytest.approx(trial.truncated_share, abs=0.1)


def test_what_speaks_against_training_is_said(here):
    silent = tunekit.try_rewards(recipe("trial_rewards:same", "exact_match"), num_prompts=3).warnings()
    assert any("all answers have equal rewards in 3 of 3 groups: no learning signal" in one for one in silent)
    assert "same returns 1 for every answer" in silent
    short = tunekit.try_rewards(recipe("trial_rewards:low", max_completion_length=1), num_prompts=3)
    assert short.truncated_share > 0.9
    assert any("of the answers are truncated at 1 tokens" in warning for warning in short.warnings())
    assert not any("equal rewards" in one for one in tunekit.try_rewards(recipe("trial_rewards:low")).warnings())
    assert not any("plain text" in one for one in silent)
    (here / "texts.jsonl").write_text("".join(json.dumps({"prompt": f"double {n}"}) + "\n" for n in range(4)))
    texts = tunekit.try_rewards({**recipe("trial_rewards:same"), "data": {"train": "texts.jsonl", "max_length": 64}})
    assert any("bypass the chat template; for a chat model, write each prompt" in one for one in texts.warnings())


def test_a_stop_text_ends_an_answer(here):
    trial = tunekit.try_rewards(recipe("trial_rewards:low", generation={"stop": list("abcdefghi")}), num_prompts=4)
    ended = [answer for answer in trial.answers if answer.text[-1:] in "abcdefghi" and answer.num_tokens < 8]
    assert ended
    assert not any(answer.is_truncated for answer in ended)


@pytest.mark.parametrize("width", [80, 120])
def test_the_answers_and_values_are_drawn(here, width):
    from rich.console import Console

    trial = tunekit.try_rewards(recipe("trial_rewards:low", "repetition"), num_prompts=3)
    console = Console(width=width, file=None, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        console.print(*trial_parts(trial), sep="\n")
    shown = captured.get()
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    for words in ("reward", "within groups", "low", "weighted sum", "without signal", "rows.jsonl:1", "best", "worst"):
        assert words in shown


def tunekit_rewards(folder, given, *arguments):
    (folder / "trial.yaml").write_text(json.dumps(given))
    return run_command("rewards", "trial.yaml", *arguments, cwd=folder)


def test_a_trial_is_told_as_plain_data_too(here):
    told = json.loads(json.dumps(tunekit.try_rewards(recipe("trial_rewards:low"), num_prompts=2).to_dict()))
    assert len(told["groups"]) == 2
    assert told["rewards"][0]["name"] == "low"
    assert told["no_signal_share"] == 0


def test_a_reward_that_fails_ends_the_trial_with_its_name_and_row(here):
    done = tunekit_rewards(here, recipe("trial_rewards:raises"))
    assert done.returncode == 2
    assert "method.rewards: trial_rewards:raises raised ZeroDivisionError" in done.stderr
    assert "for prompt 'double 3'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_tried_prompts_are_saved_with_their_rewards_and_sorted_by_them(here):
    trial = tunekit.try_rewards(recipe("trial_rewards:low"), num_prompts=5, out="scored.jsonl")
    saved = [json.loads(line) for line in Path("scored.jsonl").read_text().splitlines()]
    totals = [[answer.total for answer in group.answers] for group in trial.groups]
    assert [row["prompt"][0]["content"] for row in saved] == [group.prompt for group in trial.groups]
    assert [row["mean_reward"] for row in saved] == [pytest.approx(statistics.fmean(values)) for values in totals]
    assert [row["reward_std"] for row in saved] == [pytest.approx(statistics.pstdev(values)) for values in totals]
    easiest_first = sorted(saved, key=lambda row: -row["mean_reward"])
    assert easiest_first != saved
    data = {"train": "scored.jsonl", "max_length": 64, "shuffle": False, "curriculum_column": "difficulty"}
    run = verbs.make_run({**recipe("trial_rewards:low"), "data": data})
    assert next(iter(read_rows(run.path / "data" / FILES["train"])))["answer"] == easiest_first[0]["answer"]
    with pytest.raises(TunekitError, match=r"scored\.jsonl already exists"):
        tunekit.try_rewards(recipe("trial_rewards:low"), out="scored.jsonl")


def save_pairs(*pairs):
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in pairs]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


PAIRS = (("double 1", "1 2", "12 34"), ("double 2", "1", "a"), ("double 4", "12", "34"), ("double 5", "123", "a b"))
"""Answers with 3 and 5, 1 and 0, 2 and 2, 3 and 1 letters before `@`."""


def test_pairs_are_ranked_by_each_reward_and_by_their_sum(here):
    save_pairs(*PAIRS)
    rewarded = recipe({"type": "function", "path": "trial_rewards:texts_low", "weight": 2}, "trial_rewards:some")
    trial = tunekit.rank_pairs(rewarded, pairs="pairs.jsonl")
    low, some = trial.rewards
    assert (low.name, low.weight, low.accuracy, low.ties, low.num_compared) == ("texts_low", 2.0, 0.5, 0.25, 4)
    assert low.margin == pytest.approx((-2 + 1 + 0 + 2) / 4)
    # It returns none for answers with a space, of which two pairs have one.
    assert (some.accuracy, some.ties, some.margin, some.num_compared) == (0, 1, 0, 2)
    assert [pair.margin for pair in trial.pairs] == [-4.0, 2.0, 0.0, 4.0 + 1.0]
    assert [pair.place for pair in trial.confused(5)] == ["pairs.jsonl:1"]
    assert trial.pairs[3].chosen_values == (3.0, 1.0) and trial.pairs[3].rejected_values == (1.0, None)
    assert tunekit.rank_pairs(rewarded, pairs="pairs.jsonl", num_pairs=2).pairs == trial.pairs[:2]


def test_conversations_are_ranked_as_the_trainer_passes_them(here):
    chats = [
        ([{"role": "user", "content": prompt}], *([{"role": "assistant", "content": text}] for text in answers))
        for prompt, *answers in PAIRS
    ]
    save_pairs(*chats)
    trial = tunekit.rank_pairs(recipe("trial_rewards:low"), pairs="pairs.jsonl")
    assert [pair.margin for pair in trial.pairs] == [-2 / 16, 1 / 16, 0, 2 / 16]
    assert [(pair.prompt, pair.chosen) for pair in trial.pairs] == [(one[0], one[1]) for one in PAIRS]


def test_pairs_are_told_on_the_command_line(here):
    save_pairs(*PAIRS)
    done = tunekit_rewards(here, recipe("trial_rewards:texts_low"), "--pairs", "pairs.jsonl")
    assert done.returncode == 0, done.stderr
    assert re.search(r"texts_low +1 +50% +25% +\+0\.250 +4", done.stdout)
    assert "pairs.jsonl:1  double 1" in done.stdout and "margin -2" in done.stdout
    done = tunekit_rewards(here, recipe("trial_rewards:texts_low"), "--pairs", "pairs.jsonl", "--json")
    assert len(json.loads(done.stdout)["pairs"]) == 4
    done = tunekit_rewards(here, recipe("trial_rewards:low"), "--pairs", "pairs.jsonl", "--out", "x.jsonl")
    assert done.returncode == 2 and "--out does not apply to --pairs" in done.stderr


def test_pairs_that_cannot_be_ranked_are_refused(here):
    save_pairs(*PAIRS)
    for given, pairs, words in (
        (recipe(), "pairs.jsonl", r"method.rewards: empty; set the rewards"),
        ({**recipe("exact_match"), "method": "dpo"}, "pairs.jsonl", "dpo does not use rewards"),
        (recipe("exact_match"), "pairs.jsonl", r"pairs.jsonl:1: method.rewards: exact_match reads the column 'answer'"),
        (recipe("trial_rewards:low"), "none.jsonl", r"pairs.path: no file 'none.jsonl'"),
        (recipe("trial_rewards:low"), "rows.jsonl", r"pairs: 'rows.jsonl'"),
    ):
        with pytest.raises(TunekitError, match=words):
            tunekit.rank_pairs(given, pairs=pairs)


def test_what_cannot_be_tried_is_refused(here):
    with pytest.raises(TunekitError, match="sft does not use rewards; use grpo"):
        tunekit.try_rewards({**recipe("exact_match"), "method": "sft"})
    with pytest.raises(TunekitError, match=r"method.rewards: empty"):
        tunekit.try_rewards(recipe())
    with pytest.raises(DataError, match=r"rows.jsonl:1: method.rewards: exact_match reads the column 'x'"):
        tunekit.try_rewards(recipe({"type": "exact_match", "column": "x"}))
