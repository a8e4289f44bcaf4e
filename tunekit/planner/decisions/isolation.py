"""Models that keep packed documents apart.

A packed or padding-free batch has no mask: positions that begin again at zero say where a document begins. Attention
that builds its mask from them, or flash attention that is handed the boundaries, keeps documents apart. Layers that
carry a state from token to token do not look at positions, and some models drop them on the way.

`benchmarks/isolation.py` found out which: of the 196 types of causal language models in transformers 5.24 it built 169
small with random weights, and compared the logits of a second document with those that it has alone, and with those
after another first one (`benchmarks/results/isolation.json`). What is not named here was seen to isolate, could not
be built, or is not in transformers; every run that needs it looks again, at the model itself, before it trains.
"""

from typing import Literal

from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.models.architectures import ATTENTION_LAYERS
from tunekit.estimates.models.model_config import model_types

VARLEN = "tunekit_varlen"
"""Name of tunekit's attention for rows that lie one behind the other."""

FlashAttention = Literal["FA2", "FA3", "FA4"]
"""Flash attentions that torch's varlen attention can go to; the first is torch's own."""

FLEX_TYPES = frozenset({"gemma2", "vaultgemma"})
"""Types whose scores are squeezed, whose masks keep documents apart, and that transformers has FlexAttention for."""

NEVER_ISOLATE = frozenset(
    {
        "axk2",
        "bart",
        "big_bird",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "bloom",
        "cpmant",
        "deepseek_v32",
        "deepseek_v4",
        "glm_moe_dsa",
        "hy_v4",
        "marian",
        "mbart",
        "megatron-bert",
        "mpt",
        "mvp",
        "openai-gpt",
        "pegasus",
        "plbart",
        "prophetnet",
        "rembert",
        "roformer",
        "trocr",
        "xglm",
        "xlm",
        "xlnet",
    }
)
"""Types whose code takes no notice of positions, or chooses what to attend to from the whole row."""

ISOLATE_WITH_FLASH_ONLY = frozenset(
    {
        "afmoe",
        "bert",
        "bert-generation",
        "biogpt",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "gpt_oss",
        "granitemoehybrid",
        "opt",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "xlm-roberta",
        "xlm-roberta-xl",
    }
)
"""Types that build their masks without the positions, and hand the boundaries to flash attention all the same."""

ISOLATE_WITH_MASKS_ONLY = frozenset({"gpt_neo"})
"""Types that build their masks from the positions, and do not hand the boundaries to flash attention."""

VARLEN_TYPES = frozenset(
    {
        "afmoe",
        "apertus",
        "apertus1p5_text",
        "arcee",
        "aria_text",
        "axk1",
        "beam",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "diffllama",
        "dory",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_neox",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jetmoe",
        "kolibri1",
        "laguna",
        "llama",
        "longcat_flash",
        "mellum",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "modernbert-decoder",
        "nanochat",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "sarvam_moe",
        "smollm3",
        "solar_open",
        "starcoder2",
        "youtu",
    }
)
"""Types that keep documents apart with tunekit's attention for packed rows, and have the logits of eager attention for
each alone, their sliding windows included. Others are not computed with it, nor are the few that were seen to be right
and whose configurations have other names for the dropout of attention, which it has not, or drop by default."""

WITHOUT_SDPA = frozenset(
    {
        "big_bird",
        "bigbird_pegasus",
        "bloom",
        "cpmant",
        "deepseek_v4",
        "falcon_mamba",
        "flint",
        "gemma2",
        "git",
        "got_ocr2",
        "gpt_neo",
        "gpt_neox_japanese",
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "inkling2_loop_text",
        "inkling2_text",
        "mamba",
        "mamba2",
        "megatron-bert",
        "mimo_v2_flash",
        "mpt",
        "mvp",
        "openai-gpt",
        "prophetnet",
        "reformer",
        "rembert",
        "roformer",
        "rwkv",
        "trocr",
        "vaultgemma",
        "xglm",
        "xlm",
        "xlnet",
        "xlstm",
    }
)
"""Types that transformers refuses to load with sdpa."""


def why_not_isolated(model: ModelFacts, attn_implementation: str) -> str | None:
    """Return why documents in one row would see each other; None where nothing is known to cause it.

    Args:
        model: The model, of which its type and the types of its layers count.
        attn_implementation: Attention implementation by its transformers name.
    """
    layer_types = sorted(set(model.layer_types) - ATTENTION_LAYERS)
    if layer_types:
        return f"its {' and '.join(layer_types)} layers do not keep them apart"
    if model.model_type in model_types().carry_state and not model.layer_types:
        return f"{model.model_type} has layers that carry a state from one to the next"
    if model.model_type in NEVER_ISOLATE:
        return f"the code of {model.model_type} does not keep them apart"
    if attn_implementation == VARLEN:
        is_supported = model.model_type in VARLEN_TYPES
        return None if is_supported else f"{VARLEN} was not seen to keep them apart in {model.model_type}"
    flash = attn_implementation.startswith("flash_attention")
    if model.model_type in (ISOLATE_WITH_MASKS_ONLY if flash else ISOLATE_WITH_FLASH_ONLY):
        return f"the code of {model.model_type} does not keep them apart with {attn_implementation}"
    return None
