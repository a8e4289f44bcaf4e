"""The models whose documents are computed one by one are those that were measured, and can be measured again."""

import json

import pytest
import torch

from benchmarks.isolation import RESULTS, measure
from benchmarks.tiny_models import tiny_model
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
    counts = families()["own_positions"]
    measured = {key: VERDICTS[key[0]][key[1]] == "isolates" and key[0] not in counts for key in claimed}
    assert claimed == measured
    assert sum(measured.values()) > 250
    assert len({model_type for model_type, _ in measured}) > 150


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", [*sorted(families()["own_positions"]), "bert", "opt", "roc_bert"])
def test_positions_that_begin_at_0_are_another_models_own(model_type):
    known, ids = tiny_model(model_type).eval(), torch.arange(5, 25)[None]
    own = known(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    from_0 = known(input_ids=ids, position_ids=torch.arange(20)[None]).logits
    assert torch.allclose(own, from_0) == (model_type not in families()["own_positions"])


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


@pytest.mark.sample(12)
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


BY_DOCUMENT = {
    "state": (recipe(packing=True), model("rwkv"), "rwkv layers carry state from one document to the next"),
    "layer-types": (
        recipe(padding_free=True),
        model("new", "full_attention", "mamba"),
        "its mamba layers do not separate documents",
    ),
    "code": (recipe(packing=True), model("bloom"), "the code of bloom does not separate documents"),
    "mask": (
        recipe("eager", packing=True),
        model("gpt_oss", "full_attention", "sliding_attention"),
        "the code of gpt_oss does not separate documents with eager",
    ),
}


@pytest.mark.parametrize("name", BY_DOCUMENT)
def test_the_decoder_runs_once_for_each_of_documents_that_would_see_each_other(name):
    asked, facts, why = BY_DOCUMENT[name]
    plan = resolve(asked, LAPTOP, facts, ROWS)
    (reason,) = (reason for reason in plan.reasons if reason.topic == "documents")
    assert plan.decoder_by_document and not plan.by_document
    assert reason.choice == "the decoder runs once per document"
    assert reason.why.startswith(f"{why}; no faster than without packing")
    assert reason.why.endswith("except flash_attention_2 if supported") == (name == "mask")
    plain = resolve(recipe(asked.model.attn_implementation), LAPTOP, facts, ROWS)
    assert not plain.decoder_by_document and not plain.padding_free


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_sharded_weights_are_not_gathered_once_for_each_document(strategy):
    bloom = model("bloom")
    two = H100.model_copy(update={"accelerators": H100.accelerators * 2})
    asked = recipe(packing=True).model_dump() | {"parallel": {"strategy": strategy}}
    with pytest.raises(PlanError, match=r"in bloom, once per document, .*; use ddp, or set data\.packing=false$"):
        resolve(Recipe.model_validate(asked), two, bloom, ROWS)


def test_adapters_of_a_layer_at_several_places_are_not_sharded():
    two = H100.model_copy(update={"accelerators": H100.accelerators * 2})
    asked = recipe().model_dump() | {"parallel": {"strategy": "fsdp2"}, "adapter": {"type": "lora"}}
    with pytest.raises(PlanError, match=r"Accelerate loses adapters of the layer that zamba reuses .*; use ddp$"):
        resolve(Recipe.model_validate(asked), two, model("zamba"), ROWS)
    resolve(Recipe.model_validate(asked | {"adapter": {"type": "full"}}), two, model("zamba"), ROWS)


@pytest.mark.parametrize(
    ("facts", "repeated"), [(model("bloom"), "the decoder"), (model("lfm2", "conv"), "a recurrent layer")]
)
def test_what_runs_once_for_each_document_is_not_compiled(facts, repeated):
    words = f"{repeated} runs once per document, and every new length would recompile"
    asked = recipe(packing=True).model_dump()
    with pytest.raises(PlanError) as caught:
        resolve(Recipe.model_validate(asked | {"train": {"torch_compile": True}}), H100, facts, ROWS)
    assert str(caught.value) == f"train.torch_compile: {words}; unset it, or set data.packing=false"
    plan = resolve(Recipe.model_validate(asked | {"train": {"torch_compile": "auto"}}), H100, facts, ROWS)
    (reason,) = (reason for reason in plan.reasons if reason.topic == "compile")
    assert (plan.torch_compile, reason.why) == (False, words)


def test_what_only_flash_attention_isolates_is_packed_with_it():
    equipped = H100.model_copy(update={"flash_attn": True})
    assert resolve(recipe(packing=True), equipped, model("gpt_oss"), ROWS).padding_free
    assert resolve(recipe(packing=True), equipped, model("gpt_neo"), ROWS).decoder_by_document
    eager = resolve(recipe("eager", packing=True), equipped, model("gpt_neo"), ROWS)
    assert eager.padding_free and not eager.decoder_by_document
