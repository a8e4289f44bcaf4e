"""Optimizers that torch's AdamW does not stand for: real runs against published formulas, cut off, and divided."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training import test_learning_rates
from tests.training.engines import made, work_in, worked
from tests.training.test_resume import STEPS, cut_off
from tunekit.data.prepare import read_dataset
from tunekit.estimates.memory.states import states_bytes, trained_tensors
from tunekit.methods.run_trainer import RunTrainer
from tunekit.probe.model import probe_model
from tunekit.runs.run import Run

pytestmark = pytest.mark.slow

LORA = {"type": "lora", "rank": 4, "modules_to_save": ["embed_tokens"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("optimizers")
    # Halves of its MLPs are large enough for states of 4 bits.
    save_tiny_model(folder / "model", intermediate=256)
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


LOW_RANK = ["galore_adamw", "apollo_adamw"]

MORE = {
    "schedule_free_adamw": {"lr_scheduler_type": "constant"},
    **{name: {"optim_args": {"rank": 4, "update_proj_gap": 3}} for name in LOW_RANK},
}
"""Settings that go with an optimizer. A run is cut off after the fourth of its steps."""


def recipe_for(folder, adapter="full", train=None, **parallel):
    return test_learning_rates.recipe_for(folder, adapter, {**train, **MORE.get(train["optim"], {})}, **parallel)


def of_optimizers(*names, adapters=("full", "lora")):
    """Cases of optimizers with adapters, and of those that train all weights."""
    cases = [(optim, adapter) for optim in names for adapter in adapters]
    cases += [(optim, "full") for optim in (*LOW_RANK, "adam_mini", "tunekit_adamw_4bit")]
    return pytest.mark.parametrize(("optim", "adapter"), cases)


ADAPTERS = {"full": "full", "lora": LORA}


def losses(run):
    return [event["loss"] for event in run.events() if event["event"] == "log"]


@of_optimizers("muon", "schedule_free_adamw")
def test_a_run_holds_and_saves_what_is_planned(optim, adapter, folder):
    run = tunekit.train(recipe_for(folder, ADAPTERS[adapter], {"optim": optim}))
    facts = probe_model(run.recipe.model)
    trained = trained_tensors(facts, run.recipe.adapter)
    planned = states_bytes(trained, optim, low_rank=run.recipe.train.low_rank, head_dim=facts.head_dim)
    assert run.plan.memory.parts["optimizer"] == run.result()["held_bytes"]["optimizer"] == planned
    states = torch.load(run.path / "checkpoints" / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)["state"]
    assert sum(value.nbytes for state in states.values() for value in state.values()) == planned
    assert losses(run)[-1] < losses(run)[0]


@of_optimizers("muon", "schedule_free_adamw")
def test_a_run_that_was_cut_off_goes_on_exactly(optim, adapter, folder):
    alone = Run(made(recipe_for(folder, ADAPTERS[adapter], {"optim": optim})))
    worked(alone.path)
    run = Run(made(recipe_for(folder, ADAPTERS[adapter], {"optim": optim})))
    in_processes(1, cut_off, run.path)
    worked(run.path)
    expected = saved_weights(alone.model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


@pytest.mark.parametrize("optim", ["muon", "adam_mini", *LOW_RANK, "tunekit_adamw_8bit", "tunekit_adamw_4bit"])
def test_processes_that_divide_a_run_and_were_cut_off_go_on_exactly(optim, folder):
    recipes = [recipe_for(folder, "full", {"optim": optim}, num_processes=2, strategy="fsdp2") for _ in range(2)]
    alone, run = (Run(made(recipe)) for recipe in recipes)
    work_in(alone.path, 2)
    in_processes(2, cut_off, run.path)
    work_in(run.path, 2)
    assert run.plan.memory.parts["optimizer"] == run.result()["held_bytes"]["optimizer"]
    expected = saved_weights(alone.model_path)
    assert all(torch.equal(value, expected[name]) for name, value in saved_weights(run.model_path).items())


SPREAD = [("muon", "ddp"), ("muon", "fsdp2"), ("schedule_free_adamw", "ddp")]
SPREAD = [(*case, adapter) for case in SPREAD for adapter in ADAPTERS]
SPREAD += [(optim, strategy, "full") for optim in (*LOW_RANK, "adam_mini") for strategy in ("ddp", "fsdp2")]


@pytest.mark.parametrize(("optim", "strategy", "adapter"), SPREAD)
def test_two_processes_take_the_steps_of_one(optim, strategy, adapter, folder):
    asked = {"optim": optim, "max_steps": 2}
    alone = Run(made(recipe_for(folder, ADAPTERS[adapter], asked)))
    worked(alone.path)
    run = Run(made(recipe_for(folder, ADAPTERS[adapter], asked, num_processes=2, strategy=strategy)))
    work_in(run.path, 2)
    expected = saved_weights(alone.model_path)
    for name, value in saved_weights(run.model_path).items():
        # Gradients are summed in another order, and Muon rounds what it multiplies to bfloat16.
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-3 * 0.02)
    assert losses(run) == pytest.approx(losses(alone), abs=1e-4)


@pytest.fixture
def gradients(monkeypatch):
    """The gradients of each step, by the names of the parameters."""
    kept, step = [], RunTrainer._get_grad_norm

    def keep(self, *args, **kwargs):
        kept.append({name: weight.grad.clone() for name, weight in self.model.named_parameters()})
        return step(self, *args, **kwargs)

    monkeypatch.setattr(RunTrainer, "_get_grad_norm", keep)
    return kept


def test_a_step_is_that_of_torchs_muon_in_layers_and_of_torchs_adamw_elsewhere(folder, gradients):
    """Bit by bit; `tests/kernels/test_muon.py` compares both with the published formula."""
    once = {"max_steps": 1, "warmup_steps": 0, "lr_scheduler_type": "constant", "max_grad_norm": 1e6}
    run = tunekit.train(recipe_for(folder, "full", {**once, "optim": "muon", "weight_decay": 0.1}))
    (found,) = gradients
    by_muon = [name for name in found if "norm" not in name and "embed" not in name and "lm_head" not in name]
    assert len(by_muon) == 14
    after = saved_weights(run.model_path)
    for name, value in saved_weights(folder / "model").items():
        weight = torch.nn.Parameter(value)
        weight.grad = found[name]
        decay = 0.0 if "norm" in name else 0.1
        if name in by_muon:
            optimizer = torch.optim.Muon([weight], lr=1e-3, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        else:
            optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=decay, fused=True)
        optimizer.step()
        assert torch.equal(after[name], weight), name


def averaged(start, gradients, *, rate, num_warmup, decay):
    """The average of weights after steps with these gradients, by algorithm 1 of arXiv 2405.15682."""
    average, base, second, weight_sum = start, start, torch.zeros_like(start), 0.0
    for at, gradient in enumerate(gradients, start=1):
        trained = 0.1 * base + 0.9 * average
        second = 0.999 * second + 0.001 * gradient.square()
        step_rate = rate * min(1.0, at / num_warmup)
        update = gradient / ((second / (1 - 0.999**at)).sqrt() + 1e-8) + decay * trained
        base = base - step_rate * update
        weight_sum += step_rate**2
        share = step_rate**2 / weight_sum
        average = (1 - share) * average + share * base
    return average


def test_checkpoints_evaluations_and_the_result_of_a_schedule_free_run_are_the_published_average(folder, gradients):
    recipe = recipe_for(
        folder, "full", {"optim": "schedule_free_adamw", "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 1e6}
    )
    recipe["data"]["eval"] = str(folder / "rows.jsonl")
    run = tunekit.train(recipe)
    assert len(gradients) == STEPS
    before = saved_weights(folder / "model")
    for num, place in ((4, run.path / "checkpoints" / "checkpoint-4"), (STEPS, run.model_path)):
        for name, value in saved_weights(place).items():
            decay = 0.0 if "norm" in name else 0.1
            found = [each[name].double() for each in gradients[:num]]
            expected = averaged(before[name].double(), found, rate=1e-3, num_warmup=2, decay=decay)
            # Where the gradient is near the epsilon, that of float32 differs too much to compare.
            known = torch.stack([one.abs() for one in found]).amin(0) > 1e-5
            torch.testing.assert_close(value.double()[known], expected[known], rtol=0, atol=3e-6)
    model = AutoModelForCausalLM.from_pretrained(run.model_path)
    losses, num_tokens = 0.0, 0
    for row in read_dataset(run.path / "data" / "eval.arrow"):
        labels = torch.tensor(row["labels"])[1:]
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        num_tokens += int((labels != -100).sum())
    evaluated = [event["eval_loss"] for event in run.events() if event["event"] == "eval"]
    assert evaluated[-1] == pytest.approx(losses / num_tokens, rel=1e-4)
