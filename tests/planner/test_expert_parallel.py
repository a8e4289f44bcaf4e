"""Plans that divide the experts of a mixture among devices."""

import math
from dataclasses import replace

import pytest

from tests.estimates.shapes import LLAMA_8B
from tests.planner.golden import ROWS, recipe
from tests.planner.test_candidates import names
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.sharding import units_of
from tunekit.estimates.throughput.step import transfers_of
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

A3B = known_model("Qwen/Qwen3-30B-A3B")
EXPERTS = 48 * 128 * 3 * 2048 * 768
"""Layers, experts, matrices of each, hidden and inner size."""


def planned(machine="8xh100", model=A3B, parallel=None, **sections):
    request = recipe(**{"adapter": "full", "parallel": {"ep_size": 8} if parallel is None else parallel, **sections})
    return resolve(request, find_machine(machine).hardware(), model, ROWS)


def test_experts_are_divided_where_all_of_a_layer_would_not_fit():
    layouts = names("8xh100", model=A3B, adapter="full")
    assert [name for name in layouts if "expert" in name] == [
        "FSDP2, full shard, expert parallel 8",
        "FSDP2, full shard, expert parallel 4",
        "FSDP2, full shard, expert parallel 2",
    ]
    first = layouts.index("FSDP2, full shard, expert parallel 8")
    assert layouts.index("FSDP2, full shard") < first < layouts.index("ZeRO-3, optimizer on the CPU")
    assert not [name for name in names("8xh100", adapter="full") if "expert" in name]


def test_a_layout_that_is_asked_for_is_taken_and_explained():
    plan = planned("2x8xh100", parallel={"ep_size": 8})
    assert plan.layout == Layout(strategy="fsdp2", dp_shard_size=16, ep_size=8)
    (layout,) = [reason for reason in plan.reasons if reason.topic == "layout"]
    assert layout.why == "each device keeps 1/8 of the experts and receives their tokens; all else is sharded"
    (kernels,) = [reason for reason in plan.reasons if reason.topic == "kernels"]
    assert (plan.kernels, kernels.choice) == ("torch", "torch")
    assert plan.layout.why_not_resumed is None
    assert plan.memory.confidence == "closed form"


def test_lora_on_attention_trains_with_divided_experts():
    adapter = {"type": "lora", "target_modules": ["q_proj", "v_proj"]}
    plan = planned("2x8xh100", parallel={"ep_size": 8}, adapter=adapter)
    assert plan.layout == Layout(strategy="fsdp2", dp_shard_size=16, ep_size=8)
    full = planned("2x8xh100", parallel={"ep_size": 8})
    assert plan.memory.total_bytes < full.memory.total_bytes


def test_each_device_has_its_experts_whole_and_gathers_all_else():
    """Weights in bfloat16, on 16 devices of which 2 have the same experts."""
    plain, divided = (units_of(A3B, FullAdapter(), 16, size) for size in (1, 8))
    assert divided.all.trained == plain.all.trained
    less = plain.gathered(plain.layer, 2) - divided.gathered(divided.layer, 2)
    assert less == 2 * EXPERTS // 48 * 7 // 8
    assert plain.reduced(plain.layer, 2) - divided.reduced(divided.layer, 2) == less
    assert plain.gathered(plain.head, 2) == divided.gathered(divided.head, 2)
    adapter = LoraAdapter(target_modules=["q_proj", "v_proj"])
    plain_lora, divided_lora = (units_of(A3B, adapter, 16, size) for size in (1, 8))
    assert divided_lora.all == replace(plain_lora.all, experts=divided_lora.all.experts)
    assert plain_lora.gathered(plain_lora.layer, 2) - divided_lora.gathered(divided_lora.layer, 2) == less
    assert plain_lora.reduced(plain_lora.layer, 2) == divided_lora.reduced(divided_lora.layer, 2)


def sent_with(adapter):
    """Bytes that a device sends in a step, by their purpose, without and with divided experts."""
    sent = {}
    for size in (1, 8):
        layout = Layout(strategy="fsdp2", dp_shard_size=8, ep_size=size)
        all_transfers = transfers_of(
            A3B, adapter, "bfloat16", layout, num_nodes=1, num_tokens=4096, gradient_checkpointing=True
        )
        sent[size] = {transfer.what: transfer.sent_bytes for transfer in all_transfers}
    return sent


