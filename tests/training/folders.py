"""Run folders with a real plan, as they are before anything was trained."""

from pathlib import Path
from typing import Any

from tests.rows import save_rows
from tunekit.api import verbs
from tunekit.runs.run import Run


def made_run(path: Path, *, phase: str = "finished", model: str = "pico", **status: Any) -> Run:
    """A run in a folder, at a phase that it is said to be at."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = path.parent / ".rows.jsonl"
    save_rows(rows, "sft", num=8)
    recipe = {"model": model, "data": {"train": str(rows)}, "train": {"max_steps": 2}, "output": {"dir": str(path)}}
    run = Run.create(verbs.plan(recipe))
    run.update_status(phase=phase, **status)
    return run
