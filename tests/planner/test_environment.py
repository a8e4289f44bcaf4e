"""What processes find in their environment, and how long they wait for each other."""

import pytest

from tests.estimates.shapes import LAPTOP, LLAMA_1B, LLAMA_8B
from tests.planner.golden import ROWS, recipe
from tunekit.estimates.facts import Hardware
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.decisions.environment import patience_of, timeout_of
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve
from tunekit.probe.hardware import with_nodes

OF_A_CPU = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}

JUDGE = {"type": "judge", "base_url": "http://x/v1", "model": "m", "instruction": "Be strict."}


def why(plan: Plan, topic: str) -> str:
    """The words of a plan about a topic."""
    return next(f"{reason.choice}; {reason.why}" for reason in plan.reasons if reason.topic == topic)


def laptop(**facts) -> Hardware:
    return LAPTOP.model_copy(update={"num_cores": 8, **facts})


def test_processes_share_the_cores_of_a_machine():
    asked = recipe(parallel={"num_processes": 2}, adapter="qlora")
    assert resolve(asked, laptop(), LLAMA_1B, ROWS).environment == {"OMP_NUM_THREADS": "4", **OF_A_CPU}


def test_one_process_has_the_threads_that_torch_takes():
    assert resolve(recipe(), laptop(), LLAMA_1B, ROWS).environment == OF_A_CPU


def test_the_allocator_of_cuda_has_segments_that_grow_and_that_of_rocm_has_not():
    nvidia, amd = (find_machine(name).hardware() for name in ("h100", "mi300x"))
    assert resolve(recipe(), nvidia, LLAMA_1B, ROWS).environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "PYTORCH_ALLOC_CONF" not in resolve(recipe(), amd, LLAMA_1B, ROWS).environment


def test_what_the_user_has_set_is_kept_and_said():
    theirs = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}
    hardware = find_machine("h100").hardware().model_copy(update={"environment": theirs})
    plan = resolve(recipe(), hardware, LLAMA_1B, ROWS)
    assert plan.environment == theirs
    assert "PYTORCH_ALLOC_CONF from the current environment" in why(plan, "environment")


def test_the_one_thread_that_torchrun_sets_is_nobodys_wish():
    started = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    node = laptop(environment={"OMP_NUM_THREADS": "1"})
    assert with_nodes(node, started).environment == {}
    assert with_nodes(node, {}).environment == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("wait_bytes", "seconds"),
    [(0, 600), (200 * 10**9, 600), (201 * 10**9, 660), (810 * 10**9, 2460)],
    ids=["nothing", "just so", "a minute more", "405B in 16 bits"],
)
def test_a_process_waits_three_times_as_long_as_another_may_read_or_write(wait_bytes, seconds):
    """3 x 810 GB at 1 GB/s are 2,430 s, in whole minutes 41."""
    assert timeout_of(wait_bytes) == seconds


def test_a_forced_timeout_holds_in_steps_and_not_while_a_model_is_read():
    plan = resolve(recipe(parallel={"timeout_seconds": 30}), laptop(), LLAMA_1B, ROWS)
    assert (plan.timeout_seconds, plan.patience_seconds, plan.exchange_timeout_seconds) == (30, 600, 660)
    assert why(plan, "timeout").startswith(
        "30 s without progress in a step, 10 min while loading or saving; set by parallel."
    )
    longer = resolve(recipe(parallel={"timeout_seconds": 7200}), laptop(), LLAMA_1B, ROWS)
    assert (longer.timeout_seconds, longer.patience_seconds) == (7200, 7200)


def test_patience_is_for_the_slowest_of_what_nobody_sees():
    """1M rows at 200 a second are 5,000 s; 64 answers, 8 at once, five tries of 60 s each, 2,400 s."""
    sft, grpo = recipe().method, recipe(method={"type": "grpo", "rewards": [JUDGE]}).method
    assert patience_of(0, 1_000_000, sft, 64) == 5040
    assert patience_of(0, 0, grpo, 64) == 2400
    assert patience_of(810 * 10**9, 1000, grpo, 64) == 2460


def test_the_wait_is_for_a_checkpoint_where_all_is_trained_and_for_the_weights_where_little_is():
    machine = find_machine("8xh100").hardware()
    full, lora = (resolve(recipe(adapter=kind), machine, LLAMA_8B, ROWS) for kind in ("full", "lora"))
    assert f"read or write {12 * LLAMA_8B.num_params / 2**30:,.1f} GiB" in why(full, "timeout")
    assert f"read or write {2 * LLAMA_8B.num_params / 2**30:,.1f} GiB" in why(lora, "timeout")
