"""Layers of LLaMA Pro: identities at the beginning, trained alone, and saved as a model like any other."""

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.processes import in_processes
from tests.rows import save_rows
from tests.tiny import make_tokenizer, save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_part_of_a_model import recipe_for
from tests.training.test_resume import cut_off
from tunekit.errors import PlanError, RunError
from tunekit.estimates.memory.states import states_bytes
from tunekit.estimates.models.model_config import model_types
from tunekit.models.expansion import expand
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run
from tunekit.training.check_reference import check_new_layers

LAYERS = 4
NEW = {"type": "full", "new_layers": 2}
DENSE = [name for name in model_types().defaults if name not in ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")]
IDS = torch.arange(24).view(2, 12)


def tiny(model_type, **more):
    """A model of random weights with four layers, of the kinds that its type alternates."""
    torch.manual_seed(0)
    kinds = {"sliding_window": 4} if "sliding_window" in AutoConfig.for_model(model_type).to_dict() else {}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=len(make_tokenizer()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=None,
        **kinds,
        **more,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.sample(10)
@pytest.mark.parametrize("num_new", [1, 2, 4])
@pytest.mark.parametrize("model_type", DENSE)
def test_new_layers_change_no_logit_and_reload_in_plain_transformers(model_type, num_new, tmp_path):
    model = tiny(model_type)
    types = getattr(model.config, "layer_types", None)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        answer = model.generate(input_ids=IDS[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
        expand(model, num_new)
        assert torch.equal(model(input_ids=IDS).logits, before)
        cached = model.generate(input_ids=IDS[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(cached, answer)
        # Trained, the new layers do change something, and what is saved computes the same.
        for parameter in model.parameters():
            parameter.add_(0.01)
        changed = model(input_ids=IDS).logits
        assert not torch.equal(changed, before)
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
        assert torch.equal(loaded.eval()(input_ids=IDS).logits, changed)
    assert loaded.config.num_hidden_layers == len(loaded.get_decoder().layers) == LAYERS + num_new
    every = LAYERS // num_new
    if types is not None:
        new_types = [kind for at, kind in enumerate(types) for _ in range(2 if (at + 1) % every == 0 else 1)]
        assert loaded.config.layer_types == new_types


def test_the_tensors_are_those_of_the_authors_expansion():
    """As scripts/llama_pro.py of LLaMA-Factory writes them, after the authors' block_expansion.py."""
    model = tiny("llama")
    old = {name: value.clone() for name, value in model.state_dict().items()}
    expected, layer_count, split = {}, 0, LAYERS // 2
    for i in range(LAYERS):
        for key, value in old.items():
            if f".{i:d}." in key:
                expected[key.replace(f".{i:d}.", f".{layer_count:d}.")] = value
        layer_count += 1
        if (i + 1) % split == 0:
            for key, value in old.items():
                if f".{i:d}." in key:
                    is_zero = "down_proj" in key or "o_proj" in key
                    value = torch.zeros_like(value) if is_zero else value
                    expected[key.replace(f".{i:d}.", f".{layer_count:d}.")] = value
            layer_count += 1
    expected |= {key: value for key, value in old.items() if ".layers." not in key}
    found = expand(model, 2).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("model_type", DENSE)
def test_facts_with_new_layers_are_those_of_the_expanded_model(model_type, tmp_path):
    model = tiny(model_type)
    for folder in ("old", "new"):
        model.save_pretrained(tmp_path / folder)
        make_tokenizer().save_pretrained(tmp_path / folder)
        if folder == "old":
            expand(model, 2)
    old, new = (probe_model(ModelSection(path=str(tmp_path / folder))) for folder in ("old", "new"))
    counted = old.with_new_layers(2)
    assert counted.tensors == new.tensors
    assert (counted.num_layers, counted.layer_types, counted.num_params) == (6, new.layer_types, new.num_params)


def test_layers_that_are_no_identities_are_found():
    class Trainer:
        model = expand(tiny("llama"), 2)

        class accelerator:
            device = torch.device("cpu")
            autocast = staticmethod(torch.no_grad)

    adapter = recipe_of(NEW)
    check_new_layers(Trainer, adapter, vocabulary=100)
    with torch.no_grad():
        Trainer.model.model.layers[2].mlp.down_proj.weight[0, 0] = 1e-3
    with pytest.raises(RunError, match="new layers of LlamaForCausalLM are not identities"):
        check_new_layers(Trainer, adapter, vocabulary=100)


def recipe_of(adapter):
    from tunekit.recipe.schema import Recipe

    return Recipe.model_validate({"model": "pico", "data": {"train": "x"}, "adapter": adapter}).adapter


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("new_layers")
    save_tiny_model(folder / "model", layers=LAYERS)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def asked(folder, adapter=NEW, **others):
    recipe = recipe_for(folder, adapter, **others)
    recipe["data"]["eval"] = str(folder / "rows.jsonl")
    return recipe


@pytest.fixture(scope="module")
def run(folder):
    run = Run(made(asked(folder)))
    worked(run.path)
    return run


def evaluated(run):
    return [event["eval_loss"] for event in run.events() if event["event"] == "eval"]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", "tunekit"])
def test_a_run_begins_where_the_base_is_and_trains_new_layers_alone(kernels, folder):
    run = Run(made(asked(folder, model={"kernels": kernels})))
    worked(run.path)
    whole = Run(made(asked(folder, "full", model={"kernels": kernels})))
    worked(whole.path)
    assert evaluated(run)[0] == evaluated(whole)[0]
    assert evaluated(run)[-1] < evaluated(run)[0]
    before, after = saved_weights(folder / "model"), saved_weights(run.model_path)
    places = {0: 0, 1: 1, 2: 3, 3: 4}
    for name, value in before.items():
        renamed = re.sub(r"layers\.(\d+)", lambda match: f"layers.{places[int(match[1])]}", name)
        assert torch.equal(after.pop(renamed), value)
    assert {int(re.search(r"layers\.(\d+)", name)[1]) for name in after} == {2, 5}
    assert all(value.any() for value in after.values())
    config = AutoConfig.from_pretrained(run.model_path)
    assert config.num_hidden_layers == 6
    (loaded,) = {AutoModelForCausalLM.from_pretrained(run.model_path).num_parameters()}
    assert loaded == run.plan.num_params


@pytest.mark.slow
def test_a_run_holds_what_is_planned(run):
    part = {name: value.shape for name, value in saved_weights(run.model_path).items() if re.search(r"\.[25]\.", name)}
    size = sum(shape.numel() for shape in part.values())
    assert run.plan.num_trainable_params == size
    held = run.result()["held_bytes"]
    assert held["weights"] == run.plan.memory.parts["weights"] == 4 * run.plan.num_params
    assert held["gradients"] == 4 * size
    assert held["optimizer"] == run.plan.memory.parts["optimizer"] == states_bytes(part, "adamw_torch_fused")
    (adapter,) = (reason for reason in run.plan.reasons if reason.topic == "adapter")
    assert adapter.choice == "full, of 2 new layers, 6 in total"
    assert "no activations stored for the first 2 layers" in adapter.why


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_exactly(run, folder):
    again = Run(made(asked(folder)))
    in_processes(1, cut_off, again.path)
    worked(again.path)
    expected = saved_weights(run.model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(again.model_path).items())


@pytest.mark.slow
def test_two_processes_train_new_layers_as_one_does(run, folder):
    both = Run(made(asked(folder, num_processes=2, strategy="ddp")))
    work_in(both.path, 2)
    torch.testing.assert_close(saved_weights(both.model_path), saved_weights(run.model_path), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_expanded_model_is_expanded_once_more(run, folder):
    recipe = asked(folder, {"type": "full", "new_layers": 3}, train={"max_steps": 1})
    recipe["model"] = str(run.path)
    more = Run(made(recipe))
    worked(more.path)
    assert AutoConfig.from_pretrained(more.model_path).num_hidden_layers == 9
    assert evaluated(more)[0] == pytest.approx(evaluated(run)[-1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_methods_with_a_reference_or_a_score_train_new_layers(method, folder):
    """The plan's check of the reference sees that the model begins equal to it."""
    recipe = asked(folder, train={"max_steps": 2})
    recipe |= {
        "method": method,
        "data": {"train": str(save_rows(folder / f"{method}.jsonl", method)), "max_length": 64},
    }
    run = Run(made(recipe))
    worked(run.path)
    assert run.plan.reference == ("second model" if method == "dpo" else "none")
    after = saved_weights(run.model_path)
    assert {int(match[1]) for name in after if (match := re.search(r"layers\.(\d+)", name))} == set(range(6))
    assert all(value.any() for name, value in after.items() if re.search(r"layers\.[25]\.", name))
    assert run.result()["held_bytes"]["weights"] == run.plan.memory.parts["weights"]


@pytest.mark.slow
def test_new_layers_that_a_model_cannot_be_given_are_refused(folder):
    with pytest.raises(
        PlanError, match=r"adapter.new_layers: 3 does not divide the 4 layers .*; set it to one of 1, 2, 4"
    ):
        made(asked(folder, {"type": "full", "new_layers": 3}))
