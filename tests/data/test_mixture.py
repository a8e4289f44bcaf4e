"""Mixtures: shares as the weights say, nothing used twice or left out that should not be, turns in proportion."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.data.packing.sequences import Mixing, mix


def lengths(*sizes: int, tokens: int = 10) -> list[np.ndarray]:
    return [np.full(size, tokens, dtype=np.int32) for size in sizes]


def shown(mixture) -> str:
    """The order of the sources as letters."""
    return "".join("ab"[number] for number in mixture.source)


def test_without_weights_every_sequence_is_taken_once_and_sources_take_turns_in_proportion():
    mixture = mix(lengths(2, 4), Mixing())
    assert shown(mixture) == "babbab"
    assert mixture.index[mixture.source == 1].tolist() == [0, 1, 2, 3]


def test_sources_follow_one_another_where_the_recipe_says_so():
    assert shown(mix(lengths(2, 3), Mixing(mixing="concatenate"))) == "aabbb"


def test_the_scarcest_source_is_taken_wholly_and_of_the_others_their_share_where_nothing_is_repeated():
    # 3 : 1 with 60 and 40 sequences: all 60, and 20 of the 40.
    mixture = mix(lengths(60, 40), Mixing(weights=(3, 1)))
    taken = [mixture.index[mixture.source == number].tolist() for number in (0, 1)]
    assert taken[0] == list(range(60))
    assert len(taken[1]) == len(set(taken[1])) == 20
    assert taken[1] == sorted(taken[1]) != list(range(20))


def test_small_sources_are_repeated_where_every_sequence_is_to_be_used():
    # 1 : 1 with 10 and 25: the ten twice, and five of them a third time.
    mixture = mix(lengths(10, 25), Mixing(weights=(1, 1), stopping_strategy="all_exhausted"))
    counts = np.bincount(mixture.index[mixture.source == 0])
    assert sorted(counts.tolist()) == [2] * 5 + [3] * 5
    assert sorted(mixture.index[mixture.source == 1].tolist()) == list(range(25))


def test_weights_count_tokens_where_the_recipe_says_so():
    # A hundred tokens of each: ten long sequences, and a hundred of a token.
    mixture = mix([np.full(10, 10), np.ones(300, dtype=int)], Mixing(weights=(1, 1), weight_by="tokens"))
    assert np.bincount(mixture.source).tolist() == [10, 100]


def test_the_same_part_is_drawn_every_time():
    drawn = [mix(lengths(5, 90), Mixing(weights=(1, 3))).index.tolist() for _ in range(2)]
    assert drawn[0] == drawn[1]


SOURCES = st.lists(
    st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.floats(0.05, 20)), min_size=2, max_size=4
)


@settings(max_examples=300)
@given(SOURCES, st.sampled_from(["rows", "tokens"]), st.sampled_from(["first_exhausted", "all_exhausted"]))
def test_shares_come_as_near_to_the_weights_as_whole_sequences_can(sources, weight_by, stopping_strategy):
    sizes = [np.array(of_source) for of_source, _ in sources]
    weights = tuple(weight for _, weight in sources)
    mixture = mix(sizes, Mixing(weights, weight_by, stopping_strategy))
    amounts = []
    for number, of_source in enumerate(sizes):
        index = mixture.index[mixture.source == number]
        times = np.bincount(index, minlength=len(of_source))
        assert times.max() - times.min() <= 1
        assert len(index) >= 1
        if stopping_strategy == "first_exhausted":
            assert times.max() == 1
        else:
            assert times.min() >= 1
        amounts.append(of_source[index].sum() if weight_by == "tokens" else len(index))
    wholes = [of_source.sum() if weight_by == "tokens" else len(of_source) for of_source in sizes]
    per_weight = [whole / weight for whole, weight in zip(wholes, weights, strict=True)]
    total = min(per_weight) if stopping_strategy == "first_exhausted" else max(per_weight)
    step = [of_source.max() if weight_by == "tokens" else 1 for of_source in sizes]
    for amount, weight, largest in zip(amounts, weights, step, strict=True):
        assert abs(amount - weight * total) <= largest


@pytest.mark.parametrize("weight_by", ["rows", "tokens"])
def test_shares_converge_to_the_weights_as_sources_grow(weight_by):
    errors = []
    for scale in (10, 100, 1000, 10_000):
        rng = np.random.default_rng(scale)
        sizes = [rng.integers(1, 100, scale * n + 7) for n in (1, 2, 3)]
        mixture = mix(sizes, Mixing((0.21, 0.33, 0.46), weight_by))
        taken = [sizes[n][mixture.index[mixture.source == n]] for n in range(3)]
        amounts = np.array([t.sum() if weight_by == "tokens" else len(t) for t in taken])
        errors.append(np.abs(amounts / amounts.sum() - (0.21, 0.33, 0.46)).max())
    assert errors[-1] < 1e-4
    assert errors[-1] < errors[0]
