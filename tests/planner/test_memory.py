"""The closed forms against what torch, PEFT and bitsandbytes really allocate on small models."""

import pytest
import torch

from tests.planner.shapes import LLAMA_1B, LLAMA_8B
from tunekit.planner.activations import activation_bytes_per_layer, cast_weights_bytes
from tunekit.planner.facts import ModelFacts
from tunekit.planner.layout import Layout
from tunekit.planner.memory import estimate
from tunekit.planner.states import BYTES, OPTIMIZER_BYTES, num_trainable_params, weights_bytes
from tunekit.recipe.schema import FullAdapter, LoraAdapter, QloraAdapter

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
        return model, model
    config = LoraConfig(
        r=adapter.rank, target_modules=adapter.target_modules, use_dora=adapter.use_dora,
        modules_to_save=adapter.modules_to_save,
    )  # fmt: skip
    wrapped = get_peft_model(model, config)
    return wrapped, wrapped.get_base_model()


def saved_bytes(num_layers, adapter, dtype, rows) -> int:
    """Bytes of distinct storages, other than parameters, that autograd saves in a decoder's forward pass."""
    weights = torch.float32 if isinstance(adapter, FullAdapter) else getattr(torch, dtype)
    model, base = with_adapter(build(num_layers).to(weights), adapter)
    model.train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
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
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        base.model(ids, use_cache=False, **options)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("rows", ["even", "padded", "in one"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=8)], ids=["full", "lora"])
def test_activations_per_layer_equal_what_autograd_saves(adapter, dtype, rows):
    measured = saved_bytes(4, adapter, dtype, rows) - saved_bytes(2, adapter, dtype, rows)
    facts = facts_of(build(2))
    length = {"even": None, "padded": TOKENS // 2, "in one": TOKENS}[rows]
    predicted = 2 * TOKENS * activation_bytes_per_layer(facts, adapter, dtype, mask_length=length)
    predicted += cast_weights_bytes(facts, adapter, dtype)
    assert predicted == measured


@pytest.mark.parametrize(
    "adapter",
    [
        FullAdapter(),
        LoraAdapter(rank=4),
        LoraAdapter(rank=4, target_modules=["q_proj", "v_proj"]),
        LoraAdapter(rank=4, use_dora=True),
        LoraAdapter(rank=4, modules_to_save=["embed_tokens"]),
    ],
    ids=["full", "lora", "targets", "dora", "modules_to_save"],
)
def test_trainable_parameters_are_those_of_peft(adapter):
    model = build(3)
    facts = facts_of(model)
    wrapped, _ = with_adapter(model, adapter)
    assert num_trainable_params(facts, adapter) == sum(p.numel() for p in wrapped.parameters() if p.requires_grad)


@pytest.mark.parametrize("double_quant", [True, False])
def test_four_bit_weights_take_what_bitsandbytes_stores(double_quant, tmp_path):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    # Large enough for the constants of constants, which come in blocks of 256, to be filled.
    model = build(2, hidden=512, intermediate=1024, heads=8, kv_heads=8, head_dim=64)
    facts = facts_of(model)
    model.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double_quant)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    stored = 0
    for parameter in loaded.parameters():
        stored += parameter.nbytes
        if parameter.dtype == torch.uint8:
            state = parameter.quant_state
            stored += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
    adapter = QloraAdapter(double_quant=double_quant)
    largest = 4 * max(a * b for a, b in facts.linears.values())
    predicted = weights_bytes(facts, adapter, "float32") - largest - 4 * num_trainable_params(facts, adapter)
    assert predicted == pytest.approx(stored, rel=1e-4)


@pytest.mark.parametrize(
    "optim", [name for name in sorted(OPTIMIZER_BYTES) if name != "adafactor" and not name.startswith("paged")]
)
def test_optimizer_states_are_what_the_optimizer_keeps(optim, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = torch.nn.Linear(4096, 64, bias=False)
    args = TrainingArguments(output_dir=str(tmp_path), optim=optim, use_cpu=True, report_to="none")
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = kind(model.parameters(), **options)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    kept = sum(
        value.nbytes
        for value in optimizer.state[model.weight].values()
        if isinstance(value, torch.Tensor) and value.numel() > 256 and not _is_table(value)
    )
    assert OPTIMIZER_BYTES[optim] == pytest.approx(kept / model.weight.numel(), abs=0.03)


def _is_table(tensor) -> bool:
    """Whether a tensor is a quantisation table, which all parameters share."""
    return tensor.numel() == 256


@pytest.mark.parametrize("optim", [name for name in sorted(OPTIMIZER_BYTES) if name.startswith("paged")])
def test_paged_states_are_as_large_as_those_that_stay(optim):
    twin = optim.removeprefix("paged_")
    twin = {"adamw_32bit": "adamw_torch", "ademamix_32bit": "ademamix"}.get(twin, twin)
    assert OPTIMIZER_BYTES[optim] == OPTIMIZER_BYTES[twin]


def test_adafactor_keeps_less_than_stated(tmp_path):
    from transformers.optimization import Adafactor

    model = torch.nn.Linear(4096, 64, bias=False)
    optimizer = Adafactor(model.parameters(), relative_step=False, lr=1e-3)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    kept = sum(v.nbytes for v in optimizer.state[model.weight].values() if isinstance(v, torch.Tensor))
    assert kept <= OPTIMIZER_BYTES["adafactor"] * model.weight.numel()


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
