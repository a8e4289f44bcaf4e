"""Which runs the conductor of a sweep starts, with processes and runs that are only written down."""

import json
import os
from types import SimpleNamespace

import psutil
import pytest

from tunekit.recipe.load import load_recipe
from tunekit.sweeps import conduct
from tunekit.sweeps.folder import Spec, Sweep
from tunekit.sweeps.measure import Measure


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A sweep of one run, which has no folder yet."""
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe({"model": "pico", "data": {"train": "rows.jsonl"}, "adapter": "lora"})
    spec = Spec({"adapter.rank": (4,)}, "grid", 1, 0, Measure("loss", False), 1, False)
    return Sweep.create(recipe, spec, [{"adapter.rank": 4}])


def test_a_run_that_a_killed_conductor_has_just_started_is_not_started_again(sweep, monkeypatch):
    (trial,) = sweep.trials()
    folder = sweep.run_path(trial)
    words, looks, started = [f"output.dir={json.dumps(str(folder))}"], [], []

    def processes(_):
        looks.append(words)
        if len(looks) == 2:
            status = {"phase": "finished", "step": 1, "num_steps": 1, "started": 0.0, "exit_reason": "finished"}
            status |= {"pid": os.getpid(), "identity": None, "host": "here"}
            folder.mkdir(parents=True)
            (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
        return [SimpleNamespace(info={"cmdline": words})]

    monkeypatch.setattr(psutil, "process_iter", processes)
    monkeypatch.setattr(conduct, "start", lambda *args, **options: started.append(args))
    monkeypatch.setattr(conduct, "LOOK_SECONDS", 0)
    conduct.conduct(sweep, None)
    assert started == []
