"""The schema as data for a form: the fields that apply to what a recipe says now, each with what it takes.

A recipe's variants decide which fields there are: `adapter.type: full` has no rank, and a list of three sources has
three paths. So the entries are those of some values, and other values may have others. What a field takes, its default
and its sentence are the schema's own.
"""

import types
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from tunekit.recipe import schema
from tunekit.recipe.explain import constraints_of, takes_words
from tunekit.recipe.reading.overrides import spell_out
from tunekit.recipe.reading.parse import Key, dotted, undotted
from tunekit.recipe.schema import Holder, Recipe, sections_of, tag_of
from tunekit.recipe.sections.section import TAG, FunctionPath, Section

Kind = Literal["bool", "int", "float", "text", "choice", "list", "mapping", "section", "sections"]
"""What a field holds: a plain value of some type, one of some words, a list or mapping of plain values, a section, or
what may be several sections."""


class _Unset:
    """The value of a field that a recipe does not give."""

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET = _Unset()
"""Stands for a field that is not given: its default holds."""


@dataclass(frozen=True)
class Entry:
    """A field of a recipe as a form needs it."""

    key: str
    """Its dotted key, with positions in lists: `data.train[1].weight`."""

    kind: Kind
    description: str
    """The schema's sentences about it."""

    takes: str
    """Values that it takes, in words: `an integer greater than 0`."""

    default: Any
    """What holds where it is not given, as plain data; None where nothing does."""

    is_required: bool
    is_tag: bool
    """Whether it chooses the variant of its section, and so which other fields there are."""

    choices: tuple[str | bool, ...] = ()
    """Words that it takes, and true and false where they stand beside words; the variants that may be listed in it."""

    is_open: bool = False
    """Whether it takes other values than its choices."""

    item_kind: Kind | None = None
    """What the items of a list are."""

    above: float | None = None
    """Bound of a number, or of the items of a list: it is greater."""

    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    num_items: int | None = None
    """Sections that stand in the field now; None where it does not take several."""

    is_list: bool = False
    """Whether sections stand in it as a list now, rather than one by itself."""

    value: Any = UNSET
    """What the recipe gives for it, which may be wrong; `UNSET` where it gives nothing."""

    @property
    def section(self) -> str:
        """The top section that it belongs to."""
        return self.key.partition(".")[0]


def recipe_entries(values: Mapping[str, Any]) -> list[Entry]:
    """The fields that apply to what a recipe says, in the order of the schema, those of a section behind its own.

    What may only have its default with the recipe's method is left out, unless the recipe gives it.

    Args:
        values: A recipe's values, right or wrong, with or without shorthand; {} for the defaults.
    """
    entries = list(_below((), Recipe, spell_out(dict(values))))
    method = next(
        str(entry.default if entry.value is UNSET else entry.value) for entry in entries if entry.key == "method.type"
    )
    return [entry for entry in entries if entry.value is not UNSET or schema.has_choice(_names(entry.key), method)]


@cache
def _names(key: str) -> tuple[str, ...]:
    """A dotted key without positions, in parts."""
    return tuple(part for part in undotted(key) or () if isinstance(part, str))


def _below(key: Key, section: type[Section], values: Any) -> Iterator[Entry]:
    """The entries of the fields that a section has."""
    mapping = values if isinstance(values, dict) else {}
    for name in section.model_fields:
        if name != TAG or tag_of(section) is None:
            yield from _of_field((*key, name), section, name, mapping.get(name, UNSET))


def _of_field(key: Key, section: type[Section], name: str, value: Any) -> Iterator[Entry]:
    """The entry of a field of a section, and those of what is below it."""
    entry = replace(_at_no_key((section,), name), key=dotted(key), value=value)
    if entry.kind not in ("section", "sections"):
        yield entry
        return
    field = section.model_fields[name]
    variants = sections_of(field)
    if entry.kind == "section":
        yield entry
        is_absent = value is UNSET and not field.is_required()
        for inner in _one(key, variants, value, field):
            # What a section requires is not required where the section itself is not there.
            yield replace(inner, is_required=False) if is_absent else inner
        return
    items = value if isinstance(value, list) else [value] if value or field.is_required() else []
    is_list = isinstance(value, list) or not schema.takes_one(field)
    words = tuple(str(tag_of(section)) for section in variants) if len(variants) > 1 else ()
    yield replace(entry, num_items=len(items), is_list=is_list, choices=words)
    for position, item in enumerate(items):
        yield from _one((*key, position) if is_list else key, variants, item, None)


