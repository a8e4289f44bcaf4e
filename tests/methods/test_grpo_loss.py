"""Losses, gradients and metrics of GRPO against the papers' formulas, worked out in float64 from what rewards saw.

The answers are those that the trainer generated; rewards of this module keep them. From them, and the weights before
each step, come ratios r to the model that gave the answers, clipped to [1 - epsilon, 1 + epsilon_high], advantages, and
the divergence k = exp(d) - d - 1 with d = log pi_ref - log pi. Where TRL 1.16 does not do what a paper says, the
formula is TRL's:

- k is multiplied by r, also in what is logged as `kl` (`use_bias_correction_kl`, on by default: arXiv 2512.02556). The
  formula of arXiv 2402.03300 is tested with that switched off.
- The spread of a group is that of a sample (n - 1), with 1e-4 added.
- Answers left out because they were cut count as answers in `grpo` and `dr_grpo`, whose sums are divided by the number
  of all; in `dapo` and `cispo` their tokens do not count.
- `cispo` clips r at `epsilon_high`, not 1 + `epsilon_high`, and not from below (arXiv 2506.13585 has both).
- `bnpo` takes the mean over the tokens of a micro-batch, so that how a step is cut matters.
"""

import json
import random
from dataclasses import dataclass, field
from itertools import combinations

import pytest
import torch
from torch import Tensor

from tests.methods.exact import LORA, MAX_GRADIENT, MAX_LOSS, Exact, Step, distance, take_steps
from tests.tiny import make_tokenizer, save_tiny_model

GROUP, NUM_PROMPTS, SIZE, LONGEST = 4, 3, 4, 13
"""Answers to a prompt, prompts of a step, answers of a micro-batch, and tokens of an answer at most."""

NUM_CUTS = GROUP * NUM_PROMPTS // SIZE
EPSILON = 0.2
END, PAD = (make_tokenizer().convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))


@dataclass
class Answer:
    """An answer, and what rewards said of it."""

    prompt: str
    ids: list[int]
    values: list[float | None] = field(default_factory=list)
    advantage: float = 0.0

    @property
    def is_cut(self) -> bool:
        return self.ids[-1] != END

    @property
    def reward(self) -> float:
        return sum(value for value in self.values if value is not None)


CALLS: list[list[Answer]] = []
"""Answers that were generated at once, group behind group."""


def pitch(prompts, completion_ids, **columns):
    CALLS.append([Answer(*answer) for answer in zip(prompts, completion_ids, strict=True)])
    return _keep([0.5 if one.prompt.startswith("same") else sum(one.ids) % 7 / 7 for one in CALLS[-1]])


def ends(**columns):
    """Says nothing of some answers, and of the first group alike."""
    return _keep([None if one.prompt.startswith("same") or len(one.ids) % 3 == 0 else -one.is_cut for one in CALLS[-1]])


def _keep(values):
    for answer, value in zip(CALLS[-1], values, strict=True):
        answer.values.append(value)
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo-loss")
    save_tiny_model(folder / "model", hidden=32)
    return folder


@pytest.fixture
def early_ends(monkeypatch):
    """Answers of a model of random weights would hardly ever end: here some do at each token."""
    drawn = torch.multinomial

    def draw(probabilities, num_samples, **how):
        probabilities[:, PAD] = 0
        tokens = drawn(probabilities, num_samples, **how)
        tokens[torch.rand(tokens.shape) < 0.1] = END
        return tokens

    monkeypatch.setattr(torch, "multinomial", draw)


def recipe(folder, method, adapter, seed, num_steps, num_rows=6):
    draw = random.Random(seed)
    rows = [
        {"prompt": begin + "".join(draw.choices("abcdefgh", k=draw.randint(1, 20)))}
        for begin in ("same", "?", "!!") * (num_rows // 3)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    here = "tests.methods.test_grpo_loss"
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64, "shuffle": False},
        "method": {
            "type": "grpo",
            "rewards": [f"{here}:pitch", f"{here}:ends"],
            "num_generations": GROUP,
            "max_completion_length": LONGEST,
            "num_iterations": 2,
            "epsilon": EPSILON,
            **method,
        },
        "adapter": adapter,
        "train": {
            "max_steps": num_steps,
            "global_batch_size": GROUP * NUM_PROMPTS,
            "micro_batch_size": SIZE,
            "learning_rate": 1e-2,
            "warmup_steps": 0,
            "max_grad_norm": 1e9,
            "logging_steps": 1,
        },
        "output": {"dir": str(folder / f"run-{len(list(folder.glob('run-*')))}"), "sample_prompts": []},
    }


