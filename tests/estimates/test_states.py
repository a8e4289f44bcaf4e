"""What a plan says of weights, adapters, gradients and optimizer states, to the byte what real runs hold on a CPU."""

import math
from typing import NoReturn, get_args
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from tests.estimates.shapes import LAPTOP, LLAMA_8B
from tests.estimates.test_memory import TOKENS, build, facts_of, saved_bytes
from tests.tiny import make_tokenizer, save_tiny_model_with_vision
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.memory.activations import activation_bytes_per_layer, cast_weights_bytes, products_of
from tunekit.estimates.memory.states import (
    adapters_bytes,
    block_states_bytes,
    dequantised_bytes,
    low_rank_cost,
    matrix_cost_of,
    muon_cost,
    muon_cost_of,
    num_trainable_params,
    states_bytes,
    trained_tensors,
    weights_bytes,
)
from tunekit.kernels.low_rank import ApolloAdamW, GaLoreAdamW
from tunekit.kernels.muon import Muon
from tunekit.methods import sft
from tunekit.methods.arguments import Parts
from tunekit.models.load import attach_adapter, keep_trained, load_model
from tunekit.models.quantization import Stack
from tunekit.models.step_trace import LiveBytes
from tunekit.planner.resolve import resolve
from tunekit.probe.model import probe_model
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import (
    FullAdapter,
    Ia3Adapter,
    LoraAdapter,
    MissAdapter,
    OftAdapter,
    PromptTuningAdapter,
    QloraAdapter,
    VeraAdapter,
)
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import LowRank, Optim, OptimArgs
from tunekit.training.train import forget_overrides

pytestmark = pytest.mark.filterwarnings("ignore")

# Sizes that blocks of 64 and 256 values do not fill, and tensors on both sides of 4096 values.
SIZES = {
    "vocab_size": 320,
    "hidden_size": 72,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
MODELS = {
    "llama": ("llama", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, **EXPERTS}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
}
NAMES = [*MODELS, "gemma3 with vision"]

ADAPTERS = {
    "full": FullAdapter(),
    "last layer": FullAdapter(last_layers=1),
    "norms and embedding": FullAdapter(unfrozen_parameters=["norm", "embed"]),
    "lora": LoraAdapter(rank=8),
    "lora on two": LoraAdapter(rank=4, target_modules=["q_proj", "v_proj"]),
    "dora": LoraAdapter(rank=8, use_dora=True, target_modules=["q_proj", "o_proj"]),
    "lora and embedding": LoraAdapter(rank=8, modules_to_save=["embed_tokens"]),
    "lora and norms": LoraAdapter(rank=8, modules_to_save=["norm"]),
    "lora and one trained wholly": LoraAdapter(rank=8, modules_to_save=["o_proj"]),
    "lora of ranks": LoraAdapter(rank=8, target_modules=["q_proj", "v_proj", "o_proj"], rank_pattern={"o_proj": 3}),
    "lora in a layer": LoraAdapter(rank=8, target_modules=["q_proj", "o_proj"], layers_to_transform=[1]),
    "lora without keys": LoraAdapter(rank=8, target_modules=r".*_proj", exclude_modules=["k_proj"]),
    "qlora": QloraAdapter(rank=8),
    "ia3": Ia3Adapter(feedforward_modules=["down_proj"]),
    "vera": VeraAdapter(rank=8, exclude_modules=["k_proj"]),
    "oft": OftAdapter(oft_block_size=8, layers_to_transform=[1], modules_to_save=["norm"]),
    "miss": MissAdapter(rank=8, exclude_modules=["k_proj"]),
    "oft alike": OftAdapter(oft_block_size=4, block_share=True),
    "prompt tuning": PromptTuningAdapter(num_virtual_tokens=90),
    "qlora fp4 once": QloraAdapter(rank=8, double_quant=False, quant_type="fp4"),
    "qlora and embedding": QloraAdapter(rank=8, modules_to_save=["embed_tokens"]),
}


def unused(*given: object) -> NoReturn:
    raise AssertionError("supervised fine-tuning has neither a reference nor a teacher")


@pytest.fixture(scope="module")
def sections(tmp_path_factory):
    """Models of random weights by name, as recipes name them."""
    found = {}
    for name in NAMES:
        folder = tmp_path_factory.mktemp("model")
        if name in MODELS:
            family, more = MODELS[name]
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **{**SIZES, **more})
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
        else:
            save_tiny_model_with_vision(folder)
        found[name] = ModelSection(path=str(folder))
    return found


