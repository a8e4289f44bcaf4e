"""Measure by which the runs of a sweep are ranked: one of its evaluations, or of its last steps where it has none."""

import math
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatch

from tunekit.errors import PlanError
from tunekit.estimates.memory.memory import metric_of
from tunekit.planner.plan import Plan
from tunekit.runs.events import Event, words_of

MAX_STEPS = 10
"""Logged steps of which the mean counts without evaluations: at most so many, and no more than a quarter of all."""

PREFIX = "eval_"
"""Before the names of what is measured in evaluations."""

LESS_IS_BETTER = ("loss", "kl", "clipped_ratio", "entropy")
"""Ends of names of which the least value is the best."""


@dataclass(frozen=True)
class Measure:
    """Measure by which runs are ranked.

    Attributes:
        name: TRL's, with `eval_` before it where evaluations tell.
        greater_is_better: Whether the greatest value is the best.
    """

    name: str
    greater_is_better: bool

    @property
    def is_held_out(self) -> bool:
        """True if it is measured by evaluations."""
        return self.name.startswith(PREFIX)

    @property
    def words(self) -> str:
        """Label of the measure."""
        return f"evaluation {words_of(self.name.removeprefix(PREFIX))}" if self.is_held_out else words_of(self.name)

    @property
    def how(self) -> str:
        """Sentence that says which runs are better."""
        which = "highest" if self.greater_is_better else "lowest"
        if self.is_held_out:
            return f"best: {which} {self.words} at the end"
        return f"no evaluation; best: {which} mean training {self.words} over the last steps"

    def points(self, events: list[Event]) -> list[tuple[int, float]]:
        """Its finite values by step."""
        kind = "eval" if self.is_held_out else "log"
        logged = {event["step"]: event.get(self.name) for event in events if event["event"] == kind}
        pairs = ((step, logged[step]) for step in sorted(logged))
        return [
            (step, float(value)) for step, value in pairs if isinstance(value, int | float) and math.isfinite(value)
        ]

    def value(self, events: list[Event]) -> float | None:
        """Return the value that a run has reached; None where it was never logged."""
        values = [value for _, value in self.points(events)]
        if not values:
            return None
        num = 1 if self.is_held_out else max(1, min(MAX_STEPS, len(values) // 4))
        return math.fsum(values[-num:]) / num


def measure_of(plan: Plan, by: str | None) -> Measure:
    """Return the measure by which the runs of a sweep are ranked.

    Args:
        plan: The plan of one of them.
        by: What the user named, if anything.

    Raises:
        PlanError: Runs of its method have no such measure, or not without rows to evaluate on.
    """
    name, greater = metric_of(plan.recipe, plan.data)
    if by is None:
        if name is not None:
            return Measure(name, greater)
        metric = plan.recipe.method.best_metric
        return Measure(metric, not metric.endswith("loss"))
    measures, bare = plan.recipe.method.spec.metrics, by.removeprefix(PREFIX)
    if not any(fnmatch(bare, measure) for measure in measures):
        near = get_close_matches(bare, measures, n=1)
        suggestion = f"did you mean {near[0]!r}? " if near else ""
        hint = f"{suggestion}available: {', '.join(measures)}, with the prefix {PREFIX} for evaluations"
        raise PlanError(f"--by {by}: {plan.recipe.method.type} runs log no such metric", hint=hint)
    if by.startswith(PREFIX) and name is None:
        raise PlanError(f"--by {by}: no evaluation data", hint=f"set data.eval, or pass --by {bare}")
    return Measure(by, not by.endswith(LESS_IS_BETTER))
