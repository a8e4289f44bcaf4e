"""Values of a recipe as fields of a form show them, and what is meant where somebody changes a field.

A field shows text, a tick or words to choose from; what stands in it is read as the same text in the recipe's YAML
would be. A wrong value goes into the YAML as it is, so that it is told in the same words as on the command line.
"""

import json
import re
from typing import Any

import tunekit
from tunekit import frontend

Shown = str | bool | list[str]
"""Value that a field shows."""

_INT = re.compile(r"[-+]?[0-9]{1,100}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*( [\w./-]+)*")
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def shown(entry: frontend.Entry) -> Shown:
    """Return the value that the field of an entry shows; empty where the default holds."""
    value = entry.value
    if entry.kind == "bool":
        return value if isinstance(value, bool) else bool(entry.default)
    if is_choosing_several(entry):
        return (
            [] if value is frontend.UNSET else [_text(item) for item in (value if isinstance(value, list) else [value])]
        )
    if value is frontend.UNSET:
        return _text(entry.default) if entry.is_tag and entry.default is not None else ""
    if entry.kind == "list" and isinstance(value, list):
        return "\n".join(_line(item) for item in value) or "[]"
    if entry.kind == "mapping" and isinstance(value, dict):
        return "\n".join(f"{_scalar(name)}: {_scalar(item)}" for name, item in value.items())
    return _text(value)


def meant(entry: frontend.Entry, given: Shown) -> Any:
    """The value that is meant by what stands in the field of an entry; `UNSET` for its default."""
    if isinstance(given, bool):
        return frontend.UNSET if given == entry.default else given
    if isinstance(given, list):
        return given or frontend.UNSET
    if not given.strip() and (given == "" or entry.kind != "text"):
        return frontend.UNSET
    if entry.kind == "choice":
        return {"true": True, "false": False}.get(given, given) if True in entry.choices else given
    if entry.kind in ("int", "float"):
        return _number(given.strip())
    if entry.kind == "list":
        return _items(entry, given)
    if entry.kind == "mapping":
        return _mapping(given)
    return given


def is_choosing_several(entry: frontend.Entry) -> bool:
    """Return whether the field of an entry is a choice of several words."""
    return entry.kind == "list" and entry.item_kind == "choice"


def choices(entry: frontend.Entry) -> list[str]:
    """The words that the field of an entry offers, with those that stand in it and are none of them."""
    words = [_text(choice) for choice in entry.choices]
    there = shown(entry)
    extra = there if isinstance(there, list) else [there]
    return words + [str(word) for word in extra if word not in words and word != ""]


def default_text(entry: frontend.Entry) -> str:
    """An entry's default as its field would show it; empty where there is none."""
    if entry.default in (None, {}, []):
        return ""
    if isinstance(entry.default, list):
        return ", ".join(_text(item) for item in entry.default)
    return _text(entry.default)


def _text(value: Any) -> str:
    """A plain value as one writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return re.sub(r"e([-+])0+(?=[0-9])", r"e\1", repr(value)).replace("e+", "e")
    return json.dumps(value, ensure_ascii=False)


def _number(text: str) -> Any:
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _line(item: Any) -> str:
    """An item of a list as a line; in quotes where it would not be read back as itself."""
    is_plain = isinstance(item, str) and item == item.strip() and "\n" not in item and item not in ("", "[]")
    return (
        item
        if is_plain and not item.startswith('"')
        else _text(item)
        if not isinstance(item, str)
        else json.dumps(item)
    )


def _items(entry: frontend.Entry, given: str) -> Any:
    """Parse the lines of a list's field: a lone word, or an item each."""
    lines = [line.strip() for line in given.splitlines() if line.strip()]
    if lines == ["[]"]:
        return []
    if len(lines) == 1 and lines[0] in entry.choices:
        return lines[0]
    return [_number(line) if entry.item_kind in ("int", "float") else _unquoted(line) for line in lines]


def _unquoted(line: str) -> str:
    try:
        text = json.loads(line) if line.startswith('"') else line
    except json.JSONDecodeError:
        return line
    return text if isinstance(text, str) else line


def _scalar(value: Any) -> str:
    """A key or value of a mapping on its line."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return _text(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _mapping(given: str) -> Any:
    """Parse lines of `key: value`; return the text itself where they are none."""
    below = "".join(f"\n  {line}" for line in given.splitlines())
    try:
        values = frontend.read_text(f"lines:{below}\n")["lines"]
    except tunekit.TunekitError:
        return given
    return values if isinstance(values, dict) else given
