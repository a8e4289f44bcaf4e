"""A sweep in a terminal: its plans before it begins, a line for each run, and one table."""

from collections.abc import Sequence
from textwrap import shorten

from rich.console import Console, Group, RenderableType
from rich.table import Column
from rich.text import Text

from tunekit.display.drawing import numbers, plain_table
from tunekit.display.plan import total_words, variants_table
from tunekit.estimates.throughput.speed import duration
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.runs.events import Event
from tunekit.sweeps.folder import FAILED, FINISHED, Outcome, Sweep, heading, short_words

WHY_LETTERS = 90
"""Of why a run failed that are told at once; the table has it all."""

STYLES = {"finished": "green", "failed": "red", "died": "red", "stuck": "red", "interrupted": "yellow", "pruned": "dim"}


class SweepProgress:
    """Shows a sweep as it goes: the plans, and a line for each run that begins or ends.

    Args:
        console: Where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seconds: list[float] = []
        """Seconds of each run that has finished here."""
        self._parallel = 1

    def __call__(self, event: Event) -> None:
        """Show what happened."""
        if event["event"] == "sweep":
            self._on_sweep(event["sweep"], event)
        elif event["event"] == "stop":
            again = "; press again to stop at once" if event["again"] else ""
            self._console.print(Text(f"stopping the runs with a checkpoint each{again}", style="yellow"))
        else:
            outcome: Outcome = event["outcome"]
            where = f"{outcome.trial.number} of {event['num_runs']}  {short_words(outcome.trial.changes)}"
            if event["event"] == "begins":
                verb = "started" if outcome.run is None else "resumed"
                self._console.print(Text(f"{where}  {verb}"))
            else:
                remaining = self._left(outcome, event["num_runs"])
                self._console.print(
                    Text.assemble(f"{where}  ", (_ended(outcome), STYLES.get(outcome.state, "")), (remaining, "dim"))
                )

    def _left(self, one: Outcome, num_runs: int) -> str:
        """Return the estimated time of the remaining runs, where finished ones allow it."""
        self._seconds += [] if one.seconds is None else [one.seconds]
        num_left = num_runs - one.trial.number
        if not self._seconds or num_left <= 0:
            return ""
        mean = sum(self._seconds) / len(self._seconds)
        return f"  about {duration(mean * num_left / self._parallel)} left"

    def _on_sweep(self, sweep: Sweep, event: Event) -> None:
        spec, num_plans = sweep.spec, len(event["plans"])
        self._parallel = spec.parallel
        self._console.print("", variants_table(event["plans"]))
        at_once = f"{spec.parallel} in parallel" if spec.parallel > 1 else "sequential"
        if spec.one_device_each:
            at_once += ", one accelerator each"
        of_them = f" (planned: {num_plans} of the possible trials)" if spec.search == "optuna" else ""
        words = f"{spec.num_runs} runs, {at_once}{of_them}: {total_words(*event['estimate'])}"
        self._console.print(Text(words, style="bold"))
        self._console.print(Text(spec.measure.how, style="dim"))
        self._console.print(Text(f"sweep  {sweep.path}\n", style="bold"))


def _ended(one: Outcome) -> str:
    """Describe how a run ended."""
    if one.state in (FAILED, "died", "stuck"):
        return f"{one.state}: {shorten(one.why or '', WHY_LETTERS, placeholder=' ...')}"
    parts = [one.state]
    if one.value is not None:
        parts.append(f"{one.value:.4f}")
    if one.seconds is not None:
        parts.append(duration(one.seconds))
    return "  ".join(parts)


def sweep_table(sweep: Sweep, outcomes: Sequence[Outcome]) -> RenderableType:
    """All runs of a sweep in one table, the best marked; below it what became of those that did not finish."""
    spec, best = sweep.spec, sweep.best(outcomes)
    keys = list(spec.axes)
    folded = [Column(heading(key), overflow="fold") for key in keys]
    figures = numbers("steps", spec.measure.words.replace("evaluation ", "eval "), "tokens/s", "time")
    table = plain_table(*numbers("run"), *folded, *figures, "state", "")
    table.pad_edge = False
    for outcome in outcomes:
        table.add_row(
            str(outcome.trial.number),
            *(Text(to_inline_yaml(outcome.trial.changes[key])) for key in keys),
            f"{outcome.step}/{outcome.num_steps}" if outcome.num_steps else "",
            "" if outcome.value is None else f"{outcome.value:.4f}",
            "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}",
            "" if outcome.seconds is None else duration(outcome.seconds),
            Text(outcome.state, style=STYLES.get(outcome.state, "cyan")),
            Text("← best", style="bold green") if outcome is best else "",
            style="bold" if outcome is best else "",
        )
    return Group(
        Text(sweep.name, style="bold"), table, Text(spec.measure.how, style="dim"), *_below(sweep, outcomes, best)
    )


def _below(sweep: Sweep, outcomes: Sequence[Outcome], best: Outcome | None) -> list[RenderableType]:
    """Render why runs failed, and the next steps."""
    lines: list[RenderableType] = [
        Text.assemble((f"run {outcome.trial.number} {outcome.state}: ", "red"), outcome.why)
        for outcome in outcomes
        if outcome.why is not None
    ]
    if best is not None and best.run is not None:
        lines.append(Text(f"best run: {best.run.path}, {short_words(best.trial.changes)}"))
    if (
        any(outcome.state not in (FINISHED, FAILED, "pruned") for outcome in outcomes)
        or len(outcomes) < sweep.spec.num_runs
    ):
        goes_on = "still running" if sweep.is_conducted() else f"resume with: tunekit resume {sweep.path}"
        lines.append(Text(goes_on, style="bold"))
    return lines
