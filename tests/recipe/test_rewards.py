"""Rewards in recipes: a list of sections, each in its short or its long form."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tunekit.errors import RecipeError
from tunekit.recipe.explain import explain, json_schema
from tunekit.recipe.load import dump_recipe, load_recipe, load_recipe_with_notes
from tunekit.recipe.methods import list_methods
from tunekit.recipe.methods.grpo import GRPOMethod
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.rewards import ExactMatchReward, FunctionReward, ModelReward, NumericMatchReward

JUDGE = {"type": "judge", "base_url": "http://x/v1", "model": "m", "instruction": "Be strict."}
GIVEN: list[Any] = [
    "exact_match",
    "tests.rows:row_for",
    {"type": "numeric_match", "tolerance": 0.1, "weight": 2.0},
    JUDGE,
    {"type": "reward_model", "model": "pico"},
]


def recipe_of(*rewards: Any) -> dict[str, Any]:
    return {"model": "pico", "data": {"train": "x.jsonl"}, "method": {"type": "grpo", "rewards": [*rewards]}}


def rewards_of(*overrides: str) -> list[Any]:
    method = load_recipe(recipe_of(*GIVEN), overrides).method
    assert isinstance(method, GRPOMethod)
    return method.rewards


def test_a_lone_word_is_a_reward_or_a_function() -> None:
    assert rewards_of()[:3] == [
        ExactMatchReward(),
        FunctionReward(path="tests.rows:row_for"),
        NumericMatchReward(tolerance=0.1, weight=2.0),
    ]
    assert GRPOMethod(rewards=["exact_match", "tests.rows:row_for"]).rewards == rewards_of()[:2]  # type: ignore[list-item]


def test_rewards_are_written_down_and_read_back(tmp_path: Path) -> None:
    recipe = load_recipe(recipe_of(*GIVEN))
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert load_recipe(recipe, ["train.seed=3"]).method == recipe.method


def test_overrides_reach_into_the_list() -> None:
    assert rewards_of("method.rewards[2].tolerance=0.5")[2] == NumericMatchReward(tolerance=0.5, weight=2.0)
    assert rewards_of("method.rewards[2]=exact_match")[2] == ExactMatchReward()
    assert rewards_of("method.rewards[0]=tests.rows:save_rows")[0] == FunctionReward(path="tests.rows:save_rows")
    assert rewards_of("method.rewards=[exact_match,{type: numeric_match, weight: 3}]") == [
        ExactMatchReward(),
        NumericMatchReward(weight=3),
    ]
    assert rewards_of("method.rewards=null") == []


def test_a_model_below_a_reward_has_its_short_form_and_a_judges_model_is_a_name() -> None:
    assert rewards_of()[4] == ModelReward(model=ModelSection(path="pico"))
    assert rewards_of("method.rewards[4].model=other")[4].model == ModelSection(path="other")
    assert rewards_of("method.rewards[4].model.dtype=bfloat16")[4].model.dtype == "bfloat16"
    assert rewards_of("method.rewards[3].model=other")[3].model == "other"
    given = {**recipe_of(), "method": {"type": "distillation", "teacher": "pico"}}
    assert load_recipe(given, ["method.teacher.revision=main"]).method.teacher == ModelSection(  # type: ignore[union-attr]
        path="pico", revision="main"
    )


def test_rewards_go_with_another_method_that_has_them_and_not_with_one_that_has_none() -> None:
    kept, notes = load_recipe_with_notes(recipe_of("exact_match"), ["method=rloo"])
    assert (kept.method.rewards, notes) == ([ExactMatchReward()], [])  # type: ignore[union-attr]
    _, notes = load_recipe_with_notes(recipe_of("exact_match"), ["method=sft"])
    assert notes == ["method.rewards=[{type: exact_match}] ignored: method.type=sft has no 'rewards'"]


BROKEN = """\
model: pico
data: {train: x.jsonl}
method:
  type: grpo
  rewards:
    - type: numeric_match
      tolernce: 2
      extract: boxd
    - {type: numeric_mach}
    - score
    - {tolerance: 3}
    - 3
    - tests.rows:row_fo
    - {type: function, path: "tests.rows:row_fo"}
    - {type: regex, pattern: "(a"}
    - {type: exact_match, tolerance: 3}
    - {type: length, max_tokens: 8, free_tokens: 8}
    - json_schema
    - {type: reward_model, model: {path: pico, dtpe: x}}
