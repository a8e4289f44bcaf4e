"""Losses in recipes: fields that a loss does not read, or cannot do without, are told with their place."""

from typing import Any

import pytest

from tunekit.errors import RecipeError
from tunekit.recipe.load import load_recipe
from tunekit.recipe.methods.cpo import CPOMethod

SOURCE: dict[str, Any] = {"model": "pico", "data": {"train": "x.jsonl"}}


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        (
            {"type": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]},
            [],
            "method.loss_weights: has 1 weights for 2 losses (sigmoid, sft); give one for each loss",
        ),
        ({"type": "dpo", "label_smoothing": 0.1}, [], "method.label_smoothing: means nothing with sigmoid; leave it"),
        ({"type": "dpo", "loss_type": "exo_pair"}, [], "method.label_smoothing: must be more than 0 with the loss exo"),
        ({"type": "kto"}, ["train.micro_batch_size=1"], "train.micro_batch_size: must be 2 or more with method kto"),
        ({"type": "kto"}, ["train.global_batch_size=1"], "train.global_batch_size: must be 2 or more with method kto"),
        (
            {"type": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0},
            [],
            "method.desirable_weight: is 0, and so is undesirable_weight: nothing would be learned",
        ),
        (
            {"type": "kto", "precompute_ref_log_probs": True},
            ["data.streaming=true", "train.max_steps=5"],
            "method.precompute_ref_log_probs: cannot be true with data.streaming",
        ),
        ({"type": "kto"}, ["method.trainer_args.dataset_num_proc=2"], "so that they keep their neighbours"),
        ({"type": "cpo", "loss_type": "ipo", "label_smoothing": 0.1}, [], "means nothing with ipo; leave it out"),
        ({"type": "cpo", "simpo_gamma": 1.0}, [], "method.simpo_gamma: means nothing with sigmoid"),
        ({"type": "cpo", "loss_type": "alphapo"}, [], "method.loss_type: alphapo without an alpha is simpo"),
        (
            {"type": "cpo", "loss_type": "alphapo", "cpo_alpha": 0.5, "trainer_args": {"alpha": 0.1}},
            [],
            "method.cpo_alpha: must be 0 with alphapo",
        ),
        ({"type": "orpo"}, ["method.trainer_args.generate_during_eval=true"], "use output.sample_prompts"),
        ({"type": "reward"}, ["output.sample_prompts=[hi]"], "whose model judges and does not answer; leave it out"),
        ({"type": "reward"}, ["data.packing=true"], "data.packing: cannot be true with method reward"),
        (
            {"type": "orpo"},
            ["adapter.dropout=0.1"],
            "nothing with method orpo, for which TRL switches dropout off",
        ),
        ({"type": "kto"}, ["adapter.dropout=0.1"], "switches dropout off: it would move the model from itself"),
    ],
)
def test_what_a_loss_does_not_read_is_refused(method: dict[str, Any], changes: list[str], problem: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe({**SOURCE, "method": method}, changes)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        (CPOMethod(), 1.0),
        (CPOMethod(loss_type="simpo"), 0.0),
        (CPOMethod(loss_type="simpo", cpo_alpha=0.5), 0.5),
    ],
)
def test_simpo_has_no_likelihood_unless_it_is_asked_for(method: CPOMethod, weight: float) -> None:
    assert method.likelihood_weight == weight


@pytest.mark.parametrize(
    "method",
    [
        {"type": "dpo", "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"type": "dpo", "loss_type": "robust", "label_smoothing": 0.1},
        {"type": "cpo", "loss_type": "simpo", "simpo_gamma": 1.5},
        {"type": "kto", "loss_type": "apo_zero_unpaired"},
    ],
)
def test_a_recipe_that_was_written_out_is_not_in_conflict_with_its_defaults(method: dict[str, Any]) -> None:
    recipe = load_recipe({**SOURCE, "method": method})
    assert load_recipe(recipe.model_dump()) == recipe