def loaded(section, adapter, dtype="float32", trained_dtype="float32"):
    model = load_model(
        section,
        dtype=trained_dtype if isinstance(adapter, FullAdapter) else dtype,
        attn_implementation="sdpa",
        device="cpu",
        quantization=adapter if isinstance(adapter, QloraAdapter) else None,
    )
    model = attach_adapter(model, adapter, seed=0)
    keep_trained(model, trained_dtype)
    return model


def stored_bytes(parameters) -> int:
    """Bytes of parameters and of every tensor that bitsandbytes packs with them in a checkpoint."""
    total = 0
    for parameter in parameters:
        is_stack = isinstance(parameter, Stack)
        total += parameter.matrices.packed.nbytes if is_stack else parameter.nbytes
        if is_stack or type(parameter).__name__ == "Params4bit":
            packed = (parameter.matrices.state if is_stack else parameter.quant_state).as_dict()
            total += sum(value.nbytes for value in packed.values() if isinstance(value, torch.Tensor))
            # The mean of the constants is saved as a number, and kept as a float32 tensor.
            total += 4 if "nested_offset" in packed else 0
    return total


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_adapters_take_what_the_loaded_model_holds(name, adapter, dtype, sections):
    facts, adapter = probe_model(sections[name]), ADAPTERS[adapter]
    model = loaded(sections[name], adapter, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    full = isinstance(adapter, FullAdapter)
    planned = trained_tensors(facts, adapter)
    assert sorted(planned.values()) == sorted(tuple(parameter.shape) for parameter in trained)
    assert num_trainable_params(facts, adapter) == sum(parameter.numel() for parameter in trained)
    assert weights_bytes(facts, adapter, dtype) == stored_bytes([*trained, *frozen] if full else frozen)
    assert adapters_bytes(planned, adapter) == (0 if full else stored_bytes(trained))


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_trained_in_bfloat16_take_half(name, sections):
    facts = probe_model(sections[name])
    model = loaded(sections[name], FullAdapter(), trained_dtype="bfloat16")
    planned = weights_bytes(facts, FullAdapter(), "bfloat16", "bfloat16")
    assert planned == stored_bytes(model.parameters()) == 2 * sum(weight.numel() for weight in model.parameters())


# Files of Mixtral and Gemma 3 have names of earlier versions of transformers.
@pytest.mark.parametrize("name", ["llama", "qwen3 tied", "gemma3", "qwen3_moe"])
def test_the_trained_part_of_a_model_has_the_planned_names(name, sections):
    adapter = FullAdapter(last_layers=1, unfrozen_parameters=[r"layers\.0\..*norm"])
    model = loaded(sections[name], adapter)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(trained_tensors(probe_model(sections[name]), adapter))
    assert all(".layers.1." in name or "norm" in name for name in trained)


class Held(TrainerCallback):
    """Bytes of gradients and optimizer states at the end of a step."""

    def on_optimizer_step(self, args, state, control, model, optimizer, **kwargs):
        self.gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        tensors = [v for states in optimizer.state.values() for v in states.values() if isinstance(v, torch.Tensor)]
        # Tables are shared by all tensors.
        self.states = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def held_after_a_step(section, adapter, optim, tmp_path, *, pure_bf16=False, **more) -> Held:
    from datasets import Dataset

    recipe = Recipe.model_validate(
        {
            "model": section,
            "data": {"train": "rows.jsonl", "max_length": 16},
            "train": {"max_steps": 1, "global_batch_size": 2, "pure_bf16": pure_bf16},
            "adapter": adapter,
        }
    )
    plan = resolve(recipe, LAPTOP, probe_model(section), DataFacts(num_train=2))
    held = Held()
    forget_overrides(optim)
    row = {"input_ids": list(range(8, 24)), "labels": list(range(8, 24))}
    parts = Parts(
        train=recipe.train.model_copy(update={"optim": optim, **more}),
        data=recipe.data,
        plan=plan,
        schedule=plan.schedule,
        model=loaded(section, adapter, trained_dtype=plan.trained_dtype),
        tokenizer=make_tokenizer(),
        train_dataset=Dataset.from_list([row, row]),
        eval_dataset=None,
        checkpoints=tmp_path,
        callbacks=[held],
        engine={},
        load_reference=unused,
        load_teacher=unused,
    )
    trainer = sft.build(recipe.method, parts)
    keep_trained(trainer.model, plan.trained_dtype)
    trainer.train()
    return held


def assert_held_as_planned(section, adapter, optim, tmp_path):
    held = held_after_a_step(section, adapter, optim, tmp_path)
    planned = trained_tensors(probe_model(section), adapter)
    assert sum(4 * math.prod(shape) for shape in planned.values()) == held.gradients
    head_dim = probe_model(section).head_dim
    assert states_bytes(planned, optim, head_dim=head_dim) == held.states


@pytest.mark.sample(3)
@pytest.mark.parametrize("adapter", ["full", "last layer", "lora and embedding"])
@pytest.mark.parametrize("optim", [optim for optim in get_args(Optim) if not optim.startswith("paged")])
def test_every_optimizer_holds_what_is_planned(optim, adapter, sections, tmp_path):
    assert_held_as_planned(sections["llama"], ADAPTERS[adapter], optim, tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("optim", [optim for optim in get_args(Optim) if not optim.startswith("paged")])
def test_every_optimizer_holds_what_is_planned_of_weights_in_bfloat16(optim, sections, tmp_path):
    held = held_after_a_step(sections["llama"], FullAdapter(), optim, tmp_path, pure_bf16=True)
    planned = trained_tensors(probe_model(sections["llama"]), FullAdapter())
    assert sum(2 * math.prod(shape) for shape in planned.values()) == held.gradients
    assert states_bytes(planned, optim, "bfloat16", head_dim=16) == held.states


@pytest.mark.sample(2)
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit", "adafactor"])
@pytest.mark.parametrize("adapter", ["full", "norms and embedding", "lora", "qlora"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama"])
def test_every_model_holds_what_is_planned(name, adapter, optim, sections, tmp_path):
    assert_held_as_planned(sections[name], ADAPTERS[adapter], optim, tmp_path)


def test_a_run_does_not_inherit_the_32_bit_states_of_the_last_one(sections, tmp_path):
    """The first tensor of the first run is an embedding, of the second an adapter of more than 4096 values."""
    assert_held_as_planned(sections["llama"], ADAPTERS["full"], "adamw_8bit", tmp_path)
    assert_held_as_planned(sections["llama"], LoraAdapter(rank=64), "adamw_8bit", tmp_path)


@pytest.mark.parametrize("optim", [optim for optim in get_args(Optim) if optim.startswith("paged")])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter()], ids=["full", "lora"])
def test_paged_states_are_as_large_as_those_that_stay(optim, adapter):
    """They need an accelerator; bitsandbytes makes them by the same code, in memory that can move."""
    twin = optim.removeprefix("paged_")
    trained = trained_tensors(LLAMA_8B, adapter)
    if twin == "adamw_32bit":
        steps = 4 * len(trained)
        assert states_bytes(trained, optim) == states_bytes(trained, "adamw_torch") - steps
    else:
        twin = {"ademamix_32bit": "ademamix"}.get(twin, twin)
        assert states_bytes(trained, optim) == states_bytes(trained, twin)


def test_8_bit_adamw_on_8b_keeps_the_embedding_in_32_bits():
    """Worked by hand: 8 bytes for each of its values, 2 and two constants every 256 for the others, and two tables."""
    embedding, all_values = 128256 * 4096, 8_030_261_248
    rest = all_values - embedding
    by_hand = 8 * embedding + 2 * rest + 2 * 4 * rest // 256 + 2048
    assert states_bytes(trained_tensors(LLAMA_8B, FullAdapter()), "adamw_8bit") == by_hand


def test_4_bit_adamw_on_8b_keeps_half_a_byte_of_each_value_and_small_parts_whole():
    """Worked by hand: two values in half a byte, and two constants every 256; 291 tensors, all of them multiples of it.

    Of eight parts, those of 65 norms have 512 values, which are kept in float32.
    """
    all_values, norms = 8_030_261_248, 65 * 4096
    trained = trained_tensors(LLAMA_8B, FullAdapter())
    assert states_bytes(trained, "tunekit_adamw_4bit") == all_values + 2 * 4 * all_values // 256 + 4 * 291
    matrices = (all_values - norms) // 8
    by_hand = matrices + 2 * 4 * matrices // 256 + 8 * norms // 8 + 4 * 291
    assert block_states_bytes(trained.values(), "tunekit_adamw_4bit", "float32", 8) == by_hand


def test_muon_on_8b_keeps_one_value_of_each_matrix_and_two_of_all_else():
    """Worked by hand: embedding and head of 128,256 x 4,096, two norms in each of 32 layers and one behind them."""
    tables, norms = 2 * 128256 * 4096, 65 * 4096
    matrices = 8_030_261_248 - tables - norms
    trained = trained_tensors(LLAMA_8B, FullAdapter())
    assert states_bytes(trained, "muon") == 4 * matrices + 8 * (tables + norms) + 4 * (2 + 65)
    assert states_bytes(trained, "muon", "bfloat16") == 2 * matrices + 4 * (tables + norms) + 4 * (2 + 65)
    cost = muon_cost_of(LLAMA_8B, FullAdapter(), "float32")
    assert cost.num_params == matrices
    # Products of a layer's matrices, 2 operations for each multiplication: three of five iterations.
    q, kv, mlp = (4096, 4096), (1024, 4096), (4096, 14336)
    layer = [q, q, kv, kv, mlp, mlp, mlp]
    products = sum(2 * (less * less * more + less * less * less + less * less * more) for less, more in layer)
    assert cost.flops == 32 * 5 * products


def test_divided_muon_keeps_the_states_of_its_rows_on_each_device():
    whole, part = (muon_cost_of(LLAMA_8B, FullAdapter(), "float32", num) for num in (1, 8))
    # All rows are divisible by eight. Each device counts the steps of all tensors.
    assert 8 * (part.states_bytes - 4 * 67) == whole.states_bytes - 4 * 67
    assert 8 * part.flops == whole.flops
    assert (whole.gathered_bytes, part.gathered_bytes) == (0, 2 * whole.num_params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96), (4, 32, 96)])
