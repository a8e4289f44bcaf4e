"""What the practitioners' guides of 2026 recommend, row by row, and what the planner takes.

Where they name no adapter, the guides mean full fine-tuning in bfloat16 with Adam. They name no lengths; here sequences
have 2,048 tokens where the row is not about their length. Where the planner takes something else, the case says why.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.planner.golden import ROWS, known_facts, recipe
from tunekit.estimates.facts import Device
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve

LLAMA_1B, LLAMA_3B = "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B"
LLAMA_8B, LLAMA_70B, LLAMA_405B = (f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B", "405B"))
QWEN_14B, QWEN_32B = "Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B"
MISTRAL_LARGE = "mistralai/Mistral-Large-Instruct-2407"


@dataclass(frozen=True)
class Row:
    """One row of a guide's table on one machine.

    Attributes:
        layout: What the planner takes.
        differs: Why that is right where the guide says something else; empty where it says the same.
    """

    model: str
    machine: str
    layout: str
    adapter: str = "full"
    length: int = 2048
    batch: int = 64
    host_gib: int | None = None
    parallel: dict[str, Any] = field(default_factory=dict)
    differs: str = ""

    def plan(self) -> Plan:
        hardware = find_machine(self.machine).hardware()
        if self.host_gib is not None:
            size = self.host_gib * 2**30
            cpu = Device(
                kind="cpu", name="host", memory_total_bytes=size, memory_free_bytes=size, native_bfloat16=False
            )
            hardware = hardware.model_copy(update={"cpu": cpu})
        asked = recipe(
            adapter=self.adapter,
            data={"max_length": self.length},
            train={"global_batch_size": self.batch},
            parallel=self.parallel,
        )
        return resolve(asked, hardware, known_facts(self.model), ROWS)


BACKEND = {
    "all of it fits one GPU: plain": Row(LLAMA_1B, "h100", "single device"),
    "all of it fits each of several: DDP": Row(LLAMA_1B, "8xh100", "DDP"),
    "LoRA: DDP": Row(LLAMA_8B, "8xh100", "DDP", "lora"),
    "LoRA, also across nodes: DDP": Row(LLAMA_8B, "4x8xh100", "DDP", "lora"),
    "does not fit one GPU, fits one node, 8B: FSDP2": Row(LLAMA_8B, "8xh100", "FSDP2, full shard, no reshard"),
    "does not fit one GPU, fits one node, 32B: FSDP2 full shard": Row(QWEN_32B, "8xh100", "FSDP2, full shard"),
    "does not fit one GPU, fits one node, 70B: FSDP2 full shard": Row(
        LLAMA_70B,
        "8xh100",
        "ZeRO-3, optimizer on the CPU",
        differs="16 bytes a parameter on 8 devices are 131 GiB each, as the same guide says one table further down",
    ),
    "70B with adapters in one node: FSDP2 full shard": Row(LLAMA_70B, "8xh100", "FSDP2, full shard", "lora"),
    "70B with adapters on 4 bits, 2 x 24 GB: FSDP with CPU offload": Row(
        LLAMA_70B, "2xrtx4090", "FSDP2, full shard, CPU offload", "qlora", batch=16
    ),
    "70B with adapters on 4 bits, 4 x 24 GB: FSDP": Row(LLAMA_70B, "4xrtx4090", "FSDP2, full shard", "qlora", batch=16),
    "70B with adapters on 4 bits, one 80 GB card: plain": Row(LLAMA_70B, "h100", "single device", "qlora", batch=16),
    "405B with adapters on 4 bits, 8 x 141 GB: FSDP": Row(LLAMA_405B, "8xh200", "FSDP2, full shard", "qlora"),
    "fits across 2 nodes: FSDP2 hybrid shard": Row(LLAMA_8B, "2x8xh100", "FSDP2, hybrid shard of 8, no reshard"),
    "fits across 4 nodes: FSDP2 hybrid shard": Row(QWEN_14B, "4x8xh100", "FSDP2, hybrid shard of 8, no reshard"),
    "needs NVMe: DeepSpeed": Row(
        LLAMA_70B, "h100", "ZeRO-3, NVMe offload", host_gib=512, parallel={"nvme_path": "/nvme"}
    ),
    "needs CPU offload of the optimizer alone: DeepSpeed": Row(LLAMA_8B, "h100", "ZeRO-2, optimizer on the CPU"),
    "long context by heads: DeepSpeed's Ulysses": Row(
        LLAMA_8B, "8xh100", "ZeRO-3, Ulysses 8", length=131072, batch=8, parallel={"sp_size": 8}
    ),
    "layer too large for one GPU: tensor parallel in the node": Row(
        LLAMA_405B, "32x8xh100", "FSDP2, full shard, tensor parallel 8", parallel={"tp_size": 8},
    ),
    "sequences of 32k and more: context parallel": Row(
        LLAMA_8B,
        "8xh100",
        "FSDP2, full shard, no reshard",
        length=32768,
        differs="with checkpointing and a head in tiles, one such sequence takes a fifth of the device",
    ),
    "sequences of 128k: context parallel": Row(
        LLAMA_8B, "8xh100", "FSDP2, full shard, context parallel 2", length=131072, batch=8
    ),
}  # fmt: skip
"""The table of situations and backends."""

SIZES = {
    "< 7B on 40 GB: DDP": Row(LLAMA_1B, "8xa100-40gb", "DDP"),
    "< 7B on 40 GB, 3B: DDP or ZeRO-1": Row(
        LLAMA_3B,
        "8xa100-40gb",
        "FSDP2, full shard, no reshard",
        differs="3.2 B parameters take 16 bytes each with float32 weights, 48 GiB; without reshard FSDP2 sends what "
        "ZeRO-1 sends, and keeps less",
    ),
    "< 7B on 80 GB: DDP": Row(LLAMA_3B, "8xh100", "DDP"),
    "7B to 13B on 80 GB: FSDP2 without reshard": Row(QWEN_14B, "8xh100", "FSDP2, full shard, no reshard"),
    "30B to 70B on 8 x 80 GB: FSDP2 with reshard": Row(QWEN_32B, "8xh100", "FSDP2, full shard"),
    "50B and more on 8 x 80 GB: optimizer states on the CPU": Row(LLAMA_70B, "8xh100", "ZeRO-3, optimizer on the CPU"),
    "70B and more on several nodes: Megatron-Core, or ZeRO-3": Row(LLAMA_70B, "4x8xh100", "FSDP2, full shard"),
    "70B on 64 H100: Megatron-Core with TP 8, PP 4, DP 2": Row(
        LLAMA_70B,
        "8x8xh100",
        "FSDP2, hybrid shard of 32",
        length=4096,
        differs="fine-tuning fits without another engine; two copies of 32 send less across than one of 64",
    ),
    "123B on 64 H100": Row(MISTRAL_LARGE, "8x8xh100", "FSDP2, full shard"),
    "405B on 32 x 80 GB with ZeRO-3": Row(LLAMA_405B, "4x8xh100", "ZeRO-3, optimizer on the CPU"),
    "405B on 16 x 141 GB with ZeRO-3": Row(LLAMA_405B, "2x8xh200", "ZeRO-3, optimizer on the CPU"),
    "405B on 256 H100: Megatron-Core with TP 8, PP 8, DP 4": Row(
        LLAMA_405B,
        "32x8xh100",
        "FSDP2, full shard",
        length=4096,
        batch=512,
        differs="it fits, bound by the network: the plan says so and prints a layout for Megatron-Core to start from",
    ),
}
"""The table of model sizes and cards, and of Megatron layouts."""


@pytest.mark.parametrize("row", [*BACKEND, *SIZES])
def test_the_row_of_a_guide_gets_its_layout(row):
    case = (BACKEND | SIZES)[row]
    plan = case.plan()
    assert plan.layout.name == case.layout
    assert plan.memory.total_bytes <= plan.memory_limit_bytes


def test_seventy_billion_with_all_states_do_not_fit_eight_cards_of_80_gb():
    """The guides' own numbers: 35 GB a GPU for weights and gradients in 16 bits, half each, 140 GB with states."""
    plan = BACKEND["does not fit one GPU, fits one node, 70B: FSDP2 full shard"].plan()
    full_shard = next(one for one in plan.rejected if one.layout.name == "FSDP2, full shard")
    assert full_shard.needed_bytes > 140e9
    assert plan.memory.parts["weights"] == pytest.approx(35e9 / 2, rel=0.02)


