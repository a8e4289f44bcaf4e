"""What a sweep tries: words, ranges, combinations and draws."""

import math

import pytest

from tunekit.errors import RecipeError
from tunekit.sweeps.values import Span, axes_of, corners, drawn, grid, read_span, read_words


def test_words_of_several_values_are_tried_and_others_hold_for_all():
    words = [
        "train.learning_rate=1e-5,1e-4",
        "adapter.rank=8..64",
        "train.max_steps=10",
        "adapter.target_modules=[q_proj,v_proj]",
        "method.trainer_args={packing: false, seed: 1}",
    ]
    axes, overrides = read_words(words)
    assert axes == {"train.learning_rate": (1e-5, 1e-4), "adapter.rank": Span(8, 64, log=False)}
    assert overrides == words[2:]


@pytest.mark.parametrize(
    ("written", "low", "high", "log"),
    [
        ("1e-5..1e-3", 1e-5, 1e-3, True),
        ("linear:1e-5..1e-3", 1e-5, 1e-3, False),
        ("8..64", 8, 64, False),
        ("log:8..64", 8, 64, True),
        ("0..0.5", 0, 0.5, False),
        ("-1.5..2", -1.5, 2, False),
    ],
)
def test_a_range_is_logarithmic_where_its_ends_are_far_apart_or_it_says_so(written, low, high, log):
    span = read_span("key", written)
    assert (span.low, span.high, span.log) == (low, high, log)
    assert read_span("key", str(span)) == span


@pytest.mark.parametrize("written", ["a..b", "rows.jsonl", "../rows.jsonl", "1e-5", "3..", "..4"])
def test_what_is_no_range_is_a_value(written):
    assert read_span("key", written) is None


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("adapter.rank=", "no value after '='"),
        ("adapter.rank=,", "invalid list of values"),
        ("adapter.rank=[8,", "invalid list of values"),
        ("adapter.rank=8,8", "duplicate value 8"),
        ("adapter.rank=64..8", "64 is not below 8"),
        ("adapter.dropout=log:0..0.5", "a log scale cannot start at 0"),
    ],
)
def test_words_that_say_nothing_to_try_are_refused(word, said):
    with pytest.raises(RecipeError, match=r"^adapter\.") as raised:
        read_words([word])
    assert said in str(raised.value)


def test_a_key_is_swept_over_once():
    with pytest.raises(RecipeError, match="is set twice"):
        read_words(["adapter.rank=8,16", "adapter.rank=32,64"])
    with pytest.raises(RecipeError, match="no values to try"):
        axes_of({"adapter.rank": []})


def test_a_grid_has_every_combination_and_the_last_key_changes_fastest():
    found = grid({"a": (1, 2), "b": ("x", "y")})
    assert found == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(RecipeError, match=r"a: a grid needs lists, not ranges.*--random"):
        grid({"a": Span(0, 1, log=False), "b": (1, 2)})
    with pytest.raises(RecipeError, match="11 x 11 = 121 runs exceed the limit of 100"):
        grid({"a": tuple(range(11)), "b": tuple(range(11))})


def test_draws_are_the_same_for_a_seed_and_no_two_are_alike():
    axes = {
        "train.learning_rate": Span(1e-5, 1e-3, log=True),
        "adapter.rank": (4, 8),
        "train.seed": Span(1, 3, log=False),
    }
    found = drawn(axes, 20, seed=7)
    assert found == drawn(axes, 20, seed=7) != drawn(axes, 20, seed=8)
    assert len({str(one) for one in found}) == 20
    assert all(1e-5 <= one["train.learning_rate"] <= 1e-3 for one in found)
    assert {one["train.seed"] for one in found} == {1, 2, 3} and {one["adapter.rank"] for one in found} == {4, 8}
    # All that there is, in some order; and no more.
    lists = {"a": (1, 2), "b": (3, 4)}
    assert sorted(map(str, drawn(lists, 4, seed=0))) == sorted(map(str, grid(lists)))
    with pytest.raises(RecipeError, match="5 runs exceed the 4 combinations"):
        drawn(lists, 5, seed=0)


def test_a_logarithmic_range_gives_each_factor_its_share():
    found = drawn({"a": Span(1e-6, 1e-2, log=True)}, 100, seed=0)
    assert 30 < sum(one["a"] < 1e-4 for one in found) < 70
    assert Span(1e-6, 1e-2, log=True).at(0.5) == pytest.approx(1e-4)
    assert Span(0.0, 0.3, log=False).at(0.5) == pytest.approx(0.15)
    assert [Span(1, 4, log=False).at(share) for share in (0, 0.3, 0.6, 0.99)] == [1, 2, 3, 4]
    assert math.isclose(Span(1e-5, 1e-3, log=True).at(0.123), 1.76e-5)


def test_corners_have_every_value_and_both_ends_of_a_range():
    found = corners({"a": Span(1, 9, log=False), "b": ("x", "y", "z")})
    assert found == [{"a": 1, "b": "x"}, {"a": 9, "b": "y"}, {"a": 1, "b": "z"}]
