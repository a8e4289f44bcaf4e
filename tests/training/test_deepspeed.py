"""DeepSpeed in real processes: equal to one process, what the plan says, and a model that anyone can load."""

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made, work_in, worked

LEARNED = [(f"double {n}" * (1 + n % 3), f"{2 * n}") for n in range(26)]
"""Rows of unlike lengths, so that a mean of means would be another loss."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zero")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", LEARNED[:20])
    save_chats(folder / "eval.jsonl", LEARNED[20:])
    return folder


def recipe(folder: Path, name: str, adapter: str, *, dtype="auto", train=None, **parallel):
    return {
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": {"max_steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-3}
        | {"max_grad_norm": 0.5, "gradient_checkpointing": True, "save_steps": 3}
        | (train or {}),
        "parallel": parallel,
        "output": {"dir": str(folder / name), "sample_prompts": ["double 3"]},
    }


def outcome(run: Path):
    """Losses, those of the evaluations, what was answered, what ran, the saved weights, and norms of gradients."""
    from tunekit.runs.run import Run

    events = Run(run).events()
    of = {kind: [event for event in events if event["event"] == kind] for kind in ("log", "eval", "sample", "engine")}
    weights = {}
    for file in sorted((run / "model").glob("*.safetensors")):
        weights |= load_file(file)
    losses = [event["loss"] for event in of["log"]], [event["eval_loss"] for event in of["eval"]]
    norms = [event["grad_norm"] for event in of["log"]]
    return *losses, [event["answer"] for event in of["sample"]], of["engine"][0], weights, norms


@pytest.fixture(scope="module")
def alone(folder):
    """The same in one process."""
    known = {}

    def run(adapter: str, **changes):
        key = adapter, str(changes)
        if key not in known:
            path = made(recipe(folder, f"alone-{len(known)}", adapter, **changes))
            worked(path)
            known[key] = outcome(path)
        return known[key]

    return run


def near(found, wanted, tolerance):
    assert len(found) == len(wanted) > 0
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True)) < tolerance


def check_equal(found, wanted, tolerance=1e-5):
    losses, evals, answers, _, weights, norms = found
    assert near(losses, wanted[0], tolerance) and near(evals, wanted[1], tolerance)
    assert answers == wanted[2]
    # Clipped gradients are alike whatever they were multiplied with before.
    assert norms == pytest.approx(wanted[5], rel=1e-4)
    assert weights.keys() == wanted[4].keys()
    for name, weight in weights.items():
        assert weight.dtype == wanted[4][name].dtype
        assert (weight - wanted[4][name]).abs().max() < tolerance, name


def check_held(folder, run, adapter, layout, num_trained):
    """Compare what a process of two holds with what stands in the paper: 4 bytes a float32 number."""
    from tunekit.runs.run import Run

    base = sum(weight.numel() for weight in load_file(folder / "model" / "model.safetensors").values())
    held = Run(run).result()["held_bytes"]
    # Two moments of half of what is trained, and a count of the steps, one more of norms, which are not decayed.
    assert held["optimizer"] == 4 * num_trained + (2 if adapter == "full" else 1) * 4
    # A copy to be updated, though what is computed with is in float32 too.
    assert held["masters"] == 4 * num_trained // 2
    if layout["strategy"] == "zero3":
        assert held["gradients"] == 4 * num_trained // 2
    else:
        assert "gradients" not in held and held["weights"] == 4 * base
    if layout["strategy"] == "zero3" and adapter == "full":
        # Five norms of 48 stay whole besides.
        assert held["weights"] == 4 * base // 2 + 4 * 5 * 48
    if layout["strategy"] == "zero2" and adapter == "lora":
        assert held["adapters"] == 4 * num_trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "layout"),
    [
        ("full", {"strategy": "zero3"}),
        ("lora", {"strategy": "zero2"}),
        ("full", {"strategy": "zero2", "offload_optimizer_device": "cpu"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_two_processes_are_equal_to_one_whatever_is_divided_or_offloaded(folder, alone, adapter, layout):
    run = made(recipe(folder, f"{adapter}-{'-'.join(layout.values())}", adapter, num_processes=2, **layout))
    work_in(run, 2)
    found = outcome(run)
    check_equal(found, alone(adapter))
    engine = found[3]
    assert engine["engine"] == layout["strategy"] and engine["mesh"] == {"dp_shard": 2}
    assert engine["optimizer"] == "AdamW"
    assert engine["local_share"] == pytest.approx(0.5, abs=0.01)
    check_held(folder, run, adapter, layout, sum(weight.numel() for weight in found[4].values()))


@pytest.mark.slow
def test_two_pairs_of_processes_that_divide_sequences_are_equal_to_one(folder, alone):
    run = made(recipe(folder, "ulysses", "full", num_processes=4, sp_size=2))
    work_in(run, 4)
    found = outcome(run)
    check_equal(found, alone("full"))
    assert found[3]["mesh"] == {"dp_shard": 2, "sp": 2}
    assert not list((run / "checkpoints").glob("checkpoint-*"))


@pytest.mark.slow
def test_a_single_process_can_have_its_states_elsewhere(folder, alone):
    from tunekit.estimates.memory.sharding import ZeroBuckets

    buckets = ZeroBuckets(reduced=2304, prefetched=2073, persistent=480).model_dump()
    layout = {"strategy": "zero2", "offload_optimizer_device": "cpu"}
    run = made(recipe(folder, "offload-alone", "full"), layout, zero_buckets=buckets)
    work_in(run, 1)
    found = outcome(run)
    check_equal(found, alone("full"))
    assert found[3]["offload_optimizer_device"] == "cpu"


@pytest.mark.slow
def test_deepspeed_that_is_skipped_without_a_word_is_noticed(folder):
    # Accelerate runs DDP instead (accelerate 1.15, `PartialState`).
    run = made(recipe(folder, "skipped", "full", num_processes=2, strategy="zero2"))
    with pytest.raises(AssertionError, match="engine: zero2 planned, ddp found"):
        in_processes(2, worked_on_a_processor, run)


def worked_on_a_processor(folder):
    os.environ["ACCELERATE_USE_CPU"] = "true"
    worked(folder)


@pytest.mark.slow
def test_weights_in_16_bits_are_updated_in_float32(folder, alone):
    run = made(recipe(folder, "bf16", "lora", dtype="bfloat16", num_processes=2, strategy="zero3"))
    work_in(run, 2)
    found = outcome(run)
    assert near(found[0], alone("lora")[0], 2e-2)
    assert found[3]["trained_dtype"] == "float32" and found[3]["compute_dtype"] == "bfloat16"
    assert {str(weight.dtype) for weight in found[4].values()} == {"torch.float32"}
    # Had they been saved as they are computed with, they would not change.
    assert any((weight != weight.bfloat16().float()).any() for weight in found[4].values())
