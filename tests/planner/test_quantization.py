"""Plans for weights in 4 bits, and for weights that are published quantized."""

import pytest

from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.memory.states import quantised_bytes
from tunekit.estimates.models.model_config import known_models
from tunekit.planner.resolve import resolve
from tunekit.probe.model import _from_config, known_model
from tunekit.recipe.sections.adapters import QloraAdapter

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
        ("fbgemm_fp8", "qlora", "set adapter.type to lora, or use a 16-bit copy of the model"),
        ("compressed-tensors", "qlora", "set adapter.type to lora, or use a 16-bit copy of the model"),
        ("hqq", "lora", "use the model that they were quantized from"),
        ("torchao", "full", "use the model that they were quantized from"),
    ],
)
def test_weights_that_an_adapter_cannot_be_trained_on_are_refused(method, adapter, hint):
    with pytest.raises(
        PlanError, match=f"^model.path: the weights of Qwen/Qwen3-0.6B are published in {method}, which "
    ) as error:
        planned(published(method), {"type": adapter})
    assert error.value.hint == hint


def as_published(name="Qwen/Qwen3-0.6B", **stated):
    """A known model as config.json has it quantized."""
    return _from_config({**known_models()[name].config, "quantization_config": stated}, name, True)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        (GPTQ, "base in GPTQ 4 bits as published"),
        ({**GPTQ, "bits": 8}, "base in GPTQ 8 bits as published"),
        (AWQ, "base in AWQ 4 bits as published"),
        (LLM_INT8, "base in bitsandbytes 8 bits as published"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "base in bitsandbytes 4 bits as published"),
    ],
)
def test_qlora_keeps_a_base_as_it_is_published(stated, words):
    plan = planned(as_published(**stated), "qlora")
    assert precision(plan) == f"bfloat16 compute, {words}"
    (why,) = [reason.why for reason in plan.reasons if reason.topic == "precision"]
    assert "; packed weights take " in why
    dense = planned(as_published(**stated), "lora")
    (why,) = [reason.why for reason in dense.reasons if reason.topic == "precision"]
    assert why.endswith(" with adapter.type=qlora")


def test_a_kept_base_takes_the_bytes_of_its_layout():
    """By the formula: 4 bits a value, and a scale of 16 bits and a zero point of 4 for each 128."""
    model = as_published(**GPTQ)
    num = model.num_linear_params
    assert quantised_bytes(model, QloraAdapter()) == num // 2 + num // 128 * 2 + num // 128 // 2


INT8 = {"type": "qlora", "quant_type": "int8"}


def test_a_base_in_8_bits_takes_a_byte_a_value_and_a_scale_an_output():
    plan = planned(known_model("meta-llama/Llama-3.1-8B"), INT8)
    assert precision(plan) == "bfloat16 compute, 8-bit base"
    outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    quantized = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    rest = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
    assert plan.memory.parts["weights"] == quantized + 4 * outputs + 2 * rest


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_a_base_in_8_bits_is_not_divided(strategy):
    with pytest.raises(PlanError, match="int8 weights cannot be sharded or broadcast") as error:
        planned(known_model("meta-llama/Llama-3.1-8B"), INT8, "8xh100", strategy=strategy)
    assert error.value.hint == "use ddp, adapter.quant_type=nf4, or adapter.type=lora"
    assert planned(known_model("meta-llama/Llama-3.1-8B"), INT8, "8xh100").layout.strategy == "ddp"


def test_experts_are_not_quantized_to_8_bits():
    with pytest.raises(PlanError, match=r"adapter\.quant_type: int8 is for linear layers") as error:
        planned(known_model("Qwen/Qwen3-30B-A3B"), INT8)
    assert error.value.hint == "use nf4, or set adapter.type=lora"


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_kept_weights_of_other_packages_are_not_divided(strategy):
    with pytest.raises(PlanError, match="weights published in AWQ cannot be sharded or broadcast") as error:
        planned(as_published(**AWQ), "qlora", "8xh100", strategy=strategy)
    assert error.value.hint == "use ddp, or adapter.type=lora"
    assert planned(as_published(**AWQ), "qlora", "8xh100").layout.strategy == "ddp"


