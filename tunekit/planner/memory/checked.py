"""The range in which the formulas of memory were compared with traces, and what a plan outside of it says of that."""

from tunekit.planner.facts import ModelFacts
from tunekit.planner.memory.activations import TRACED, is_traced
from tunekit.planner.plan import count

CHECKED_PARAMS = 70_600_000_000
"""Parameters of the largest model of which a step was traced (tests/planner/grid.py, grid_shards.py)."""

CHECKED_LENGTH = 8192
"""Tokens of the longest row of such a step."""


def why_unchecked(model: ModelFacts, max_length: int) -> str | None:
    """Return what of a run lies outside of what was traced, with the range that was; None where nothing does.

    Args:
        model: The model.
        max_length: Tokens of the longest row.
    """
    outside = []
    if not is_traced(model):
        outside.append(f"{model.model_type} (checked: {', '.join(sorted(TRACED))})")
    if model.num_params > CHECKED_PARAMS:
        outside.append(f"{count(model.num_params)} parameters (checked: up to {count(CHECKED_PARAMS)})")
    if max_length > CHECKED_LENGTH:
        outside.append(f"rows of {max_length:,} tokens (checked: up to {CHECKED_LENGTH:,})")
    return f"memory was not checked for {' and '.join(outside)}" if outside else None