def test_tokens_are_sent_instead_of_experts():
    """There and back again: twice with recomputation in each of 48 layers, to 8 experts, and once for gradients."""
    sent, of_lora = sent_with(FullAdapter()), sent_with(LoraAdapter(target_modules=["q_proj", "v_proj"]))
    share = 7 / 8
    assert "exchanging tokens of experts" not in sent[1]
    tokens = 2 * 3 * 48 * 8 * 4096 * 2048 * 2
    assert sent[8]["exchanging tokens of experts"] == pytest.approx(share * tokens)
    less = sent[1]["gathering weights"] - sent[8]["gathering weights"]
    assert less == pytest.approx(2 * share * 2 * EXPERTS * share)
    assert sent[8]["reducing gradients"] == pytest.approx(sent[1]["reducing gradients"] - share * 2 * EXPERTS * share)
    assert of_lora[8]["reducing gradients"] == of_lora[1]["reducing gradients"] > 0
    assert of_lora[1]["gathering weights"] - of_lora[8]["gathering weights"] == pytest.approx(less)
    assert math.isclose(sum(math.prod(A3B.tensors[name]) for name in A3B.tensors if ".experts." in name), EXPERTS)


REFUSED = {
    "a dense model": (
        {"model": LLAMA_8B},
        "parallel.ep_size: llama-3.1-8b has no layers with experts; unset it",
    ),
    "experts that are no multiple": (
        {"parallel": {"ep_size": 3}},
        "parallel.ep_size: 3 does not divide the 128 experts of Qwen/Qwen3-30B-A3B",
    ),
    "a family without a plan": (
        {"model": A3B.model_copy(update={"model_type": "dbrx"})},
        "parallel.ep_size: transformers has no plan to divide the experts of dbrx; unset it",
    ),
    "one device": (
        {"machine": "h100"},
        "parallel.ep_size: 8 needs several accelerators; this is H100 SXM 80 GB; unset it",
    ),
    "tensor parallel besides": (
        {"parallel": {"ep_size": 2, "tp_size": 2}},
        "parallel.ep_size and parallel.tp_size: untested together; unset one",
    ),
    "adapters of experts": (
        {"adapter": "lora"},
        "FSDP2, full shard, expert parallel 8: PEFT adapts only whole experts; adapt attention alone, such as "
        "adapter.target_modules=[q_proj, k_proj, v_proj, o_proj], or use fsdp2 without ep_size",
    ),
    "other adapters": (
        {"adapter": {"type": "ia3"}},
        "FSDP2, full shard, expert parallel 8: ia3 with expert parallel layers is untested; use fsdp2 without ep_size",
    ),
    "DoRA": (
        {"adapter": {"type": "lora", "use_dora": True, "target_modules": ["q_proj"]}},
        "FSDP2, full shard, expert parallel 8: adapter.use_dora with expert parallel layers is untested; unset it, or "
        "use fsdp2 without ep_size",
    ),
    "preferences": (
        {"method": "dpo"},
        "FSDP2, full shard, expert parallel 8: transformers splits only the trained model into expert parallel "
        "layers, not the other computations of dpo; use fsdp2 without ep_size",
    ),
    "an optimizer": (
        {"train": {"optim": "rmsprop"}},
        "FSDP2, full shard, expert parallel 8: rmsprop is untested with expert parallel layers; "
        "use train.optim=adamw_torch_fused",
    ),
    "averages": (
        {"train": {"ema_decay": 0.9}},
        "FSDP2, full shard, expert parallel 8: averages of expert parallel layers are untested; unset train.ema_decay",
    ),
    "kernels": (
        {"model_section": {"path": "m", "kernels": "tunekit"}},
        "FSDP2, full shard, expert parallel 8: transformers divides experts as it loads them, before kernels could "
        "take their place; unset model.kernels, or use torch",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(name):
    sections, message = REFUSED[name]
    sections = dict(sections)
    if "model_section" in sections:
        request = recipe(adapter="full", parallel={"ep_size": 8}, model=sections["model_section"])
        with pytest.raises(PlanError) as caught:
            resolve(request, find_machine("8xh100").hardware(), A3B, ROWS)
    else:
        with pytest.raises(PlanError) as caught:
            planned(**sections)
    assert str(caught.value) == message