def test_weights_published_in_4_bits_are_not_read_for_fsdp2():
    stated = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(PlanError, match="transformers cannot load weights published in bitsandbytes 4 bits"):
        planned(as_published(**stated), "qlora", "8xh100", strategy="fsdp2")


@pytest.mark.parametrize(
    ("adapter", "stated"),
    [
        ({"type": "qlora", "quant_type": "fp4"}, GPTQ),
        ({"type": "qlora", "double_quant": False}, AWQ),
        (
            {"type": "qlora", "quant_type": "nf4"},
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        ),
    ],
)
def test_a_data_type_that_the_published_weights_lack_is_refused(adapter, stated):
    with pytest.raises(PlanError, match="are published quantized and stay so"):
        planned(as_published(**stated), adapter)


def test_compressed_tensors_are_read_by_their_package():
    asked = recipe(model={"path": "m"}, adapter="lora", data={"max_length": 2048}, train={"max_steps": 5})
    hardware = find_machine("h100").hardware().model_copy(update={"compressed_tensors": False})
    with pytest.raises(PlanError, match="which is not installed") as error:
        resolve(asked, hardware, published("compressed-tensors"), ROWS)
    assert error.value.hint == "pip install 'tunekit[compressed-tensors]'"


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(*schemes, layout="pack-quantized", **others):
    groups = {f"group_{at}": {"targets": ["Linear"], "weights": scheme} for at, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "format": layout, **others}


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({**GPTQ, "bits": 3}, "in GPTQ with 3 bits; 4 and 8 are supported"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "in GPTQ's layout marlin; gptq and gptq_v2 are supported"),
        ({**GPTQ, "is_marlin_format": True}, "in GPTQ's layout marlin; gptq and gptq_v2 are supported"),
        ({**GPTQ, "pack_dtype": "int16"}, "in GPTQ with words of int16; int32 is supported"),
        ({**GPTQ, "dynamic": {"-:.*k_proj": {}}}, "in GPTQ with per-layer settings (dynamic)"),
        ({**AWQ, "version": "GEMV"}, "in AWQ's layout gemv; only gemm is supported"),
        (compressed(INT4, INT4), "in compressed-tensors with 2 schemes; one is supported"),
        (compressed(INT4, layout="marlin-24"), "in compressed-tensors' format marlin-24, which is unsupported"),
        (
            compressed({**INT4, "actorder": "group"}),
            "in compressed-tensors with reordered inputs (actorder: group), which is unsupported",
        ),
        (
            compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            "in compressed-tensors' sparse format sparse-24-bitmask, which is unsupported",
        ),
    ],
)
def test_layouts_that_are_not_read_are_refused_by_name(stated, why):
    with pytest.raises(PlanError) as error:
        planned(as_published(**stated), "lora")
    assert error.value.problem == f"model.path: the weights of Qwen/Qwen3-0.6B are published {why}"
    assert error.value.hint == "use the model that they were quantized from"


def test_packed_experts_are_refused():
    with pytest.raises(PlanError, match="published in gptq, which is unsupported for experts"):
        planned(as_published("Qwen/Qwen3-30B-A3B", **GPTQ), ON_ATTENTION)


def test_the_published_types_of_known_models():
    assert known_model("openai/gpt-oss-20b").published_as == "mxfp4"
    assert known_model("mistralai/Ministral-3-8B-Instruct-2512").published_as == "fp8"
    assert known_model("mistralai/Ministral-3-8B-Base-2512").published_as is None


def test_experts_in_4_bits_are_not_given_to_deepspeed():
    model = known_model("Qwen/Qwen3-30B-A3B")
    for strategy in ("zero1", "zero2"):
        with pytest.raises(PlanError, match="DeepSpeed broadcasts every weight, which fails for 4-bit experts"):
            planned(model, ON_ATTENTION, "8xh100", strategy=strategy)
    assert planned(model, ON_ATTENTION, "8xh100").layout.strategy == "ddp"


def test_a_type_without_the_experts_interface_keeps_its_experts():
    assert known_model("Qwen/Qwen3.5-35B-A3B").expert_stacks
    assert not known_model("meta-llama/Llama-4-Scout-17B-16E-Instruct").expert_stacks
