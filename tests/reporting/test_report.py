"""What a run of several processes reports: real groups of them, beside what can be counted without them."""

import platform
import time

import pytest
import torch
from accelerate import PartialState
from torch import distributed
from transformers.modeling_layers import GradientCheckpointingLayer

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tunekit.api.verbs import make_run
from tunekit.planner.plan import Plan
from tunekit.runs.run import Run
from tunekit.runs.small_files import place_of
from tunekit.training.callbacks import rates
from tunekit.training.timing import (
    TRACED_STEP,
    WINDOW_STEPS,
    Timing,
    Trace,
    covered_seconds,
    exposed_seconds,
    slow_ranks,
)
from tunekit.training.worker import work

MORE_BYTES = 2**27
"""What one process holds besides: many times that by which two may differ, or be alike, by chance."""

PAUSE_SECONDS = 2.0
"""By which a process comes late: what a busy machine takes besides is little of it."""

ROWS = [("say " * (1 + n % 7), f"{n}") for n in range(22)]


def brake(layer):
    """Have a layer take four times as long, and a bit more, as on a device that is too hot or shared with another."""
    began = seconds = 0.0

    def wait(*_):
        nonlocal began
        time.sleep(0.005 + 3 * seconds)
        began = time.perf_counter()

    def note(*_):
        nonlocal seconds
        seconds = time.perf_counter() - began

    layer.register_forward_pre_hook(wait)
    layer.register_forward_hook(note)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ROWS)
    return folder


def recipe_for(workspace, *, num=2, strategy="auto", **train):
    return {
        "model": str(workspace / "model"),
        "data": {"train": str(workspace / "rows.jsonl"), "max_length": 64, "shuffle": False},
        "adapter": "full",
        "train": {"global_batch_size": 4, "logging_steps": 2, **train},
        "parallel": {"num_processes": num, "strategy": strategy},
        "output": {"dir": str(workspace / f"run-{num}-{strategy}"), "sample_prompts": []},
    }


def work_on(folder):
    work(Run(folder), place=place_of())


def work_with_more_in_rank_1(folder):
    # Filled, since pages that nobody has written to are not there.
    held = b"1" * (MORE_BYTES if place_of().rank == 1 else 0)
    work_on(folder)
    del held


def work_with_rank_1_on_the_brake(folder):
    if place_of().rank != 1:
        work_on(folder)
        return
    attach = Timing.attach

    def attach_and_brake(timing, trainer, optimizer):
        attach(timing, trainer, optimizer)
        for layer in trainer.model_wrapped.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                brake(layer)

    Timing.attach = attach_and_brake
    try:
        work_on(folder)
    finally:
        Timing.attach = attach


