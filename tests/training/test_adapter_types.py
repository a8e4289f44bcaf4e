"""(IA)3, VeRA, OFT, MiSS, and LoRA with rows of tokens or biases, through the life of a run: resumed, in several
processes, as references, exported, refused.

Their losses are compared with layers written out in test_reference.py, their bytes with PEFT's in test_states.py.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.fsdp_utils import _get_model_state_dict
from peft import PeftModel, get_peft_model_state_dict
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

import tunekit
from tests.models.test_quantization import stack_of
from tests.processes import in_processes
from tests.threads import in_threads
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_learning_rates import recipe_for
from tests.training.test_resume import cut_off
from tunekit.errors import PlanError, RecipeError, TunekitError
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.states import shared_matrices, trained_bytes
from tunekit.methods.run_trainer import run_trainer
from tunekit.models.load import attach_adapter, load_model
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import QloraAdapter, VeraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run
from tunekit.training.engines.engine import before_wrapping

ADAPTERS = {
    "ia3": {"type": "ia3", "feedforward_modules": ["down_proj"]},
    "vera": {"type": "vera", "rank": 8},
    "oft": {"type": "oft", "oft_block_size": 8},
    "miss": {"type": "miss", "rank": 5},
    "tokens": {"type": "lora", "rank": 4, "trainable_token_indices": [256, 257, 100]},
    "biases": {"type": "lora", "rank": 4, "lora_bias": True},
}
FAST = {"learning_rate": 3e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """Runs that nothing interrupts, in one process, by kind of adapter."""
    runs = {}

    def run_of(kind):
        if kind not in runs:
            runs[kind] = Run(made(recipe_for(folder, ADAPTERS[kind], FAST)))
            worked(runs[kind].path)
        return runs[kind]

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_run_that_was_cut_off_resumes_exactly(kind, folder, alone):
    run = Run(made(recipe_for(folder, ADAPTERS[kind], FAST)))
    in_processes(1, cut_off, run.path)
    worked(run.path)
    expected = saved_weights(alone(kind).model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind != "tokens"])
def test_two_processes_take_the_steps_of_one(kind, strategy, folder, alone):
    run = Run(made(recipe_for(folder, ADAPTERS[kind], FAST, num_processes=2, strategy=strategy)))
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone(kind).model_path), rtol=0, atol=2e-5)


@pytest.mark.parametrize("layout", [Layout(), Layout(strategy="ddp", dp_replicate_size=2)])
def test_packed_weights_are_left_alone_by_a_group_of_whatever_number_of_processes(layout, folder):
    """Launchers put a single process into a group too, and Accelerate wraps its model as any other."""
    plan = tunekit.plan(recipe_for(folder, ADAPTERS["biases"], FAST))
    recipe = plan.recipe.model_copy(update={"adapter": QloraAdapter()})
    plan = plan.model_copy(update={"layout": layout, "recipe": recipe})
    model = torch.nn.Linear(8, 8)
    model.experts = torch.nn.Parameter(stack_of(2, 64, 64)[0], requires_grad=False)
    before_wrapping(SimpleNamespace(model=model), plan)
    # Not gloo: what frees its group holds the interpreter's lock, for which the threads that it joins may wait.
    in_threads(1, lambda: DistributedDataParallel(model)(torch.ones(2, 8)).sum().backward())
    assert model.weight.grad is not None


class Loading:
    """Base of the mixin here: it asks for the state that a checkpoint is loaded into, as Accelerate does."""

    is_fsdp_enabled = True

    def __init__(self, model):
        plugin = SimpleNamespace(transformer_cls_names_to_wrap=None)
        self.model, self.accelerator = model, SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))

    def _load_from_checkpoint(self, folder, model):
        self.state = _get_model_state_dict(self.model, adapter_only=True)


def test_a_checkpoint_of_vera_is_loaded_with_its_matrices_into_a_divided_model(folder):
    plan = tunekit.plan(recipe_for(folder, ADAPTERS["vera"], FAST, num_processes=2, strategy="fsdp2"))
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = run_trainer(Loading)(attach_adapter(base, plan.recipe.adapter, seed=0))
    expected = get_peft_model_state_dict(trainer.model)
    init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        before_wrapping(trainer, plan)
    finally:
        destroy_process_group()
    assert not any("vera_A" in name for name in trainer.model.state_dict()), "Accelerate would divide it"
    trainer.load_weights("checkpoint-2", None)
    assert trainer.state.keys() == expected.keys() and any("vera_A" in name for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind != "biases"])
def test_a_merged_export_answers_as_the_adapter_that_plain_peft_loads(kind, folder, alone, tmp_path):
    run = alone(kind)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    ids = torch.arange(24).reshape(2, 12)
    before = base(input_ids=ids).logits
    adapted = PeftModel.from_pretrained(base, run.model_path).eval()
    expected = adapted(input_ids=ids).logits
    assert (expected - before).abs().max() > 1e-2
    tunekit.export(run, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_biases_are_not_merged_into_layers_without(alone, tmp_path):
    with pytest.raises(TunekitError, match=r"an adapter with lora_bias cannot be merged: .* has no bias"):
        tunekit.export(alone("biases"), tmp_path / "merged")
    tunekit.export(alone("biases"), tmp_path / "adapter", kind="adapter")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_preferences_are_learned_against_the_model_without_its_adapter(kind, folder):
    rows = folder / "pairs.jsonl"
    save_pairs(rows)
    recipe = recipe_for(folder, ADAPTERS[kind], {**FAST, "max_steps": 3, "save_steps": 3})
    recipe["data"]["train"] = str(rows)
    run = tunekit.train({**recipe, "method": "dpo"})
    losses = run.metrics()["loss"].tolist()
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[-1] < 0.69


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_finished_adapter_is_trained_further_and_another_kind_is_refused(kind, folder, alone):
    first = alone(kind)
    recipe = recipe_for(folder, ADAPTERS[kind], {**FAST, "max_steps": 1, "save_steps": 1})
    recipe["model"] = str(first.model_path)
    losses = tunekit.train(recipe).metrics()["loss"].tolist()
    assert losses[0] < first.metrics()["loss"].tolist()[0] - 0.05
    if ADAPTERS[kind]["type"] != "lora":
        with pytest.raises(RecipeError, match=f"adapter.type: .lora. here, but .{kind}. in the adapter of"):
            tunekit.plan({**recipe, "adapter": "lora"})


def save_pairs(file):
    rows = [{"prompt": f"double {n}", "chosen": f"{2 * n}", "rejected": f"{2 * n + 1} or so"} for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("kind", ["ia3", "vera", "oft"])
def test_muon_is_refused_where_no_matrix_is_trained(kind, folder):
    with pytest.raises(
        RecipeError, match=f"train.optim: updates only matrices of layers, and adapter.type {kind} trains none"
    ):
        tunekit.plan(recipe_for(folder, ADAPTERS[kind], {"optim": "muon"}))


def test_the_random_matrices_of_vera_are_planned_once(folder):
    section, adapter = ModelSection(path=str(folder / "model")), VeraAdapter(rank=8)
    facts = probe_model(section)
    model = load_model(section, dtype="float32", attn_implementation="sdpa", device="cpu")
    model = attach_adapter(model, adapter, seed=0)
    held = {id(buffer): buffer for name, buffer in model.named_buffers() if "vera_" in name}
    assert sorted(shared_matrices(facts, adapter)) == sorted(tuple(buffer.shape) for buffer in held.values())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adapters, _ = trained_bytes(facts, adapter, "adamw_torch")
    assert adapters == sum(tensor.nbytes for tensor in (*held.values(), *trained))


@pytest.mark.parametrize(
    ("adapter", "changes", "words"),
    [
        (
            {"type": "oft", "oft_block_size": 32},
            {},
            "oft_block_size: 32 does not divide the inputs of all adapted layers: 48, 112; set one of 2, 4, 8, 16",
        ),
        ({"type": "miss"}, {}, "adapter.rank: 64 exceeds the inputs of an adapted layer: 48; lower it to 48 at most"),
        (
            {"type": "ia3", "feedforward_modules": ["fc2"]},
            {},
            "adapter.feedforward_modules: no adapted module is named fc2; available: ",
        ),
        (
            "vera",
            {"model": {"add_tokens": ["<tool>"]}},
            "adapter.type: vera does not train the rows of the tokens that the recipe adds; set adapter.type=lora",
        ),
        (
            {"type": "lora", "trainable_token_indices": [7]},
            {"parallel": {"strategy": "fsdp2", "num_processes": 2}},
            "PEFT reads token rows from the unsharded embedding, which fsdp2 does not keep; use ddp",
        ),
        ("vera", {"train": {"tiled_mlp": True}}, "tiled MLPs are untested with adapter.type=vera"),
    ],
)
def test_what_does_not_go_together_is_refused(adapter, changes, words, folder):
    recipe = recipe_for(folder, adapter)
    recipe["model"] = {"path": recipe["model"], **changes.get("model", {})}
    recipe["train"] |= changes.get("train", {})
    recipe["parallel"] |= changes.get("parallel", {})
    with pytest.raises(PlanError) as caught:
        tunekit.plan(recipe)
    assert words in f"{caught.value}; {caught.value.hint}"
