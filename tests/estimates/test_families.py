"""The peak of types of decoders against a trace of their modules, all those known from config.json alone among them."""

import math

import pytest

from tests.estimates.oracle import Step, estimate_of, facts_of, trace
from tunekit.estimates.memory.activations import is_traced
from tunekit.estimates.models.architectures import FAMILIES
from tunekit.estimates.models.model_config import model_types
from tunekit.planner.decisions.backends import families
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 40000, "pad_token_id": 0,
}  # fmt: skip
OTHERS = {
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "sliding_window": 512},
    "gemma3_text": {"head_dim": 64, "sliding_window": 512, "num_hidden_layers": 6},
    "glm4": {"head_dim": 64},
    "ministral": {"head_dim": 64},
    "mistral": {"head_dim": 64, "sliding_window": None},
    "olmo3": {"sliding_window": 512},
    "qwen3": {"head_dim": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 192},
    "qwen3_moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 192},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 128},
    "deepseek_v3": {
        "num_key_value_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2,
        "moe_intermediate_size": 192, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": None,
        "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 24, "v_head_dim": 48, "head_dim": 24,
    },
}  # fmt: skip


LARGE_EXPERTS = {
    "deepseek_v3": {"moe_intermediate_size": 768, "vocab_size": 2000},
    "gpt_oss": {"intermediate_size": 1408, "num_local_experts": 32, "vocab_size": 2000},
    "mixtral": {"vocab_size": 2000},
    "olmoe": {"intermediate_size": 768, "vocab_size": 2000},
    "qwen3_moe": {"moe_intermediate_size": 768, "vocab_size": 2000},
}

ON_ATTENTION = LoraAdapter(rank=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])


def step(family: str, adapter: FullAdapter | LoraAdapter, *, checkpointing: bool) -> Step:
    sizes = {**SIZES, **OTHERS.get(family, {})}
    return Step(family, tuple(sizes.items()), adapter, batch=2, length=1024, checkpointing=checkpointing)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=16)], ids=["full", "lora"])
@pytest.mark.parametrize("family", sorted(model_types().traced))
def test_the_peak_of_a_traced_type_is_what_is_traced(family, adapter, checkpointing):
    how = step(family, adapter, checkpointing=checkpointing)
    estimated, traced = estimate_of(how), trace(how)
    assert is_traced(facts_of(how))
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.03)
    if family in ("mixtral", "qwen3_moe"):
        # In so small a model the peak is the head's; a layer's own backward pass is what experts change.
        of_layer = traced.weights_bytes + traced.optimizer_bytes + traced.step_bytes["last layer"]
        assert estimated.phases["last layer"] == pytest.approx(of_layer, rel=0.015)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("on", ["attention", "all-linear"])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe"])
def test_the_peak_with_weights_in_4_bits_is_what_is_traced(family, on, checkpointing):
    """With experts that are large beside the rows, as those of published models are."""
    adapter = QloraAdapter(rank=16, target_modules=ON_ATTENTION.target_modules if on == "attention" else on)
    how = step(family, adapter, checkpointing=checkpointing)
    how = Step(**{**vars(how), "length": 128, "sizes": (*how.sizes, *LARGE_EXPERTS.get(family, {}).items())})
    estimated, traced = estimate_of(how), trace(how)
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.03)
    of_layer = traced.weights_bytes + traced.optimizer_bytes + traced.step_bytes["last layer"]
    assert estimated.phases["last layer"] == pytest.approx(of_layer, rel=0.03)


def test_every_type_that_is_known_without_weights_is_traced():
    assert set(FAMILIES) <= model_types().traced


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) & families()["without_sdpa"]))
def test_the_scores_that_eager_attention_keeps_are_what_is_traced(family, checkpointing):
    """Of rows four times as long, where they are nearly all that there is."""
    how = step(family, ON_ATTENTION, checkpointing=checkpointing)
    how = Step(**{**vars(how), "batch": 1, "length": 4096})
    estimated, traced = estimate_of(how), trace(how)
    assert estimated.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.03)
    scores = 8 * 4096 * 4096  # heads x pairs of tokens
    assert traced.step_bytes["last layer"] > 2 * scores * (1 if checkpointing else 4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "qwen3_moe"])
def test_what_has_no_adapter_keeps_no_input(family):
    names = ["qkv_proj", "o_proj"] if family == "phi3" else ON_ATTENTION.target_modules
    how = step(family, LoraAdapter(rank=16, target_modules=names), checkpointing=False)
    assert estimate_of(how).tensor_bytes == pytest.approx(trace(how).peak_bytes, rel=0.03)
    everywhere = estimate_of(step(family, LoraAdapter(rank=16), checkpointing=False))
    assert estimate_of(how).parts["activations"] < 0.95 * everywhere.parts["activations"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_adapters_of_experts_keep_a_sum_as_large_as_the_experts(family):
    """PEFT adds the adapter to the fused matrices of each layer, however few the tokens and however low the rank."""
    whole = step(family, LoraAdapter(rank=1), checkpointing=False)
    few_tokens = Step(**{**vars(whole), "batch": 1, "length": 64})
    shapes = [shape for name, shape in facts_of(whole).tensors.items() if ".experts." in name]
    kept = estimate_of(few_tokens).parts["activations"]
    assert kept > 2 * sum(math.prod(shape) for shape in shapes)
    assert kept == pytest.approx(trace(few_tokens).step_bytes["last layer"], rel=0.15)
