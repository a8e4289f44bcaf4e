"""The documentation of recipes, made from the schema: what a field takes, its default, and the string under it.

`tunekit explain` prints it; editors take the JSON schema, which also knows the short forms (`model: pico`).
"""

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from tunekit.errors import RecipeError, writing
from tunekit.recipe import schema
from tunekit.recipe.reading.parse import dotted, to_inline_yaml, undotted
from tunekit.recipe.reading.phrases import any_of, expected
from tunekit.recipe.reading.wording import unknown_key
from tunekit.recipe.schema import Holder, Recipe, all_fields, holders_along, sections_of, tag_of, takes_list, takes_one
from tunekit.recipe.sections.section import FUNCTION_PATTERN, TAG, Section, from_word
from tunekit.recipe.trainer_args import CONFIGS, check_trainer_args, config_fields, owner_hint

SCHEMA_FILE = "recipe.schema.json"
"""File with the JSON schema, besides copied recipes."""

_WIDTH = 100
_FUNCTION = "my_module:my_function"
_INDENT = "    "
_BOUNDS = {Gt: "greater than {gt}", Ge: "of at least {ge}", Lt: "less than {lt}", Le: "of at most {le}"}


@dataclass(frozen=True)
class FieldDocument:
    """Documentation of a field, in the variants of its section that agree on it."""

    key: str
    """Its dotted key."""

    facts: tuple[str, ...]
    """Values that it takes, whether it is required or its default, and the variants that have it."""

    paragraphs: tuple[str, ...]
    sections: tuple[type[Section], ...]
    """Sections that may stand in it, whose fields follow."""

    @property
    def text(self) -> str:
        """The documentation as `tunekit explain` prints it."""
        header = f"{self.key}: {'; '.join(self.facts)}"
        lines = textwrap.wrap(header, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return "\n".join([*lines, *(line for paragraph in self.paragraphs for line in _wrapped(paragraph))])


def document_fields() -> Iterator[FieldDocument]:
    """Yield the documentation of every field of recipes, those of a section behind its own."""
    yield from _below((), [Recipe])


def explain(key: str | None) -> str:
    """The documentation of a field, of a section with all its fields, or of whole recipes, as plain text.

    Args:
        key: A dotted key such as `adapter` or `adapter.rank`; None for everything.

    Raises:
        RecipeError: There is no such key.
    """
    if key is None:
        return "\n\n".join(field.text for field in document_fields())
    parts = tuple(part for part in undotted(key) or (key.strip(),) if isinstance(part, str))
    path = holders_along(parts)
    if len(path) == len(parts):
        entries = [field.text for alike in _alike(parts[-1], path[-1]) for field in _entries(parts, alike)]
        return "\n\n".join([*entries, *_in_list(parts, path)])
    if parts[:-1] == ("method", "trainer_args"):
        return _trainer_arg(parts[-1])
    name = dotted(parts[: len(path)])
    below = [section for holder in path[-1] for section in holder.sections] if path else [Recipe]
    if not below:
        raise RecipeError(f"{key}: {name} is not a section", hint=f"`tunekit explain {name}` documents it")
    what, hint = unknown_key(parts[: len(path) + 1], list(dict.fromkeys(below)))
    raise RecipeError(f"{dotted(parts[: len(path) + 1])}: {what}", hint=hint)


def _entries(key: tuple[str, ...], holders: list[Holder]) -> Iterator[FieldDocument]:
    """A key's own entry, then those of the keys below it."""
    field = holders[0].field
    below = sections_of(field)
    if key[-1] == TAG and len(holders) > 1:
        paragraphs = [f"{tag_of(holder.section)}: {holder.field.description}" for holder in holders]
    else:
        paragraphs = [field.description or ""]
    if schema.expands_env(field):
        paragraphs.append("`${NAME}` is replaced by an environment variable, a leading `~` by the home folder.")
    for short in _words(below):
        long = ", ".join(f"{name}: {value}" for name, value in (from_word(below, short) or {}).items())
        opening, right = ("", "") if takes_one(field) else ("[", "]")
        line = f"`{key[-1]}: {opening}{short}{right}` is short for `{key[-1]}: {opening}{{{long}}}{right}`."
        if takes_one(field) and takes_list(field):
            line = f"{line.removesuffix('.')}, also in a list: `{key[-1]}: [{short}, {short}]`."
        paragraphs.append(line)
    yield FieldDocument(dotted(key), tuple(_facts(key, holders)), tuple(paragraphs), tuple(below))
    yield from _below(key, below)


def _words(sections: list[type[Section]]) -> list[str]:
    """Examples of a lone word in the place of a section, one for each way in which that is read."""
    alone = {section.shorthand: section for section in reversed(sections) if _stands_alone(section)}
    names = {TAG: str(tag_of(alone[TAG])) if TAG in alone else "", "path": _FUNCTION if TAG in alone else "NAME"}
    return [names[shorthand] for shorthand in alone if shorthand is not None]


def _stands_alone(section: type[Section]) -> bool:
    """Return whether a lone word sets all that a section requires."""
    return all(name == section.shorthand or not field.is_required() for name, field in section.model_fields.items())


def _in_list(key: tuple[str, ...], path: list[list[Holder]]) -> Iterator[str]:
    """Yield spellings of the key where a section above it, or it itself, is one of a list."""
    for depth, holders in enumerate(path, start=1):
        if takes_list(holders[0].field):
            items = [dotted((*key[:depth], position, *key[depth:])) for position in (0, 1)]
            where = "Where " if takes_one(holders[0].field) else ""
            yield "\n".join(_wrapped(f"{where}`{dotted(key[:depth])}` is a list: `{items[0]}`, `{items[1]}`, ..."))


def _below(key: tuple[str, ...], sections: list[type[Section]]) -> Iterator[FieldDocument]:
    """The entries of all fields that a section has, in any of its variants; one for all that agree on a field."""
    names = dict.fromkeys(name for section in sections for name in section.model_fields)
    for name in names:
        holders = [Holder(section, section.model_fields[name]) for section in sections if name in section.model_fields]
        for alike in _alike(name, holders):
            yield from _entries((*key, name), alike)


def _alike(name: str, holders: list[Holder]) -> Iterator[list[Holder]]:
    """The variants that have a key, those together in which it takes and means the same. A tag chooses among all."""
    groups: list[list[Holder]] = []
    for holder in holders:
        group = next((group for group in groups if name == TAG or _meaning(group[0]) == _meaning(holder)), None)
        if group is None:
            groups.append([holder])
        else:
            group.append(holder)
    yield from groups


def _meaning(holder: Holder) -> tuple[Any, ...]:
    return holder.field.annotation, holder.field.description, holder.field.default


def _facts(key: tuple[str, ...], holders: list[Holder]) -> Iterator[str]:
    """Yield what a key takes, its default, and the variants that have it."""
    field = holders[0].field
    below = sections_of(field)
    sections = ["a section"] * takes_one(field) + ["a list of sections"] * takes_list(field)
    yield any_of(sections) if below else takes_words(holders)
    if field.is_required():
        yield "required"
    elif key[-1] == TAG:
        default = holders_along(key[:-1])[-1][0].field.default
        yield f"default {tag_of(type(default))}" if isinstance(default, Section) else "required"
    elif not below and field.default is not None and field.default != {}:
        yield f"default {to_inline_yaml(field.default)}"
    else:
        yield "optional"
    above = holders_along(key[:-1])
    variants = above[-1][0].sections if above else []
    owners = [str(tag_of(holder.section)) for holder in holders]
    if len(variants) > 1 and key[-1] != TAG and 0 < len(owners) < len(variants):
        yield f"with {dotted(key[:-1])}.{TAG} {' or '.join(owners)}"


def takes_words(holders: list[Holder]) -> str:
    """Describe the values that a field takes, with its bounds; the words of all variants for a tag."""
    kinds = [kind for holder in holders for kind in schema.members(holder.field.annotation) if kind is not type(None)]
    constraints = [item for item in constraints_of(holders[0].field) if type(item) in _BOUNDS]
    bounds = " and ".join(_BOUNDS[type(item)].format(**asdict(item)) for item in constraints)
    return f"{expected(list(dict.fromkeys(kinds)))} {bounds}".rstrip()


def constraints_of(field: FieldInfo) -> list[Any]:
    """The constraints of a field, those inside an optional type included."""
    inner = [
        item
        for member in get_args(field.annotation)
        if get_origin(member) is Annotated
        for info in get_args(member)[1:]
        if isinstance(info, FieldInfo)
        for item in info.metadata
    ]
    return [*field.metadata, *inner]


def _trainer_arg(name: str) -> str:
    """The documentation of one of TRL's own arguments, as far as tunekit knows it."""
    methods = [method for method in CONFIGS if name in config_fields(method)]
    free = [method for method in methods if owner_hint(method, name) is None]
    if not free:
        _, what, hint, _ = check_trainer_args((methods or [*CONFIGS])[0], {name: None})[0]
        raise RecipeError(f"method.trainer_args.{name}: {what}", hint=hint)
    configs = any_of([CONFIGS[method][2] for method in free])
    lines = _wrapped(f"A field of TRL's {configs}, passed on unchanged; see TRL's documentation.")
    return "\n".join([f"method.trainer_args.{name}: optional", *lines])


def _wrapped(text: str) -> list[str]:
    text = " ".join(text.split())
    return textwrap.wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False)


