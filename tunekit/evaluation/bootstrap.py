"""Intervals of 95% for figures over rows: how far they would move had other rows of the same kind been drawn.

A figure is a weighted mean over rows: a loss weighs each row by its tokens, a share of right answers by one. The
percentile bootstrap (Efron, 1979) draws as many rows again, with replacement, two thousand times from a fixed seed, and
reads the interval from what the figure becomes. A difference draws the same rows for both models, so that what is hard
for both cancels out. A share of rows that are right or wrong has Wilson's interval (1927) instead, which also holds
where all are right: the bootstrap would be certain of it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunekit.runs.evaluation_result import Estimate, Score

if TYPE_CHECKING:
    import numpy as np

NUM_RESAMPLES = 2000
SEED = 0
Z = 1.959963984540054
"""Quantile 0.975 of the normal distribution."""

Shape = Callable[[Any], Any]
"""Statistic that is computed from a mean."""

_AT_ONCE = 2**22
"""Rows that are drawn at once, over all resamples."""


@dataclass(frozen=True)
class Sample:
    """A figure of each row, float64, `(rows,)`, and what each counts; a row that says nothing counts 0."""

    values: "np.ndarray"
    weights: "np.ndarray"

    @property
    def num_rows(self) -> int:
        """Rows that count."""
        return int((self.weights > 0).sum())

    @property
    def is_share(self) -> bool:
        """True if each row is right or wrong, and counts once."""
        return bool(
            ((self.values == 0) | (self.values == 1) | (self.weights == 0)).all()
            and ((self.weights == 0) | (self.weights == 1)).all()
        )

    @property
    def mean(self) -> float:
        """The weighted mean."""
        return float((self.values * self.weights).sum() / self.weights.sum())


@dataclass(frozen=True)
class Figure:
    """Definition of a figure before it is computed.

    Attributes:
        name: What it is called in metrics.
        words: What it is called by people.
        digits: How it is written.
        higher_is_better: Whether more of it is better.
        is_perplexity: Whether the exponential of the mean is meant.
    """

    name: str
    words: str
    digits: str
    higher_is_better: bool | None
    is_perplexity: bool = False


def scored(figure: Figure, of: str, after: Sample, before: Sample | None) -> Score:
    """A figure of a model, beside that of the model before it, with intervals."""
    import numpy as np

    shape: Shape = np.exp if figure.is_perplexity else np.positive
    resampled = [_resampled(sample) if sample is not None else None for sample in (after, before)]
    after_means, before_means = resampled
    is_share = figure.digits.endswith("%") and after.is_share
    ours = _estimate(after, after_means, shape, is_share=is_share)
    theirs = gap = None
    if before is not None:
        theirs = _estimate(before, before_means, shape, is_share=is_share)
        gap = Estimate(ours.value - theirs.value)
        if after_means is not None and before_means is not None:
            gap = Estimate(gap.value, *_ends(shape(after_means) - shape(before_means)))
    interval = (
        "Wilson; difference: bootstrap" if is_share and gap is not None else "Wilson" if is_share else "bootstrap"
    )
    return Score(
        name=figure.name,
        words=figure.words,
        digits=figure.digits,
        of=of,
        num_rows=after.num_rows,
        higher_is_better=figure.higher_is_better,
        interval=interval,
        after=ours,
        before=theirs,
        difference=gap,
    )


def wilson(num_right: float, num_rows: int) -> tuple[float, float]:
    """Wilson's interval of a share: its ends."""
    share, squared = num_right / num_rows, Z * Z / num_rows
    middle = (share + squared / 2) / (1 + squared)
    half = Z * math.sqrt(share * (1 - share) / num_rows + squared / (4 * num_rows)) / (1 + squared)
    return max(0.0, middle - half), min(1.0, middle + half)


def normal(value: float, error: float | None) -> Estimate:
    """A figure with the interval that its standard error gives; without one where that is not known, or nothing."""
    if not error or not math.isfinite(error):
        return Estimate(value)
    return Estimate(value, value - Z * error, value + Z * error)


def _estimate(sample: Sample, means: "np.ndarray | None", shape: Shape, *, is_share: bool) -> Estimate:
    value = float(shape(sample.mean))
    if is_share:
        return Estimate(value, *wilson((sample.values * sample.weights).sum(), sample.num_rows))
    return Estimate(value) if means is None else Estimate(value, *_ends(shape(means)))


def _ends(values: "np.ndarray") -> tuple[float, float] | tuple[None, None]:
    """The ends of an interval; none where every resample gives the same, which tells nothing of other rows."""
    import numpy as np

    low, high = np.nanpercentile(values, [2.5, 97.5])
    return (float(low), float(high)) if low < high else (None, None)


def _resampled(sample: Sample) -> "np.ndarray | None":
    """The mean of each resample, `(resamples,)`; None of a single row. Rows are the same for samples of one size."""
    import numpy as np

    num_rows = len(sample.values)
    if sample.num_rows < 2:
        return None
    drawn = np.random.default_rng(SEED)
    weighted, means = sample.values * sample.weights, np.empty(NUM_RESAMPLES)
    size = max(1, _AT_ONCE // num_rows)
    for start in range(0, NUM_RESAMPLES, size):
        rows = drawn.integers(num_rows, size=(min(size, NUM_RESAMPLES - start), num_rows))
        totals = sample.weights[rows].sum(-1)
        # A resample without a row that counts has no mean.
        sums = weighted[rows].sum(-1)
        means[start : start + size] = np.divide(sums, totals, out=np.full(len(rows), np.nan), where=totals > 0)
    return means
