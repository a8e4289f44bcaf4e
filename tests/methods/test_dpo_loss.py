"""Losses and gradients of DPO against the papers' formulas, worked out in float64 from the rows of the file.

For a pair with prompt x, the better answer w and the worse l, let r(y) = log pi(y|x) - log pi_ref(y|x), summed over the
tokens of y with its end token, and h = r(w) - r(l). Where TRL 1.16 does not do what a paper says, the formula is TRL's:

- `ipo` and `sigmoid_norm` divide each r(y) by the number of tokens of y. IPO's paper has sums (eq. 17 of 2310.12036;
  TRL names its authors for the mean), so that `beta` is per token.
- `apo_zero` is the paper's loss plus 1, which has the same gradient.
- `sft`, as a part of a mix, is the mean over the tokens of all better answers of a micro-batch. RPO's paper has means
  over each answer's tokens first (2404.19733, eq. 2); so long answers weigh more, and how a step is cut matters.
- Logged rewards are sums, whatever the loss.
"""

import json
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.methods.exact import LORA, MAX_GRADIENT, MAX_LOSS, Exact, distance, take_steps
from tests.tiny import make_tokenizer, save_tiny_model

MAX_LENGTH, SIZE, NUM_CUTS = 48, 3, 2
"""Longest sequence, pairs of a micro-batch, micro-batches of a step."""

BETA = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo-loss")
    save_tiny_model(folder / "model", hidden=32)
    return folder


def save_pairs(folder, seed):
    """Pairs of texts of odd lengths, from a letter to more than there is room for."""
    draw = random.Random(seed)

    def text(longest):
        return "".join(draw.choices("abcdefghij", k=draw.randint(1, longest)))

    rows = [{"prompt": text(20), "chosen": text(40), "rejected": text(40)} for _ in range(SIZE * NUM_CUTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def recipe(folder, method, adapter):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": MAX_LENGTH, "shuffle": False},
        "method": {"type": "dpo", "beta": BETA, **method},
        "adapter": adapter,
        "train": {
            "max_steps": 2,
            "global_batch_size": SIZE * NUM_CUTS,
            "micro_batch_size": SIZE,
            "learning_rate": 1e-3,
            "warmup_steps": 0,
            "max_grad_norm": 1e9,
            "logging_steps": 1,
        },
        "output": {"dir": str(folder / f"run-{len(list(folder.glob('run-*')))}"), "sample_prompts": []},
    }


@dataclass
class Pair:
    """Log-probabilities of the tokens of both answers, of the model and of its reference."""

    better: Tensor
    worse: Tensor
    ref_better: Tensor
    ref_worse: Tensor

    @property
    def gains(self) -> tuple[Tensor, Tensor]:
        return self.better.sum() - self.ref_better.sum(), self.worse.sum() - self.ref_worse.sum()

    @property
    def mean_gains(self) -> tuple[Tensor, Tensor]:
        better, worse = self.gains
        return better / len(self.better), worse / len(self.worse)


def pairs_of(rows, policy, reference) -> list[Pair]:
    """An end token behind each answer, and what is too long cut at its end."""
    tokenizer = make_tokenizer()
    found = []
    for row in rows:
        prompt = tokenizer.encode(row["prompt"])
        answers = [[*tokenizer.encode(row[name]), tokenizer.eos_token_id] for name in ("chosen", "rejected")]
        answers = [answer[: MAX_LENGTH - len(prompt)] for answer in answers]
        found.append(Pair(*(model.log_probs(prompt, answer) for model in (policy, reference) for answer in answers)))
    return found


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def log_sigmoid(x):
    return -torch.log(1 + torch.exp(-x))


def sigmoid_loss(pair):
    """Equation 7 of arXiv 2305.18290."""
    better, worse = pair.gains
    return -log_sigmoid(BETA * (better - worse))


def ipo_loss(pair):
    """Equation 17 of arXiv 2310.12036, of means over tokens."""
    better, worse = pair.mean_gains
    return (better - worse - 1 / (2 * BETA)) ** 2


def hinge_loss(pair):
    """SLiC's, of the rewards of DPO (arXiv 2309.06657, section 3)."""
    better, worse = pair.gains
    return torch.clamp(1 - BETA * (better - worse), min=0)


def robust_loss(pair):
    """Equation 12 of arXiv 2403.00409, with 0.2 of the pairs the wrong way round."""
    better, worse = pair.gains
    h = BETA * (better - worse)
    return (-(1 - 0.2) * log_sigmoid(h) + 0.2 * log_sigmoid(-h)) / (1 - 2 * 0.2)


def apo_zero_loss(pair):
    """Equation 7 of arXiv 2408.06266, plus 1."""
    better, worse = pair.gains
    return 1 - sigmoid(BETA * better) + sigmoid(BETA * worse)


def sigmoid_norm_loss(pair):
    """DPO with each gain divided by its answer's length (arXiv 2411.15124, section 5.1)."""
    better, worse = pair.mean_gains
    return -log_sigmoid(BETA * (better - worse))


def mean_of(loss):
    return lambda pairs: sum(map(loss, pairs)) / len(pairs)


def mixed_loss(pairs):
    """RPO: and half of the negative log-likelihood of the better answers, over the tokens of all."""
    return mean_of(sigmoid_loss)(pairs) - 0.5 * torch.cat([pair.better for pair in pairs]).mean()


LOSSES = {
    "sigmoid": ({}, mean_of(sigmoid_loss)),
    "ipo": ({"loss_type": "ipo"}, mean_of(ipo_loss)),
    "hinge": ({"loss_type": "hinge"}, mean_of(hinge_loss)),
    "robust": ({"loss_type": "robust", "label_smoothing": 0.2}, mean_of(robust_loss)),
    "apo_zero": ({"loss_type": "apo_zero"}, mean_of(apo_zero_loss)),
    "sigmoid_norm": ({"loss_type": "sigmoid_norm"}, mean_of(sigmoid_norm_loss)),
    "sigmoid and sft": ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, mixed_loss),
}
BEFOREHAND = {"precompute_ref_log_probs": True}
CASES = [
    *((name, adapter, {}) for name in ("sigmoid", "ipo") for adapter in (LORA, "full")),
    *((name, LORA, {}) for name in list(LOSSES)[2:]),
    ("sigmoid", LORA, BEFOREHAND),
    ("ipo", "full", BEFOREHAND),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: f"{CASES[case][0]}-{case}")
