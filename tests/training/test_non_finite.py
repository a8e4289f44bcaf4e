"""Losses and gradients that are not numbers, and memory that runs out: in real runs, where it is made to happen."""

import math
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made
from tests.training.faulty import Fault, Forked, faulty, worked_faulty
from tunekit.api import verbs
from tunekit.errors import MemoryShortError, PlanError, RecipeError, RunError
from tunekit.launching.local import launch, supervise
from tunekit.planner.plan import Plan
from tunekit.recipe.load import load_recipe
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.record import EARLIER_PLAN
from tunekit.runs.run import Run
from tunekit.training.non_finite import left_out
from tunekit.training.worker import work

STEPS = 6
"""An epoch has three."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"{n} twice", f"{2 * n}" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, name, *, data=None, parallel=None, **train):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, **(data or {})},
        "adapter": "full",
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "learning_rate": 1e-3,
            "save_steps": 2,
            **train,
        },
        "parallel": parallel or {},
        "output": {"sample_prompts": ["hi"], "dir": str(folder / name)},
    }


def weights(run):
    return load_file(run.model_path / "model.safetensors")


def of_kind(run, kind):
    return [event for event in run.events() if event["event"] == kind]


def numbers_in(texts):
    """The questions of the rows: `12 twice`."""
    return sorted(int(number) for text in texts for number in re.findall(r"(\d+) twice", text))


def numbers_at(words):
    """The same as the file has them at the places that are named: the first row stands in line 1."""
    return sorted(int(line) - 1 for line in re.findall(r"rows\.jsonl:(\d+) ", " ".join(words)))


@pytest.fixture(scope="module")
def calm(folder):
    """A run in which nothing goes wrong."""
    run = Run(made(recipe_for(folder, "calm")))
    work(run)
    return run


@pytest.fixture(scope="module")
def skipping(folder):
    """A run that leaves its second and fifth step out, with what it computed."""
    run = Run(made(recipe_for(folder, "skipping", non_finite="skip")))
    with faulty(Fault("gradient", 2), Fault("loss", 5, micro_batch=3)) as seen:
        work(run)
    return run, seen


def assert_left_out(seen, *, steps=STEPS):
    """Weights and states of a process are the same after the second and the fifth step, and after no other one."""
    digests = {one["step"]: one["digest"] for one in seen if one["digest"]}
    same = {step for step in range(1, steps) if digests[step + 1] == digests[step]}
    assert same == {2, 5}


def test_a_step_that_is_left_out_changes_nothing_and_the_schedule_counts_it(calm, skipping):
    run, seen = skipping
    # The first step's rate is zero, but its states are not.
    assert_left_out(seen)
    logged, usual = ({event["step"]: event for event in of_kind(one, "log")} for one in (run, calm))
    assert sorted(logged) == [1, 3, 4, 6]
    assert all(math.isfinite(event["loss"]) and math.isfinite(event["grad_norm"]) for event in logged.values())
    assert {step: event["learning_rate"] for step, event in logged.items()} == {
        step: usual[step]["learning_rate"] for step in logged
    }
    assert logged[6]["num_tokens"] == usual[6]["num_tokens"]
    assert run.state == "finished"


def test_a_step_that_is_left_out_is_told_with_its_rows(skipping):
    run, seen = skipping
    second, fifth = of_kind(run, "warning")
    assert (second["left_out"], fifth["left_out"]) == (2, 5)
    assert second["message"].startswith("step 2: the gradient norm is not finite, but the loss is, for ")
    assert fifth["message"].startswith("step 5: the loss is nan, for ")
    num_rows = len(second["rows"])
    head, *rows, last = second["message"].splitlines()
    assert num_rows > 1 and head.endswith(f", for {num_rows} rows:") and last.startswith("step skipped (1 of ")
    assert rows == [f"  {row}" for row in second["rows"]]
    # Any row of a step may be why gradients are not finite; of a loss, those of its micro-batch.
    step = [text for one in seen if one["step"] == 2 for text in one["texts"]]
    assert numbers_at(second["rows"]) == numbers_in(step)
    last = [one for one in seen if one["step"] == 5][-1]
    assert numbers_at(fifth["rows"]) == numbers_in(last["texts"])
    assert left_out(run.path) == {2, 5}


@pytest.mark.slow
def test_a_run_that_goes_on_leaves_the_same_steps_out(folder, skipping):
    run = Run(made(recipe_for(folder, "cut", non_finite="skip")))
    faults = Fault("gradient", 2), Fault("loss", 5, micro_batch=3), Fault("crash", 6)
    with faulty(*faults), pytest.raises(RuntimeError, match="it fails here"):
        work(run)
    assert newest_complete(run.path).step == 4
    with faulty() as seen:
        work(run)
    assert [one["step"] for one in seen] == [5] * 4 + [6] * 2
    calm = weights(skipping[0])
    assert all(torch.equal(calm[name], found) for name, found in weights(run).items())


@pytest.mark.slow
def test_losses_over_several_steps_are_means_of_those_that_were_taken(folder, skipping):
    run = Run(made(recipe_for(folder, "sparse", non_finite="skip", logging_steps=3)))
    with faulty(Fault("gradient", 2), Fault("loss", 5, micro_batch=3)):
        work(run)
    each = {event["step"]: event["loss"] for event in of_kind(skipping[0], "log")}
    means = {event["step"]: event["loss"] for event in of_kind(run, "log")}
    assert means == pytest.approx({3: (each[1] + each[3]) / 2, 6: (each[4] + each[6]) / 2}, rel=1e-6)


def test_a_run_ends_after_so_many_steps_that_are_left_out(folder):
    run = Run(made(recipe_for(folder, "often", non_finite="skip", max_non_finite=2)))
    with faulty(*(Fault("loss", step) for step in (1, 3, 4))), pytest.raises(RunError) as caught:
        work(run)
    assert caught.value.problem.startswith("step 4: the loss is nan, for ")
    assert caught.value.problem.endswith("2 such steps were skipped before")


TWO = {"num_processes": 2, "strategy": "ddp"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_all_processes_leave_a_step_out_that_one_of_them_sees(engine, folder, calm):
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    run = Run(made(recipe_for(folder, engine, parallel={**TWO, "strategy": engine}, non_finite="skip")))
    faults = Fault("gradient", 2, rank=1), Fault("loss", 5, rank=1, micro_batch=1)
    told = in_processes(2, worked_faulty, run.path, *faults)
    assert [error for error, _ in told] == [None, None]
    for _, seen in told:
        assert_left_out(seen)
    second, fifth = (event["rows"] for event in of_kind(run, "warning"))
    assert numbers_at(second) == numbers_in(
        text for _, seen in told for one in seen if one["step"] == 2 for text in one["texts"]
    )
    assert numbers_at(fifth) == numbers_in([one for one in told[1][1] if one["step"] == 5][1]["texts"])
    rates = ({event["step"]: event["learning_rate"] for event in of_kind(one, "log")} for one in (run, calm))
    ours, usual = rates
    assert ours == {step: usual[step] for step in (1, 3, 4, 6)}


@pytest.mark.slow
def test_a_loss_of_one_process_ends_all_before_the_step_and_the_checkpoint_is_good(folder):
    run = Run(made(recipe_for(folder, "stopped", parallel=TWO, logging_steps=100)))
    told = in_processes(2, worked_faulty, run.path, Fault("loss", 5, rank=1))
    (first, _), (second, seen) = told
    assert first == second and first.startswith("step 5: the loss is nan on rank 1, for ")
    # The second epoch, in which rows have another order.
    assert numbers_at([first]) == numbers_in(next(one for one in seen if one["step"] == 5)["texts"])
    newest = newest_complete(run.path)
    assert newest.step == 4
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(newest.path / "model.safetensors").values())
    # Rows are named as well where a run goes on within an epoch.
    told = in_processes(2, worked_faulty, run.path, Fault("loss", 6, rank=0))
    assert [one["step"] for one in told[0][1]] == [5, 5, 6]
    assert told[0][0].startswith("step 6: the loss is nan on rank 0, for ")
    assert numbers_at([told[1][0]]) == numbers_in(told[0][1][-1]["texts"])


@pytest.mark.slow
def test_a_run_rolls_back_and_leaves_the_step_out_when_it_comes_again(folder, skipping):
    run = Run(made(recipe_for(folder, "rolled", non_finite="rollback")))
    faults = Fault("gradient", 2), Fault("loss", 5, micro_batch=3)
    supervise(run, lambda: Forked(run.path, 1, faults), None)
    assert [(event["attempt"], event["step"]) for event in of_kind(run, "restart")] == [(1, 0), (2, 4)]
    assert "step 5: the loss is nan" in of_kind(run, "restart")[1]["reason"]
    calm = weights(skipping[0])
    assert all(torch.equal(calm[name], found) for name, found in weights(run).items())


@pytest.mark.slow
def test_rows_of_a_pack_are_all_named(folder):
    run = Run(made(recipe_for(folder, "packed", data={"packing": True, "max_length": 128}, micro_batch_size=1)))
    with faulty(Fault("loss", 2)) as seen, pytest.raises(RunError) as caught:
        work(run)
    texts = next(one for one in seen if one["step"] == 2)["texts"]
    assert len(texts) > 1
    assert numbers_at([caught.value.problem]) == numbers_in(texts)


def test_rows_of_a_stream_are_known_by_what_they_say(folder):
    run = Run(made(recipe_for(folder, "stream", data={"streaming": True})))
    with faulty(Fault("loss", 2)) as seen, pytest.raises(RunError) as caught:
        work(run)
    texts = next(one for one in seen if one["step"] == 2)["texts"]
    assert numbers_in([caught.value.problem]) == numbers_in(texts)


def out_of_memory(folder, name, num, *faults, **parallel):
    run = Run(made(recipe_for(folder, name, parallel=parallel, retry_out_of_memory=True)))
    supervise(run, lambda: Forked(run.path, num, faults), None)
    return run


def test_where_memory_runs_out_in_one_process_all_go_on_with_half_the_micro_batch(folder, calm):
    run = out_of_memory(folder, "short", 2, Fault("memory", 4, rank=1), **TWO)
    (restart,) = of_kind(run, "restart")
    assert restart["step"] == 2 and "is out of memory" in restart["reason"]
    assert restart["reason"].endswith("retrying with micro-batches of 1 x 4 x 2 and the same global batch")
    earlier = Plan.from_yaml((run.path / EARLIER_PLAN).read_text(), run.recipe)
    assert (earlier.micro_batch_size, earlier.gradient_accumulation_steps) == (2, 2)
    assert (run.plan.micro_batch_size, run.plan.gradient_accumulation_steps) == (1, 4)
    assert run.plan.memory.total_bytes <= earlier.memory.total_bytes
    assert run.state == "finished"
    # The same batches: only sums are rounded otherwise.
    before = weights(calm)
    assert all(torch.allclose(before[name], found, atol=2e-4) for name, found in weights(run).items())


@pytest.mark.slow
def test_memory_that_runs_out_again_ends_the_run(folder):
    recipe = recipe_for(folder, "shorter", retry_out_of_memory=True, micro_batch_size=8)
    run = Run(made(recipe))
    with pytest.raises(MemoryShortError, match="is out of memory"):
        supervise(run, lambda: Forked(run.path, 1, (Fault("memory", 1),)), None)
    assert run.plan.micro_batch_size == 4 and len(of_kind(run, "restart")) == 1
    assert run.state == "failed"


@pytest.mark.slow
def test_a_run_of_one_process_that_may_go_back_is_watched_by_another(folder, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "from tests.training.faulty import Fault, faulty\nheld = faulty(Fault('memory', 3))\nheld.__enter__()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run = Run(made(recipe_for(folder, "alone", retry_out_of_memory=True)))
    launch(run)
    assert run.state == "finished" and run.plan.micro_batch_size == 1
    assert len(of_kind(run, "restart")) == 1


def test_what_cannot_be_halved_is_refused(folder):
    with pytest.raises(RecipeError, match="a micro-batch of 1 cannot be halved"):
        load_recipe(recipe_for(folder, "none", retry_out_of_memory=True, micro_batch_size=1))


@pytest.mark.parametrize("asked", [{"non_finite": "rollback"}, {"retry_out_of_memory": True}])
def test_processes_of_a_launcher_cannot_go_back(asked, folder, monkeypatch):
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(PlanError, match="can restart its processes"):
        verbs.make_run(recipe_for(folder, "none", **asked))