@dataclass
class Scored:
    """An answer with the log-probabilities of its tokens: now, when it was given, and by the reference."""

    answer: Answer
    counts: bool
    now: Tensor
    old: Tensor
    reference: Tensor
    entropy: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.answer.ids) * self.counts

    def ratio(self, method) -> Tensor:
        gain = self.now - self.old
        if method.get("importance_sampling_level") == "sequence":
            gain = gain.mean().expand(len(gain))
        return gain.exp()

    def divergence(self, method) -> Tensor:
        behind = self.reference - self.now
        corrected = method.get("trainer_args", {}).get("use_bias_correction_kl", True)
        return (behind.exp() - behind - 1) * (self.ratio(method) if corrected else 1)

    def losses(self, method) -> Tensor:
        """Of each token."""
        ratio, advantage = self.ratio(method), self.answer.advantage
        low, high = 1 - EPSILON, 1 + EPSILON
        if method["loss_type"] == "cispo":
            gained = ratio.detach().clamp(max=method["epsilon_high"]) * advantage * self.now
        else:
            gained = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        return (method.get("beta", 0) * self.divergence(method) - gained) * self.counts


def mean(values):
    return sum(values) / len(values)


def step_loss(cuts: list[list[Scored]], method) -> Tensor:
    """The loss of a step over all of its micro-batches."""
    answers = [answer for cut in cuts for answer in cut]
    num_tokens = sum(answer.num_tokens for answer in answers)
    match method["loss_type"]:
        case "grpo":  # equation 3 of arXiv 2402.03300; with ratios of whole answers equation 5 of 2507.18071
            return mean([one.losses(method).mean() for one in answers])
        case "dr_grpo":  # arXiv 2503.20783, section 3.2
            return mean([one.losses(method).sum() / LONGEST for one in answers])
        case "dapo" | "cispo":  # equation 8 of arXiv 2503.14476; equation 4 of 2506.13585
            return sum(one.losses(method).sum() for one in answers) / num_tokens
        case "bnpo":
            return mean(
                [sum(one.losses(method).sum() for one in cut) / sum(one.num_tokens for one in cut) for cut in cuts]
            )
    raise AssertionError(method)


def give_advantages(answers: list[Answer], method) -> None:
    for start in range(0, len(answers), GROUP):
        rewards = [one.reward for one in answers[start : start + GROUP]]
        assert len({one.prompt for one in answers[start : start + GROUP]}) == 1
        spread = (sum((reward - mean(rewards)) ** 2 for reward in rewards) / (GROUP - 1)) ** 0.5
        for one, reward in zip(answers[start : start + GROUP], rewards, strict=True):
            one.advantage = reward - mean(rewards)
            if method.get("scale_rewards") != "none":
                one.advantage /= spread + 1e-4


def cut_as(step: Step, answers: list[Answer]) -> list[list[Answer]]:
    """The answers of a step by micro-batch: the trainer shuffles them."""
    tokenizer = make_tokenizer()
    known = {(tuple(tokenizer.encode(one.prompt)), tuple(one.ids)): one for one in answers}
    cuts = []
    for batch in step.inputs:
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        given = [[token for token in ids.tolist() if token != PAD] for ids in batch["completion_ids"]]
        cuts.append([known[tuple(prompt), tuple(ids)] for prompt, ids in zip(prompts, given, strict=True)])
    # Answers that are equal are scored alike, so that either of them will do.
    assert sorted(one.ids for cut in cuts for one in cut) == sorted(one.ids for one in answers)
    return cuts


def scored(answer: Answer, now: Exact, old: Exact, reference: Exact, method) -> Scored:
    prompt = make_tokenizer().encode(answer.prompt)
    scores = now.scores([*prompt, *answer.ids])[len(prompt) - 1 :]
    with torch.no_grad():
        before, base = (model.log_probs(prompt, answer.ids) for model in (old, reference))
        entropy = -(scores.exp() * scores).sum(dim=-1)
    counts = not (method.get("mask_truncated_completions") and answer.is_cut)
    return Scored(answer, counts, scores[range(len(answer.ids)), answer.ids], before, base, entropy)


CASES = {
    "dapo": ({"loss_type": "dapo"}, LORA),
    "dapo, full, with a reference": ({"loss_type": "dapo", "beta": 0.2}, "full"),
    "dapo, cut answers left out": ({"loss_type": "dapo", "beta": 0.2, "mask_truncated_completions": True}, LORA),
    "dr_grpo": ({"loss_type": "dr_grpo", "scale_rewards": "none"}, "full"),
    "dr_grpo, cut answers left out": (
        {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.2, "mask_truncated_completions": True},
        LORA,
    ),
    "grpo as in its paper": (
        {"loss_type": "grpo", "beta": 0.2, "trainer_args": {"use_bias_correction_kl": False}},
        LORA,
    ),
    "grpo, answers once": ({"loss_type": "grpo", "beta": 0.2, "num_iterations": 1}, LORA),
    "grpo of whole answers": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, LORA),
    "bnpo": ({"loss_type": "bnpo", "beta": 0.2}, LORA),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.1}, LORA),
}


