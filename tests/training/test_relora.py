"""Runs of ReLoRA: steps beside a loop with PEFT's own merge, resumed, in two processes, saved plain, refused."""

import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import tunekit
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.training.plain import add_gradients, batches_of
from tests.training.test_base_parts import logits_of
from tests.training.test_resume import SAVED, STEPS, cut_off, events, recipe_for
from tunekit.errors import PlanError, RecipeError
from tunekit.estimates.memory.memory import TOKENIZER_BYTES
from tunekit.inference.inference_model import find_trained, load_trained
from tunekit.models.base_parts import load_plain
from tunekit.models.load import attach_adapter, load_model
from tunekit.probe.model import probe_model
from tunekit.recipe.sections.adapters import ReloraSection
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.run import Run
from tunekit.training.restarts import prune, with_restarts

RESTARTS = {"steps": 2, "warmup_steps": 1, "prune_ratio": 0.7}
ADAPTER = {"type": "lora", "rank": 4, "alpha": 6, "relora": RESTARTS}
RATE = 1e-2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("relora")
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    return folder


def asked(folder, *, method="sft", train=(), parallel=(), **adapter):
    recipe = recipe_for(folder, ADAPTER | adapter, **dict(parallel))
    recipe["train"] |= {"learning_rate": RATE, "warmup_steps": 1, **dict(train)}
    return recipe | {"method": method}


@pytest.fixture(scope="module")
def alone(folder):
    run = Run(made(asked(folder)))
    worked(run.path)
    return run


def test_the_rate_rises_again_after_a_restart_and_not_at_the_start():
    section = ReloraSection(steps=10, warmup_steps=4)
    rate = with_restarts(lambda step: 1 - step / 100, section)
    assert [rate(step) for step in range(11)] == pytest.approx([*(1 - step / 100 for step in range(10)), 0])
    assert [rate(step) for step in (11, 12, 13, 14, 19, 20, 22)] == pytest.approx(
        [0.89 / 4, 0.88 / 2, 0.87 * 3 / 4, 0.86, 0.81, 0, 0.78 / 2]
    )
    assert [section.num_restarts(steps) for steps in (10, 11, 20, 21)] == [0, 1, 1, 2]


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_smallest_states_go(ratio):
    values = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    pruned = values.clone()
    prune(pruned, ratio)
    kept = pruned != 0
    assert int(kept.sum()) == round((1 - ratio) * 100) and torch.equal(pruned[kept], values[kept])
    assert not kept.any() or kept.all() or values[kept].abs().min() > values[~kept].abs().max()


@pytest.mark.slow
def test_a_run_is_a_loop_with_pefts_merge(folder, alone):
    """Rows and clipping as the run had them; rates, merges and states by the paper, in a new adapter of PEFT's."""
    seed = alone.plan.recipe.train.seed
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = attach_adapter(base, alone.plan.recipe.adapter, seed=seed)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    parameters = [one for one in model.parameters() if one.requires_grad]
    states = [{"m": torch.zeros_like(one), "v": torch.zeros_like(one)} for one in parameters]
    losses, norms = [], []
    for taken, batch in enumerate(batches_of(alone, 8, 2)):
        model.zero_grad()
        losses.append(float(add_gradients(model, batch)))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        rate = RATE * min(1, taken) * (1 + math.cos(math.pi * max(0, taken - 1) / (STEPS - 1))) / 2
        rate *= 0 if taken in (2, 4) else 1
        step = taken + 1
        with torch.no_grad():
            for one, state in zip(parameters, states, strict=True):
                state["m"].mul_(0.9).add_(one.grad, alpha=0.1)
                state["v"].mul_(0.999).addcmul_(one.grad, one.grad, value=0.001)
                mean, square = state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.999**step)
                one -= rate * mean / (square.sqrt() + 1e-8)
        if step in (2, 4):
            model = get_peft_model(model.merge_and_unload(), LoraConfig(**settings))
            parameters = [one for one in model.parameters() if one.requires_grad]
            torch.manual_seed(seed + step)
            for name, one in model.named_parameters():
                if "lora_A" in name:
                    torch.nn.init.kaiming_uniform_(one, a=5**0.5)
            for values in (value for state in states for value in state.values()):
                smallest = values.flatten().abs().argsort()[: round(0.7 * values.numel())]
                values.view(-1)[smallest] = 0
    logs = events(alone, "log")
    assert [event["loss"] for event in logs] == pytest.approx(losses, rel=1e-4)
    assert [event["grad_norm"] for event in logs] == pytest.approx(norms, rel=1e-3)
    wanted = logits_of(model.merge_and_unload())
    assert (wanted - logits_of(AutoModelForCausalLM.from_pretrained(folder / "model"))).abs().max() > 0.05
    saved = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(saved, alone.model_path)), wanted, rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 2])
