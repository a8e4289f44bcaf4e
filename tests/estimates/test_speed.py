"""Time and cost of a step, worked out by hand."""

import pytest

from tests.estimates.shapes import LAPTOP, LLAMA_1B
from tunekit.estimates.facts import DataFacts, Device, Figures
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.states import optimizer_bytes_per_param
from tunekit.estimates.throughput.speed import RunRecord, Speed, duration, optimizer_bytes, speed_of
from tunekit.estimates.throughput.step import Step, Transfer
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe


def test_an_adamw_step_reads_and_writes_forty_bytes_a_parameter():
    # Weights 8, gradients 16, and two float32 states that are read and written: 16.
    assert optimizer_bytes(1000, optimizer_bytes_per_param("adamw_torch_fused")) == 40_000
    assert optimizer_bytes(1000, optimizer_bytes_per_param("sgd")) == 24_000


DEVICE = Device(
    kind="cuda",
    name="Round 100",
    memory_total_bytes=2**36,
    memory_free_bytes=2**36,
    native_bfloat16=True,
)
FIGURES = Figures(flops_16bit=100e12, memory_bytes_per_second=1e12, usd_per_hour=3.6)
"""Round numbers: products at 80 % of the peak, and 0.72 to 1.4 times of that, but not beyond the peak."""
SLOWEST = 14 / 57.6
"""Seconds of STEP's operations at 57.6 % of the peak; 0.14 at the peak itself."""

STEP = Step(
    model_type="llama",
    num_params=10**9,
    num_layers=10,
    adapter="full",
    dtype="bfloat16",
    layout=Layout(),
    num_nodes=1,
    flops_per_token=1.4e9,
    model_flops_per_token=1e9,
    num_tokens=10_000,
    max_computed_tokens=10_000,
    num_micro_batches=1,
    num_trained=10**9,
    optimizer_bytes=0.5e12,
    checkpoint_bytes=12e9,
)
"""14 TFLOP and half a second of the optimizer."""


def test_time_is_operations_over_a_share_of_the_peak_and_the_optimizers_bytes():
    speed = speed_of(STEP, DEVICE, FIGURES, [], num_steps=1000)
    # 14 TFLOP at 100 to 57.6 TFLOP/s: 0.14 to 0.243 s, and 0.5 s of the optimizer; 10,000 tokens are collated in 5 ms.
    assert speed.seconds.low == pytest.approx(640)
    assert speed.seconds.high == pytest.approx(1000 * (SLOWEST + 0.505))
    assert speed.tokens_per_second.low == pytest.approx(10_000 / (SLOWEST + 0.505))
    assert speed.tokens_per_second.high == pytest.approx(10_000 / 0.64)
    assert speed.words(at_most=False) == "13,400 to 15,600 tokens/s, 11 min to 12 min, 0.64 to 0.75 USD"
    assert speed.words(at_most=True) == "13,400 to 15,600 tokens/s, at most 12 min, at most 0.75 USD"
    assert speed.basis.startswith("estimate: 58% to 100% of 100 TFLOP/s; ")


def test_a_price_is_for_all_devices_and_for_a_million_tokens():
    speed = speed_of(STEP, DEVICE, FIGURES, [], num_steps=1000)
    # A tenth of a cent a second; a million tokens are 100 steps.
    assert speed.cost_usd.low == pytest.approx(0.64)
    assert speed.usd_per_million_tokens.high == pytest.approx((SLOWEST + 0.505) / 10)
    two = replaced(layout=Layout(strategy="ddp", dp_replicate_size=2))
    # Half the operations each, the optimizer's bytes as before.
    both = speed_of(two, DEVICE, FIGURES, [], num_steps=1000)
    assert both.seconds.low == pytest.approx(570)
    assert both.cost_usd.low == pytest.approx(1.14)


def test_the_share_of_the_peak_leaves_recomputation_out():
    speed = speed_of(STEP, DEVICE, FIGURES, [], num_steps=1)
    # 10,000 tokens x 1 GFLOP, of 100 TFLOP/s.
    assert speed.mfu.low == pytest.approx(10 / (SLOWEST + 0.505) / 100)
    assert speed.mfu.high == pytest.approx(10 / 0.64 / 100)


