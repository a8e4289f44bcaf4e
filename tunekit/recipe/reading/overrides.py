"""Overrides from the command line, and environment variables in a recipe.

`key=value` words from the command line, laid over a recipe's values.

A value is read by the same rules as one in the file: `train.learning_rate=1e-4` is a number,
`adapter.target_modules=[q_proj,v_proj]` a list, and `null` goes back to the default. `data.train[0].weight=2` reaches
into a list of sections. Where an override makes something in the file meaningless (another `adapter.type` has no
rank), that is left out, and a note says so.

`${NAME}` in a recipe: expanded in the fields that say so, refused everywhere else.

Paths differ between machines, so path fields may name environment variables and begin with `~`. Anywhere else a
`${NAME}` would silently stand for itself or for who knows what, so it is refused; `$${` is a literal `${`.
"""

import os
import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from tunekit.recipe import schema
from tunekit.recipe.reading import parse
from tunekit.recipe.reading.input_paths import takes_path
from tunekit.recipe.reading.parse import COMMAND_LINE, Key, Places, Problem, YAMLProblem, dotted
from tunekit.recipe.reading.wording import unknown_key
from tunekit.recipe.schema import Recipe, holders_along, sections_of, takes_list, takes_one
from tunekit.recipe.sections.data import NEED_SEVERAL, NEED_WEIGHTS, DataSection
from tunekit.recipe.sections.section import ONE_LENGTH, TAG, Section, from_word
from tunekit.redact import is_secret

_POSITION = re.compile("[0-9]{1,9}")


def spell_out(values: dict[str, Any], section: type[Section] = Recipe) -> dict[str, Any]:
    """The values with each shorthand written out: `model: pico` as `model: {path: pico}`, an empty section as {}."""
    result = {}
    for name, value in values.items():
        field = section.model_fields.get(name)
        result[name] = value if field is None else _spelled_out(value, field)
    return result


def _spelled_out(value: Any, field: FieldInfo) -> Any:
    below = sections_of(field)
    if not below:
        return value
    if value is None and takes_one(field) and type(None) not in schema.members(field.annotation):
        return {}
    if isinstance(value, list) and takes_list(field):
        return [item if item is None else _spelled_section(item, below) for item in value]
    return _spelled_section(value, below) if takes_one(field) else value


def _spelled_section(value: Any, below: list[type[Section]]) -> Any:
    if isinstance(value, str):
        return from_word(below, value) or value
    chosen = schema.variant(below, value)
    return spell_out(value, chosen) if isinstance(value, dict) and chosen is not None else value


