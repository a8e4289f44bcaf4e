"""Learning rates by group: PEFT's groups of LoRA+, and steps worked out by hand in float64."""

import os

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.test_resume import SAVED, STEPS, cut_off
from tunekit.estimates.learning_rates import plain_name, rate_of
from tunekit.models.load import attach_adapter, load_model
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import LoraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run

LORAPLUS = {"type": "lora", "rank": 4, "loraplus_lr_ratio": 16}
BY_PATTERN = {"learning_rates": {"embed_tokens": 1e-4, r"layers\.1\..*mlp": 3e-3}, "layerwise_lr_decay": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rates")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, adapter="full", train=None, **parallel):
    asked = {"max_steps": STEPS, "global_batch_size": 8, "learning_rate": 1e-3, "save_steps": SAVED, **(train or {})}
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": adapter,
        "train": asked,
        "parallel": parallel,
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


def groups(trainer):
    names = {id(parameter): plain_name(name) for name, parameter in trainer.model.named_parameters()}
    return [
        ([names[id(one)] for one in group["params"]], group["initial_lr"], group["lr"], group["weight_decay"])
        for group in trainer.optimizer.param_groups
    ]


def rates_by_hand(names):
    """The tiny model has two layers: half the rate below the last one, a quarter for the embedding."""
    rates = {}
    for name in names:
        rates[name] = 1e-4 if "embed_tokens" in name else 5e-4 if ".layers.0." in name else 1e-3
        if ".layers.1." in name and "mlp" in name:
            rates[name] = 3e-3
    return rates


@pytest.mark.parametrize("use_dora", [False, True])
def test_groups_of_lora_plus_are_those_of_pefts_own_optimizer(use_dora, folder):
    adapter = LoraAdapter(rank=4, use_dora=use_dora, loraplus_lr_ratio=16, modules_to_save=["norm", "embed_tokens"])
    section = ModelSection(path=str(folder / "model"))
    model = load_model(section, dtype="float32", attn_implementation="sdpa", device="cpu")
    model = attach_adapter(model, adapter, seed=0)
    optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=2e-4, loraplus_lr_ratio=16)
    expected = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    asked = {"model": section, "data": {"train": "x"}, "adapter": adapter, "train": {"learning_rate": 2e-4}}
    recipe = Recipe.model_validate(asked)
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    assert {id(one): rate_of(recipe, plain_name(name), one.dim(), 2) for name, one in trained} == expected
    assert set(expected.values()) == {2e-4, 2e-4 * 16}


@pytest.mark.slow
def test_each_parameter_is_in_one_group_with_its_decay_and_the_schedule_scales_each(folder):
    asked = {**BY_PATTERN, "weight_decay": 0.1, "lr_scheduler_type": "linear", "warmup_steps": 0, "max_steps": 4}
    run = Run(made(recipe_for(folder, "full", asked)))
    found = worked(run.path, groups)
    names = [name for group, *_ in found for name in group]
    assert len(names) == len(set(names))
    assert set(names) == set(saved_weights(folder / "model"))
    rates = rates_by_hand(names)
    for group, initial, rate, decay in found:
        assert {rates[name] for name in group} == {initial}
        assert rate == 0.0
        assert decay == (0.0 if all("norm" in name for name in group) else 0.1)
    logged = [event["learning_rate"] for event in run.events() if event["event"] == "log"]
    assert logged == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["sgd", "adamw_torch", "adamw_torch_fused"])
def test_a_step_is_that_of_the_formula_at_the_rate_of_each_parameter(optim, folder):
    once = {"max_steps": 1, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_grad_norm": 1e6}
    plain = Run(made(recipe_for(folder, "full", {**once, "optim": "sgd", "learning_rate": 1.0})))
    worked(plain.path)
    before = {name: value.double() for name, value in saved_weights(folder / "model").items()}
    gradients = {name: before[name] - value.double() for name, value in saved_weights(plain.model_path).items()}
    run = Run(made(recipe_for(folder, "full", {**once, **BY_PATTERN, "optim": optim, "weight_decay": 0.1})))
    worked(run.path)
    for name, value in saved_weights(run.model_path).items():
        rate, gradient = rates_by_hand([name])[name], gradients[name]
        decay = 0.0 if "norm" in name else 0.1
        if optim == "sgd":
            # torch's SGD adds the decay to the gradient.
            expected = before[name] - rate * (gradient + decay * before[name])
        else:
            # Where the gradient is near the epsilon of Adam, that of float32 differs too much to compare.
            gradient = torch.where(gradient.abs() > 1e-5, gradient, torch.nan)
            expected = before[name] * (1 - rate * decay) - rate * gradient / (gradient.abs() + 1e-8)
        known = ~expected.isnan()
        torch.testing.assert_close(value.double()[known], expected[known], rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("adapter", "train"), [(LORAPLUS, {}), ("full", BY_PATTERN)], ids=["lora+", "patterns"])
def test_a_run_with_several_rates_that_was_cut_off_goes_on_exactly(adapter, train, folder):
    alone = Run(made(recipe_for(folder, adapter, train)))
    worked(alone.path)
    run = Run(made(recipe_for(folder, adapter, train)))
    in_processes(1, cut_off, run.path)
    found = worked(run.path, groups)
    assert len({initial for _, initial, _, _ in found}) > 1
    expected = saved_weights(alone.model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero2"])
@pytest.mark.parametrize(("adapter", "train"), [(LORAPLUS, {}), ("full", BY_PATTERN)], ids=["lora+", "patterns"])
def test_two_processes_take_the_steps_of_one(adapter, train, strategy, folder):
    alone = Run(made(recipe_for(folder, adapter, train)))
    worked(alone.path)
    run = Run(made(recipe_for(folder, adapter, train, num_processes=2, strategy=strategy)))
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=1e-5)
