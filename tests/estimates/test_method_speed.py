"""What a training method adds to the time of a step: against torch's count of TRL's own losses, and worked out by hand.

`DEVICE` and `FIGURES` are round: 35 to 70 TFLOP/s, a terabyte a second.
"""

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.estimates.oracle import facts_of
from tests.estimates.oracle_methods import trace
from tests.estimates.shapes import LAPTOP, LLAMA_1B, LLAMA_8B, with_gpu
from tests.estimates.test_passes import ADAPTERS, METHODS, step
from tests.estimates.test_speed import DEVICE, STEP
from tests.estimates.test_step import FIGURES, RATE
from tunekit.estimates.facts import DataFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.layout import Layout
from tunekit.estimates.passes import passes_of
from tunekit.estimates.throughput.speed import RunRecord, speed_of, step_of
from tunekit.estimates.throughput.step import (
    BANDWIDTH_SHARE,
    FORWARD_SECONDS,
    Before,
    Generating,
    Range,
    Step,
    forward_flops_per_token,
    generating,
    seconds_before,
    seconds_of,
    transfers_of,
)
from tunekit.planner.resolve import resolve
from tunekit.recipe.methods.dpo import DPOMethod
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter

ROWS = DataFacts(num_train=640)


def recipe(method, *, adapter="lora", length=1024, batch=16, **sections) -> Recipe:
    given = {"model": "m", "data": {"train": "rows.jsonl", "max_length": length}, "method": method, "adapter": adapter}
    return Recipe.model_validate({**given, "train": {"global_batch_size": batch}, **sections})


def made(method, *, model=LLAMA_8B, layout=None, rows=2, data=ROWS, **how) -> Step:
    found = step_of(
        recipe(method, **how),
        model,
        data,
        DEVICE,
        dtype="bfloat16",
        mask_length=None,
        padding_free=False,
        micro_batch_size=rows,
        gradient_checkpointing=False,
        layout=layout or Layout(),
        num_nodes=1,
    )
    assert found is not None
    return found


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_operations_of_a_step_are_those_that_torch_counts_in_trls_loss(adapter, method):
    """The forward and the backward pass, and DPO's reference; GRPO computes its own with the answers."""
    one = step("llama", ADAPTERS[adapter], METHODS[method])
    with FlopCounterMode(display=False) as counter:
        trace(one)
    asked = recipe(METHODS[method], adapter=ADAPTERS[adapter])
    own = passes_of(asked.method, asked.adapter, asked.data, global_batch_size=16)
    length, num_tokens = one.step.length, own.sequences_per_row * one.step.batch * one.step.length
    predicted = made(asked.method, adapter=asked.adapter, model=facts_of(one.step)).flops_per_token
    if not own.refers_in_micro_batch:
        predicted -= own.num_forwards * forward_flops_per_token(
            facts_of(one.step), attended_tokens=length, head_share=own.max_scored_share
        )
    # The counter does not know sdpa: two products of 512 x length, three times, and in the reference. And the trace
    # leaves the head's gradients out, which Triton adds up: of what it reads, and of its weight.
    attention = 4 * 4 * 512 * length * (3 + own.refers_in_micro_batch)
    gradients = 2 * 40000 * 512 * own.max_scored_share * (2 if adapter == "full" else 1)
    assert num_tokens * (predicted - attention - gradients) == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_row_of_dpo_is_two_sequences_and_a_pass_of_the_reference():
    """6 operations for each weight of a LoRA step would be 4, and 2 more for the reference."""
    sft, dpo = made("sft"), made("dpo")
    assert (sft.num_tokens, dpo.num_tokens) == (16 * 1024, 2 * 16 * 1024)
    assert dpo.flops_per_token / sft.flops_per_token == pytest.approx(6 / 4, rel=0.03)
    assert made(DPOMethod(precompute_ref_log_probs=True)).flops_per_token == sft.flops_per_token