@pytest.mark.sample(2)
@pytest.mark.usefixtures("early_ends")
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_papers(folder, case):
    method, adapter = CASES[case]
    number = list(CASES).index(case)
    CALLS.clear()
    times, num_steps = method.get("num_iterations", 2), 4 if case == "dapo" else 2
    steps = take_steps(recipe(folder, method, adapter, number, num_steps), moved=0.03, seed=number)
    assert (len(steps), len(CALLS)) == (num_steps, num_steps // times)
    reference, clipped, left_out = Exact(folder / "model"), [], []
    for place, step in enumerate(steps):
        answers, first = CALLS[place // times], steps[place - place % times]
        give_advantages(answers, method)
        policy, old = (Exact(folder / "model", weights) for weights in (step.before, first.before))
        cuts = [[scored(one, policy, old, reference, method) for one in cut] for cut in cut_as(step, answers)]
        loss = step_loss(cuts, method)
        assert step.logs["loss"] == pytest.approx(loss.item(), rel=MAX_LOSS, abs=MAX_LOSS)
        assert sum(step.losses) == pytest.approx(loss.item(), rel=MAX_LOSS, abs=MAX_LOSS)
        assert distance(step.gradients, policy.gradients(loss)) < MAX_GRADIENT
        clipped.append(assert_logged_of_micro_batches(step.logs, cuts, method))
        left_out.append(sum(not one.counts for cut in cuts for one in cut))
        if place % times == 0:
            assert_logged_of_answers(step.logs, answers)
    # What is to be seen was there.
    assert (max(clipped) > 0) == (times > 1)
    assert any(left_out) == method.get("mask_truncated_completions", False)


@pytest.mark.slow
@pytest.mark.usefixtures("early_ends")
def test_groups_without_signal_are_replaced_by_those_of_other_prompts(folder):
    """Each group keeps the first completions with signal of its place, and the loss is that of these alone."""
    method = {"loss_type": "dapo", "beta": 0.2, "max_resample_times": 2}
    CALLS.clear()
    steps = take_steps(recipe(folder, method, LORA, 5, 8, num_rows=60), moved=0.03, seed=5)
    reference, batches = Exact(folder / "model"), list(CALLS)
    times_drawn = []
    for place, step in enumerate(steps):
        if place % 2 == 0:
            answers, first, drawn = batches.pop(0), step, 0
            while None in (groups := groups_with_signal(answers)) and drawn < 2:
                drawn += 1
                others = groups_with_signal(batches.pop(0))
                # Where both have none, the first stays.
                kept = [answers[start : start + GROUP] for start in range(0, len(answers), GROUP)]
                chosen = [own or other or old for own, other, old in zip(groups, others, kept, strict=True)]
                answers = [one for group in chosen for one in group]
            times_drawn.append(drawn)
            assert step.logs["resample_times"] == drawn
            assert step.logs["frac_reward_zero_std"] == pytest.approx(groups.count(None) / NUM_PROMPTS)
        give_advantages(answers, method)
        policy, old = (Exact(folder / "model", weights) for weights in (step.before, first.before))
        cuts = [[scored(one, policy, old, reference, method) for one in cut] for cut in cut_as(step, answers)]
        loss = step_loss(cuts, method)
        assert sum(step.losses) == pytest.approx(loss.item(), rel=MAX_LOSS, abs=MAX_LOSS)
        assert distance(step.gradients, policy.gradients(loss)) < MAX_GRADIENT
    assert not batches
    assert {1, 2} <= set(times_drawn)


@pytest.mark.slow
@pytest.mark.usefixtures("early_ends")
@pytest.mark.parametrize("loss_type", ["dapo", "cispo"])
def test_groups_without_signal_are_replaced_by_those_of_earlier_steps(folder, loss_type):
    """Each with its advantages, and its log-probabilities by the model that gave it; the newest groups are kept."""
    method = {"loss_type": loss_type, "beta": 0.2, "replay_buffer_size": 3, "num_iterations": 1}
    method |= {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    CALLS.clear()
    # Each prompt once, so that an answer is told by its prompt and its tokens.
    steps = take_steps(recipe(folder, method, LORA, 7, 6, num_rows=60), moved=0.03, seed=7)
    assert len(CALLS) == len(steps)
    reference, kept, given_by, ages, ratios = Exact(folder / "model"), [], {}, [], []
    for place, (step, answers) in enumerate(zip(steps, CALLS, strict=True)):
        give_advantages(answers, method)
        given_by |= {id(one): (place, Exact(folder / "model", step.before)) for one in answers}
        fresh = [group for group in groups_with_signal(answers) if group is not None]
        lacking = [answers[start : start + GROUP] for start in range(0, len(answers), GROUP)]
        lacking = [group for group in lacking if group not in fresh]
        num_drawn = min(len(lacking), len(kept))
        trained_ids = sorted(
            [token for token in ids.tolist() if token != PAD]
            for batch in step.inputs
            for ids in batch["completion_ids"]
        )
        (used, drawn), *_ = [
            (used, drawn)
            for drawn in combinations(kept, num_drawn)
            for used in [[one for group in (*fresh, *drawn, *lacking[num_drawn:]) for one in group]]
            if sorted(one.ids for one in used) == trained_ids
        ]
        policy = Exact(folder / "model", step.before)
        cuts = [
            [scored(one, policy, given_by[id(one)][1], reference, method) for one in cut] for cut in cut_as(step, used)
        ]
        ratios += [one.ratio(method).detach() for cut in cuts for one in cut if given_by[id(one.answer)][0] < place]
        loss = step_loss(cuts, method)
        assert sum(step.losses) == pytest.approx(loss.item(), rel=MAX_LOSS, abs=MAX_LOSS)
        assert distance(step.gradients, policy.gradients(loss)) < MAX_GRADIENT
        assert step.logs["replay/frac_replayed"] == pytest.approx(num_drawn / NUM_PROMPTS)
        ages.append([place - given_by[id(group[0])][0] for group in drawn])
        if drawn:
            assert step.logs["replay/age"] == pytest.approx(mean(ages[-1]))
        kept = [*kept, *fresh][-3:]
    assert ages[0] == [] and all(ages[1:])
    assert (torch.cat(ratios) - 1).abs().max() > 0.05


def groups_with_signal(answers):
    """Return the groups of answers, None in place of one whose rewards are all the same."""
    groups = [answers[start : start + GROUP] for start in range(0, len(answers), GROUP)]
    return [group if len({one.reward for one in group}) > 1 else None for group in groups]


def assert_logged_of_micro_batches(logs, cuts, method) -> float:
    """Means over the tokens of each micro-batch, and the mean of these; and the share that was clipped."""

    def over_tokens(value) -> float:
        of_cuts = []
        for cut in cuts:
            found = torch.cat([value(one) for one in cut if one.counts])
            of_cuts.append(found.double().mean().item())
        return mean(of_cuts)

    def over_answers(value) -> float:
        return mean([value(one)[0].double().item() for cut in cuts for one in cut])

    with torch.no_grad():
        names = {"entropy": over_tokens(lambda one: one.entropy)}
        if method.get("beta"):
            names["kl"] = over_tokens(lambda one: one.divergence(method))
        shares = over_answers if method.get("importance_sampling_level") == "sequence" else over_tokens
        if method["loss_type"] == "cispo":
            most = method["epsilon_high"]
            names["cispo_clip_ratio"] = shares(lambda one: (one.ratio(method) > most) & (one.answer.advantage > 0))
        else:
            low = shares(lambda one: (one.ratio(method) < 1 - EPSILON) & (one.answer.advantage < 0))
            high = shares(lambda one: (one.ratio(method) > 1 + EPSILON) & (one.answer.advantage > 0))
            names |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
    assert {name: logs[name] for name in names} == pytest.approx(names, rel=1e-5, abs=1e-6)
    return names.get("clip_ratio/region_mean", names.get("cispo_clip_ratio", 0.0))


def assert_logged_of_answers(logs, answers) -> None:
    """What is logged where answers were generated."""

    def spread(values):
        return (sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1)) ** 0.5

    rewards, lengths = [one.reward for one in answers], [len(one.ids) for one in answers]
    groups = [rewards[start : start + GROUP] for start in range(0, len(rewards), GROUP)]
    said = [[one.values[number] for one in answers if one.values[number] is not None] for number in (0, 1)]
    whole = [len(one.ids) for one in answers if not one.is_cut]
    names = {
        "reward": mean(rewards),
        "reward_std": spread(rewards),
        "rewards/pitch/mean": mean(said[0]),
        "rewards/pitch/std": spread(said[0]),
        "rewards/ends/mean": mean(said[1]),
        "rewards/ends/std": spread(said[1]),
        "frac_reward_zero_std": mean([len(set(group)) == 1 for group in groups]),
        "completions/mean_length": mean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": mean([one.is_cut for one in answers]),
        "completions/mean_terminated_length": mean(whole),
    }
    assert names["frac_reward_zero_std"] > 0
    assert 0 < names["completions/clipped_ratio"] < 1
    assert {name: logs[name] for name in names} == pytest.approx(names, rel=1e-5, abs=1e-6)
