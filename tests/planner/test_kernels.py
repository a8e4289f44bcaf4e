"""Whose kernels a run uses, and where they are refused."""

import pytest
import yaml

from tests.estimates.shapes import H100, LAPTOP, LLAMA_1B, T4
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.planner.decisions.backends import families
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve

TWO = H100.model_copy(update={"accelerators": H100.accelerators * 2})
AMD = H100.model_copy(
    update={"accelerators": (H100.device.model_copy(update={"gfx": "gfx942", "compute_capability": None}),)}
)


def planned(hardware, kernels=None, model=LLAMA_1B, **sections):
    asked = {"path": "m"} if kernels is None else {"path": "m", "kernels": kernels}
    return resolve(recipe(model=asked, **sections), hardware, model, ROWS)


def why(plan):
    (found,) = [reason.why for reason in plan.reasons if reason.topic == "kernels"]
    return found


@pytest.mark.parametrize(
    ("hardware", "sections", "kernels", "said"),
    [
        (H100, {}, "tunekit", "Triton, for every module they match; the log lists the others"),
        (
            LAPTOP,
            {},
            "tunekit",
            "torch implementations (Triton needs an accelerator); most of the gain is from the loss head",
        ),
        (H100.model_copy(update={"triton": False}), {}, "tunekit", "torch implementations (Triton is not installed)"),
        (T4, {}, "torch", "need compute capability 8.0 or newer; T4"),
        (AMD, {}, "torch", "tunekit's kernels are untested on ROCm"),
        (TWO, {"adapter": "full", "parallel": {"strategy": "fsdp2", "tp_size": 2}}, "torch", "weights are DTensors"),
        (
            TWO,
            {"adapter": "full", "parallel": {"strategy": "zero3"}},
            "torch",
            "ZeRO-3 gathers weights one module at a time",
        ),
        (TWO, {"adapter": "full", "parallel": {"strategy": "fsdp2"}}, "tunekit", "Triton, for every module"),
    ],
    ids=["h100", "cpu", "no-triton", "t4", "rocm", "tensor-parallel", "zero3", "fsdp2"],
)
def test_own_kernels_are_used_where_they_are_known_to_be_right(hardware, sections, kernels, said):
    plan = planned(hardware, **sections)
    assert plan.kernels == kernels
    assert said in why(plan)


@pytest.mark.parametrize("kernels", ["tunekit", "liger", "torch"])
def test_kernels_can_be_asked_for(kernels):
    plan = planned(H100, kernels)
    assert plan.kernels == kernels
    assert why(plan).startswith("set by the recipe")


REFUSED = {
    "liger-on-a-cpu": (
        LAPTOP,
        LLAMA_1B,
        {},
        "liger",
        "model.kernels: liger kernels need Triton, which does not run on CPU (test); use tunekit, which has "
        "torch implementations too, or torch",
    ),
    "liger-is-missing": (
        H100.model_copy(update={"liger_kernel": False}),
        LLAMA_1B,
        {},
        "liger",
        "model.kernels: liger-kernel is not installed; pip install 'tunekit[gpu]', or unset model.kernels",
    ),
    "liger-does-not-know-it": (
        H100,
        LLAMA_1B.model_copy(update={"model_type": "stablelm"}),
        {},
        "liger",
        "model.kernels: liger-kernel has none for stablelm; unset model.kernels",
    ),
    "tensor-parallel": (
        TWO,
        LLAMA_1B,
        {"adapter": "full", "parallel": {"strategy": "fsdp2", "tp_size": 2}},
        "tunekit",
        "tensor parallel weights are DTensors, which only torch's own operations support; unset model.kernels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_kernels_that_cannot_be_had_are_refused(name):
    hardware, model, sections, kernels, said = REFUSED[name]
    with pytest.raises(PlanError) as refused:
        planned(hardware, kernels, model, **sections)
    assert said in str(refused.value)


def test_a_plan_of_before_there_were_kernels_has_none():
    plan = planned(LAPTOP)
    written = yaml.safe_load(plan.to_yaml())
    del written["kernels"]
    assert Plan.from_yaml(yaml.safe_dump(written), plan.recipe).kernels == "torch"


def test_the_types_that_liger_is_said_to_know_are_its_own():
    known = pytest.importorskip("liger_kernel.transformers.monkey_patch").MODEL_TYPE_TO_APPLY_LIGER_FN
    assert set(known) >= families()["liger"]
