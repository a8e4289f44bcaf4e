"""Metrics that tell whether a method works besides its loss: TRL's names, with their labels and formats."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

from tunekit.runs.events import Event


@dataclass(frozen=True)
class Measure:
    """Something that is logged.

    Attributes:
        name: TRL's, with a star for what is named by the recipe.
        words: What it is called; with braces for what the star stands for.
        digits: How it is written.
        brief: What it is called while a run goes on; None where it is not told then.
        spread: TRL's name for how much its values differ; None where there is none.
        held_out: Whether an evaluation says something of it.
    """

    name: str
    words: str
    digits: str
    brief: str | None = None
    spread: str | None = None
    held_out: bool = True

    def label(self, name: str) -> str:
        """Its words for a name that it matches."""
        before, _, behind = self.name.partition("*")
        return self.words.format(name[len(before) : len(name) - len(behind)])


MEASURES = (
    Measure("reward", "reward", ".3f", "reward", "reward_std"),
    Measure("rewards/accuracies", "pairs told apart", ".0%", "accuracy"),
    Measure("accuracy", "pairs told apart", ".0%", "accuracy"),
    Measure("rewards/margins", "margin of rewards", ".3f", "margin"),
    Measure("margin", "margin of scores", ".3f", "margin"),
    Measure("rewards/*/mean", "reward {}", ".3f", spread="rewards/*/std"),
    Measure("completions/mean_length", "tokens of an answer", ".1f", "tokens"),
    Measure("completions/clipped_ratio", "answers cut off", ".0%", "cut off"),
    Measure("frac_reward_zero_std", "groups without signal", ".0%", "no signal", held_out=False),
    Measure("kl", "KL from the reference", ".3g", "KL"),
    Measure("clip_ratio/region_mean", "tokens clipped in training", ".1%", held_out=False),
    Measure("entropy", "entropy", ".3g"),
    Measure("rewards/chosen", "reward of the better", ".3f"),
    Measure("rewards/rejected", "reward of the worse", ".3f"),
    Measure("logps/chosen", "log-probability of the better", ".1f"),
    Measure("logps/rejected", "log-probability of the worse", ".1f"),
    Measure("nll_loss", "loss on the better", ".4f"),
    Measure("log_odds_chosen", "log odds of the better", ".3f"),
)
"""In the order in which they are told; what a method does not log, it has not."""

_TIED = 1e-5
"""Margin below which a model prefers nothing: two passes of the same float32 weights differ by less."""


def first_and_last(events: Sequence[Event]) -> dict[str, list[float]]:
    """Each measure's first and last value by its name in the log, of the evaluations where they have it."""
    values_by_name: dict[str, list[float]] = {}
    logs, evaluations = ([event for event in events if event["event"] == kind] for kind in ("log", "eval"))
    names = dict.fromkeys(name for log in logs for name in log)
    for measure in MEASURES:
        for name in (name for name in names if fnmatch(name, measure.name)):
            spread = measure.spread and _same_star(measure.spread, measure.name, name)
            for each in (name, spread) if spread else (name,):
                held_out = [event.get(f"eval_{each}") for event in evaluations] if measure.held_out else []
                values = [value for value in held_out or [log.get(each) for log in logs] if value is not None]
                if values:
                    values_by_name[each] = [values[0], values[-1]]
    return values_by_name


BETTER: Mapping[str, Literal["more", "less"]] = {
    "loss": "less",
    "reward": "more",
    "rewards/accuracies": "more",
    "accuracy": "more",
    "rewards/*/mean": "more",
    "completions/clipped_ratio": "less",
    "frac_reward_zero_std": "less",
    "nll_loss": "less",
}
"""Direction in which metrics of methods improve. The rest have none: a margin grows also where both answers get
unlikely, and KL and entropy measure how far a model moved and how sure it is."""


def rows_of(measures: Mapping[str, Sequence[float]]) -> list[tuple[str, str]]:
    """Describe the first and last values that `first_and_last` returned."""
    ends = [{name: values[place] for name, values in measures.items()} for place in (0, -1)]
    return [
        (measure.label(name), " → ".join(_said(measure, name, end) for end in ends))
        for measure in MEASURES
        for name in measures
        if fnmatch(name, measure.name)
    ]


def brief(logs: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the metrics of a step in short form, the most important first.

    Args:
        logs: What was logged.
        prefix: Before each name, where that is an evaluation.
    """
    own = {name.removeprefix(prefix): value for name, value in logs.items() if name.startswith(prefix)}
    return [
        f"{measure.brief} {_said(measure, measure.name, own, spread=False)}"
        for measure in MEASURES
        if measure.brief is not None and own.get(measure.name) is not None and (measure.held_out or not prefix)
    ]


def judged_by(names: Sequence[str]) -> str:
    """Return the logged metric that best tells whether a run learns: the loss where there is no other."""
    return next((name for name in ("reward", "rewards/margins", "margin") if name in names), "loss")


def direction_of(name: str, logged: Container[str]) -> Literal["more", "less"] | None:
    """Return the direction in which a metric improves; None where it has none.

    Args:
        name: The measure, by its name in training.
        logged: All that the run logs. Where answers earn rewards, the loss is what the gradient comes from: its value
            says nothing of the answers.
    """
    if name == "loss" and "reward" in logged:
        return None
    return next((way for pattern, way in BETTER.items() if fnmatch(name, pattern)), None)


def words_of(name: str) -> str:
    """Return the label of a logged metric."""
    return next((measure.label(name) for measure in MEASURES if fnmatch(name, measure.name)), name)


def _same_star(pattern: str, of: str, name: str) -> str:
    before, _, behind = of.partition("*")
    return pattern.replace("*", name[len(before) : len(name) - len(behind)])


def _said(measure: Measure, name: str, values: Mapping[str, Any], *, spread: bool = True) -> str:
    """A value, and by how much values differ."""
    if _is_tied(name, values):
        return "none yet"
    apart = values.get(_same_star(measure.spread, measure.name, name)) if measure.spread and spread else None
    return number(values[name], measure.digits) + ("" if apart is None else f" ± {number(apart, measure.digits)}")


def _is_tied(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether an accuracy on pairs carries no information: the model still equals its reference and prefers
    neither answer.
    """
    margin = values.get("rewards/margins")
    return name == "rewards/accuracies" and margin is not None and abs(margin) < _TIED


def number(value: float, digits: str) -> str:
    """A number, without the sign of what is rounded to nothing."""
    text = format(value, digits)
    return text.removeprefix("-") if not any(digit in text for digit in "123456789") else text
