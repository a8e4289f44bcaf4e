"""`key=value` words from the command line, laid over a recipe's values.

A value is read by the same rules as one in the file: `train.learning_rate=1e-4` is a number,
`adapter.target_modules=[q_proj,v_proj]` a list, and `null` goes back to the default. Where an override makes something
in the file meaningless (another `adapter.type` has no rank), that is left out, and a note says so.
"""

from typing import Any

from pydantic.fields import FieldInfo

from tunekit.recipe.fields import TAG, holders_along, is_free_mapping, members, sections_of, tag_of, variant
from tunekit.recipe.parse import YAMLProblem, read_yaml
from tunekit.recipe.places import COMMAND_LINE, Key, Places, Problem, dotted
from tunekit.recipe.schema import ONE_LENGTH, Recipe, Section
from tunekit.recipe.suggest import unknown_key
from tunekit.recipe.write import to_inline_yaml


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
    if value is None and type(None) not in members(field.annotation):
        return {}
    if isinstance(value, str) and below[0].shorthand is not None:
        return {below[0].shorthand: value}
    chosen = variant(below, value)
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
        tags_before = {name: self._tag(name) for name, _ in _tagged_fields()}
        for text in texts:
            self._apply_one(text)
        self._leave_out_other_variants(tags_before)
        self._leave_out_other_length()

    def _apply_one(self, text: str) -> None:
        name, equals, written = text.partition("=")
        key: Key = tuple(part.strip() for part in name.split("."))
        if not equals or not all(key):
            self._refuse((), f"cannot read {text!r}", "write key=value, such as train.max_steps=100")
            return
        fields = self._fields_along(key)
        if not fields:
            return
        if not written.strip():
            self._refuse(key, "no value after the '='", "write null for the default, '\"\"' for an empty text")
            return
        try:
            value, _, problems = read_yaml(written, COMMAND_LINE)
        except YAMLProblem as error:
            value, problems = None, [error.problem]
        self.problems += [Problem(COMMAND_LINE, bad.what, (*key, *bad.key), bad.hint) for bad in problems]
        if not problems:
            self._put(key, value, fields)

    def _fields_along(self, key: Key) -> list[FieldInfo]:
        """The field at each part of a dotted key, in whichever variant has it; empty, and a problem, if none has.

        Shorter than the key where a free mapping such as `method.trainer_args` begins.
        """
        path = holders_along(key)
        fields = [holders[0].field for holders in path]
        if len(path) == len(key) or (path and is_free_mapping(fields[-1])):
            return fields
        sections: list[type[Section]] = path[-1][0].sections if path else [Recipe]
        if sections:
            unknown = key[: len(path) + 1]
            what, hint = unknown_key(unknown, sections)
            self._refuse(unknown, what, hint)
        else:
            plain = dotted(key[: len(path)])
            self._refuse(key, f"{plain} is a plain value", f"write {plain}=...")
        return []

    def _put(self, key: Key, value: Any, fields: list[FieldInfo]) -> None:
        """Set one key, making the sections above it where the recipe has none."""
        if len(fields) == len(key):
            below = sections_of(fields[-1])
            if isinstance(value, str) and below and below[0].shorthand is not None:
                key, fields = (*key, below[0].shorthand), [*fields, below[0].model_fields[below[0].shorthand]]
            if value is None and len(key) > 1 and key[-1] == TAG:
                value = _beginning(fields[-2]).get(TAG)
            value = _spelled_out(value, fields[-1]) if value is not None else None
        at = self.values
        for depth, part in enumerate(key[:-1], start=1):
            if at.get(str(part)) is None:
                at[str(part)] = _beginning(fields[depth - 1]) if depth <= len(fields) else {}
                self.places.keys[key[:depth]] = self.places.values[key[:depth]] = COMMAND_LINE
            if not isinstance(at[str(part)], dict):
                return  # The file has something else where a section belongs, and that is reported.
            at = at[str(part)]
        self.places.forget(key)
        self.places.keys[key] = self.places.values[key] = COMMAND_LINE
        self.commanded.add(key)
        at.pop(str(key[-1]), None)
        if value is not None:
            at[str(key[-1])] = value

    def _leave_out_other_variants(self, tags_before: dict[str, Any]) -> None:
        """Leave out what the file says for the variant that an override of the tag replaced."""
        for name, variants in _tagged_fields():
            tag = self._tag(name)
            chosen = variant(variants, {TAG: tag})
            if tag == tags_before[name] or chosen is None:
                continue
            for other in [other for other in self.values[name] if other not in chosen.model_fields]:
                if any(other in section.model_fields for section in variants):
                    self._leave_out((name, other), f"{name}.{TAG}={tag} has no '{other}'")

    def _leave_out_other_length(self) -> None:
        """Leave out the file's length of training where an override gives it in the other unit."""
        train = self.values.get("train")
        if not isinstance(train, dict):
            return
        for given, other in (ONE_LENGTH, ONE_LENGTH[::-1]):
            if ("train", given) in self.commanded and train.get(given) is not None and train.get(other) is not None:
                self._leave_out(("train", other), f"train.{given}={to_inline_yaml(train[given])} takes its place")

    def _leave_out(self, key: Key, why: str) -> None:
        """Drop a key that the file gave, with a note; one that an override gave stays, to be reported."""
        if any(other[: len(key)] == key for other in self.commanded):
            return
        section = self.values[str(key[0])]
        self.notes.append(f"{dotted(key)}={to_inline_yaml(section.pop(key[-1]))} is left out: {why}")

    def _tag(self, name: str) -> Any:
        """The tag that a section has now; None where it has none."""
        section = self.values.get(name)
        return section.get(TAG) if isinstance(section, dict) else None

    def _refuse(self, key: Key, what: str, hint: str | None) -> None:
        self.problems.append(Problem(COMMAND_LINE, what, key, hint))


def _tagged_fields() -> list[tuple[str, list[type[Section]]]]:
    """The recipe's sections of which a tag chooses the variant, with the variants."""
    all_variants = [(name, sections_of(field)) for name, field in Recipe.model_fields.items()]
    return [(name, variants) for name, variants in all_variants if len(variants) > 1]


def _beginning(field: FieldInfo) -> dict[str, Any]:
    """A section as it is before anything is set in it: empty, or of the default variant."""
    return {TAG: tag_of(type(field.default))} if len(sections_of(field)) > 1 else {}
