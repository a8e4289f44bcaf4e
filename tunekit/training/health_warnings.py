"""Warnings about the metrics of a run, as a practitioner would give them: the problem, the number and the remedy.

Each function looks at what was logged so far and gives the figures of its words in `health_warnings.yaml`, or nothing.
Thresholds are choices, made so that a run that learns well stays without a warning, with the reason beside each; none
is a law.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from tunekit.files import read_table
from tunekit.recipe.methods import Method, compares_with_reference, generates, is_rewarded

Logs = Sequence[Mapping[str, Any]]
"""Values logged so far, by TRL's names; the same step once."""

Figures = Mapping[str, float | str] | None
"""Figures of a warning's words, by the names there; None where there is nothing to warn of."""

WINDOW = 10
"""Logged values that are looked at together, at the beginning and at the end: a single batch is nobody's trend."""

MAX_KEPT = 1000
"""Logged steps that are kept; of more, every second one between the first and the last. Looking at them takes some
milliseconds."""

RISEN_LOSS, UNLEARNED = 1.5, 0.5
"""How many times its lowest a loss is that has risen, when half of what was learned is gone: means over ten batches
differ by less."""

SPIKE_SPREADS, SPIKE_TIMES = 10, 2.0
"""How many times their usual distance from their median the last losses a spike is above it, and how many times that
median at least. Losses of single batches have long tails: of a normal distribution, one value in ten million is eight
such distances away, and of losses of small batches one in some hundreds. Where they hardly differ, any step would be
far away; so it has to be twice as much as usual too."""

RECENT = 2 * WINDOW
"""Logged values that a spike is held against."""

STALLED_SHARE = 0.5
"""Share of its own earlier speed below which a run stalls, in each of the last logged steps: the fastest of these is
held against a step that three of four earlier ones were faster than. A machine with other work to do, long rows and
longer answers slow down some steps, not all of ten; what is left is worth to look at."""

GROWN_GRADIENT = 10
"""Factor over the largest tenth of earlier gradients that counts as too large. Gradients of different batches differ by
factors, not by ten times the largest; clipping hides in the steps that the direction is no longer one."""

FALLEN_SHARE, FALLEN_NATS = 0.2, 5.0
"""Share of their log-probability, and nats, by which better answers have become less likely. Some fall is usual in DPO,
whose loss sees differences alone. A fifth is much: of an answer at 50 nats it makes one that is 20,000 times less
likely; 5 nats are a factor of 150, for answers of few tokens."""

SATURATED_MARGIN = 10.0
"""Margin at which a pair's weight in the gradient of the sigmoid loss, 1 / (1 + e^margin), is below 0.005 %."""

NO_SIGNAL = 0.8
"""Share of groups in which all answers have the same reward: four fifths of what is generated then teaches nothing."""

CUT_SHARE = 0.5
"""Share of cut answers from which on rewards see more halves than answers."""

GROWN_LENGTH, NEAR_LIMIT = 2.0, 0.7
"""How many times longer answers are than at the beginning, and which share of the longest they have on average: longer
answers alone may be better ones, but here the limit is next."""

FAR_KL = 3.0
"""Nats per token: what is generated was 20 times less likely before the training, token for token. A model that has
learned to be sure of what it held for one of ten possibilities is at 2.3."""

GROWN_KL, SOME_KL = 10, 0.5
"""How many times the middle half of its earlier values a divergence is that explodes, and from which value on: below,
it grows from nothing as it should."""

COLLAPSED_ENTROPY = 0.1
"""Share of its first entropy at which a model hardly samples any more."""


