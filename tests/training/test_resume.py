"""A run in several processes that was cut off after a checkpoint goes on as if it had not been, whatever divides it."""

import os

import pytest
import torch

from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tunekit.api import verbs
from tunekit.errors import RunError
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.run import Run

SAVED, CUT, STEPS = 2, 3, 6
"""There is a checkpoint of the second step when the fourth begins, and it is cut off. An epoch has three."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, adapter="full", **parallel):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": {"max_steps": STEPS, "global_batch_size": 8, "learning_rate": 1e-3, "save_steps": SAVED},
        "parallel": parallel,
        "output": {"sample_prompts": ["hi"], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


@pytest.fixture(scope="module")
def alone(folder):
    """The run of each adapter in one process, that nothing cuts off."""
    runs = {adapter: Run(made(recipe_for(folder, adapter))) for adapter in ("full", "lora", "qlora")}
    for run in runs.values():
        worked(run.path)
    return runs


def cut_off(folder):
    """Work on a run as one of its processes, until a step begins that never ends."""
    from tunekit.training.callbacks import Watch

    begin = Watch.on_step_begin

    def end_there(self, args, state, *others, **kwargs):
        if state.global_step == CUT:
            raise ConnectionError("the power is gone")
        begin(self, args, state, *others, **kwargs)

    Watch.on_step_begin = end_there
    try:
        worked(folder)
    except ConnectionError:
        return
    raise AssertionError("it was not cut off")


def whole_and_resumed(recipe, folder):
    """Return two runs of a recipe in one process: one that nothing cuts off, and one that was cut off and resumed."""
    whole, cut = (
        Run(made({**recipe, "output": {"dir": str(folder / name), "sample_prompts": []}})) for name in ("whole", "cut")
    )
    work_in(whole.path, 1)
    in_processes(1, cut_off, cut.path)
    assert cut.state == "failed"
    work_in(cut.path, 1)
    return whole, cut


def events(run, kind):
    return [event for event in run.events() if event["event"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "num", "parallel"),
    [
        ("full", 2, {"strategy": "fsdp2"}),
        ("lora", 2, {"strategy": "fsdp2"}),
        ("qlora", 2, {"strategy": "fsdp2"}),
        ("lora", 4, {"strategy": "fsdp2", "dp_shard_size": 2}),
        ("lora", 2, {"strategy": "zero2"}),
        ("full", 2, {"strategy": "zero3"}),
    ],
    ids=["fsdp2, full", "fsdp2, lora", "fsdp2, qlora", "fsdp2, hybrid", "zero2, lora", "zero3, full"],
)
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(adapter, num, parallel, folder, alone):
    run = Run(made(recipe_for(folder, adapter, num_processes=num, **parallel)))
    in_processes(num, cut_off, run.path)
    assert run.state == "failed"
    assert newest_complete(run.path).step == SAVED
    assert [event["step"] for event in events(run, "log")] == [1, 2, 3]
    work_in(run.path, num)
    assert [event["step"] for event in events(run, "resume")] == [SAVED]
    logged = [(event["step"], event["loss"]) for event in events(run, "log")]
    assert [step for step, _ in logged] == [1, 2, 3, 3, 4, 5, 6]
    # The third step twice: once before it was cut off, and once from the checkpoint.
    losses = [event["loss"] for event in events(alone[adapter], "log")]
    wanted = [losses[step - 1] for step, _ in logged]
    torch.testing.assert_close([loss for _, loss in logged], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        saved_weights(run.model_path), saved_weights(alone[adapter].model_path), rtol=0, atol=1e-5
    )
    # What was answered before the training is not asked again in its middle.
    assert [event["when"] for event in events(run, "sample")] == ["before", "after"]


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"strategy": "fsdp2", "tp_size": 2}, "transformers cannot resume tensor parallel models"),
        ({"strategy": "zero3", "sp_size": 2}, "transformers cannot skip rows that Ulysses splits"),
    ],
    ids=["tensor parallel", "ulysses"],
)
def test_what_cannot_be_resumed_is_refused_with_the_reason(parallel, why, folder):
    run = Run(made(recipe_for(folder, num_processes=2, **parallel)))
    run.update_status(phase="failed", exit_reason="the power is gone")
    with pytest.raises(RunError, match=why) as refused:
        verbs.resume(run.path)
    assert "start over: tunekit train" in refused.value.hint
