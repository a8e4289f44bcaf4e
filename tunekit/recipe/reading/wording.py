"""Errors of pydantic in the user's words, with suggestions for unknown keys.

pydantic's complaints in the user's words, at the user's keys.

pydantic reports where in its own types a value failed (`adapter.lora.target_modules.list[str]`) and in terms of Python.
A recipe's author knows neither: the keys are taken back to those of the recipe, the branches of a union become one
sentence that lists what is allowed, and what was meant is suggested where it can be guessed.

Suggestions for unknown keys: near keys, keys of other sections, and the names that other tools use.

People come with habits. `lr`, `lora_r` and `per_device_train_batch_size` are right elsewhere, so they are answered
with the name that they have here rather than with "unknown key" alone.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tunekit.files import read_table
from tunekit.recipe import schema
from tunekit.recipe.reading.parse import Key, Places, Problem, dotted
from tunekit.recipe.reading.phrases import any_of, builtin_names, expected, meant, near, plain_word, show, spelling_hint
from tunekit.recipe.schema import Recipe, holders_along, sections_of, takes_list, takes_one
from tunekit.recipe.sections.section import FUNCTION_PATTERN, NAME_PATTERN, TAG, Conflicts, FunctionPath, Section
from tunekit.recipe.trainer_args import CONFIGS, config_fields, owner_hint


@cache
def familiar_names() -> dict[str, str]:
    """Names of other tools, and ours: a dotted key, or a sentence where there is no single one."""
    table = read_table(Path(__file__).parent / "familiar_names.yaml")
    return {name: ours for ours, names in table.items() for name in names}


def unknown_key(
    key: Key, sections: list[type[Section]], others: Iterable[type[Section]] = ()
) -> tuple[str, str | None]:
    """Return complaint and hint for a key that its section does not have.

    Args:
        key: The unknown key.
        sections: What its section is: one, or the variants if it is not known which.
        others: The other variants that the section could be.
    """
    name, above = str(key[-1]), key[:-1]
    with_it = [other for other in others if name in other.model_fields]
    if with_it and len(sections) == 1:
        owners = any_of([str(schema.tag_of(other)) for other in with_it])
        tag = f"{dotted(above)}.type"
        return f"{tag}={schema.tag_of(sections[0])} has no '{name}'", f"available with {tag}={owners}"
    here = [field_name for section in sections for field_name in section.model_fields]
    elsewhere = _elsewhere(name)
    if elsewhere:
        return "unknown key", f"use {any_of(elsewhere)}"
    familiar = familiar_names().get(plain_word(name))
    if familiar is not None:
        return "unknown key", familiar if " " in familiar else f"use {familiar}"
    hint = meant(name, here)
    if hint is not None:
        return "unknown key", hint
    anywhere = {str(other[-1]): dotted(other) for other in reversed(_keys())}
    likely = near(name, anywhere, cutoff=0.8)
    if likely is not None:
        return "unknown key", f"did you mean '{anywhere[likely]}'?"
    if any(name in config_fields(method) and owner_hint(method, name) is None for method in CONFIGS):
        return "unknown key", f"use method.trainer_args.{name}"
    return "unknown key", f"keys of {dotted(above) or 'a recipe'}: {', '.join(dict.fromkeys(here))}"


def _elsewhere(name: str) -> list[str]:
    """The keys of a name in all sections, less those that a section below has for itself alone: `data.train.format`."""
    keys = [other for other in _keys() if len(other) > 1 and other[-1] == name != TAG]
    always = [key for key in keys if not _goes_with_a_variant(key)] or keys
    return list(dict.fromkeys(dotted(key) for key in always if (*key[:-2], name) not in keys))


def _keys() -> list[Key]:
    return [key for key, _ in schema.all_fields()]


def _goes_with_a_variant(key: Key) -> bool:
    """Return whether only some variants of the section above have the key's section: `method.rewards.path`."""
    return len(key) > 2 and len(holders_along(key[:1])[0][0].sections) > 1


_COMPLAINTS = {
    "greater_than": "must be greater than {gt:g}, {actual}",
    "greater_than_equal": "must be at least {ge:g}, {actual}",
    "less_than": "must be less than {lt:g}, {actual}",
    "less_than_equal": "must be at most {le:g}, {actual}",
    "finite_number": "must be a finite number, {actual}",
    "too_short": "must not be an empty list",
    "string_too_short": "must not be empty",
    "string_too_long": "must be at most {max_length} characters long, got {length}",
}
"""Errors of a value, by pydantic's names for that."""

_FUNCTION = "must be module:function, such as my_module:my_function"
_MANY = 8
"""More choices than this are counted rather than listed."""


def to_problems(errors: Iterable[ErrorDetails], places: Places) -> list[Problem]:
    """Convert pydantic's errors of a recipe to problems, one a key."""
    problems: dict[Key, Problem] = {}
    for error in errors:
        key, section, field = _locate(error["loc"])
        conflicts = error.get("ctx", {}).get("error")
        if isinstance(conflicts, Conflicts):
            for conflict in conflicts.found:
                at = (*key, *conflict.key)
                problems.setdefault(at, Problem(places.of_key(at), conflict.what, at, conflict.hint))
            continue
        problems.setdefault(key, _problem(error, key, section, field, places))
    # A union complains once for each of its branches; the branch that went deepest is the one that was meant.
    return [
        bad for key, bad in problems.items() if not any(key != other and key == other[: len(key)] for other in problems)
    ]


