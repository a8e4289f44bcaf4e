"""Reading recipes that are right: YAML's traps, short forms, variables, names, and the way there and back."""

import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.errors import RecipeError
from tunekit.recipe.load import dump_recipe, load_recipe
from tunekit.recipe.methods.sft import SFTMethod
from tunekit.recipe.reading.parse import MAPPING, plain_scalar, read_yaml
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.data import DataSection, DataSource
from tunekit.recipe.sections.model import ModelSection
from tunekit.recipe.sections.section import OutputSection, TrainSection

GOOD = "model: pico\ndata: {train: x.jsonl}\n"
ROOT = Path(__file__).parents[2]


def recipe_of(text: str, folder: Path) -> Recipe:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e5", 1e5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2.5E+3", -2500.0),
        ("012", 12),
        ("-7", -7),
        ("+7", 7),
        ("0x1f", 31),
        ("0o17", 15),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("~", None),
        ("", None),
        ("Null", None),
        ("TRUE", True),
        ("false", False),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    read = plain_scalar(text)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    "text", ["yes", "No", "on", "OFF", "y", "1:30", "2024-01-01", "1_000", "0b1", "tRUE", "1e", "e5", "."]
)
def test_what_yaml_1_1_would_have_turned_into_something_else_stays_text(text: str) -> None:
    assert plain_scalar(text) == text


def test_a_quoted_scalar_is_text() -> None:
    value, _, _ = read_yaml("""['1', "true", 'null', "<<"]""", MAPPING)
    assert value == ["1", "true", "null", "<<"]


def test_a_recipe_of_short_forms_equals_the_one_written_out(tmp_path: Path) -> None:
    short = recipe_of("model: pico\ndata: {train: a.jsonl, eval: b.jsonl}\nmethod: sft\nadapter: qlora\n", tmp_path)
    long = recipe_of(
        "model: {path: pico}\ndata: {train: {path: a.jsonl}, eval: {path: b.jsonl}}\n"
        "method: {type: sft}\nadapter: {type: qlora}\n",
        tmp_path,
    )
    assert short == long
    assert (short.model.path, short.adapter.type, short.data.train.path) == ("pico", "qlora", "a.jsonl")


def test_an_empty_section_is_a_section_of_defaults(tmp_path: Path) -> None:
    assert recipe_of(GOOD + "train:\noutput:\n", tmp_path).train == TrainSection()


def test_null_stands_where_a_field_may_be_null(tmp_path: Path) -> None:
    recipe = recipe_of("model: pico\ndata: {train: x.jsonl, eval: null}\ntrain: {learning_rate: ~}\n", tmp_path)
    assert recipe.data.eval is None
    assert recipe.train.learning_rate is None


def test_aliases_and_merges_are_followed_and_merged_keys_may_be_overridden(tmp_path: Path) -> None:
    recipe = recipe_of(
        "model: pico\n"
        "data:\n"
        "  train: &rows {path: rows.parquet, name: en, split: train}\n"
        "  eval: {<<: *rows, split: test}\n"
        "adapter: {type: lora, rank: &r 8, alpha: *r}\n",
        tmp_path,
    )
    assert recipe.data.eval == DataSource(path="rows.parquet", name="en", split="test")
    assert isinstance(recipe.adapter, LoraAdapter)
    assert (recipe.adapter.rank, recipe.adapter.alpha) == (8, 8)


def test_of_two_merged_mappings_the_earlier_wins_and_merges_nest() -> None:
    text = "a: &a {x: 1}\nb: &b {x: 2, y: 2, z: 2}\nc: &c {<<: *a, y: 3}\nd: {z: 4, <<: [*c, *b]}\n"
    value, _, problems = read_yaml(text, MAPPING)
    assert problems == []
    assert value["d"] == {"x": 1, "y": 3, "z": 4}


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(path).data.train.path == "x.jsonl"


def test_json_is_yaml(tmp_path: Path) -> None:
    recipe = recipe_of(
        json.dumps({"model": "pico", "data": {"train": "x"}, "train": {"learning_rate": 1e-5}}), tmp_path
    )
    assert recipe.train.learning_rate == 1e-5