"""

TYPES = "exact_match, numeric_match, regex, json_schema, length, repetition, math, code, reward_model, judge"

COMPLAINTS = f"""\
recipe.yaml:7:7: method.rewards[0].tolernce: unknown key; did you mean 'tolerance'?
recipe.yaml:8:16: method.rewards[0].extract: must be one of all, last_line, last_number, boxed, answer_tag, \
got 'boxd'; did you mean 'boxed'?
recipe.yaml:9:14: method.rewards[1].type: must be one of function, {TYPES}, got 'numeric_mach'; \
did you mean 'numeric_match'?
recipe.yaml:10:7: method.rewards[2]: must be module:function or one of {TYPES}, got 'score'; did you mean 'code'?
recipe.yaml:11:7: method.rewards[3].type: missing required key; set it to one of function, {TYPES}
recipe.yaml:12:7: method.rewards[4]: must be a section (with type, path, weight, column, ...), got 3
recipe.yaml:13:7: method.rewards[5]: module 'tests.rows' has no function 'row_fo'; did you mean 'row_for'?
recipe.yaml:14:30: method.rewards[6].path: module 'tests.rows' has no function 'row_fo'; did you mean 'row_for'?
recipe.yaml:15:30: method.rewards[7].pattern: is not a valid regular expression: missing ), \
unterminated subpattern at position 0
recipe.yaml:16:27: method.rewards[8].tolerance: method.rewards[8].type=exact_match has no 'tolerance'; \
available with method.rewards[8].type=numeric_match
recipe.yaml:17:37: method.rewards[9].free_tokens: 8 is not less than max_tokens 8; \
lower it: the value falls from 0 to -1 between the two
recipe.yaml:18:7: method.rewards[10].path: requires either path or column; set exactly one of them
recipe.yaml:19:48: method.rewards[11].model.dtpe: unknown key; did you mean 'dtype'?"""


def test_broken_rewards_are_told_all_at_once_with_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(BROKEN)
    with pytest.raises(RecipeError) as error:
        load_recipe("recipe.yaml")
    assert str(error.value).splitlines() == COMPLAINTS.splitlines()


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("method.rewards=exact_match", "must be a list of sections, got 'exact_match'; write [exact_match]"),
        ("method.rewards.weight=3", "method.rewards is a list; write method.rewards[0].weight=... for its first item"),
        ("method.rewards[9].weight=3", "method.rewards has 5 items; the last item is method.rewards[4]"),
        ("method.rewards[0].wieght=3", "method.rewards[0].wieght: unknown key; did you mean 'weight'?"),
        ("method.rewards.0=x", "list positions need brackets; write method.rewards[0]=..."),
    ],
)  # fmt: skip
def test_an_override_of_rewards_that_is_wrong_says_what_to_write(override: str, problem: str) -> None:
    with pytest.raises(RecipeError) as error:
        rewards_of(override)
    assert problem in str(error.value)


def test_without_rewards_there_is_no_item_to_set() -> None:
    with pytest.raises(RecipeError, match=r"method.rewards has 0 items; write method.rewards=\[...\]"):
        load_recipe({**recipe_of(), "method": "grpo"}, ["method.rewards[0].weight=2"])


def test_rewards_are_explained_with_their_short_forms() -> None:
    text = explain("method.rewards")
    rewarded = " or ".join(method.name for method in list_methods() if method.is_rewarded)
    begin = f"method.rewards: a list of sections; optional; with method.type {rewarded} Reward functions: "
    assert " ".join(text.split()).startswith(begin)
    assert "`rewards: [exact_match]` is short for `rewards: [{type: exact_match}]`." in text
    assert "a list: `method.rewards[0].tolerance`, " in explain("method.rewards[1].tolerance")
    assert explain("method.rewards.tolerance").startswith(
        "method.rewards.tolerance: a number of at least 0; default 1.0e-06; with method.rewards.type\n  numeric_match\n"
    )
    assert "; required\n    function: " in explain("method.rewards.type").replace("\n  length", " length")


@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        (GIVEN, True),
        (["math", "my_mod:func"], True),
        (["my_mod"], False),
        (["regex"], False),
        ([{"type": "regex"}], False),
        ([{"type": "regex", "pattern": "a"}], True),
        ([{"tolerance": 1}], False),
        ([3], False),
        ("exact_match", False),
    ],
)
def test_editors_know_the_forms_of_rewards(rewards: Any, valid: bool) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    given = {**recipe_of(), "method": {"type": "grpo", "rewards": rewards}}
    assert validator.is_valid(given) is valid
    if valid and "my_mod:func" not in rewards:
        assert validator.is_valid(yaml.safe_load(dump_recipe(load_recipe(given))))


def test_editors_know_what_else_may_be_short() -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    for method, valid in (
        ({"type": "dpo", "loss_type": "ipo"}, True),
        ({"type": "dpo", "loss_type": ["sigmoid", "sft"]}, True),
        ({"type": "dpo", "loss_type": "ipoo"}, False),
        ({"type": "distillation", "teacher": "pico"}, True),
        ("rloo", True),
        ("distillation", False),
    ):
        assert validator.is_valid({"model": "pico", "data": {"train": "x"}, "method": method}) is valid, method
