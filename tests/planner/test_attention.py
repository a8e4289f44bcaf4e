"""Which attention is planned on which device, for rows that are packed and rows that are not."""

import pytest

from tests.estimates.shapes import GIB, H100, LAPTOP, LLAMA_1B, RTX_4090, T4, with_gpu
from tests.planner.golden import ROWS, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.plan import Plan
from tunekit.planner.resolve import resolve, setting_of
from tunekit.probe.model import known_model

B200 = with_gpu("B200", 180, (10, 0))
RTX_5090 = with_gpu("RTX 5090", 32, (12, 0))
GEMMA_2 = LLAMA_1B.model_copy(update={"model_type": "gemma2"})
PACKED = {"data": {"packing": True}, "train": {"max_steps": 5}}


def has(hardware, **packages):
    return hardware.model_copy(update=packages)


def planned(hardware, model=LLAMA_1B, attention="auto", **sections) -> Plan:
    return resolve(recipe(model={"path": "m", "attn_implementation": attention}, **sections), hardware, model, ROWS)


def why(plan):
    (found,) = [reason.why for reason in plan.reasons if reason.topic == "attention"]
    return found


@pytest.mark.parametrize(
    ("hardware", "attention", "flash"),
    [
        (LAPTOP, "tunekit_varlen", "FA2"),
        (T4, "sdpa", "FA2"),
        (RTX_4090, "tunekit_varlen", "FA2"),
        (has(RTX_4090, flash_attn=True), "flash_attention_2", "FA2"),
        (has(RTX_4090, flash_attn_3=True, flash_attn_4=True), "tunekit_varlen", "FA2"),
        (H100, "tunekit_varlen", "FA2"),
        (has(H100, flash_attn=True, flash_attn_3=True, flash_attn_4=True), "tunekit_varlen", "FA3"),
        (has(H100, flash_attn_4=True), "tunekit_varlen", "FA2"),
        (has(H100, flash_attn=True), "flash_attention_2", "FA2"),
        (has(B200, flash_attn=True, flash_attn_3=True, flash_attn_4=True), "tunekit_varlen", "FA4"),
        (RTX_5090, "tunekit_varlen", "FA2"),
    ],
    ids=["cpu", "t4", "4090", "4090-fa2", "4090-fa3-fa4", "h100", "h100-all", "h100-fa4", "h100-fa2", "b200", "5090"],
)
def test_packed_rows_have_the_newest_flash_attention_of_their_device(hardware, attention, flash):
    plan = planned(hardware, **PACKED)
    assert (plan.attn_implementation, plan.flash_attention) == (attention, flash)
    assert plan.padding_free
    if attention == "tunekit_varlen":
        words = {
            "FA2": "torch's FlashAttention 2 reads",
            "FA3": "for Hopper) reads",
            "FA4": "FlashAttention 4",
        }
        assert ("sdpa per document" if hardware is LAPTOP else words[flash]) in why(plan)


def test_flash_attention_4_on_hopper_is_for_heads_of_128():
    wide = LLAMA_1B.model_copy(update={"head_dim": 128, "num_heads": 16})
    assert planned(has(H100, flash_attn_4=True), wide, **PACKED).flash_attention == "FA4"


def test_padded_rows_keep_sdpa():
    for hardware in (LAPTOP, H100):
        plan = planned(hardware, data={"padding_free": False})
        assert (plan.attn_implementation, plan.padding_free) == ("sdpa", False)
    plan = planned(H100, method="dpo")
    assert (plan.attn_implementation, plan.padding_free) == ("sdpa", False)
    one = planned(H100, train={"micro_batch_size": 1})
    assert (one.attn_implementation, one.padding_free) == ("sdpa", False)


def test_rows_are_not_padded_on_cuda_where_attention_can_be_told_where_each_begins():
    plan = planned(H100, train={"micro_batch_size": 4})
    assert (plan.attn_implementation, plan.padding_free) == ("tunekit_varlen", True)
    assert not planned(LAPTOP, train={"micro_batch_size": 4}).padding_free
    assert planned(LAPTOP, data={"padding_free": True}).attn_implementation == "tunekit_varlen"


@pytest.mark.parametrize("hardware", [LAPTOP, H100], ids=["cpu", "cuda"])
def test_packed_rows_need_no_mask_with_it(hardware):
    def activations(attention):
        plan = planned(hardware, attention=attention, **PACKED | {"train": {"micro_batch_size": 2, "max_steps": 5}})
        return plan.memory.parts["activations"]

    assert activations("auto") == activations("tunekit_varlen") < activations("sdpa")