def test_a_recipe_is_frozen(tmp_path: Path) -> None:
    recipe = recipe_of(GOOD, tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.seed = 3  # type: ignore[misc]


# Variables


def test_variables_and_the_home_folder_are_filled_in_where_paths_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.setenv("HOME", "/home/ada")
    recipe = recipe_of(
        "model: ${MODELS}/llama\ndata: {train: '~/rows.jsonl'}\noutput: {dir: '${MODELS}/runs/${MODELS}'}\n", tmp_path
    )
    assert recipe.model.path == "/models/llama"
    assert recipe.data.train.path == "/home/ada/rows.jsonl"
    assert recipe.output.dir == "/models/runs//models"
    listed = recipe_of("model: pico\ndata: {train: ['~/a', {path: '${MODELS}/b'}], eval: ['${MODELS}/c']}\n", tmp_path)
    assert [source.path for source in listed.data.sources] == ["/home/ada/a", "/models/b"]
    assert [source.path for source in listed.data.eval_sources] == ["/models/c"]


def test_what_a_variable_holds_is_not_expanded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "${HOME}")
    recipe = recipe_of("model: ${MODELS}\ndata: {train: x.jsonl}\n", tmp_path)
    assert recipe.model.path == "${HOME}"
    assert recipe_of(dump_recipe(recipe), tmp_path) == recipe


def test_two_dollars_write_a_literal_variable(tmp_path: Path) -> None:
    recipe = recipe_of(
        GOOD + "output: {sample_prompts: ['echo $${HOME} costs $5 or ${']}\n".replace(" or ${", ""), tmp_path
    )
    assert recipe.output.sample_prompts == ["echo ${HOME} costs $5"]


# Names


@pytest.mark.parametrize(
    ("stem", "name"),
    [("first", "first"), ("my recipe (2)", "my-recipe-2"), ("été", "t"), ("数据", "recipe"), (".hidden", "hidden")],
)
def test_a_run_is_named_after_its_recipe_file(stem: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{stem}.yaml"
    path.write_text(GOOD)
    assert load_recipe(path).output.name == name


@pytest.mark.parametrize(
    ("model", "name"),
    [("pico", "sft-pico"), ("Qwen/Qwen3-0.6B", "sft-Qwen3-0.6B"), ("./my model/", "sft-my-model"), ("..", "sft-model")],
)
def test_a_run_from_a_mapping_is_named_after_method_and_model(model: str, name: str) -> None:
    assert load_recipe({"model": model, "data": {"train": "x.jsonl"}}).output.name == name


def test_a_name_in_the_recipe_is_kept(tmp_path: Path) -> None:
    assert recipe_of(GOOD + "output: {name: pirates}\n", tmp_path).output.name == "pirates"


def test_a_shipped_recipe_loads_by_name_unless_a_file_of_that_name_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft" / "lora").mkdir(parents=True)
    assert load_recipe("sft/quickstart").output.name == "quickstart"
    assert load_recipe("sft/lora").output.name == "lora"
    (tmp_path / "sft" / "quickstart").write_text(GOOD + "output: {name: mine}\n")
    assert load_recipe("sft/quickstart").output.name == "mine"


# Mappings and recipes


def test_a_mapping_may_hold_paths_and_tuples_and_is_not_changed() -> None:
    source = {"model": Path("pico"), "data": {"train": Path("x.jsonl")}, "output": {"sample_prompts": ("hi",)}}
    before = copy.deepcopy(source)
    recipe = load_recipe(source, ["data.eval=e.jsonl"])
    assert source == before
    assert (recipe.model.path, recipe.output.sample_prompts) == ("pico", ["hi"])


class Model:
    """Stands for a loaded model, which is called too."""

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "data.train",
            [{"prompt": "a"}],
            "must name the rows, got a Python list; pass rows in memory as train_dataset",
        ),
        ("data.eval", Model(), "must name the rows, got a Python Model; pass rows in memory as eval_dataset"),
        ("model", Model(), "must be a folder or name, got a Python Model; save it with save_pretrained, and pass the "),
        (
            "model.path",
            Model(),
            "must be a folder or name, got a Python Model; save it with save_pretrained, and pass ",
        ),
    ],
)
def test_rows_and_models_in_memory_are_told_how_to_be_passed(key: str, value: Any, message: str) -> None:
    section, _, field = key.partition(".")
    recipe = {"model": "pico", "data": {"train": "x.jsonl"}}
    inside = {section: {**({} if section == "model" else recipe["data"]), field: value} if field else value}
    for source, overrides in (({**recipe, **inside}, {}), (recipe, {key: value}), (recipe, inside)):
        with pytest.raises(RecipeError) as caught:
            load_recipe(source, overrides)
        assert len(str(caught.value).splitlines()) == 1 and f"{key}: {message}" in str(caught.value)


