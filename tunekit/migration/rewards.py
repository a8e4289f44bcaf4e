"""Rewards of other tools: those that tunekit has as well, and functions of the user's own."""

import re
from pathlib import Path
from typing import Any

from tunekit.migration.draft import Draft, Rule, UnfitError, names, number
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.recipe.reading.parse import to_inline_yaml

THINKING = r"<think>.*</think>\s*<answer>.*</answer>"
_KNOWN: dict[str, dict[str, Any]] = {
    "accuracy": {"type": "math", "column": "solution"},
    "accuracy_reward": {"type": "math", "column": "solution"},
    "think_format_reward": {"type": "regex", "pattern": r"<think>.*</think>.*"},
    "format": {"type": "regex", "pattern": THINKING},
    "repetition": {"type": "repetition"},
}
"""Rewards by their names in TRL and ms-swift, and ours."""


def rewards(weights_key: str) -> Rule:
    """The rule of a key that lists rewards.

    Args:
        weights_key: The key of the original with their weights.
    """

    def rule(draft: Draft, entry: Entry) -> Fate:
        reward_names = names(entry.value)
        weights = draft.get(weights_key) or []
        weights = weights if isinstance(weights, list) else [weights]
        converted, lost = [], []
        for place, name in enumerate(reward_names):
            reward = _reward(name)
            if reward is None:
                lost.append(name)
                continue
            weight = number(weights[place]) if place < len(weights) else 1
            converted.append({**reward, **({"weight": weight} if weight != 1 else {})})
        if converted:
            draft.put("method.rewards", converted, entry.key)
        if lost:
            hint = "write it as module:function of a file in the working directory"
            raise UnfitError(f"no such reward here: {', '.join(lost)}; {hint}, or `tunekit explain method.rewards`")
        return Fate("carried", f"method.rewards: {to_inline_yaml(converted)}")

    return rule


def _reward(name: str) -> dict[str, Any] | None:
    """A reward by its name elsewhere; None where there is none, here or in a file of the user's."""
    if name in _KNOWN:
        return _KNOWN[name]
    module, _, function = name.replace(":", ".").rpartition(".")
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", module) and Path(f"{module.replace('.', '/')}.py").is_file():
        return {"type": "function", "path": f"{module}:{function}"}
    return None
