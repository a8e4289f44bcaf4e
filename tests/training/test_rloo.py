"""RLOO on a tiny model: with each adapter, cut off and resumed, and its loss against the paper's in float64."""

import json
from io import StringIO

import pytest
import torch
from rich.console import Console

import tunekit
from tests.tiny import make_tokenizer, save_tiny_model
from tests.training.watching import cut_off_and_resumed, last_words, logged, seeing
from tunekit.api import verbs
from tunekit.display.console import summary
from tunekit.errors import TunekitError

RECIPE = """
model: model
data:
  train: prompts.jsonl
  max_length: 64
method:
  type: rloo
  rewards: [rloo_rewards:low]
  num_generations: 4
  max_completion_length: 12
adapter: {adapter}
train:
  max_steps: 10
  global_batch_size: 8
  learning_rate: 1e-2
  save_steps: 4
output:
  sample_prompts: []
"""
"""Four steps are an epoch and a half, so that a run resumed from the eighth begins in another one."""

REWARDS = """
def low(completions, **columns):
    return [sum(letter < "@" for letter in completion) / 16 for completion in completions]
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rloo")
    save_tiny_model(folder / "model")
    (folder / "rloo_rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"double {n}", "answer": 2 * n} for n in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def here(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    return workspace


def shown(run):
    console = Console(width=200, record=True, file=StringIO())
    console.print(summary(run.result(), run))
    return console.export_text()


def recipe(folder, adapter="lora"):
    path = folder / f"{adapter}.yaml"
    path.write_text(RECIPE.format(adapter=adapter))
    assert len(path.read_text().strip().splitlines()) <= 20
    return path


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_a_run_that_was_cut_off_goes_on_with_the_same_answers(here, adapter):
    whole = tunekit.train(recipe(here, adapter))
    assert len(logged(whole)) == 10
    assert all(0 < event["generation_seconds"] < event["step_seconds"] for event in logged(whole))
    resumed = cut_off_and_resumed(recipe(here, adapter), after=9)
    mine, its = last_words(whole), last_words(resumed)
    for name in ("reward", "loss", "grad_norm", "kl", "completions/mean_length"):
        values = [mine[step][name] for step in range(1, 11)]
        assert [its[step][name] for step in range(1, 11)] == pytest.approx(values, rel=1e-4, abs=1e-6), name
    assert mine[1]["kl"] == pytest.approx(0, abs=1e-6)
    assert whole.result()["measures"]["reward"] == [mine[1]["reward"], mine[10]["reward"]]
    assert "progress shows in the reward" in (resumed.model_path / "README.md").read_text()
    share = whole.result()["generation_seconds"] / whole.result()["step_seconds"]
    planned = resumed.plan.speed.generation_share
    assert whole.plan.speed.generation_share is None and 0 < share < 1
    assert planned.low == pytest.approx(share) == planned.high, "the plan knows it from the run before"
    own = resumed.result()["generation_seconds"] / resumed.result()["step_seconds"]
    assert f"{own:.0%} of the step time (planned {share:.0%})" in shown(resumed)


def test_loss_and_gradient_are_those_of_the_paper_in_float64(here):
    """Leave-one-out advantages of rewards less the divergence, and clipped ratios of whole answers (arXiv 2402.14740).

    The second of two steps on the same answers has ratios that are not 1, and the temperature is not 1 either.
    """
    from transformers import AutoModelForCausalLM
    from trl import RLOOTrainer

    beta, temperature, epsilon = 0.3, 0.7, 0.05
    changes = [f"method.beta={beta}", f"method.generation.temperature={temperature}", f"method.epsilon={epsilon}"]
    changes += ["method.num_iterations=2", "train.max_steps=4", "train.warmup_steps=0"]
    seen = []

    def see(trainer, loss):
        gradients = {name: value.grad.double() for name, value in trainer.model.named_parameters()}
        weights = {name: value.detach().double() for name, value in trainer.model.named_parameters()}
        seen.append((weights, dict(trainer._buffered_inputs[0]), float(loss), gradients))

    with seeing(RLOOTrainer, "training_step", see):
        tunekit.train(recipe(here, "full"), changes)
    base = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(here / "model", dtype=torch.float64)
    tokenizer, shares = make_tokenizer(), []

    def log_prob(model, prompt, answer):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / temperature
        return logits.log_softmax(-1)[range(len(answer)), answer].sum()

    for step, (weights, inputs, loss, gradients) in enumerate(seen):
        rows = [
            [ids[mask.bool()].tolist() for ids, mask in zip(inputs[f"{part}_ids"], inputs[f"{part}_mask"], strict=True)]
            for part in ("prompt", "completion")
        ]
        if step % 2 == 0:
            # An optimizer's step comes after the gradient: these are the weights that gave the answers.
            model.load_state_dict(weights, strict=False)
            with torch.no_grad():
                old = [float(log_prob(model, *row)) for row in zip(*rows, strict=True)]
                reference = [float(log_prob(base, *row)) for row in zip(*rows, strict=True)]
            texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in rows[1]]
            rewards = [sum(letter < "@" for letter in text) / 16 for text in texts]
            judged = [r - beta * (o - b) for r, o, b in zip(rewards, old, reference, strict=True)]
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        total = 0.0
        for index, prompt in enumerate(rows[0]):
            others = [judged[at] for at, other in enumerate(rows[0]) if other == prompt and at != index]
            assert len(others) == 3
            advantage = judged[index] - sum(others) / len(others)
            ratio = (log_prob(model, prompt, rows[1][index]) - old[index]).exp()
            clipped = ratio.clamp(1 - epsilon, 1 + epsilon)
            shares.append(float(clipped != ratio))
            part = -torch.min(ratio * advantage, clipped * advantage) / len(rows[0])
            part.backward()
            total += part.item()
        assert loss == pytest.approx(total, abs=2e-5)
        assert sum(float(value.square().sum()) for value in gradients.values()) > 0
        for name, value in model.named_parameters():
            assert torch.allclose(gradients[name], value.grad, rtol=1e-3, atol=2e-5), name
    assert 0 < sum(shares) / len(shares) < 1, "some ratios are clipped, and some are not"


def test_rewards_are_wanted_as_for_grpo(here):
    with pytest.raises(TunekitError, match=r"method\.rewards: .*, but rloo learns only from rewards"):
        verbs.train(recipe(here), ["method.rewards=[]"])
