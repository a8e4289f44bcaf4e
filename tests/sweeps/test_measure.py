"""What the runs of a sweep are compared by, with numbers worked out by hand."""

import pytest

import tunekit
from tests.rows import save_rows
from tunekit.errors import PlanError
from tunekit.sweeps.measure import Measure, measure_of


def logged(*losses):
    return [{"event": "log", "step": step, "loss": loss} for step, loss in enumerate(losses, start=1)]


def planned(folder, method, **data):
    rows = str(save_rows(folder / f"{method}.jsonl", method))
    rewards = {"rewards": ["exact_match"], "max_completion_length": 16} if method == "grpo" else {}
    return tunekit.plan(
        {
            "model": "pico",
            "data": {"train": rows, "max_length": 64, **({"eval": rows} if data.get("evaluates", True) else {})},
            "method": {"type": method, **rewards},
            "train": {"max_steps": 2, "global_batch_size": 8},
        }
    )


def test_without_evaluations_the_mean_of_the_last_quarter_of_the_steps_counts_ten_at_most():
    loss = Measure("loss", greater_is_better=False)
    assert loss.value(logged(9.0, 8.0, 1.0)) == 1.0
    assert loss.value(logged(9, 9, 9, 9, 9, 9, 4, 2)) == 3.0
    assert loss.value(logged(*[9] * 90, *[7] * 30, *range(10))) == 4.5
    assert loss.value([]) is None
    assert "mean training loss over the last steps" in loss.how


def test_a_step_that_was_repeated_counts_once_and_what_is_no_number_not_at_all():
    loss = Measure("loss", greater_is_better=False)
    again = {"event": "log", "step": 3, "loss": 2.0}
    assert loss.points([*logged(9.0, "nan", 5.0), again]) == [(1, 9.0), (3, 2.0)]


def test_of_evaluations_the_last_one_counts():
    events = [{"event": "eval", "step": step, "eval_loss": loss} for step, loss in ((0, 5.0), (2, 1.0), (4, 2.0))]
    assert Measure("eval_loss", greater_is_better=False).value([*logged(0.1, 0.2), *events]) == 2.0


@pytest.mark.parametrize(
    ("method", "evaluates", "by", "name", "greater"),
    [
        ("sft", True, None, "eval_loss", False),
        ("sft", False, None, "loss", False),
        ("sft", True, "eval_mean_token_accuracy", "eval_mean_token_accuracy", True),
        ("dpo", True, None, "eval_loss", False),
        ("dpo", True, "eval_rewards/margins", "eval_rewards/margins", True),
        ("grpo", True, None, "eval_reward", True),
        ("grpo", False, None, "reward", True),
        ("grpo", False, "kl", "kl", False),
        ("grpo", False, "completions/clipped_ratio", "completions/clipped_ratio", False),
    ],
)
def test_the_loss_of_evaluations_tells_or_the_reward_or_what_is_named(tmp_path, method, evaluates, by, name, greater):
    plan = planned(tmp_path, method, evaluates=evaluates)
    assert measure_of(plan, by) == Measure(name, greater_is_better=greater)


@pytest.mark.parametrize(
    ("method", "evaluates", "by", "said"),
    [
        ("sft", True, "los", "sft runs log no such metric; did you mean 'loss'?"),
        ("sft", True, "eval_rewards/margins", "sft runs log no such metric"),
        (
            "dpo",
            False,
            "eval_rewards/margins",
            "no evaluation data; set data.eval, or pass --by rewards/margins",
        ),
    ],
)
def test_a_measure_that_runs_do_not_have_is_refused(tmp_path, method, evaluates, by, said):
    with pytest.raises(PlanError) as raised:
        measure_of(planned(tmp_path, method, evaluates=evaluates), by)
    assert str(raised.value).startswith(f"--by {by}: {said}")
