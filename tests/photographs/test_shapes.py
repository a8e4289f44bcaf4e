"""Files of runs and what commands print as JSON have the recorded shapes.

The folder of a finished run is looked at in `tests/smoke`, where one is trained.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import run_command
from tests.photographs.recorded import check_recorded
from tests.photographs.shapes import shape_of, shape_of_events, written
from tests.rows import save_rows
from tests.tiny import save_tiny_model
from tests.training.folders import made_run
from tests.training.watching import own_signals
from tunekit.errors import RunError
from tunekit.runs.record import Record
from tunekit.runs.run import set_tags
from tunekit.runs.small_files import Place, write_job

PLANS = (
    ("plan", "mine.yaml", "--on", "h100", "--json"),
    ("plan", "mine.yaml", "--on", "h100", "--on", "trn2", "--json"),
    ("plan", "mine.yaml", "--on", "h100", "--sweep", "adapter.rank=4,8", "--json"),
)


def recipe_in(folder: Path, model: str, **sections: Any) -> None:
    save_rows(folder / "rows.jsonl", "sft", 8)
    recipe = {
        "model": model,
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl", "max_length": 64},
        "train": {"max_steps": 2, "save_steps": 1, "global_batch_size": 4},
        "output": {"sample_prompts": ["double 3"], "name": "mine"},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe | sections, sort_keys=False))


def printed(folder: Path, *words: str) -> Any:
    """Return what a command prints as JSON."""
    answer = run_command(*words, cwd=folder)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def name_again(shape: Any, known: dict[str, dict[str, Any]]) -> None:
    """Write a name in the place of each mapping that has the keys of a known one."""
    for key, below in list(shape.items() if isinstance(shape, dict) else enumerate(shape)):
        if isinstance(below, dict | list):
            names = [
                name for name, mapping in known.items() if isinstance(below, dict) and below.keys() == mapping.keys()
            ]
            shape[key] = names[0] if names else below
            name_again(below, known)


def shape_in(path: Path) -> Any:
    return shape_of([json.loads(path.read_text(encoding="utf-8"))])


def test_what_is_printed_of_plans_and_small_files_of_runs_have_the_recorded_shapes(tmp_path: Path) -> None:
    recipe_in(tmp_path, "pico")
    shapes = {f"tunekit {' '.join(words)}": shape_of([printed(tmp_path, *words)]) for words in PLANS}
    first, *others = shapes.values()
    for shape in others:
        name_again(shape, {"(a plan)": first["plan"], "(a recipe)": first["recipe"]})
    run = made_run(tmp_path / "runs" / "small", phase="failed")
    write_job(run.path, "7")
    set_tags(run, ["a"])
    Record(run, Place()).write_error(RunError("it is wrong", hint="mend it"))
    for name in ("job.json", "tags.json", "errors/rank-0.json"):
        shapes[name] = shape_in(run.path / name)
    check_recorded("shapes-small.yaml", written(shapes))


@pytest.mark.slow
def test_what_comes_after_a_run_has_the_recorded_shapes(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    recipe_in(tmp_path, "model")
    with own_signals():
        trained = run_command("train", "mine.yaml", cwd=tmp_path)
        assert trained.returncode == 0, trained.stderr
        (run,) = (tmp_path / "runs").iterdir()
        shapes = {
            "tunekit export --json": shape_of([printed(tmp_path, "export", run.name, "--merged", "--json")]),
        }
        again = run_command("rerun", run.name, "--name", "again", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        evaluated = run_command("eval", run.name, "--data", "rows.jsonl", cwd=tmp_path)
        assert evaluated.returncode == 0, evaluated.stderr
        resumed = run_command("resume", run.name, "train.max_steps=3", cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
    shapes["tunekit compare --json"] = shape_of([printed(tmp_path, "compare", run.name, "again", "--json")])
    shapes["export.json"] = shape_in(run / "export" / "merged" / "export.json")
    shapes["rerun.json"] = shape_in(tmp_path / "runs" / "again" / "rerun.json")
    (evaluation,) = (run / "evaluations").glob("*.json")
    shapes["evaluations/*.json"] = shape_in(evaluation)
    shapes["files"] = sorted(path.name for path in run.iterdir() if not path.name.startswith("."))
    events = shape_of_events(run / "events.jsonl")
    shapes["events.jsonl"] = {kind: events[kind] for kind in ("resume", "sample")}
    check_recorded("shapes-after.yaml", written(shapes))
