"""Plans for rows with pictures, packed and not."""

import pytest

from tests.estimates.grid_vision import GEMMA_3_4B, LLAMA_3_2_11B, LORA, QWEN_2_5_VL_7B
from tests.estimates.oracle_vision import VisionStep, facts_of
from tests.estimates.shapes import H100
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts
from tunekit.planner.decisions.shortage import with_half_the_batch
from tunekit.planner.plan import VARLEN
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe

VALUES = 3 * 896 * 896


def rows(num_pictures):
    """A thousand sequences, of which the largest has so many pictures."""
    counts = {"num_train": 1000, "num_rows": 4000, "num_train_tokens": 2_000_000, "longest_tokens": 2048}
    most = num_pictures * VALUES
    return DataFacts(**counts, tokenized=True, has_pictures=True, num_pictures=4000, most_pixel_values=most)


def recipe(*, packing=True, attention="auto", **sections):
    data = {"train": "chats.jsonl", "max_length": 2048, "packing": packing}
    model = {"path": "m", "attn_implementation": attention}
    return Recipe.model_validate({"model": model, "data": data, "adapter": "lora", **sections})


def model(config):
    return facts_of(VisionStep(config, LORA, ((1,),), 2048))


def planned(config=GEMMA_3_4B, num_pictures=4, hardware=H100, **sections):
    return resolve(recipe(**sections), hardware, model(config), rows(num_pictures))


def test_packed_rows_are_kept_apart_by_a_mask_that_the_plan_counts():
    plan = planned()
    assert plan.padding_free and plan.attn_implementation == "sdpa" and not plan.decoder_by_document
    (reason,) = (reason for reason in plan.reasons if reason.topic == "padding")
    assert reason.why == "packed; sdpa separates documents by a mask over the whole micro-batch"
    alone = planned(packing=False)
    assert not alone.padding_free
    (reason,) = (reason for reason in alone.reasons if reason.topic == "padding")
    assert reason.why == "rows with images are padded"


def test_the_pixels_of_the_largest_packed_row_are_counted():
    train = {"micro_batch_size": 1, "gradient_checkpointing": True, "global_batch_size": 1}
    few, many = (planned(num_pictures=num, train=train).memory.phases["optimizer"] for num in (2, 6))
    assert many - few == 4 * VALUES * 4


PAIR = {"format": "preference", "tokenized": False}
RATED = {"format": "unpaired_preference", "tokenized": False, "num_good": 500}


@pytest.mark.parametrize(("method", "facts", "times"), [("dpo", PAIR, 2), ("kto", RATED, 1)])
def test_both_answers_of_a_pair_come_with_pixels_and_a_rated_one_once(method, facts, times):
    train = {"micro_batch_size": 2, "gradient_checkpointing": True, "global_batch_size": 2}
    wanted = recipe(packing=False, method=method, train=train)
    plans = [
        resolve(wanted, H100, model(GEMMA_3_4B), rows(num_pictures).model_copy(update=facts)) for num_pictures in (2, 6)
    ]
    few, many = (plan.memory.phases["optimizer"] for plan in plans)
    assert many - few == times * 2 * 4 * VALUES * 4
    assert all(reason.choice.startswith("4,000") for reason in plans[0].reasons if reason.topic == "pictures")


def test_pictures_are_counted_where_a_micro_batch_is_halved():
    train = {"micro_batch_size": 4, "gradient_checkpointing": True, "global_batch_size": 4}
    plan = planned(train=train)
    half = with_half_the_batch(plan, model(GEMMA_3_4B))
    assert half.micro_batch_size == 2
    again = planned(train={**train, "micro_batch_size": 2})
    assert half.memory.phases == again.memory.phases


def test_the_own_attention_of_packed_rows_is_not_used_for_towers():
    assert planned(QWEN_2_5_VL_7B, packing=True).attn_implementation == "sdpa"
    with pytest.raises(PlanError, match=rf"^model\.attn_implementation={VARLEN}: unsupported for rows with images; "):
        planned({**GEMMA_3_4B}, attention=VARLEN)


def test_pictures_that_cross_attention_reads_are_not_packed():
    words = r"^data\.packing: unsupported for rows with images: the cross-attention of mllama_text_model reads the "
    with pytest.raises(PlanError, match=rf"{words}images of a whole row; unset it$"):
        planned(LLAMA_3_2_11B)
    assert not planned(LLAMA_3_2_11B, packing=False).padding_free


def test_a_decoder_that_documents_leak_in_is_not_run_once_for_each_with_pictures():
    """Pictures are placed in the whole row before it."""
    unknown = model(GEMMA_3_4B).model_copy(update={"layer_types": ("full_attention", "other")})
    with pytest.raises(PlanError, match=r"images: its other layers do not separate documents; unset it$"):
        resolve(recipe(), H100, unknown, rows(4))


def test_a_teacher_that_reads_text_alone_is_refused():
    method = {"type": "distillation", "teacher": "big", "max_completion_length": 64}
    wanted, facts = recipe(packing=False, method=method), rows(4).model_copy(update={"format": "prompts"})
    teacher = model(GEMMA_3_4B).model_copy(update={"path": "big"})
    assert resolve(wanted, H100, model(GEMMA_3_4B), facts, teacher=teacher).memory.parts["reference"] > 0
    text = teacher.model_copy(update={"is_multimodal": False, "tower": None})
    with pytest.raises(PlanError, match=r"^method\.teacher: rows have images, but big is a text-only model; choose a "):
        resolve(wanted, H100, model(GEMMA_3_4B), facts, teacher=text)


@pytest.mark.parametrize("packing", [True, False])
def test_zero_3_is_refused(packing):
    two = H100.model_copy(update={"accelerators": H100.accelerators * 2})
    with pytest.raises(PlanError, match=r"the vision tower runs only where rows have images; use fsdp2$"):
        planned(hardware=two, packing=packing, parallel={"strategy": "zero3"})
    assert planned(hardware=two, packing=packing, parallel={"strategy": "fsdp2"}).layout.strategy == "fsdp2"
