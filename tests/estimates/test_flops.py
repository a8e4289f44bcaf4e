"""Operations of a token against torch's own count."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.estimates.oracle import Step
from tests.estimates.oracle import facts_of as facts_of_step
from tests.estimates.shapes import LLAMA_1B, LLAMA_8B
from tests.estimates.test_memory import build, facts_of, with_adapter
from tunekit.estimates.throughput.step import flops_per_token, is_counted
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

LAYERS, ROWS, LENGTH = 8, 2, 64
SMALL_MIXTURE = {
    "hidden_size": 96, "intermediate_size": 264, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 160,
}  # fmt: skip


def counted_flops(adapter, *, attn_implementation, checkpointing) -> float:
    """Operations of a token as FlopCounterMode counts them, in TRL's forward and backward pass.

    Without attention where that is sdpa: on a CPU it is one fused operation that the counter does not know.
    """
    model = build(LAYERS)
    model.set_attn_implementation(attn_implementation)
    return count(model, adapter, checkpointing=checkpointing)


def count(model, adapter, *, checkpointing) -> float:
    """Operations of a token that FlopCounterMode counts in TRL's forward and backward pass."""
    from torch.utils.flop_counter import FlopCounterMode
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    model, base = with_adapter(model, adapter)
    model.train()
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    ids = torch.randint(0, 160, (ROWS, LENGTH))
    # The head adds its gradients up in place, which the counter does not know either, nor the product of experts.
    unknown = {
        torch.ops.aten.addmm_: lambda _, a, b, *args, out_shape=None, **kwargs: 2 * a[0] * a[1] * b[1],
        torch.ops.aten._grouped_mm: lambda a, b, *args, out_shape=None, **kwargs: 2 * a[0] * a[1] * b[-1],
    }
    with FlopCounterMode(display=False, custom_mapping=unknown) as counter:
        output = base(input_ids=ids, labels=ids, fused_lm_head=True)
        output.loss.backward()
    return counter.get_total_flops() / (ROWS * LENGTH)


ADAPTERS = {
    "full": FullAdapter(),
    "lora": LoraAdapter(rank=8),
    "lora on attention": LoraAdapter(rank=8, target_modules=["q_proj", "v_proj"]),
    "lora beside a whole module": LoraAdapter(rank=8, target_modules=["q_proj"], modules_to_save=["down_proj"]),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_operations_are_those_that_torch_counts(name, checkpointing, attn_implementation):
    counted = counted_flops(ADAPTERS[name], attn_implementation=attn_implementation, checkpointing=checkpointing)
    predicted = flops_per_token(
        facts_of(build(LAYERS)),
        ADAPTERS[name],
        attended_tokens=LENGTH if attn_implementation == "eager" else 0,
        num_tokens=ROWS * LENGTH,
        head_share=1,
        gradient_checkpointing=checkpointing,
    )
    # The first of eight layers needs no gradient of its input, and the last token of a row has no logits.
    assert predicted == pytest.approx(counted, rel=0.02)


EXPERTS_ADAPTERS = {
    "full": FullAdapter(),
    "lora": LoraAdapter(rank=8),
    "lora on attention": LoraAdapter(rank=8, target_modules=["q_proj", "o_proj"]),
}
MIXTURES = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "deepseek_v3": {
        "num_key_value_heads": 6, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": None,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", EXPERTS_ADAPTERS)
@pytest.mark.parametrize("family", MIXTURES)
def test_operations_of_experts_are_those_that_torch_counts(family, name, checkpointing):
    step = Step(
        family,
        tuple({**SMALL_MIXTURE, **MIXTURES[family]}.items()),
        EXPERTS_ADAPTERS[name],
        ROWS,
        LENGTH,
        checkpointing=checkpointing,
    )
    model = AutoModelForCausalLM.from_config(step.config(), attn_implementation="eager")
    counted = count(model, step.adapter, checkpointing=checkpointing)
    predicted = flops_per_token(
        facts_of_step(step),
        step.adapter,
        attended_tokens=LENGTH,
        num_tokens=ROWS * LENGTH,
        head_share=1,
        gradient_checkpointing=checkpointing,
    )
    assert predicted == pytest.approx(counted, rel=0.03)


def test_known_models_take_six_operations_a_parameter_and_four_with_adapters():
    """The rule of thumb, without attention: 6 x 8.03 billion; embeddings are looked up, the head is computed twice."""

    def operations(adapter):
        return flops_per_token(
            LLAMA_8B, adapter, attended_tokens=0, num_tokens=1, head_share=1, gradient_checkpointing=False
        )

    assert operations(FullAdapter()) / (6 * 8.03e9) == pytest.approx(1, abs=0.05)
    assert operations(LoraAdapter(rank=1)) / (4 * 8.03e9) == pytest.approx(1, abs=0.05)


def test_logits_that_are_not_needed_cost_nothing():
    def operations(head_share):
        return flops_per_token(
            LLAMA_1B,
            LoraAdapter(),
            attended_tokens=0,
            num_tokens=1,
            head_share=head_share,
            gradient_checkpointing=False,
        )

    assert operations(1) - operations(0.25) == 0.75 * 6 * 128256 * 2048


def test_experts_and_states_are_not_counted():
    assert is_counted(LLAMA_8B)
    assert not is_counted(LLAMA_8B.model_copy(update={"tensors": {"model.layers.0.mlp.experts.down_proj": (8, 4, 4)}}))
    assert not is_counted(LLAMA_8B.model_copy(update={"layer_types": ("full_attention", "linear_attention")}))
    assert not is_counted(LLAMA_8B.model_copy(update={"model_type": "mamba"}))
