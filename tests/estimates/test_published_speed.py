"""Published speeds, and whether the predicted range covers them.

Tokens a second of one device, as measured by others. None was measured by tunekit, and most come from other code than
tunekit's: they say whether a prediction is of the right size. Rows that it misses stay here, with the reason.
"""

import math
from dataclasses import dataclass, field

import pytest

from tests.estimates.shapes import LLAMA_8B, llama_facts
from tests.estimates.test_architectures import facts_of
from tunekit.estimates.facts import DataFacts, ModelFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.models.model_config import known_models
from tunekit.estimates.throughput.speed import speed_of, step_of
from tunekit.recipe.schema import Recipe


def mpt_facts(*, hidden, layers) -> ModelFacts:
    """LLM Foundry's MPT: no gate in the MLP, as many key heads as query heads, a tied head."""
    tensors = {"transformer.wte.weight": (50368, hidden)}
    for n in range(layers):
        block = f"transformer.blocks.{n}."
        tensors |= {
            block + "attn.Wqkv.weight": (3 * hidden, hidden),
            block + "attn.out_proj.weight": (hidden, hidden),
            block + "ffn.up_proj.weight": (4 * hidden, hidden),
            block + "ffn.down_proj.weight": (hidden, 4 * hidden),
        }
    shape = llama_facts(path="", hidden=hidden, intermediate=4 * hidden, layers=0, heads=32, kv_heads=32, vocab=50368)
    return shape.model_copy(update={"model_type": "mpt", "tensors": tensors, "num_layers": layers})


def qwen_facts(*, hidden, intermediate, layers, heads) -> ModelFacts:
    """The first Qwen, which is like Llama with as many key heads as query heads."""
    return llama_facts(
        path="", hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=heads, vocab=151936
    )


LLAMA_7B = llama_facts(path="", hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocab=32000)
LLAMA_13B = llama_facts(path="", hidden=5120, intermediate=13824, layers=40, heads=40, kv_heads=40, vocab=32000)
LLAMA_2_70B = llama_facts(path="", hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, vocab=32000)
LLAMA_70B, LLAMA_405B = (facts_of(known_models()[f"meta-llama/Llama-3.1-{size}"].config) for size in ("70B", "405B"))
MISTRAL_7B = facts_of(known_models()["mistralai/Mistral-7B-v0.1"].config)
MPT = {
    "1b": mpt_facts(hidden=2048, layers=24),
    "3b": mpt_facts(hidden=2560, layers=32),
    "7b": mpt_facts(hidden=4096, layers=32),
    "13b": mpt_facts(hidden=5120, layers=40),
    "30b": mpt_facts(hidden=7168, layers=48),
    "70b": mpt_facts(hidden=8192, layers=80),
}
QWEN = {
    "1.8b": qwen_facts(hidden=2048, intermediate=5504, layers=24, heads=16),
    "7b": qwen_facts(hidden=4096, intermediate=11008, layers=32, heads=32),
    "72b": qwen_facts(hidden=8192, intermediate=24576, layers=80, heads=64),
}

TORCHTITAN = "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TORCHTITAN_A100 = "github.com/pytorch/torchtitan, docs/performance.md of 2024"
FOUNDRY = "github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
GIST = "gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a"  # transformers, DeepSpeed; samples a second in all
QWEN_README = "github.com/QwenLM/Qwen, README, Profiling of Memory and Speed"  # transformers, PEFT, seconds a step
TORCHTUNE = "github.com/pytorch/torchtune, README of September 2024"  # compiled, batch 2, packed to 2048
FMS = "github.com/foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb.csv"  # packed to 4096
GUIDES = "guides on distributed training of 2025 and 2026"

SLOWER_MEMORY = {"memory_bytes_per_second": 2.4e12}  # torchtitan's H100s have HBM2e
A800 = {"link_bytes_per_second": 200e9}  # an A100 with 400 GB/s of NVLink, both directions


@dataclass(frozen=True)
class Row:
    source: str
    name: str
    model: ModelFacts
    machine: str
    tokens_per_second: float
    """Of one device."""
    length: int
    rows: int
    """Of a micro-batch."""
    layout: Layout = field(default_factory=Layout)
    accumulated: int = 1
    adapter: str = "full"
    targets: tuple[str, ...] = ()
    """Linear layers that have an adapter; all where left out."""
    recomputed: bool = False
    optim: str = "adamw_torch_fused"
    figures: dict = field(default_factory=dict)
    tolerance: float = 0.0
    """By which the range may fall short."""
    miss: str | None = None


