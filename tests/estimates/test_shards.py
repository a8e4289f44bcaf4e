"""FSDP2 and DDP against a trace of the real wrapping on fake processes; `benchmarks/planner.py` has large ones."""

import pytest

from tests.estimates.oracle import Step, Trace, estimate_of
from tests.estimates.oracle_shards import ShardedStep, trace, trace_deep
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 40000,
}

FULL, LORA = FullAdapter(), LoraAdapter(rank=16)


def sharded(family, adapter, *, tied=False, num_shards=8, layout=None, **how) -> ShardedStep:
    sizes = {**SIZES, "tie_word_embeddings": tied}
    if family == "gemma3_text":
        sizes |= {"sliding_window": 512, "head_dim": 64, "num_hidden_layers": 6}
    step = Step(family, tuple(sizes.items()), adapter, batch=2, length=1024, **{"checkpointing": True, **how})
    return ShardedStep(step, Layout(strategy="fsdp2", dp_shard_size=num_shards, **(layout or {})))


MIXTURES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 256},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 64},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_key_value_heads": 8,
        "kv_lora_rank": 256,
        "q_lora_rank": 384,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}
"""Small ones of the families that are called traced; DeepSeek's with compressed queries too, as V3 has them."""


def mixture(family, adapter, *, layout=None, **how) -> ShardedStep:
    sizes = {**SIZES, "tie_word_embeddings": False, **MIXTURES[family]}
    step = Step(family, tuple(sizes.items()), adapter, batch=2, length=1024, **{"checkpointing": True, **how})
    return ShardedStep(step, Layout(strategy="fsdp2", dp_shard_size=8, **(layout or {})))


def peaks_of(sharded: ShardedStep) -> tuple[int, int]:
    """Bytes at the peak: traced, and estimated."""
    return trace(sharded).peak_bytes, estimate_of(sharded.step, sharded.layout).tensor_bytes


def assert_every_phase_is_as_traced(traced: Trace, estimated: MemoryEstimate) -> None:
    constant = traced.weights_bytes + traced.optimizer_bytes
    known = {phase: constant + traced.step_bytes[phase] for phase in estimated.phases if phase != "load"}
    assert {phase: estimated.phases[phase] for phase in known} == {
        phase: pytest.approx(size, rel=0.03) for phase, size in known.items()
    }
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
@pytest.mark.parametrize(
    "layout",
    [{}, {"reshard_after_forward": False}, {"dp_replicate_size": 4}],
    ids=["full shard", "no reshard", "hybrid"],
)
def test_every_phase_of_fsdp2_is_what_is_traced(tied, adapter, checkpointing, layout):
    step = sharded("llama", adapter, tied=tied, checkpointing=checkpointing, layout=layout)
    assert_every_phase_is_as_traced(trace(step), estimate_of(step.step, step.layout))


@pytest.mark.sample(1)
@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"checkpointing": False},
        {"layout": {"reshard_after_forward": False}},
        {"layout": {"dp_replicate_size": 4}},
        {"accumulates": True, "layout": {"sync_each_batch": True}},
        {"num_shards": 3},
    ],
    ids=["full shard", "kept", "no reshard", "hybrid", "synced", "three"],
)
def test_weights_in_4_bits_are_sharded_as_traced(how, tied, double_quant):
    """Their bytes are divided and gathered, and their scales are whole on each device."""
    step = sharded("llama", QloraAdapter(rank=16, double_quant=double_quant), tied=tied, **how)
    traced, estimated = trace(step), estimate_of(step.step, step.layout)
    assert_every_phase_is_as_traced(traced, estimated)
    # But for the buffers of the rotary embedding.
    assert estimated.parts["weights"] == pytest.approx(traced.weights_bytes - traced.optimizer_bytes // 2, abs=512)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
@pytest.mark.parametrize(
    "how", [{}, {"checkpointing": False}, {"layout": {"reshard_after_forward": False}}], ids=["", "kept", "no reshard"]
)
def test_experts_in_4_bits_are_sharded_as_traced(how, family):
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    step = mixture(family, QloraAdapter(rank=16, target_modules=targets), **how)
    traced, estimated = trace(step), estimate_of(step.step, step.layout)
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.01)
    assert estimated.parts["weights"] == pytest.approx(traced.weights_bytes - traced.optimizer_bytes // 2, abs=512)


@pytest.mark.slow
@pytest.mark.parametrize("sync_each_batch", [False, True], ids=["whole", "synced"])
@pytest.mark.parametrize("adapter", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
def test_gradients_of_micro_batches_lie_there_as_traced(tied, adapter, sync_each_batch):
    step = sharded("llama", adapter, tied=tied, accumulates=True, layout={"sync_each_batch": sync_each_batch})
    traced, estimated = peaks_of(step)
    assert estimated == pytest.approx(traced, rel=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma3_text"])
def test_families_are_what_is_traced(family, adapter):
    traced, estimated = peaks_of(sharded(family, adapter, tied=True, rows="padded"))
    assert estimated == pytest.approx(traced, rel=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulates", [False, True], ids=["one batch", "several"])
@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"reshard_after_forward": False},
        {"dp_replicate_size": 4},
        {"sync_each_batch": True},
        {"strategy": "ddp", "dp_shard_size": 1, "dp_replicate_size": 8},
    ],
    ids=["full shard", "no reshard", "hybrid", "synced", "ddp"],
)
def test_weights_in_bfloat16_are_what_is_traced(layout, tied, accumulates):
    step = sharded("llama", FULL, tied=tied, accumulates=accumulates, trained_dtype="bfloat16").step
    layout = Layout(**{"strategy": "fsdp2", "dp_shard_size": 8, **layout})
    traced, estimated = trace(ShardedStep(step, layout)), estimate_of(step, layout)
    assert estimated.parts["weights"] == pytest.approx(traced.weights_bytes, abs=1024)
    assert estimated.parts["optimizer"] == pytest.approx(traced.optimizer_bytes, abs=1024)
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.03)


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", [FULL, LORA], ids=["full", "lora"])
def test_float32_is_what_is_traced(adapter):
    traced, estimated = peaks_of(sharded("llama", adapter, dtype="float32"))
    assert estimated == pytest.approx(traced, rel=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", [FULL, LORA], ids=["full", "lora"])
def test_tensors_with_fewer_rows_than_there_are_devices_are_padded(adapter):
    step = sharded("llama", adapter, num_shards=512)
    traced, estimated = trace(step), estimate_of(step.step, step.layout)
    shards = estimated.parts["weights"] + estimated.parts.get("adapters", 0)
    # Besides: the rotary embedding's buffers.
    assert shards == pytest.approx(traced.weights_bytes, abs=1024)
    assert estimated.parts["optimizer"] == traced.optimizer_bytes
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "adapter",
    [FULL, LORA, LoraAdapter(rank=16, target_modules=["q_proj", "q_b_proj", "o_proj"])],
    ids=["full", "lora", "attention"],
)
@pytest.mark.parametrize("family", MIXTURES)
def test_mixtures_are_what_is_traced(family, adapter, checkpointing):
    traced, estimated = peaks_of(mixture(family, adapter, checkpointing=checkpointing))
    assert estimated == pytest.approx(traced, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [FULL, LORA], ids=["full", "lora"])
