"""Which layouts are tried for which machine, in which order, and what is refused by name."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tests.estimates.shapes import GIB, LLAMA_1B, LLAMA_8B
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.facts import Origin
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.decisions.candidates import candidates
from tunekit.planner.decisions.checks import SHARDED_OPTIMS
from tunekit.planner.resolve import resolve, setting_of
from tunekit.probe.model import known_model
from tunekit.recipe.sections.adapters import LoraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import BLOCK_OPTIMS, Optim, ParallelSection


def names(machine, model=LLAMA_8B, **sections) -> list[str]:
    """The layouts to try, in their order."""
    setting = setting_of(recipe(**sections), find_machine(machine).hardware(), model)
    return [candidate.layout.name for candidate in candidates(setting)]


def test_one_device_has_nothing_to_share_but_what_it_sends_away():
    assert names("h100") == ["single device", "ZeRO-3, CPU offload"]
    assert names("h100", adapter="full") == ["single device", "ZeRO-2, optimizer on the CPU", "ZeRO-3, CPU offload"]


def test_a_node_shares_weights_before_it_sends_anything_away():
    assert names("8xh100", adapter="full") == [
        "DDP",
        "FSDP2, full shard, no reshard",
        "FSDP2, full shard",
        "FSDP2, full shard, tensor parallel 2",
        "FSDP2, full shard, tensor parallel 4",
        "FSDP2, full shard, tensor parallel 8",
        "ZeRO-2, optimizer on the CPU",
        "ZeRO-3, optimizer on the CPU",
        "FSDP2, full shard, CPU offload",
    ]


def test_nodes_share_inside_before_they_share_across():
    found = names("4x8xh100", train={"global_batch_size": 64}, adapter="full")
    assert found[:5] == [
        "DDP",
        "FSDP2, hybrid shard of 8, no reshard",
        "FSDP2, hybrid shard of 8",
        "FSDP2, hybrid shard of 16",
        "FSDP2, full shard",
    ]


def test_long_sequences_are_divided_where_each_part_keeps_a_device_busy():
    found = names("8xh100", data={"max_length": 16384}, train={"global_batch_size": 8}, adapter="full")
    assert [name for name in found if "context" in name] == [
        "FSDP2, full shard, context parallel 2",
        "FSDP2, full shard, context parallel 4",
        "FSDP2, full shard, context parallel 8",
    ]
    assert "ZeRO-3, Ulysses 8" in found


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("meta-llama/Llama-3.1-70B", "4x8xh100"),
        ("meta-llama/Llama-3.1-8B", "8xa100-40gb"),
        ("meta-llama/Llama-3.1-8B", "8xl40s"),
    ],
)
def test_a_reference_that_fsdp2_gathers_whole_is_divided_by_zero_3_before_anything_leaves_the_devices(name, machine):
    model, devices = known_model(name), find_machine(machine).hardware()
    asked = recipe(method="dpo", adapter="full", train={"global_batch_size": 32})
    plan = resolve(asked, devices, model, ROWS)
    assert plan.layout.name == "ZeRO-3"
    assert any(one.layout.strategy == "fsdp2" for one in plan.rejected)
    parallel = {"strategy": "zero3", "offload_optimizer_device": "cpu"}
    offloaded = resolve(asked.model_copy(update={"parallel": ParallelSection(**parallel)}), devices, model, ROWS)
    assert plan.speed.tokens_per_second.low > offloaded.speed.tokens_per_second.low


@pytest.mark.parametrize(
    "sections", [{"adapter": "full"}, {"method": "dpo"}, {"method": "orpo", "adapter": "full"}, {"method": "grpo"}]
)
def test_without_a_second_model_zero_3_is_not_tried_where_fsdp2_does_the_same(sections):
    assert "ZeRO-3" not in names("8xh100", **sections)


def test_a_disk_is_used_where_one_is_named():
    found = names("h100", adapter="full", parallel={"nvme_path": "/nvme"})
    assert found[-1] == "ZeRO-3, NVMe offload"
    assert "ZeRO-3, NVMe offload" not in names("h100", adapter="full")


@pytest.mark.parametrize(
    ("machine", "batch", "used"),
    [("8xh100", 64, 8), ("8xh100", 12, 6), ("8xh100", 7, 7), ("2x8xh100", 8, 8), ("4x8xh100", 48, 24), ("h100", 5, 1)],
)
def test_as_many_devices_are_used_as_get_equal_parts_of_the_batch(machine, batch, used):
    plan = resolve(recipe(train={"global_batch_size": batch}), find_machine(machine).hardware(), LLAMA_1B, ROWS)
    assert plan.layout.num_processes == used
    assert plan.micro_batch_size * plan.gradient_accumulation_steps * plan.layout.num_batches == batch
    assert plan.layout.num_processes % plan.num_nodes == 0


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({"strategy": "single"}, "single device"),
        ({"strategy": "ddp"}, "DDP"),
        ({"strategy": "fsdp2"}, "FSDP2, full shard, no reshard"),
        ({"strategy": "fsdp2", "reshard_after_forward": True}, "FSDP2, full shard"),
        ({"dp_shard_size": 4}, "FSDP2, hybrid shard of 4, no reshard"),
        ({"strategy": "zero1"}, "ZeRO-1"),
        ({"strategy": "zero2"}, "ZeRO-2"),
        ({"strategy": "zero3"}, "ZeRO-3"),
        ({"tp_size": 4}, "FSDP2, full shard, tensor parallel 4"),
        ({"cp_size": 2}, "FSDP2, full shard, context parallel 2"),
        ({"sp_size": 2}, "ZeRO-3, Ulysses 2"),
        ({"offload_param_device": "cpu"}, "FSDP2, full shard, CPU offload"),
        ({"offload_param_device": "none", "offload_optimizer_device": "cpu"}, "ZeRO-2, optimizer on the CPU"),
    ],
)
def test_a_layout_that_is_asked_for_is_taken(parallel, name):
    plan = resolve(recipe(adapter="full", parallel=parallel), find_machine("8xh100").hardware(), LLAMA_1B, ROWS)
    assert plan.layout.name == name


def test_4_bit_weights_are_not_sharded_by_a_torch_that_cannot():
    hardware, of_torch = find_machine("8xh100").hardware(), "FSDP2 of torch 2.11 does not shard 4-bit weights"
    sharded = recipe(adapter="qlora", parallel={"strategy": "fsdp2"})
    assert (
        resolve(sharded, hardware.model_copy(update={"shards_4bit": True}), LLAMA_1B, ROWS).layout.strategy == "fsdp2"
    )
    with pytest.raises(PlanError, match=of_torch):
        resolve(sharded, hardware.model_copy(update={"shards_4bit": False}), LLAMA_1B, ROWS)


REFUSED = {
    "qlora with zero3": (
        {"adapter": "qlora", "parallel": {"strategy": "zero3"}},
        "ZeRO-3: ZeRO-3 does not shard bitsandbytes 4-bit weights; use fsdp2, ddp, or adapter.type=lora",
    ),
    "qlora with dora and fsdp2": (
        {"adapter": {"type": "qlora", "use_dora": True}, "parallel": {"strategy": "fsdp2"}},
        "FSDP2, full shard, no reshard: PEFT needs unsharded 4-bit weights for DoRA; use ddp, or unset "
        "adapter.use_dora",
    ),
    "8-bit optimizer with fsdp2": (
        {"adapter": "full", "train": {"optim": "adamw_8bit"}, "parallel": {"strategy": "fsdp2"}},
        "FSDP2, full shard, no reshard: adamw_8bit does not support sharded tensors; use train.optim=adamw_torch_fused",
    ),
    "8-bit optimizer on the processor": (
        {
            "adapter": "full",
            "train": {"optim": "adamw_8bit"},
            "parallel": {"strategy": "zero2", "offload_optimizer_device": "cpu"},
        },
        "ZeRO-2, optimizer on the CPU: DeepSpeed cannot run adamw_8bit on the CPU; use train.optim=adamw_torch_fused",
    ),
    "weights in bfloat16 with DeepSpeed": (
        {"adapter": "full", "train": {"pure_bf16": True}, "parallel": {"strategy": "zero2"}},
        "ZeRO-2: DeepSpeed always updates float32 copies of the weights; use fsdp2 or ddp, or unset train.pure_bf16",
    ),
    "our optimizer with DeepSpeed": (
        {"adapter": "full", "train": {"optim": "tunekit_adamw"}, "parallel": {"strategy": "zero3"}},
        "ZeRO-3: DeepSpeed updates flat float32 copies of the weights, so tunekit_adamw has no effect; "
        "use train.optim=adamw_torch_fused",
    ),
    "8-bit states of bitsandbytes of weights in bfloat16": (
        {
            "adapter": "full",
            "train": {"pure_bf16": True, "optim": "adamw_8bit"},
            "parallel": {"strategy": "fsdp2"},
        },
        "FSDP2, full shard, no reshard: adamw_8bit does not support sharded tensors; use train.optim=tunekit_adamw",
    ),
    "weights in bfloat16 with tensor parallel": (
        {"adapter": "full", "train": {"pure_bf16": True}, "parallel": {"tp_size": 2}},
        "FSDP2, full shard, tensor parallel 2: weights in bfloat16 in tensor parallel layers: unsupported; "
        "use fsdp2 without tp_size, or unset train.pure_bf16",
    ),
    "our optimizer on the processor": (
        {"adapter": "full", "train": {"pure_bf16": True}, "parallel": {"offload_param_device": "cpu"}},
        "FSDP2, full shard, CPU offload: tunekit_adamw is an accelerator kernel: with offloading it would run on the "
        "CPU, at minutes per step; unset parallel.offload_param_device, or unset train.pure_bf16",
    ),
    "Muon in flat copies": (
        {"adapter": "full", "train": {"optim": "muon"}, "parallel": {"strategy": "zero2"}},
        "ZeRO-2: Muon updates whole matrices, but DeepSpeed shards flat copies of all weights; "
        "use fsdp2, or use train.optim=adamw_torch_fused",
    ),
    "Muon on split layers": (
        {"adapter": "full", "train": {"optim": "muon"}, "parallel": {"tp_size": 2}},
        "FSDP2, full shard, tensor parallel 2: Muon on tensor parallel layers: unsupported; "
        "use fsdp2 without tp_size, or use train.optim=adamw_torch_fused",
    ),
    "Muon on the CPU": (
        {
            "adapter": "full",
            "train": {"optim": "muon"},
            "parallel": {"strategy": "fsdp2", "offload_param_device": "cpu"},
        },
        "FSDP2, full shard, CPU offload: Muon multiplies each matrix 15 times: with offloading it would run on the "
        "CPU, at minutes per step; unset parallel.offload_param_device, or use train.optim=adamw_torch_fused",
    ),
    "Adam-mini in flat copies": (
        {"adapter": "full", "train": {"optim": "adam_mini"}, "parallel": {"strategy": "zero2"}},
        "ZeRO-2: adam_mini needs rows and heads, but DeepSpeed shards flat copies of all weights; "
        "use fsdp2, or use train.optim=adamw_torch_fused",
    ),
    "Adam-mini on split layers": (
        {"adapter": "full", "train": {"optim": "adam_mini"}, "parallel": {"tp_size": 2}},
        "FSDP2, full shard, tensor parallel 2: adam_mini on tensor parallel layers: unsupported; "
        "use fsdp2 without tp_size, or use train.optim=adamw_torch_fused",
    ),
    "GaLore in flat copies": (
        {"adapter": "full", "train": {"optim": "galore_adamw"}, "parallel": {"strategy": "zero2"}},
        "ZeRO-2: galore_adamw projects whole matrices, but DeepSpeed shards flat copies of all weights; "
        "use fsdp2, or use train.optim=adamw_torch_fused",
    ),
    "APOLLO on split layers": (
        {"adapter": "full", "train": {"optim": "apollo_adamw"}, "parallel": {"tp_size": 2}},
        "FSDP2, full shard, tensor parallel 2: apollo_adamw on tensor parallel layers: unsupported; "
        "use fsdp2 without tp_size, or use train.optim=adamw_torch_fused",
    ),
    "GaLore on the CPU": (
        {
            "adapter": "full",
            "train": {"optim": "galore_adamw"},
            "parallel": {"strategy": "fsdp2", "offload_param_device": "cpu"},
        },
        "FSDP2, full shard, CPU offload: galore_adamw projects each matrix: with offloading it would run on the CPU, "
        "at minutes per step; unset parallel.offload_param_device, or use train.optim=adamw_torch_fused",
    ),
    "averages of flat copies": (
        {
            "adapter": "full",
            "train": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
            "parallel": {"strategy": "zero2"},
        },
        "ZeRO-2: DeepSpeed updates flat float32 copies of the weights, which cannot switch to the average of "
        "schedule_free_adamw; use ddp, or train.optim=adamw_torch_fused",
    ),
    "a moving average of flat copies": (
        {"adapter": "full", "train": {"ema_decay": 0.999}, "parallel": {"strategy": "zero1"}},
        "ZeRO-1: DeepSpeed updates flat float32 copies of the weights, which cannot switch to the average; use ddp, or "
        "unset train.ema_decay",
    ),
    "averages of divided weights": (
        {
            "adapter": "full",
            "train": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"},
            "parallel": {"strategy": "fsdp2"},
        },
        "FSDP2, full shard, no reshard: schedule_free_adamw does not resume exactly from checkpoints of sharded "
        "weights; use ddp, or train.optim=adamw_torch_fused",
    ),
    "adapters with tensor parallel": (
        {"parallel": {"tp_size": 2}},
        "FSDP2, full shard, tensor parallel 2: PEFT adapters do not support tensor parallel layers; "
        "use fsdp2 without tp_size",
    ),
    "packing with context parallel": (
        {"data": {"packing": True}, "parallel": {"cp_size": 2}},
        "FSDP2, full shard, context parallel 2: context parallelism drops the mask that separates packed documents; "
        "set data.packing=false",
    ),
    "eager with context parallel": (
        {"model": {"path": "m", "attn_implementation": "eager"}, "parallel": {"cp_size": 2}},
        "FSDP2, full shard, context parallel 2: context parallelism supports sdpa, not eager; "
        "set model.attn_implementation=sdpa",
    ),
    "packing with Ulysses": (
        {"data": {"packing": True}, "parallel": {"sp_size": 2}},
        "ZeRO-3, Ulysses 2: sdpa does not separate packed documents in split sequences; "
        "use flash_attention_2, or unset packing",
    ),
    "both ways to divide a sequence": (
        {"parallel": {"sp_size": 2, "cp_size": 2}},
        "parallel.cp_size and parallel.sp_size: Accelerate accepts only one of them; unset one",
    ),
    "answers on divided sequences": (
        {"method": "grpo", "parallel": {"cp_size": 2}},
        "FSDP2, full shard, context parallel 2: grpo does not support split sequences; "
        "use fsdp2 without cp_size and sp_size",
    ),
    "pairs on divided sequences": (
        {"method": "dpo", "parallel": {"sp_size": 2}},
        "ZeRO-3, Ulysses 2: dpo does not support split sequences; use fsdp2 without cp_size and sp_size",
    ),
    "a disk without a path": (
        {"parallel": {"offload_param_device": "nvme"}},
        "parallel.offload_param_device: nvme needs parallel.nvme_path; set it to a folder on a fast local disk",
    ),
    "heads that do not divide": (
        {"adapter": "full", "parallel": {"tp_size": 3}},
        "parallel.tp_size: 3 does not divide the 32 heads and 8 key-value heads of llama-3.1-8b",
    ),
    "more shards than devices": (
        {"parallel": {"dp_shard_size": 16}},
        "parallel.dp_shard_size=16: no layout for 8 x H100 SXM 80 GB with a global batch size of 16; unset some of "
        "them",
    ),
    "ddp with shards": (
        {"parallel": {"strategy": "ddp", "dp_shard_size": 8}},
        "parallel.strategy=ddp, parallel.dp_shard_size=8: no layout for 8 x H100 SXM 80 GB with a global batch size "
        "of 16; unset some of them",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_correctly_is_refused_by_name(name):
    sections, message = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        resolve(recipe(**sections), find_machine("8xh100").hardware(), LLAMA_8B, ROWS)
    assert str(caught.value) == message


ADAPTER = Origin(
    folder="adapter", base=ModelSection(path="base"), adapter=LoraAdapter(modules_to_save=["lm_head"]), start="base",
    runs=(),
)  # fmt: skip
BEFOREHAND = {"type": "dpo", "precompute_ref_log_probs": True}
UNMERGED = {
    "answers to come": (
        {"method": {"type": "grpo", "beta": 0.1}, "parallel": {"strategy": "fsdp2"}},
        "shards the reference of grpo",
    ),
    "log-probabilities": ({"method": BEFOREHAND, "parallel": {"strategy": "fsdp2"}}, "to precompute log-probabilities"),
    "divided layers": ({"parallel": {"tp_size": 2}}, "cannot be merged into tensor parallel layers"),
    "whole modules": ({"adapter": "lora", "parallel": {"strategy": "zero3"}}, "ZeRO-3 shards lm_head"),
}


@pytest.mark.parametrize("name", UNMERGED)
def test_an_adapter_that_could_not_be_loaded_into_the_model_or_its_reference_is_refused(name):
    sections, message = UNMERGED[name]
    sections = {"adapter": "full", **sections}
    machine = find_machine("8xh100").hardware()
    resolve(recipe(**sections), machine, LLAMA_1B, ROWS)
    with pytest.raises(PlanError, match=message):
        resolve(recipe(**sections), machine, LLAMA_1B.model_copy(update={"origin": ADAPTER}), ROWS)


def test_an_adapter_that_trained_an_embedding_which_the_head_shares_is_not_merged():
    trained = LoraAdapter(modules_to_save=["embed_tokens"])
    origin = ADAPTER.model_copy(update={"adapter": trained})
    machine = find_machine("8xh100").hardware()
    resolve(recipe(adapter="full"), machine, LLAMA_8B.model_copy(update={"origin": origin}), ROWS)
    with pytest.raises(PlanError, match="so merging it would change the head"):
        resolve(recipe(adapter="full"), machine, LLAMA_1B.model_copy(update={"origin": origin}), ROWS)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            {"optim_args": {"rank": 4096}},
            "train.optim_args.rank: 4096 is at least the smaller side of all matrices; "
            "set it below 4096, or use train.optim=adamw_torch_fused",
        ),
        (
            {"optim_target_modules": ["self_attn", "fc1"]},
            "train.optim_target_modules[1]: no trained matrix of llama-3.1-8b matches 'fc1'; "
            "remove it, or train the parameters that it matches",
        ),
    ],
)
def test_a_low_rank_that_no_matrix_has_is_refused(train, message):
    asked = recipe(adapter="full", train={"optim": "galore_adamw", **train})
    with pytest.raises(PlanError) as caught:
        resolve(asked, find_machine("h100").hardware(), LLAMA_8B, ROWS)
    assert str(caught.value) == message


def test_a_low_rank_is_refused_where_no_matrix_is_trained():
    asked = recipe(adapter={"type": "full", "unfrozen_parameters": ["norm"]}, train={"optim": "apollo_adamw"})
    with pytest.raises(PlanError) as caught:
        resolve(asked, find_machine("h100").hardware(), LLAMA_8B, ROWS)
    assert str(caught.value) == (
        "train.optim: apollo_adamw projects matrices, but none is trained; use train.optim=adamw_torch_fused"
    )


def test_a_plan_says_what_states_of_a_low_rank_save_and_counts_what_is_gathered():
    asked = recipe(adapter="full", train={"optim": "galore_adamw"}, parallel={"strategy": "fsdp2"})
    plan = resolve(asked, find_machine("8xh100").hardware(), LLAMA_8B, ROWS)
    (reason,) = [reason for reason in plan.reasons if reason.topic == "optimizer states"]
    # Bytes as worked out in `tests/estimates/test_states.py`.
    assert reason.choice == "9.99 GiB instead of 59.8 GiB"
    assert reason.why.startswith("rank 128 for 6.98 B parameters in matrices, AdamW for the other 1.05 B; ")


def test_an_optimizer_whose_package_is_missing_is_refused_with_the_command():
    hardware = find_machine("h100").hardware().model_copy(update={"schedulefree": False})
    asked = recipe(train={"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"})
    with pytest.raises(PlanError) as caught:
        resolve(asked, hardware, LLAMA_8B, ROWS)
    assert str(caught.value) == "train.optim: schedulefree is not installed; pip install 'tunekit[optim]'"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1"])
def test_what_needs_several_devices_is_refused_on_one(strategy):
    with pytest.raises(PlanError, match=rf"parallel\.strategy: {strategy} needs several accelerators; this is H100"):
        resolve(recipe(parallel={"strategy": strategy}), find_machine("h100").hardware(), LLAMA_1B, ROWS)


def test_what_a_library_cannot_run_stays_in_the_plan_with_its_reason():
    hardware = find_machine("8xrtx4090").hardware()
    asked = recipe(adapter="full", train={"optim": "paged_adamw_8bit"}, data={"max_length": 512})
    with pytest.raises(PlanError, match="FSDP2, full shard: paged_adamw_8bit does not support sharded tensors"):
        resolve(asked, hardware, LLAMA_8B, ROWS)


def test_main_memory_that_is_known_is_counted():
    hardware = find_machine("h100").hardware()
    asked = recipe(adapter="full", data={"max_length": 512})
    assert "host memory of this machine unknown" in resolve(asked, hardware, LLAMA_8B, ROWS).explain()
    assert "advice: adapter.type=lora: " in resolve(asked, hardware, LLAMA_8B, ROWS).explain()
    cpu = hardware.device.model_copy(update={"kind": "cpu", "name": "CPU", "memory_free_bytes": 32 * GIB})
    with pytest.raises(PlanError, match=r"of host memory per node, limit 28.8 GiB"):
        resolve(asked, hardware.model_copy(update={"cpu": cpu}), LLAMA_8B, ROWS)


@pytest.mark.slow
def test_sharded_weights_are_updated_by_the_optimizers_that_are_said_to():
    """Each optimizer that runs on a CPU, in two real processes, on weights that FSDP2 has divided.

    `schedule_free_adamw` steps on them too: it is refused for what a sharded checkpoint would not restore. 8-bit states
    of parts are rounded by other random numbers than those of the whole, and small parts have no 4-bit states
    (`tests/kernels/test_adamw_sharded.py`).
    """
    others = {*BLOCK_OPTIMS, "schedule_free_adamw"}
    on_cpu = [name for name in get_args(Optim) if not name.startswith("paged_") and name not in others]
    program = Path(__file__).parents[1] / "estimates" / "sharded_optimizers.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(program)]
    done = subprocess.run(
        [*command, *on_cpu], capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert {
        line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")
    } == SHARDED_OPTIMS - BLOCK_OPTIMS.keys()


@pytest.mark.parametrize(("batch", "micro", "used"), [(16, 4, 4), (48, 3, 8), (40, 5, 8), (24, 8, 3)])
def test_forced_micro_batches_come_out_even_on_all_devices(batch, micro, used):
    asked = recipe(train={"global_batch_size": batch, "micro_batch_size": micro})
    plan = resolve(asked, find_machine("8xh100").hardware(), LLAMA_1B, ROWS)
    assert (plan.layout.num_processes, plan.micro_batch_size) == (used, micro)
    assert micro * plan.gradient_accumulation_steps * used == batch


def test_a_forced_micro_batch_that_does_not_divide_the_batch_is_refused_on_many_devices():
    asked = recipe(train={"global_batch_size": 16, "micro_batch_size": 3})
    with pytest.raises(PlanError, match=r"train\.micro_batch_size: 3 does not divide train\.global_batch_size 16"):
        resolve(asked, find_machine("8xh100").hardware(), LLAMA_1B, ROWS)