def test_squeezed_scores_are_packed_with_flex_attention_on_cuda_and_eager_elsewhere():
    assert planned(H100, GEMMA_2, **PACKED).attn_implementation == "flex_attention"
    assert planned(has(H100, flash_attn=True), GEMMA_2, **PACKED).attn_implementation == "flex_attention"
    assert planned(LAPTOP, GEMMA_2, **PACKED).attn_implementation == "eager"
    assert planned(H100, GEMMA_2).attn_implementation == "eager"


def test_what_the_recipe_asks_for_wins():
    assert planned(H100, attention="sdpa", **PACKED).attn_implementation == "sdpa"
    assert planned(H100, attention="tunekit_varlen", **PACKED).attn_implementation == "tunekit_varlen"


def test_divided_sequences_keep_what_they_have():
    two = has(H100, accelerators=H100.accelerators * 2)
    parallel = {"adapter": "full", "parallel": {"strategy": "fsdp2", "tp_size": 2}}
    assert planned(two, **parallel, **PACKED).attn_implementation == "sdpa"


REFUSED = {
    "T4": (
        T4,
        LLAMA_1B,
        "tunekit_varlen is not supported here: needs a CUDA device of compute capability 8.0 or newer",
    ),
    "softcap": (H100, GEMMA_2, "tunekit_varlen is not supported here: not verified for gemma2; use eager"),
    "dropout": (
        LAPTOP,
        LLAMA_1B.model_copy(update={"attention_dropout": 0.1}),
        "tunekit_varlen is not supported here: no dropout support, and llama-3.2-1b has "
        "attention dropout of 10%; use sdpa",
    ),
    "wide": (
        H100,
        LLAMA_1B.model_copy(update={"head_dim": 512}),
        "flash attention supports head dimensions up to 256, not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_where_it_would_not_be_right(name):
    hardware, model, said = REFUSED[name]
    with pytest.raises(PlanError) as refused:
        planned(hardware, model, "tunekit_varlen", **PACKED)
    assert said in str(refused.value)
    assert planned(hardware, model, **PACKED).attn_implementation != "tunekit_varlen"


def test_flex_attention_is_refused_on_a_cpu():
    with pytest.raises(PlanError, match="flex_attention has no backward pass on a CPU; use sdpa"):
        planned(LAPTOP, attention="flex_attention")


@pytest.mark.parametrize(
    ("name", "traced_gib"),
    # Live tensors of a step without checkpointing, traced by a tracer that is not the tests', 4,096 tokens.
    [("openai/gpt-oss-20b", 112.0), ("google/gemma-2-9b", 141.3)],
)
def test_what_keeps_all_scores_of_long_rows_is_checkpointed(name, traced_gib):
    """On 80 GiB both were said to fit without, in half of what they need."""
    model, machine = known_model(name), find_machine("h100").hardware()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if "gpt" in name else "all-linear"
    train = {"micro_batch_size": 1}
    asked = recipe(
        model={"path": "m", "attn_implementation": "eager"},
        adapter={"type": "lora", "target_modules": targets},
        data={"max_length": 4096},
        train=train,
    )
    plan = resolve(asked, machine, model, ROWS)
    assert (plan.attn_implementation, plan.gradient_checkpointing) == ("eager", True)
    setting = setting_of(asked, machine, model)
    whole = setting.memory(plan.layout, 1, 1, checkpointing=False)
    assert whole.tensor_bytes / GIB == pytest.approx(traced_gib, rel=0.03)


@pytest.mark.parametrize(("machine", "packing"), [("h100", True), ("h100", False), ("laptop", True)])
def test_attention_with_sinks_keeps_no_scores(machine, packing):
    hardware = LAPTOP if machine == "laptop" else find_machine(machine).hardware()
    sinks = LLAMA_1B.model_copy(update={"model_type": "gpt_oss", "layer_types": ("full_attention",) * 16})
    train = {"micro_batch_size": 1, "gradient_checkpointing": True}
    plan = planned(hardware, sinks, data={"max_length": 1024, "packing": packing}, train=train)
    assert (plan.attn_implementation, plan.padding_free) == ("tunekit_varlen", True)
    eager = planned(hardware, sinks, "eager", data={"max_length": 1024}, train=train)
    without, with_scores = (p.memory.phases["last layer"] for p in (plan, eager))
    assert without < with_scores - 2 * 32 * 1024 * 1024


def test_padded_rows_of_a_type_without_sdpa_have_eager_attention():
    sinks = LLAMA_1B.model_copy(update={"model_type": "gpt_oss", "layer_types": ("full_attention",) * 16})
    plan = planned(H100, sinks, method={"type": "dpo"}, data={"max_length": 1024})
    assert (plan.attn_implementation, plan.padding_free) == ("eager", False)
    assert why(plan) == "transformers has no sdpa for gpt_oss"
