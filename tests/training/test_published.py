"""Checkpoints that are published quantized, through the life of a run: resumed, in two processes, exported."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import tunekit
from tests.processes import in_processes
from tests.published import save_published
from tests.tiny import save_chats, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_learning_rates import recipe_for
from tests.training.test_resume import cut_off
from tunekit.errors import PlanError
from tunekit.inference.inference_model import find_trained, load_trained
from tunekit.models.quantization import Stack
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

KEPT = ("gptq", "awq", "bitsandbytes_8bit", "bitsandbytes")
DENSE = {"fp8": "full", "fbgemm_fp8": "lora", "compressed_int4": "full", "gptq": "full", "bitsandbytes": "lora"}
IDS = torch.arange(40)[None]
QLORA = {"type": "qlora", "rank": 4}
FAST = {"learning_rate": 3e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


@pytest.fixture(scope="module")
def published(folder):
    """Values of a checkpoint in a folder of its layout."""
    made_before = {}

    def values_of(layout):
        if layout not in made_before:
            made_before[layout] = save_published(folder / layout, layout)
        return made_before[layout]

    return values_of


def recipe_on(folder, layout, adapter, train=None, **parallel):
    return recipe_for(folder, adapter, FAST | (train or {}), **parallel) | {"model": str(folder / layout)}


@pytest.fixture(scope="module")
def alone(folder, published):
    """Runs that nothing interrupts, in one process, by layout."""
    runs = {}

    def run_of(layout):
        published(layout)
        if layout not in runs:
            runs[layout] = Run(made(recipe_on(folder, layout, QLORA)))
            worked(runs[layout].path)
        return runs[layout]

    return run_of


def dense_model(folder, layout, published):
    """The model of the published values, by transformers alone."""
    from transformers import AutoConfig

    values = published(layout)
    config = AutoConfig.from_pretrained(folder / layout)
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(values)
    return model


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("layout", KEPT)
def test_a_run_on_kept_weights_that_was_cut_off_resumes_exactly(layout, folder, alone):
    expected = saved_weights(alone(layout).model_path)
    run = Run(made(recipe_on(folder, layout, QLORA)))
    in_processes(1, cut_off, run.path)
    worked(run.path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


@pytest.mark.parametrize("layout", ["gptq", "bitsandbytes_8bit"])
def test_two_processes_with_kept_weights_take_the_steps_of_one(layout, folder, alone):
    expected = saved_weights(alone(layout).model_path)
    run = Run(made(recipe_on(folder, layout, QLORA, num_processes=2, strategy="ddp")))
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("layout", KEPT)
def test_an_adapter_on_kept_weights_answers_alike_wherever_it_is_loaded(layout, folder, alone, published, tmp_path):
    run = alone(layout)
    base = dense_model(folder, layout, published)
    bare = logits_of(base)
    expected = logits_of(PeftModel.from_pretrained(base, run.model_path))
    assert (expected - bare).abs().max() > 1e-2
    mine = load_trained(find_trained(run), dtype="float32", device="cpu")
    assert any(isinstance(parameter, Stack) for parameter in mine.parameters()) == (layout != "bitsandbytes")
    torch.testing.assert_close(logits_of(mine), expected, rtol=0, atol=1e-4)
    tunekit.export(run, tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert "quantization_config" not in vars(merged.config)
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=1e-4)
    tunekit.export(run, tmp_path / "adapter", kind="adapter")
    assert mine.generate(input_ids=IDS, max_new_tokens=2, do_sample=False).shape == (1, 42)


@pytest.mark.parametrize(("layout", "adapter"), DENSE.items())
def test_weights_that_were_made_dense_are_trained_as_those_of_a_dense_model(
    layout, adapter, folder, published, tmp_path
):
    dense = dense_model(folder, layout, published)
    dense_folder = folder / f"dense-{layout}"
    if not dense_folder.exists():
        dense.save_pretrained(dense_folder)
        for file in (folder / layout).glob("*token*"):
            (dense_folder / file.name).write_bytes(file.read_bytes())
        (dense_folder / "chat_template.jinja").write_bytes((folder / layout / "chat_template.jinja").read_bytes())
    few = {"max_steps": 2, "save_steps": 2}
    first, second = (Run(made(recipe_on(folder, name, adapter, few))) for name in (layout, dense_folder.name))
    for run in (first, second):
        worked(run.path)
    torch.testing.assert_close(saved_weights(first.model_path), saved_weights(second.model_path), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3", "zero2"])
def test_layouts_that_divide_kept_weights_are_refused(strategy, folder, published):
    published("gptq")
    with pytest.raises(PlanError, match="weights published in GPTQ cannot be sharded or broadcast"):
        made(recipe_on(folder, "gptq", QLORA, num_processes=2, strategy=strategy))


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
@pytest.mark.parametrize("layout", ["gptq", "bitsandbytes", "compressed_int4"])
def test_weights_that_were_made_dense_are_divided(layout, strategy, folder, published):
    published(layout)
    # AdamW would divide gradients near zero by themselves, which are rounded otherwise on other CPUs.
    plain = {"optim": "sgd", "learning_rate": 1.0}
    one = Run(made(recipe_on(folder, layout, "lora", plain)))
    worked(one.path)
    run = Run(made(recipe_on(folder, layout, "lora", plain, num_processes=2, strategy=strategy)))
    work_in(run.path, 2)
    weights = saved_weights(one.model_path)
    assert max(value.abs().max() for name, value in weights.items() if "lora_B" in name) > 1e-2
    torch.testing.assert_close(saved_weights(run.model_path), weights, rtol=0, atol=5e-5)
