"""Runs of AdaLoRA: steps beside a loop with PEFT's own allocator, resumed, in two processes, exported, refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from peft import AdaLoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.plain import add_gradients, batches_of
from tests.training.test_base_parts import logits_of
from tests.training.test_resume import STEPS, cut_off, recipe_for
from tunekit.errors import PlanError, RecipeError
from tunekit.estimates.memory.states import num_trainable_params, trained_bytes
from tunekit.inference.inference_model import find_trained, load_trained
from tunekit.methods.run_trainer import run_trainer
from tunekit.models.load import attach_adapter, load_model, num_trained
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import AdaloraAdapter
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run
from tunekit.training.rank_allocation import STATES, RankAllocation, add_orthogonality

ADAPTER = {"type": "adalora", "init_r": 6, "target_r": 3, "tinit": 1, "tfinal": 1, "deltaT": 2, "orth_reg_weight": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adalora")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def asked(folder, adapter=ADAPTER, **parallel):
    recipe = recipe_for(folder, adapter, **parallel)
    recipe["train"] |= {"learning_rate": 3e-2}
    return recipe


@pytest.fixture(scope="module")
def alone(folder):
    run = Run(made(asked(folder)))
    worked(run.path)
    return run


def test_the_loss_of_directions_and_its_gradients_are_pefts(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    config = AdaLoraConfig(
        init_r=4, target_r=2, total_step=9, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"
    )
    model, ids = get_peft_model(base, config, autocast_adapter_dtype=False), torch.arange(9)[None]
    losses, gradients = [], []
    for weight in (0.3, 0.0):
        model.peft_config["default"].orth_reg_weight = weight
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
    more = add_orthogonality(model.base_model.model, 0.3)
    torch.testing.assert_close(losses[1] + more, losses[0])
    ours = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    torch.testing.assert_close(ours, gradients[0])


@pytest.mark.slow
def test_a_run_is_a_loop_with_pefts_allocator(folder, alone):
    """Rows, rates and clipping as the run had them; losses and ranks as PEFT's `update_and_allocate` leaves them."""
    from transformers import get_scheduler

    plan = alone.plan
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    section = plan.recipe.adapter
    model = attach_adapter(base, section, seed=plan.recipe.train.seed)
    config = model.peft_config["default"]
    for name in ("tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight"):
        setattr(config, name, dict(section)[name])
    config.total_step = STEPS
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-2, weight_decay=plan.recipe.train.weight_decay)
    schedule = get_scheduler("cosine", optimizer, plan.schedule.warmup_steps, STEPS)
    losses = []
    for step, batch in enumerate(batches_of(alone, 8, 2), start=1):
        optimizer.zero_grad()
        task = add_gradients(model, batch)
        config.orth_reg_weight = 0.1
        losses.append(float(task + add_orthogonality(model.base_model.model, 0.1)))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        model.base_model.update_and_allocate(step)
    logged = [event["loss"] for event in alone.events() if event["event"] == "log"]
    assert logged == pytest.approx(losses, rel=1e-4)
    pattern = json.loads((alone.model_path / "adapter_config.json").read_text())["rank_pattern"]
    assert pattern == {name.replace(".default", ""): ranks for name, ranks in config.rank_pattern.items()}
    assert sum(map(sum, pattern.values())) == 3 * 14


@pytest.mark.slow
def test_a_run_that_was_cut_off_resumes_to_the_bit(folder, alone):
    run = Run(made(asked(folder)))
    in_processes(1, cut_off, run.path)
    (checkpoint,) = (run.path / "checkpoints").glob("checkpoint-*")
    assert {min(value.shape) for name, value in load_file(checkpoint / "adapter_model.safetensors").items()} == {6, 1}
    assert (checkpoint / STATES).is_file()
    worked(run.path)
    expected, ours = saved_weights(alone.model_path), saved_weights(run.model_path)
    assert ours.keys() == expected.keys() and all(torch.equal(value, expected[name]) for name, value in ours.items())
    assert [event["loss"] for event in run.events() if event["event"] == "log"][-1] == [
        event["loss"] for event in alone.events() if event["event"] == "log"
    ][-1]


class Optimizing:
    """Base of the mixin here: a trainer whose optimizer has nothing to keep."""

    def __init__(self, model):
        self.model, self.args = model, SimpleNamespace(should_save=True, device="cpu")

    def add_callback(self, callback):
        self.callback = callback

    def _save_optimizer_and_scheduler(self, folder):
        pass

    def _load_optimizer_and_scheduler(self, folder):
        pass


