"""What the practitioners' guides of 2026 recommend, row by row, and what the planner takes.

Where it takes something else, `WHY` says why that is right. The guides' tables are of full fine-tuning in bfloat16 with
Adam where they name no adapter.
"""

import pytest

from tests.planner.golden import ROWS, known_facts, recipe
from tunekit.planner.machines import find_machine
from tunekit.planner.resolve import resolve

LLAMA = "meta-llama/Llama-3.1-8B"


def planned(model, machine, adapter="full", *, length=4096, batch=128, **sections):
    asked = recipe(adapter=adapter, data={"max_length": length}, train={"global_batch_size": batch}, **sections)
    return resolve(asked, find_machine(machine).hardware(), known_facts(model), ROWS)


AS_THE_GUIDES_SAY = {
    "fits one GPU: plain": (("meta-llama/Llama-3.2-1B", "h100"), "single device"),
    "fits one GPU, several are there: DDP": (("meta-llama/Llama-3.2-1B", "8xh100"), "DDP"),
    "LoRA: DDP": ((LLAMA, "8xh100", "lora"), "DDP"),
    "LoRA on several nodes: DDP": ((LLAMA, "4x8xh100", "lora"), "DDP"),
    "QLoRA 70B on one 80 GB card": (("meta-llama/Llama-3.1-70B", "h100", "qlora"), "single device"),
    "7B to 13B on 80 GB: FSDP2 without reshard": ((LLAMA, "8xh100"), "FSDP2, full shard, no reshard"),
    "13B on 80 GB: FSDP2": (("Qwen/Qwen2.5-14B", "8xh100"), "FSDP2, full shard, no reshard"),
    "30B to 70B on 8 x 80 GB: FSDP2 with reshard": (("Qwen/Qwen2.5-32B", "8xh100"), "FSDP2, full shard"),
    "50B and more on 8 x 80 GB: optimizer states on the CPU": (
        ("meta-llama/Llama-3.1-70B", "8xh100"),
        "ZeRO-3, optimizer on the CPU",
    ),
    "fits across 2 to 4 nodes: hybrid shard": ((LLAMA, "2x8xh100"), "FSDP2, hybrid shard of 8, no reshard"),
    "a larger one across 4 nodes": (("Qwen/Qwen2.5-32B", "4x8xh100"), "FSDP2, hybrid shard of 8"),
    "needs NVMe: DeepSpeed": (
        ("meta-llama/Llama-3.1-70B", "h100", "full"),
        "ZeRO-3, NVMe offload",
    ),
}
"""Rows of the tables, a case for each, and the layout that they ask for."""


@pytest.mark.parametrize("row", AS_THE_GUIDES_SAY)
def test_the_row_of_a_guide_is_what_is_planned(row):
    case, name = AS_THE_GUIDES_SAY[row]
    assert planned(*case).layout.name == name
