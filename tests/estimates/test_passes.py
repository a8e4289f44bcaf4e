"""What DPO and GRPO add to a step: memory against a trace of TRL's losses and its generation, and what is computed."""

import pytest
import torch

from tests.estimates.oracle import Step, facts_of
from tests.estimates.oracle_methods import MethodStep, estimate_of, generate, trace, trace_reference
from tests.estimates.shapes import LLAMA_8B
from tunekit.errors import PlanError
from tunekit.estimates.layout import Layout
from tunekit.estimates.memory.activations import head_of, products_of
from tunekit.estimates.memory.states import Kept, Tables, num_trainable_params, trained_tables
from tunekit.estimates.passes import (
    Passes,
    generation_bytes,
    kv_cache_bytes,
    method_words,
    passes_of,
    reference_pass,
    steps_per_epoch,
    with_reference,
)
from tunekit.estimates.throughput.step import forward_flops_per_token
from tunekit.planner.decisions.backends import padding_of
from tunekit.recipe.methods.classification import ClassificationMethod
from tunekit.recipe.methods.cpo import CPOMethod
from tunekit.recipe.methods.distillation import DistillationMethod
from tunekit.recipe.methods.dpo import DPOMethod
from tunekit.recipe.methods.ebft import EBFTMethod
from tunekit.recipe.methods.gold import GOLDMethod
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.methods.kto import KTOMethod
from tunekit.recipe.methods.orpo import ORPOMethod
from tunekit.recipe.methods.prm import PRMMethod
from tunekit.recipe.methods.reward import RewardMethod
from tunekit.recipe.methods.rloo import RLOOMethod
from tunekit.recipe.methods.sdft import SDFTMethod
from tunekit.recipe.methods.sft import SFTMethod
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter
from tunekit.recipe.sections.data import DataSection
from tunekit.recipe.sections.model import ModelSection

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 40000,
    "tie_word_embeddings": False,
}
ADAPTERS = {"full": FullAdapter(), "lora": LoraAdapter(rank=16)}
METHODS = {
    "dpo": DPOMethod(),
    "dpo, precomputed": DPOMethod(precompute_ref_log_probs=True),
    "grpo": GRPOMethod(max_completion_length=256),
    "grpo with a reference": GRPOMethod(max_completion_length=768, beta=0.04),
    "rloo": RLOOMethod(max_completion_length=768),
}
ROWS = DataSection(train="rows.jsonl", max_length=1024)


DISTILLATION = DistillationMethod(teacher=ModelSection(path="a/teacher"))


def step(family, adapter, method, *, dtype="bfloat16", checkpointing=False) -> MethodStep:
    batch = 4 if isinstance(method, DistillationMethod | GRPOMethod | KTOMethod | RLOOMethod) else 2
    how = {"checkpointing": checkpointing, "dtype": dtype, "accumulates": checkpointing, "rows": "padded"}
    return MethodStep(Step(family, tuple(SIZES.items()), adapter, batch, length=1024, **how), method)