def fsdp(devices: int) -> Layout:
    return Layout(strategy="fsdp2", dp_shard_size=devices)


def zero(stage: int, devices: int, **offload) -> Layout:
    return Layout(strategy=f"zero{stage}", dp_shard_size=devices, **offload)


def on_a800(name, samples, layout, *, rows, accumulated, recomputed=True, miss=None) -> Row:
    speed = samples * 4096 / 8
    return Row(
        GIST, f"A800 {name}", LLAMA_7B, "8xa100", speed, 4096, rows, layout, accumulated,
        recomputed=recomputed, figures=A800, miss=miss,
    )  # fmt: skip


def on_a100(size, adapter, length, seconds, *, devices=1, layout=None, tolerance=0.0, miss=None) -> Row:
    """Eight micro-batches of one row in a step."""
    name = f"Qwen {size} {adapter} {length}"
    machine = "a100" if devices == 1 else f"{devices}xa100"
    return Row(
        QWEN_README, name, QWEN[size], machine, 8 * length / seconds, length, 1, layout or Layout(), 8, adapter,
        recomputed=True, tolerance=tolerance, miss=miss,
    )  # fmt: skip


def on_fms(adapter, rows, speed, *, devices=1, name="", miss=None) -> Row:
    """Mistral 7B with adapters on attention alone, on A100s, with transformers, PEFT and bitsandbytes."""
    targets = () if adapter == "full" else ("q_proj", "k_proj", "v_proj", "o_proj")
    layout, machine = (fsdp(devices), f"{devices}xa100") if devices > 1 else (Layout(), "a100")
    return Row(
        FMS, f"Mistral 7B {adapter}{name} of {rows}", MISTRAL_7B, machine, speed, 4096, rows, layout, 1, adapter,
        targets, recomputed=True, miss=miss,
    )  # fmt: skip


COMPILED = "compiled, and 60 to 90 % of the peak by our count; tunekit's range is of eager code"

OFFLOADED = {"offload_optimizer_device": "cpu"}
ALL_OFFLOADED = {**OFFLOADED, "offload_param_device": "cpu"}

