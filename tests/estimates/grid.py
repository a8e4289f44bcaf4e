"""Training steps on which the memory formulas are compared with a trace: drawn by chance, a fifth of them held out.

The shapes are those of published models, from their config.json on the hub.
"""

import random

from tests.estimates.oracle import Step
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

NUM_STEPS, NUM_MOE_STEPS, NUM_ADAPTED_STEPS, SEED = 60, 30, 20, 2026
"""Steps of dense models, then of mixtures of experts, then of adapters that are no plain ones."""


def shape(hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, *, tied=False, **more):
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **more,
    }


SHAPES = (
    ("llama", shape(2048, 8192, 16, 32, 8, 64, 128256, tied=True)),  # Llama-3.2-1B
    ("llama", shape(4096, 14336, 32, 32, 8, 128, 128256)),  # Llama-3.1-8B
    ("llama", shape(2048, 5632, 22, 32, 4, 64, 32000)),  # TinyLlama-1.1B
    ("qwen3", shape(1024, 3072, 28, 16, 8, 128, 151936, tied=True)),  # Qwen3-0.6B
    ("qwen3", shape(4096, 12288, 36, 32, 8, 128, 151936)),  # Qwen3-8B
    ("gemma3_text", shape(1152, 6912, 26, 4, 1, 256, 262144, tied=True, sliding_window=512)),  # Gemma-3-1B
    ("gemma3_text", shape(2560, 10240, 34, 8, 4, 256, 262208, tied=True, sliding_window=1024)),  # Gemma-3-4B
    ("mistral", shape(4096, 14336, 32, 32, 8, 128, 32768, sliding_window=None)),  # Mistral-7B-v0.3
)

_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

MOE_SHAPES = (
    (
        "mixtral",  # Mixtral-8x7B-v0.1
        shape(4096, 14336, 32, 32, 8, 128, 32000, num_local_experts=8, num_experts_per_tok=2, sliding_window=None),
    ),
    (
        "qwen3_moe",  # Qwen3-30B-A3B
        shape(
            2048, 6144, 48, 32, 4, 128, 151936, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
            norm_topk_prob=True,
        ),
    ),
    (
        "deepseek_v3",  # Moonlight-16B-A3B
        shape(
            2048, 11264, 27, 16, 16, 64, 163840, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
            moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1, **_LATENT,
        ),
    ),
)  # fmt: skip

BATCHES = ((1, 512), (4, 512), (8, 1024), (2, 2048), (1, 4096), (1, 8192))

ATTENTION_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
"""What adapters of mixtures are often put on, since those on experts are large."""


def _drawn() -> list[Step]:
    draw = random.Random(SEED)
    steps: list[Step] = []
    while len(steps) < NUM_STEPS:
        family, sizes = SHAPES[len(steps) % len(SHAPES)]
        batch, length = draw.choice(BATCHES)
        step = Step(
            family,
            tuple(sizes.items()),
            draw.choice([FullAdapter(), LoraAdapter(rank=draw.choice([8, 16, 64]))]),
            batch,
            length,
            checkpointing=draw.random() < 0.5,
            dtype=draw.choice(["bfloat16", "bfloat16", "bfloat16", "float32"]),
            accumulates=draw.random() < 0.5,
            rows=draw.choice(["even", "even", "padded"]),
        )
        if step not in steps:
            steps.append(step)
    return steps


def _drawn_of_experts() -> list[Step]:
    draw = random.Random(SEED + 2)
    steps: list[Step] = []
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
            checkpointing=draw.random() < 0.5,
            dtype=draw.choice(["bfloat16", "bfloat16", "bfloat16", "float32"]),
            accumulates=draw.random() < 0.5,
            rows=draw.choice(["even", "even", "padded"]),
        )
        if step not in steps:
            steps.append(step)
    return steps


def _drawn_of_adapters() -> list[Step]:
    draw = random.Random(SEED + 4)
    steps: list[Step] = []
    while len(steps) < NUM_ADAPTED_STEPS:
        family, sizes = SHAPES[len(steps) % len(SHAPES)]
        batch, length = draw.choice(BATCHES)
        tables = ["embed_tokens"] if sizes["tie_word_embeddings"] else ["embed_tokens", "lm_head"]
        adapter = LoraAdapter(
            rank=draw.choice([8, 16, 64]),
            dropout=draw.choice([0.0, 0.05, 0.1]),
            target_modules=draw.choice(["all-linear", ["q_proj", "v_proj"], ATTENTION_TARGETS]),
            use_dora=draw.random() < 0.4,
            modules_to_save=draw.choice([None, None, tables]),
        )
        step = Step(
            family,
            tuple(sizes.items()),
            adapter,
            batch,
            length,
            checkpointing=draw.random() < 0.5,
            dtype=draw.choice(["bfloat16", "bfloat16", "bfloat16", "float32"]),
            accumulates=draw.random() < 0.5,
            rows=draw.choice(["even", "even", "padded"]),
        )
        if step not in steps:
            steps.append(step)
    return steps


STEPS = _drawn() + _drawn_of_experts() + _drawn_of_adapters()
HELD_OUT = sorted(
    random.Random(SEED + 1).sample(range(NUM_STEPS), NUM_STEPS // 5)
    + random.Random(SEED + 3).sample(range(NUM_STEPS, NUM_STEPS + NUM_MOE_STEPS), NUM_MOE_STEPS // 5)
    + random.Random(SEED + 5).sample(range(NUM_STEPS + NUM_MOE_STEPS, len(STEPS)), NUM_ADAPTED_STEPS // 5)
)
"""Places in `STEPS` that were set aside before the formulas were fitted to the others."""
