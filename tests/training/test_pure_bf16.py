"""Weights that are trained in bfloat16: gradients and updates beside those of float64, and what runs of them save."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tunekit
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in
from tunekit.data.prepare import read_dataset
from tunekit.estimates.memory.states import states_bytes, trained_tensors
from tunekit.methods.run_trainer import RunTrainer
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import FullAdapter
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

RATE = 2.0**-17
"""A learning rate below half of a step of bfloat16 for most weights."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose weights bfloat16 holds as they are, and rows of unequal lengths."""
    folder = tmp_path_factory.mktemp("pure")
    save_tiny_model(folder / "model", hidden=64)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    model.float().save_pretrained(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(8)))
    return folder


def recipe_for(folder, **train):
    parallel = train.pop("parallel", {})
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": "full",
        "train": {"max_steps": 1, "warmup_steps": 0, "global_batch_size": 8, "pure_bf16": True, **train},
        "parallel": parallel,
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


def in_float64(run):
    """The loss over all rows of a run before its first step, and its gradients by name."""
    model = AutoModelForCausalLM.from_pretrained(
        run.recipe.model.path, dtype=torch.float64, attn_implementation="eager"
    )
    rows = list(read_dataset(run.path / "data" / "train.arrow"))
    loss, num_tokens = 0.0, 0
    for row in rows:
        labels = torch.tensor(row["labels"])[1:]
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        loss = loss + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        num_tokens += int((labels != -100).sum())
    loss = loss / num_tokens
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters()}


@pytest.fixture(scope="module", params=["tunekit", "torch"])
def stepped(request, folder):
    """A run of one step by each kind of kernels, with the gradients that its optimizer took."""
    gradients = {}
    step = RunTrainer._get_grad_norm

    def keep(self, *args, **kwargs):
        gradients.update({name: weight.grad.clone() for name, weight in self.model.named_parameters()})
        return step(self, *args, **kwargs)

    recipe = recipe_for(folder, learning_rate=RATE, micro_batch_size=4, max_grad_norm=1e6)
    recipe["model"] = {"path": recipe["model"], "kernels": request.param}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrainer, "_get_grad_norm", keep)
        return tunekit.train(recipe), gradients


def test_loss_and_gradients_are_those_of_float64_but_for_rounding(stepped):
    run, gradients = stepped
    loss, expected = in_float64(run)
    assert run.metrics()["loss"].iloc[0] == pytest.approx(loss, rel=5e-3)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}
    for name, gradient in gradients.items():
        error = (gradient.double() - expected[name]).norm() / expected[name].norm()
        # Some roundings to 2^-8 of the largest on the way.
        assert error < 0.03, name


def test_updates_below_a_step_of_bfloat16_count_on_average_if_rounded_stochastically(stepped, folder):
    run, _ = stepped
    _, gradients = in_float64(run)
    nearest = tunekit.train(recipe_for(folder, learning_rate=RATE, max_grad_norm=1e6, optim="adamw_torch"))
    before = load_file(folder / "model" / "model.safetensors")

    def moved(run):
        """By how much weights of matrices went against the sign of their gradients, on average."""
        after, moves = saved_weights(run.model_path), []
        for name, gradient in gradients.items():
            if gradient.dim() == 2:
                # The first step of Adam is the rate times the sign, which rounding turns where gradients are small.
                is_large = gradient.abs() > gradient.abs().median()
                moves.append(((before[name] - after[name].double()) * gradient.sign())[is_large])
        return torch.cat(moves).mean().item()

    assert moved(run) == pytest.approx(RATE, rel=0.05)
    assert moved(nearest) < 0.5 * RATE


@pytest.mark.parametrize("optim", ["tunekit_adamw", "tunekit_adamw_8bit", "tunekit_adamw_4bit"])
def test_a_run_holds_saves_and_exports_what_is_planned(optim, folder):
    run = tunekit.train(recipe_for(folder, learning_rate=1e-3, max_steps=3, save_steps=2, optim=optim))
    trained = trained_tensors(probe_model(run.recipe.model), FullAdapter())
    num_bytes = sum(2 * math.prod(shape) for shape in trained.values())
    optimizer = states_bytes(trained, optim, "bfloat16")
    assert run.result()["held_bytes"] == {"weights": num_bytes, "gradients": num_bytes, "optimizer": optimizer}
    assert {part: run.plan.memory.parts[part] for part in ("weights", "optimizer")} == {
        "weights": num_bytes,
        "optimizer": optimizer,
    }
    assert {weight.dtype for weight in saved_weights(run.model_path).values()} == {torch.bfloat16}
    assert json.loads((run.model_path / "config.json").read_text())["dtype"] == "bfloat16"
    (checked,) = [event for event in run.events() if event["event"] == "saved"]
    # The same operations on the same weights.
    assert checked["logit_error"] < 0.02
    state = torch.load(run.path / "checkpoints" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    groups = state["param_groups"]
    assert {group["seed"] for group in groups} == {run.recipe.train.seed}
    exported = tunekit.export(run, folder / f"exported-{optim}")
    weights = load_file(next(Path(exported.folder).glob("*.safetensors")))
    assert {name: weight.dtype for name, weight in weights.items()} == dict.fromkeys(weights, torch.bfloat16)
    assert all(torch.equal(weights[name], weight) for name, weight in saved_weights(run.model_path).items())


def test_groups_and_numbers_of_the_optimizer_are_those_of_torchs(folder):
    arguments = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    groups = []
    for optim in ("tunekit_adamw", "adamw_torch"):
        recipe = recipe_for(folder, optim=optim, weight_decay=0.25, learning_rate=1e-3, save_steps=1)
        run = tunekit.train({**recipe, "method": {"type": "sft", "trainer_args": arguments}})
        state = torch.load(run.path / "checkpoints" / "checkpoint-1" / "optimizer.pt", weights_only=True)
        names = ("params", "weight_decay", "betas", "eps")
        groups.append([{name: group[name] for name in names} for group in state["param_groups"]])
    assert groups[0] == groups[1]
    assert [group["weight_decay"] for group in groups[0]] == [0.25, 0.0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_processes_train_in_bfloat16_and_reach_the_loss_of_one(strategy, folder):
    steps = {"learning_rate": 1e-3, "max_steps": 6}
    alone = tunekit.train(recipe_for(folder, **steps))
    divided = made(recipe_for(folder, **steps, parallel={"strategy": strategy, "num_processes": 2}))
    work_in(divided, 2)
    run = Run(divided)
    (engine,) = [event for event in run.events() if event["event"] == "engine"]
    types = {name: engine[name] for name in ("engine", "trained_dtype", "compute_dtype", "reduce_dtype")}
    assert types == {"engine": strategy, **dict.fromkeys(list(types)[1:], "bfloat16")}
    assert {weight.dtype for weight in saved_weights(run.model_path).values()} == {torch.bfloat16}
    # Parts are rounded by other random numbers, and so are gradients by their sums.
    assert run.metrics()["loss"].tolist() == pytest.approx(alone.metrics()["loss"].tolist(), rel=0.02)
