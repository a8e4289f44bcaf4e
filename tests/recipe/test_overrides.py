"""`key=value` over a recipe: what wins, what is left out and said, and how short forms take it."""

from pathlib import Path

import pytest

from tunekit.errors import RecipeError
from tunekit.recipe.load import load_recipe, load_recipe_with_notes, override_words
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, LoraAdapter, QloraAdapter
from tunekit.recipe.sections.data import DataSource
from tunekit.recipe.sections.section import TrainSection

PLAIN = "model: pico\ndata: {train: x.jsonl}\n"
LORA = PLAIN + "adapter: {type: lora, rank: 16, target_modules: [q_proj, v_proj]}\n"
MIXED = (
    "model: pico\ndata:\n  train:\n    - {path: a.jsonl, weight: 3}\n    - {path: b.jsonl, format: alpaca, weight: 1}\n"
)
QLORA = PLAIN + "adapter: {type: qlora, rank: 16, quant_type: fp4}\n"


@pytest.fixture
def recipe(tmp_path: Path):
    def load(text: str, *overrides: str) -> tuple[Recipe, list[str]]:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe_with_notes(path, overrides)

    return load


def test_a_value_is_read_as_in_the_file(recipe) -> None:
    loaded, notes = recipe(
        LORA,
        "train.learning_rate=1e-4",
        "train.max_steps=5",
        "adapter.target_modules=[k_proj, o_proj]",
        "data.packing=true",
        "output.name='12'",
        'output.sample_prompts=["What is 2+2?", hi]',
        "data.train.split=train[:5%]",
    )
    assert (loaded.train.learning_rate, loaded.train.max_steps) == (1e-4, 5)
    assert isinstance(loaded.adapter, LoraAdapter)
    assert loaded.adapter.target_modules == ["k_proj", "o_proj"]
    assert loaded.data.packing is True
    assert loaded.output.name == "12"
    assert loaded.output.sample_prompts == ["What is 2+2?", "hi"]
    assert loaded.data.train.split == "train[:5%]"
    assert notes == []


def test_a_later_override_wins_over_an_earlier_one_without_a_word(recipe) -> None:
    loaded, notes = recipe(PLAIN, "train.seed=1", "train.seed=oops", "train.seed=3")
    assert (loaded.train.seed, notes) == (3, [])


def test_an_override_mends_a_wrong_value_of_the_file(recipe) -> None:
    assert recipe(PLAIN + "train: {seed: oops}\n", "train.seed=3")[0].train.seed == 3
    assert recipe("model: 3\ndata: {train: x.jsonl}\n", "model=pico")[0].model.path == "pico"


@pytest.mark.parametrize("name", ["train.seed", "train"])
def test_null_goes_back_to_the_default(recipe, name: str) -> None:
    assert recipe(PLAIN + "train: {seed: 5}\n", f"{name}=null")[0].train == TrainSection()


def test_null_takes_away_what_is_optional(recipe) -> None:
    assert recipe("model: pico\ndata: {train: x.jsonl, eval: y.jsonl}\n", "data.eval=null")[0].data.eval is None


def test_an_override_reaches_into_short_forms(recipe) -> None:
    loaded, _ = recipe(
        "model: pico\ndata: {train: x.jsonl}\nadapter: qlora\n",
        "model.dtype=float32",
        "data.train.split=test",
        "adapter.rank=8",
        "method.trainer_args.adam_beta1=0.8",
    )
    assert (loaded.model.path, loaded.model.dtype) == ("pico", "float32")
    assert loaded.data.train == DataSource(path="x.jsonl", split="test")
    assert isinstance(loaded.adapter, QloraAdapter)
    assert loaded.adapter.rank == 8
    assert loaded.method.trainer_args == {"adam_beta1": 0.8}


def test_a_lone_word_over_a_section_sets_its_short_key_and_keeps_the_rest(recipe) -> None:
    text = (
        "model: {path: pico, dtype: float32}\n"
        "data: {train: {path: x.jsonl, split: test}}\n"
        "adapter: {type: lora, rank: 4}\n"
    )
    loaded, notes = recipe(text, "model=other", "data.train=y.jsonl", "adapter=qlora")
    assert (loaded.model.path, loaded.model.dtype) == ("other", "float32")
    assert loaded.data.train == DataSource(path="y.jsonl", split="test")
    assert loaded.adapter == QloraAdapter(rank=4)
    assert notes == []


