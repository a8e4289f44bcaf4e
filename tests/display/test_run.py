"""What is told of a run as it goes: by method, and no more than fits."""

import io
import json

import pytest
from rich.console import Console

from tunekit.api import verbs
from tunekit.display.console import Progress, summary
from tunekit.runs.run import Run

LOGGED = {"event": "log", "step": 1, "loss": -1e-9, "learning_rate": 1e-5, "tokens_per_second": 123456.0}
GRPO = {
    "reward": 0.5,
    "reward_std": 0.2,
    "completions/mean_length": 1234.5,
    "completions/clipped_ratio": 0.25,
    "frac_reward_zero_std": 0.125,
    "kl": 0.0123,
    "entropy": 1.5,
}
DPO = {"rewards/accuracies": 0.75, "rewards/margins": 0.5, "entropy": 1.5}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("method", "row", "values", "begins", "of_training"),
    [
        ("grpo", {"prompt": "a"}, GRPO, "reward 0.500  tokens 1234.5  truncated 25%", "  no signal 12%"),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, DPO, "loss 0.0000  accuracy 75%  margin 0.500", ""),
    ],
)
def test_a_step_is_told_in_a_line_that_fits(tmp_path, method, row, values, begins, of_training, width):
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 64)
    recipe = {"model": "pico", "data": {"train": str(tmp_path / "rows.jsonl")}, "method": method}
    plan = verbs.plan({**recipe, "train": {"max_steps": 3}, "output": {"dir": str(tmp_path / "run")}})
    written = io.StringIO()
    progress = Progress(Console(file=written, width=width))
    progress({"event": "plan", "run": Run.create(plan), "plan": plan, "notes": []})
    written.truncate(0)
    progress({**LOGGED, **values})
    progress(
        {"event": "eval", "step": 1, "eval_loss": -1e-9, **{f"eval_{name}": value for name, value in values.items()}}
    )
    log, held_out = written.getvalue().strip("\x00\n").splitlines()
    assert log.startswith(f"step 1/3  {begins}{of_training}")
    assert held_out.startswith(f"step 1/3  eval {begins}") and "no signal" not in held_out
    assert max(len(log), len(held_out)) <= width
    assert width == 80 or "tokens/s" in log


@pytest.mark.parametrize(("measures", "first"), [({}, "loss"), ({"reward": [0.25, 0.75]}, "reward")])
def test_the_summary_of_a_rewarded_run_begins_with_its_reward_and_not_with_a_loss_near_zero(tmp_path, measures, first):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 64)
    data, output = {"train": str(tmp_path / "rows.jsonl")}, {"dir": str(tmp_path / "run")}
    run = Run.create(verbs.plan({"model": "pico", "data": data, "method": "grpo", "output": output}))
    result = {
        "first_loss": 1e-9,
        "last_loss": -1e-9,
        "eval_loss": None,
        "measures": measures,
        "tokens_per_second": None,
        "peak_memory_bytes": 1,
        "planned_memory_bytes": 1,
        "model": "model",
    }
    written = io.StringIO()
    Console(file=written, width=80).print(summary(result, run))
    labels = [line.split()[0] for line in written.getvalue().splitlines() if line]
    assert labels == [first, "peak", "model"]


def test_the_summary_of_processes_that_had_no_step_left_shows_no_waiting(tmp_path):
    """A run that ends after its last checkpoint, and is resumed."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 64)
    data, output = {"train": str(tmp_path / "rows.jsonl")}, {"dir": str(tmp_path / "run")}
    run = Run.create(verbs.plan({"model": "pico", "data": data, "output": output}))
    rank = {"step_seconds": 0.0, "wait_seconds": 0.0, "peak_memory_bytes": 1}
    result = {
        "first_loss": None,
        "eval_loss": None,
        "tokens_per_second": None,
        "ranks": [rank, rank],
        "peak_memory_bytes": 1,
        "planned_memory_bytes": 1,
        "model": "model",
    }
    written = io.StringIO()
    Console(file=written, width=80).print(summary(result, run))
    assert [line.split()[0] for line in written.getvalue().splitlines() if line] == ["peak", "model"]
