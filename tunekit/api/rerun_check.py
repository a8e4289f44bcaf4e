"""Comparison of a run with its repetition: step by step, and bit by bit where nothing else differs.

On a processor the same sums in the same order give the same bits. Other versions, another processor or other threads
add in another order, and kernels of accelerators add with atomics in no fixed one: every sum is then rounded otherwise,
and each step builds on the one before. So losses may drift apart by what is stated below, and no more.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tunekit.runs.events import Event
from tunekit.runs.metrics import judged_by
from tunekit.runs.run import Run
from tunekit.runs.versions import MadeWith, made_with

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-2, 5e-2
"""Share of a loss, and of 1 where that is more, by which losses may differ where sums are added in another order. Of
float32's rounding (2**-24) and bfloat16's (2**-8) it is far more: a difference doubles in some steps of training."""


@dataclass(frozen=True)
class Difference:
    """A value that is not what it was.

    Attributes:
        name: Its name in the log.
        step: The step.
        was: What the run logged; None where it logged none.
        is_now: What its repetition did.
    """

    name: str
    step: int
    was: float | str | None
    is_now: float | str | None

    def words(self) -> str:
        """It as people read it."""
        values = [f"{value:.9g}" if isinstance(value, float) else str(value) for value in (self.was, self.is_now)]
        return f"{self.name} at step {self.step:,} was {values[0]}, and is {values[1]} now"


@dataclass(frozen=True)
class Agreement:
    """Result of comparing a repetition with its run.

    Attributes:
        run: The run.
        again: Its repetition.
        otherwise: What is otherwise, for which the last bits may differ; empty where they may not.
        tolerance: The share of a loss that may differ; 0 where nothing may.
        num_values: Losses and measures that were compared.
        first: The first that is not the same to the last bit; None where all are.
        beyond: The first that differs by more than is allowed; None where none does.
        same_weights: Whether the weights are the same to the last bit; None where the run's are gone.
    """

    run: Run
    again: Run
    otherwise: tuple[str, ...]
    tolerance: float
    num_values: int
    first: Difference | None
    beyond: Difference | None
    same_weights: bool | None

    @property
    def agrees(self) -> bool:
        """True if both agree as far as can be expected."""
        return self.beyond is None and (self.same_weights is not False or self.tolerance > 0)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "run": str(self.run.path),
            "again": str(self.again.path),
            "agrees": self.agrees,
            "otherwise": list(self.otherwise),
            "tolerance": self.tolerance,
            "num_values": self.num_values,
            "first": None if self.first is None else asdict(self.first),
            "beyond": None if self.beyond is None else asdict(self.beyond),
            "same_weights": self.same_weights,
        }

    def lines(self) -> Iterator[str]:
        """The verdict in sentences."""
        if self.otherwise:
            yield f"not expected to the last bit: {'; '.join(self.otherwise)}"
            yield f"allowed for it: {self.tolerance:.0%} of a loss, as each step builds on the rounding before it"
        weights = {True: "so are the weights", False: "the weights are not", None: "the run's weights are gone"}
        if self.first is None:
            yield f"{self.num_values} losses and measures are the same to the last bit, {weights[self.same_weights]}"
        else:
            yield f"the first that differs: {self.first.words()}"
        if self.beyond is not None and self.tolerance > 0:
            yield f"too far apart: {self.beyond.words()}"
        yield "it agrees" if self.agrees else "it does not agree"


def agreement_of(run: Run, again: Run) -> Agreement:
    """Compare a repetition with its run."""
    otherwise = tuple(_otherwise(run, again))
    half = run.plan.dtype != "float32"
    tolerance = (HALF_TOLERANCE if half else FLOAT32_TOLERANCE) if otherwise else 0.0
    was, now = _values(run.events()), _values(again.events())
    places = sorted(was.keys() | now.keys())
    differing = [
        Difference(name, step, was.get((step, name)), now.get((step, name)))
        for step, name in places
        if was.get((step, name)) != now.get((step, name))
    ]
    beyond = next((difference for difference in differing if not _is_near(difference, tolerance)), None)
    weights = _weights(run.model_path)
    same = weights == _weights(again.model_path) if weights else None
    return Agreement(run, again, otherwise, tolerance, len(places), next(iter(differing), None), beyond, same)


def _values(events: Sequence[Event]) -> dict[tuple[int, str], float | str]:
    """Losses and what else a run is judged by, by step and name; the later word counts."""
    learned = judged_by(sorted({name for event in events if event["event"] == "log" for name in event}))
    names = dict.fromkeys((learned, "loss"))
    return {
        (event["step"], f"{before}{name}"): event[f"{before}{name}"]
        for event in events
        for before in ("", "eval_")
        for name in names
        if event["event"] == ("eval" if before else "log") and event.get(f"{before}{name}") is not None
    }


def _is_near(one: Difference, tolerance: float) -> bool:
    if not isinstance(one.was, float | int) or not isinstance(one.is_now, float | int):
        return False
    return math.isclose(one.was, one.is_now, rel_tol=tolerance, abs_tol=tolerance)


def _weights(folder: Path) -> list[tuple[str, str]]:
    differing_layers = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            differing_layers.append((file.name, hashlib.file_digest(stream, "sha256").hexdigest()))
    return differing_layers


def _otherwise(run: Run, again: Run) -> Iterator[str]:
    """Yield reasons for which the last bits of two runs may differ."""
    was, now = made_with(run), made_with(again)
    if was is None or now is None:
        yield "what the run was made with was not written down"
    else:
        yield from _of_versions(was, now)
    before, after = run.plan.device, again.plan.device
    if before.name != after.name or run.status()["host"] != again.status()["host"]:
        yield f"it ran on {before.name} of {run.status()['host']}"
    if after.kind != "cpu":
        yield f"{after.name} adds with atomics in no fixed order"


def _of_versions(was: MadeWith, now: MadeWith) -> Iterator[str]:
    for name in dict.fromkeys((*was.versions, *now.versions)):
        if was.versions.get(name) != now.versions.get(name):
            yield f"{name} was {was.versions.get(name, 'not there')}, and is {now.versions.get(name, 'not there')}"
    if was.commit != now.commit:
        yield f"tunekit's commit was {was.commit}, and is {now.commit}"
    if was.num_threads != now.num_threads:
        yield f"it computed with {was.num_threads} threads, and does with {now.num_threads}"
