"""Completions that replace others, and recipes in which they cannot. Losses are in `test_grpo_loss`."""

import pytest
import torch

from tunekit.errors import RecipeError
from tunekit.methods.rollouts.groups import merge
from tunekit.recipe.load import load_recipe

PAD = 9


def scored(prompts, completions):
    """Two completions as TRL's trainer returns them, with a log-probability that is their token's tenth."""

    def tensor(rows, fill, left=False):
        length = max(map(len, rows))
        return torch.tensor(
            [[fill] * (length - len(row)) + row if left else row + [fill] * (length - len(row)) for row in rows]
        )

    ids = tensor(completions, PAD)
    return {
        "prompt_ids": tensor(prompts, PAD, left=True),
        "prompt_mask": tensor([[1] * len(row) for row in prompts], 0, left=True),
        "completion_ids": ids,
        "completion_mask": (ids != PAD).long(),
        "tool_mask": tensor([[1] * len(row) for row in completions], 1),
        "ref_per_token_logps": ids * (ids != PAD) / 10,
        "advantages": torch.tensor([float(len(row)) for row in completions]),
        "num_items_in_batch": torch.tensor(0),
    }


@pytest.mark.parametrize("replaced", [0, 1])
def test_completions_of_other_lengths_take_the_place_of_some(replaced):
    """The batch is that of the chosen ones alone, but for padding."""
    first, second = [([1, 2], [3]), ([4], [5, 6])], [([7, 1, 2], [3, 4, 5]), ([6], [7])]
    chosen = [second[place] if place == replaced else first[place] for place in (0, 1)]
    old, new, expected = (scored(*map(list, zip(*rows, strict=True))) for rows in (first, second, chosen))
    merged = merge(old, new, torch.tensor([place == replaced for place in (0, 1)]), PAD)
    for row in (0, 1):
        for name, side in (("prompt", "prompt_mask"), ("completion", "completion_mask")):
            kept, wished = merged[side][row].bool(), expected[side][row].bool()
            assert torch.equal(merged[f"{name}_ids"][row][kept], expected[f"{name}_ids"][row][wished])
            assert set(merged[f"{name}_ids"][row][~kept].tolist()) <= {PAD}
        length = int(expected["completion_mask"][row].sum())
        for name in ("ref_per_token_logps", "tool_mask"):
            assert torch.equal(merged[name][row][:length], expected[name][row][:length])
    assert torch.equal(merged["advantages"], expected["advantages"])
    assert merged["prompt_ids"].shape == (2, 3) and merged["completion_ids"].shape == (2, 3)
    assert merged["num_items_in_batch"] is old["num_items_in_batch"]


@pytest.mark.parametrize(
    "settings",
    [{"scale_rewards": "batch"}, {"trainer_args": {"multi_objective_aggregation": "normalize_then_sum"}}],
)
def test_groups_that_are_compared_with_each_other_are_not_replaced(settings):
    method = {"type": "grpo", "rewards": ["exact_match"], "max_resample_times": 2}
    recipe = {"model": "pico", "data": {"train": "example:sums.jsonl", "max_length": 600}}
    load_recipe({**recipe, "method": method})
    with pytest.raises(RecipeError, match=r"method.max_resample_times: not supported with"):
        load_recipe({**recipe, "method": {**method, **settings}})


@pytest.mark.parametrize("name", ["max_resample_times", "replay_buffer_size"])
def test_only_grpo_replaces_groups(name):
    method = {"type": "rloo", "rewards": ["exact_match"], name: 2}
    with pytest.raises(RecipeError, match=name):
        load_recipe({"model": "pico", "data": {"train": "example:sums.jsonl", "max_length": 600}, "method": method})


def test_groups_of_another_reference_are_not_replayed():
    method = {"type": "grpo", "rewards": ["exact_match"], "replay_buffer_size": 8, "beta": 0.1}
    recipe = {"model": "pico", "data": {"train": "example:sums.jsonl", "max_length": 600}, "adapter": "full"}
    load_recipe({**recipe, "method": method})
    with pytest.raises(RecipeError, match=r"method.replay_buffer_size: not supported with trainer_args.sync_ref_model"):
        load_recipe({**recipe, "method": {**method, "trainer_args": {"sync_ref_model": True}}})