@pytest.mark.parametrize(
    "layout",
    [{"reshard_after_forward": False}, {"dp_replicate_size": 4}, {"sync_each_batch": True}],
    ids=["no reshard", "hybrid", "synced"],
)
def test_mixtures_in_every_layout_are_what_is_traced(layout, adapter):
    traced, estimated = peaks_of(mixture("deepseek_v3", adapter, accumulates=True, layout=layout, rows="padded"))
    assert estimated == pytest.approx(traced, rel=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("num_shards", [2, 64])
def test_adapters_of_experts_are_divided_by_the_rows_that_they_have(num_shards):
    # Of rank 16 on 16 experts: 256 rows, which 64 devices divide evenly; 16 rows they would not.
    step = mixture("qwen3_moe", LORA)
    step = ShardedStep(step.step, Layout(strategy="fsdp2", dp_shard_size=num_shards))
    traced, estimated = trace(step), estimate_of(step.step, step.layout)
    assert estimated.parts["optimizer"] == traced.optimizer_bytes
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulates", [False, True], ids=["one batch", "several"])
@pytest.mark.parametrize("adapter", [FULL, LORA], ids=["full", "lora"])
def test_every_phase_of_ddp_is_what_is_traced(adapter, accumulates):
    step = sharded("llama", adapter, accumulates=accumulates).step
    layout = Layout(strategy="ddp", dp_replicate_size=8)
    traced, estimated = trace(ShardedStep(step, layout)), estimate_of(step, layout)
    constant = traced.weights_bytes + traced.optimizer_bytes
    known = {phase: constant + traced.step_bytes[phase] for phase in estimated.phases if phase != "load"}
    assert {phase: estimated.phases[phase] for phase in known} == {
        phase: pytest.approx(size, rel=0.01) for phase, size in known.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("num_shards", [2, 64])
def test_the_experts_of_a_layer_are_divided_as_one_tensor(num_shards):
    # Eight experts on 64 devices: each holds one, and all gather as many as if there were 64.
    sizes = {**SIZES, "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": True}
    step = Step("mixtral", tuple(sizes.items()), FULL, batch=1, length=512, checkpointing=True)
    layout = Layout(strategy="fsdp2", dp_shard_size=num_shards)
    traced, estimated = trace(ShardedStep(step, layout)), estimate_of(step, layout)
    assert estimated.parts["weights"] == pytest.approx(traced.weights_bytes, abs=1024)
    constant = traced.weights_bytes + traced.optimizer_bytes
    assert estimated.phases["forward"] == pytest.approx(constant + traced.step_bytes["forward"], rel=0.01)


def test_a_deep_sharded_model_is_drawn_through_shallow_ones():
    deep = sharded("llama", FULL, checkpointing=False).with_layers(8)
    assert trace_deep(deep).peak_bytes == pytest.approx(trace(deep).peak_bytes, rel=1e-4)
