"""What differs from the record is shown, with the command that records it anew; and the record is of no one machine."""

import re

import pytest
import yaml

from tests.photographs.recorded import FOLDER, LOSSES, RECORDING, check_recorded, check_run_recorded
from tests.photographs.test_losses import STRATEGIES
from tests.smoke.methods import METHODS

RECORDED = sorted(path for path in FOLDER.iterdir() if path.suffix in (".txt", ".yaml"))
ADAPTERS = ("full", "lora")


@pytest.fixture(autouse=True)
def _comparing(monkeypatch):
    monkeypatch.delenv(RECORDING, raising=False)


def test_a_text_that_differs_is_shown_line_by_line():
    text = (FOLDER / "help.txt").read_text(encoding="utf-8")
    line = "Validate a recipe, its model and its data without training."
    with pytest.raises(AssertionError) as failed:
        check_recorded("help.txt", text.replace(line, "Check a recipe."))
    assert f"- check     {line}\n" in re.sub(r"^- +", "- ", str(failed.value), flags=re.MULTILINE)
    assert "+ check     Check a recipe.\n" in re.sub(r"^\+ +", "+ ", str(failed.value), flags=re.MULTILINE)
    assert str(failed.value).endswith("python -m tests.photographs.record help")


def test_a_loss_and_a_metric_that_differ_are_named():
    kept = yaml.safe_load((FOLDER / LOSSES).read_text(encoding="utf-8"))["dpo-lora"]
    names = {name: kept.pop(name) for name in ("logged", "evaluated", "events")}
    check_run_recorded("dpo-lora", kept, names, 1e-4, 1e-6)
    one, two, three = kept["loss"]
    with pytest.raises(AssertionError) as failed:
        other = {**kept, "loss": [one, two * 1.0002, three]}
        check_run_recorded("dpo-lora", other, {**names, "logged": [*names["logged"][1:], "zeal"]}, 1e-4, 1e-6)
    problems, _, how = str(failed.value).partition("\n\n")
    assert problems.splitlines() == [
        f"dpo-lora: loss, value 2: recorded {two}, now {two * 1.0002}",
        f"dpo-lora: logged: {names['logged'][0]} is gone",
        "dpo-lora: logged: zeal is new",
    ]
    assert how.endswith("python -m tests.photographs.record losses")


def test_every_method_and_layout_has_recorded_losses():
    alone = {f"{method}-{adapter}" for method in METHODS for adapter in ADAPTERS}
    divided = {f"sft-{adapter}-{strategy}" for strategy in STRATEGIES for adapter in ADAPTERS}
    assert yaml.safe_load((FOLDER / LOSSES).read_text(encoding="utf-8")).keys() == alone | divided


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_recorded_losses_of_all_layouts_are_alike(adapter):
    recorded = yaml.safe_load((FOLDER / LOSSES).read_text(encoding="utf-8"))
    first, *others = (recorded[f"sft-{adapter}-{strategy}"] for strategy in STRATEGIES)
    for other in others:
        for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
            assert other[name] == pytest.approx(first[name], rel=1e-4)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_nothing_recorded_is_of_one_machine(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.:])/(?:home|root|tmp|var|usr|work|Users)/\S*", text), "a path"
    assert not re.findall(r"\b20\d{6}-\d{6}\b|\b20\d\d-\d\d-\d\d\b", text), "a time"
    assert not re.findall(r"\d+\.\d+\.\d+\S*", text.replace("127.0.0.1", "")), "a version"
