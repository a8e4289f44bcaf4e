"""Several sources in one: how much of each, and in which order.

Without weights everything is taken once. With weights, the shares of the sources are as the weights; the names are
those of `datasets.interleave_datasets`. With `first_exhausted` no sequence is taken twice: the source that is scarcest
for its weight is taken wholly, and of the others as much as belongs to it. With `all_exhausted` every sequence is taken
at least once: the source that is largest for its weight is taken once, and the others are repeated. What part of a
source is taken is drawn by lot, from a seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

MIXING_SEED = 0
"""Seed of the lots by which a part of a source is drawn."""


@dataclass(frozen=True)
class Mixing:
    """Settings of a mixture of sources.

    Attributes:
        weights: The weight of each source, or None to take everything once.
        weight_by: What the weights count: sequences (a row, or a part of a long text) or their tokens.
        stopping_strategy: Whether scarce sources end the mixture or are repeated.
        mixing: Whether the sources take turns in proportion, or follow one another.
    """

    weights: tuple[float, ...] | None = None
    weight_by: Literal["rows", "tokens"] = "rows"
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted"
    mixing: Literal["interleave", "concatenate"] = "interleave"


@dataclass(frozen=True)
class Mixture:
    """Sequences of a mixture, in order.

    Attributes:
        source: The number of the source of each, int64, `(sequences,)`.
        index: Its index in that source, int64, `(sequences,)`.
    """

    source: "np.ndarray"
    index: "np.ndarray"


def mix(lengths: "Sequence[np.ndarray]", mixing: Mixing) -> Mixture:
    """Choose from several sources.

    Args:
        lengths: For each source the tokens of its sequences; none is empty.
        mixing: How.
    """
    import numpy as np

    taken_indices = [np.arange(len(of_source)) for of_source in lengths]
    if mixing.weights is not None:
        amounts = [of_source.sum() if mixing.weight_by == "tokens" else len(of_source) for of_source in lengths]
        totals = [amount / weight for amount, weight in zip(amounts, mixing.weights, strict=True)]
        total = min(totals) if mixing.stopping_strategy == "first_exhausted" else max(totals)
        taken_indices = [
            _take(of_source, weight * total, mixing.weight_by, i)
            for i, (of_source, weight) in enumerate(zip(lengths, mixing.weights, strict=True))
        ]
    source = np.repeat(np.arange(len(taken_indices)), [len(indices) for indices in taken_indices])
    index = np.concatenate(taken_indices)
    if mixing.mixing == "concatenate" or len(taken_indices) == 1:
        return Mixture(source, index)
    # The k-th of n stands at (k + 1/2) / n of the way.
    way = np.concatenate([(np.arange(len(indices)) + 0.5) / max(1, len(indices)) for indices in taken_indices])
    order = np.argsort(way, kind="stable")
    return Mixture(source[order], index[order])


def _take(lengths: "np.ndarray", amount: float, weight_by: str, number: int) -> "np.ndarray":
    """Indices of so many sequences or tokens of a source, in its order: all of it as often as it goes in, and a lot."""
    import numpy as np

    whole = float(lengths.sum()) if weight_by == "tokens" else float(len(lengths))
    times = int(amount / whole + 1e-9)
    remainder = amount - times * whole
    drawn = np.random.default_rng((MIXING_SEED, number)).permutation(len(lengths))
    sizes = lengths[drawn] if weight_by == "tokens" else np.ones(len(drawn))
    # As many as come nearest to the rest, and at least one sequence of every source.
    num_drawn = int(np.searchsorted(np.cumsum(sizes) - sizes / 2, remainder - 1e-9))
    num_drawn = max(num_drawn, int(times == 0))
    return np.concatenate([np.tile(np.arange(len(lengths)), times), np.sort(drawn[:num_drawn])])