def json_schema() -> dict[str, Any]:
    """The JSON schema of recipes, draft 2020-12, short forms included."""
    document = Recipe.model_json_schema()
    definitions = document["$defs"]
    sections: list[type[Section]] = [Recipe, *(below for _, field in all_fields() for below in sections_of(field))]
    for section in sections:
        properties = document["properties"] if section is Recipe else definitions[section.__name__]["properties"]
        for name, field in section.model_fields.items():
            below = sections_of(field)
            short = _short_form(below)
            if short:
                properties[name] = _with_short_form(properties[name], short, alone=takes_one(field))
            if len(below) > 1:
                for variant in below:
                    required = [other for other in definitions[variant.__name__].get("required", []) if other != TAG]
                    definitions[variant.__name__]["required"] = [TAG, *required]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "tunekit recipe"}


def link_schema(recipe: Path) -> None:
    """Write the JSON schema to the folder of a recipe, and name it in the recipe's first line.

    YAML language servers of editors complete and check the recipe then.

    Raises:
        TunekitError: A file cannot be written.
    """
    schema = recipe.with_name(SCHEMA_FILE)
    with writing(schema):
        schema.write_text(json.dumps(json_schema()), encoding="utf-8")
    with writing(recipe):
        text = recipe.read_text(encoding="utf-8")
        recipe.write_text(f"# yaml-language-server: $schema={SCHEMA_FILE}\n{text}", encoding="utf-8")