def test_a_mapping_over_a_section_replaces_it(recipe) -> None:
    assert recipe(LORA, "adapter={type: lora, alpha: 8}")[0].adapter == LoraAdapter(alpha=8)


def test_an_override_below_a_section_that_the_file_leaves_out_starts_from_its_default(recipe) -> None:
    assert recipe(PLAIN, "adapter.rank=8")[0].adapter == LoraAdapter(rank=8)
    assert recipe(PLAIN, "data.eval=y.jsonl", "data.eval.split=test")[0].data.eval == DataSource(
        path="y.jsonl", split="test"
    )


@pytest.mark.parametrize("override", ["adapter.type=full", "adapter=full"])
def test_what_only_the_files_adapter_has_is_left_out_and_said(recipe, override: str) -> None:
    loaded, notes = recipe(LORA, override)
    assert loaded.adapter == FullAdapter()
    assert notes == [
        "adapter.rank=16 ignored: adapter.type=full has no 'rank'",
        "adapter.target_modules=[q_proj, v_proj] ignored: adapter.type=full has no 'target_modules'",
    ]


def test_what_the_new_adapter_has_too_is_kept(recipe) -> None:
    loaded, notes = recipe(QLORA, "adapter.type=lora", "adapter.alpha=8")
    assert loaded.adapter == LoraAdapter(rank=16, alpha=8)
    assert notes == ["adapter.quant_type=fp4 ignored: adapter.type=lora has no 'quant_type'"]


def test_back_to_the_default_adapter_is_a_change_of_adapter_too(recipe) -> None:
    loaded, notes = recipe(QLORA, "adapter.type=null")
    assert loaded.adapter == LoraAdapter(rank=16)
    assert notes == ["adapter.quant_type=fp4 ignored: adapter.type=lora has no 'quant_type'"]


@pytest.mark.parametrize(
    ("text", "override", "note"),
    [
        ("num_epochs: 2", "max_steps=5", "train.num_epochs=2 ignored: train.max_steps=5 replaces it"),
        ("max_steps: 5", "num_epochs=0.5", "train.max_steps=5 ignored: train.num_epochs=0.5 replaces it"),
    ],
)
def test_the_files_length_of_training_gives_way_and_that_is_said(recipe, text: str, override: str, note: str) -> None:
    loaded, notes = recipe(PLAIN + f"train: {{{text}}}\n", f"train.{override}")
    assert notes == [note]
    assert (loaded.train.num_epochs is None) != (loaded.train.max_steps is None)


def test_taking_away_one_length_leaves_the_other(recipe) -> None:
    loaded, notes = recipe(PLAIN + "train: {num_epochs: 2}\n", "train.max_steps=null")
    assert (loaded.train.num_epochs, notes) == (2, [])


def test_a_list_takes_the_place_of_a_source_and_a_source_that_of_a_list(recipe) -> None:
    text = "model: pico\ndata: {train: {path: x.jsonl, split: test}}\n"
    sources, notes = recipe(text, "data.train=[a.jsonl, {path: b.jsonl, split: test}]")
    assert sources.data.train == [DataSource(path="a.jsonl"), DataSource(path="b.jsonl", split="test")]
    assert recipe(MIXED, "data.train=x.jsonl")[0].data.train == DataSource(path="x.jsonl")
    assert notes == []


def test_a_position_reaches_an_item(recipe) -> None:
    loaded, notes = recipe(MIXED, "data.train[0].weight=2", "data.train[1]=c.jsonl", "data.train[1].columns.prompt=q")
    first, second = loaded.data.train
    assert first == DataSource(path="a.jsonl", weight=2)
    assert second == DataSource(path="c.jsonl", format="alpaca", weight=1, columns={"prompt": "q"})
    assert notes == []


