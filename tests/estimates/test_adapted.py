"""Adapters with dropout, with DoRA and beside trained tables, against a trace of PEFT's modules."""

import pytest

from tests.estimates.oracle import Step, estimate_of, trace
from tests.estimates.oracle_shards import ShardedStep
from tests.estimates.oracle_shards import trace as trace_sharded
from tunekit.estimates.layout import Layout
from tunekit.recipe.sections.adapters import LoraAdapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 40000,
}
ON_TWO = ["q_proj", "v_proj"]
ON_ATTENTION = [*ON_TWO, "k_proj", "o_proj"]

ADAPTERS = {
    "dropout": LoraAdapter(dropout=0.1),
    "dropout on two": LoraAdapter(dropout=0.05, target_modules=ON_TWO),
    "dropout on attention": LoraAdapter(dropout=0.1, target_modules=ON_ATTENTION),
    "dora": LoraAdapter(use_dora=True),
    "dora on two": LoraAdapter(use_dora=True, target_modules=ON_TWO),
    "dora and dropout": LoraAdapter(use_dora=True, dropout=0.1),
}
TABLES = {
    "both tables": LoraAdapter(modules_to_save=["embed_tokens", "lm_head"]),
    "the head": LoraAdapter(modules_to_save=["lm_head"]),
    "the embedding": LoraAdapter(modules_to_save=["embed_tokens"]),
}


def step(adapter, *, tied=False, **how) -> Step:
    sizes = {**SIZES, "tie_word_embeddings": tied}
    return Step("llama", tuple(sizes.items()), adapter, **{"batch": 2, "length": 1024, "checkpointing": True, **how})


def assert_every_phase_is_traced(how: Step, *, rel: float) -> None:
    traced, estimated = trace(how), estimate_of(how)
    constant = traced.weights_bytes + traced.optimizer_bytes
    known = {phase: constant + traced.step_bytes[phase] for phase in estimated.phases if phase in traced.step_bytes}
    assert {phase: estimated.phases[phase] for phase in known} == {
        phase: pytest.approx(size, rel=rel) for phase, size in known.items()
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("adapter", ADAPTERS.values(), ids=ADAPTERS)
def test_every_phase_of_an_adapter_is_what_is_traced(adapter, dtype, checkpointing):
    assert_every_phase_is_traced(step(adapter, dtype=dtype, checkpointing=checkpointing), rel=0.025)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("adapter", TABLES.values(), ids=TABLES)
def test_tables_trained_beside_an_adapter_are_what_is_traced(adapter, dtype, checkpointing):
    assert_every_phase_is_traced(step(adapter, dtype=dtype, checkpointing=checkpointing), rel=0.01)


@pytest.mark.parametrize("accumulates", [False, True], ids=["one", "several"])
def test_a_copied_embedding_is_apart_from_the_head_that_was_tied_to_it(accumulates):
    assert_every_phase_is_traced(step(TABLES["the embedding"], tied=True, accumulates=accumulates), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [64, 2048])
def test_the_weights_around_a_norm_of_dora_are_there_however_few_the_tokens(tokens):
    how = step(ADAPTERS["dora"], batch=1, length=tokens)
    plain = estimate_of(step(LoraAdapter(), batch=1, length=tokens))
    traced, estimated = trace(how).step_bytes["last layer"], estimate_of(how)
    # Of the last linear layer: it, its update and their sum in float32, and an identity matrix in 16 bits.
    around = (3 * 4 * 512 + 2 * 1408) * 1408
    assert estimated.phases["last layer"] - plain.phases["last layer"] > 0.8 * around
    rest = estimated.phases["load"] + estimated.parts["optimizer"]
    assert estimated.phases["last layer"] - rest == pytest.approx(traced, rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", ["dropout", "dropout on two", "dora", "dora and dropout"])
def test_the_peak_of_fsdp2_is_what_is_traced(adapter, checkpointing):
    how, layout = step(ADAPTERS[adapter], checkpointing=checkpointing), Layout(strategy="fsdp2", dp_shard_size=8)
    traced = trace_sharded(ShardedStep(how, layout))
    assert estimate_of(how, layout).tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.01)