def _short_form(sections: list[type[Section]]) -> dict[str, Any]:
    """The schema of the lone strings that stand for one of the sections; empty where there are none."""
    alone = [section for section in sections if section.shorthand is not None and _stands_alone(section)]
    names = [tag_of(section) for section in alone if section.shorthand == TAG]
    kinds: list[dict[str, Any]] = [{"type": "string", "enum": names}] if names else []
    if len(names) < len(alone):
        kinds.append({"type": "string", "pattern": FUNCTION_PATTERN} if names else {"type": "string"})
    return {"anyOf": kinds} if len(kinds) > 1 else kinds[0] if kinds else {}


def _with_short_form(document: dict[str, Any], short: dict[str, Any], *, alone: bool) -> dict[str, Any]:
    """A section's schema that also takes the lone string that stands for it: by itself, or in a list only."""
    if not alone:
        return _with_short_items(document, short)
    notes = {name: value for name, value in document.items() if name in ("description", "default", "title")}
    long = {name: value for name, value in document.items() if name not in notes}
    return {**notes, "anyOf": [_with_short_items(long, short), short]}


def _with_short_items(document: dict[str, Any], short: dict[str, Any]) -> dict[str, Any]:
    """A schema in which the items of lists may be short too."""
    changed: dict[str, Any] = {
        name: [_with_short_items(member, short) for member in document[name]]
        for name in ("anyOf", "oneOf")
        if name in document
    }
    if "items" in document:
        changed["items"] = {"anyOf": [document["items"], short]}
    return {**document, **changed}
