"""The shipped chain on pictures: each recipe starts from the result of the one before."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tunekit

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "examples" / "pico_vision" / "evaluate.py"


def test_the_three_recipes_go_on_from_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = {"train.max_steps": 1, "output.sample_prompts": [], "data.eval": None}
    sources = []
    for name, size in (("quickstart", 8), ("dpo", 4), ("grpo", 8)):
        run = tunekit.train(f"vision/{name}", {**small, "train.global_batch_size": size})
        assert run.status()["phase"] == "finished"
        origin = run.plan.origin
        sources.append(None if origin is None else origin.chain)
    first, second = "vision-quickstart (sft, full)", "vision-dpo (dpo, full)"
    chains = [source and re.sub(r"-\d{8}-\d{6}", "", source) for source in sources]
    assert chains == [None, f"pico-vision > {first}", f"pico-vision > {first} > {second}"]
    (answer,) = tunekit.generate(run, [_question()], max_new_tokens=8)
    assert answer.num_tokens > 0


def test_the_shipped_model_sees_shapes():
    """`shape` is answered rightly 98 times of 100, as its model card says."""
    command = [sys.executable, str(SCRIPT), "--problems", "40", "--seed", "1"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shares = json.loads(printed.splitlines()[-1])
    assert shares["shape"] >= 0.9 and shares["is_there"] >= 0.9
    assert shares["list"] == 0


def _question():
    from tunekit.files import find_example

    row = json.loads(find_example("shapes_prompts_eval.jsonl").read_text(encoding="utf-8").splitlines()[0])
    return row["prompt"]