def test_pairs_that_were_measured_are_as_long_as_they_are():
    """640 pairs with 192,000 tokens in both answers have 150 in each, and 400 in the longest."""
    measured = {"tokenized": True, "num_train_tokens": 192_000, "longest_tokens": 400}
    pairs = DataFacts(num_train=640, format="preference", **measured)
    found = made("dpo", data=pairs)
    assert (found.num_tokens, found.max_computed_tokens) == (2 * 16 * 150, 2 * 16 * 400)
    assert made("dpo", data=pairs, length=256).max_computed_tokens == 2 * 16 * 256, "what is longer is cut"
    # How long answers will be, nobody knows before they are written.
    prompts = DataFacts(num_train=640, format="prompts", **measured)
    assert made("grpo", data=prompts) == made("grpo")
    assert (pairs.has_lengths, prompts.has_lengths) == (True, False)


def test_a_reference_computed_before_is_one_pass_over_all_rows():
    found = made(DPOMethod(precompute_ref_log_probs=True))
    # 640 pairs of 2 x 1,024 tokens, 2 operations for each of 7.5 billion weights of layers and head and a little more.
    assert found.before.flops == pytest.approx(640 * 2 * 1024 * 2 * 7.5e9, rel=0.05)
    assert found.before.num_micro_batches == 320
    alone = Step(**{**vars(STEP), "before": Before(flops=7e15, num_micro_batches=100)})
    assert seconds_before(alone, RATE) == Range(low=100.0, high=200.0)
    with_it, without = (speed_of(one, DEVICE, FIGURES, [], num_steps=10) for one in (alone, STEP))
    # At the peak itself, and at 57.6 % of it.
    assert with_it.seconds.low - without.seconds.low == pytest.approx(70)
    assert with_it.tokens_per_second == without.tokens_per_second
    assert "70 s to 2 min for the reference before training" in with_it.basis


def test_generating_takes_the_longest_of_memory_launches_and_links_and_comes_on_top():
    def seconds(**work):
        one = Step(**{**vars(STEP), "generating": Generating(**{"num_tokens": 1, "read_bytes": 0, "flops": 0} | work)})
        span, without = (seconds_of(found, RATE, FIGURES) for found in (one, STEP))
        return pytest.approx(span.low - without.low), pytest.approx(span.high - without.high)

    assert seconds(read_bytes=6e12) == (6.0, 6 / BANDWIDTH_SHARE.low)
    # 100 tokens in 10 layers.
    assert seconds(num_tokens=100) == (1000 * FORWARD_SECONDS.low, 1000 * FORWARD_SECONDS.high)
    # Reading long prompts is computing, which nothing hides in the worse end.
    assert seconds(read_bytes=6e12, flops=700e12) == (10.0, 10.0 + 20.0)


@pytest.mark.parametrize(
    ("billions", "layers", "tokens_per_second"),
    [(0.60, 28, 58.57), (1.72, 28, 59.83), (4.02, 36, 45.94), (8.19, 36, 45.32)],
)
def test_published_speeds_of_generating_with_transformers_are_within_the_range(billions, layers, tokens_per_second):
    """Qwen3 in bfloat16, one answer, on an H20 of 4 TB/s (github.com/QwenLM/Qwen2.5, speed_benchmark.md, 2025)."""
    work = Generating(num_tokens=1, read_bytes=2e9 * billions, flops=2e9 * billions)
    one = Step(**{**vars(STEP), "num_layers": layers, "generating": work})
    span = generating(one, RATE, FIGURES.model_copy(update={"memory_bytes_per_second": 4e12}))
    assert span.low <= 1 / tokens_per_second <= span.high


