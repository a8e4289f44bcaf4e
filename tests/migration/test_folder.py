"""All configurations of a folder become recipes, with one table of what became of them."""

import json
from pathlib import Path

import pytest

from tests.commands import run_command
from tunekit.errors import RecipeError
from tunekit.migration.folder import migrate_folder
from tunekit.recipe.load import load_recipe

CHAT = {"path": "chats.jsonl", "type": "chat_template"}
SAME = {"base_model": "m", "sequence_len": 64, "micro_batch_size": 1, "datasets": [CHAT]}


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {
        "a/same.yaml": SAME,
        "a/named.yml": SAME | {"chat_template": "chatml"},
        "a/different.yaml": SAME | {"special_tokens": {"cls_token": "<c>"}},
        "b/partly.json": SAME | {"qat": {"quantize_embedding": True}, "min_sample_len": 9},
        "b/none.yaml": {key: value for key, value in SAME.items() if key != "base_model"} | {"lora_r": 8},
        "b/launcher.yaml": {"compute_environment": "LOCAL_MACHINE", "num_processes": 8},
        ".git/same.yaml": SAME,
    }
    for name, values in files.items():
        path = Path("configs", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    Path("configs/b/serve.sh").write_text("vllm serve m\n")
    Path("configs/README.md").write_text("base_model: m\n")
    Path("configs/b/train.sh").write_text("trl sft --model_name_or_path m --dataset_name d --assistant_only_loss\n")


def test_each_configuration_has_an_outcome_and_other_files_are_left_aside() -> None:
    made = migrate_folder(Path("configs"))
    assert {str(result.path): result.outcome for result in made.results} == {
        "a/same.yaml": "same",
        "a/named.yml": "same",
        "a/different.yaml": "different",
        "b/partly.json": "partly",
        "b/none.yaml": "not at all",
        "b/launcher.yaml": "no configuration",
        "b/serve.sh": "no configuration",
        "b/train.sh": "same",
    }
    assert made.counts == {
        "axolotl": {"same": 2, "different": 1, "partly": 1},
        "": {"not at all": 1},
        "trl": {"same": 1},
    }
    assert sorted(made.reasons) == [
        ("axolotl", "min_sample_len", 1),
        ("axolotl", "qat.quantize_embedding", 1),
        ("axolotl", "special_tokens.cls_token", 1),
    ]


def test_a_folder_without_configurations_is_an_error() -> None:
    Path("empty").mkdir()
    with pytest.raises(RecipeError, match="empty: no configuration of a known tool in it"):
        migrate_folder(Path("empty"))


def test_the_command_shows_one_table_and_writes_all_recipes() -> None:
    answer = run_command("migrate", "configs", "-o", "recipes")
    assert answer.returncode == 0, answer.stderr
    lines = [line.split() for line in answer.stdout.splitlines()]
    assert ["b/partly.json", "Axolotl", "partly", "qat.quantize_embedding,", "min_sample_len"] in lines
    assert ["Axolotl", "4", "2", "1", "1", "0"] in lines
    assert "2 other files ignored" in answer.stdout
    assert "recipes: 5 recipes written" in answer.stdout
    assert load_recipe(Path("recipes/b/train.sh.yaml")).model.path == "m"
    assert sorted(str(path) for path in Path("recipes").rglob("*.yaml")) == [
        "recipes/a/different.yaml",
        "recipes/a/same.yaml",
        "recipes/b/partly.json.yaml",
        "recipes/b/train.sh.yaml",
    ]
    again = run_command("migrate", "configs", "-o", "recipes")
    assert (again.returncode, "'recipes' already exists" in again.stderr) == (2, True)


def test_the_command_prints_the_counts_as_json() -> None:
    report = json.loads(run_command("migrate", "configs", "--json").stdout)
    assert report["counts"]["axolotl"] == {"same": 2, "different": 1, "partly": 1}
    assert {"tool": "axolotl", "key": "min_sample_len", "files": 1} in report["reasons"]
    (refused,) = [file for file in report["files"] if file["outcome"] == "not at all"]
    assert refused["problem"].endswith("no model")


def test_a_folder_takes_no_arguments_of_a_command() -> None:
    answer = run_command("migrate", "configs", "--", "trl", "dpo")
    assert (answer.returncode, "a folder takes no further arguments" in answer.stderr) == (2, True)
