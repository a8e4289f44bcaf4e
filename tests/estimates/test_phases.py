"""The phases of a step against a trace of the real modules; `benchmarks/planner.py` does it at full size."""

import pytest
import torch

from tests.estimates.oracle import Step, estimate_of, trace, trace_deep
from tests.estimates.shapes import LLAMA_1B, LLAMA_8B
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.memory import estimate
from tunekit.estimates.memory.states import PHASE_WORDS
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 40000,
}


def step(family, adapter, *, tied=False, **how) -> Step:
    sizes = {**SIZES, "tie_word_embeddings": tied}
    if family == "gemma3_text":
        sizes["sliding_window"] = 512
    return Step(family, tuple(sizes.items()), adapter, batch=2, length=1024, **how)


def phases_of(step: Step) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of each phase: traced, and estimated."""
    traced, estimated = trace(step), estimate_of(step)
    constant = traced.weights_bytes + traced.optimizer_bytes
    known = {phase: constant + traced.step_bytes[phase] for phase in estimated.phases if phase != "load"}
    return known, {phase: estimated.phases[phase] for phase in known}


@pytest.mark.sample(3)
@pytest.mark.parametrize("accumulates", [False, True], ids=["at once", "accumulated"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=16)], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_phase_is_what_is_traced(family, tied, adapter, checkpointing, accumulates):
    traced, estimated = phases_of(
        step(family, adapter, tied=tied, checkpointing=checkpointing, accumulates=accumulates)
    )
    assert estimated == {phase: pytest.approx(size, rel=0.01) for phase, size in traced.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", ["even", "padded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=16)], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_the_peak_is_what_is_traced(family, adapter, dtype, rows):
    traced, estimated = phases_of(step(family, adapter, tied=True, checkpointing=True, dtype=dtype, rows=rows))
    assert max(estimated.values()) == pytest.approx(max(traced.values()), rel=0.03)


@pytest.mark.sample(2)
@pytest.mark.parametrize("accumulates", [False, True], ids=["at once", "accumulated"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("tied", [False, True], ids=["two tables", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_phase_of_weights_in_bfloat16_is_what_is_traced(family, tied, checkpointing, accumulates):
    how = {"tied": tied, "checkpointing": checkpointing, "accumulates": accumulates, "trained_dtype": "bfloat16"}
    traced, estimated = phases_of(step(family, FullAdapter(), **how))
    assert estimated == {phase: pytest.approx(size, rel=0.03) for phase, size in traced.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("accumulates", [False, True], ids=["at once", "accumulated"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=16)], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_phase_with_mlps_in_tiles_is_what_is_traced(family, adapter, checkpointing, accumulates):
    how = {"checkpointing": checkpointing, "accumulates": accumulates, "mlp_tile_tokens": 512}
    traced, estimated = phases_of(step(family, adapter, **how))
    assert estimated == {phase: pytest.approx(size, rel=0.02) for phase, size in traced.items()}


def test_a_deep_model_is_drawn_through_shallow_ones():
    deep = step("llama", FullAdapter(), checkpointing=False).with_layers(8)
    drawn, whole = trace_deep(deep), trace(deep)
    assert drawn.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-4)
    assert drawn.phase == whole.phase


@pytest.mark.parametrize(("optim", "copies"), [("adamw_torch_fused", 0), ("adamw_torch", 1)])
def test_an_optimizer_that_takes_all_parameters_at_once_copies_them(optim, copies):
    how = {"device": "cuda", "dtype": "bfloat16", "num_tokens": 64, "mask_length": None, "sliding_mask_length": None}
    how |= {"layout": Layout(), "devices_per_node": 1, "reserve_share": 0.0}
    found = estimate(
        LLAMA_1B, FullAdapter(), optim=optim, gradient_checkpointing=True, accumulates=False, **how
    ).phases["optimizer"]
    least = estimate(
        LLAMA_1B, FullAdapter(), optim="adamw_torch_fused", gradient_checkpointing=True, accumulates=False, **how
    ).phases["optimizer"]
    assert found - least == copies * 4 * LLAMA_1B.num_params


def test_foreach_adamw_makes_one_temporary_value_a_parameter():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tunekit.models.step_trace import LiveBytes

    with FakeTensorMode():
        weights = [torch.nn.Parameter(torch.empty(256, 256)) for _ in range(8)]
        optimizer = torch.optim.AdamW(weights, foreach=True)
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        with LiveBytes([]) as tracker:
            optimizer.step()
    assert tracker.peaks["forward"] == pytest.approx(sum(weight.nbytes for weight in weights), rel=0.01)


@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter()], ids=["full", "lora"])
def test_the_parts_are_those_of_the_highest_phase(adapter):
    found = estimate(
        LLAMA_8B, adapter, device="cuda", dtype="bfloat16", optim="adamw_torch_fused", num_tokens=4096,
        mask_length=None, sliding_mask_length=None, gradient_checkpointing=True, accumulates=True,
        layout=Layout(), devices_per_node=1, reserve_share=0.05,
    )  # fmt: skip
    around = found.parts["context"] + found.parts["reserve"]
    assert found.total_bytes - around == found.tensor_bytes == max(found.phases.values()) == found.phases[found.phase]
    assert found.parts["reserve"] == pytest.approx(0.05 * found.tensor_bytes, rel=1e-6)
    assert found.peak_words == f"peak {PHASE_WORDS[found.phase]}"