def test_long_runs_on_many_devices_pay_for_failures_too():
    many = replaced(layout=Layout(strategy="ddp", dp_replicate_size=512), num_nodes=64)
    speed = speed_of(many, DEVICE, FIGURES, [], num_steps=1_000_000)
    alone = speed_of(STEP, DEVICE, FIGURES, [], num_steps=1_000_000)
    assert alone.goodput is None
    steps_alone = 1_000_000 * many.num_tokens / speed.tokens_per_second.high
    assert speed.seconds.low == pytest.approx(steps_alone / speed.goodput.share)
    assert speed.cost_usd.low == pytest.approx(speed.seconds.low * 512 * 0.001)
    assert speed.basis.endswith("with checkpoints and failures")
    asked = speed_of(many, DEVICE, FIGURES, [], num_steps=1_000_000, save_steps=100_000)
    assert asked.goodput.save_steps == 100_000
    assert asked.seconds.low > speed.seconds.low


def replaced(**changes) -> Step:
    return Step(**{**vars(STEP), **changes})


def test_padding_slows_the_slow_end_only():
    speed = speed_of(replaced(max_computed_tokens=20_000), DEVICE, FIGURES, [], num_steps=1)
    assert speed.seconds.low == pytest.approx(0.64)
    assert speed.seconds.high == pytest.approx(2 * SLOWEST + 0.5 + 0.01)


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
    assert (speed.tokens_per_second, speed.seconds, speed.cost_usd, speed.mfu) == (None, None, None, None)
    assert speed.words(at_most=False) == "throughput unknown"
    assert "throughput on Round 100 unknown" in speed.basis


def test_without_a_link_there_is_no_guess_but_a_run_spread_like_it_tells():
    sent = Transfer("gradients", 1e9, "devices", "compute", num_in_node=2, num_devices=2)
    two = replaced(layout=Layout(strategy="ddp", dp_replicate_size=2), transfers=(sent,))
    unknown = speed_of(two, DEVICE, FIGURES, [recorded()], num_steps=1000)
    assert unknown.tokens_per_second is None
    assert unknown.basis == (
        "bandwidth between the devices of a node unknown; throughput unknown until a run has finished with this layout"
    )
    told = speed_of(two, DEVICE, FIGURES, [recorded(), recorded(6000, layout=two.layout)], num_steps=1000)
    # 6,000 tokens of 2.8 GFLOP were 8.4 TFLOP/s each; 14 TFLOP of two devices take as long as 7 of one.
    assert told.tokens_per_second.low == pytest.approx(0.85 * 12_000)
    assert told.tokens_per_second.high == pytest.approx(1.15 * 12_000)
    assert told.basis.startswith("measured in 1 run on 2 of Round 100")


def test_runs_that_were_spread_otherwise_tell_nothing():
    """A run over as many devices waits for other exchanges in another engine, and over other links in more nodes."""
    sent = Transfer("gradients", 1e9, "devices", "compute", num_in_node=2, num_devices=2)
    two = replaced(layout=Layout(strategy="ddp", dp_replicate_size=2), transfers=(sent,))
    others = [
        recorded(layout=Layout(strategy="fsdp2", dp_shard_size=2)),
        recorded(layout=two.layout, num_nodes=2),
        recorded(layout=Layout(strategy="zero2", offload_optimizer_device="cpu")),
    ]
    assert speed_of(two, DEVICE, FIGURES, others, num_steps=1000).tokens_per_second is None
    alone = speed_of(STEP, DEVICE, FIGURES, others, num_steps=1000)
    assert "estimate: " in alone.basis


def test_a_process_with_a_whole_processor_tells_nothing_of_those_that_share_it():
    processor = DEVICE.model_copy(update={"kind": "cpu"})
    two = replaced(layout=Layout(strategy="ddp", dp_replicate_size=2))
    assert speed_of(two, processor, None, [recorded()], num_steps=1000).tokens_per_second is None
    assert speed_of(STEP, processor, None, [recorded()], num_steps=1000).tokens_per_second is not None


def test_a_plan_keeps_what_a_measured_mfu_needs():
    """The same definition: operations of the model, none of them twice, over the peak of all devices."""
    two = replaced(layout=Layout(strategy="ddp", dp_replicate_size=2))
    speed = speed_of(two, DEVICE, FIGURES, [recorded(layout=two.layout)], num_steps=1000)
    achieved = speed.tokens_per_second.low * speed.model_flops_per_token
    assert speed.mfu.low == pytest.approx(achieved / (2 * speed.peak_flops_per_second))
    assert speed.peak_flops_per_second == FIGURES.flops_16bit


