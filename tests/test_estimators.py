"""Public estimators get a step as it is, and their answers become errors of the traced peak."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import estimators
from benchmarks.estimator_tools import ATTENTION, Answer, Question, answer, fitcheck
from benchmarks.estimators import Case, ask, case, rows_of, summaries
from tests.estimates import grid, grid_shards
from tunekit.estimates.layout import Layout

TINYLLAMA = 1_100_048_384
"""Parameters, as on its page on the hub."""
HEAD = 32_000 * 2048


@pytest.fixture(scope="module")
def full() -> Case:
    """TinyLlama in full fine-tuning on one device."""
    step = next(
        step for step in grid.STEPS if str(step) == "llama       22x2048 V32k       full        bf16 2x2048 even"
    )
    return case("one", str(step), step, Layout(), 10**9)


def _sharded(question: Question, *, reshards: bool) -> Question:
    return replace(question, strategy="fsdp2", num_shards=8, reshards=reshards)


def test_a_question_has_the_parameters_of_the_real_modules(full):
    assert full.question.num_parameters == full.question.num_trained == TINYLLAMA
    assert (full.question.batch, full.question.length, full.question.checkpointing) == (2, 2048, False)
    assert (full.question.precision, full.question.weights) == ("bfloat16", "float32")
    assert full.state_bytes == 16 * TINYLLAMA


def test_a_question_of_an_adapter_on_several_devices():
    sharded = next(step for step in grid_shards.STEPS if "lora64 qkvo" in str(step))
    question = case("many", str(sharded), sharded.step, sharded.layout, 1).question
    assert (question.method, question.rank, question.targets) == ("lora", 64, ATTENTION)
    assert question.num_shards == sharded.layout.dp_shard_size
    assert 0 < question.num_trained < question.num_parameters / 10


def test_accelerate_counts_the_model_without_its_head_four_times_in_float32(full):
    size = answer(estimators.accelerate_float32_rule, full.question).tensor_bytes
    # Rotary frequencies are counted too: some bytes.
    assert size == pytest.approx(4 * 4 * (TINYLLAMA - HEAD), rel=1e-6)


def test_accelerate_counts_it_twice_under_autocast(full):
    size = answer(estimators.accelerate_rule, full.question).tensor_bytes
    assert size == pytest.approx(2 * 4 * (TINYLLAMA - HEAD), rel=1e-6)


def test_deepspeed_counts_20_bytes_of_a_parameter_on_one_device(full):
    pytest.importorskip("deepspeed")
    assert answer(estimators.zero2_rule, full.question) == Answer(20 * TINYLLAMA, 20 * TINYLLAMA)
    assert answer(estimators.zero3_rule, full.question).reason == "one device"


def test_deepspeed_divides_what_a_stage_divides(full):
    pytest.importorskip("deepspeed")
    kept, resharded = (_sharded(full.question, reshards=reshards) for reshards in (False, True))
    assert answer(estimators.zero2_rule, kept).tensor_bytes == 2 * TINYLLAMA + 18 * TINYLLAMA // 8
    # Its largest layer is the embedding, gathered in 16 bits with its gradient.
    assert answer(estimators.zero3_rule, resharded).tensor_bytes == 4 * HEAD + 18 * TINYLLAMA // 8
    assert answer(estimators.zero2_rule, resharded).reason == "FSDP2"


def test_a_step_that_a_tool_cannot_be_told_has_a_reason(full):
    lora = replace(full.question, method="lora", rank=8)
    assert answer(estimators.accelerate_rule, lora).reason == "LoRA"
    assert answer(fitcheck, replace(lora, trains_tables=True)).reason == "trained embeddings beside LoRA"
    assert answer(fitcheck, _sharded(lora, reshards=True)).reason == "FSDP2"


def test_questions_and_answers_pass_between_processes(full):
    lora = replace(full.question, method="lora", rank=8, targets=ATTENTION)
    assert ask(Path(sys.executable), "gpu-estimator", [lora]) == [Answer(reason="LoRA")]


def test_a_summary_is_of_the_steps_that_were_answered(full):
    steps = [full, replace(full, kind="many"), replace(full, kind="many"), replace(full, kind="many")]
    answers = [Answer(reason="LoRA"), Answer(1_050_000_000), Answer(700_000_000), Answer(1_200_000_000)]
    one, many = summaries(rows_of("a tool", steps, answers))
    assert (one["num_steps"], one["num_answered"], one["median_error"]) == (1, 0, None)
    assert one["not_answered"] == {"LoRA": 1}
    assert many["median_error"] == pytest.approx(0.2)
    assert many["worst_error"] == pytest.approx(-0.3)
    assert many["share_within_10_percent"] == pytest.approx(1 / 3)
