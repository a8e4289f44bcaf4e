"""Compare what is seen now with what was recorded, or record it, as `tests.photographs.record` asks."""

import difflib
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
RECORDING = "TUNEKIT_TEST_RECORD"
"""The environment variable that turns comparisons into recordings."""
LOSSES = "losses.yaml"


def check_recorded(name: str, seen: str) -> None:
    """Assert that a text is the recorded one.

    Args:
        name: The recorded file.
        seen: Its text now.

    Raises:
        AssertionError: They differ; the message shows where, and how to record anew.
    """
    path, seen = FOLDER / name, seen.rstrip("\n") + "\n"
    if os.environ.get(RECORDING):
        path.write_text(seen, encoding="utf-8")
        return
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = difflib.unified_diff(kept.splitlines(), seen.splitlines(), "recorded", "now", n=2, lineterm="")
    difference = "\n".join([name, *lines])
    assert kept == seen, f"{difference}\n\n{_how_to_record(name)}"


def check_run_recorded(
    key: str, numbers: dict[str, list[float]], names: dict[str, list[str]], rel: float, absolute: float
) -> None:
    """Assert that the numbers of a run are those that were recorded, and its names too.

    Args:
        key: Names the run in `losses.yaml`.
        numbers: Its numbers now, by what they are, a value for each step.
        names: Names that it uses, by what they name.
        rel: The relative difference that a number may have.
        absolute: The difference that it may have anyway.

    Raises:
        AssertionError: Some differ; the message lists them, and how to record anew.
    """
    path = FOLDER / LOSSES
    if os.environ.get(RECORDING):
        recorded = _read(path) if path.exists() else {}
        recorded[key] = {
            name: [0.0 if abs(number) < absolute else float(f"{number:.6g}") for number in values]
            for name, values in numbers.items()
        } | names
        blocks = [yaml.safe_dump({one: recorded[one]}, default_flow_style=None, width=120) for one in sorted(recorded)]
        path.write_text("".join(blocks), encoding="utf-8")
        return
    kept = _read_once(path).get(key, {})
    wrong = [
        f"{key}: {name}, value {number}: recorded {old}, now {new}"
        for name in sorted((kept.keys() | numbers.keys()) - names.keys())
        for number, (old, new) in enumerate(_beside(kept.get(name, ()), numbers.get(name, ())), start=1)
        if old is None or new is None or not abs(old - new) <= rel * abs(old) + absolute
    ]
    for name, found in names.items():
        before = set(kept.get(name, ()))
        wrong += [f"{key}: {name}: {word} is gone" for word in sorted(before - set(found))]
        wrong += [f"{key}: {name}: {word} is new" for word in sorted(set(found) - before)]
    assert not wrong, "\n".join([*wrong, "", _how_to_record(LOSSES)])


def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


_read_once = cache(_read)


def _beside(kept: Sequence[float], seen: Sequence[float]) -> list[tuple[float | None, float | None]]:
    """Return the numbers of a step beside each other, None where there is none."""
    num = max(len(kept), len(seen))
    return list(zip([*kept, *[None] * (num - len(kept))], [*seen, *[None] * (num - len(seen))], strict=True))


def _how_to_record(name: str) -> str:
    return (
        f"Where this is meant, record it anew and review the difference:\n"
        f"  python -m tests.photographs.record {Path(name).stem.partition('-')[0]}"
    )
