"""Methods in recipes: short forms, there and back, and what they cannot do with rows."""

import re
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

from tunekit.errors import RecipeError
from tunekit.recipe.explain import explain
from tunekit.recipe.load import dump_recipe, load_recipe
from tunekit.recipe.methods import METHODS
from tunekit.recipe.methods.dpo import DPOMethod
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.methods.sft import SFTMethod

SOURCE: dict[str, Any] = {"model": "pico", "data": {"train": "x.jsonl"}}


@pytest.mark.parametrize(("name", "method"), [("sft", SFTMethod()), ("dpo", DPOMethod()), ("grpo", GRPOMethod())])
def test_a_method_can_be_given_by_its_name(name: str, method: object) -> None:
    assert load_recipe({**SOURCE, "method": name}).method == method
    assert load_recipe(SOURCE, [f"method={name}"]).method == method
    assert load_recipe({**SOURCE, "method": {"type": "dpo", "beta": 0.5}}, [f"method.type={name}"]).method.type == name


@pytest.mark.parametrize("method", [DPOMethod(beta=0.3), GRPOMethod(num_generations=4, trainer_args={"delta": 1.5})])
def test_a_method_reads_back_equal(method: DPOMethod | GRPOMethod, tmp_path: Any) -> None:
    recipe = load_recipe({**SOURCE, "method": method.model_dump()})
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "again.yaml")) == recipe
    assert load_recipe(recipe, ["train.seed=3"]).method == method


@pytest.mark.parametrize(
    ("method", "changes", "problem"),
    [
        ("dpo", ["data.packing=true"], "data.packing: unsupported with method dpo; unset it"),
        ("grpo", ["data.padding_free=true"], "data.padding_free: unsupported with method grpo: TRL pads"),
        ("dpo", ["data.loss_on=all"], "data.loss_on: cannot be all with method dpo"),
        (
            "dpo",
            ["data.streaming=true", "train.max_steps=5", "method.precompute_ref_log_probs=true"],
            "method.precompute_ref_log_probs: unsupported with data.streaming",
        ),
        (
            "grpo",
            ["data.max_length=512"],
            "method.max_completion_length: 512 leaves no room for a prompt in data.max_length 512",
        ),
        (
            "grpo",
            ["train.global_batch_size=12"],
            "method.num_generations: 8 does not divide train.global_batch_size 12",
        ),
        (
            "dpo",
            ["adapter.dropout=0.1"],
            "adapter.dropout: has no effect with method dpo: TRL disables dropout",
        ),
        ("grpo", ["method.rewards=[score]"], "method.rewards[0]: must be module:function or one of exact_match, "),
        ("sft", ["method.beta=0.2"], "method.type=sft has no 'beta'; available with method.type=dpo, kto, orpo"),
        ("grpo", ["method.num_generations=1"], "method.num_generations: must be at least 2, got 1"),
        ("dpo", ["method.trainer_args.beta=1"], "set by tunekit; use method.beta"),
        ("dpo", ["method.trainer_args.lable_smoothing=0.1"], "not a field of DPOConfig; use method.label_smoothing"),
        ("grpo", ["method.trainer_args.use_vllm=true"], "set by tunekit; use method.generation.use_vllm"),
    ],
)  # fmt: skip
def test_what_a_method_cannot_do_is_told_with_its_place(method: str, changes: list[str], problem: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe({**SOURCE, "method": method}, changes)
    assert problem in str(error.value)


def test_a_source_of_its_own_is_held_to_the_method_too() -> None:
    data = {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "loss_on": "last"}]}
    with pytest.raises(RecipeError, match=r"data.train\[1\].loss_on: cannot be last with method dpo"):
        load_recipe({**SOURCE, "data": data, "method": "dpo"})


REWARDED: dict[str, Any] = {"rewards": ["exact_match"]}
NEEDED: dict[str, Any] = {
    "classification": {"labels": ["no", "yes"]},
    "distillation": {"teacher": "pico"},
    "gkd": {"teacher": "pico", "lmbda": 0},
    "gold": {"teacher": "pico"},
    "grpo": REWARDED,
    "rloo": REWARDED,
}
CHOICES = {
    "data.packing": ["data.packing=true"],
    "data.padding_free": ["data.padding_free=true"],
    "data.loss_on": ["data.loss_on=last"],
    "data.curriculum": ["data.curriculum=length", "data.shuffle=false"],
    "data.too_long": ["data.too_long=drop"],
    "output.sample_prompts": ["output.sample_prompts=[Hi]"],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_form_offers_those_fields_that_the_method_does_not_refuse(method: str) -> None:
    source = {**SOURCE, "method": {"type": method, **NEEDED.get(method, {})}}
    assert load_recipe(source).method.type == method
    refused = set()
    for key, overrides in CHOICES.items():
        try:
            load_recipe(source, overrides)
        except RecipeError as error:
            assert f"{key}: " in str(error)
            refused.add(key)
    assert refused == {key for key in CHOICES if not METHODS[method].offers(tuple(key.split(".")))}


@pytest.mark.parametrize(("method", "rates"), [(name, section.spec.learning_rate) for name, section in METHODS.items()])
def test_a_default_learning_rate_from_a_config_of_trl_is_that_of_the_config(method: str, rates: Any) -> None:
    if not rates.source.startswith("TRL's "):
        assert re.search(r"arXiv \d{4}\.\d{5}$", rates.source)
        return
    package, file, name = METHODS[method].spec.config
    module = import_module(f"{package}.{file.removesuffix('.py').replace('/', '.')}")
    if method == "online_dpo":  # Its trainer is GRPO's.
        name, module = "OnlineDPOConfig", import_module("trl.experimental.online_dpo")
    assert rates.source == f"TRL's {name}"
    config = vars(module)[name]
    assert {field.name: field.default for field in fields(config)}["learning_rate"] == rates.full


def test_the_default_learning_rates_are_described() -> None:
    text = " ".join(explain("train.learning_rate").split())
    described = re.findall(r"(\de-\d) for ([a-z_]+(?:(?:, | and )[a-z_]+)*)", text)
    rates = {method: float(rate) for rate, methods in described for method in re.split(", | and ", methods)}
    assert rates == {name: section.spec.learning_rate.full for name, section in METHODS.items()}
