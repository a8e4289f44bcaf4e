"""The closed forms against what torch, PEFT and bitsandbytes really allocate on small models."""

from unittest import mock

import bitsandbytes as bnb
import pytest
import torch

from tests.estimates.grid import SHAPES
from tests.estimates.oracle import Step, estimate_of, trace
from tests.estimates.shapes import LLAMA_1B, LLAMA_8B
from tunekit.estimates.facts import ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import activation_bytes_per_layer, cast_weights_bytes, products_of
from tunekit.estimates.memory.memory import estimate
from tunekit.estimates.memory.states import BYTES, num_live_layers
from tunekit.models.fake_quantization import to_fake_quantized
from tunekit.models.load import freeze_ranks, peft_config
from tunekit.models.step_trace import dropout
from tunekit.recipe.sections.adapters import (
    AdaloraAdapter,
    FullAdapter,
    Ia3Adapter,
    LoraAdapter,
    MissAdapter,
    OftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    VeraAdapter,
)
from tunekit.recipe.sections.section import QatSection

TOKENS = 2 * 64


def build(num_layers, *, hidden=96, intermediate=264, heads=6, kv_heads=2, head_dim=24, vocab=160, tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def facts_of(model) -> ModelFacts:
    """Facts read from the live model rather than from files."""
    config = model.config
    return ModelFacts(
        path="tiny",
        architecture="LlamaForCausalLM",
        model_type="llama",
        tensors={name: tuple(p.shape) for name, p in model.named_parameters()},
        dtype="float32",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        has_chat_template=False,
    )


def with_adapter(model, adapter):
    from peft import LoraConfig, get_peft_model

    if isinstance(adapter, FullAdapter):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(adapter.trains(name, model.config.num_hidden_layers))
        return model, model
    if not isinstance(adapter, LoraAdapter):
        wrapped = get_peft_model(model, peft_config(adapter, model))
        freeze_ranks(wrapped)
        return wrapped, wrapped.get_base_model()
    config = LoraConfig(
        r=adapter.rank, target_modules=adapter.target_modules, lora_dropout=adapter.dropout, use_dora=adapter.use_dora,
        modules_to_save=adapter.modules_to_save,
    )  # fmt: skip
    wrapped = get_peft_model(model, config)
    return wrapped, wrapped.get_base_model()


def quantise(model) -> None:
    """Put bitsandbytes' layers in place of all linear ones but the head."""
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]:
        parent, _, leaf = name.rpartition(".")
        small = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16)
        small.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        setattr(model.get_submodule(parent), leaf, small.to("cpu"))
    # By this PEFT knows it.
    model.is_loaded_in_4bit = True