ROWS = [
    Row(TORCHTITAN, "8B", LLAMA_8B, "8xh100", 5762, 8192, 2, fsdp(8), figures=SLOWER_MEMORY),
    Row(TORCHTITAN, "8B compiled", LLAMA_8B, "8xh100", 6667, 8192, 2, fsdp(8), figures=SLOWER_MEMORY),
    Row(TORCHTITAN, "8B on 128", LLAMA_8B, "16x8xh100", 5605, 8192, 2, fsdp(128), figures=SLOWER_MEMORY),
    Row(TORCHTITAN, "8B on 128 compiled", LLAMA_8B, "16x8xh100", 6514, 8192, 2, fsdp(128), figures=SLOWER_MEMORY),
    Row(TORCHTITAN_A100, "8B", LLAMA_8B, "8x8xa100", 2904, 8192, 1, fsdp(64)),
    Row(TORCHTITAN_A100, "70B", LLAMA_70B, "8x8xa100", 331, 8192, 1, fsdp(64), recomputed=True),
    Row(TORCHTITAN_A100, "Llama 2 13B", LLAMA_13B, "8x8xa100", 2162, 4096, 2, fsdp(64)),
    Row(TORCHTITAN_A100, "Llama 2 70B", LLAMA_2_70B, "8x8xa100", 353, 4096, 2, fsdp(64), recomputed=True),
    Row(FOUNDRY, "3B", MPT["3b"], "8xh100", 16578, 8192, 3, fsdp(8), 6),
    Row(FOUNDRY, "7B", MPT["7b"], "8xh100", 10643, 2048, 6, fsdp(8)),
    Row(FOUNDRY, "7B recomputed", MPT["7b"], "8xh100", 8611, 4096, 16, fsdp(8), 2, recomputed=True,
        tolerance=0.05),
    Row(FOUNDRY, "7B of 64k", MPT["7b"], "8xh100", 1956, 65536, 1, fsdp(8), 2, recomputed=True),
    Row(FOUNDRY, "13B", MPT["13b"], "8xh100", 4792, 2048, 2, fsdp(8)),
    Row(FOUNDRY, "13B on 64", MPT["13b"], "8x8xh100", 4800, 2048, 2, fsdp(64)),
    Row(FOUNDRY, "30B of 8k", MPT["30b"], "8xh100", 1384, 8192, 1, fsdp(8), 21, recomputed=True),
    Row(FOUNDRY, "70B on 64", MPT["70b"], "8x8xh100", 1039, 2048, 8, fsdp(64), 4, recomputed=True, tolerance=0.05),
    Row(FOUNDRY, "7B", MPT["7b"], "8xa100", 4641, 2048, 6, fsdp(8), 2),
    Row(FOUNDRY, "70B on 64", MPT["70b"], "8x8xa100", 410, 2048, 8, fsdp(64), 4, recomputed=True),
    Row(FOUNDRY, "70B on 64 of 40 GB", MPT["70b"], "8x8xa100-40gb", 276, 2048, 2, fsdp(64), recomputed=True),
    on_a800("ZeRO-2", 5.33, zero(2, 8), rows=1, accumulated=8, recomputed=False),
    on_a800("ZeRO-2 recomputed", 4.19, zero(2, 8), rows=1, accumulated=8),
    on_a800("ZeRO-3", 4.95, zero(3, 8), rows=2, accumulated=4, recomputed=False),
    on_a800("ZeRO-3 recomputed", 4.45, zero(3, 8), rows=2, accumulated=4),
    on_a800("ZeRO-2 offloaded", 1.81, zero(2, 8, **OFFLOADED), rows=1, accumulated=8),
    on_a800("ZeRO-3 offloaded", 2.05, zero(3, 8, **OFFLOADED), rows=2, accumulated=4),
    on_a800("ZeRO-3 all offloaded", 2.06, zero(3, 8, **ALL_OFFLOADED), rows=4, accumulated=2),
    on_a100("1.8b", "lora", 256, 1.0, tolerance=0.05),
    on_a100("1.8b", "lora", 2048, 1.7),
    on_a100("1.8b", "lora", 8192, 6.8),
    on_a100("7b", "lora", 256, 1.2),
    on_a100("7b", "lora", 2048, 5.2),
    on_a100("7b", "lora", 8192, 21.3),
    on_a100("7b", "qlora", 256, 3.0, miss="GPTQ's kernels dequantise as long for few tokens as for many"),
    on_a100("7b", "qlora", 2048, 7.0),
    on_a100("7b", "qlora", 8192, 22.3),
    on_a100("72b", "qlora", 2048, 59.5),
    on_a100("72b", "lora", 256, 17.6, devices=4, layout=zero(3, 4), tolerance=0.05),
    on_a100("72b", "lora", 2048, 45.7, devices=4, layout=zero(3, 4)),
    on_a100("72b", "lora", 8192, 161.5, devices=4, layout=zero(3, 4)),
    Row(TORCHTUNE, "8B", LLAMA_8B, "rtx4090", 1650, 2048, 2, recomputed=True, optim="paged_adamw_8bit"),
    Row(TORCHTUNE, "8B LoRA", LLAMA_8B, "rtx4090", 3083, 2048, 2, adapter="lora", recomputed=True, miss=COMPILED),
    Row(TORCHTUNE, "8B QLoRA", LLAMA_8B, "rtx4090", 2413, 2048, 2, adapter="qlora", recomputed=True, miss=COMPILED),
    Row(TORCHTUNE, "70B offloaded", LLAMA_70B, "8xa100", 1568 / 8, 2048, 2,
        Layout(strategy="fsdp2", dp_shard_size=8, **ALL_OFFLOADED), recomputed=True,
        miss="torchtune's weights and states are bfloat16, half of the bytes"),
    Row(TORCHTUNE, "70B LoRA", LLAMA_70B, "8xa100", 3497 / 8, 2048, 2, fsdp(8), adapter="lora", recomputed=True),
    Row(TORCHTUNE, "405B QLoRA", LLAMA_405B, "8xa100", 653 / 8, 2048, 2, fsdp(8), adapter="qlora", recomputed=True,
        miss=COMPILED),
    Row(GUIDES, "70B on one node", LLAMA_70B, "8xh100", 9000 / 8, 4096, 1, fsdp(8), recomputed=True,
        miss="65 % of the peak with recomputation, for what 8 x 80 GB do not hold: 141 GB a card of states"),
    Row(GUIDES, "8B on RTX 5090", LLAMA_8B, "8xrtx5090", 2000 / 8, 4096, 1, fsdp(8), recomputed=True,
        miss="8 % of the peak; no configuration is given"),
    # Added after the ranges were set; what they changed is that the A100 of 40 GB counts as one of much bandwidth.
    Row(FOUNDRY, "1B on 64", MPT["1b"], "8x8xh100", 44402, 2048, 20, fsdp(64)),
    Row(FOUNDRY, "1B of 32k", MPT["1b"], "8xh100", 12025, 32768, 1, fsdp(8), 4),
    Row(FOUNDRY, "3B on 64", MPT["3b"], "8x8xh100", 22525, 2048, 6, fsdp(64), 3),
    Row(FOUNDRY, "30B on 32", MPT["30b"], "4x8xh100", 2308, 2048, 14, fsdp(32), 3, recomputed=True),
    Row(FOUNDRY, "7B on 128 of 40 GB", MPT["7b"], "16x8xa100-40gb", 3623, 2048, 18, fsdp(128), recomputed=True),
    Row(FOUNDRY, "13B on 128 of 40 GB", MPT["13b"], "16x8xa100-40gb", 1972, 2048, 16, fsdp(128), recomputed=True),
    Row(FOUNDRY, "30B on 128 of 40 GB", MPT["30b"], "16x8xa100-40gb", 865, 2048, 6, fsdp(128), recomputed=True),
    Row(FOUNDRY, "3B of 8k", MPT["3b"], "8xa100", 7695, 8192, 3, fsdp(8), 6),
    on_a800("ZeRO-2 of 4 rows", 4.69, zero(2, 8), rows=4, accumulated=2),
    on_a800("ZeRO-3 of 8 rows", 4.73, zero(3, 8), rows=8, accumulated=1),
    on_a100("1.8b", "qlora", 2048, 2.0),
    on_a100("7b", "lora", 1024, 2.8),
    on_a100("72b", "lora", 1024, 29.4, devices=4, layout=zero(3, 4)),
    on_a100("1.8b", "full", 4096, 2.8),
    on_fms("full", 4, 2775),
    on_fms("full", 8, 3049),
    on_fms("full", 2, 2698, devices=2),
    on_fms("full", 4, 2930, devices=2),
    on_fms("lora", 4, 3598),
    on_fms("lora", 8, 3632),
    on_fms("lora", 2, 2996, devices=2),
    on_fms("lora", 4, 3418, devices=2),
    on_fms("qlora", 4, 2749),
    on_fms("qlora", 8, 2881),
    on_fms("qlora", 4, 3429, name=" fused"),
    on_fms("qlora", 8, 3514, name=" fused"),
]  # fmt: skip


