"""What is told of a run besides its loss: names of the log in words, and the first and the last of each."""

from tunekit.runs.events import brief, direction_of, first_and_last, judged_by, number, rows_of
from tunekit.training.answers import MAX_LETTERS, MAX_OTHERS, Answers, contrast

DPO = {"rewards/accuracies": 0.75, "rewards/margins": 0.5, "rewards/chosen": 0.2, "logps/chosen": -20.0, "loss": 0.6}
UNTRAINED = {**DPO, "rewards/accuracies": 0.0, "rewards/margins": 0.0, "rewards/chosen": 0.0}
GRPO = {
    "reward": 0.5,
    "reward_std": 0.25,
    "rewards/mine/mean": 0.5,
    "rewards/mine/std": 0.25,
    "frac_reward_zero_std": 0.125,
    "clip_ratio/region_mean": 0.01,
    "completions/mean_length": 12.0,
    "completions/clipped_ratio": 0.25,
    "loss": -1e-9,
}


def log(kind, values):
    prefix = "eval_" if kind == "eval" else ""
    return {"event": kind, **{prefix + name: value for name, value in values.items()}}


def test_the_held_out_ones_are_told_where_there_are_any():
    events = [
        log("eval", UNTRAINED),
        log("log", UNTRAINED),
        log("log", DPO),
        log("eval", {**DPO, "rewards/margins": 0.4}),
    ]
    found = first_and_last(events)
    assert found["rewards/margins"] == [0.0, 0.4]
    assert ("rewards/accuracies", "n/a → 75%") in rows_of(found)
    assert first_and_last([log("log", UNTRAINED), log("log", DPO)])["rewards/margins"] == [0.0, 0.5]


def test_rewards_are_told_by_function_with_their_spread():
    # The second step is on answers of the first, of which nothing new is logged.
    events = [log("log", GRPO), log("log", {"loss": 0.0}), log("log", {**GRPO, "reward": 0.75, "reward_std": None})]
    assert rows_of(first_and_last(events))[:2] == [
        ("reward", "0.500 ± 0.250 → 0.750 ± 0.250"),
        ("rewards/mine/mean", "0.500 ± 0.250 → 0.500 ± 0.250"),
    ]
    with_eval = [*events, log("eval", {**GRPO, "clip_ratio/region_mean": 0.0, "reward": 0.25})]
    found = first_and_last(with_eval)
    assert found["reward"] == [0.25, 0.25]
    assert found["clip_ratio/region_mean"] == [0.01, 0.01], "an evaluation takes no steps"


def test_what_is_told_while_a_run_goes_on_has_few_words():
    assert brief(DPO) == ["accuracy 75%", "margin 0.500"]
    assert brief(UNTRAINED) == ["accuracy n/a", "margin 0.000"]
    assert brief(GRPO) == ["reward 0.500", "tokens 12.0", "truncated 25%", "no signal 12%"]
    held_out = {f"eval_{name}": value for name, value in GRPO.items()}
    assert brief(held_out, "eval_") == ["reward 0.500", "tokens 12.0", "truncated 25%"]
    assert brief(log("eval", GRPO), "eval_")[0] == "reward 0.500"
    assert [judged_by(list(one)) for one in (GRPO, DPO, {"loss": 1.0})] == ["reward", "rewards/margins", "loss"]


def test_nothing_has_no_sign():
    assert [number(value, ".4f") for value in (-1e-9, 0.0, -0.5, -0.0001)] == ["0.0000", "0.0000", "-0.5000", "-0.0001"]
    assert number(-0.001, ".0%") == "0%"


def test_the_group_is_shown_whose_rewards_are_furthest_apart():
    prompts, answers = ["p"] * 2 + ["q"] * 2, ["a", "b", "c", "d" * 3000]
    rewards = {"one": [1.0, 1.0, 0.0, 1.0], "two": [float("nan")] * 4}
    found = contrast(prompts, answers, rewards, [0.0, 0.0, -0.7, 0.7], 2)
    assert (found["prompt"], found["worst"]["answer"]) == ("q", "c")
    assert found["best"]["rewards"] == {"one": 1.0, "two": None}
    assert found["best"]["answer"].startswith("ddd")
    assert len(found["best"]["answer"]) < MAX_LETTERS + 20
    assert contrast(["p"], ["a"], {"one": [1.0]}, [0.0], 2) is None
    said = [[{"role": "user", "content": "hello"}]] * 2
    assert contrast(said, said, {"one": [1.0, 2.0]}, [-1.0, 1.0], 2)["prompt"] == "hello"


def test_the_other_answers_of_a_group_stand_between_the_best_and_the_worst():
    def answers_of(num):
        group = contrast(["p"] * num, list(map(str, range(num))), {"one": list(range(num))}, list(range(num)), num)
        return [int(answer["answer"]) for answer in (group["best"], *group["others"], group["worst"])]

    assert answers_of(2) == [1, 0] and answers_of(5) == [4, 3, 2, 1, 0]
    many = answers_of(64)
    assert MAX_OTHERS / 2 <= len(many) - 2 <= MAX_OTHERS and many == sorted(set(many), reverse=True)
    assert (many[0], many[-1]) == (63, 0)


def test_answers_are_looked_at_once():
    kept = {"prompt": ["p"] * 2, "completion": ["a", "b"], "rewards": {"one": [0.0, 1.0]}, "advantages": [-1.0, 1.0]}
    answers = Answers(kept, 2)
    assert answers.look()["best"]["answer"] == "b"
    assert answers.look() is None
    kept["completion"] = ["c", "d"]
    assert answers.look()["best"]["answer"] == "d"


def test_no_way_is_better_where_a_measure_does_not_say_how_good_a_model_is():
    rewarded = {"loss", "reward", "kl", "entropy", "completions/clipped_ratio"}
    assert [direction_of(name, rewarded) for name in ("reward", "rewards/numeric_match/mean")] == ["more", "more"]
    assert direction_of("loss", rewarded) is None and direction_of("loss", {"loss", "rewards/margins"}) == "less"
    for name in ("kl", "entropy", "rewards/margins", "margin", "rewards/chosen", "rewards/rejected", "grad_norm"):
        assert direction_of(name, rewarded) is None, name
