"""Time and cost of a step, worked out by hand."""

import pytest

from tests.planner.shapes import LAPTOP, LLAMA_1B, LLAMA_8B
from tunekit.planner.facts import DataFacts, Device, Figures
from tunekit.planner.flops import flops_per_token
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.planner.speed import (
    Range,
    RunRecord,
    Speed,
    Step,
    duration,
    optimizer_bytes,
    speed_of,
)
from tunekit.recipe.schema import FullAdapter, Recipe


def test_an_adamw_step_reads_and_writes_forty_bytes_a_parameter():
    # Weights 8, gradients 16, and two float32 states that are read and written: 16.
    assert optimizer_bytes(1000, "adamw_torch_fused") == 40_000
    assert optimizer_bytes(1000, "sgd") == 24_000


DEVICE = Device(
    kind="cuda",
    name="Round 100",
    memory_total_bytes=2**36,
    memory_free_bytes=2**36,
    native_bfloat16=True,
)
FIGURES = Figures(flops_16bit=100e12, memory_bytes_per_second=1e12, usd_per_hour=3.6)
"""Round numbers."""

STEP = Step(
    model_type="llama",
    num_params=10**9,
    adapter="full",
    dtype="bfloat16",
    flops_per_token=1e9,
    num_tokens=10_000,
    max_computed_tokens=10_000,
    optimizer_bytes=0.5e12,
)
"""10 TFLOP and half a second of the optimizer."""


def test_time_is_operations_over_a_share_of_the_peak_and_the_optimizers_bytes():
    speed = speed_of(STEP, DEVICE, FIGURES, [], num_steps=1000)
    # 10 TFLOP at 40 to 25 TFLOP/s: 0.25 to 0.4 s, and 0.5 s of the optimizer.
    assert speed.seconds == Range(low=750, high=900)
    assert speed.tokens_per_second.low == pytest.approx(10_000 / 0.9)
    assert speed.tokens_per_second.high == pytest.approx(10_000 / 0.75)
    assert speed.cost_usd == Range(low=0.75, high=0.9)  # a tenth of a cent a second
    assert speed.words(at_most=False) == "11,100 to 13,300 tokens/s, 12 min to 15 min, 0.75 to 0.90 USD"
    assert speed.words(at_most=True) == "11,100 to 13,300 tokens/s, at most 15 min, at most 0.90 USD"
    assert speed.basis.startswith("a prediction: 25% to 40% of 100 TFLOP/s; ")


def replaced(**changes) -> Step:
    return Step(**{**vars(STEP), **changes})


def test_padding_slows_the_slow_end_only():
    speed = speed_of(replaced(max_computed_tokens=20_000), DEVICE, FIGURES, [], num_steps=1)
    assert speed.seconds == Range(low=0.75, high=0.8 + 0.5)


@pytest.mark.parametrize(
    ("step", "figures"),
    [
        (STEP, None),
        (STEP, FIGURES.model_copy(update={"flops_16bit": None})),
        (STEP, FIGURES.model_copy(update={"memory_bytes_per_second": None})),
        (replaced(dtype="float32"), FIGURES),
    ],
    ids=["no sheet", "no peak", "no bandwidth", "the peak of another type"],
)
def test_without_a_peak_there_is_no_guess(step, figures):
    speed = speed_of(step, DEVICE, figures, [], num_steps=1000)
    assert (speed.tokens_per_second, speed.seconds, speed.cost_usd) == (None, None, None)
    assert speed.words(at_most=False) == "not predicted"
    assert "Round 100 computes in a second is not known" in speed.basis


def test_what_has_no_price_has_no_cost_and_what_has_no_steps_no_time():
    assert speed_of(STEP, DEVICE, FIGURES.model_copy(update={"usd_per_hour": None}), [], num_steps=10).cost_usd is None
    endless = speed_of(STEP, DEVICE, FIGURES, [], num_steps=None)
    assert endless.tokens_per_second is not None
    assert (endless.seconds, endless.cost_usd) == (None, None)


def recorded(tokens_per_second=5000, **changes) -> RunRecord:
    """A run of twice the operations a token of STEP, on the same device."""
    fields = {
        "device": "Round 100",
        "model_type": "llama",
        "adapter": "full",
        "dtype": "bfloat16",
        "num_params": 2 * 10**9,
        "flops_per_token": 2e9,
        "tokens_per_second": tokens_per_second,
        "peak_memory_bytes": 80,
        "planned_memory_bytes": 100,
    }
    return RunRecord(**fields | changes)