def predicted(row: Row):
    hardware = find_machine(row.machine).hardware()
    recipe = Recipe.model_validate(
        {
            "model": "m",
            "data": {"train": "rows.jsonl", "max_length": row.length},
            "adapter": {"type": row.adapter, **({"target_modules": list(row.targets)} if row.targets else {})},
            "train": {
                "optim": row.optim,
                "global_batch_size": row.rows * row.accumulated * row.layout.num_batches,
                "micro_batch_size": row.rows,
            },
        }
    )
    step = step_of(
        recipe,
        row.model,
        DataFacts(num_train=1000),
        hardware.device,
        dtype="bfloat16",
        mask_length=None,
        padding_free=False,
        micro_batch_size=row.rows,
        gradient_checkpointing=row.recomputed,
        layout=row.layout,
        num_nodes=hardware.num_nodes,
    )
    figures = hardware.figures.model_copy(update=row.figures)
    return speed_of(step, hardware.device, figures, [], num_steps=None).tokens_per_second.times(
        1 / row.layout.num_processes
    )


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row.name} {row.machine} {row.tokens_per_second:.0f}",
            marks=pytest.mark.xfail(reason=row.miss, strict=True) if row.miss else (),
        )
        for row in ROWS
    ],
)
def test_a_published_speed_lies_in_the_range(row):
    span = predicted(row)
    assert span.low * (1 - row.tolerance) <= row.tokens_per_second <= span.high * (1 + row.tolerance)


@pytest.mark.parametrize("rows", [4, 8])
def test_lora_is_predicted_faster_than_all_weights_and_four_bits_slower_than_lora(rows):
    speeds = [predicted(on_fms(adapter, rows, 0)) for adapter in ("full", "lora", "qlora")]
    full, lora, qlora = (math.sqrt(span.low * span.high) for span in speeds)
    # 1.19 to 1.30 and 0.76 to 0.97 in the rows above, the latter with bitsandbytes' kernels and with fused ones.
    assert 1.15 < lora / full < 1.35
    assert 0.7 < qlora / lora < 1
