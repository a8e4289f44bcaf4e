"""Training steps of FSDP2 on which the memory formulas are compared with a trace: drawn by chance, a fifth held out.

First come dense models, then mixtures of experts, drawn and set aside apart. The shapes are those of published models,
from their config.json on the hub; 2 to 512 devices share or copy them.
"""

import random

from tests.estimates.grid import ATTENTION_TARGETS, BATCHES, MOE_SHAPES, SHAPES, shape
from tests.estimates.oracle import Step
from tests.estimates.oracle_shards import ShardedStep
from tunekit.estimates.layout import Layout
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

NUM_STEPS, NUM_MOE_STEPS, SEED = 60, 20, 2027
"""Steps of dense models, and then of mixtures of experts."""

LARGE = (
    ("llama", shape(8192, 28672, 80, 64, 8, 128, 128256)),  # Llama-3.1-70B
    ("qwen3", shape(5120, 25600, 64, 64, 8, 128, 151936)),  # Qwen3-32B
)


def _layout(draw: random.Random) -> Layout:
    devices = draw.choice([2, 4, 8, 8, 16, 32, 64, 128, 256, 512])
    replicas = draw.choice([1, 1, devices // draw.choice([2, 4, 8])])
    hybrid = replicas if replicas > 1 else 1
    return Layout(
        strategy="fsdp2",
        dp_replicate_size=hybrid,
        dp_shard_size=devices // hybrid,
        reshard_after_forward=draw.random() < 0.7,
        sync_each_batch=draw.random() < 0.5,
    )


def _drawn() -> list[ShardedStep]:
    draw = random.Random(SEED)
    shapes = SHAPES + LARGE
    steps: list[ShardedStep] = []
    while len(steps) < NUM_STEPS:
        family, sizes = shapes[len(steps) % len(shapes)]
        batch, length = draw.choice(BATCHES)
        step = Step(
            family,
            tuple(sizes.items()),
            draw.choice([FullAdapter(), LoraAdapter(rank=draw.choice([8, 16, 64]))]),
            batch,
            length,
            checkpointing=draw.random() < 0.6,
            accumulates=draw.random() < 0.5,
            rows=draw.choice(["even", "even", "padded"]),
        )
        steps.append(ShardedStep(step, _layout(draw)))
    return steps


def _drawn_of_experts() -> list[ShardedStep]:
    draw = random.Random(SEED + 2)
    steps: list[ShardedStep] = []
    while len(steps) < NUM_MOE_STEPS:
        family, sizes = MOE_SHAPES[len(steps) % len(MOE_SHAPES)]
        batch, length = draw.choice(BATCHES)
        targets = draw.choice(["all-linear", ATTENTION_TARGETS])
        lora = LoraAdapter(rank=draw.choice([8, 16, 64]), target_modules=targets)
        step = Step(
            family,
            tuple(sizes.items()),
            draw.choice([FullAdapter(), lora, lora]),
            batch,
            length,
            checkpointing=draw.random() < 0.6,
            accumulates=draw.random() < 0.5,
            rows=draw.choice(["even", "even", "padded"]),
        )
        steps.append(ShardedStep(step, _layout(draw)))
    return steps


STEPS = _drawn() + _drawn_of_experts()
HELD_OUT = sorted(
    random.Random(SEED + 1).sample(range(NUM_STEPS), NUM_STEPS // 5)
    + random.Random(SEED + 3).sample(range(NUM_STEPS, NUM_STEPS + NUM_MOE_STEPS), NUM_MOE_STEPS // 5)
)
"""Places in `STEPS` that were set aside before the formulas were fitted to the others."""
