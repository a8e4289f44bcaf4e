"""Costs of adapters that begin with what rows or 4 bits tell: bounds of their ranks, bytes before training."""

import random
from math import prod

import pytest
import torch
from peft import LoraConfig

from tests.estimates.oracle import Step, facts_of
from tests.estimates.shapes import LLAMA_1B
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import estimate
from tunekit.estimates.memory.states import initial_bytes, num_trainable_params, trained_bytes, trained_tensors
from tunekit.models.initial import Document, see_inputs
from tunekit.models.step_trace import LiveBytes
from tunekit.recipe.sections.adapters import LoraAdapter, QloraAdapter

SIZES = {
    "vocab_size": 71, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def test_no_distribution_of_ranks_has_more_parameters_than_the_planned_one():
    adapter = LoraAdapter(rank=8, init_lora_weights="eva", rho=3.0)
    sizes, planned = LLAMA_1B.adapter_linears(adapter), num_trainable_params(LLAMA_1B, adapter)
    assert planned == sum(prod(shape) for shape in trained_tensors(LLAMA_1B, adapter).values())
    assert planned > num_trainable_params(LLAMA_1B, adapter.model_copy(update={"rho": 1.0}))
    draws = random.Random(0)
    for _ in range(20):
        # As rows may decide: 8 for each module, 24 at most.
        tickets = draws.sample([name for name in sizes for _ in range(24)], 8 * len(sizes))
        assert sum(sum(sizes[name]) for name in tickets) < planned
    # Some of the largest modules are full, the budget is spent.
    given = {name: rank for name, rank in LLAMA_1B.adapted(adapter).ranks.items() if rank}
    assert sorted(given.values()) == [8 * len(sizes) % 24, *[24] * (8 * len(sizes) // 24)]
    assert {sizes[name] for name in given} == {(2048, 8192), (8192, 2048)}


def test_at_rho_1_an_adapter_of_eva_is_planned_as_any_other():
    adapters = LoraAdapter(rank=8, init_lora_weights="eva", rho=1.0), LoraAdapter(rank=8)
    first, second = (trained_bytes(LLAMA_1B, adapter, "adamw_torch") for adapter in adapters)
    assert first == second


def test_what_corda_needs_before_training_is_what_its_computation_holds():
    step = Step("llama", tuple(SIZES.items()), LoraAdapter(rank=4, init_lora_weights="corda"), 1, 4, False)
    from transformers import AutoModelForCausalLM

    model, names = AutoModelForCausalLM.from_config(step.config(), dtype=torch.float32), []
    names = [name for name, module in model.named_modules() if name.endswith("_proj")]
    tracker = LiveBytes(model.parameters())
    with tracker:
        see_inputs(model, step.adapter, LoraConfig(r=4), names, [Document([1, 2, 3, 4], [1, 2, 3, 4])])
    facts = facts_of(step)
    planned, matrices = initial_bytes(facts, step.adapter), 4 * num_trainable_params(facts, step.adapter)
    assert 0.9 * planned < tracker.peaks["forward"] < planned + matrices


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_plans_have_room_for_what_is_there_before_training(device):
    def planned(adapter):
        return estimate(
            LLAMA_1B, adapter, device=device, dtype="bfloat16", optim="adamw_torch", num_tokens=64, mask_length=None,
            sliding_mask_length=None, gradient_checkpointing=True, accumulates=False, layout=Layout(),
            devices_per_node=2, reserve_share=0.0,
        )  # fmt: skip

    plain, corda = (planned(LoraAdapter(init_lora_weights=start)) for start in (True, "corda"))
    sizes = LLAMA_1B.adapter_linears("all-linear").values()
    squares = [inputs**2 for _, inputs in sizes]
    most = 4 * (sum(squares) + 3 * max(squares) + 4 * max(outputs * inputs for outputs, inputs in sizes))
    assert corda.phases["load"] - plain.phases["load"] == most
    assert {name: size for name, size in corda.phases.items() if name != "load"} == {
        name: size for name, size in plain.phases.items() if name != "load"
    }
    plain, loftq = (planned(QloraAdapter(init_lora_weights=start)) for start in (True, "loftq"))
    dense, factors = 2 * LLAMA_1B.num_params, 16 * max(outputs * inputs for outputs, inputs in sizes)
    assert loftq.host_bytes - plain.host_bytes == (2 * dense if device == "cuda" else 0)
    assert loftq.phases["load"] - plain.phases["load"] == factors + (dense if device == "cpu" else 0)