def _one(key: Key, variants: list[type[Section]], value: Any, field: FieldInfo | None) -> Iterator[Entry]:
    """The entries of one section: which variant it is, and what that has."""
    if len(variants) == 1:
        yield from _below(key, variants[0], value)
        return
    default = type(field.default) if field is not None and isinstance(field.default, Section) else None
    tag = value.get(TAG, UNSET) if isinstance(value, dict) else UNSET if value is UNSET else value
    yield replace(
        _at_no_key(tuple(variants), TAG),
        key=dotted((*key, TAG)),
        value=tag,
        is_tag=True,
        default=None if default is None else tag_of(default),
        is_required=default is None,
        choices=tuple(str(tag_of(section)) for section in variants),
        description=" ".join(
            f"{tag_of(section)}: {' '.join((section.model_fields[TAG].description or '').split())}"
            for section in variants
        ),
    )
    chosen = schema.variant(variants, {TAG: tag}) if tag is not UNSET else default
    if chosen is not None:
        yield from _below(key, chosen, value)


@cache
def _at_no_key(sections: tuple[type[Section], ...], name: str) -> Entry:
    """The entry of a field, without the key and the value that a recipe gives it.

    Args:
        sections: The sections that have it: one, or all variants for their tag.
        name: Its name in them.
    """
    holders = [Holder(section, section.model_fields[name]) for section in sections]
    field = holders[0].field
    if sections_of(field):
        return _entry(holders[0], "sections" if schema.takes_list(field) else "section")
    kinds = [kind for kind in schema.members(field.annotation) if kind is not types.NoneType]
    words: tuple[str | bool, ...] = tuple(schema.choices_of(field))
    lists = [kind for kind in kinds if get_origin(kind) is list]
    kind: Kind
    if schema.is_free_mapping(field):
        kind = "mapping"
    elif lists:
        kind = "list"
        (item,) = get_args(lists[0])
        words += tuple(
            str(word) for member in schema.members(item) if get_origin(member) is Literal for word in get_args(member)
        )
        return replace(_entry(holders[0], kind), choices=words, item_kind=_kind_of(item))
    elif words:
        kind = "choice"
        words = tuple(word for one in kinds if get_origin(one) is Literal for word in get_args(one))
        words += (True, False) if bool in kinds else ()
    elif bool in kinds and types.NoneType in schema.members(field.annotation):
        kind, words = "choice", (True, False)
    else:
        kind = _kind_of(kinds[0])
    return replace(_entry(holders[0], kind), choices=words, is_open=FunctionPath in kinds, takes=takes_words(holders))


def _kind_of(annotation: Any) -> Kind:
    """Return the kind of a plain type."""
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(plain) is Literal:
        return "choice"
    kinds: dict[Any, Kind] = {bool: "bool", int: "int", float: "float"}
    return kinds.get(plain, "text")


def _entry(holder: Holder, kind: Kind) -> Entry:
    """Return what the schema says of any field."""
    field = holder.field
    bounds: dict[str, float] = {}
    for constraint in constraints_of(field):
        if isinstance(constraint, Gt | Ge | Lt | Le):
            bounds |= asdict(constraint)
    return Entry(
        key="",
        kind=kind,
        description=" ".join((field.description or "").split()),
        takes="" if sections_of(field) else takes_words([holder]),
        default=None if field.is_required() or isinstance(field.default, Section) else field.default,
        is_required=field.is_required(),
        is_tag=False,
        above=bounds.get("gt"),
        at_least=bounds.get("ge"),
        below=bounds.get("lt"),
        at_most=bounds.get("le"),
    )
