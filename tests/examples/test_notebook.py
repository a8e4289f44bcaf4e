"""The notebooks, executed as they stand."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.waiting import LIMIT_SECONDS

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def execute(name, folder):
    """A notebook, executed in a folder."""
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    NotebookClient(notebook, timeout=LIMIT_SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    return execute("quickstart.ipynb", folder), folder


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


@pytest.mark.slow
def test_a_reward_of_a_cell_trains_and_its_runs_are_compared_and_exported(tmp_path):
    notebook = execute("own_reward.ipynb", tmp_path)
    plan, comparison, metrics = (outputs(notebook, cell, "text/html") for cell in (3, 5, 7))
    assert "grpo" in plan
    assert "brief-0.001" in comparison and "train.learning_rate" in comparison and "<html" not in comparison
    assert "rewards/is_brief/mean" in metrics
    # Where ipywidgets is installed, loading the weights shows a bar besides.
    answered = "".join(output["text"] for output in notebook.cells[9].outputs if output.output_type == "stream")
    assert answered.partition(" | ")[0] == "Who are you?"
    (exported,) = (tmp_path / "runs").glob("brief-0.001-*/export/*/model.safetensors")
    assert str(exported.parent.name) in outputs(notebook, 10, "text/plain")
    for run in (tmp_path / "runs").iterdir():
        kept = "\n".join(file.read_text() for file in (run / "inputs").glob("is_brief_*.py"))
        assert "def num_words" in kept and "WORD = " in kept and "questions" not in kept
        assert len(list((run / "inputs").glob("train_dataset-*.jsonl"))) == 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
