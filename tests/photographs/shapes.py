"""Shapes of files that others read: names of keys and types of values, the same on every machine."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

NAMES = {bool: "bool", int: "int", float: "float", str: "text", type(None): "none"}
KEYED_BY = {
    "versions": "package",
    "digests": "file",
    "files": "file",
    "measures": "metric",
    "held_bytes": "part",
    "surroundings": "what",
}
"""Mappings whose keys are data, with what they are."""
WITH_GIT = {"commit": "none or text"}
"""What there is in a checkout alone."""


def shape_of(values: Iterable[Any], key: str = "") -> Any:
    """Return the shape that some values have in common: of mappings key by key, of lists by what is in them.

    Args:
        values: Plain data.
        key: The key that they stand under.
    """
    if key in WITH_GIT:
        return WITH_GIT[key]
    found = list(values)
    mappings = [value for value in found if isinstance(value, dict)]
    lists = [value for value in found if isinstance(value, list)]
    words = sorted({NAMES[type(value)] for value in found if not isinstance(value, dict | list)})
    if mappings and key in KEYED_BY:
        below = [value for mapping in mappings for value in mapping.values()]
        shapes: list[Any] = [{f"({KEYED_BY[key]})": shape_of(below)}]
    elif mappings:
        names = sorted({name for mapping in mappings for name in mapping})
        in_all = set.intersection(*(set(mapping) for mapping in mappings))
        shapes = [
            {
                f"{name}{'' if name in in_all else ' (sometimes)'}": shape_of(
                    (one[name] for one in mappings if name in one), name
                )
                for name in names
            }
        ]
    else:
        shapes = []
    if lists:
        inside = [value for one in lists for value in one]
        shapes.append([shape_of(inside)] if inside else [])
    if words:
        shapes.append(" or ".join(words))
    return shapes[0] if len(shapes) == 1 else shapes


def shape_of_events(path: Path) -> dict[str, Any]:
    """Return the shape of each kind of event of a run."""
    events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    kinds = sorted({event["event"] for event in events})
    return {kind: shape_of(event for event in events if event["event"] == kind) for kind in kinds}


def shape_of_run(folder: Path) -> dict[str, Any]:
    """Return the files of a run that is over, with their shapes."""
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    shapes: dict[str, Any] = {"files": [str(path) for path in files]}
    for path in files:
        if path.suffix == ".json" and path.parts[0] not in ("model", "checkpoints", "export"):
            shapes[str(path)] = shape_of([json.loads((folder / path).read_text(encoding="utf-8"))])
    for path in sorted(folder.glob("checkpoints/*/manifest.json"))[-1:]:
        shapes["manifest.json"] = shape_of([json.loads(path.read_text(encoding="utf-8"))])
    shapes["events.jsonl"] = shape_of_events(folder / "events.jsonl")
    for name in ("recipe.yaml", "plan.yaml"):
        shapes[name] = sorted(yaml.safe_load((folder / name).read_text(encoding="utf-8")))
    return shapes


def written(shapes: dict[str, Any]) -> str:
    """Return shapes as text, in lines that a difference shows one by one."""
    return yaml.safe_dump(shapes, sort_keys=False, width=1000)
