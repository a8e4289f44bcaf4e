"""Bases of 8 bits through the life of a run: trained, resumed, in two processes, exported."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import tunekit
from tests.processes import in_processes
from tests.tiny import make_tokenizer, save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_learning_rates import recipe_for
from tests.training.test_resume import cut_off
from tunekit.models.load import load_model
from tunekit.models.quantization import Stack
from tunekit.recipe.sections.adapters import QloraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

INT8 = {"type": "qlora", "rank": 4, "quant_type": "int8"}
FAST = {"learning_rate": 3e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    save_tiny_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """A run that nothing interrupts."""
    run = Run(made(recipe_for(folder, INT8, FAST)))
    worked(run.path)
    return run


def test_it_trains_as_lora_on_a_model_of_the_quantized_values(folder, alone):
    section = ModelSection(path=str(folder / "model"))
    quantized = load_model(section, dtype="float32", device="cpu", quantization=QloraAdapter(quant_type="int8"))
    dense = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in quantized.named_parameters():
            if isinstance(parameter, Stack):
                assert (parameter.dense() != dense.get_parameter(name)).any()
                dense.get_parameter(name).copy_(parameter.dense())
    dense.save_pretrained(folder / "dense")
    make_tokenizer().save_pretrained(folder / "dense")
    run = Run(made(recipe_for(folder, {"type": "lora", "rank": 4}, FAST) | {"model": str(folder / "dense")}))
    worked(run.path)
    torch.testing.assert_close(saved_weights(alone.model_path), saved_weights(run.model_path), rtol=0, atol=1e-5)


def test_the_weights_that_are_held_are_those_of_the_plan(alone):
    assert alone.result()["held_bytes"]["weights"] == alone.plan.memory.parts["weights"]


def test_a_run_that_was_cut_off_resumes_exactly(folder, alone):
    run = Run(made(recipe_for(folder, INT8, FAST)))
    in_processes(1, cut_off, run.path)
    worked(run.path)
    expected = saved_weights(alone.model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


def test_two_processes_take_the_steps_of_one(folder, alone):
    run = Run(made(recipe_for(folder, INT8, FAST, num_processes=2, strategy="ddp")))
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=5e-5)


def test_it_is_merged_into_the_unquantized_base(folder, alone, tmp_path):
    exported = tunekit.export(alone, tmp_path / "merged", dtype="float32")
    assert "trained on a quantized base, but merged into the unquantized one" in " ".join(exported.notes)
    base, adapter = saved_weights(folder / "model"), saved_weights(alone.model_path)
    name = "model.layers.1.mlp.down_proj"
    first, second = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    merged = saved_weights(tmp_path / "merged")[f"{name}.weight"]
    torch.testing.assert_close(merged, base[f"{name}.weight"] + 32 / 4 * second @ first, rtol=0, atol=1e-6)
