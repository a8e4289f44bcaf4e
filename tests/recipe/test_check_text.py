"""A recipe's text in an editor: it is told what a file with that text is told, and where."""

import subprocess
import sys
from pathlib import Path

import pytest

import tunekit
from tests.recipe.test_broken_recipes import BROKEN
from tunekit.recipe.load import check_text, load_recipe

GOOD = "model: pico\ndata: {train: example:pirate.jsonl}\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", BROKEN)
def test_a_text_is_told_what_a_file_is_told(case: str) -> None:
    text, expected = BROKEN[case]
    recipe, faults = check_text(text)
    assert recipe is None
    # A file is also told whose configuration it may be.
    lines = [line for line in expected.splitlines() if not line.startswith("is this a configuration")]
    assert [f"recipe.yaml:{fault}" for fault in faults] == lines


def test_a_fault_says_where_what_and_what_to_do() -> None:
    recipe, (fault,) = tunekit.check_text(GOOD + "adapter:\n  rnak: 8\n  type: lora\n")
    assert recipe is None
    assert (fault.line, fault.column, fault.key) == (4, 3, "adapter.rnak")
    assert (fault.problem, fault.hint) == ("unknown key", "did you mean 'rank'?")


def test_a_right_text_is_the_recipe_of_the_file() -> None:
    Path("sft-pico.yaml").write_text(GOOD)
    assert tunekit.check_text(GOOD, ["adapter.rank=4"]) == (load_recipe("sft-pico.yaml", ["adapter.rank=4"]), [])


def test_an_override_is_told_as_of_the_command_line() -> None:
    _, faults = tunekit.check_text(GOOD, ["adapter.rank=0"])
    assert [str(fault) for fault in faults] == ["command line: adapter.rank: must be greater than 0, got 0"]
    assert faults[0].line == 0


def test_a_secret_is_refused_and_not_repeated() -> None:
    _, (fault,) = tunekit.check_text(
        GOOD + "method: {type: sft, trainer_args: {hub_token: hf_abcdefghijklmnopqrstu}}\n"
    )
    assert "hf_abc" not in str(fault)


def test_what_contradicts_the_world_is_told_at_its_key() -> None:
    text = "model: {path: some/model, trust_remote_code: true}\ndata: {train: a.jsonl}\n"
    _, (fault,) = tunekit.check_text(text)
    assert fault.key.startswith("model.")
    assert fault.line == 1


def test_functions_are_looked_up_only_where_that_is_asked() -> None:
    Path("rewards_of_mine.py").write_text("def score(**rows): ...\n")
    text = "model: pico\ndata: {train: a.jsonl}\nmethod: {type: grpo, rewards: [rewards_of_mine:scroe]}\n"
    _, (fault,) = tunekit.check_text(text)
    assert fault.message == "module 'rewards_of_mine' has no function 'scroe'; did you mean 'score'?"
    sys.modules.pop("rewards_of_mine")
    recipe, faults = tunekit.check_text(text, find_functions=False)
    assert recipe is not None and not faults
    assert "rewards_of_mine" not in sys.modules


def test_a_text_that_is_too_large_is_refused() -> None:
    _, (fault,) = tunekit.check_text("# x\n" * 100_000)
    assert fault.problem == "is larger than 256 KiB"


@pytest.mark.slow
def test_a_text_is_checked_without_torch() -> None:
    code = f"import sys, tunekit; assert tunekit.check_text({GOOD!r})[0]; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
