"""Memory by layout: published sizes, and what has to hold where nothing can be traced."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.estimates.shapes import LLAMA_1B, LLAMA_8B, LLAMA_405B
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import MemoryEstimate, estimate
from tunekit.estimates.memory.sharding import units_of
from tunekit.estimates.memory.states import num_trainable_params
from tunekit.estimates.passes import Passes
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter

GPUS_PER_NODE = 8


def memory(layout: Layout, adapter=None, model=LLAMA_8B, **how) -> MemoryEstimate:
    options = {"num_tokens": 4096, "accumulates": False, "gradient_checkpointing": True, **how}
    return estimate(
        model, adapter or FullAdapter(), device="cuda", dtype="bfloat16", optim="adamw_torch_fused", mask_length=None,
        sliding_mask_length=None, layout=layout, devices_per_node=GPUS_PER_NODE, reserve_share=0.0, **options,
    )  # fmt: skip


def bytes_per_param(found: MemoryEstimate, *parts: str, model=LLAMA_8B) -> float:
    return sum(found.parts.get(part, 0) for part in parts) / model.num_params


# Figure 1 of arXiv 1910.02054: GB of model states of 7.5 billion parameters on 64 devices.
@pytest.mark.parametrize(("stage", "gigabytes"), [("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)])
def test_states_under_zero_are_those_that_its_paper_gives(stage, gigabytes):
    found = memory(Layout(strategy=stage, dp_shard_size=64))
    states = bytes_per_param(found, "weights", "masters", "optimizer")
    # Whatever phase has the peak, gradients are there whole or in parts.
    gradients = {"zero1": 2, "zero2": 2 / 64, "zero3": 2 / 64}[stage]
    assert 7.5 * (states + gradients) == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize(("stage", "whole", "divided"), [("zero1", 4, 16), ("zero2", 2, 18), ("zero3", 0, 20)])
def test_the_step_of_zero_copies_the_gradients_that_it_updates_to_float32(stage, whole, divided):
    found = memory(Layout(strategy=stage, dp_shard_size=64))
    expected = LLAMA_8B.num_params * (whole + divided / 64)
    assert found.phases["optimizer"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_an_offloaded_optimizer_takes_sixteen_bytes_of_each_parameter_to_the_host(stage):
    stays = memory(Layout(strategy=stage, dp_shard_size=8))
    leaves = memory(Layout(strategy=stage, dp_shard_size=8, offload_optimizer_device="cpu"))
    # Its copies and states, and gradients in float32 (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py).
    assert leaves.host_bytes == pytest.approx(16 * LLAMA_8B.num_params, rel=1e-6)
    assert "masters" not in leaves.parts and "optimizer" not in leaves.parts
    assert leaves.parts["weights"] == stays.parts["weights"]
    assert leaves.tensor_bytes < stays.tensor_bytes


def test_nvme_takes_what_the_host_would():
    layout = {"strategy": "zero3", "dp_shard_size": 16}
    host = memory(Layout(**layout, offload_param_device="cpu", offload_optimizer_device="cpu"))
    disk = memory(Layout(**layout, offload_param_device="nvme", offload_optimizer_device="nvme"))
    # Two nodes hold eighteen bytes a parameter between them: weights too.
    assert host.host_bytes == disk.nvme_bytes == pytest.approx(18 * LLAMA_8B.num_params / 2, rel=1e-6)
    assert disk.host_bytes == host.nvme_bytes == 0
    assert host.parts == disk.parts


def test_cpu_offload_of_fsdp2_leaves_no_states_on_the_device():
    stays, leaves = (
        memory(Layout(strategy="fsdp2", dp_shard_size=8, offload_param_device=device)) for device in ("none", "cpu")
    )
    assert not {"weights", "optimizer", "gradients"} & set(leaves.parts)
    assert leaves.host_bytes == 16 * LLAMA_8B.num_params
    assert leaves.phases["optimizer"] == 0
    states = stays.parts["weights"] + stays.parts["optimizer"]
    assert states == pytest.approx(12 * LLAMA_8B.num_params / 8, rel=1e-6)
    assert stays.phases["forward"] - leaves.phases["forward"] == states


@given(
    st.integers(1, 8), st.sampled_from([LLAMA_1B, LLAMA_8B, LLAMA_405B]), st.sampled_from(["fsdp2", "zero2", "zero3"])
)
def test_more_shards_never_need_more_memory(power, model, strategy):
    fewer, more = (memory(Layout(strategy=strategy, dp_shard_size=2**n), model=model) for n in (power, power + 1))
    assert more.tensor_bytes < fewer.tensor_bytes


@given(st.integers(2, 64), st.sampled_from([FullAdapter(), LoraAdapter()]))
def test_hybrid_shard_keeps_what_a_full_shard_of_its_group_keeps(replicas, adapter):
    group = memory(Layout(strategy="fsdp2", dp_shard_size=8), adapter)
    hybrid = memory(Layout(strategy="fsdp2", dp_replicate_size=replicas, dp_shard_size=8), adapter)
    kept = {"weights", "adapters", "optimizer"}
    assert {part: group.parts.get(part) for part in kept} == {part: hybrid.parts.get(part) for part in kept}
    # Sums over replicas wait beside their copies in float32.
    waiting = 2 * num_trainable_params(LLAMA_8B, adapter) / 8
    assert 0 <= hybrid.tensor_bytes - group.tensor_bytes <= waiting


def test_a_small_rank_is_padded_to_the_number_of_devices():
    few, many = (units_of(LLAMA_8B, LoraAdapter(rank=8), shards).all for shards in (8, 512))
    assert 8 * (few.frozen + few.trained) == LLAMA_8B.num_params + few.whole
    inputs = sum(inputs for _, inputs in LLAMA_8B.linears.values())
    assert 512 * many.trained - many.whole == (512 - 8) * inputs


def test_tensor_parallel_divides_what_is_linear():
    part = LLAMA_405B.divided_by(8)
    assert 8 * part.num_linear_params == LLAMA_405B.num_linear_params
    assert part.num_params - part.num_linear_params == LLAMA_405B.num_params - LLAMA_405B.num_linear_params
    whole, divided = (
        memory(Layout(strategy="fsdp2", dp_shard_size=64, tp_size=size), model=LLAMA_405B) for size in (1, 8)
    )
    assert divided.phases["last layer"] < whole.phases["last layer"] / 3


@pytest.mark.parametrize(("strategy", "size"), [("fsdp2", "cp_size"), ("zero3", "sp_size")])
def test_devices_that_share_a_sequence_hold_its_parts(strategy, size):
    alone = memory(Layout(strategy=strategy, dp_shard_size=32), num_tokens=4096)
    shared = memory(Layout(strategy=strategy, dp_shard_size=8, **{size: 4}), num_tokens=4 * 4096)
    assert shared.phases["forward"] == alone.phases["forward"]
    # Context parallel gathers keys and values, and their gradients: 4 x 2 bytes x 8 heads of 128, of 16,384 tokens.
    gathered = 4 * 2 * 8 * 128 * 16384 if size == "cp_size" else 0
    assert shared.phases["last layer"] - alone.phases["last layer"] == gathered


def test_ddp_holds_gradients_twice():
    single, ddp = memory(Layout()), memory(Layout(strategy="ddp", dp_replicate_size=8))
    assert ddp.tensor_bytes - single.tensor_bytes == 4 * LLAMA_8B.num_params


def test_accelerate_leaves_ddp_with_buckets_of_its_own(tmp_path):
    from accelerate import DistributedDataParallelKwargs

    from tests.threads import in_threads
    from tunekit.models.step_trace import LiveBytes

    assert not DistributedDataParallelKwargs().gradient_as_bucket_view
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)])

    def live_bytes():
        with LiveBytes(model.parameters()) as tracker:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            for _ in range(2):
                wrapped(torch.zeros(1, 256)).sum().backward()
        return tracker.live, tracker.own_bytes

    # Not gloo: what frees its group holds the interpreter's lock, for which the threads that it joins may wait.
    ((live, own),) = in_threads(1, live_bytes)
    assert live == 2 * own


def test_a_node_holds_the_model_once_while_it_is_handed_out():
    full = memory(Layout(strategy="fsdp2", dp_shard_size=8))
    lora = memory(Layout(strategy="fsdp2", dp_shard_size=8), LoraAdapter())
    assert full.host_bytes == 4 * LLAMA_8B.num_params
    assert lora.host_bytes == 2 * LLAMA_8B.num_params


def test_only_the_scales_of_four_bit_weights_lie_whole_on_each_device():
    layouts = [Layout(strategy="fsdp2", dp_shard_size=shards) for shards in (2, 64)]
    few, many = (memory(layout, QloraAdapter()).parts["weights"] for layout in layouts)
    packed = LLAMA_8B.num_linear_params / 2
    divided = packed + 2 * (LLAMA_8B.num_params - LLAMA_8B.num_linear_params)
    assert few - many == pytest.approx(divided / 2 - divided / 64, rel=1e-6)
    # A byte for every 64 values, and what belongs to these.
    scales = many - divided / 64
    assert packed / 32 < scales < packed / 31


@pytest.mark.parametrize(
    ("layout", "confidence"),
    [
        (Layout(), "traced"),
        (Layout(strategy="fsdp2", dp_shard_size=8), "traced"),
        (Layout(strategy="fsdp2", dp_shard_size=8, tp_size=2), "closed form"),
        (Layout(strategy="zero3", dp_shard_size=8), "closed form"),
    ],
)
def test_what_no_test_traces_is_said_to_be_a_closed_form(layout, confidence):
    assert memory(layout).confidence == confidence
    assert memory(layout, model=LLAMA_8B.model_copy(update={"model_type": "mamba"})).confidence == "outside the model"


def test_tables_that_are_trained_beside_an_adapter_are_traced_on_one_device_only():
    sharded, with_head = Layout(strategy="fsdp2", dp_shard_size=8), LoraAdapter(modules_to_save=["lm_head"])
    assert memory(Layout(), with_head).confidence == "traced"
    assert memory(sharded, with_head).confidence == "closed form"
    assert memory(sharded, LoraAdapter(dropout=0.1)).confidence == "traced"


def test_mixtures_are_traced_in_sft_only():
    mixture = LLAMA_8B.model_copy(update={"model_type": "qwen3_moe", "num_experts": 128})
    sharded = Layout(strategy="fsdp2", dp_shard_size=8)
    assert {memory(layout, model=mixture).confidence for layout in (Layout(), sharded)} == {"traced"}
    dpo = Passes(method="dpo", sequences_per_row=2)
    assert memory(Layout(), model=mixture, passes=dpo).confidence == "closed form"
    assert memory(Layout(), passes=dpo).confidence == "traced"