class Trends:
    """Tells each warning once; what comes and goes, each time that it comes.

    Args:
        method: The method, whose settings thresholds are measured by.
        earlier: What was logged before, where a run goes on.
        told: What was warned of before.
    """

    def __init__(self, method: Method, earlier: Logs = (), told: Sequence[str] = ()) -> None:
        self._method = method
        self._logs = list(earlier)
        self._told = set(told) - {find.__name__ for find in RECURRING}

    def add(self, step: int, log: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Take what was logged of a step, and give what there is to warn of now: its name and the words."""
        # What an earlier attempt logged behind the checkpoint is done again.
        while self._logs and self._logs[-1]["step"] >= step:
            self._logs.pop()
        self._logs.append({"step": step, **log})
        if len(self._logs) > MAX_KEPT:
            self._logs[WINDOW:-WINDOW] = self._logs[WINDOW:-WINDOW:2]
        for find in FINDERS:
            name = find.__name__
            if name not in self._method.spec.health_checks or (name in self._told and find not in RECURRING):
                continue
            figures = find(self._logs, self._method)
            if figures is None:
                self._told.discard(name)
            elif name not in self._told:
                self._told.add(name)
                yield name, words()[name].format(window=WINDOW, **figures)


def words() -> dict[str, str]:
    """Return the words of each warning by its name: `health_warnings.yaml`, beside this file."""
    messages: dict[str, str] = read_table(Path(__file__).with_suffix(".yaml"))
    return messages


def loss_rises(logs: Logs, method: Method) -> Figures:
    """Of methods whose loss tells whether they learn."""
    losses = _values(logs, "loss")
    if len(losses) < 2 * WINDOW:
        return None
    earlier, last = _earlier(losses), fmean(losses[-WINDOW:])
    first, lowest = earlier[0], min(earlier)
    if lowest <= 0 or last < RISEN_LOSS * lowest or last - lowest < UNLEARNED * (first - lowest):
        return None
    return {"lowest": lowest, "last": last}


def loss_spikes(logs: Logs, method: Method) -> Figures:
    """A single loss out of all proportion, of methods whose loss tells whether they learn."""
    losses = _values(logs, "loss")
    if len(losses) <= RECENT:
        return None
    recent, last = losses[-RECENT - 1 : -1], losses[-1]
    usual = median(recent)
    spread = median(abs(loss - usual) for loss in recent)
    if usual <= 0 or last < SPIKE_TIMES * usual or last - usual < SPIKE_SPREADS * spread:
        return None
    return {"last": last, "usual": usual, "recent": RECENT, "spread": spread}


def throughput_stalls(logs: Logs, method: Method) -> Figures:
    """Steps that have become much slower than the run's own earlier ones, with what they wait for."""
    timed = [log for log in logs if log.get("tokens_per_second") and log.get("step_seconds")]
    if len(timed) < 3 * WINDOW:
        return None
    # Not the first, which warm up.
    earlier, last = timed[1:-WINDOW], timed[-WINDOW:]
    usual, fastest = quantiles(map(_speed, earlier), n=4)[0], max(map(_speed, last))
    if fastest >= STALLED_SHARE * usual:
        return None
    grown = []
    for name, label in PARTS.items():
        before, now = median(_part(log, name) for log in earlier), median(_part(log, name) for log in last)
        if now > before / STALLED_SHARE:
            grown.append((now - before, f"{label} {1000 * before:.3g} → {1000 * now:.3g}"))
    parts = ", ".join(part for _, part in sorted(grown, reverse=True))
    return {"fastest": fastest, "usual": usual, "parts": parts or "no part has doubled"}


def gradient_grows(logs: Logs, method: Method) -> Figures:
    """A gradient out of all proportion."""
    norms = _values(logs, "grad_norm")
    if len(norms) < 2 * WINDOW:
        return None
    usual, last = quantiles(norms[:-3], n=10)[-1], fmean(norms[-3:])
    return {"last": last, "usual": usual} if last >= GROWN_GRADIENT * usual > 0 else None


def chosen_falls(logs: Logs, method: Method) -> Figures:
    """Better answers become less likely while a loss of differences falls."""
    gains, now = _values(logs, "rewards/chosen")[-WINDOW:], _values(logs, "logps/chosen")[-WINDOW:]
    if not compares_with_reference(method) or min(len(gains), len(now)) < WINDOW:
        return None
    fall = -fmean(gains) / method.beta
    # Of the same answers, before the training.
    before = fmean(now) + fall
    still = fmean(gains[WINDOW // 2 :]) < fmean(gains[: WINDOW // 2])
    if not still or fall < max(FALLEN_NATS, FALLEN_SHARE * -before):
        return None
    return {"fall": fall, "before": before, "now": before - fall, "likelihood_hint": method.likelihood_hint}


def margins_saturate(logs: Logs, method: Method) -> Figures:
    """All pairs are told apart, and the margin grows on."""
    accuracies, margins = (_values(logs, name)[-WINDOW:] for name in ("rewards/accuracies", "rewards/margins"))
    if len(accuracies) < WINDOW or min(accuracies) < 1 or fmean(margins) < SATURATED_MARGIN:
        return None
    grows = fmean(margins[WINDOW // 2 :]) > fmean(margins[: WINDOW // 2])
    return {"margin": fmean(margins)} if grows else None


def reward_is_constant(logs: Logs, method: Method) -> Figures:
    """A reward that gives each answer the same, from the beginning."""
    constant = _constant_rewards(logs, method)
    return {"rewards": ", ".join(f"{name} {value:g}" for name, value in constant.items())} if constant else None


def reward_falls(logs: Logs, method: Method) -> Figures:
    """Warn of a reward that falls."""
    rewards, spreads = _values(logs, "reward"), _values(logs, "reward_std")
    if len(rewards) < 3 * WINDOW // 2 or not spreads:
        return None
    highest, last = max(_earlier(rewards)), fmean(rewards[-WINDOW:])
    return {"highest": highest, "last": last} if highest - last > max(spreads[:WINDOW]) / 2 else None


def no_signal(logs: Logs, method: Method) -> Figures:
    """Answers of a group get the same reward, and the reward does not rise."""
    shares = _values(logs, "frac_reward_zero_std")[-WINDOW:]
    if len(shares) < WINDOW or fmean(shares) < NO_SIGNAL:
        return None
    if _reward_has_risen(logs) or len(_constant_rewards(logs, method)) == len(_reward_names(logs)):
        return None
    return {"share": fmean(shares), "reward": fmean(_values(logs, "reward")[-WINDOW:])}


def answers_run_away(logs: Logs, method: Method) -> Figures:
    """Answers reach the longest that is allowed."""
    lengths, cuts = (_values(logs, f"completions/{name}") for name in ("mean_length", "clipped_ratio"))
    if not generates(method) or min(len(lengths), len(cuts)) < WINDOW:
        return None
    (first, last), (cut_first, cut) = _ends(lengths), _ends(cuts)
    longest = method.max_completion_length
    if cut < CUT_SHARE and last < max(GROWN_LENGTH * first, NEAR_LIMIT * longest):
        return None
    return {"cut": cut, "cut_first": cut_first, "longest": longest, "first": first, "last": last}


def kl_explodes(logs: Logs, method: Method) -> Figures:
    """The model leaves its reference."""
    values = _values(logs, "kl")
    if not is_rewarded(method) or len(values) < WINDOW:
        return None
    last, earlier = fmean(values[-WINDOW // 2 :]), values[len(values) // 4 : 3 * len(values) // 4]
    explodes = len(values) >= 2 * WINDOW and last >= max(SOME_KL, GROWN_KL * median(earlier))
    if last < FAR_KL and not explodes:
        return None
    return {"last": last, "half": WINDOW // 2, "median": median(earlier), "beta": method.beta}


def entropy_collapses(logs: Logs, method: Method) -> Figures:
    """Nothing is tried any more, and the reward has not risen."""
    values = _values(logs, "entropy")
    if len(values) < 2 * WINDOW or _reward_has_risen(logs):
        return None
    first, last = _ends(values)
    return {"first": first, "last": last} if last <= COLLAPSED_ENTROPY * first else None


PARTS: Mapping[str, str] = {
    "data_seconds": "waiting for data",
    "generation_seconds": "generation",
    "optimizer_seconds": "optimizer step",
    "": "compute, and waiting for other processes",
}
"""Parts of a step's time: those that are logged, and the rest."""

Finder = Callable[[Logs, Method], Figures]

FINDERS: tuple[Finder, ...] = (
    loss_rises,
    loss_spikes,
    gradient_grows,
    throughput_stalls,
    chosen_falls,
    margins_saturate,
    reward_is_constant,
    reward_falls,
    no_signal,
    answers_run_away,
    kl_explodes,
    entropy_collapses,
)
"""All of them, each known by its name."""

RECURRING: frozenset[Finder] = frozenset({loss_spikes, gradient_grows, throughput_stalls})
"""Those that say something only as long as it lasts."""


def _values(logs: Logs, name: str) -> list[float]:
    """Return the values logged under a name; steps on answers of an earlier one log no rewards, and fp16 overflows at
    times.
    """
    values = [float(log[name]) for log in logs if log.get(name) is not None]
    return [value for value in values if math.isfinite(value)]


def _seconds(log: Mapping[str, Any]) -> float:
    """Return the seconds of the steps since the last logged one, including the wait for their rows."""
    return float(log["step_seconds"] + log.get("data_seconds", 0.0))


def _num_tokens(log: Mapping[str, Any]) -> float:
    return float(log["tokens_per_second"] * log["step_seconds"])


def _speed(log: Mapping[str, Any]) -> float:
    return _num_tokens(log) / _seconds(log)


def _part(log: Mapping[str, Any], name: str) -> float:
    """Seconds per token of a part of `PARTS`."""
    parts_seconds = sum(log.get(part, 0.0) for part in PARTS)
    return float((log.get(name, 0.0) if name else _seconds(log) - parts_seconds) / _num_tokens(log))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last half of a window."""
    return fmean(values[: WINDOW // 2]), fmean(values[-WINDOW // 2 :])


def _earlier(values: Sequence[float]) -> list[float]:
    """Means of what was logged before the last window."""
    half = WINDOW // 2
    return [fmean(values[start : start + half]) for start in range(0, len(values) - WINDOW, half)]


def _reward_has_risen(logs: Logs) -> bool:
    """By half of the spread that rewards had at the beginning, or at all where they had none."""
    rewards, spreads = _values(logs, "reward"), _values(logs, "reward_std")
    if len(rewards) < WINDOW:
        return False
    first, last = _ends(rewards)
    return last - first > fmean(spreads[: WINDOW // 2]) / 2


def _reward_names(logs: Logs) -> list[str]:
    names = dict.fromkeys(name for log in logs[:WINDOW] for name in log)
    return [match[1] for name in names if (match := re.fullmatch("rewards/(.*)/mean", name))]


def _constant_rewards(logs: Logs, method: Method) -> dict[str, float]:
    """Rewards that have had one value since the beginning, by name."""
    if not is_rewarded(method):
        return {}
    constant = {}
    for name in _reward_names(logs):
        means, spreads = (_values(logs, f"rewards/{name}/{what}") for what in ("mean", "std"))
        if len(means) >= WINDOW and max(spreads, default=0) == 0 and len(set(means)) == 1:
            constant[name] = means[0]
    return constant
