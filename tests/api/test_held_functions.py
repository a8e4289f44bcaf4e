"""Functions of a script or cell in a recipe: kept in the folder of the run, imported from there by its processes."""

import json
import os
import subprocess
import sys

import pytest

from tests.rows import save_rows
from tests.training.engines import made
from tunekit.errors import RecipeError
from tunekit.runs.run import INPUTS, Run
from tunekit.training.worker import work

SCRIPT = r"""
import json, shutil
from pathlib import Path

import tunekit

LONGEST = 20

def share(text):
    return min(len(text), LONGEST) / LONGEST

def is_long(completions, **columns):
    return [share(completion[0]["content"]) for completion in completions]

def to_prompt(row):
    return {"prompt": [{"role": "user", "content": row["question"]}]}

if __name__ == "__main__":
    rows = [{"question": f"What is {n}?"} for n in range(8)]
    recipe = {
        "model": "pico",
        "method": {"type": "grpo", "rewards": [is_long], "num_generations": 2, "max_completion_length": 8},
        "data": {"format": to_prompt},
        "train": {"max_steps": 2, "global_batch_size": 4, "save_steps": 1},
        "parallel": {"num_processes": 2},
        "output": {"sample_prompts": []},
    }
    run = tunekit.train(recipe, train_dataset=rows)
    shutil.rmtree(Path("cache") / "tunekit" / "functions")
    longer = tunekit.resume(run, ["train.max_steps=3"])
    names = sorted(file.name.rpartition("_")[0] for file in (run.path / "inputs").glob("*.py"))
    told = {"step": longer.status()["step"], "names": names, "columns": list(run.metrics().columns)}
    (run.path / "inputs" / f"{run.recipe.method.rewards[0].path.partition(':')[0]}.py").write_text("is_long = len")
    try:
        tunekit.resume(run, ["train.max_steps=4"])
    except tunekit.TunekitError as error:
        told["changed"] = str(error)
    print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_script_trains_in_two_processes_with_its_own_reward_and_row_function_and_resumes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["step"] == 3
    assert told["names"] == ["is_long", "to_prompt"]
    assert "rewards/is_long/mean" in told["columns"]
    assert "function: inputs/is_long_" in told["changed"] and "has changed" in told["changed"]


def test_a_run_imports_its_functions_from_its_own_folder(tmp_path, monkeypatch):
    """The cache is empty, as on another host; its copy says so where it is found, before anything is trained."""
    monkeypatch.chdir(tmp_path)
    function = tmp_path / "own_reward.py"
    function.write_text("def judge(completions, **columns):\n    return [1.0 for _ in completions]\n")
    recipe = {
        "model": "pico",
        "method": {"type": "grpo", "rewards": ["own_reward:judge"], "max_completion_length": 8},
        "data": {"train": str(save_rows(tmp_path / "rows.jsonl", "grpo"))},
        "train": {"max_steps": 1, "global_batch_size": 8},
    }
    run = Run(made(recipe))
    (run.path / INPUTS).mkdir(exist_ok=True)
    function.rename(run.path / INPUTS / function.name).write_text("raise LookupError('of the run')")
    monkeypatch.delitem(sys.modules, "own_reward")
    with pytest.raises(RecipeError, match="LookupError: of the run"):
        work(run)
