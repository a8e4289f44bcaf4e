"""Values, types and near words as messages show them."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from tunekit.recipe.reading.parse import plain_scalar
from tunekit.recipe.schema import members
from tunekit.recipe.sections.section import FunctionPath

KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    dict: "a mapping",
    FunctionPath: "module:function",
}
"""Types that a field takes, in words."""
_MAX_SHOWN = 60
_WHOLE_WORD = 4
"""A word of so many letters that begins a longer one is taken to mean it: `adamw` for `adamw_torch`."""

_YES = {"yes", "y", "on", "true"}
_NO = {"no", "n", "off", "false"}


def near(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, if one is like it at all; case, `-` and `_` do not count."""
    plain = {plain_word(other): other for other in known}
    longer = [plain[other] for other in plain if other.startswith(plain_word(word)) and len(word) >= _WHOLE_WORD]
    if longer:
        return longer[0]
    matches = difflib.get_close_matches(plain_word(word), list(plain), n=1, cutoff=cutoff)
    return plain[matches[0]] if matches else None


def meant(word: Any, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the hint that another word was meant; None where none is like it."""
    likely = near(word, known, cutoff=cutoff) if isinstance(word, str) else None
    return f"did you mean '{likely}'?" if likely else None


def plain_word(word: str) -> str:
    """A word as it is compared: in lower case, with `_` for `-`."""
    return word.lower().replace("-", "_")


def expected(kinds: list[Any]) -> str:
    """The types that a field takes, in words: `an integer`, `auto, true or false`."""
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    words = [show(choice) if isinstance(choice, bool) else str(choice) for choice in choices]
    if len(words) == len(kinds) and len(words) == 1:
        return words[0]
    if words and all(get_origin(kind) is Literal or kind is type(None) for kind in kinds):
        return f"one of {', '.join(words)}"
    for kind in kinds:
        if get_origin(kind) is list:
            items = expected(list(members(get_args(kind)[0])))
            words.append("a list of " + re.sub(r"^an? (\w+)$", r"\1s", items))
        elif kind is bool:
            words += ["true", "false"]
        elif kind in KINDS or get_origin(kind) in KINDS:
            words.append(KINDS[kind if kind in KINDS else get_origin(kind)])
    return any_of(words)


def any_of(words: list[str]) -> str:
    """Words as alternatives: `a, b or c`."""
    return " or ".join(", ".join(words).rsplit(", ", 1))


def spelling_hint(types: frozenset[str], value: Any) -> str | None:
    """Return the spelling of a value that was meant right but parses as another type; `types` are names of builtin
    types.
    """
    numbers = {"int", "float"} if "float" in types else types & {"int"}
    if isinstance(value, str) and "bool" in types and value.lower() in _YES | _NO:
        return f"write {'true' if value.lower() in _YES else 'false'}"
    if isinstance(value, str) and type(plain_scalar(value)).__name__ in numbers:
        return "write it without quotes"
    if isinstance(value, float) and "int" in types and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)}"
    if "str" in types and isinstance(value, bool | int | float):
        return "quote it"
    if isinstance(value, str) and "list" in types:
        return f"write [{value}]"
    return None


def show(value: Any) -> str:
    """A value as a message shows it: as in YAML, short, text in quotes."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return repr(value if len(value) <= _MAX_SHOWN else value[:_MAX_SHOWN] + "...")
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case float() if not math.isfinite(value):
            return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(value)
    return str(value) if isinstance(value, int | float) else f"a Python {type(value).__name__}"


def builtin_names(kinds: Iterable[Any]) -> frozenset[str]:
    """The names of the builtin types among those that a field takes."""
    plain = [get_origin(kind) or kind for kind in kinds]
    return frozenset(kind.__name__ for kind in plain if isinstance(kind, type))
