"""A curriculum trains as the same rows do that were sorted by hand, in the order that their file has."""

import json
import os
import random
import shutil

import pytest
import torch

from tests.rows import row_for
from tests.smoke.methods import METHODS
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tests.training.engines import made, work_in, worked
from tests.two_tokenizers import save_teachers
from tunekit.runs.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, rows of 24 lengths in disorder, and the same rows from the shortest to the longest."""
    folder = tmp_path_factory.mktemp("curriculum")
    save_tiny_model(folder / "model")
    save_teachers(folder)
    exchanges = [("count", " ".join(["one"] * num)) for num in range(1, 25)]
    save_chats(folder / "sorted.jsonl", exchanges)
    random.Random(3).shuffle(exchanges)
    save_chats(folder / "rows.jsonl", exchanges)
    return folder


def recipe_for(folder, rows, data, **parallel):
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / rows), "max_length": 128, "shuffle": False, **data},
        "adapter": "full",
        "train": {
            "global_batch_size": 4,
            "learning_rate": 1e-3,
            "max_steps": 9,
            "save_steps": 2,
            "save_total_limit": 9,
        },
        "parallel": parallel,
        "output": {"sample_prompts": [], "dir": str(folder / "runs" / os.urandom(4).hex())},
    }


def losses(run):
    return [event["loss"] for event in run.events() if event["event"] == "log"]


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture(scope="module")
def by_length(folder):
    run = Run(made(recipe_for(folder, "rows.jsonl", {"curriculum": "length"})))
    worked(run.path)
    return run


@pytest.mark.slow
def test_a_curriculum_by_length_equals_rows_sorted_by_hand_into_the_second_epoch(folder, by_length):
    by_hand = Run(made(recipe_for(folder, "sorted.jsonl", {})))
    worked(by_hand.path)
    assert losses(by_length) == losses(by_hand)
    assert_same(saved_weights(by_length.model_path), saved_weights(by_hand.model_path))
    in_disorder = Run(made(recipe_for(folder, "rows.jsonl", {})))
    worked(in_disorder.path)
    assert losses(by_length) != losses(in_disorder)


@pytest.mark.slow
def test_a_resumed_curriculum_takes_the_same_rows(by_length, tmp_path):
    shutil.copytree(by_length.path, tmp_path / "run")
    run = Run(tmp_path / "run")
    shutil.rmtree(run.model_path)
    for step in (6, 8, 9):
        shutil.rmtree(run.path / "checkpoints" / f"checkpoint-{step}", ignore_errors=True)
    run.update_status(phase="failed", exit_reason="the power is gone")
    worked(run.path)
    assert losses(run) == losses(by_length) + losses(by_length)[4:]
    assert_same(saved_weights(run.model_path), saved_weights(by_length.model_path))


@pytest.mark.slow
def test_two_processes_take_the_rows_of_one(folder, by_length):
    recipe = recipe_for(folder, "rows.jsonl", {"curriculum": "length"}, num_processes=2, strategy="ddp")
    run = Run(made(recipe))
    work_in(run.path, 2)
    torch.testing.assert_close(losses(run), losses(by_length), rtol=0, atol=1e-5)


def test_the_plan_tells_the_order(folder):
    run = Run(made(recipe_for(folder, "rows.jsonl", {"curriculum": "length"})))
    (data,) = (reason for reason in run.plan.reasons if reason.topic == "data")
    assert "shortest first in every epoch" in data.why


@pytest.fixture(scope="module")
def by_column(folder):
    run = Run(made(recipe_for(folder, save_ranked(folder, "sft").name, {"curriculum_column": "difficulty"})))
    worked(run.path)
    return run


def save_ranked(folder, method):
    """Write rows with a column of numbers in disorder, of which two are equal, and the same rows sorted by hand."""
    numbers = [random.Random(5).choice([-1.5, 2]) if n in (3, 9) else (7 * n) % 24 / 2 for n in range(24)]
    rows = [row_for(method, n) | {"difficulty": number} for n, number in enumerate(numbers)]
    for name, order in (("ranked", rows), ("by_hand", sorted(rows, key=lambda row: row["difficulty"]))):
        path = folder / f"{method}_{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in order))
    return folder / f"{method}_ranked.jsonl"


@pytest.mark.slow
def test_a_curriculum_by_a_column_equals_rows_sorted_by_hand_into_the_second_epoch(folder, by_column):
    by_hand = Run(made(recipe_for(folder, "sft_by_hand.jsonl", {})))
    worked(by_hand.path)
    assert losses(by_column) == losses(by_hand)
    assert_same(saved_weights(by_column.model_path), saved_weights(by_hand.model_path))


@pytest.mark.slow
def test_a_resumed_curriculum_by_a_column_takes_the_same_rows(by_column, tmp_path):
    test_a_resumed_curriculum_takes_the_same_rows(by_column, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "sft"])
def test_methods_train_on_rows_in_the_order_of_a_column(folder, method, monkeypatch):
    monkeypatch.chdir(folder)
    save_ranked(folder, method)
    logs = []
    for rows, data in (("ranked", {"curriculum_column": "difficulty"}), ("by_hand", {}), ("ranked", {})):
        recipe = recipe_for(folder, f"{method}_{rows}.jsonl", data)
        recipe["method"] = {"type": method, **METHODS[method]}
        recipe["train"] |= {"max_steps": 2, "save_steps": 2}
        run = Run(made(recipe))
        worked(run.path)
        logs.append([event["grad_norm"] for event in run.events() if event["event"] == "log"])
    assert logs[0] == logs[1] != logs[2]


def test_the_plan_tells_the_order_by_a_column(folder):
    save_ranked(folder, "sft")
    run = Run(made(recipe_for(folder, "sft_ranked.jsonl", {"curriculum_column": "difficulty"})))
    (data,) = (reason for reason in run.plan.reasons if reason.topic == "data")
    assert "; by difficulty, ascending, in every epoch" in data.why