def _locate(loc: tuple[int | str, ...]) -> tuple[Key, type[Section] | None, FieldInfo | None]:
    """The recipe's key for one of pydantic's locations, its section (None if undecided) and its field if it has one."""
    key: Key = ()
    section: type[Section] | None = Recipe
    field: FieldInfo | None = None
    parts = list(loc)
    while parts:
        part = parts.pop(0)
        if section is None:  # Inside a value: list positions are the user's, names are the branches of a union.
            key = (*key, part) if isinstance(part, int) else key
            continue
        key = (*key, part)
        field = section.model_fields.get(str(part))
        below = sections_of(field) if field is not None else []
        if parts and field is not None and takes_list(field):
            if takes_one(field):
                del parts[0]  # Whether it is one section or a list.
            if parts and isinstance(parts[0], int):
                key = (*key, parts.pop(0))
        if parts and len(below) > 1:
            section = schema.variant(below, {"type": parts.pop(0)})
        elif parts or field is None:
            section = below[0] if below else None if field is not None else section
    return key, section, field


def _problem(
    error: ErrorDetails, key: Key, section: type[Section] | None, field: FieldInfo | None, places: Places
) -> Problem:
    """One of pydantic's errors as a problem."""
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden" and section is not None:
        holders = (holders_along(key[:-1]) or [[]])[-1]
        variants = list(dict.fromkeys(kind for holder in holders for kind in holder.sections))
        others = [other for other in variants if other is not section] if section in variants else []
        what, hint = unknown_key(key, [section], others)
        return Problem(places.of_key(key), what, key, hint)
    if kind == "missing":
        names = tuple(part for part in key if isinstance(part, str))
        hint = f"`tunekit explain {dotted(names)}` documents it"
        return Problem(places.of_key(key), "missing required key", key, hint)
    if kind in ("union_tag_not_found", "union_tag_invalid") and field is not None:
        return _tag_problem(kind, value, key, field, places)
    what, hint = _complaint(kind, value, context, error["msg"], key, field)
    return Problem(places.of_value(key), what, key, hint)


def _tag_problem(kind: str, value: Any, key: Key, field: FieldInfo, places: Places) -> Problem:
    tags = [str(schema.tag_of(section)) for section in sections_of(field)]
    if kind == "union_tag_not_found" and not isinstance(value, dict):
        what, hint = _wrong_kind(value, key, field)
        return Problem(places.of_value(key), what, key, hint)
    above, key = key, (*key, "type")
    if kind == "union_tag_not_found":
        return Problem(places.of_key(key), "missing required key", key, f"set it to one of {', '.join(tags)}")
    tag = value.get("type")
    takes = f"one of {', '.join(tags)}"
    if isinstance(above[-1], int) and key not in places.values and len(value) == 1:  # A lone word.
        tags.remove("function")
        key, takes = above, f"module:function or one of {', '.join(tags)}"
    return Problem(places.of_value(key), f"must be {takes}, got {show(tag)}", key, meant(tag, tags))


def _complaint(
    kind: str, value: Any, context: dict[str, Any], message: str, key: Key, field: FieldInfo | None
) -> tuple[str, str | None]:
    """Return the problem of a value, and the hint."""
    actual = f"got {show(value)}"
    match kind:
        case _ if kind.endswith("_type") or kind in ("int_from_float", "literal_error"):
            return _wrong_kind(value, key, field)
        case _ if kind in _COMPLAINTS:
            length = len(value) if isinstance(value, str) else None
            return _COMPLAINTS[kind].format(**context, actual=actual, length=length), None
        case "string_pattern_mismatch" if context["pattern"] == NAME_PATTERN:
            return f"must consist of letters, digits, '.', '_' and '-' and start with a letter or digit, {actual}", None
        case "string_pattern_mismatch" if context["pattern"] == FUNCTION_PATTERN:
            return f"{_FUNCTION}, {actual}", None
        case "value_error":
            return str(context["error"]), None
    return f"{message[0].lower()}{message[1:]}, {actual}", None


def _wrong_kind(value: Any, key: Key, field: FieldInfo | None) -> tuple[str, str | None]:
    """Return the problem of a value of another kind than the field takes, and the hint."""
    kinds = list(schema.members(field.annotation)) if field is not None else []
    is_item = isinstance(key[-1], int)
    if is_item:  # An item of a list: judge it by what the list takes.
        items = [item for kind in kinds if get_origin(kind) is list for item in get_args(kind)]
        kinds = [member for item in items for member in schema.members(item)]
    several = field is not None and takes_list(field) and not is_item
    sections = sections_of(field) if field is not None else []
    if field is not None and several and not takes_one(field):
        return f"must be a list of sections, got {show(value)}", spelling_hint(builtin_names(kinds), value)
    if sections:
        keys = list(dict.fromkeys(name for section in sections for name in section.model_fields))
        keys_text = ", ".join(keys[:4]) + (", ..." if len(keys) > 4 else "")
        glued = re.match(r"(\w+)[ :]", value) if isinstance(value, str) else None
        hint = f"write `{glued[1]}: ...`, with ':' and a space after the key" if glued and glued[1] in keys else None
        takes = f"a section (with {keys_text})" + (" or a list of sections" if several else "")
        return f"must be {takes}, got {show(value)}", hint
    choices = [] if field is None or isinstance(key[-1], int) else schema.choices_of(field)
    takes = expected(kinds)
    if len(choices) > _MANY:
        takes = f"one of {len(choices)} names (`tunekit explain {dotted(key)}` lists them)"
        takes += " or module:function" if FunctionPath in kinds else ""
    if FunctionPath in kinds and isinstance(value, str) and ":" in value:
        return f"{_FUNCTION}, got {show(value)}", None
    hint = meant(value, choices) or spelling_hint(builtin_names(kinds), value)
    if value is None and not isinstance(key[-1], int):
        hint = "remove the key to use its default"
    return f"must be {takes}, got {show(value)}", hint