def test_what_has_no_price_has_no_cost_and_what_has_no_steps_no_time():
    free = speed_of(STEP, DEVICE, FIGURES.model_copy(update={"usd_per_hour": None}), [], num_steps=10)
    assert (free.cost_usd, free.usd_per_million_tokens) == (None, None)
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
        "flops_per_token": 2.8e9,
        "tokens_per_second": tokens_per_second,
        "peak_memory_bytes": 80,
        "planned_memory_bytes": 100,
    }
    return RunRecord(**fields | changes)


def test_recorded_runs_count_more_than_the_sheet():
    one = speed_of(STEP, DEVICE, FIGURES, [recorded()], num_steps=100)
    # A run that did 14 TFLOP a second: half the operations a token, twice the tokens, and 15 % around them.
    assert (one.tokens_per_second.low, one.tokens_per_second.high) == pytest.approx((8500, 11_500))
    assert (one.seconds.low, one.seconds.high) == pytest.approx((100 / 1.15, 100 / 0.85))
    assert one.words(at_most=False) == "8,500 to 11,500 tokens/s, 87 s to 2 min, 0.09 to 0.12 USD"
    assert one.basis.startswith("measured in 1 run on this device, which used 80% of the planned memory")
    slower = recorded(2000, peak_memory_bytes=75)
    two = speed_of(STEP, DEVICE, FIGURES, [recorded(), slower], num_steps=100)
    # 4,000 and 10,000 tokens/s are further apart than that.
    assert (two.tokens_per_second.low, two.tokens_per_second.high) == pytest.approx((4000, 10_000))
    assert two.basis.startswith("measured in 2 runs on this device, which used 75% to 80% of the planned memory")


def test_a_recorded_run_is_compared_with_what_the_sheet_let_expect_of_it():
    # Both steps are products alone, which the sheet has at 80 TFLOP/s: the recorded one was expected at half of that.
    record = recorded(sheet_flops_per_second=40e12, micro_batch_tokens=20_000)
    told = speed_of(STEP, DEVICE, FIGURES, [record], num_steps=None).tokens_per_second
    assert (told.low, told.high) == pytest.approx((17_000, 23_000))


def test_a_run_with_another_micro_batch_tells_less():
    record = recorded(micro_batch_tokens=30_000)
    told = speed_of(STEP, DEVICE, FIGURES, [record], num_steps=None).tokens_per_second
    assert (told.low, told.high) == pytest.approx((7200, 14_000))
    near = recorded(6000, micro_batch_tokens=20_000)
    told = speed_of(STEP, DEVICE, FIGURES, [record, near], num_steps=None).tokens_per_second
    assert (told.low, told.high) == pytest.approx((0.85 * 12_000, 1.15 * 12_000))


@pytest.mark.parametrize(
    "other",
    [
        {"device": "Round 200"},
        {"method": "dpo"},
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
    assert reason(seen).why.endswith("; every row counted as 1024 tokens")
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


def test_a_plan_for_many_devices_says_what_they_send_and_costs_as_many():
    one, eight = (
        resolve(
            Recipe.model_validate(
                {"model": "m", "data": {"train": "rows.jsonl"}, "train": {"global_batch_size": 128}, **sections}
            ),
            find_machine(on).hardware(),
            LLAMA_1B,
            ROWS_COUNTED,
        )
        for on, sections in (("h100", {}), ("8xh100", {"parallel": {"strategy": "fsdp2"}}))
    )
    assert eight.speed.num_devices == eight.layout.num_processes == 8
    assert one.speed.communication is None
    assert "between the devices of a node" in eight.speed.communication
    price = 8 * 3.99 / 3600
    assert eight.speed.cost_usd.high == pytest.approx(eight.speed.seconds.high * price)
    assert eight.speed.usd_per_million_tokens.low == pytest.approx(1e6 / eight.speed.tokens_per_second.high * price)
    # Nobody is eight times as fast on eight, but much faster.
    assert 2 < eight.speed.tokens_per_second.high / one.speed.tokens_per_second.high <= 8


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
    assert reason(plan).choice == "throughput unknown"