def test_generating_is_told_apart_and_needs_the_speed_of_the_memory():
    one = Step(**{**vars(STEP), "generating": Generating(num_tokens=100, read_bytes=6e12, flops=0)})
    assert (
        "; generation takes 6 s to 10 s of 6.64 s to 10.7 s per step"
        in speed_of(one, DEVICE, FIGURES, [], num_steps=1).basis
    )
    ahead = Step(**{**vars(one), "generating": replace(one.generating, is_ahead=True)})
    speed = speed_of(ahead, DEVICE, FIGURES, [], num_steps=1)
    # The longer of the two, at both ends.
    assert (speed.seconds.low, speed.seconds.high) == (6.0, pytest.approx(6 / BANDWIDTH_SHARE.low))
    assert "; generation takes 6 s to 10 s of 6 s to 10 s per step, overlapped with training" in speed.basis
    assert speed.generation_share is None
    blind = FIGURES.model_copy(update={"memory_bytes_per_second": None})
    assert seconds_of(one, RATE, blind) is None


def test_answers_of_grpo_are_generated_once_for_all_steps_on_them():
    """512 tokens each read 16 GB of weights and, for 2 answers, half of the 2 x 1,024 x 128 KiB of cache and more."""
    once, twice = made(GRPOMethod(), batch=16, rows=2), made(GRPOMethod(num_iterations=2), batch=16, rows=2)
    assert once.generating.num_tokens == 512
    assert twice.generating == Generating(256, once.generating.read_bytes / 2, once.generating.flops / 2)
    assert once.generating.read_bytes == pytest.approx(512 * (2 * 8.03e9 + 16 * 768 * 128 * 2**10), rel=0.02)
    assert once.generating.flops == pytest.approx(16 * 1024 * 2 * 7.25e9, rel=0.05)
    # Old log-probabilities, once for both steps.
    assert twice.flops_per_token - once.flops_per_token == pytest.approx(0.5 * once.generating.flops / (16 * 1024))


def test_the_head_computes_the_answers_of_grpo_alone():
    head = 128256 * 4096
    short, long = (made(GRPOMethod(max_completion_length=tokens)) for tokens in (256, 512))
    # 6 operations for each of a quarter of the tokens more.
    assert long.flops_per_token - short.flops_per_token == pytest.approx(6 * head / 4)


def sent(method, adapter, **layout):
    asked = recipe(method, adapter=adapter)
    own = passes_of(asked.method, asked.adapter, asked.data, global_batch_size=16)
    spread = Layout(strategy="fsdp2", dp_shard_size=8, **layout)
    found = transfers_of(
        LLAMA_8B,
        asked.adapter,
        "bfloat16",
        spread,
        num_nodes=1,
        num_tokens=2048,
        gradient_checkpointing=False,
        passes=own,
    )
    return {one.what: (one.sent_bytes, one.hides_behind) for one in found}


WHOLE = 7 / 8 * 2 * 8_030_261_248
"""What a device of eight sends when Llama 8B is gathered in 16 bits."""


@pytest.mark.parametrize(
    ("method", "reshards", "times", "reference"),
    [
        ("sft", True, 2, 0),
        ("dpo", True, 2, 1),
        (DPOMethod(precompute_ref_log_probs=True), True, 2, 0),
        # Where units stay, the reference does too.
        ("dpo", False, 1, 0),
        (GRPOMethod(beta=0.04), True, 2, 1),
        # Its old self gathers what is trained, once for both steps, and so does the reference.
        (GRPOMethod(beta=0.04, num_iterations=2), True, 2.5, 0.5),
    ],
)
def test_a_reference_model_is_gathered_before_it_computes(method, reshards, times, reference):
    found = sent(method, "full", reshard_after_forward=reshards)
    assert found["gathering weights"] == (pytest.approx(times * WHOLE), "compute")
    assert found.get("gathering the reference", (0, "nothing")) == (pytest.approx(reference * WHOLE), "nothing")