class Overrides:
    """Overrides being laid over a recipe: what they set, what they left out, and what is wrong with them."""

    def __init__(self, values: dict[str, Any], places: Places) -> None:
        """Begin with a recipe's values, shorthand written out, and their places. Both are changed in place."""
        self.values = values
        self.places = places
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.commanded: set[Key] = set()

    def apply(self, texts: list[str]) -> None:
        """Lay `key=value` words over the values, the later over the earlier."""
        tags_before = {name: self._value((name, TAG)) for name, _ in _tagged_fields()}
        for text in texts:
            self._apply_one(text)
        self._leave_out_other_variants(tags_before)
        self._leave_out_other_length()
        self._leave_out_mixing()

    def _apply_one(self, text: str) -> None:
        name, equals, written = text.partition("=")
        key = parse.undotted(name)
        if not equals or key is None:
            example = "data.train[0].weight=2" if "[" in name else "train.max_steps=100"
            self._refuse((), f"cannot read {text!r}", f"write key=value, such as {example}")
            return
        fields = self._fields_along(key)
        if not fields or not self._fits_lists(key, fields):
            return
        if not written.strip():
            self._refuse(key, "no value after '='", "write null for the default, '\"\"' for an empty string")
            return
        try:
            value, _, problems = parse.read_yaml(written, COMMAND_LINE)
        except YAMLProblem as error:
            value, problems = None, [error.problem]
        self.problems += [Problem(COMMAND_LINE, bad.what, (*key, *bad.key), bad.hint) for bad in problems]
        if not problems:
            self._put(key, value, fields)

    def _fields_along(self, key: Key) -> list[FieldInfo]:
        """The field at each part of a dotted key, in whichever variant has it; empty, and a problem, if none has.

        Shorter than the key where a free mapping such as `method.trainer_args` begins.
        """
        path = holders_along(key, self.values)
        fields = [holders[0].field for holders in path]
        beyond = key[len(path) :]
        is_free = bool(path) and schema.is_free_mapping(fields[-1])
        if not beyond or (is_free and not any(isinstance(part, int) for part in beyond)):
            return fields
        sections: list[type[Section]] = path[-1][0].sections if path else [Recipe]
        if is_free or isinstance(beyond[0], int):
            whole = dotted(key[: next(depth for depth, part in enumerate(key) if isinstance(part, int))])
            self._refuse(key, f"{whole} is not a list of sections", f"write {whole}=...")
        elif path and takes_list(fields[-1]) and _POSITION.fullmatch(beyond[0]):
            path_meant = (*key[: len(path)], int(beyond[0]), *beyond[1:])
            self._refuse(key, "list positions need brackets", f"write {dotted(path_meant)}=...")
        elif sections:
            unknown = key[: len(path) + 1]
            what, hint = unknown_key(unknown, sections)
            self._refuse(unknown, what, hint)
        else:
            plain = dotted(key[: len(path)])
            self._refuse(key, f"{plain} is not a section", f"write {plain}=...")
        return []

    def _fits_lists(self, key: Key, fields: list[FieldInfo]) -> bool:
        """Return whether a key has positions where the recipe has lists of sections, and only there."""
        for depth, field in enumerate(fields[: len(key) - 1], start=1):
            above, part = key[:depth], key[depth]
            if not takes_list(field) or isinstance(key[depth - 1], int):
                continue
            there, name = self._value(above), dotted(above)
            there = [] if there is None and not takes_one(field) else there
            if isinstance(part, int) and not isinstance(there, list):
                what, hint = f"{name} is not a list", f"write {dotted((*above, *key[depth + 1 :]))}=..."
            elif isinstance(part, int) and part >= len(there):
                what = f"{name} has {len(there)} item{'s' if len(there) != 1 else ''}"
                hint = f"the last item is {name}[{len(there) - 1}]" if there else f"write {name}=[...]"
            elif isinstance(there, list) and not isinstance(part, int):
                what = f"{name} is a list"
                hint = f"write {dotted((*above, 0, *key[depth:]))}=... for its first item, or replace it: {name}=..."
            else:
                continue
            self._refuse(key, what, hint)
            return False
        return True

    def _value(self, key: Key) -> Any:
        """Return the recipe's present value at a key; None where it has none."""
        at: Any = self.values
        for part in key:
            is_item = isinstance(at, list) and isinstance(part, int) and part < len(at)
            at = at[part] if is_item else at.get(part) if isinstance(at, dict) else None
        return at

    def _put(self, key: Key, value: Any, fields: list[FieldInfo]) -> None:
        """Set one key, making the sections above it where the recipe has none."""
        if len(fields) == len(key):
            below, is_item = sections_of(fields[-1]), isinstance(key[-1], int)
            word = from_word(below, value) if isinstance(value, str) and (is_item or takes_one(fields[-1])) else None
            whole = is_item and len(below) > 1  # Another variant: nothing of the item that it replaces is meant.
            if word is not None and not whole and isinstance(self._value(key), dict | None):
                ((name, value),) = word.items()
                key, fields, is_item = (*key, name), [*fields, below[0].model_fields[name]], False
            if value is None and len(key) > 1 and key[-1] == TAG:
                value = beginning(fields[-2]).get(TAG)
            if value is not None:
                value = _spelled_section(value, below) if is_item and below else _spelled_out(value, fields[-1])
        at: Any = self.values
        for depth, part in enumerate(key[:-1], start=1):
            if self._value(key[:depth]) is None:
                at[part] = beginning(fields[depth - 1]) if depth <= len(fields) else {}
                self.places.keys[key[:depth]] = self.places.values[key[:depth]] = COMMAND_LINE
            at = at[part]
            if not isinstance(at, list if isinstance(key[depth], int) else dict):
                return  # The file has something else where a section belongs, and that is reported.
        self.places.forget(key)
        self.places.keys[key] = self.places.values[key] = COMMAND_LINE
        self.commanded.add(key)
        if value is not None or isinstance(at, list):
            at[key[-1]] = value
        else:
            at.pop(key[-1], None)

    def _leave_out_other_variants(self, tags_before: dict[str, Any]) -> None:
        """Leave out what the file says for the variant that an override of the tag replaced."""
        for name, variants in _tagged_fields():
            tag = self._value((name, TAG))
            chosen = schema.variant(variants, {TAG: tag})
            if tag == tags_before[name] or chosen is None:
                continue
            for other in [other for other in self.values[name] if other not in chosen.model_fields]:
                if any(other in section.model_fields for section in variants):
                    self._leave_out((name, other), f"{name}.{TAG}={tag} has no '{other}'")

    def _leave_out_other_length(self) -> None:
        """Leave out the file's length of training where an override gives it in the other unit."""
        for first, other in (ONE_LENGTH, ONE_LENGTH[::-1]):
            length = self._value(("train", first)) if ("train", first) in self.commanded else None
            if length is not None and self._value(("train", other)) is not None:
                self._leave_out(("train", other), f"train.{first}={parse.to_inline_yaml(length)} replaces it")

    def _leave_out_mixing(self) -> None:
        """Leave out how the file mixes sources where an override of `data.train` leaves nothing to mix."""
        if ("data", "train") not in self.commanded:
            return
        train = self._value(("data", "train"))
        several = isinstance(train, list) and len(train) > 1
        weighted = several and any(isinstance(item, dict) and "weight" in item for item in train)
        unread = () if weighted else NEED_WEIGHTS if several else (*NEED_WEIGHTS, *NEED_SEVERAL)
        for name in unread:
            if self._value(("data", name)) not in (None, DataSection.model_fields[name].default):
                why = "data.train has no weights" if several else "data.train is a single source"
                self._leave_out(("data", name), why)

    def _leave_out(self, key: Key, why: str) -> None:
        """Drop a key that the file gave, with a note; one that an override gave stays, to be reported."""
        if any(other[: len(key)] == key for other in self.commanded):
            return
        section = self.values[str(key[0])]
        self.notes.append(f"{dotted(key)}={parse.to_inline_yaml(section.pop(key[-1]))} ignored: {why}")

    def _refuse(self, key: Key, what: str, hint: str | None) -> None:
        self.problems.append(Problem(COMMAND_LINE, what, key, hint))


