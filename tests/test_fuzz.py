"""Seeds of the differential fuzzer (`python -m benchmarks.fuzz`), and that it sees a fault where there is one."""

import ast
import json
from pathlib import Path

import pytest

from benchmarks.fuzz import __main__ as fuzz
from benchmarks.fuzz import encode, reference
from benchmarks.fuzz.play import played
from benchmarks.fuzz.recipes import drawn

QUICK = [30015, 30017, 30020]
"""SFT, KTO and SFT of a mixture of experts with LoRA."""

SLOW = [20001, 20004, 20007, 20008, 30005, 30013, 30022, 30025, 30029, 30037, 30038, 30041, 30042, 30046, 30049]
SLOW += [100156, 100440, 100825]
"""All methods, resumed, packed, quantized and spread over two processes; a loss that amplifies rounding."""

REFUSED = {20006: "lora_bias: unsupported by PEFT", 30034: "leaves none of 1 steps for polynomial decay"}
REFUSED[100320] = "olora: PEFT factorizes the weights of gpt2 models as they are stored"
"""Seeds whose runs died before they were refused."""


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_a_random_recipe_trains_as_plain_torch_does(seed, tmp_path):
    result = played(seed, tmp_path / "case")
    assert result.verdict == "same", result.line()


@pytest.mark.parametrize("seed", REFUSED)
def test_a_random_recipe_that_cannot_run_is_refused_in_the_plan(seed, tmp_path):
    result = played(seed, tmp_path / "case")
    assert result.verdict == "refused", result.line()
    assert REFUSED[seed] in result.detail


def test_a_seed_gives_one_recipe_and_another_seed_another():
    assert drawn(5) == drawn(5)
    assert drawn(5) != drawn(6)


@pytest.mark.parametrize("module", [encode, reference])
def test_the_reference_imports_nothing_that_it_is_to_check(module):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    assert [name for name in names if name.startswith(("tunekit", "trl", "tests", "accelerate"))] == []


def test_rows_in_another_order_are_seen(tmp_path, monkeypatch):
    from tunekit.methods.run_trainer import Order

    of_epoch = Order.of_epoch
    monkeypatch.setattr(Order, "of_epoch", lambda self, epoch: iter([*of_epoch(self, epoch)][::-1]))
    result = played(QUICK[0], tmp_path / "case")
    assert result.verdict == "different"
    assert "rows" in result.detail


@pytest.mark.slow
def test_a_token_too_many_in_the_loss_is_seen(tmp_path, monkeypatch):
    from tunekit.data.tokenization.render import ChatRenderer

    monkeypatch.setattr(ChatRenderer, "_said", lambda self, turn: turn)
    result = played(QUICK[0], tmp_path / "case")
    assert result.verdict == "different"
    assert result.detail.startswith("loss ")


def test_results_are_counted_by_what_they_are_of(tmp_path, monkeypatch):
    case = drawn(5)
    recipe = {**case.recipe, "model": {**case.recipe["model"], **case.model}, "cuts": []}
    same = {"seed": 5, "verdict": "same", "detail": "", "figures": {"loss": 2e-6}, "recipe": recipe, "seconds": 1.0}
    refused = {**same, "seed": 6, "verdict": "refused", "detail": "too long\nhint", "figures": {}}
    monkeypatch.setattr(fuzz, "RESULTS", tmp_path)
    fuzz.save([same])
    fuzz.save([refused])
    assert [case["seed"] for case in json.loads((tmp_path / "fuzz.json").read_text())["cases"]] == [5, 6]
    text = (tmp_path / "fuzz.md").read_text()
    assert "2 recipes: 1 same, 1 refused" in text
    assert "- 1: too long" in text
    assert f"| method {recipe['method']['type']} | 1 | 0 | 0 | 1 | 0 |" in text
