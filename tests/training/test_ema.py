"""Exponential moving averages of weights: real runs against torch's `AveragedModel`, cut off, divided and exported."""

from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training import test_learning_rates
from tests.training.engines import made, work_in, worked
from tests.training.test_resume import STEPS, cut_off
from tunekit.data.prepare import read_dataset
from tunekit.estimates.memory.states import states_bytes, trained_tensors
from tunekit.methods import averaging
from tunekit.probe.model import probe_model
from tunekit.runs.run import Run

DECAY = 0.7
LORA = {"type": "lora", "rank": 4, "modules_to_save": ["embed_tokens"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ema")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def recipe_for(folder, adapter="full", train=None, **parallel):
    recipe = test_learning_rates.recipe_for(
        folder, adapter, {"ema_decay": DECAY, "eval_steps": 1, **(train or {})}, **parallel
    )
    recipe["data"]["eval"] = str(folder / "rows.jsonl")
    return recipe


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def logged(run, kind, name):
    return [event[name] for event in run.events() if event["event"] == kind]


@pytest.fixture
def reference(monkeypatch):
    """The average that torch's own class keeps of the trained model."""
    kept, after = [], averaging.MovingAverage._after_step

    def update(self, *others):
        if not kept:
            kept.append(AveragedModel(self.trainer.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))
        kept[0].update_parameters(self.trainer.model)
        after(self, *others)

    monkeypatch.setattr(averaging.MovingAverage, "_after_step", update)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adafactor", "sgd", "muon", "tunekit_adamw_8bit"])
def test_the_result_is_that_of_torchs_averaged_model_and_training_is_as_without(optim, folder, reference):
    run = Run(made(recipe_for(folder, "full", {"optim": optim})))
    worked(run.path)
    average = dict(reference[0].module.named_parameters())
    assert_same(saved_weights(run.model_path), {name: average[name].detach() for name in saved_weights(run.model_path)})
    without = Run(made(recipe_for(folder, "full", {"optim": optim, "ema_decay": None})))
    worked(without.path)
    assert logged(run, "log", "loss") == logged(without, "log", "loss")
    assert logged(run, "eval", "eval_loss")[2:] != logged(without, "eval", "eval_loss")[2:]


@pytest.mark.slow
def test_the_last_evaluation_is_of_the_saved_average(folder):
    run = Run(made(recipe_for(folder)))
    worked(run.path)
    model = AutoModelForCausalLM.from_pretrained(run.model_path)
    losses, num_tokens = 0.0, 0
    for row in read_dataset(run.path / "data" / "eval.arrow"):
        labels = torch.tensor(row["labels"])[1:]
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        losses += torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum").item()
        num_tokens += int((labels != -100).sum())
    assert logged(run, "eval", "eval_loss")[-1] == pytest.approx(losses / num_tokens, rel=1e-4)
    assert_same(saved_weights(run.path / "checkpoints" / f"checkpoint-{STEPS}"), saved_weights(run.model_path))


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", LORA], ids=["full", "lora"])
def test_a_run_holds_and_saves_what_is_planned(adapter, folder):
    run = tunekit.train(recipe_for(folder, adapter))
    trained = trained_tensors(probe_model(run.recipe.model), run.recipe.adapter)
    average = sum(4 * torch.Size(shape).numel() for shape in trained.values())
    planned = states_bytes(trained, "adamw_torch_fused") + average
    assert run.plan.memory.parts["optimizer"] == run.result()["held_bytes"]["optimizer"] == planned
    states = torch.load(run.path / "checkpoints" / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)["state"]
    assert sum(value.nbytes for state in states.values() for value in state.values()) == planned
    without = tunekit.plan(recipe_for(folder, adapter, {"ema_decay": None})).saving.checkpoint_bytes
    assert run.plan.saving.checkpoint_bytes == without + average
    (reason,) = (reason for reason in run.plan.reasons if reason.topic == "average of weights")
    assert reason.why.startswith("decay 0.7, over about 3 steps")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "num", "parallel"),
    [
        ("full", 1, {}),
        (LORA, 1, {}),
        ("full", 2, {"strategy": "ddp"}),
        ("full", 2, {"strategy": "fsdp2"}),
        ({"type": "lora", "rank": 4}, 2, {"strategy": "fsdp2"}),
    ],
    ids=["full", "lora", "ddp", "fsdp2", "fsdp2, lora"],
)
def test_a_run_that_was_cut_off_goes_on_exactly(adapter, num, parallel, folder):
    recipes = [recipe_for(folder, adapter, num_processes=num, **parallel) for _ in range(2)]
    alone, run = (Run(made(recipe)) for recipe in recipes)
    work_in(alone.path, num)
    in_processes(num, cut_off, run.path)
    work_in(run.path, num)
    assert_same(saved_weights(run.model_path), saved_weights(alone.model_path))
    assert logged(run, "eval", "eval_loss")[-1] == logged(alone, "eval", "eval_loss")[-1]