def tokens_of(question, answer):
    """Of a row in the template of tests/tiny.py: a token for each byte, and the two marks around a turn."""
    return sum(1 + len(role) + 1 + len(text) + 1 + 1 for role, text in (("user", question), ("assistant", answer)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_tokens_of_all_ranks_are_counted_once_and_their_padding_is_not(strategy, workspace):
    run = make_run(recipe_for(workspace, strategy=strategy, max_steps=5))
    in_processes(2, work_with_more_in_rank_1, str(run.path))
    result = run.result()
    # Of five steps with four rows each; the last one is behind the last that was logged.
    assert result["num_tokens"] == sum(tokens_of(*row) for row in ROWS[:20])
    slowest = max(rank["step_seconds"] for rank in result["ranks"])
    assert result["tokens_per_second"] == pytest.approx(result["num_tokens"] / slowest)
    logged = [event for event in run.events() if event["event"] == "log"]
    assert [event["step"] for event in logged] == [2, 4]
    assert logged[1]["tokens_per_second"] == pytest.approx(
        sum(tokens_of(*row) for row in ROWS[8:16]) / logged[1]["step_seconds"]
    )
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    less, more = (rank["peak_memory_bytes"] for rank in result["ranks"])
    assert more - less == pytest.approx(MORE_BYTES, rel=0.5)
    assert result["peak_memory_bytes"] == more
    assert 0 < result["optimizer_seconds"] < result["step_seconds"]
    for rank in result["ranks"]:
        assert rank["node"] == platform.node()
        assert 0 < rank["forward_seconds"] < rank["step_seconds"]
        assert rank["communication_step"] == 3
        assert 0 < rank["communication_share"] < 1
        assert 0 < rank["communication_seconds"] < rank["step_seconds"]
        assert rank["exposed_share"] is None
    waited = [rank["wait_seconds"] for rank in result["ranks"]]
    assert sum(waited) > 0
    saved = [event["step"] for event in run.events() if event["event"] == "checkpoint"]
    assert [event["step"] for event in run.events() if event["event"] == "ranks"] == saved


@pytest.mark.slow
def test_an_epoch_that_does_not_divide_counts_every_token(workspace):
    run = make_run(recipe_for(workspace, num=2, num_epochs=1))
    in_processes(2, work_on, str(run.path))
    # The last step is filled with two empty rows, of one token each.
    assert run.result()["num_tokens"] == sum(tokens_of(*row) for row in ROWS) + 2


@pytest.mark.slow
def test_a_rank_that_keeps_the_others_waiting_is_named(workspace, tmp_path):
    recipe = recipe_for(workspace, global_batch_size=8, micro_batch_size=1, max_steps=2 * WINDOW_STEPS)
    run = make_run({**recipe, "output": {"dir": str(tmp_path / "run"), "sample_prompts": []}})
    in_processes(2, work_with_rank_1_on_the_brake, str(run.path))
    (warning,) = [event for event in run.events() if event["event"] == "warning"]
    assert (warning["rank"], warning["node"]) == (1, platform.node())
    assert f"rank 1 on {platform.node()} is slow" in warning["message"]
    fast, slow = run.result()["ranks"]
    # Both have the same steps by the clock; one of them has something to do in them.
    assert slow["step_seconds"] == pytest.approx(fast["step_seconds"], rel=0.2)
    assert slow["forward_seconds"] > 1.25 * fast["forward_seconds"]
    assert fast["wait_seconds"] > slow["wait_seconds"]


def sums_by_hand(plan):
    """Two sums at once in each of four steps, for which rank 1 comes late: what a clock and what the trace say of them.

    Returns:
        By step whether the profiler was on; of the third, seconds of the sums and of all by the clock; what was found.
    """
    distributed.init_process_group("gloo")
    rank, trace, profiled, clocked, told = distributed.get_rank(), Trace(plan), [], [], []
    for step in range(1, 5):
        trace.begin_step(PartialState(cpu=True))
        profiled.append(torch.autograd._profiler_enabled())
        entered, pause = time.perf_counter(), PAUSE_SECONDS if step == TRACED_STEP else 0.0
        time.sleep(pause * rank)
        began = time.perf_counter()
        sums = [distributed.all_reduce(torch.ones(1000), async_op=True) for _ in range(2)]
        for one in sums:
            one.wait()
        ended = time.perf_counter()
        time.sleep(pause)
        clocked.append((ended - began, time.perf_counter() - entered))
        told.append(trace.end_step(step))
    distributed.destroy_process_group()
    assert told == profiled
    return profiled, clocked[2], trace.found


@pytest.mark.slow
def test_exchanges_of_one_step_are_as_long_as_by_the_clock(workspace):
    plan = tunekit.plan(recipe_for(workspace))
    early, late = in_processes(2, sums_by_hand, plan)
    for profiled, (seconds, _), found in (early, late):
        assert profiled == [False, False, True, False]
        assert found["communication_step"] == 3
        assert found["communication_seconds"] <= seconds
    # Who waits has them on its clock for as long as it waits, once, though there are two at the same time.
    _, (seconds, step_seconds), found = early
    assert found["communication_seconds"] == pytest.approx(seconds, rel=0.1)
    assert found["communication_share"] == pytest.approx(seconds / step_seconds, rel=0.1)
    assert late[2]["communication_share"] < found["communication_share"]


def test_what_overlaps_is_counted_once_and_what_computes_meanwhile_is_not_exposed():
    second = 10**9
    exchanges = [(1 * second, 4 * second), (2 * second, 3 * second), (6 * second, 12 * second)]
    assert covered_seconds(exchanges, (0, 10 * second)) == 3 + 4
    kernels = [(0, 2 * second), (3 * second, 7 * second), (5 * second, 6 * second)]
    assert exposed_seconds(exchanges, kernels, (0, 10 * second)) == 1 + 3


def test_a_slow_rank_is_told_from_the_median_of_the_others():
    assert slow_ranks([[1.0, 1.0, 9.0], [1.2, 1.2, 1.2]]) == {}
    assert slow_ranks([[1.0, 1.0, 1.0], [1.3, 1.3, 0.1]]) == {1: (1.3, 1.0)}
    assert slow_ranks([[1.0], [2.0], [1.2], [1.1]]) == {1: (2.0, 1.1)}
    assert slow_ranks([[5.0, 1.0]]) == {}


def test_a_measured_mfu_is_the_planned_one_at_the_planned_speed(workspace):
    recipe = recipe_for(workspace, num=2, strategy="ddp", max_steps=2)
    plan = tunekit.plan({**recipe, "parallel": {}}, on="2xh100")
    assert plan.layout.num_processes == 2
    told = rates(plan, 10 * plan.speed.tokens_per_second.high, 10.0)
    assert told["mfu"] == pytest.approx(plan.speed.mfu.high)
    # 2 x 989 TFLOP/s by the sheet.
    assert told["model_flops_per_second"] == pytest.approx(plan.speed.mfu.high * 2 * 989e12, rel=0.01)


def test_without_a_peak_there_is_no_mfu(workspace):
    plan: Plan = tunekit.plan(recipe_for(workspace, num=1))
    assert rates(plan, 100, 2.0) == {"tokens_per_second": 50, "model_flops_per_second": None, "mfu": None}