def test_a_recipe_loads_as_itself() -> None:
    recipe = load_recipe({"model": "pico", "data": {"train": "x.jsonl"}, "adapter": "full"})
    assert load_recipe(recipe) == recipe
    assert load_recipe(recipe, ["train.seed=3"]).train.seed == 3


# There and back

AMBIGUOUS = """
yes no 1e-4 1e5 012 0o7 0x1f 1:30 2024-01-01 null ~ << = true .inf - ? | > # [ { &a *a !x % @ ` ' "
"""
WORDS = st.sampled_from(AMBIGUOUS.split())
PHRASES = st.sampled_from(
    ["${HOME}", "$${X}", "${", "$", "a: b", "- a", "a #b", "\t", " a ", "a\nb", "a\n\n b\n", "é数"]
)
TEXTS = WORDS | PHRASES | st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
PATHS = TEXTS.filter(lambda text: text != "" and not text.startswith("~"))
TEMPLATES = st.sampled_from(["chatml", "qwen3"]) | PATHS.map(lambda text: f"{text}.jinja")
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
SOURCE: dict[str, Any] = {
    "path": PATHS,
    "name": st.none() | TEXTS,
    "split": st.none() | TEXTS,
    "revision": st.none() | TEXTS,
    "format": st.none() | st.sampled_from(["auto", "text"]),
    "columns": st.none() | st.dictionaries(TEXTS, TEXTS, max_size=2),
    "loss_on": st.none() | st.just("last"),
}
SOURCES = st.builds(DataSource, **SOURCE)
SOURCE_LISTS = st.lists(SOURCES, min_size=1, max_size=3)
WEIGHTED = st.lists(st.builds(DataSource, **SOURCE, weight=POSITIVE), min_size=2, max_size=3)
LORA: dict[str, Any] = {
    "rank": st.integers(1),
    "alpha": POSITIVE,
    "dropout": st.floats(0, 1, exclude_max=True),
    "rank_pattern": st.none() | st.dictionaries(st.sampled_from(["q_proj", r"layers\.\d+\..*"]), st.integers(1)),
    "target_modules": st.sampled_from(["all-linear", r".*\.[qv]_proj"]) | st.lists(TEXTS),
    "exclude_modules": st.none() | st.lists(TEXTS, min_size=1),
    "init_lora_weights": st.sampled_from([True, "gaussian", "pissa_niter_16"]),
    "use_rslora": st.booleans(),
    "modules_to_save": st.none() | st.lists(TEXTS),
}
RECIPES = st.builds(
    Recipe,
    model=st.builds(ModelSection, path=PATHS, chat_template=st.none() | TEMPLATES, trust_remote_code=st.booleans()),
    data=st.builds(
        DataSection, train=SOURCES | SOURCE_LISTS, eval=st.none() | SOURCES | SOURCE_LISTS, packing=st.booleans()
    )
    | st.builds(DataSection, train=WEIGHTED, weight_by=st.sampled_from(["rows", "tokens"]), shuffle=st.booleans()),
    method=st.builds(
        SFTMethod, trainer_args=st.fixed_dictionaries({}, optional={"optim_args": TEXTS, "adam_beta1": POSITIVE})
    ),
    adapter=st.just(FullAdapter())
    | st.builds(LoraAdapter, **LORA)
    | st.builds(QloraAdapter, **LORA, quant_type=st.sampled_from(["nf4", "fp4"])),
    train=st.builds(
        TrainSection,
        num_epochs=st.none() | POSITIVE,
        learning_rate=st.none() | POSITIVE,
        warmup_steps=st.floats(0, allow_infinity=False),
        gradient_checkpointing=st.just("auto") | st.booleans(),
        seed=st.integers(0, 2**64),
    ),
    output=st.builds(
        OutputSection,
        dir=st.none() | PATHS,
        name=NAMES,
        sample_prompts=st.none() | st.lists(TEXTS, max_size=3),
    ),
)


