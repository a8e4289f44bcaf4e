"""Where layers are compiled and products computed in float8, and where that is refused."""

import pytest

from tests.estimates.shapes import H100, LAPTOP, LLAMA_1B, RTX_4090, T4
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.planner.resolve import resolve

TWO = H100.model_copy(update={"accelerators": H100.accelerators * 2})


def planned(hardware, model=LLAMA_1B, *, kernels="auto", packing=False, **sections):
    sections["train"] = {"max_steps": 5, **sections.get("train", {})}
    asked = recipe(model={"path": "m", "kernels": kernels}, data={"packing": packing}, **sections)
    return resolve(asked, hardware, model, ROWS)


def reason(plan, topic):
    (found,) = [reason for reason in plan.reasons if reason.topic == topic]
    return found.choice, found.why


@pytest.mark.parametrize(
    ("hardware", "options", "compiled", "said"),
    [
        (H100, {"kernels": "torch", "packing": True}, True, "packed rows have similar lengths"),
        (H100, {"packing": True}, False, "no gain beyond tunekit's kernels"),
        (H100, {"kernels": "torch"}, False, "every new length would recompile"),
        (H100, {"kernels": "torch", "packing": True, "adapter": "qlora"}, False, "4-bit weights cannot be compiled"),
        (LAPTOP, {"packing": True}, False, "compilation costs more time than it saves on CPU (test)"),
        (T4, {"packing": True}, False, "pay off from compute capability 8.0"),
        (LAPTOP, {"train": {"torch_compile": True}}, True, "set by the recipe"),
        (H100, {"kernels": "torch", "packing": True, "train": {"torch_compile": False}}, False, "set by the recipe"),
        (H100, {"packing": True, "adapter": "full", "train": {"fp8": True}}, True, "float8 casts are slow unless"),
    ],
)
def test_layers_are_compiled_where_it_is_known_to_pay(hardware, options, compiled, said):
    plan = planned(hardware, **options)
    choice, why = reason(plan, "compile")
    assert plan.torch_compile == compiled == (choice == "each decoder layer")
    assert said in why


def test_float8_is_for_matrices_that_it_takes():
    plan = planned(H100, adapter="full", train={"fp8": True})
    assert plan.fp8
    assert reason(plan, "float8")[0] == "112 of 112 linear layers, without the head"


REFUSED = {
    "no compiler": (
        LAPTOP.model_copy(update={"cxx": False}),
        {"train": {"torch_compile": True}},
        "train.torch_compile: torch compiles CPU code with g++, which is not installed; install g++",
    ),
    "4 bits": (H100, {"adapter": "qlora", "train": {"torch_compile": True}}, "4-bit weights cannot be"),
    "zero": (
        TWO,
        {"adapter": "full", "parallel": {"strategy": "zero2"}, "train": {"torch_compile": True}},
        "the gather and reduce hooks of DeepSpeed would break the compiled graph; unset train.torch_compile",
    ),
    "float8 on ada": (
        RTX_4090,
        {"adapter": "full", "train": {"fp8": True}},
        "train.fp8: needs a CUDA device of compute capability 9.0 or newer; this is RTX 4090",
    ),
    "float8 on a cpu": (LAPTOP, {"adapter": "full", "train": {"fp8": True}}, "train.fp8: needs a CUDA device"),
    "float8 lora": (H100, {"train": {"fp8": True}}, "train.fp8: requires full fine-tuning, but adapter.type is lora"),
    "float8 is missing": (
        H100.model_copy(update={"torchao": False}),
        {"adapter": "full", "train": {"fp8": True}},
        "train.fp8: torchao is not installed; pip install 'tunekit[fp8]'",
    ),
    "float8 zero": (
        TWO,
        {"adapter": "full", "parallel": {"strategy": "zero3"}, "train": {"fp8": True}},
        "float8 is untested with DeepSpeed ZeRO",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_refused(name):
    hardware, options, said = REFUSED[name]
    with pytest.raises(PlanError) as refused:
        planned(hardware, **options)
    assert said in str(refused.value)