def test_a_step_of_muon_takes_the_planned_bytes_for_a_time(shape, dtype):
    weight = torch.nn.Parameter(torch.randn(shape).to(getattr(torch, dtype)))
    weight.grad = torch.randn_like(weight)
    optimizer = Muon([{"params": [weight], "use_muon": True}])
    optimizer.step()
    with LiveBytes([weight, weight.grad, *optimizer.state[weight].values()]) as tracker:
        optimizer.step()
    planned = muon_cost((("layers.0.experts.up_proj", shape),), dtype)
    assert planned.step_bytes == tracker.peaks["forward"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["qwen3 tied", "qwen3_moe", "gemma3"])
@pytest.mark.parametrize("adapter", ["full", "norms and embedding"])
def test_adam_mini_holds_what_is_planned_of_heads_experts_and_norms(name, adapter, sections, tmp_path):
    assert_held_as_planned(sections[name], ADAPTERS[adapter], "adam_mini", tmp_path)


def test_adam_mini_on_8b_keeps_one_value_of_each_and_one_of_each_block():
    """Worked by hand: heads of 128 rows, 32 of queries and 8 of keys in a layer; rows; 65 norms; 291 tensors."""
    trained = trained_tensors(LLAMA_8B, FullAdapter())
    blocks = 2 * 128256 + 32 * (32 + 8 + 1024 + 4096 + 2 * 14336 + 4096 + 2) + 1
    by_hand = 4 * 8_030_261_248 + 4 * blocks + 4 * 291
    assert states_bytes(trained, "adam_mini", head_dim=128) == by_hand
    whole, part = (matrix_cost_of(LLAMA_8B, FullAdapter(), "adam_mini", "float32", None, num) for num in (1, 8))
    assert whole.states_bytes == by_hand
    # Blocks of several rows and of norms, and steps, are whole on each device.
    undivided = 4 * (32 * (32 + 8 + 2) + 1 + 291)
    assert 8 * (part.states_bytes - undivided) == by_hand - undivided