def test_a_speed_of_experts_says_that_it_is_told_from_dense_models():
    sparse = Row("Qwen/Qwen3-30B-A3B", "8xh100", "FSDP2, full shard").plan()
    dense = BACKEND["does not fit one GPU, fits one node, 32B: FSDP2 full shard"].plan()
    assert "of 989 TFLOP/s, as for dense models" in sparse.speed.basis
    assert "as for dense models" not in dense.speed.basis


def test_a_long_sequence_is_a_fifth_of_the_device():
    plan = BACKEND["sequences of 32k and more: context parallel"].plan()
    one = plan.memory.parts["activations"] / plan.micro_batch_size
    assert one == pytest.approx(plan.device.memory_total_bytes / 5, rel=0.25)


def test_gradients_are_summed_in_every_micro_batch_where_they_do_not_fit_undivided():
    plan = replace(SIZES["30B to 70B on 8 x 80 GB: FSDP2 with reshard"], batch=128).plan()
    assert plan.gradient_accumulation_steps > 1 and plan.layout.sync_each_batch
    (reason,) = (reason for reason in plan.reasons if reason.topic == "layout")
    assert "gradients reduced in every micro-batch: they would not fit unsharded" in reason.why
    # Undivided they take two bytes a parameter, which is more than is left.
    left = plan.memory_limit_bytes - plan.memory.total_bytes
    assert 2 * plan.num_params > left
