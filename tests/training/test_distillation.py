"""Distillation on a tiny model: its loss by its definition in float64, what it learns, and which teacher it takes."""

import json

import pytest
import torch

import tunekit
from tests.tiny import make_tokenizer, save_tiny_model
from tests.training.watching import cut_off_and_resumed, last_words, logged, seeing
from tunekit.api import verbs
from tunekit.errors import ModelError, PlanError, RecipeError
from tunekit.models.load import keep_trained
from tunekit.runs.small_files import Place
from tunekit.training.build_trainer import build_trainer, load_adapted

RECIPE = """
model: model
data:
  train: prompts.jsonl
  eval: prompts.jsonl
  max_length: 64
method:
  type: distillation
  teacher: {teacher}
  max_completion_length: 12
adapter: {adapter}
train:
  max_steps: 10
  global_batch_size: 8
  learning_rate: 1e-2
  save_steps: 4
  eval_steps: 10
output:
  sample_prompts: []
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "teacher", hidden=64, seed=5)
    rows = [{"prompt": [{"role": "user", "content": f"double {n}"}]} for n in range(12)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def recipe(folder, adapter="lora", teacher="teacher"):
    path = folder / f"{adapter}.yaml"
    path.write_text(RECIPE.format(adapter=adapter, teacher=teacher))
    assert len(path.read_text().strip().splitlines()) <= 20
    return path


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_the_divergence_from_a_teacher_falls(here, adapter):
    run = tunekit.train(recipe(here, adapter))
    assert len(logged(run)) == 10
    first, last = (event["eval_loss"] for event in logged(run, "eval"))
    assert last < 0.9 * first
    assert run.plan.memory.parts["reference"] == 4 * sum(
        tensor.numel() for tensor in saved_model(here / "teacher").state_dict().values()
    )
    assert (run.model_path / "README.md").read_text().count("divergence from the teacher") == 1


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_with_the_same_answers(here):
    whole = tunekit.train(recipe(here))
    resumed = cut_off_and_resumed(recipe(here), after=9)
    mine, its = last_words(whole), last_words(resumed)
    for name in ("loss", "grad_norm", "completions/mean_length"):
        values = [mine[step][name] for step in range(1, 11)]
        assert [its[step][name] for step in range(1, 11)] == pytest.approx(values, rel=1e-4, abs=1e-6), name


def saved_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.sample(1)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_loss_is_the_divergence_by_its_definition_in_float64(here, beta):
    """The mean over tokens of the divergence of a mixture from both, or of one from the other (arXiv 2306.13649)."""
    from trl import DistillationTrainer

    temperature, seen = 0.7, []

    def see(trainer, loss):
        weights = {name: value.detach().double() for name, value in trainer.model.named_parameters()}
        seen.append((weights, dict(trainer._buffered_inputs[0]), float(loss)))

    changes = [f"method.beta={beta}", f"method.generation.temperature={temperature}", "train.max_steps=2"]
    with seeing(DistillationTrainer, "training_step", see):
        tunekit.train(recipe(here, "full"), [*changes, "train.warmup_steps=0", "data.eval=null"])
    model, teacher = saved_model(here / "model"), saved_model(here / "teacher")
    for weights, inputs, loss in seen:
        model.load_state_dict(weights, strict=False)
        total, num_tokens = 0.0, 0
        for row in range(len(inputs["prompt_ids"])):
            prompt, answer = (
                inputs[f"{part}_ids"][row][inputs[f"{part}_mask"][row].bool()].tolist()
                for part in ("prompt", "completion")
            )
            own, its = (
                (one(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
                for one in (model, teacher)
            )
            num_tokens += len(answer)
            total += divergence(own, its, beta).item()
        assert loss == pytest.approx(total / num_tokens, abs=2e-6)


def divergence(own, its, beta):
    """Of log-probabilities, summed over tokens."""
    if beta == 0:
        return (its.exp() * (its - own)).sum()
    if beta == 1:
        return (own.exp() * (own - its)).sum()
    mixed = ((1 - beta) * own.exp() + beta * its.exp()).log()
    return (beta * its.exp() * (its - mixed) + (1 - beta) * own.exp() * (own - mixed)).sum()


def test_the_loss_of_answers_has_its_products_in_the_type_of_the_plan(here):
    run = verbs.make_run(recipe(here, "full"), ["model={path: model, dtype: bfloat16}", "data.eval=null"])
    model = load_adapted(run.plan, device="cpu", run=run)
    trainer = build_trainer(
        run, run.plan, run.plan.schedule, model=model, tokenizer=make_tokenizer(), callbacks=[], place=Place()
    )
    keep_trained(trainer.model)
    types = []
    for part in (trainer.model, trainer.teacher_model):
        products = next(module for name, module in part.named_modules() if name.endswith("up_proj"))
        products.register_forward_hook(lambda module, given, output: types.append(output.dtype))
    batch = {"ids": torch.arange(8).reshape(2, 4), "mask": torch.ones(2, 4, dtype=torch.long)}
    inputs = {f"{part}_{kind}": value for part in ("prompt", "completion") for kind, value in batch.items()}
    trainer.compute_loss(trainer.model, inputs)
    assert types == [torch.bfloat16] * 2, "the model's and the teacher's pass"


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_products_are_computed_in_the_type_of_the_plan(here, adapter):
    from trl import DistillationTrainer

    seen = []

    def see(trainer, hidden):
        seen.append(torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"))

    with seeing(DistillationTrainer, "_get_last_hidden_state", see):
        changes = ["model={path: model, dtype: bfloat16}", "train.max_steps=1", "data.eval=null"]
        run = tunekit.train(recipe(here, adapter), changes)
    assert (run.plan.dtype, run.plan.autocast) == ("bfloat16", True)
    assert seen == [torch.bfloat16] * 2, "the model's and the teacher's pass"


def test_a_model_that_learns_from_itself_has_nothing_to_learn(here):
    run = tunekit.train(recipe(here, teacher="model"), ["train.max_steps=1", "data.eval=null"])
    assert logged(run)[0]["loss"] == pytest.approx(0, abs=1e-6)


def test_a_teacher_of_another_vocabulary_or_tokenizer_is_refused_before_anything_is_trained(here, tmp_path):
    from transformers import PreTrainedTokenizerFast

    save_tiny_model(tmp_path / "other")
    backend = json.loads(make_tokenizer().backend_tokenizer.to_str())
    vocabulary = backend["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "backend.json").write_text(json.dumps(backend))
    swapped = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "backend.json"), eos_token="<|im_end|>")
    swapped.save_pretrained(tmp_path / "other")
    what = "has a different tokenizer: [2-9] of 259 tokens have another id"
    with pytest.raises(ModelError, match=rf"method\.teacher: '.*other' {what}"):
        verbs.make_run(recipe(here, teacher=tmp_path / "other"))
    with pytest.raises(ModelError, match=what):
        verbs.check(recipe(here, teacher=tmp_path / "other"))
    with pytest.raises(PlanError, match=r"method\.teacher: pico has a vocabulary of [\d,]+, but model of 259"):
        verbs.plan(recipe(here, teacher="pico"))
    with pytest.raises(ModelError, match=r"method\.teacher: no folder './nowhere'"):
        verbs.plan(recipe(here, teacher="./nowhere"))
    with pytest.raises(
        RecipeError, match=r"method\.teacher\.dtype: not configurable: the teacher uses the model's setting"
    ):
        verbs.plan(recipe(here), ["method.teacher={path: teacher, dtype: bfloat16}"])
