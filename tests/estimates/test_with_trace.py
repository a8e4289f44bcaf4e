"""Estimates that a trace corrects, against traces of other rows and devices, for types that formulas do not know."""

import pytest

from tests.estimates import grid_families, oracle_shards
from tests.estimates.grid_families import SHARDED, STEPS
from tests.estimates.oracle import Step, estimate_of, trace, traced_facts_of
from tunekit.estimates.memory.activations import is_traced
from tunekit.estimates.traces import TraceRequest
from tunekit.models.step_trace import trace_phases
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SECONDS = len(grid_families.HYBRIDS)
"""Types at the end of the grid whose code takes many seconds on tensors without storage."""

ONE_DEVICE = STEPS[: len(grid_families.FAMILIES) - SECONDS]
SMALL = ("gpt2", "opt", "starcoder2", "stablelm")


@pytest.mark.slow
@pytest.mark.parametrize("step", ONE_DEVICE, ids=str)
def test_a_corrected_peak_is_that_of_other_rows(step):
    estimated = estimate_of(step, facts=traced_facts_of(step))
    assert estimated.confidence == "model traced"
    assert estimated.tensor_bytes == pytest.approx(trace(step).peak_bytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", SHARDED[:-SECONDS:3], ids=str)
def test_a_corrected_peak_is_that_of_many_devices(sharded):
    estimated = estimate_of(sharded.step, sharded.layout, traced_facts_of(sharded.step, is_sharded=True))
    assert estimated.tensor_bytes == pytest.approx(oracle_shards.trace(sharded).peak_bytes, rel=0.1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=16)], ids=["full", "lora"])
@pytest.mark.parametrize("family", SMALL)
def test_formulas_that_are_off_are_corrected(family, adapter, checkpointing):
    """Without a gate, with a norm that has a bias, with learned positions: all that a Llama has not."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 2000}
    sizes |= {"num_key_value_heads": 4} if family == "stablelm" else {}
    step = Step(
        family,
        tuple((sizes | grid_families.OTHERS.get(family, {})).items()),
        adapter,
        batch=3,
        length=512,
        checkpointing=checkpointing,
    )
    facts = traced_facts_of(step)
    assert not is_traced(facts)
    corrected, traced = estimate_of(step, facts=facts), trace(step)
    formulas = estimate_of(step, facts=facts.model_copy(update={"deviations": None}))
    assert formulas.confidence == "outside the model"
    assert corrected.tensor_bytes == pytest.approx(traced.peak_bytes, rel=0.01)
    if not checkpointing:
        assert abs(formulas.tensor_bytes - traced.peak_bytes) > 3 * abs(corrected.tensor_bytes - traced.peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
def test_a_part_of_the_layers_is_corrected_as_all_are(checkpointing):
    """No gradient comes to the first layers, so that nothing is kept of them."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4}
    adapter = LoraAdapter(rank=16, layers_to_transform=[4, 5])
    step = Step("stablelm", tuple(sizes.items()), adapter, batch=12, length=512, checkpointing=checkpointing)
    facts = traced_facts_of(step)
    trace = trace_phases(
        TraceRequest(
            config=step.config().to_dict() | {"architectures": ["StableLmForCausalLM"]},
            adapter=adapter,
            dtype="bfloat16",
            trained_dtype="float32",
            length=512,
            attention="sdpa",
        ),
        12,
        checkpointing=checkpointing,
    )
    peak = max(dict(trace).values())
    assert estimate_of(step, facts=facts).tensor_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [FullAdapter(), LoraAdapter(rank=16)], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_trace_agrees_with_formulas_that_know_the_type(family, adapter):
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 40000, "head_dim": 64}
    step = Step(family, tuple(sizes.items()), adapter, batch=2, length=1024, checkpointing=False)
    facts = traced_facts_of(step)
    known = facts.model_copy(update={"deviations": None})
    assert estimate_of(step, facts=facts).tensor_bytes == pytest.approx(
        estimate_of(step, facts=known).tensor_bytes, rel=0.005
    )