def test_recorded_runs_count_more_than_the_sheet():
    slower = recorded(4000, peak_memory_bytes=75)
    speed = speed_of(STEP, DEVICE, FIGURES, [recorded(), slower], num_steps=100)
    # Runs that did 10 and 8 TFLOP a second: half the operations a token, twice the tokens.
    assert speed.tokens_per_second == Range(low=8000, high=10_000)
    assert speed.seconds == Range(low=100, high=125)
    assert speed.basis.startswith("from 2 runs on this device, which took 75% to 80% of the planned memory")
    one = speed_of(STEP, DEVICE, FIGURES, [recorded()], num_steps=100)
    assert one.words(at_most=False) == "10,000 tokens/s, 2 min, 0.10 USD"
    assert one.basis.startswith("from 1 run on this device, which took 80% of the planned memory")


@pytest.mark.parametrize(
    "other",
    [
        {"device": "Round 200"},
        {"model_type": "gpt2"},
        {"adapter": "lora"},
        {"dtype": "float32"},
        {"num_params": 3 * 10**9},
        {"num_params": 4 * 10**8},
    ],
    ids=lambda other: next(iter(other)),
)
def test_runs_of_another_kind_tell_nothing(other):
    without = speed_of(STEP, DEVICE, FIGURES, [], num_steps=100)
    assert speed_of(STEP, DEVICE, FIGURES, [recorded(**other)], num_steps=100) == without


def test_times_are_said_in_words():
    said = [duration(s) for s in (0.1234, 45, 99.6, 720, 5999, 12_000, 172_799, 450_000)]
    assert said == ["0.123 s", "45 s", "2 min", "12 min", "1 h 40 min", "3 h 20 min", "2.0 days", "5.2 days"]


ROWS_SEEN = DataFacts(num_train=1000)
ROWS_COUNTED = DataFacts(
    num_train=1000,
    tokenized=True,
    num_train_tokens=256_000,
    num_trainable_tokens=64_000,
    longest_tokens=900,
    num_rows=1000,
)


def planned(rows=ROWS_SEEN, *, data=None, **sections) -> Plan:
    recipe = {"model": "m", "data": {"train": "rows.jsonl", **(data or {})}, **sections}
    hardware = LAPTOP.model_copy(update={"accelerators": (DEVICE,), "figures": FIGURES})
    return resolve(Recipe.model_validate(recipe), hardware, LLAMA_1B, rows)


def reason(plan):
    (found,) = (reason for reason in plan.reasons if reason.topic == "speed")
    return found


def test_rows_that_are_not_tokenised_give_upper_bounds():
    seen, counted = planned(), planned(ROWS_COUNTED)
    assert ", at most " in reason(seen).choice
    assert reason(seen).why.endswith("; every row taken as 1024 tokens")
    assert "at most" not in reason(counted).choice
    assert "every row" not in reason(counted).why
    assert counted.speed.seconds.low < seen.speed.seconds.low


def test_a_plan_says_its_speed_and_keeps_it():
    plan = planned(ROWS_COUNTED)
    assert isinstance(plan.speed, Speed)
    assert Plan.from_yaml(plan.to_yaml(), plan.recipe).speed == plan.speed
    assert reason(plan).choice in plan.explain()
    steps = plan.schedule.num_steps
    # 63 steps of 16 rows of 256 tokens: the last step is counted as a whole one.
    total = steps * 16 * 256
    assert plan.speed.seconds.low == pytest.approx(total / plan.speed.tokens_per_second.high)


def test_rows_one_behind_the_other_attend_to_all_of_the_micro_batch_under_a_mask():
    alone, masked = (
        planned(ROWS_COUNTED, train={"micro_batch_size": 4}, data={"padding_free": free}).speed
        for free in (False, True)
    )
    per_token = 12 * 16 * 2048  # 12 L q
    assert masked.flops_per_token - alone.flops_per_token == per_token * (4 - 1) * 256


def test_models_that_are_not_counted_have_no_speed():
    hardware = LAPTOP.model_copy(update={"accelerators": (DEVICE,), "figures": FIGURES})
    recipe = Recipe.model_validate({"model": "m", "data": {"train": "rows.jsonl"}})
    plan = resolve(recipe, hardware, LLAMA_1B.model_copy(update={"model_type": "mamba"}), ROWS_SEEN)
    assert plan.speed is None
    assert reason(plan).choice == "not predicted"


def test_torchtitans_measured_speed_lies_in_the_range():
    """8B on an H100, 8192 tokens a row, FSDP over NVLink: 5,762 tokens/s a GPU (December 2024), 989 TFLOP/s dense."""
    h100 = Figures(flops_16bit=989e12, memory_bytes_per_second=2.4e12)
    flops = flops_per_token(
        LLAMA_8B, FullAdapter(), attended_tokens=8192, num_tokens=8192, head_share=1, gradient_checkpointing=False
    )
    step = replaced(
        flops_per_token=flops,
        num_tokens=16384,
        max_computed_tokens=16384,
        optimizer_bytes=optimizer_bytes(10**9, "sgd"),
    )
    speed = speed_of(step, DEVICE, h100, [], num_steps=None).tokens_per_second
    assert speed.low < 5762 < speed.high
