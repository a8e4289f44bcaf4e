"""Plans for weights in 4 bits, and for weights that are published quantized."""

import pytest

from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.resolve import resolve
from tunekit.probe.model import known_model

ON_ATTENTION = {"type": "qlora", "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def planned(model, adapter, machine="h100", **parallel):
    asked = recipe(
        model={"path": "m"}, adapter=adapter, data={"max_length": 2048}, train={"max_steps": 5}, parallel=parallel
    )
    return resolve(asked, find_machine(machine).hardware(), model, ROWS)


def precision(plan):
    (choice,) = [reason.choice for reason in plan.reasons if reason.topic == "precision"]
    return choice


def published(method):
    return known_model("Qwen/Qwen3-0.6B").model_copy(update={"published_as": method})


@pytest.mark.parametrize(
    ("name", "machine", "words"),
    [
        ("Qwen/Qwen3-30B-A3B", "l40s", "4-bit base, experts included"),
        ("openai/gpt-oss-20b", "rtx4090", "experts in MXFP4 as published, bfloat16 for the rest of the base"),
    ],
)
def test_a_mixture_of_experts_in_4_bits_fits_one_card(name, machine, words):
    plan = planned(known_model(name), ON_ATTENTION, machine)
    assert (plan.layout.name, precision(plan)) == ("single device", f"bfloat16 compute, {words}")


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_weights_published_in_few_bits_are_made_dense_for_lora(method):
    assert precision(planned(published(method), {"type": "lora"})) == (
        f"bfloat16 compute, bfloat16 base, dequantized from {method}"
    )


@pytest.mark.parametrize(
    ("method", "adapter", "hint"),
    [
        ("fp8", "qlora", "set adapter.type to lora, or use a 16-bit copy of the model"),
        ("bitsandbytes", "lora", "set adapter.type to qlora, or use the model that they were made of"),
        ("bitsandbytes", "full", "set adapter.type to qlora, or use the model that they were made of"),
        ("gptq", "qlora", "use the model that they were made of"),
        ("bitsandbytes_8bit", "qlora", "use the model that they were made of"),
    ],
)
def test_weights_that_an_adapter_cannot_be_trained_on_are_refused(method, adapter, hint):
    with pytest.raises(
        PlanError, match=f"^model.path: the weights of Qwen/Qwen3-0.6B are published in {method}"
    ) as error:
        planned(published(method), {"type": adapter})
    assert error.value.hint == hint


def test_the_published_types_of_known_models():
    assert known_model("openai/gpt-oss-20b").published_as == "mxfp4"
    assert known_model("mistralai/Ministral-3-8B-Instruct-2512").published_as == "fp8"
    assert known_model("mistralai/Ministral-3-8B-Base-2512").published_as is None


def test_experts_in_4_bits_are_not_given_to_deepspeed():
    model = known_model("Qwen/Qwen3-30B-A3B")
    for strategy in ("zero1", "zero2"):
        with pytest.raises(PlanError, match="DeepSpeed broadcasts every weight, and experts in 4 bits are not sent"):
            planned(model, ON_ATTENTION, "8xh100", strategy=strategy)
    assert planned(model, ON_ATTENTION, "8xh100").layout.strategy == "ddp"


def test_a_type_without_the_experts_interface_keeps_its_experts():
    assert known_model("Qwen/Qwen3.5-35B-A3B").expert_stacks
    assert not known_model("meta-llama/Llama-4-Scout-17B-16E-Instruct").expert_stacks