def test_the_model_without_its_adapters_is_gathered_again_unless_its_weights_stayed():
    assert sent("dpo", "lora")["gathering weights"][0] == pytest.approx(3 * WHOLE, rel=0.01)
    stays = {"reshard_after_forward": False}
    assert sent("dpo", "lora", **stays)["gathering weights"][0] == pytest.approx(WHOLE, rel=0.01)


@pytest.mark.parametrize(("reshards", "times"), [(True, 512), (False, 1)])
def test_fsdp2_gathers_all_weights_for_each_token_unless_they_stay(reshards, times):
    found = sent("grpo", "full", reshard_after_forward=reshards)
    assert found["gathering weights to generate"] == (pytest.approx(times * WHOLE), "generation")


def test_both_answers_of_a_pair_keep_a_device_busy():
    """2,048 tokens are enough, so that activations are kept: four rows of 512 tokens, or two pairs."""
    hardware = with_gpu("36 GiB", 36, (8, 0))
    plans = [resolve(recipe(name, length=512), hardware, LLAMA_8B, ROWS) for name in ("sft", "dpo")]
    assert [(plan.micro_batch_size, plan.gradient_checkpointing) for plan in plans] == [(4, False), (2, False)]


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_plan_says_how_long_its_method_takes(method, adapter):
    hardware = find_machine("8xh100").hardware()
    sft, other = (
        resolve(recipe(name, adapter=adapter, batch=64), hardware, LLAMA_8B, ROWS) for name in ("sft", method)
    )
    assert other.speed.seconds.low / other.schedule.num_steps > sft.speed.seconds.low / sft.schedule.num_steps
    assert ("; generation takes" in other.explain()) == (method == "grpo")


def test_a_recorded_run_tells_how_much_of_a_step_is_generating():
    """The time that it took has generating in it already: none is added."""
    asked = recipe({"type": "grpo", "max_completion_length": 128}, length=256)
    unknown = resolve(asked, LAPTOP, LLAMA_1B, ROWS)
    assert unknown.speed.generation_share is None
    record = RunRecord(
        device=LAPTOP.device.name,
        model_type="llama",
        method="grpo",
        adapter="lora",
        dtype="float32",
        num_params=LLAMA_1B.num_params,
        flops_per_token=unknown.speed.flops_per_token,
        tokens_per_second=100.0,
        generation_share=0.6,
        peak_memory_bytes=1,
        planned_memory_bytes=1,
    )
    known = resolve(asked, LAPTOP, LLAMA_1B, ROWS, [record])
    share = known.speed.generation_share
    assert (share.low, share.high) == (pytest.approx(0.6), pytest.approx(0.6))
    assert known.speed.tokens_per_second.low == pytest.approx(85)
    (reason,) = (reason for reason in known.reasons if reason.topic == "generation")
    assert reason.why.endswith("; 60% of the step time")
    assert record.computing_flops_per_second == pytest.approx(record.flops_per_second / 0.4)
    by_vllm = record.model_copy(update={"by_vllm": True})
    assert resolve(asked, LAPTOP, LLAMA_1B, ROWS, [by_vllm]).speed.generation_share is None


def test_a_teacher_is_computed_in_each_micro_batch():
    """As large as the model, it adds one forward pass to a forward pass and a backward pass of twice that."""
    method = {"type": "distillation", "teacher": "t"}
    alone, taught = (
        step_of(
            recipe(method, adapter="full"),
            LLAMA_8B,
            ROWS,
            DEVICE,
            dtype="bfloat16",
            mask_length=None,
            padding_free=False,
            micro_batch_size=2,
            gradient_checkpointing=False,
            layout=Layout(),
            num_nodes=1,
            passes=passes_of(
                recipe(method).method, FullAdapter(), recipe(method).data, global_batch_size=16, teacher=teacher
            ),
        )
        for teacher in (None, LLAMA_8B)
    )
    assert taught.flops_per_token / alone.flops_per_token == pytest.approx(4 / 3, rel=0.02)
    assert taught.num_forwards == alone.num_forwards + 1
