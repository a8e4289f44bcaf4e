"""The models that the plan will not pack are those that were measured, and the measurement can be made again."""

import json

import pytest

from benchmarks.isolation import RESULTS, measure
from tests.estimates.shapes import H100, LAPTOP, LLAMA_1B
from tunekit.errors import PlanError
from tunekit.estimates.facts import DataFacts
from tunekit.planner.decisions.backends import families, why_not_isolated
from tunekit.planner.plan import VARLEN
from tunekit.planner.resolve import resolve
from tunekit.recipe.schema import Recipe

VERDICTS = json.loads(RESULTS.read_text(encoding="utf-8"))["verdicts"]
NAMES = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2", "varlen": VARLEN}
ROWS = DataFacts(num_train=1000, num_eval=100)


def model(model_type, *layer_types):
    return LLAMA_1B.model_copy(update={"path": "m", "model_type": model_type, "layer_types": layer_types})


def test_the_plan_knows_what_was_measured():
    claimed = {
        (model_type, attention): why_not_isolated(model(model_type), NAMES[attention]) is None
        for model_type, verdicts in VERDICTS.items()
        for attention, verdict in verdicts.items()
        if verdict not in ("unsupported", "not measured") and attention != "varlen"
    }
    measured = {key: VERDICTS[key[0]][key[1]] == "isolates" for key in claimed}
    assert claimed == measured
    assert sum(measured.values()) > 250
    assert len({model_type for model_type, _ in measured}) > 150


def test_own_attention_is_for_models_that_were_seen_to_be_right_with_it():
    assert {name for name in families()["varlen"] if VERDICTS[name]["varlen"] != "isolates"} == set()
    assert len(families()["varlen"]) > 60
    assert why_not_isolated(model("llama"), VARLEN) is None
    assert why_not_isolated(model("new"), VARLEN) == "tunekit_varlen is not verified to separate documents in new"


def test_squeezed_scores_are_kept_apart_by_a_mask():
    """FlexAttention's masks are those of eager attention."""
    assert {VERDICTS[name]["eager"] for name in families()["flex"]} == {"isolates"}


def test_models_that_have_no_sdpa_get_eager_attention():
    assert {name for name, verdicts in VERDICTS.items() if verdicts.get("sdpa") == "unsupported"} == families()[
        "without_sdpa"
    ]
    plain = {"model": "m", "data": {"train": "chats.jsonl", "max_length": 256}}
    gemma2 = model("gemma2")
    plan = resolve(Recipe.model_validate(plain), LAPTOP, gemma2, ROWS)
    (reason,) = (reason for reason in plan.reasons if reason.topic == "attention")
    assert (reason.choice, reason.why) == ("eager", "transformers has no sdpa for gemma2")
    asked = Recipe.model_validate(plain | {"model": {"path": "m", "attn_implementation": "sdpa"}})
    with pytest.raises(
        PlanError, match=r"^model\.attn_implementation: transformers has no sdpa for gemma2; use eager$"
    ):
        resolve(asked, LAPTOP, gemma2, ROWS)


@pytest.mark.parametrize("attention", NAMES)
@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen3",
        "gemma3_text",
        "mixtral",
        "gpt_neo",
        "gptj",
        "gpt_oss",
        "falcon",
        "jamba",
        "lfm3",
        "qwen3_next",
        "xglm",
    ],
)
def test_the_measurement_repeats(model_type, attention):
    assert measure(model_type, attention).verdict == VERDICTS[model_type][attention]


def test_a_hybrid_without_its_other_layers_is_what_its_attention_is():
    for attention, expected in (("sdpa", "leaks"), ("flash", "isolates")):
        assert measure("granitemoehybrid", attention, layer_types=["attention"] * 4).verdict == expected
        facts = model("granitemoehybrid", "attention")
        assert (why_not_isolated(facts, NAMES[attention]) is None) == (expected == "isolates")


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_layers_that_are_not_attention_are_no_isolation_in_a_model_that_nobody_knows(attention):
    known = ("full_attention", "sliding_attention", "chunked_attention")
    assert why_not_isolated(model("new"), attention) is None
    assert why_not_isolated(model("new", *known), attention) is None
    why = why_not_isolated(model("new", *known, "linear_attention", "conv"), attention)
    assert why == "its conv and linear_attention layers do not separate documents"


def recipe(attention="auto", **data):
    section = {"path": "m", "attn_implementation": attention}
    return Recipe.model_validate({"model": section, "data": {"train": "chats.jsonl", "max_length": 256, **data}})


REFUSED = {
    "state": (
        recipe(packing=True),
        model("rwkv"),
        "data.packing: documents in one row would attend to each other in m: rwkv layers carry state "
        "from one document to the next; set data.packing=false",
    ),
    "layer-types": (
        recipe(padding_free=True),
        model("new", "full_attention", "mamba"),
        "data.padding_free: documents in one row would attend to each other in m: its mamba layers do not "
        "separate documents; set data.padding_free=false",
    ),
    "code": (
        recipe(packing=True),
        model("bloom"),
        "data.packing: documents in one row would attend to each other in m: the code of bloom does not "
        "separate documents; set data.packing=false",
    ),
    "mask": (
        recipe("eager", packing=True),
        model("gpt_oss", "full_attention", "sliding_attention"),
        "data.packing: documents in one row would attend to each other in m: the code of gpt_oss does not "
        "separate documents with eager; set data.packing=false, or use flash_attention_2 on a device that supports it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_plan_refuses_one_row_for_documents_that_would_see_each_other(name):
    asked, facts, message = REFUSED[name]
    with pytest.raises(PlanError) as caught:
        resolve(asked, LAPTOP, facts, ROWS)
    assert str(caught.value) == message
    resolve(recipe(asked.model.attn_implementation), LAPTOP, facts, ROWS)


def test_what_only_flash_attention_isolates_is_packed_with_it():
    equipped = H100.model_copy(update={"flash_attn": True})
    assert resolve(recipe(packing=True), equipped, model("gpt_oss"), ROWS).padding_free
    with pytest.raises(PlanError, match="the code of gpt_neo does not separate documents with flash_attention_2"):
        resolve(recipe(packing=True), equipped, model("gpt_neo"), ROWS)
    assert resolve(recipe("eager", packing=True), equipped, model("gpt_neo"), ROWS).padding_free
