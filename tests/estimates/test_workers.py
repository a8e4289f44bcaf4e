"""Kernels and workers: which are used and why, and that the trainer has the workers of its plan."""

from typing import NoReturn

import pytest
from datasets import Dataset

from tests.estimates.shapes import LAPTOP, LLAMA_8B
from tests.estimates.test_speed import DEVICE, FIGURES, STEP
from tests.estimates.test_step import RATE
from tests.tiny import make_tokenizer, save_tiny_model
from tunekit.estimates.facts import DataFacts, Hardware
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.throughput.speed import RunRecord
from tunekit.estimates.throughput.step import COLLATED_TOKENS_PER_SECOND, Step, num_workers, seconds_of
from tunekit.methods import sft
from tunekit.methods.arguments import Parts
from tunekit.models.load import load_model
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.probe.model import probe_model
from tunekit.recipe.schema import Recipe

ROWS = DataFacts(num_train=128)


def unused(*given: object) -> NoReturn:
    raise AssertionError("supervised fine-tuning has neither a reference nor a teacher")


def reason(plan: Plan, topic: str) -> str:
    (found,) = (one for one in plan.reasons if one.topic == topic)
    return f"{found.choice}; {found.why}"


def planned(hardware: Hardware, *, facts=LLAMA_8B, records=(), **sections) -> Plan:
    given = {"model": "m", "data": {"train": "rows.jsonl"}, **sections}
    return resolve(Recipe.model_validate(given), hardware, facts, ROWS, records)


def tiny_step(**changes) -> Step:
    """A million tokens in 0.14 s: 7.1 million a second, and half a second to collate them in one process."""
    tiny = {"flops_per_token": 1e7, "num_tokens": 10**6, "max_computed_tokens": 10**6, "num_layers": 1}
    return Step(**{**vars(STEP), "optimizer_bytes": 0.0, **tiny, **changes})


def test_there_are_as_many_workers_as_a_device_computes_faster_than_one_collates():
    assert num_workers(STEP, RATE, FIGURES) == 0  # 10,000 tokens in 0.2 s
    assert num_workers(tiny_step(), RATE, FIGURES) == 4  # 7.1 over 2 million
    assert num_workers(tiny_step(max_workers=3), RATE, FIGURES) == 3
    assert num_workers(tiny_step(max_workers=0), RATE, FIGURES) == 0


def test_workers_hide_collating_and_without_them_it_comes_on_top_at_worst():
    collated = 10**6 / COLLATED_TOKENS_PER_SECOND
    computed = 1e13 / RATE.high, 1e13 / RATE.low
    alone, helped = (seconds_of(tiny_step(max_workers=most), RATE, FIGURES) for most in (0, 4))
    assert (alone.low, alone.high) == pytest.approx((collated, computed[1] + collated))
    assert (helped.low, helped.high) == pytest.approx(computed)


def fast_tiny_model(folder, most_cores=8, **sections) -> Plan:
    """A model of two layers on a device that once did 4e12 operations a second on it: its kernels are launched in 3 ms,
    in which it computes 64 rows of 256 tokens, 5.5 million a second."""
    model = probe_model(Recipe.model_validate({"model": str(folder), "data": {"train": "rows.jsonl"}}).model)
    record = RunRecord(
        device=LAPTOP.cpu.name,
        model_type=model.model_type,
        adapter="lora",
        dtype="float32",
        num_params=model.num_params,
        flops_per_token=1e6,
        tokens_per_second=4e6,
        peak_memory_bytes=1,
        planned_memory_bytes=1,
    )
    return planned(
        LAPTOP.model_copy(update={"num_cores": most_cores}),
        facts=model,
        records=[record],
        **{
            "model": str(folder),
            "data": {"train": "rows.jsonl", "max_length": 256},
            "train": {"global_batch_size": 64, "micro_batch_size": 64, "max_steps": 1},
        }
        | sections,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_the_trainer_has_the_workers_of_its_plan(folder, tmp_path):
    plan = fast_tiny_model(folder)
    assert plan.dataloader_num_workers == plan.speed.num_workers > 0
    plan = plan.model_copy(update={"dataloader_num_workers": 2})
    model = load_model(plan.recipe.model, dtype="float32", attn_implementation="sdpa", device="cpu", quantization=None)
    row = {"input_ids": list(range(8, 24)), "labels": list(range(8, 24))}
    parts = Parts(
        train=plan.recipe.train,
        data=plan.recipe.data,
        plan=plan,
        schedule=plan.schedule,
        model=model,
        tokenizer=make_tokenizer(),
        train_dataset=Dataset.from_list([row] * 128),
        eval_dataset=None,
        checkpoints=tmp_path,
        callbacks=[],
        engine={},
        load_reference=unused,
        load_teacher=unused,
    )
    trainer = sft.build(plan.recipe.method, parts)
    loader = trainer.get_train_dataloader()
    assert (trainer.args.dataloader_num_workers, loader.num_workers) == (2, 2)
    assert len(next(iter(loader))["input_ids"]) == 64


def test_a_plan_says_why_it_has_workers(folder):
    made = "a process collates 2,000,000 tokens/s"
    plan = fast_tiny_model(folder)
    assert reason(plan, "workers").startswith(f"{plan.dataloader_num_workers} per device; {made}, a device computes")
    few = fast_tiny_model(folder, most_cores=2)
    assert few.dataloader_num_workers == 1
    assert reason(few, "workers").endswith("; no cores left for more")
    stream = {"train": "rows.jsonl", "max_length": 256, "streaming": True}
    assert fast_tiny_model(folder, data=stream).dataloader_num_workers == 0


def test_a_plan_says_why_it_has_none(folder):
    made = "none; a process collates 2,000,000 tokens/s"
    round_100 = LAPTOP.model_copy(update={"accelerators": (DEVICE,), "figures": FIGURES})
    plan = planned(round_100)
    # 8 billion parameters take 4 operations each of 70 TFLOP/s at most.
    assert reason(plan, "workers").startswith(f"{made}, a device computes at most 2,")
    assert plan.dataloader_num_workers == 0
    unknown = planned(round_100.model_copy(update={"figures": None}))
    assert reason(unknown, "workers") == f"{made}; device throughput unknown"
    assert unknown.dataloader_num_workers == 0
    grpo = planned(round_100, method="grpo")
    assert reason(grpo, "workers") == "none; only prompts are loaded; answers are generated"
    stream = planned(round_100, data={"train": "r.jsonl", "streaming": True}, train={"max_steps": 9})
    assert reason(stream, "workers") == "none; one process reads the stream, in order"


def test_a_plan_says_what_its_head_saves():
    """One row of 1,024 tokens has 1,024 x 128,256 logits of two bytes."""
    h100 = planned(find_machine("h100").hardware(), train={"micro_batch_size": 1})
    assert reason(h100, "head") == (
        "tunekit's chunked loss head; full logits would take 0.24 GiB per micro-batch; 1,024 tokens at a time "
        "with their gradients, masked tokens skipped"
    )
    answers = planned(find_machine("h100").hardware(), train={"micro_batch_size": 1}, method="grpo")
    assert "full logits would take 0.12 GiB per micro-batch" in reason(answers, "head")
    asked = planned(
        find_machine("h100").hardware(), train={"micro_batch_size": 1}, model={"path": "m", "kernels": "torch"}
    )
    kept = "reduced by Triton; tunekit's head needs tunekit's kernels, not torch's"
    assert reason(asked, "head").endswith(kept)
