"""The notebook, executed as it stands."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.waiting import LIMIT_SECONDS

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    NotebookClient(notebook, timeout=LIMIT_SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook, folder


def outputs(notebook, cell, kind):
    """What a cell shows, as one string."""
    shown = [output["data"][kind] for output in notebook.cells[cell].outputs if kind in output.get("data", {})]
    return "".join(shown)


@pytest.mark.slow
def test_the_notebook_shows_plan_run_metrics_and_plot(executed):
    notebook, folder = executed
    plan, run, metrics = (outputs(notebook, cell, "text/html") for cell in (1, 3, 5))
    assert "pico" in plan and "lora" in plan and "memory" in plan
    assert "finished" in run and "before" in run
    assert "eval_loss" in metrics
    assert len(outputs(notebook, 6, "image/png")) > 10_000
    assert len(list((folder / "runs").iterdir())) == 1


@pytest.mark.slow
def test_the_notebook_learns(executed):
    _, folder = executed
    from tunekit.runs.run import Run

    run = Run(next((folder / "runs").iterdir()))
    result = run.result()
    assert result["eval_loss"] < 0.5 * result["first_eval_loss"]
    assert all(sample["before"] != sample["after"] for sample in run.samples())


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