def test_a_later_override_reaches_into_the_list_of_an_earlier_one(recipe) -> None:
    loaded, _ = recipe(PLAIN, "data.eval=[a.jsonl, b.jsonl]", "data.eval[1].split=test", "data.eval[0]={path: c.jsonl}")
    assert loaded.data.eval == [DataSource(path="c.jsonl"), DataSource(path="b.jsonl", split="test")]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("data.train=x.jsonl", "data.train is a single source"),
        ("data.train=[x.jsonl]", "data.train is a single source"),
        ("data.train=[x.jsonl, y.jsonl]", "data.train has no weights"),
    ],
)
def test_how_the_file_mixes_is_left_out_where_nothing_is_left_to_mix(recipe, override: str, why: str) -> None:
    loaded, notes = recipe(MIXED + "  weight_by: tokens\n  stopping_strategy: first_exhausted\n", override)
    assert notes == [f"data.weight_by=tokens ignored: {why}"]
    assert loaded.data.weight_by == "rows"


def test_how_to_mix_stays_where_the_new_list_has_weights(recipe) -> None:
    new = "data.train=[{path: x.jsonl, weight: 1}, {path: y.jsonl, weight: 2}]"
    loaded, notes = recipe(MIXED + "  weight_by: tokens\n", new)
    assert (loaded.data.weight_by, notes) == ("tokens", [])


def test_variables_are_filled_in_overrides_of_paths(recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    assert recipe(PLAIN, "data.train=${DATA}/x.jsonl")[0].data.train.path == "/data/x.jsonl"
    loaded, _ = recipe(PLAIN, "data.train=['${DATA}/a', b]", "data.train[1]=${DATA}/c")
    assert [source.path for source in loaded.data.train] == ["/data/a", "/data/c"]


def test_overrides_lie_over_recipes_and_mappings_as_over_files() -> None:
    first = load_recipe({"model": "pico", "data": {"train": "x.jsonl"}, "train": {"num_epochs": 3}}, ["adapter.rank=8"])
    second, notes = load_recipe_with_notes(first, ["train.max_steps=5", "adapter=full"])
    assert (second.train.max_steps, second.adapter) == (5, FullAdapter())
    assert notes == [
        "adapter.rank=8 ignored: adapter.type=full has no 'rank'",
        "train.num_epochs=3.0 ignored: train.max_steps=5 replaces it",
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.max_steps=5"], ["train.max_steps=5"]),
        ({"train.max_steps": 5}, ["train.max_steps=5"]),
        ({"train": {"max_steps": 5, "learning_rate": 1e-4}}, ["train.max_steps=5", "train.learning_rate=0.0001"]),
        ({"train": {}}, []),
        ({"data.train": None, "data": {"eval": None}}, ["data.train=null", "data.eval=null"]),
        ({"data": {"train": {"path": Path("x.jsonl")}}}, ["data.train.path=x.jsonl"]),
        ({"data.train[0]": {"weight": 2}}, ["data.train[0].weight=2"]),
        ({"data": {"train": [{"path": "x: y"}]}}, ["data.train=[{path: 'x: y'}]"]),
        # These have no fields of their own: they are replaced as a whole.
        ({"data": {"columns": {"prompt": "q"}}}, ["data.columns={prompt: q}"]),
        ({"method": {"trainer_args": {"a": "1"}}}, ["method.trainer_args={a: '1'}"]),
        ({"adapter.target_modules": ("q_proj", "v_proj")}, ["adapter.target_modules=[q_proj, v_proj]"]),
        ({"nothing": {"a": 1}}, ["nothing={a: 1}"]),
    ],
)
def test_overrides_by_key_are_words(overrides, words) -> None:
    assert override_words(overrides) == words


def test_overrides_by_key_change_a_recipe_as_words_do(recipe, tmp_path) -> None:
    changed, notes = recipe(LORA, "adapter.type=qlora", "adapter.rank=8", "train.max_steps=5")
    by_key = {"adapter": {"type": "qlora", "rank": 8}, "train": {"max_steps": 5}}
    assert load_recipe_with_notes(tmp_path / "recipe.yaml", by_key) == (changed, notes)


def test_a_lone_word_is_no_list_of_overrides() -> None:
    with pytest.raises(RecipeError, match=r"overrides: got a string, 'a=1'; pass a list: \['a=1'\]"):
        load_recipe("sft/quickstart", "a=1")