def test_a_run_that_was_cut_off_resumes_as_if_it_had_not_been(num, folder, alone):
    run = Run(made(asked(folder, parallel={"num_processes": num, "strategy": "single" if num == 1 else "ddp"})))
    in_processes(num, cut_off, run.path)
    (checkpoint,) = (run.path / "checkpoints").glob("checkpoint-*")
    assert {min(one.shape) for one in saved_weights(checkpoint).values()} == {8}, "with what was merged"
    early = logits_of(load_trained(find_trained(run, checkpoint=str(SAVED)), dtype="float32", device="cpu"))
    work_in(run.path, num)
    assert [event["step"] for event in events(run, "resume")] == [SAVED]
    expected, ours = saved_weights(alone.model_path), saved_weights(run.model_path)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0 if num == 1 else 1e-5)
    bare = logits_of(AutoModelForCausalLM.from_pretrained(folder / "model"))
    assert (early - bare).abs().max() > 1e-3


@pytest.mark.slow
def test_the_result_is_plain_lora_for_the_original_base(folder, alone, tmp_path):
    weights = saved_weights(alone.model_path)
    assert {min(one.shape) for one in weights.values()} == {12}
    vocab_size = probe_model(alone.plan.recipe.model).vocab_size
    planned = alone.plan.saving.result_bytes - TOKENIZER_BYTES * vocab_size
    assert planned == sum(one.nbytes for one in weights.values())
    (told,) = events(alone, "saved")
    assert told["logit_error"] < 1e-4
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    wanted = logits_of(PeftModel.from_pretrained(base, alone.model_path))
    ours = load_trained(find_trained(alone), dtype="float32", device="cpu")
    torch.testing.assert_close(logits_of(ours), wanted)
    tunekit.export(alone, tmp_path / "merged", kind="merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), wanted, rtol=1e-4, atol=1e-4)
    quiet = asked(folder, train={"max_steps": 1, "learning_rate": 1e-12})
    further = tunekit.train(quiet | {"model": str(alone.path), "adapter": "lora"})
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.testing.assert_close(logits_of(PeftModel.from_pretrained(base, further.model_path)), wanted)


@pytest.mark.slow
def test_a_bfloat16_base_is_merged_again_to_the_bit(folder):
    recipe = asked(folder)
    run = tunekit.train(recipe | {"model": {"path": recipe["model"], "dtype": "bfloat16"}})
    section = ModelSection(path=str(folder / "model"))
    models = []
    for _ in range(2):
        base = load_model(section, dtype="bfloat16", device="cpu")
        model = attach_adapter(base, run.plan.recipe.adapter, seed=7)
        load_plain(model, run.model_path)
        models.append(model.state_dict())
    assert all(torch.equal(one, models[1][name]) for name, one in models[0].items())
    (told,) = events(run, "saved")
    assert told["logit_error"] <= told["tolerance"]


def test_what_restarts_do_not_go_with_is_refused(folder):
    for strategy in ("fsdp2", "zero2"):
        with pytest.raises(PlanError, match=r"adapter.relora merges into unsharded weights; use ddp"):
            tunekit.plan(asked(folder, parallel={"num_processes": 2, "strategy": strategy}))
    with pytest.raises(PlanError, match=r"adapter.relora.steps: no restart in 6 steps, one is due after 6"):
        tunekit.plan(asked(folder, relora={"steps": 6, "warmup_steps": 0}))
    for optim in ("adamw_8bit", "muon"):
        with pytest.raises(PlanError, match=f"unquantized states, which {optim} does not have; set train.optim to"):
            tunekit.plan(asked(folder, train={"optim": optim}))
    with pytest.raises(PlanError, match=r"train.ema_decay averages matrices that adapter.relora restarts"):
        tunekit.plan(asked(folder, train={"ema_decay": 0.9}))
    with pytest.raises(RecipeError, match=r"relora.warmup_steps: must be less than steps, got 2 and 2"):
        tunekit.plan(asked(folder, relora={"steps": 2, "warmup_steps": 2}))
    for option in ({"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "pissa"}):
        (name,) = option
        with pytest.raises(RecipeError, match=f"adapter.{name}: unsupported with relora, which merges plain LoRA"):
            tunekit.plan(asked(folder, **option))
    with pytest.raises(RecipeError, match=r"adapter.relora: merges into weights that are not quantized"):
        tunekit.plan(asked(folder, type="qlora"))