LOW_RANK = {
    "galore_adamw": LowRank("galore_adamw", 8, 200, None),
    "apollo_adamw": LowRank("apollo_adamw", 8, 200, None),
    "attention alone": LowRank("galore_adamw", 12, 200, (r"self_attn\.[qo]_proj",)),
    "head too": LowRank("apollo_adamw", 8, 200, ("mlp", "lm_head")),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("pure_bf16", [False, True])
@pytest.mark.parametrize("case", LOW_RANK)
def test_states_of_a_low_rank_are_as_large_as_planned(case, pure_bf16, sections, tmp_path):
    low_rank = LOW_RANK[case]
    more = {"optim_args": OptimArgs(rank=low_rank.rank)}
    if low_rank.target_modules is not None:
        more["optim_target_modules"] = list(low_rank.target_modules)
    section = sections["qwen3_moe" if case == "galore_adamw" else "llama"]
    held = held_after_a_step(section, FullAdapter(), low_rank.optim, tmp_path, pure_bf16=pure_bf16, **more)
    trained = trained_tensors(probe_model(section), FullAdapter())
    dtype = "bfloat16" if pure_bf16 else "float32"
    planned = states_bytes(trained, low_rank.optim, dtype, low_rank)
    assert planned == held.states < states_bytes(trained, "adamw_torch_fused", dtype)
    cost = low_rank_cost(tuple(trained.items()), low_rank, dtype)
    assert (cost.states_bytes, cost.gathered_bytes) == (planned, 0)


def test_galore_and_apollo_on_8b_keep_what_their_papers_count():
    """Table 1 of arXiv 2412.05270: of m x n, m <= n: mr + 2nr for GaLore, 2nr + 2 for APOLLO, Adam's 2mn elsewhere."""
    trained = trained_tensors(LLAMA_8B, FullAdapter())
    tables, norms = 2 * 128256 * 4096, 65 * 4096
    layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    # One of APOLLO's two numbers is the seed, which is the optimizer's. Each matrix has the other, and counts steps.
    num = 32 * len(layer)
    for optim, values in (
        ("galore_adamw", 32 * sum(128 * less + 2 * 128 * more for less, more in layer)),
        ("apollo_adamw", 32 * sum(2 * 128 * more + 1 for _, more in layer)),
    ):
        low_rank = LowRank(optim, 128, 200, None)
        by_hand = 4 * (values + num) + 8 * (tables + norms) + 4 * 67
        assert states_bytes(trained, optim, "float32", low_rank) == by_hand
        cost, part = (low_rank_cost(tuple(trained.items()), low_rank, "float32", num) for num in (1, 8))
        assert part.gathered_bytes == 4 * cost.num_params == 4 * (8_030_261_248 - tables - norms)
        # Those of matrices are whole on each device.
        assert cost.states_bytes - part.states_bytes == 7 * (tables + norms)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96)])
