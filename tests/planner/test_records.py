"""What finished runs say of the reserve."""

import pytest

from tests.estimates.shapes import H100, LAPTOP, LLAMA_8B, T4
from tests.planner.golden import ROWS, recipe
from tunekit.estimates.throughput.speed import RunRecord, reserve_share
from tunekit.planner.resolve import resolve

GIB = 2**30


def recorded(planned, allocated, reserved, device="H100") -> RunRecord:
    return RunRecord(
        device=device,
        model_type="llama",
        adapter="lora",
        dtype="bfloat16",
        num_params=10**9,
        flops_per_token=6e9,
        tokens_per_second=1000,
        peak_memory_bytes=int(reserved * GIB),
        planned_memory_bytes=int(planned * GIB) + GIB,
        planned_tensor_bytes=int(planned * GIB),
        peak_allocated_bytes=int(allocated * GIB),
        peak_reserved_bytes=int(reserved * GIB),
    )


def test_the_reserve_is_the_median_of_the_runs_on_the_device():
    records = [recorded(10, 10, 10.5), recorded(20, 20, 21.4), recorded(10, 10, 19)]
    records += [recorded(10, 10, 13, device="T4"), recorded(10, 10, 13, device="H100 PCIe")]
    share, words = reserve_share(records, H100.device)
    assert share == pytest.approx(0.07)
    assert words == "measured in 3 runs on this device"
    assert reserve_share(records, T4.device)[1] == "measured in 1 run on this device"


def test_a_plan_reserves_what_runs_took_and_says_so():
    records = [recorded(10, 10, 10.7)]
    before, after = (resolve(recipe(), H100, LLAMA_8B, ROWS, known) for known in ((), records))
    (reason,) = (reason for reason in after.reasons if reason.topic == "reserve")
    assert (reason.choice, reason.why) == ("7% on top of the tensors", "measured in 1 run on this device")
    assert after.memory.parts["reserve"] == pytest.approx(0.07 * after.memory.tensor_bytes, rel=1e-6)
    assert not [reason for reason in before.reasons if reason.topic == "reserve"]


def test_tensors_that_were_not_planned_are_reserved_from_then_on():
    share, _ = reserve_share([recorded(10, 11, 12)], H100.device)
    assert 10 * (1 + share) == pytest.approx(12)


def test_rows_shorter_than_planned_for_are_no_reason_to_reserve_less():
    share, _ = reserve_share([recorded(40, 10, 10.5)], H100.device)
    assert share == pytest.approx(0.05)


def test_small_runs_and_runs_on_a_cpu_tell_nothing():
    on_cpu = recorded(10, 10, 11, device=LAPTOP.device.name)
    on_cpu = on_cpu.model_copy(update={"peak_allocated_bytes": None, "peak_reserved_bytes": None})
    assert reserve_share([recorded(0.1, 0.1, 0.2)], H100.device) is None
    assert reserve_share([on_cpu], LAPTOP.device) is None
    assert reserve_share([], H100.device) is None
