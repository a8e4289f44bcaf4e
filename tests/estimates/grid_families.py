"""Training steps of types of models that the formulas do not know, on which plans with a trace are compared with one.

Drawn by chance, two of each type on one device and one on 2 to 64; all were set before any was compared. The shapes are
the defaults of transformers' configurations, which are mostly those of the first published model of a type, with fewer
layers.
"""

import random

from tests.estimates.oracle import Step
from tests.estimates.oracle_shards import ShardedStep
from tunekit.estimates.layout import Layout
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

SEED = 2028

DENSE = (
    "apertus", "arcee", "cohere", "cohere2", "diffllama", "ernie4_5", "exaone4", "gemma4_text", "glm", "gpt2",
    "gpt_neox", "helium", "hunyuan_v1_dense", "internlm3", "lfm2", "minicpm3", "ministral3", "nemotron", "olmo", "opt",
    "phi", "seed_oss", "stablelm", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
MIXTURES = ("flex_olmo", "glm4_moe", "granitemoe", "lfm2_moe", "phimoe", "qwen2_moe")
HYBRIDS = ("bamba", "falcon_h1", "mamba2", "qwen3_next")
"""Types with layers that carry a state along a row, which torch computes in chunks where their kernels are missing."""

OTHERS = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"]},
    "nemotron": {"num_key_value_heads": 8},
    "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}
"""Settings without which no model can be built, and no dropout: that of attention keeps scores on a CPU, and not on
CUDA."""

BATCHES = ((1, 512), (4, 512), (6, 1024), (3, 2048), (2, 4096))
TARGETS = {
    "bamba": ["in_proj", "q_proj", "v_proj"],
    "falcon_h1": ["in_proj", "q_proj", "v_proj"],
    "phimoe": ["q_proj", "k_proj", "v_proj", "o_proj"],
}
"""PEFT refuses adapters on some products of layers with a state, and one on PhiMoE's router cannot be computed."""


def _drawn(draw: random.Random, family: str) -> Step:
    batch, length = draw.choice(BATCHES[:2] if family in HYBRIDS else BATCHES)
    lora = LoraAdapter(rank=draw.choice([8, 16, 64]), target_modules=TARGETS.get(family, "all-linear"))
    return Step(
        family,
        tuple({"num_hidden_layers": 8, **OTHERS.get(family, {})}.items()),
        draw.choice([FullAdapter(), lora]),
        batch,
        length,
        checkpointing=draw.random() < 0.4,
        accumulates=draw.random() < 0.5,
    )


def _layout(draw: random.Random) -> Layout:
    devices = draw.choice([2, 4, 8, 16, 64])
    replicas = draw.choice([1, devices // 2])
    return Layout(
        strategy="fsdp2",
        dp_replicate_size=replicas,
        dp_shard_size=devices // replicas,
        reshard_after_forward=draw.random() < 0.7,
    )


FAMILIES = DENSE + MIXTURES + HYBRIDS
STEPS = [_drawn(random.Random(f"{SEED} {family} {number}"), family) for number in range(2) for family in FAMILIES]
SHARDED = [
    ShardedStep(_drawn(draw, family), _layout(draw))
    for family in FAMILIES
    for draw in [random.Random(f"{SEED} {family} sharded")]
]
