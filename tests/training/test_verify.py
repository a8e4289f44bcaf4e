"""Set-ups that run something else than what was planned and say nothing: each is provoked here, and found at once."""

import os

import pytest

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made, work_in, worked
from tunekit.errors import PlanError, RunError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n}") for n in range(16)))
    return folder


def recipe_for(folder, adapter="full", **parallel):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": {"max_steps": 1, "global_batch_size": 4},
        "parallel": parallel,
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


def faulty(folder, fault):
    """Work on a run with a fault, and return what it was found to be."""
    fault()
    with pytest.raises(RunError) as found:
        worked(folder)
    return found.value.problem


def tell_accelerate_nothing():
    """Leave out what Accelerate has to be told for FSDP2 on a CPU."""
    from accelerate import PartialState

    from tunekit.training.engines import fsdp2

    fsdp2.let_accelerate_shard_on_a_cpu = lambda: PartialState(cpu=True)


def leave_the_cpu_out():
    """Do not tell the trainer that it computes on a CPU."""
    import trl

    config = trl.SFTConfig
    trl.SFTConfig = lambda **args: config(**{**args, "use_cpu": False})


def forget_the_others():
    """Be started as if there were no other processes."""
    from tunekit.training.engines import engine

    del os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]
    engine.join = lambda plan, place: None


def look_with(change):
    """Change something of the trainer just before it is looked at."""
    from tunekit.training import callbacks

    verify = callbacks.verify

    def changed(trainer, plan):
        change(trainer)
        return verify(trainer, plan)

    callbacks.verify = changed


def convert_a_layer():
    """Put another weight into a layer when the optimizer has the first one already, as conversions to fp8 do."""
    from torch import nn

    def convert(trainer):
        layer = trainer.model.model.layers[1].mlp.up_proj
        layer.weight = nn.Parameter(layer.weight.detach().clone())

    look_with(convert)


def keep_weights_after_the_forward_pass():
    look_with(lambda trainer: trainer.model.set_reshard_after_forward(False))


def train_in_16_bits():
    """Leave the trained parameters in the type in which TRL puts them."""
    from torch import bfloat16

    look_with(lambda trainer: trainer.model.to(bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "strategy", "found"),
    [
        (tell_accelerate_nothing, "fsdp2", "engine: fsdp2 planned, ddp found"),
        (leave_the_cpu_out, "ddp", "processes of the trainer: 2 planned, 1 found"),
        (forget_the_others, "ddp", "processes of the group: 2 planned, 1 found"),
        (keep_weights_after_the_forward_pass, "fsdp2", "reshard_after_forward: True planned, False found"),
    ],
)
def test_another_engine_than_the_planned_one_is_found_in_every_process(fault, strategy, found, folder):
    reshards = {"reshard_after_forward": True} if strategy == "fsdp2" else {}
    run = made(recipe_for(folder, strategy=strategy, num_processes=2, **reshards))
    assert in_processes(2, faulty, run, fault) == [found, found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (convert_a_layer, "not updated by the optimizer: model.layers.1.mlp.up_proj.weight"),
        (train_in_16_bits, "trained_dtype: float32 planned, bfloat16 found"),
    ],
)
def test_weights_that_would_not_be_trained_as_planned_are_found(fault, found, folder):
    assert in_processes(1, faulty, made(recipe_for(folder)), fault) == [found]


def test_float16_on_a_cpu_is_refused_and_found_if_it_is_not(folder):
    """Accelerate computes in float32 then, and says nothing."""
    recipe = recipe_for(folder)
    with pytest.raises(PlanError, match="float16 does not run on a CPU"):
        tunekit.plan({**recipe, "model": {"path": recipe["model"], "dtype": "float16"}})
    run = made(recipe, dtype="float16", autocast=True)
    with pytest.raises(RunError, match="compute_dtype: float16 planned, float32 found"):
        worked(run)


@pytest.mark.slow
def test_a_run_says_what_runs(folder):
    from tunekit.runs.run import Run

    run = made(recipe_for(folder, "lora", strategy="ddp", num_processes=2))
    work_in(run, 2)
    (engine,) = [event for event in Run(run).events() if event["event"] == "engine"]
    del engine["event"], engine["time"]
    assert engine == {
        "num_processes": 2,
        "device": "cpu",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "sync_each_batch": False,
        "engine": "ddp",
        "mesh": {"dp_replicate": 2},
        "trained_dtype": "float32",
        "compute_dtype": "float32",
        "reduce_dtype": "float32",
        "local_share": 1.0,
    }
