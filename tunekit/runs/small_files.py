"""The small files of a run's folder, read with care: it may come from another machine, or be damaged.

A file is read only if it is one, up to a size, and what it holds is checked before anything relies on it.
"""

from pathlib import Path
from typing import Any

import yaml

from tunekit.errors import RunError, TunekitError
from tunekit.files import parse_json, read_regular
from tunekit.planner.plan import Plan
from tunekit.recipe.schema import Recipe

RESTORE = "put it back from a copy"


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is no file, larger than a small one is, or no UTF-8 text.
    """
    try:
        return read_regular(path).decode("utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", hint=RESTORE) from error
    except UnicodeDecodeError as error:
        raise damaged(path, error) from error


def read_object(path: Path, hint: str = RESTORE) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    content = _read_json(path, hint)
    if not isinstance(content, dict):
        raise damaged(path, f"a JSON object was expected, got {_kind(content)}", hint)
    return content


def read_list(path: Path, hint: str = RESTORE) -> list[Any]:
    """Return the JSON list of a file.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    content = _read_json(path, hint)
    if not isinstance(content, list):
        raise damaged(path, f"a JSON list was expected, got {_kind(content)}", hint)
    return content


def read_plan(path: Path, recipe: Recipe) -> Plan:
    """Return the plan of a file, with its recipe.

    Raises:
        FileNotFoundError: It is not there.
        RunError: It is damaged.
    """
    text = read_text(path)
    try:
        return Plan.from_yaml(text, recipe)
    except TunekitError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise damaged(path, error) from error


def damaged(path: Path, why: object, hint: str = RESTORE) -> RunError:
    """Return what to raise where a file is damaged."""
    words = " ".join(str(why).split())
    return RunError(f"{path} is damaged: {words[:200]}", hint=hint)


def _read_json(path: Path, hint: str) -> Any:
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise damaged(path, error, hint) from error


def _kind(value: object) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a bool"}
    return names.get(type(value), "a number")
