"""Steps of DPO and GRPO on which the memory formulas are compared with a trace: drawn by chance, a fifth held out."""

import random

from tests.estimates.grid import SHAPES
from tests.estimates.oracle import Step
from tests.estimates.oracle_methods import MethodStep
from tunekit.recipe.methods.dpo import DPOMethod
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

NUM_STEPS, SEED = 30, 2027

BATCHES = ((2, 512), (4, 512), (4, 1024), (2, 2048), (2, 4096))
"""Sequences of a micro-batch, and their length."""


def _drawn() -> list[MethodStep]:
    draw = random.Random(SEED)
    steps: list[MethodStep] = []
    while len(steps) < NUM_STEPS:
        family, sizes = SHAPES[len(steps) % len(SHAPES)]
        sequences, length = draw.choice(BATCHES)
        method = draw.choice(
            [
                DPOMethod(precompute_ref_log_probs=draw.random() < 0.25),
                GRPOMethod(max_completion_length=length * draw.choice([1, 2, 3]) // 4, beta=draw.choice([0.0, 0.04])),
            ]
        )
        step = Step(
            family,
            tuple(sizes.items()),
            draw.choice([FullAdapter(), LoraAdapter(rank=draw.choice([8, 16, 64]))]),
            sequences // 2 if isinstance(method, DPOMethod) else sequences,
            length,
            checkpointing=draw.random() < 0.5,
            dtype=draw.choice(["bfloat16", "bfloat16", "bfloat16", "float32"]),
            accumulates=draw.random() < 0.5,
            rows="padded",
        )
        steps.append(MethodStep(step, method))
    return steps


STEPS = _drawn()
HELD_OUT = sorted(random.Random(SEED + 1).sample(range(NUM_STEPS), NUM_STEPS // 5))
"""Places in `STEPS` that were set aside before the formulas were fitted to the others."""