def held(trainer):
    """Bytes of the average that a process holds, and whether parameters are divided."""
    states = trainer.optimizer.optimizer.state.values()
    local = sum(averaging._local(state[averaging.EMA]).nbytes for state in states)
    return local, any(isinstance(module, FSDPModule) for module in trainer.model.modules())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp2", "reshard_after_forward": True},
        {"strategy": "fsdp2", "reshard_after_forward": False},
        {"tp_size": 2},
    ],
    ids=["ddp", "fsdp2", "fsdp2, no reshard", "tensor parallel"],
)
def test_two_processes_take_the_steps_and_evaluations_of_one(layout, folder):
    """Adam's steps magnify what summing in another order rounds, so SGD takes them.

    No evaluation counts as better, so that training goes on from some without a checkpoint between.
    """
    train = {"optim": "sgd", "learning_rate": 0.5, "greater_is_better": True}
    alone = Run(made(recipe_for(folder, "full", train)))
    (whole, _) = worked(alone.path, held)
    run = Run(made(recipe_for(folder, "full", train, num_processes=2, **layout)))
    seen = work_in(run.path, 2, held)
    if "strategy" in layout and layout["strategy"] == "fsdp2":
        assert sum(part for part, _ in seen) == whole
        assert all(divided for _, divided in seen)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=1e-6)
    for kind, name in (("log", "loss"), ("eval", "eval_loss")):
        torch.testing.assert_close(logged(run, kind, name), logged(alone, kind, name), rtol=0, atol=1e-5)


def test_weights_whose_first_gradient_comes_late_are_averaged_from_where_they_were():
    class Trainer:
        model = torch.nn.ModuleDict({"early": torch.nn.Linear(2, 2), "late": torch.nn.Linear(2, 2)})

    model = Trainer.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    moving = averaging.MovingAverage(Trainer(), optimizer, DECAY)
    expected = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(5):
        loss = model["early"](torch.ones(2)).sum() + (model["late"](torch.ones(2)).sum() if step > 1 else 0)
        loss.backward()
        optimizer.step()
        expected.update_parameters(model)
        optimizer.zero_grad()
        optimizer.step()  # without gradients: a step that is skipped
        trained = [weight.detach().clone() for weight in model.parameters()]
        moving.eval()
        assert all(map(torch.equal, model.parameters(), expected.module.parameters()))
        moving.train()
        assert all(map(torch.equal, model.parameters(), trained))


def test_weights_that_fsdp2_gathered_to_evaluate_are_not_trained_on():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = fully_shard(torch.nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        moving = averaging.MovingAverage(SimpleNamespace(model=model), optimizer, DECAY)
        for _ in range(2):
            model(torch.eye(4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = model.weight.full_tensor().T.clone()
        with torch.no_grad():
            moving.eval()
            averaged = model(torch.eye(4))
            moving.train()
            assert torch.equal(model(torch.eye(4)), trained)
        assert not torch.equal(averaged, trained)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_a_model_trains_on_from_an_average_and_an_edited_decay_is_refused(folder):
    run = tunekit.train(recipe_for(folder, LORA, {"max_steps": 2}))
    again = recipe_for(folder, {"type": "lora", "rank": 4, "modules_to_save": ["embed_tokens"]}, {"max_steps": 2})
    again["model"] = str(run.path)
    assert tunekit.train(again).result()["first_eval_loss"] == pytest.approx(run.result()["eval_loss"], rel=1e-5)
    with pytest.raises(
        tunekit.TunekitError, match=r"train\.ema_decay.*the checkpoint either has averaged weights or none"
    ):
        tunekit.resume(run.path, ["train.ema_decay=0.9", "train.max_steps=4"])