def passes(method, adapter, batch=16) -> Passes:
    return passes_of(method, adapter, ROWS, global_batch_size=batch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_every_phase_is_what_trls_loss_allocates(adapter, method, checkpointing):
    one = step("llama", ADAPTERS[adapter], METHODS[method], checkpointing=checkpointing)
    traced, estimated = trace(one), estimate_of(one)
    constant = traced.weights_bytes + traced.optimizer_bytes
    known = {phase: constant + traced.step_bytes[phase] for phase in estimated.phases if phase in traced.step_bytes}
    assert set(estimated.phases) - set(known) <= {"load", "generation"}
    assert {phase: estimated.phases[phase] for phase in known} == {
        phase: pytest.approx(size, rel=0.02) for phase, size in known.items()
    }
    assert max(estimated.phases[phase] for phase in known) == pytest.approx(traced.peak_bytes, rel=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("method", "adapter", "dtype", "checkpointing"),
    [
        (KTOMethod(), "full", "bfloat16", False),
        (KTOMethod(), "lora", "float32", True),
        (KTOMethod(precompute_ref_log_probs=True), "full", "float32", True),
        (ORPOMethod(), "full", "bfloat16", False),
        (ORPOMethod(), "full", "float32", True),
        (ORPOMethod(), "lora", "bfloat16", True),
        (RewardMethod(), "full", "bfloat16", False),
        (RewardMethod(), "lora", "float32", False),
        (RewardMethod(), "lora", "bfloat16", True),
        (PRMMethod(), "full", "bfloat16", False),
        (ClassificationMethod(num_labels=265), "full", "float32", False),
        (ClassificationMethod(num_labels=3), "lora", "bfloat16", True),
        (ClassificationMethod(num_labels=20, problem_type="multi_label_classification"), "lora", "float32", False),
        (PRMMethod(), "lora", "float32", False),
        (PRMMethod(), "lora", "bfloat16", True),
    ],
)
def test_the_peak_of_the_other_methods_of_answers_is_what_trls_loss_allocates(method, adapter, dtype, checkpointing):
    one = step("llama", ADAPTERS[adapter], method, dtype=dtype, checkpointing=checkpointing)
    traced, estimated = trace(one), estimate_of(one)
    assert max(estimated.phases.values()) == pytest.approx(traced.peak_bytes, rel=0.01)


def test_without_triton_whole_logits_are_there_more_often():
    one = step("llama", FullAdapter(), ORPOMethod(), dtype="float32")
    traced, estimated = trace(one, device="cpu"), estimate_of(one, device="cpu")
    assert max(estimated.phases.values()) == pytest.approx(traced.peak_bytes, rel=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("method", ["dpo", "grpo with a reference"])
def test_the_peak_of_qwen_in_float32_is_what_trls_loss_allocates(method, adapter):
    one = step("qwen3", ADAPTERS[adapter], METHODS[method], dtype="float32")
    traced, estimated = trace(one), estimate_of(one)
    highest = max(size for phase, size in estimated.phases.items() if phase != "generation")
    assert highest == pytest.approx(traced.peak_bytes, rel=0.01)


SMALL = {**SIZES, "hidden_size": 256, "intermediate_size": 704, "num_key_value_heads": 2, "vocab_size": 4000}


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "completion"), [(128, 16), (32, 128)], ids=["long prompts", "long answers"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generation_needs_what_transformers_allocates_for_it(family, adapter, dtype, prompt, completion):
    sizes = {**SMALL, "head_dim": 32, **({"sliding_window": 64} if family == "gemma3_text" else {})}
    one = Step(family, tuple(sizes.items()), ADAPTERS[adapter], 8, prompt, checkpointing=False, dtype=dtype)
    generated = generate(one, completion)
    method = GRPOMethod(max_completion_length=completion)
    length = prompt + completion
    long = MethodStep(
        Step(family, one.sizes, one.adapter, 1, length, checkpointing=True, dtype=dtype), method, num_accumulated=8
    )
    estimated = estimate_of(long)
    needed = estimated.phases["generation"] - estimated.phases["load"] - estimated.parts.get("optimizer", 0)
    assert needed == pytest.approx(generated.peak_bytes, rel=0.03)
    # The last token is not looked back at.
    cache = kv_cache_bytes(products_of(facts_of(one), one.adapter, dtype), num_sequences=8, num_tokens=length - 1)
    assert cache == generated.cache_bytes


def test_a_token_of_an_8b_model_takes_128_kib_of_cache_and_half_as_much_again_under_autocast():
    def cache(adapter):
        return kv_cache_bytes(products_of(LLAMA_8B, adapter, "bfloat16"), num_sequences=1, num_tokens=1)

    # Keys and values of 32 layers with 8 heads of 128 each, in 2 bytes; and the keys in 4.
    assert cache(LoraAdapter()) == 2 * 32 * 8 * 128 * 2 == 128 * 2**10
    assert cache(FullAdapter()) == 1.5 * cache(LoraAdapter())


WITH_REFERENCE = passes(DPOMethod(), FullAdapter())


@pytest.mark.parametrize(
    ("layout", "bytes_per_param"),
    [
        (Layout(), 4),
        (Layout(strategy="ddp", dp_replicate_size=8), 4),
        (Layout(strategy="fsdp2", dp_shard_size=8), 4 / 8),
        (Layout(strategy="fsdp2", dp_shard_size=8, reshard_after_forward=False), 4 / 8 + 2),
        (Layout(strategy="zero2", dp_shard_size=8), 2),
        (Layout(strategy="zero3", dp_shard_size=8), 2 / 8),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_a_reference_model_is_divided_as_trl_divides_it(layout, bytes_per_param):
    found = with_reference(Kept(0), LLAMA_8B, WITH_REFERENCE, "bfloat16", layout, devices_per_node=8)
    assert found.reference == pytest.approx(bytes_per_param * LLAMA_8B.num_params, rel=1e-6)
    assert (found.host_bytes, found.nvme_bytes) == (0, 0)


def test_a_reference_of_weights_in_bfloat16_has_them_too():
    how = {"devices_per_node": 1, "trained_dtype": "bfloat16"}
    found = with_reference(Kept(0), LLAMA_8B, WITH_REFERENCE, "bfloat16", Layout(), **how)
    assert found.reference == 2 * LLAMA_8B.num_params


def test_a_reference_model_lies_where_the_weights_lie():
    fsdp2 = Layout(strategy="fsdp2", dp_shard_size=16, offload_param_device="cpu", offload_optimizer_device="cpu")
    zero3 = Layout(strategy="zero3", dp_shard_size=16, offload_param_device="nvme", offload_optimizer_device="nvme")
    num_params = LLAMA_8B.num_params

    def kept(layout):
        return with_reference(Kept(0), LLAMA_8B, WITH_REFERENCE, "bfloat16", layout, devices_per_node=8)

    # Each of two nodes has half of it.
    assert kept(fsdp2) == Kept(0, host_bytes=pytest.approx(4 * num_params / 2, rel=1e-6))
    assert kept(zero3) == Kept(0, nvme_bytes=pytest.approx(2 * num_params / 2, rel=1e-6))


@pytest.mark.parametrize(
    ("method", "adapter"),
    [
        (SFTMethod(), FullAdapter()),
        (DPOMethod(), LoraAdapter()),
        (DPOMethod(precompute_ref_log_probs=True), FullAdapter()),
        (GRPOMethod(), FullAdapter()),
        (GRPOMethod(beta=0.1), LoraAdapter()),
        (KTOMethod(), LoraAdapter()),
        (ORPOMethod(), FullAdapter()),
        (CPOMethod(), FullAdapter()),
        (RewardMethod(), FullAdapter()),
    ],
)
def test_no_reference_model_is_kept_where_the_model_itself_gives_it_or_none_is_needed(method, adapter):
    kept = with_reference(Kept(7), LLAMA_8B, passes(method, adapter), "bfloat16", Layout(), devices_per_node=1)
    assert kept == Kept(7)


def test_fsdp2_gathers_the_whole_reference_model_at_once():
    """Its weights and the buffer in which they arrive: as traced with TRL's own wrapping on eight fake processes."""
    layout, dtype = Layout(strategy="fsdp2", dp_shard_size=8), "bfloat16"
    sizes = {**SIZES, "num_hidden_layers": 12}
    one = Step("llama", tuple(sizes.items()), FullAdapter(), 2, 256, checkpointing=False)
    facts = facts_of(one)
    products = products_of(facts, FullAdapter(), dtype, autocast=False)
    found = reference_pass(products, WITH_REFERENCE, layout, head_of(products, 512), num_tokens=512)
    assert found.gathered == 2 * 2 * facts.num_params
    assert found.total == pytest.approx(trace_reference(one, layout), rel=0.01)


def test_a_pair_is_two_sequences_as_trls_collator_makes_them():
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    pair = {"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}
    batch = DataCollatorForPreference(pad_token_id=0)([pair, pair, pair])
    assert len(batch["input_ids"]) == 3 * passes(DPOMethod(), LoraAdapter()).sequences_per_row


@pytest.mark.parametrize("num_iterations", [1, 3])
@pytest.mark.parametrize("num_rows", [4, 16, 103])
def test_an_epoch_has_as_many_steps_as_trls_sampler_gives(num_rows, num_iterations):
    from trl.trainer.utils import RepeatSampler

    batch, accumulated, method = 32, 4, GRPOMethod(num_generations=8, num_iterations=num_iterations)
    sampler = RepeatSampler(
        range(num_rows),
        mini_repeat_count=method.num_generations,
        batch_size=batch // method.num_generations,
        repeat_count=num_iterations * accumulated,
    )
    # The trainer's batches hold the answers of a whole step, for each of its micro-batches again.
    assert steps_per_epoch(method, num_rows, batch) == len(sampler) // batch // accumulated
    assert steps_per_epoch(RLOOMethod(num_generations=8, num_iterations=num_iterations), num_rows, batch) == (
        steps_per_epoch(method, num_rows, batch)
    )
    assert steps_per_epoch(DPOMethod(), num_rows, batch) == -(-num_rows // batch)


def test_each_prompt_of_distillation_has_one_answer():
    assert steps_per_epoch(DISTILLATION, 103, 32) == 3
    with pytest.raises(PlanError, match="1 per prompt, need 32 prompts"):
        steps_per_epoch(DISTILLATION, 31, 32)


TEACHER = {**SIZES, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12}


def check_comparison(one):
    """See that each phase of a step that compares two models is a closed form, within a thirtieth of what is traced."""
    traced, estimated = trace(one), estimate_of(one)
    assert estimated.confidence == "closed form"
    constant = traced.weights_bytes + traced.optimizer_bytes
    known = {phase: constant + traced.step_bytes[phase] for phase in estimated.phases if phase in traced.step_bytes}
    assert set(estimated.phases) - set(known) == {"load", "generation"}
    # The head comes with the comparison; its own forward pass is reckoned with and is not there.
    assert known.pop("forward") < estimated.phases["forward"] < known["reference"]
    assert {phase: estimated.phases[phase] for phase in known} == {
        phase: pytest.approx(size, rel=0.03) for phase, size in known.items()
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("adapter", "dtype", "beta"), [("full", "bfloat16", 0.5), ("lora", "bfloat16", 1.0), ("lora", "float32", 1.0)]
)
def test_a_step_of_distillation_needs_what_trls_loss_allocates(adapter, dtype, beta):
    method = DISTILLATION.model_copy(update={"max_completion_length": 768, "beta": beta})
    how = {"checkpointing": False, "dtype": dtype, "accumulates": False, "rows": "padded"}
    teacher = Step("llama", tuple(TEACHER.items()), FullAdapter(), 4, length=1024, **how)
    student = Step("llama", tuple(SIZES.items()), ADAPTERS[adapter], 4, length=1024, **how)
    one = MethodStep(student, method, teacher=teacher)
    check_comparison(one)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("adapter", "dtype", "kind"),
    [
        ("full", "bfloat16", "base"),
        ("lora", "bfloat16", "base"),
        ("lora", "float32", "live"),
        ("full", "float32", "live"),
    ],
)
def test_a_step_of_self_distillation_needs_what_its_loss_allocates(adapter, dtype, kind):
    method = SDFTMethod(max_completion_length=768, teacher_model_kind=kind)
    how = {"checkpointing": False, "dtype": dtype, "accumulates": False, "rows": "padded"}
    one = MethodStep(Step("llama", tuple(SIZES.items()), ADAPTERS[adapter], 4, length=1024, **how), method)
    check_comparison(one)


def test_a_pass_for_features_holds_the_hidden_states_of_all_layers():
    how = {"checkpointing": False, "dtype": "bfloat16", "accumulates": False, "rows": "padded"}
    step, few = Step("llama", tuple(SIZES.items()), ADAPTERS["lora"], 4, length=1024, **how), [0.5]
    phases = [
        estimate_of(MethodStep(step, method)).phases
        for method in (EBFTMethod(max_completion_length=768, feature_layers=few), EBFTMethod(max_completion_length=768))
    ]
    hidden = SIZES["hidden_size"] * 4 * 1024
    # Two more layers: each in float32, and concatenated.
    assert phases[1]["reference"] - phases[0]["reference"] == 2 * 2 * 4 * hidden
    # Those of the layers in bfloat16, and as Accelerate gives them.
    assert phases[0]["reference"] > 6 * (SIZES["num_hidden_layers"] + 1) * hidden
    without = estimate_of(MethodStep(step, GRPOMethod(max_completion_length=768))).phases
    assert without == {name: size for name, size in phases[0].items() if name != "reference"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("adapter", "dtype", "vocab_size"),
    [
        ("full", "bfloat16", 30000),
        ("lora", "bfloat16", 120000),
        ("lora", "float32", 30000),
        ("full", "float32", 120000),
    ],
)
def test_a_step_with_a_teacher_of_another_vocabulary_needs_what_its_loss_allocates(adapter, dtype, vocab_size):
    how = {"checkpointing": False, "dtype": dtype, "accumulates": False, "rows": "padded"}
    shape = {**TEACHER, "vocab_size": vocab_size}
    teacher = Step("llama", tuple(shape.items()), FullAdapter(), 4, length=1024, **how)
    student = Step("llama", tuple(SIZES.items()), ADAPTERS[adapter], 4, length=1024, **how)
    method = GOLDMethod(teacher=ModelSection(path="a/teacher"), lmbda=0)
    one = MethodStep(student, method, teacher=teacher)
    traced, estimated = trace(one), estimate_of(one)
    constant = traced.weights_bytes + traced.optimizer_bytes
    known = {phase: constant + traced.step_bytes[phase] for phase in estimated.phases if phase in traced.step_bytes}
    # As above, its own head is no part of the forward pass.
    assert known.pop("forward") < estimated.phases["forward"]
    assert {phase: estimated.phases[phase] for phase in known} == {
        phase: pytest.approx(size, rel=0.02) for phase, size in known.items()
    }


def test_too_few_prompts_for_a_step_are_refused():
    with pytest.raises(PlanError, match=r"need 4 prompts, but data\.train has 3"):
        steps_per_epoch(GRPOMethod(num_generations=8), 3, 32)


def test_forward_passes_of_a_step_are_those_that_trl_makes():
    """The reference: in each micro-batch of DPO, once for all steps on the same answers of GRPO. Its old self too.

    KTO takes each prompt with another's answer through both models too.
    """
    lora = LoraAdapter()
    found = [
        passes(method, lora).num_forwards
        for method in (
            SFTMethod(),
            DPOMethod(),
            DPOMethod(precompute_ref_log_probs=True),
            GRPOMethod(),
            GRPOMethod(beta=0.1),
            GRPOMethod(num_iterations=4),
            GRPOMethod(beta=0.1, num_iterations=4),
            RLOOMethod(beta=0),
            RLOOMethod(num_iterations=2),
            DISTILLATION,
            KTOMethod(),
            KTOMethod(precompute_ref_log_probs=True),
            KTOMethod(loss_type="apo_zero_unpaired"),
            ORPOMethod(),
            RewardMethod(),
            EBFTMethod(num_generations=4),
            EBFTMethod(num_generations=4, beta=0.1, num_iterations=2),
        )
    ]
    # Features are those of each completion and of the answer of its group.
    of_features = [1 + 1 / 4, (1 + 1 / 4 + 2) / 2]
    assert found == [0, 1, 0, 0, 1, 1 / 4, 2 / 4, 1, 2 / 2, 0, 3, 1, 1, 0, 0, *of_features]
    assert passes(EBFTMethod(num_generations=4, beta=0.1), FullAdapter()).num_reference_forwards == 2.25
    assert passes(EBFTMethod(), lora).num_reference_forwards == 0
    assert passes(DPOMethod(precompute_ref_log_probs=True), lora).num_forwards_before == 1
    assert passes(KTOMethod(precompute_ref_log_probs=True), lora).num_forwards_before == 2
    assert passes(KTOMethod(), FullAdapter()).num_reference_forwards == 2


def test_a_model_that_judges_has_a_score_in_the_place_of_its_head():
    judge = LLAMA_8B.as_judge(RewardMethod().score_head)
    assert judge.num_params == LLAMA_8B.num_params - LLAMA_8B.vocab_size * LLAMA_8B.hidden_size + LLAMA_8B.hidden_size
    lora = LoraAdapter()
    trained = num_trainable_params(judge, lora) - num_trainable_params(LLAMA_8B, lora)
    assert trained == LLAMA_8B.hidden_size, "the score is trained beside an adapter"
    assert judge.linears == LLAMA_8B.linears, "and neither adapted nor quantised"
    assert trained_tables(judge, FullAdapter()) == Tables(embedding=True, head=False, is_one=False)
    of_steps = LLAMA_8B.as_judge(PRMMethod().score_head)
    assert of_steps.num_params == judge.num_params + LLAMA_8B.hidden_size + 2, "it has two classes, with a bias each"
    assert num_trainable_params(of_steps, lora) - num_trainable_params(judge, lora) == LLAMA_8B.hidden_size + 2
    assert num_trainable_params(of_steps, FullAdapter()) == of_steps.num_params
    of_labels = LLAMA_8B.as_judge(ClassificationMethod(labels=["a", "b", "c"]).score_head)
    assert of_labels.num_params == judge.num_params + 2 * LLAMA_8B.hidden_size, "it has one score for each label"


def test_operations_of_a_reference_pass_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    one = Step("llama", tuple(SMALL.items()), LoraAdapter(), 2, 64, checkpointing=False)
    model = AutoModelForCausalLM.from_config(one.config(), attn_implementation="eager")
    add_fused_lm_head(model)
    ids = torch.zeros(one.batch, one.length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, labels=ids, fused_lm_head=True)
    found = forward_flops_per_token(facts_of(one), attended_tokens=one.length, head_share=63 / 64)
    assert found == pytest.approx(counter.get_total_flops() / ids.numel(), rel=0.01)


def test_generation_reads_all_weights_for_each_token():
    """One of 8B weights in 16 bit and 0.5 GiB of cache on average, 512 times, for 8 sequences of 512 and 512 tokens."""
    found = generation_bytes(
        LLAMA_8B, LoraAdapter(rank=1), passes(GRPOMethod(), LoraAdapter(rank=1), 8), "bfloat16", Layout()
    )
    assert found == pytest.approx(512 * (2 * 8.03e9 + 8 * 768 * 128 * 2**10), rel=0.01)
    shared = passes(GRPOMethod(num_iterations=2), LoraAdapter(rank=1), 8)
    assert generation_bytes(LLAMA_8B, LoraAdapter(rank=1), shared, "bfloat16", Layout()) == found / 2
    assert generation_bytes(LLAMA_8B, LoraAdapter(), passes(DPOMethod(), LoraAdapter()), "bfloat16", Layout()) == 0


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("method", [DPOMethod(), GRPOMethod()])
def test_trl_pads_the_batches_of_other_methods(method, attention):
    padding = padding_of(ROWS, LLAMA_8B, attention, 1, passes(method, LoraAdapter()))
    # Two sequences are padded to the longer, one is not.
    masked = attention == "sdpa" and method.type == "dpo"
    assert (padding.is_free, padding.mask_length) == (False, 1024 if masked else None)
    assert padding.why == f"TRL pads {method.type} batches"


@pytest.mark.parametrize(
    ("method", "adapter", "words"),
    [
        (DPOMethod(), FullAdapter(), ("dpo, beta 0.1", "each row is two sequences; a second model as reference")),
        (
            DPOMethod(precompute_ref_log_probs=True),
            FullAdapter(),
            (
                "dpo, beta 0.1",
                "each row is two sequences; reference log-probabilities precomputed before training",
            ),
        ),
        (
            GRPOMethod(num_iterations=2, beta=0.04),
            LoraAdapter(),
            (
                "grpo, 8 completions of up to 512 tokens",
                "beta 0.04: the model without its adapters as reference; used for 2 optimizer steps",
            ),
        ),
        (RLOOMethod(beta=0), FullAdapter(), ("rloo, 2 completions of up to 512 tokens", "beta 0: no reference")),
        (
            DISTILLATION,
            LoraAdapter(),
            (
                "distillation, a completion of up to 512 tokens",
                "teacher a/teacher is loaded as a second model and scores each token",
            ),
        ),
        (
            DPOMethod(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
            LoraAdapter(),
            (
                "dpo, loss sigmoid + 0.5 sft, beta 0.1",
                "each row is two sequences; the model without its adapters as reference; the sft loss is "
                "averaged over the tokens of a micro-batch, so it depends slightly on the micro-batch size",
            ),
        ),
        (
            CPOMethod(loss_type="simpo", beta=2.0),
            LoraAdapter(),
            (
                "cpo, loss simpo, beta 2, likelihood weight 0",
                "experimental in TRL; each row is two sequences; no reference",
            ),
        ),
    ],
)
def test_a_method_is_told_in_words(method, adapter, words):
    assert method_words(method, adapter) == words