def allocating(folder):
    adapter = AdaloraAdapter(**ADAPTER | {"tinit": 0})
    base = load_model(ModelSection(path=str(folder / "model")), dtype="float32", device="cpu")
    trainer = run_trainer(Optimizing)(attach_adapter(base, adapter, seed=0))
    RankAllocation(trainer, adapter, 9)
    return trainer


def take_step(trainer, step, ids):
    trainer.model.zero_grad()
    trainer.model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad.sign()
    trainer.callback.on_optimizer_step(None, SimpleNamespace(global_step=step))


def test_a_resumed_run_takes_ranks_by_the_importance_of_all_steps_before(folder, tmp_path):
    rows = torch.arange(54).reshape(6, 1, 9)
    whole, resumed = allocating(folder), allocating(folder)
    for step in range(5):
        take_step(whole, step, rows[step])
    whole._save_optimizer_and_scheduler(str(tmp_path))
    resumed._load_optimizer_and_scheduler(str(tmp_path))
    resumed.model.load_state_dict(whole.model.state_dict())
    for trainer in (whole, resumed):
        take_step(trainer, 5, rows[5])
    expected = {name: value for name, value in whole.model.state_dict().items() if "lora_E" in name}
    assert sum(int((value == 0).sum()) for value in expected.values()) > 0, "ranks were taken"
    weights = resumed.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one(folder, alone):
    run = Run(made(asked(folder, num_processes=2, strategy="ddp")))
    work_in(run.path, 2)
    torch.testing.assert_close(saved_weights(run.model_path), saved_weights(alone.model_path), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_what_is_saved_has_the_ranks_that_are_left_and_answers_alike_everywhere(folder, alone, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    before = logits_of(base)
    wanted = logits_of(PeftModel.from_pretrained(base, alone.model_path))
    assert (wanted - before).abs().max() > 1e-2
    ranks = [len(value) for name, value in saved_weights(alone.model_path).items() if "lora_A" in name]
    assert sum(ranks) == 3 * 14
    ours = load_trained(find_trained(alone), dtype="float32", device="cpu")
    torch.testing.assert_close(logits_of(ours), wanted)
    tunekit.export(alone, tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), wanted, rtol=0, atol=1e-5)
    further = asked(folder) | {"model": str(alone.model_path)}
    with pytest.raises(
        PlanError, match="a trained AdaLoRA adapter has lost the ranks that further training would reallocate"
    ):
        tunekit.plan(further)


def test_the_number_that_a_bfloat16_model_divides_by_is_not_trained(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    model = attach_adapter(base, AdaloraAdapter(), seed=0)
    trained = {name.split(".")[-2] for name, one in model.named_parameters() if one.requires_grad}
    assert trained == {"lora_A", "lora_B", "lora_E"}


def test_plans_count_what_is_held_for_the_distribution_of_ranks(folder):
    section, adapter = ModelSection(path=str(folder / "model")), AdaloraAdapter(init_r=6, target_r=3)
    model = attach_adapter(load_model(section, dtype="float32", device="cpu"), adapter, seed=0)
    facts, tuner = probe_model(section), model.base_model
    ids = torch.arange(9)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    tuner.peft_config["default"].total_step = 9
    tuner.update_and_allocate(1)
    scores = [*(vars(tuner.rankallocator)[kind] for kind in ("ipt", "exp_avg_ipt", "exp_avg_unc"))]
    held = [one for name, one in model.named_parameters() if "lora_" in name or "ranknum" in name]
    planned = trained_bytes(probe_model(section), adapter, "sgd")
    assert planned[0] == sum(one.nbytes for one in held)
    assert planned[1] == sum(one.nbytes for kind in scores for one in kind.values())
    assert num_trainable_params(facts, adapter) == num_trained(model)


def test_what_allocation_does_not_go_with_is_refused(folder):
    for strategy in ("fsdp2", "zero2"):
        with pytest.raises(PlanError, match="adalora needs unsharded gradients to reallocate ranks; use ddp"):
            tunekit.plan(asked(folder, num_processes=2, strategy=strategy))
    with pytest.raises(PlanError, match=r"adapter.tinit, adapter.tfinal: 6 steps together, but the run has 6"):
        tunekit.plan(asked(folder, {**ADAPTER, "tinit": 5}))
    with pytest.raises(RecipeError, match=r"target_r: must be less than init_r, got 6 and 6"):
        tunekit.plan(asked(folder, {**ADAPTER, "target_r": 6}))
    averaged = asked(folder)
    averaged["train"] |= {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    with pytest.raises(PlanError, match="an average of weights does not keep"):
        tunekit.plan(averaged)
