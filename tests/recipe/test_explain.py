"""The documentation of recipes: every field with what it takes, its default and its sentence; and the JSON schema."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tunekit.errors import RecipeError
from tunekit.files import list_recipes
from tunekit.recipe.explain import explain, json_schema
from tunekit.recipe.load import dump_recipe, load_recipe
from tunekit.recipe.reading.wording import familiar_names
from tunekit.recipe.schema import all_fields, holders_along


def entries(text: str) -> Iterator[str]:
    return (block.partition(":")[0] for block in text.split("\n\n"))


def test_a_field_says_what_it_takes_its_default_and_who_has_it() -> None:
    assert explain("adapter.rank") == (
        "adapter.rank: an integer greater than 0; default 16; with adapter.type lora or qlora\n"
        "    Rank of the update matrices; their size grows with it.\n\n"
        "adapter.rank: an integer greater than 0; default 256; with adapter.type vera\n"
        "    Rank of the two random matrices. A layer trains this number of values, plus one per output.\n\n"
        "adapter.rank: an integer greater than 0; default 64; with adapter.type miss\n"
        "    Inputs of a block, and rows of the trained matrix."
    )


@pytest.mark.parametrize(
    ("key", "header"),
    [
        ("model.path", "model.path: a string; required"),
        ("model.dtype", "model.dtype: one of auto, float32, bfloat16, float16; default auto"),
        ("data.train", "data.train: a section or a list of sections; required"),
        ("data.eval", "data.eval: a section or a list of sections; optional"),
        ("data.train.weight", "data.train.weight: a number greater than 0; optional"),
        ("data.train[1].weight", "data.train.weight: a number greater than 0; optional"),
        (
            "data.train.format",
            "data.train.format: auto, messages, sharegpt, alpaca, prompt_completion, captions, text, tokens,",
        ),
        (
            "adapter.type",
            "adapter.type: one of full, lora, qlora, ia3, vera, oft, miss, adalora, prompt_tuning; default lora",
        ),
        ("adapter.quant_type", "adapter.quant_type: one of nf4, fp4, int8; default nf4; with adapter.type qlora"),
        ("train.gradient_checkpointing", "train.gradient_checkpointing: auto, true or false; default auto"),
        ("train.warmup_steps", "train.warmup_steps: a number of at least 0; default 0.03"),
        ("train.num_epochs", "train.num_epochs: a number greater than 0; optional"),
        ("output.sample_prompts", "output.sample_prompts: a list of strings; optional"),
    ],
)
def test_the_first_line_says_what_a_field_takes(key: str, header: str) -> None:
    assert explain(key).splitlines()[0] == header


def test_a_field_that_takes_variables_says_so() -> None:
    assert "`${NAME}` is replaced by an environment variable" in explain("model.path")
    assert "${NAME}" not in explain("model.revision")


def test_a_field_that_takes_a_list_says_how_its_items_are_written() -> None:
    text = explain("data.train")
    assert "`train: NAME` is short for `train: {path: NAME}`, also in a list: `train: [NAME, NAME]`." in text
    assert text.endswith("Where `data.train` is a list: `data.train[0]`, `data.train[1]`, ...")
    assert "`data.eval[0].split`, `data.eval[1].split`" in explain("data.eval.split")
    assert "[" not in explain("model.path")


def test_a_section_is_explained_with_all_its_fields_each_once() -> None:
    keys = list(entries(explain("adapter")))
    assert keys[0] == "adapter"
    assert "adapter.rank" in keys
    assert "adapter.quant_type" in keys
    assert keys.count("adapter.rank") == 3, "those of LoRA, VeRA and MiSS differ"
    assert keys.count("adapter.alpha") == 2, "those of LoRA and AdaLoRA differ"
    towers = ("adapter.vision_tower", "adapter.projector")
    assert [keys.count(key) for key in towers] == [2, 2], "those of full fine-tuning and LoRA differ"
    assert len(keys) == len(set(keys)) + 5


def test_everything_is_every_field() -> None:
    assert set(entries(explain(None))) == {".".join(key) for key, _ in all_fields()}


def test_every_field_has_a_sentence() -> None:
    for key, field in all_fields():
        assert (field.description or "").rstrip().endswith((".", "]")), key


def test_a_tag_is_explained_by_each_of_its_words() -> None:
    assert re.search(r"full: .*\n +lora: .*\n +qlora: ", explain("adapter.type"))


def test_trls_own_arguments_are_known_by_name() -> None:
    assert explain("method.trainer_args.adam_beta1").startswith("method.trainer_args.adam_beta1: optional\n")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("adapter.rnak", "adapter.rnak: unknown key; did you mean 'rank'?"),
        ("learning_rate", "learning_rate: unknown key; use train.learning_rate"),
        ("trian.seed", "trian: unknown key; did you mean 'train'?"),
        (
            "data.columns.x",
            "data.columns.x: data.columns is not a section; `tunekit explain data.columns` documents it",
        ),
        ("train.optim.x", "train.optim.x: train.optim is not a section; `tunekit explain train.optim` documents it"),
        (
            "method.trainer_args.adam_bta1",
            "method.trainer_args.adam_bta1: not a field of SFTConfig; did you mean 'adam_beta1'?",
        ),
        ("method.trainer_args.bf16", "method.trainer_args.bf16: set by tunekit; use model.dtype"),
        ("", ": unknown key; keys of a recipe: model, data, method, adapter, train, parallel, output"),
    ],
)
def test_an_unknown_key_is_told_with_what_was_meant(key: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        explain(key)
    assert str(error.value) == message


def test_every_name_that_other_tools_use_leads_to_a_key_that_exists() -> None:
    for name, ours in familiar_names().items():
        for key in re.findall(r"\b(?:model|data|method|adapter|train|output)\.\w+", ours):
            parts = tuple(key.split("."))
            assert len(holders_along(parts)) == len(parts), f"{name} -> {key}"
        assert not holders_along((name,)), f"{name} is a section of ours"


# The JSON schema


def is_valid(recipe: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(json_schema()).is_valid(recipe))


def test_lists_of_sources_fit_the_json_schema_in_any_form() -> None:
    for train in (["a.jsonl"], [{"path": "a.jsonl", "weight": 3}, {"path": "b", "format": "alpaca", "weight": 0.5}]):
        assert is_valid({"model": "pico", "data": {"train": train, "eval": ["e.jsonl", {"path": "f.jsonl"}]}})
        assert is_valid(yaml.safe_load(dump_recipe(load_recipe({"model": "pico", "data": {"train": train[:1] * 2}}))))


def test_the_json_schema_is_one() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "tunekit recipe"


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes()])
def test_shipped_recipes_fit_the_json_schema_short_and_written_out(name: str) -> None:
    (path,) = [recipe.path for recipe in list_recipes() if recipe.name == name]
    values = yaml.safe_load(path.read_text())
    # PyYAML reads `1e-4` as text, unlike YAML 1.2 and the editors.
    values["train"] = {
        key: float(value) if isinstance(value, str) and "e-" in value else value
        for key, value in values["train"].items()
    }
    assert is_valid(values)
    assert is_valid(yaml.safe_load(dump_recipe(load_recipe(name))))


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "change",
    [
        {"modle": "pico"},
        {"model": {"dtype": "auto"}},
        {"adapter": "lroa"},
        {"adapter": {"type": "lora", "rnak": 8}},
        {"adapter": {"type": "full", "rank": 8}},
        {"adapter": {"rank": 8}},
        {"train": {"seed": "x"}},
        {"train": {"global_batch_size": 0}},
        {"data": {}},
        {"data": {"train": []}},
        {"data": {"train": [3]}},
        {"data": {"train": [["x.jsonl"]]}},
        {"data": {"train": [{"path": "x.jsonl", "wieght": 1}]}},
        {"data": {"train": {"path": "x.jsonl", "weight": 0}}},
    ],
)
def test_what_is_wrong_does_not_fit_the_json_schema(change: dict[str, Any]) -> None:
    good = {"model": "pico", "data": {"train": "x.jsonl"}}
    assert is_valid(good)
    assert not is_valid({**good, **change})


def test_a_key_that_variants_mean_otherwise_is_told_for_each() -> None:
    heads = [text.partition("\n")[0] for text in explain("method.beta").split("\n\n")]
    assert heads[0] == "method.beta: a number greater than 0; default 0.1; with method.type dpo or kto or online_dpo"
    assert any(
        re.match(r"method.beta: a number of at least 0; default 0.0; with method.type grpo\b", head) for head in heads
    )
    assert "method.beta: a number of at least 0; default 0.05; with method.type rloo" in heads


def test_a_key_that_variants_share_is_told_once() -> None:
    assert explain("adapter").count("adapter.alpha_pattern: ") == 1
    assert "with adapter.type lora or qlora" in explain("adapter.alpha_pattern")