def saved_bytes(num_layers, adapter, dtype, rows, device="cuda", qat=None) -> int:
    """Bytes of distinct storages, other than parameters, that autograd saves in a decoder's forward pass."""
    weights = torch.float32 if isinstance(adapter, FullAdapter) else getattr(torch, dtype)
    model = build(num_layers).to(weights)
    if isinstance(adapter, QloraAdapter):
        quantise(model)
    if qat is not None:
        to_fake_quantized(model, qat)
    model, base = with_adapter(model, adapter)
    model.train()
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    storages = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    ids = torch.randint(0, 160, (2, TOKENS // 2))
    options = {}
    if rows == "padded":
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][1, -7:] = 0
    elif rows == "in one":
        ids = ids.reshape(1, TOKENS)
        options["position_ids"] = torch.arange(TOKENS // 2).repeat(2)[None]
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype != "float32")
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    as_on = {"cuda": dropout, "cpu": torch.nn.functional.dropout}[device]
    with hooks, autocast, mock.patch.object(torch.nn.functional, "dropout", as_on):
        if isinstance(adapter, PromptTuningAdapter):
            base.model(inputs_embeds=base.get_input_embeddings()(ids).requires_grad_(), use_cache=False, **options)
        else:
            base.model(ids, use_cache=False, **options)
    return sum(storage.nbytes() for storage in storages.values())


ADAPTERS = {
    "full": FullAdapter(),
    "lora": LoraAdapter(rank=8),
    "lora on two": LoraAdapter(rank=8, target_modules=["q_proj", "v_proj"]),
    "lora with dropout": LoraAdapter(rank=8, dropout=0.1),
    "lora on two with dropout": LoraAdapter(rank=8, dropout=0.05, target_modules=["o_proj", "down_proj"]),
    "ia3": Ia3Adapter(),
    "ia3 of inputs": Ia3Adapter(feedforward_modules=["down_proj", "q_proj"]),
    "vera": VeraAdapter(rank=8),
    "vera on two": VeraAdapter(rank=8, target_modules=["o_proj", "up_proj"]),
    "oft": OftAdapter(oft_block_size=8),
    "oft alike": OftAdapter(oft_block_size=8, block_share=True),
    "miss": MissAdapter(rank=8),
    "miss on two": MissAdapter(rank=6, target_modules=["o_proj", "up_proj"]),
    "adalora": AdaloraAdapter(init_r=8, target_r=4),
    "adalora on two": AdaloraAdapter(init_r=8, target_r=4, target_modules=["o_proj", "up_proj"]),
    "prompt tuning": PromptTuningAdapter(num_virtual_tokens=40, prompt_tuning_init="RANDOM"),
    "oft on two": OftAdapter(oft_block_size=8, target_modules=["o_proj", "up_proj"]),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("rows", ["even", "padded", "in one"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_activations_per_layer_equal_what_autograd_saves(adapter, dtype, rows):
    measured = saved_bytes(4, adapter, dtype, rows) - saved_bytes(2, adapter, dtype, rows)
    facts = facts_of(build(2))
    length = {"even": None, "padded": TOKENS // 2, "in one": TOKENS}[rows]
    predicted = 2 * TOKENS * activation_bytes_per_layer(products_of(facts, adapter, dtype), length)
    predicted += cast_weights_bytes(facts, adapter, dtype) + 2 * products_of(facts, adapter, dtype).matrices
    assert predicted == measured


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", ["full", "lora", "lora on two"])
@pytest.mark.parametrize(
    "qat",
    [QatSection(group_size=8), QatSection(group_size=None), QatSection(group_size=8, activation_dtype="int8")],
    ids=["groups", "outputs", "inputs too"],
)
def test_rounded_weights_are_counted_as_autograd_saves_them(qat, adapter, dtype):
    adapter = ADAPTERS[adapter]
    of_four, of_two = (saved_bytes(num, adapter, dtype, "even", qat=qat) for num in (4, 2))
    facts = facts_of(build(2))
    products = products_of(facts, adapter, dtype, qat=qat)
    predicted = 2 * TOKENS * (activation_bytes_per_layer(products, None) + products.rounds)
    predicted += cast_weights_bytes(facts, adapter, dtype) + 2 * products.rounded
    if qat.activation_dtype is None or not products.full:
        assert predicted == of_four - of_two
    else:
        # An input that layers share is counted besides, which none of them keeps.
        assert of_four - of_two < predicted < 1.1 * (of_four - of_two)


PARTS = [FullAdapter(last_layers=1), FullAdapter(unfrozen_parameters=[r"layers\.2\..*_proj"])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", PARTS)
def test_layers_below_all_that_is_trained_keep_nothing_and_those_above_no_more_than_is_planned(adapter, dtype):
    facts = facts_of(build(4))
    layer = TOKENS * activation_bytes_per_layer(products_of(facts, adapter, dtype), None)
    layer += cast_weights_bytes(facts, adapter, dtype) // 4
    num_live = num_live_layers(facts, adapter)
    assert num_live == (1 if adapter.last_layers else 2)
    # And what the final norm keeps, which is planned with the head.
    beyond = saved_bytes(4, FullAdapter(), dtype, "even") - 4 * layer
    assert (num_live - 1) * layer < saved_bytes(4, adapter, dtype, "even") <= num_live * layer + beyond


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_cpu_the_mask_of_dropout_is_as_wide_as_its_values(dtype):
    adapter, facts = ADAPTERS["lora with dropout"], facts_of(build(2))
    measured = saved_bytes(4, adapter, dtype, "even", "cpu") - saved_bytes(2, adapter, dtype, "even", "cpu")
    predicted = 2 * TOKENS * activation_bytes_per_layer(products_of(facts, adapter, dtype, "cpu"), None)
    assert predicted + cast_weights_bytes(facts, adapter, dtype) == measured


def test_known_models_have_their_published_sizes():
    assert LLAMA_8B.num_params == 8_030_261_248
    assert LLAMA_1B.num_params == 1_235_814_400


@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(), QloraAdapter()], ids=["full", "lora", "qlora"])
@pytest.mark.parametrize("dtype", sorted(BYTES))
def test_memory_grows_with_tokens_and_shrinks_with_checkpointing(adapter, dtype):
    # The peak itself may lie where there are no activations, as in the backward of a large embedding.
    def at_the_head(num_tokens, checkpointing):
        return estimate(
            LLAMA_8B, adapter, device="cuda", dtype=dtype, optim="adamw_torch_fused", num_tokens=num_tokens,
            mask_length=1024, sliding_mask_length=None, gradient_checkpointing=checkpointing, accumulates=False,
            layout=Layout(), devices_per_node=1, reserve_share=0.0,
        ).phases["head"]  # fmt: skip

    assert at_the_head(1024, True) < at_the_head(1024, False) < at_the_head(4096, False)
    assert at_the_head(1024, True) < at_the_head(4096, True) < at_the_head(4096, False)


OTHERS = [adapter for name, adapter in ADAPTERS.items() if not name.startswith(("full", "lora"))]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", OTHERS, ids=[name for name in ADAPTERS if not name.startswith(("full", "lora"))])
def test_peak_and_layers_of_other_adapters_are_as_traced(adapter, checkpointing, dtype):
    family, sizes = SHAPES[0]
    step = Step(family, tuple({**sizes, "num_hidden_layers": 4}.items()), adapter, 2, 512, checkpointing, dtype=dtype)
    traced, planned = trace(step), estimate_of(step)
    assert max(planned.phases.values()) == pytest.approx(traced.peak_bytes, rel=0.03)
    for phase in ("last layer", "first layer"):
        kept = traced.weights_bytes + traced.optimizer_bytes
        assert planned.phases[phase] == pytest.approx(kept + traced.step_bytes[phase], rel=0.03)