@given(recipe=RECIPES)
def test_a_dumped_recipe_reads_back_equal(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert recipe_of(dump_recipe(recipe), tmp_path_factory.getbasetemp()) == recipe


def test_a_dumped_recipe_states_every_field() -> None:
    recipe = load_recipe("sft/quickstart")
    text = dump_recipe(recipe)
    for section in (recipe, recipe.model, recipe.data, recipe.method, recipe.adapter, recipe.train, recipe.output):
        for name in type(section).model_fields:
            assert f"{name}:" in text


def test_small_floats_survive_a_dump(tmp_path: Path) -> None:
    recipe = recipe_of(GOOD + "train: {learning_rate: 1e-4, weight_decay: 2.5e-7}\n", tmp_path)
    again = recipe_of(dump_recipe(recipe), tmp_path)
    assert (again.train.learning_rate, again.train.weight_decay) == (1e-4, 2.5e-7)


# Whatever else stands in the file

KEYS_AND_VALUES = """
model data train adapter type lora pico x.jsonl trainer_args method eval 1e-4 { } [ ] , " ' # &a *a !!int | > --- ...
% null true 3 ${X} ~ ? @ \\ é
"""
LAYOUT = [": ", ":", " ", "\n", "\n  ", "\n    - ", "- ", "<<: *a", "\t", "\x85", "\u2028", "\ufeff"]
PIECES = st.sampled_from([*KEYS_AND_VALUES.split(), *LAYOUT])


@settings(max_examples=300)
@given(text=st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=40))
def test_no_text_whatever_ends_in_anything_but_a_recipe_or_its_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    for source, overrides in ((path, ()), ({"model": "pico", "data": {"train": "x"}}, (text, f"train={text}"))):
        with contextlib.suppress(RecipeError):
            load_recipe(source, overrides)


# What reading a recipe costs


@pytest.mark.slow
def test_reading_recipes_imports_no_torch_and_none_of_its_family(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(GOOD + "method: {type: sft, trainer_args: {adam_bta1: 0.8}}\ntrain: {lr: 1}\n")
    script = (
        "import sys\n"
        "from tunekit.errors import RecipeError\n"
        "from tunekit.files import list_recipes\n"
        "from tunekit.recipe import explain, load\n"
        "load.load_recipe('sft/quickstart', ['method.trainer_args.adam_beta1=0.8'])\n"
        "try:\n    load.load_recipe('bad.yaml')\n"
        "except RecipeError as error:\n    assert len(str(error).splitlines()) == 2, error\n"
        "explain.explain(None), explain.json_schema(), list_recipes()\n"
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'peft', 'accelerate', 'numpy', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_file_of_another_tool_is_told_how_to_be_converted(tmp_path: Path) -> None:
    foreign, own = tmp_path / "axolotl.yaml", tmp_path / "own.yaml"
    foreign.write_text("base_model: pico\ndatasets: [{path: a.jsonl, type: alpaca}]\nsequence_len: 512\n")
    own.write_text("model: pico\ndata: {train: a.jsonl}\nnum_epochs: 2\nsequence_len: 512\n")
    question = f"is this a configuration of another tool? `tunekit migrate {foreign}` converts it"
    with pytest.raises(RecipeError) as raised:
        load_recipe(foreign)
    assert str(raised.value).splitlines()[-1] == question
    with pytest.raises(RecipeError) as raised:
        load_recipe(own)
    assert "another tool" not in str(raised.value)
