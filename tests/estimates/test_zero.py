"""What a plan says of DeepSpeed, and what it refuses of it."""

import math

import pytest

from tests.estimates.shapes import GIB, LLAMA_1B, LLAMA_8B
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Hardware
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.sharding import zero_kept
from tunekit.planner.resolve import resolve
from tunekit.recipe.sections.adapters import FullAdapter

LAPTOP = Hardware(
    cpu=Device(
        kind="cpu", name="CPU", memory_total_bytes=256 * GIB, memory_free_bytes=256 * GIB, native_bfloat16=False
    ),
    deepspeed=True,
)
WITHOUT = LAPTOP.model_copy(update={"deepspeed": False})


def planned(machine=LAPTOP, **sections):
    return resolve(recipe(**sections), machine, LLAMA_1B, ROWS)


def test_the_engine_is_told_the_sizes_that_the_estimate_counts():
    from tunekit.training.engines import deepspeed

    square = LLAMA_1B.hidden_size**2
    plan = planned(adapter="full", parallel={"num_processes": 2, "strategy": "zero3"})
    config = deepspeed.config(plan)
    assert config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": square,
        "stage3_prefetch_bucket_size": int(0.9 * square),
        "stage3_param_persistence_threshold": 10 * LLAMA_1B.hidden_size,
        "sub_group_size": 10**9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert plan.environment["DS_ACCELERATOR"] == "cpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_deepspeed_keeps_its_part_of_a_float32_copy_of_weights_of_any_type(stage, dtype):
    # arXiv 1910.02054, section 5.1; that weights in float32 are copied too was seen in DeepSpeed 0.19.
    num_params = sum(math.prod(shape) for shape in LLAMA_1B.tensors.values())
    layout = Layout(strategy=stage, dp_shard_size=4)
    kept = zero_kept(LLAMA_1B, FullAdapter(), dtype, layout, optimizer_bytes=8, devices_per_node=4)
    assert kept.masters == 4 * (num_params // 4) and kept.optimizer == 8 * (num_params // 4)


def test_other_engines_are_told_nothing_of_deepspeed():
    plan = planned(parallel={"num_processes": 2})
    assert plan.zero_buckets is None and plan.pad_to_multiple_of is None
    assert "DS_ACCELERATOR" not in plan.environment


def test_deepspeed_that_is_not_installed_is_refused_with_how_to_install_it():
    with pytest.raises(PlanError, match=r"DeepSpeed is not installed.*pip install 'tunekit\[deepspeed\]'"):
        planned(WITHOUT, parallel={"num_processes": 2, "strategy": "zero2"})


def test_deepspeed_that_is_not_installed_is_not_chosen():
    sections = recipe(adapter="full")
    machine = find_machine("h100").hardware()
    assert machine.deepspeed is None
    assert resolve(sections, machine, LLAMA_8B, ROWS).layout.name == "ZeRO-2, optimizer on the CPU"
    with pytest.raises(PlanError, match="ZeRO-2, optimizer on the CPU: DeepSpeed is not installed"):
        resolve(sections, machine.model_copy(update={"deepspeed": False}), LLAMA_8B, ROWS)


def test_offloaded_states_are_updated_by_the_recipes_own_optimizer():
    layout = {"num_processes": 2, "strategy": "zero3", "offload_param_device": "cpu", "offload_optimizer_device": "cpu"}
    plan = planned(adapter="full", parallel=layout)
    assert plan.layout.name == "ZeRO-3, CPU offload"
    assert any(reason.choice == "updated by adamw_torch_fused on the CPU" for reason in plan.reasons)


@pytest.mark.parametrize("num_processes", [2, 4])
def test_sequences_are_divided_on_a_processor_where_they_are_of_one_length(num_processes):
    batch = {"global_batch_size": 8, "micro_batch_size": 2}
    plan = planned(train=batch, parallel={"num_processes": num_processes, "sp_size": 2})
    assert plan.layout.name == "ZeRO-3, Ulysses 2"
    assert plan.pad_to_multiple_of == plan.recipe.data.max_length


def test_each_device_that_divides_sequences_brings_a_micro_batch_to_a_step():
    plan = planned(train={"global_batch_size": 12}, parallel={"num_processes": 2, "sp_size": 2})
    assert plan.micro_batch_size == 6 and plan.gradient_accumulation_steps == 2
    whole = {"global_batch_size": 8, "micro_batch_size": 8}
    with pytest.raises(PlanError, match="each of the 2 devices contributes its own micro-batch") as error:
        planned(train=whole, parallel={"num_processes": 2, "sp_size": 2})
    assert "train.global_batch_size to a multiple of 16" in str(error.value)