def _tagged_fields() -> list[tuple[str, list[type[Section]]]]:
    """The recipe's sections of which a tag chooses the variant, with the variants."""
    all_variants = [(name, sections_of(field)) for name, field in Recipe.model_fields.items()]
    return [(name, variants) for name, variants in all_variants if len(variants) > 1]


def beginning(field: FieldInfo) -> dict[str, Any]:
    """A section as it is before anything is set in it: empty, or of the default variant."""
    tagged = isinstance(field.default, Section) and len(sections_of(field)) > 1
    return {TAG: schema.tag_of(type(field.default))} if tagged else {}


_REFERENCE = re.compile(r"\$\$\{|\$\{([^}]*)\}?")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
TRUSTED_HOSTS = "TUNEKIT_TRUSTED_HOSTS"
"""Variable with the hosts, by commas, that may be sent what a recipe's URL takes from the environment."""

SERVICES: dict[str, tuple[str, ...]] = {
    "HF_TOKEN": ("huggingface.co", "hf.co"),
    "HUGGING_FACE_HUB_TOKEN": ("huggingface.co", "hf.co"),
}
"""Variables of services, with the hosts that they are for."""

_HOST = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(?:[^/?#]*@)?(\[[^\]]*\]|[^/?#:@]*)")
_WHOLE = re.compile(r"\$\{[^}]*\}\Z")
_MAY_BE_SECRET = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*\Z|[^?#]*\?[^#]*\Z)")
"""What of a URL comes before its user and password, or in its query: no run writes these down."""


def expand_environment(values: dict[str, Any], places: Places) -> tuple[dict[str, Any], list[Problem]]:
    """The recipe's values with `${NAME}` and `~` replaced where they may stand, and what is wrong with the others."""
    expansion = _Expansion(values, places)
    return parse.mapped(values, expansion.value), expansion.problems


def escape_environment(value: Any) -> Any:
    """A value in which every `${` is written so that it is read as itself."""
    return parse.mapped(value, lambda item, _: item.replace("${", "$${") if isinstance(item, str) else item)


def _sent_to(text: str, name: str) -> str | None:
    """The host that a URL sends a variable to, and that is not trusted with it; None where there is none."""
    match = _HOST.match(text)
    if match is None:
        return None
    scheme, host = match[1].lower(), match[2].lower()
    if _WHOLE.match(match[2]) and not is_secret(match[2][2:-1]):
        # The user's own: the recipe does not know it.
        return None
    trusted = {trusted_host.strip().lower() for trusted_host in os.environ.get(TRUSTED_HOSTS, "").split(",")}
    of_service = scheme in ("https", "hf") and host in SERVICES.get(name, ())
    return None if host in trusted or of_service else host


class _Expansion:
    """One recipe being expanded: what was found wrong so far."""

    def __init__(self, values: dict[str, Any], places: Places) -> None:
        self.values = values
        self.places = places
        self.problems: list[Problem] = []

    def value(self, value: Any, key: Key) -> Any:
        """Expand a plain value of the recipe."""
        if not isinstance(value, str) or not ("${" in value or value.startswith("~")):
            return value
        return self.path(value, key) if takes_path(key, self.values) else self.plain(value, key)

    def path(self, text: str, key: Key) -> str:
        """A path with its variables and its home folder filled in."""
        if text == "~" or text.startswith("~/"):
            text = str(Path("~").expanduser()) + text[1:]

        def fill(reference: re.Match[str]) -> str:
            name = reference[1]
            if name is None:
                return "${"
            if not _NAME.match(name) or not reference[0].endswith("}"):
                self.refuse(
                    key, f"invalid reference {reference[0]}", "write ${NAME} with the name of an environment variable"
                )
            elif name not in os.environ:
                self.refuse(key, f"environment variable {name} is not set", f"export {name}=..., or write the path")
            elif is_secret(name) and not (key[0] == "data" and _MAY_BE_SECRET.match(text[: reference.start()])):
                self.refuse(
                    key, f"{reference[0]} looks like a secret, and runs store this value", "rename the variable"
                )
            elif key[0] == "data" and (host := _sent_to(text, name)) is not None:
                hint = f"if you trust {host}, export {TRUSTED_HOSTS}={host}; otherwise remove ${{{name}}}"
                self.refuse(key, f"{reference[0]} would be sent to {host}", hint)
            return os.environ.get(name, reference[0])

        return _REFERENCE.sub(fill, text)

    def plain(self, text: str, key: Key) -> str:
        """A text in which no variable may stand."""

        def refuse(reference: re.Match[str]) -> str:
            if reference[1] is not None:
                hint = "write the value, or $${ for a literal ${"
                self.refuse(key, f"{reference[0]} is not expanded in this field", hint)
            return "${"

        return _REFERENCE.sub(refuse, text)

    def refuse(self, key: Key, what: str, hint: str) -> None:
        self.problems.append(Problem(self.places.of_value(key), what, key, hint))
