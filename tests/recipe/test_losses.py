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
            "method.loss_weights: has 1 weights for 2 losses (sigmoid, sft); give one weight per loss",
        ),
        ({"type": "dpo", "label_smoothing": 0.1}, [], "method.label_smoothing: has no effect with sigmoid; unset it"),
        ({"type": "dpo", "loss_type": "exo_pair"}, [], "method.label_smoothing: must be greater than 0 with loss exo"),
        ({"type": "kto"}, ["train.global_batch_size=1"], "train.global_batch_size: must be at least 2 with method kto"),
        (
            {"type": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0},
            [],
            "method.desirable_weight: is 0 like undesirable_weight, so the loss is always 0",
        ),
        (
            {"type": "kto", "precompute_ref_log_probs": True},
            ["data.streaming=true", "train.max_steps=5"],
            "method.precompute_ref_log_probs: unsupported with data.streaming",
        ),
        (
            {"type": "kto"},
            ["method.trainer_args.dataset_num_proc=2"],
            "one process reads the rows, to keep their order",
        ),
        ({"type": "cpo", "loss_type": "ipo", "label_smoothing": 0.1}, [], "has no effect with ipo; unset it"),
        ({"type": "cpo", "simpo_gamma": 1.0}, [], "method.simpo_gamma: has no effect with sigmoid"),
        ({"type": "cpo", "loss_type": "alphapo"}, [], "method.loss_type: alphapo without alpha equals simpo"),
        (
            {"type": "cpo", "loss_type": "alphapo", "cpo_alpha": 0.5, "trainer_args": {"alpha": 0.1}},
            [],
            "method.cpo_alpha: must be 0 with alphapo",
        ),
        ({"type": "orpo"}, ["method.trainer_args.generate_during_eval=true"], "use output.sample_prompts"),
        ({"type": "reward"}, ["output.sample_prompts=[hi]"], "whose model does not generate; unset it"),
        ({"type": "reward"}, ["data.packing=true"], "data.packing: unsupported with method reward"),
        (
            {"type": "orpo"},
            ["adapter.dropout=0.1"],
            "no effect with method orpo: TRL disables dropout",
        ),
        ({"type": "kto"}, ["adapter.dropout=0.1"], "disables dropout, so that the model starts equal to the reference"),
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
