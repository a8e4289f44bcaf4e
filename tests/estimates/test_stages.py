"""Memory and speed of stages, and of divided experts, against 1F1B played through and what is worked out by hand."""

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.estimates.published import LOGITS
from tests.estimates.shapes import LLAMA_8B, llama_facts
from tests.estimates.test_architectures import facts_of
from tunekit.estimates.facts import Figures
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import Head, activation_bytes_per_layer, layers_of, products_of
from tunekit.estimates.memory.memory import estimate
from tunekit.estimates.memory.stages import FULL, Unit, _Step, head_of_all, layers_per_stage, stages_of
from tunekit.estimates.throughput.stages import slowest_stage, staged_transfers
from tunekit.estimates.throughput.step import bubble
from tunekit.probe.model import known_model
from tunekit.recipe.sections.adapters import FullAdapter

TINY = llama_facts(path="tiny", hidden=64, intermediate=128, layers=4, heads=4, kv_heads=2, vocab=256)
LAYER = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64
"""Parameters of a layer of it."""
TABLE = 256 * 64
MIXTURE = facts_of(
    {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
)
EXPERTS = 8 * 3 * 64 * 32
"""Parameters of the experts of a layer of it."""
TOKENS = 32


def layout(**sizes) -> Layout:
    return Layout(engine="automodel", strategy="fsdp2", **sizes)


def memory(model=TINY, *, micro_batches=4, tokens=TOKENS, recomputes=False, **sizes):
    return estimate(
        model, FullAdapter(), device="cuda", dtype="bfloat16", optim="adamw_torch_fused", num_tokens=tokens,
        mask_length=None, sliding_mask_length=None, gradient_checkpointing=recomputes, accumulates=micro_batches > 1,
        layout=layout(**sizes), devices_per_node=8, reserve_share=0.0, num_micro_batches=micro_batches,
    )  # fmt: skip


def order(pp_size: int, micro_batches: int) -> list[list[tuple[bool, int]]]:
    """Forward and backward passes of each stage by 1F1B: whether forward, and of which micro-batch.

    As many forward passes as there are stages from this one on, then backward and forward in turn
    (`Schedule1F1B._step_microbatches` of torch 2.13).
    """
    passes = []
    for stage in range(pp_size):
        ahead = min(micro_batches, pp_size - stage)
        own = [(True, batch) for batch in range(ahead)]
        for batch in range(micro_batches):
            own.append((False, batch))
            own += [(True, batch + ahead)] if batch + ahead < micro_batches else []
        passes.append(own)
    return passes


SHAPES = [(2, 2), (2, 7), (4, 4), (4, 6), (4, 16), (8, 8), (8, 32)]


@pytest.mark.parametrize(("pp_size", "micro_batches"), SHAPES)
def test_as_many_micro_batches_are_in_flight_as_by_1f1b(pp_size, micro_batches):
    for index, passes in enumerate(order(pp_size, micro_batches)):
        alive = most = 0
        for is_forward, _ in passes:
            alive += 1 if is_forward else -1
            most = max(most, alive)
        assert most == min(pp_size - index, micro_batches)


@pytest.mark.parametrize(("pp_size", "micro_batches"), SHAPES)
def test_the_bubble_is_what_stages_wait_by_1f1b(pp_size, micro_batches):
    """A forward pass takes 1, a backward pass 2, and each starts when what it needs is there."""
    orders, done, clocks = order(pp_size, micro_batches), {}, [0] * pp_size
    at = [0] * pp_size
    for _ in range(2 * pp_size * micro_batches):
        for stage in range(pp_size):
            if at[stage] == len(orders[stage]):
                continue
            is_forward, batch = orders[stage][at[stage]]
            neighbour = stage - 1 if is_forward else stage + 1
            needs = [(is_forward, batch, neighbour)] if 0 <= neighbour < pp_size else []
            if not is_forward:
                needs.append((True, batch, stage))
            if all(need in done for need in needs):
                start = max([clocks[stage], *(done[need] for need in needs)])
                clocks[stage] = done[is_forward, batch, stage] = start + (1 if is_forward else 2)
                at[stage] += 1
    assert at == [2 * micro_batches] * pp_size
    assert 1 - 3 * micro_batches / max(clocks) == pytest.approx(bubble(pp_size, micro_batches))


def test_the_first_stages_have_one_layer_more():
    """As `generate_hf_model_fqn_per_model_part` of nemo_automodel 0.7.0 gives them out."""
    assert layers_per_stage(32, 4) == [8, 8, 8, 8]
    assert layers_per_stage(126, 4) == [32, 32, 31, 31]
    assert layers_per_stage(61, 16) == [4] * 13 + [3] * 3


def test_embedding_and_head_are_at_the_ends():
    first, last = stages_of(TINY, layout(dp_shard_size=2, pp_size=2))
    assert first.all == Unit((2 * LAYER + TABLE) // 2, 2 * LAYER + TABLE)
    assert last.all == Unit((2 * LAYER + TABLE + 64) // 2, 2 * LAYER + TABLE + 64)


@pytest.mark.parametrize(("pp_size", "ep_size"), list(product([1, 2], [1, 2, 4])))
def test_all_devices_together_hold_the_model_once(pp_size, ep_size):
    stages = stages_of(MIXTURE, layout(dp_shard_size=4, pp_size=pp_size, ep_size=ep_size))
    assert sum(4 * stage.all.divided for stage in stages) == MIXTURE.num_params
    # Each device gathers its own experts alone.
    whole = sum(stage.all.whole for stage in stages)
    assert whole == MIXTURE.num_params - 2 * EXPERTS * (1 - 1 / ep_size)


def test_states_are_those_of_the_largest_stage():
    """Two states in float32 beside float32 weights and gradients: 16 bytes of half of the first stage's parameters."""
    planned = memory(dp_shard_size=2, pp_size=2)
    own = (2 * LAYER + TABLE) // 2
    assert planned.parts["weights"] == 4 * own
    assert planned.parts["optimizer"] == pytest.approx(8 * own, rel=1e-3)
    # It receives gradients of 32 tokens of 64 values in four tensors: two in flight, and two more.
    assert planned.phases["optimizer"] == pytest.approx(16 * own + 4 * TOKENS * 64 * 2, rel=1e-3)


def test_a_pipeline_holds_whole_weights_and_gradients_until_its_last_micro_batch():
    """4 bytes of each gradient of the stage, but of each in shards where each micro-batch is reduced."""
    own = 2 * LAYER + TABLE
    deferred = memory(dp_shard_size=2, pp_size=2, reshard_after_forward=False)
    reduced = memory(dp_shard_size=2, pp_size=2, reshard_after_forward=False, sync_each_batch=True)
    assert deferred.phases["forward"] - reduced.phases["forward"] == 4 * own - 4 * own // 2
    assert deferred.parts["gradients"] == 4 * own
    deep = llama_facts(path="deep", hidden=64, intermediate=128, layers=16, heads=4, kv_heads=2, vocab=256)
    freed, stays = (
        memory(deep, dp_shard_size=4, pp_size=2, sync_each_batch=True, reshard_after_forward=flag).phases["forward"]
        for flag in (True, False)
    )
    # Of eight layers and the embedding two layers stay.
    assert stays - freed == 2 * (6 * LAYER + TABLE)


def test_stages_hold_the_activations_of_micro_batches_in_flight():
    """Tokens enough that activations decide: the first of four stages holds four micro-batches, whatever more come."""
    tokens = 2**16
    layer = activation_bytes_per_layer(
        products_of(TINY.of_layers(0, 1), FullAdapter(), "bfloat16", "cuda", autocast=False), None
    )
    stream = 2 * 64
    peaks = {number: memory(micro_batches=number, tokens=tokens, pp_size=4).parts for number in (4, 8, 64)}
    head = memory(micro_batches=4, tokens=tokens, pp_size=4)
    assert head.phase in ("forward", "head", "last layer")
    model = TINY.model_copy(update={"vocab_size": 8})
    first = memory(model, micro_batches=8, tokens=tokens, pp_size=4)
    # A layer, what it sends on, and gradients that arrive in as many tensors and two more.
    least = 4 * (layer + stream) + 6 * stream
    assert least * tokens <= first.parts["activations"] <= (least + layer) * tokens
    assert peaks[8] == peaks[64]


def test_recomputed_stages_keep_inputs():
    tokens, stream = 2**16, 2 * 64
    model = TINY.model_copy(update={"vocab_size": 8})
    stored, recomputed = (
        memory(model, micro_batches=8, tokens=tokens, pp_size=4, recomputes=flag) for flag in (False, True)
    )
    assert recomputed.parts["activations"] < stored.parts["activations"] / 2
    # Of the first stage: an input and an output of four micro-batches, and gradients that arrive.
    assert recomputed.parts["activations"] >= (4 * 2 + 6) * stream * tokens


def test_the_loss_holds_all_logits_as_transformers_does():
    forward, backward = LOGITS["kept"]
    head, per_token = head_of_all(TINY, 1, "bfloat16"), 8 * 64
    entries = TINY.vocab_size
    assert 2 * entries + head.kept + head.forward - per_token == forward * entries
    assert 2 * entries + head.kept + head.backward - per_token == backward * entries


def test_tokens_of_all_devices_with_other_experts_are_there():
    """Gathered in bfloat16, and twice what experts give of them in float32."""
    tokens = 2**14
    divided, wider = (
        memory(MIXTURE, tokens=tokens, dp_shard_size=8, ep_size=size, sync_each_batch=True) for size in (2, 4)
    )
    more = (4 - 2) * tokens * 64 * (2 + 2 * 4)
    assert wider.phases["first layer"] - divided.phases["first layer"] == pytest.approx(more, rel=0.02)


def sent(model, tokens=4096, num_nodes=1, *, again=True, **sizes) -> dict[str, tuple[float, bool]]:
    transfers = staged_transfers(model, "bfloat16", layout(**sizes), num_nodes, tokens, gradient_checkpointing=again)
    return {transfer.what: (transfer.sent_bytes, transfer.per_step) for transfer in transfers}


def test_a_pipeline_gathers_and_reduces_once_a_step():
    """Weights of a stage in bfloat16 and its gradients in float32, three quarters of both among four devices."""
    own = max(stage.all.whole for stage in stages_of(LLAMA_8B, layout(dp_shard_size=4, pp_size=2)))
    figures = sent(LLAMA_8B, dp_shard_size=4, pp_size=2, reshard_after_forward=False)
    assert figures["gathering weights"] == (0.75 * 2 * own, True)
    assert figures["reducing gradients"] == (0.75 * 4 * own, True)
    # An activation goes on and its gradient back.
    assert figures["passing activations on"] == (2 * 4096 * 4096 * 2, False)
    often = sent(LLAMA_8B, dp_shard_size=4, pp_size=2, sync_each_batch=True)
    assert often["gathering weights"] == (2 * 0.75 * 2 * own, False)
    assert often["reducing gradients"] == (0.75 * 4 * own, False)


def test_one_stage_passes_nothing_on():
    assert "passing activations on" not in sent(LLAMA_8B, dp_shard_size=8)


def test_experts_are_gathered_among_those_that_have_the_same_and_tokens_among_the_others():
    model = known_model("Qwen/Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 2048 * 768
    figures = sent(model, dp_shard_size=16, ep_size=8, num_nodes=2, reshard_after_forward=False)
    assert figures["gathering weights of experts"][0] == pytest.approx(0.5 * 2 * experts / 8)
    assert figures["gathering weights"][0] == pytest.approx(15 / 16 * 2 * (model.num_params - experts), rel=1e-3)
    # Forward, again and backward: 8 devices' tokens in bfloat16, and their sums in float32 twice.
    assert figures["exchanging tokens of experts"][0] == 3 * 48 * 7 * 4096 * 2048 * (2 + 8)
    assert "exchanging tokens of experts" not in sent(model, dp_shard_size=16, num_nodes=2)


def test_a_border_between_nodes_sets_the_pace_of_a_pipeline():
    figures = Figures(link_bytes_per_second=450e9, network_bytes_per_second=50e9)
    times = []
    for nodes in (1, 2):
        all_transfers = staged_transfers(
            LLAMA_8B, "bfloat16", layout(dp_shard_size=4, pp_size=2), nodes, 4096, gradient_checkpointing=True
        )
        (border,) = (one for one in all_transfers if one.what == "passing activations on")
        times.append(border.seconds(figures).low)
    assert times[1] > 5 * times[0]


def test_the_head_makes_the_last_stage_slow():
    """Two layers and a table against two layers: parameters of products, three passes each."""
    layer = LAYER - 2 * 64
    mean = (4 * layer + TABLE) / 2
    assert slowest_stage(TINY, 2, again=False) == pytest.approx((2 * layer + TABLE) / mean)
    # Layers are computed once more, the head is not.
    assert slowest_stage(TINY, 2, again=True) < slowest_stage(TINY, 2, again=False)


def estimated(micro_batches: int, tokens: int) -> list[int]:
    """Peak of each stage of the oracle, without what it does not count."""
    own, peaks = layout(dp_shard_size=2, pp_size=2, reshard_after_forward=False), []
    for stage in stages_of(TINY, own):
        products = products_of(TINY.of_layers(stage.start, stage.start + 2), FULL, "bfloat16", "cpu", autocast=False)
        layers = layers_of(products, tokens, None, None, gradient_checkpointing=False, accumulates=True)
        head = head_of_all(TINY, tokens, "bfloat16") if stage.is_last else Head(0, 0, 0)
        logits = 2 * 256 * tokens if stage.is_last else 0
        step = _Step(stage, layers, head, own, 2, 4, 4, micro_batches, logits, exchanged=0, recomputes=False)
        peaks.append(max(need.total for phase, need in step.needs() if phase != "load") - step.received)
    return peaks


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "tokens"), [(6, 32), (2, 2048)])
def test_a_real_pipeline_of_torch_needs_as_much(micro_batches, tokens, tmp_path):
    """Weights and gradients decide with few tokens, activations with many.

    What a stage sends stays for longer over gloo: with six micro-batches of many tokens it needs 7 to 10 % more.
    """
    traced = tmp_path / "traced.json"
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m",
         "tests.estimates.oracle_stages", str(micro_batches), str(tokens), str(traced)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    peaks = json.loads(traced.read_text(encoding="utf-8"))
    assert estimated(micro_batches, tokens) == [pytest.approx(peak, rel=0.06) for peak in peaks]
