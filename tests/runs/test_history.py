"""Finished runs tell plans how fast the machine is."""

import json
import shutil

import pytest

import tunekit
from tests.tiny import save_chats, save_tiny_model
from tunekit.runs.record import recorded_runs
from tunekit.runs.run import Run


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder with a model, rows and one finished run."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"triple {n}", f"{3 * n}") for n in range(24)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert tunekit.plan(recipe()).speed.tokens_per_second is None
        tunekit.train(recipe())
    return folder


@pytest.fixture
def here(workspace, monkeypatch, tmp_path):
    shutil.copytree(workspace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipe(**sections):
    return {
        "model": "model",
        "data": {"train": "rows.jsonl", "max_length": 64},
        "train": {"max_steps": 3, "global_batch_size": 4},
        "output": {"sample_prompts": []},
        **sections,
    }


def test_a_record_is_what_the_run_wrote_down(here):
    (record,) = recorded_runs()
    (folder,) = (here / "runs").iterdir()
    run = Run(folder)
    result = run.result()
    assert record.device == run.plan.device.name
    assert (record.model_type, record.adapter, record.dtype) == ("llama", "lora", "float32")
    assert record.tokens_per_second == result["tokens_per_second"]
    assert record.flops_per_token == run.plan.speed.flops_per_token
    assert record.memory_share == result["peak_memory_bytes"] / result["planned_memory_bytes"]
    assert record.planned_tensor_bytes == run.plan.memory.tensor_bytes
    # torch counts what is allocated on accelerators alone, so nothing is told of the reserve.
    assert record.peak_allocated_bytes is record.peak_reserved_bytes is record.reserve_share is None
    # The device did what it measurably did: tokens trained on, in the time of the steps.
    assert record.flops_per_second == pytest.approx(
        result["num_tokens"] * record.flops_per_token / result["step_seconds"]
    )


def test_the_next_plan_predicts_what_the_run_measured_within_fifteen_percent(here):
    (record,) = recorded_runs()
    plan = tunekit.plan(recipe())
    expected = record.flops_per_second / plan.speed.flops_per_token
    assert plan.speed.tokens_per_second.low == pytest.approx(0.85 * expected)
    assert plan.speed.tokens_per_second.high == pytest.approx(1.15 * expected)
    assert plan.speed.seconds.high == pytest.approx(3 * 4 * 64 / (0.85 * expected))
    assert "measured in 1 run on this device, which used " in plan.explain()


def test_another_adapter_is_another_kind_of_run(here):
    assert tunekit.plan(recipe(adapter="full")).speed.tokens_per_second is None


def test_runs_that_cannot_be_read_tell_nothing_and_stop_nothing(here):
    (folder,) = (here / "runs").iterdir()
    (folder / "plan.yaml").write_text("strategy: elsewhere\n", encoding="utf-8")
    assert recorded_runs() == []
    assert tunekit.plan(recipe()).speed.tokens_per_second is None


def test_runs_without_a_speed_or_an_end_tell_nothing(here):
    (folder,) = (here / "runs").iterdir()
    run = Run(folder)
    run.update_status(phase="interrupted")
    assert recorded_runs() == []
    run.update_status(phase="finished")
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    kept = [json.dumps({**event, "tokens_per_second": None}) + "\n" for event in events]
    (folder / "events.jsonl").write_text("".join(kept), encoding="utf-8")
    assert recorded_runs() == []


@pytest.mark.slow
def test_the_time_of_a_run_is_told_by_part(here):
    """Rows that come slowly are waited for, outside of the steps; updates are a part of the steps."""
    (here / "slow_rows.py").write_text(
        "import time\n\n\ndef slowly(row):\n    time.sleep(0.1)\n    return row\n", encoding="utf-8"
    )
    data = {"train": "rows.jsonl", "max_length": 64, "streaming": True, "format": "slow_rows:slowly"}
    run = tunekit.train(recipe(data=data, train={"max_steps": 2, "global_batch_size": 4}))
    result = run.result()
    assert result["data_seconds"] > 4 * 0.1
    assert 0 < result["optimizer_seconds"] < result["step_seconds"]
    assert result["step_seconds"] + result["data_seconds"] < result["seconds"]
