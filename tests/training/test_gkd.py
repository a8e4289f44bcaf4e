"""Generalized knowledge distillation: its loss by plain transformers and TRL's formula, and what it trains on."""

import json

import pytest
import torch

import tunekit
from tests.tiny import make_tokenizer, save_jsonl, save_tiny_model
from tests.training.watching import assert_resumed_alike, logged
from tunekit.api import verbs
from tunekit.errors import ModelError, PlanError, RecipeError

RECIPE = """
model: model
data: {train: rows.jsonl, eval: rows.jsonl, max_length: 96}
method: {type: gkd, teacher: teacher, max_completion_length: 12}
adapter: full
train: {max_steps: 10, global_batch_size: 8, learning_rate: 1e-2, save_steps: 4, eval_steps: 10}
output: {sample_prompts: []}
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gkd")
    save_tiny_model(folder / "model")
    save_tiny_model(folder / "teacher", hidden=64, seed=5)
    turns = [
        [
            ("user", f"double {n}"),
            ("assistant", f"it is {2 * n}"),
            ("user", "sure?"),
            ("assistant", "yes " * (n % 5 + 1)),
        ]
        for n in range(22)
    ]
    rows = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in turns]
    save_jsonl(folder / "rows.jsonl", rows)
    (folder / "texts.jsonl").write_text('{"text": "a text"}\n' * 8)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", ["lora", "full", "qlora"])
def test_the_divergence_from_a_teacher_falls(recipe, adapter):
    run = tunekit.train(recipe, [f"adapter={adapter}"])
    first, last = (event["eval_loss"] for event in logged(run, "eval"))
    assert last < 0.9 * first
    shares = {step["on_policy"] for step in logged(run)}
    assert shares == {0.0, 1.0}, "some steps on rows and some on completions"
    assert all(("completions/mean_length" in step) == bool(step["on_policy"]) for step in logged(run))


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on_with_the_same_completions(recipe):
    assert_resumed_alike(recipe, ("loss", "grad_norm", "on_policy"), after=9)


def plain(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("lmbda", "beta", "temperature", "kd_ratio"),
    [(1, 0.0, 1.0, 1.0), (0, 0.3, 0.7, 1.0), (1, 0.3, 0.7, 1.0), (0, 1.0, 1.0, 1.0), (0, 0.0, 2.0, 0.25)],
)
def test_loss_and_gradients_are_those_of_trls_formula_on_plain_logits_in_float64(
    batches_of, lmbda, beta, temperature, kd_ratio
):
    from trl.experimental.gkd import GKDTrainer as TRLTrainer

    settings = {"lmbda": lmbda, "beta": beta, "temperature": temperature, "kd_ratio": kd_ratio}
    method = {"type": "gkd", "teacher": "teacher", **settings}
    batches = batches_of(f"method={json.dumps(method)}")
    model, teacher = plain("model"), plain("teacher")
    assert len(batches) == 2
    for weights, inputs, loss, grads in batches:
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        labels = inputs.pop("labels")[:, 1:]
        own = model(**inputs).logits[:, :-1]
        with torch.no_grad():
            its = teacher(**inputs).logits[:, :-1]
        divergence = TRLTrainer.generalized_jsd_loss(own, its, labels, beta=beta, temperature=temperature)
        likelihood = torch.nn.functional.cross_entropy(own.flatten(0, 1), labels.flatten())
        expected = kd_ratio * divergence + (1 - kd_ratio) * likelihood
        expected.backward()
        assert loss == pytest.approx(expected.item(), abs=2e-6)
        for name, parameter in model.named_parameters():
            assert torch.allclose(grads[name], parameter.grad, atol=2e-6, rtol=1e-4), name


def test_the_last_trained_turn_gives_way_to_a_completion(recipe, batches_of):
    rows = [json.loads(line)["messages"] for line in recipe.with_name("rows.jsonl").read_text().splitlines()]
    tokenizer = make_tokenizer()
    prompts = {
        tuple(tokenizer.apply_chat_template(row[:-1], add_generation_prompt=True)["input_ids"]): row for row in rows
    }
    for _, inputs, _, _ in batches_of("method.lmbda=1"):
        for ids, labels, is_read in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
            trained = (labels != -100) & is_read.bool()
            start = int(trained.nonzero()[0])
            assert tuple(ids[:start].tolist()) in prompts
            assert trained[start : int(is_read.sum())].all() and 1 <= int(trained.sum()) <= 12


@pytest.mark.slow
def test_packed_rows_have_the_losses_of_padded_ones(recipe):
    changes = ["method={type: gkd, teacher: teacher, lmbda: 0}", "train.max_steps=1", "train.global_batch_size=22"]
    padded = tunekit.train(recipe, changes)
    packed = tunekit.train(recipe, [*changes, "data.packing=true", "train.global_batch_size=20", "data.max_length=192"])
    assert packed.plan.padding_free and not padded.plan.padding_free
    assert logged(packed, "eval")[0]["eval_loss"] == pytest.approx(logged(padded, "eval")[0]["eval_loss"], abs=1e-6)


def test_a_model_that_learns_from_itself_has_nothing_to_learn(recipe):
    run = tunekit.train(recipe, ["method.teacher=model", "train.max_steps=1", "data.eval=null"])
    assert logged(run)[0]["loss"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "error", "problem"),
    [
        (["data.packing=true"], RecipeError, r"data\.packing: unsupported with method gkd unless method\.lmbda is 0"),
        (["data.padding_free=true"], RecipeError, r"data\.padding_free: unsupported with method gkd unless"),
        (["method.kd_ratio=0.5"], RecipeError, r"method\.kd_ratio: unsupported unless method\.lmbda is 0"),
        (["data.loss_on=all"], RecipeError, r"data\.loss_on: unsupported with method gkd unless"),
        (["method.lmbda=0"], RecipeError, r"method\.max_completion_length: has no effect with lmbda 0"),
        (["adapter=prompt_tuning"], RecipeError, r"adapter\.type: prompt_tuning is unsupported with method gkd"),
        (["method.trainer_args={loss_type: dft}"], RecipeError, "loss_type.*not used by the divergence"),
        (["data.train=texts.jsonl", "data.eval=null"], PlanError, r"method\.lmbda: completions need rows with prompts"),
        (["parallel={num_processes: 2, cp_size: 2}"], PlanError, "gkd does not support split sequences"),
        (["train.tiled_mlp=true"], PlanError, "tiled MLPs are untested with gkd"),
        (["method.teacher=pico"], PlanError, r"method\.teacher: pico has a vocabulary of"),
        (["method.teacher=./nowhere"], ModelError, r"method\.teacher: no folder './nowhere'"),
    ],
)
def test_what_cannot_be_done_is_refused_in_the_plan(recipe, changes, error, problem):
    with pytest.raises(error, match=problem):
        verbs.plan(recipe, changes)


def test_a_plan_without_completions_has_no_phase_of_generation(recipe):
    default = "method={type: gkd, teacher: teacher, lmbda: 0}"
    assert "generation" not in verbs.plan(recipe, [default]).memory.phases
    assert "generation" in verbs.plan(recipe).memory.phases
