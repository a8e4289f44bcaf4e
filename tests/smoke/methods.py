"""Every method with the options that it cannot do without."""

METHODS: dict[str, dict[str, object]] = {
    "sft": {},
    "dpo": {},
    "kto": {},
    "orpo": {},
    "cpo": {},
    "reward": {},
    "grpo": {"rewards": ["tests.smoke.methods:reward"], "num_generations": 2, "max_completion_length": 4},
    "rloo": {"rewards": ["tests.smoke.methods:reward"], "num_generations": 2, "max_completion_length": 4},
    "distillation": {"teacher": "teacher", "max_completion_length": 4},
}


def reward(completions, **columns):
    """Return a reward in which most answers of a group differ."""
    return [sum(map(ord, completion[0]["content"])) % 97 / 97 for completion in completions]
