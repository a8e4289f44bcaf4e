"""Cells of the matrix of saved models against trained ones (`benchmarks/saved.py`)."""

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.saved import ENGINES, TOLERANCES, Cell, _rows, cells, loss_of_saved, measured, page, prepare
from tests.processes import in_processes

SEEDS = [
    ("single", "lora", True, "float32"),
    ("fsdp2", "vera", False, "bfloat16"),
    ("zero1", "vera", True, "bfloat16"),
    ("fsdp2", "lora, embedding", True, "bfloat16"),
    ("zero3", "full", True, "float32"),
    ("ddp", "dora", False, "bfloat16"),
    ("ddp", "adalora", True, "float32"),
    ("zero3", "miss", False, "float32"),
    ("zero1", "prompt", False, "bfloat16"),
    ("zero2", "qlora", True, "float32"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    prepare(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "adapter", "tied", "dtype"), SEEDS)
def test_the_saved_model_has_the_loss_of_the_trained_one(folder, engine, adapter, tied, dtype):
    results = dict(measured(Cell(engine, adapter, tied, resumed=False, dtype=dtype), folder))
    assert {cell.resumed: result["verdict"] for cell, result in results.items()} == {False: "same", True: "same"}, (
        results
    )


@pytest.mark.slow
def test_a_weight_that_was_saved_otherwise_is_seen(folder):
    cell = Cell("single", "lora", tied=False, resumed=False, dtype="float32")
    assert {result["verdict"] for _, result in measured(cell, folder)} == {"same"}
    run = folder / "run"
    file = run / "model" / "adapter_model.safetensors"
    rows = list(_rows(run))
    (before,) = in_processes(1, loss_of_saved, str(file.parent), rows, cell)
    weights = load_file(file)
    name = next(name for name in weights if "lora_B" in name)
    save_file({**weights, name: 1.01 * weights[name]}, file, {"format": "pt"})
    (after,) = in_processes(1, loss_of_saved, str(file.parent), rows, cell)
    assert abs(after - before) / before > TOLERANCES["float32"]


def test_all_combinations_have_a_place_on_the_page():
    every = cells()
    assert len({cell.name for cell in every}) == len(every) > 600
    results = {cell: {"verdict": "same", "detail": ""} for cell in every}
    results[every[0]] = {"verdict": "different", "detail": "1.0 trained, 2.0 saved"}
    text = page(results)
    assert text.count("=") == len(every) - 1
    assert text.count("**different**") == 1 and f"- different: {every[0].name}: 1.0 trained" in text
    assert f"| {' | '.join(ENGINES)} |" in text