def test_losses_and_gradients_are_those_of_the_papers(folder, case):
    """Two steps, so that the second one's reference would show if it had moved."""
    name, adapter, how = CASES[case]
    method, loss_of = LOSSES[name]
    rows = save_pairs(folder, seed=case)
    steps = take_steps(recipe(folder, {**method, **how}, adapter), moved=0.03, seed=case)
    assert len(steps) == 2
    reference = Exact(folder / "model")
    for step in steps:
        policy = Exact(folder / "model", step.before)
        with torch.no_grad():
            fixed = pairs_of(rows, reference, reference)
        pairs = pairs_of(rows, policy, reference)
        for pair, known in zip(pairs, fixed, strict=True):
            pair.ref_better, pair.ref_worse = known.better, known.worse
        losses = [loss_of(pairs[start : start + SIZE]) for start in range(0, len(pairs), SIZE)]
        assert step.losses == pytest.approx([loss.item() for loss in losses], rel=MAX_LOSS, abs=MAX_LOSS)
        assert step.logs["loss"] == pytest.approx(sum(step.losses) / NUM_CUTS, abs=1e-6)
        assert distance(step.gradients, policy.gradients(sum(losses) / NUM_CUTS)) < MAX_GRADIENT
        assert_logged(step.logs, pairs)


def assert_logged(logs, pairs):
    """What is logged of a step, from its pairs alone."""
    with torch.no_grad():
        gains = torch.stack([torch.stack(pair.gains) for pair in pairs])
        better, worse = BETA * gains[:, 0], BETA * gains[:, 1]
        expected = {
            "rewards/chosen": better.mean(),
            "rewards/rejected": worse.mean(),
            "rewards/margins": (better - worse).mean(),
            "rewards/accuracies": (better > worse).double().mean(),
            "logps/chosen": torch.stack([pair.better.sum() for pair in pairs]).mean(),
            "logps/rejected": torch.stack([pair.worse.sum() for pair in pairs]).mean(),
        }
    assert {name: logs[name] for name in expected} == {
        name: pytest.approx(value.item(), rel=1e-5, abs=1e-5) for name, value in expected.items()
    }