@pytest.mark.parametrize("optim", ["galore_adamw", "apollo_adamw"])
def test_a_step_of_a_low_rank_takes_the_planned_bytes_for_a_time(optim, shape, dtype):
    kind = {"galore_adamw": GaLoreAdamW, "apollo_adamw": ApolloAdamW}[optim]
    planned = low_rank_cost((("layers.0.up_proj", shape),), LowRank(optim, 8, 2, None), dtype)
    peaks = []
    # At the third step a new projection is made.
    for num_before in (1, 2):
        weight = torch.nn.Parameter(torch.randn(shape).to(getattr(torch, dtype)))
        weight.grad = torch.randn_like(weight)
        optimizer = kind([{"params": [weight], "low_rank": True}], rank=8, update_proj_gap=2)
        for _ in range(num_before):
            optimizer.step()
        with LiveBytes([weight, weight.grad, *optimizer.state[weight].values()]) as tracker:
            optimizer.step()
        peaks.append(tracker.peaks["forward"])
    if optim == "galore_adamw":
        # LAPACK decomposes a copy, which no operation of torch returns. In float32 the most that is seen is later, with
        # the vectors that are kept.
        peaks[1] += 4 * math.prod(shape) - (4 * 8 * min(shape) if dtype == "float32" else 0)
    assert planned.step_bytes == max(peaks)


def test_a_4_bit_weight_is_in_the_compute_type_while_it_is_used():
    assert dequantised_bytes(LLAMA_8B, QloraAdapter(), "bfloat16") == 2 * 4096 * 14336
    assert dequantised_bytes(LLAMA_8B, LoraAdapter(), "bfloat16") == 0


@pytest.mark.parametrize("rate", [0.0, 0.1], ids=["no dropout", "dropout"])
def test_adapters_of_a_4_bit_base_share_an_input_on_cuda_unless_they_have_dropout(rate):
    """PEFT asks whether CUDA has autocast, and then casts nothing itself."""
    adapter, facts = QloraAdapter(rank=8, dropout=rate), facts_of(build(2))
    real = torch.is_autocast_enabled
    # Autocast asks too, to restore later what was before: of other devices it is told the truth.
    with mock.patch.object(torch, "is_autocast_enabled", lambda device="cuda": device == "cuda" or real(device)):
        measured = saved_bytes(4, adapter, "bfloat16", "even") - saved_bytes(2, adapter, "bfloat16", "even")
    predicted = 2 * TOKENS * activation_bytes_per_layer(products_of(facts, adapter, "bfloat16"), None)
    assert predicted + cast_weights_bytes(facts, adapter, "bfloat16") == measured
    assert not real("cpu") and not real("cuda")
