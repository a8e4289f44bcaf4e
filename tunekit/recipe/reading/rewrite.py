"""A recipe's text, changed where it has to say something else, and nowhere else: comments and order stay.

Both ways lead through values: what the text should say is worked out first, then the nodes that PyYAML finds in the
text are held against it, and the pieces that differ are written anew. The result is read again. Where it does not say
what it should (anchors and merges can be shared by what changes and what does not), the whole text is written anew.
"""

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

from tunekit.errors import RecipeError
from tunekit.recipe.entries import UNSET
from tunekit.recipe.load import asked_for, read_text
from tunekit.recipe.reading.overrides import beginning, escape_environment, spell_out
from tunekit.recipe.reading.parse import Key, dotted, node_of, to_inline_yaml, undotted
from tunekit.recipe.schema import Recipe, holders_along, is_free_mapping, sections_of, tag_of, takes_one, variant
from tunekit.recipe.sections.section import TAG, Section, from_word

_MAX_WIDTH = 100
_Edit = tuple[int, int, str]
"""Characters of the text that something else replaces: from, to (exclusive), by what."""


def edit_text(text: str, key: str, value: Any) -> str:
    """A recipe's text in which one field has another value; comments and order are kept.

    Where the field is a tag, what the new variant does not have is taken out. A section or list that holds nothing any
    more is taken out with its last field.

    Args:
        text: The YAML text; it need not be a valid recipe.
        key: The field's dotted key, as in `data.train[1].weight`. The position behind the last adds to a list.
        value: The value as plain data, right or wrong; `UNSET` takes the field out.

    Raises:
        RecipeError: The text cannot be read, or there is no such key.
    """
    values = read_text(text)
    return _rewritten(text, values, _with(values, key, value))


def _rewritten(text: str, have: dict[str, Any], want: dict[str, Any]) -> str:
    if _same(have, want):
        return text
    node = node_of(text)
    if isinstance(node, MappingNode) and not node.flow_style and want:
        edited = _Rewriting(text, node, have, want).result()
        if _reads_as(edited, want):
            return edited
    return (text if node is None else "") + _written(want)


def short_recipe(recipe: Recipe) -> str:
    """A recipe as YAML that states only what differs from the defaults; `load_recipe` reads it back to an equal one."""
    values: dict[str, Any] = escape_environment(asked_for(recipe))
    for name, section in recipe:
        if tag_of(type(section)) and type(section) is not type(Recipe.model_fields[name].default):
            values[name] = escape_environment(asked_for(section))
    return _written(values)


def _written(values: dict[str, Any]) -> str:
    """A recipe's values as text."""
    return "".join(f"{line}\n" for line in _block(_short_values(values, [Recipe]), 0))


def _same(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal in type too: 1 is not 1.0, and not true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _reads_as(text: str, values: Mapping[str, Any]) -> bool:
    try:
        return _same(read_text(text), values)
    except RecipeError:
        return False


# What the text is to say


def _with(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The values with one of them changed."""
    key = undotted(name)
    path = holders_along(key, values) if key else []
    is_free = bool(path) and is_free_mapping(path[-1][0].field)
    if not key or not path or (len(path) < len(key) and not is_free):
        raise RecipeError(f"{name}: unknown key", hint="`tunekit explain` lists them")
    changed = copy.deepcopy(values)
    if value is UNSET:
        _take_out(changed, key)
    else:
        at = _opened(changed, key)
        if isinstance(at, list):
            at[int(key[-1]) : int(key[-1]) + 1] = [value]
        else:
            at[key[-1]] = value
    if key[-1] == TAG and len(path) == len(key):
        _leave_out_other_variants(changed, key, path[-2][0].field)
    return spell_out(changed)


def _opened(values: dict[str, Any], key: Key) -> Any:
    """The section or list in which the last part of a key stands, made where it is missing."""
    at: Any = values
    for depth, part in enumerate(key[:-1]):
        kind = list if isinstance(key[depth + 1], int) else dict
        there = at[int(part)] if isinstance(at, list) and int(part) < len(at) else None
        there = at.get(part) if isinstance(at, dict) else there
        if isinstance(there, list) and kind is dict:
            name = dotted(key[: depth + 1])
            raise RecipeError(f"{name} is a list", hint=f"the first item is {name}[0]")
        if not isinstance(there, kind) or not (there or kind is list):
            # A section that stood by itself becomes the first of the list.
            there = [there] * bool(there) if kind is list else _beginning(key[: depth + 1])
            if isinstance(at, list):
                at[int(part) : int(part) + 1] = [there]
            else:
                at[part] = there
        at = there
    if isinstance(at, list) and int(key[-1]) > len(at):
        hint = f"the next item is {dotted((*key[:-1], len(at)))}"
        raise RecipeError(f"{dotted(key)}: the list has {len(at)} items", hint=hint)
    return at


def _beginning(key: Key) -> dict[str, Any]:
    """A section as it is before anything is set in it: empty, or of the default variant."""
    path = holders_along(key)
    return beginning(path[-1][0].field) if len(path) == len(key) else {}


def _take_out(values: dict[str, Any], key: Key) -> None:
    """Take a value out, and the sections that hold nothing then; not an item of a list, which the user added."""
    containers: list[Any] = [values]
    for part in key[:-1]:
        try:
            containers.append(containers[-1][part])
        except (LookupError, TypeError):
            return
    for depth in range(len(key) - 1, -1, -1):
        at, part = containers[depth], key[depth]
        if isinstance(at, list) and isinstance(part, int) and part < len(at):
            del at[part]
        elif isinstance(at, dict):
            at.pop(part, None)
        if at or depth == 0 or isinstance(key[depth - 1], int):
            break


def _leave_out_other_variants(values: dict[str, Any], key: Key, field: FieldInfo) -> None:
    """Take out of a section what its variant does not have and another one has; a tag that is gone is the default's."""
    at: Any = values
    for part in key[:-1]:
        if isinstance(at, dict) and part not in at:
            return
        at = at[part]
    if TAG not in at:
        at.update(_beginning(key[:-1]))
    variants = sections_of(field)
    chosen = variant(variants, at)
    fields = {name for section in variants for name in section.model_fields}
    for name in [name for name in at if chosen is not None and name in fields and name not in chosen.model_fields]:
        del at[name]


# How values are written


def _short_values(values: Any, sections: list[type[Section]]) -> Any:
    """The values of a section with lone words for what they are short for."""
    chosen = variant(sections, values)
    if not isinstance(values, dict) or chosen is None:
        return values
    return {
        name: _short(value, chosen.model_fields[name]) if name in chosen.model_fields else value
        for name, value in values.items()
    }


def _short(value: Any, field: FieldInfo) -> Any:
    """A field's value with lone words for what they are short for."""
    below = sections_of(field)
    if not below:
        return value
    if isinstance(value, list):
        return [_word(item, below) for item in value]
    return _word(value, below) if takes_one(field) else value


def _word(value: Any, sections: list[type[Section]]) -> Any:
    words = [word for word in value.values() if isinstance(word, str)] if isinstance(value, dict) else []
    short = next((word for word in words if from_word(sections, word) == value), None)
    return short if short is not None else _short_values(value, sections)


def _inline(value: Any) -> str:
    """A value on one line; 2e-05 as 2.0e-5, and line breaks as escapes."""
    text = to_inline_yaml(value)
    if "\n" in text:
        return json.dumps(value, ensure_ascii=False)
    return re.sub(r"(?<=[0-9]e[-+])0(?=[0-9])", "", text) if isinstance(value, float) else text


def _block(values: Mapping[str, Any], indent: int) -> list[str]:
    """The lines of a mapping: what holds sections over several lines, anything else on one."""
    lines = []
    for name, value in values.items():
        head, below = " " * indent + _inline(name) + ":", _lines_below(value, indent)
        lines += [head, *below] if below else [f"{head} {_inline(value)}"]
    return lines


def _lines_below(value: Any, indent: int) -> list[str]:
    """The lines of a value that stands below its key; none for one that stands beside it."""
    if isinstance(value, dict) and value:
        return _block(value, indent + 2)
    if isinstance(value, list) and any(isinstance(item, dict) and item for item in value):
        return [line for item in value for line in _item(item, indent + 2)]
    return []


def _item(value: Any, indent: int) -> list[str]:
    """The lines of an item of a list."""
    if not isinstance(value, dict) or not value:
        return [f"{' ' * indent}- {_inline(value)}"]
    first, *remainder = _block(value, indent + 2)
    return [f"{' ' * indent}- {first.strip()}", *remainder]


# Where the text differs


class _Rewriting:
    """One text being held against what it is to say: the edits that it takes."""

    def __init__(self, text: str, root: MappingNode, have: dict[str, Any], want: dict[str, Any]) -> None:
        self.text = text
        self.edits: list[_Edit] = []
        self.mapping(root, have, want, [Recipe], ())

    def result(self) -> str:
        """The text with all edits made."""
        text = self.text
        for start, end, new in sorted(self.edits, reverse=True):
            text = text[:start] + new + text[end:]
        return text

    def mapping(
        self, node: MappingNode, have: Any, want: dict[str, Any], sections: list[type[Section]], key: Key
    ) -> None:
        """Make a mapping over several lines say what it should."""
        pairs = {str(name.value): (name, value) for name, value in node.value}
        short = _short_values(want, sections)
        chosen = variant(sections, want)
        retained = [name for name in pairs if name in want]
        for name, (name_node, value_node) in pairs.items():
            if name not in want:
                following = [other for other, _ in node.value if other.start_mark.index > name_node.start_mark.index]
                self.remove(name_node, value_node, following)
            elif not _same(have[name], want[name]):
                field = chosen.model_fields.get(name) if chosen is not None else None
                self.pair(name_node, value_node, have[name], want[name], short[name], field, (*key, name))
        order = list(chosen.model_fields) if chosen is not None else []
        added: dict[str, list[str]] = {}
        for name in [name for name in want if name not in pairs]:
            before = order[: order.index(name)] if name in order else retained
            anchor = next((other for other in reversed(before) if other in retained), None)
            added.setdefault(anchor or retained[0 if name in order else -1], []).append(name)
        for anchor, names in added.items():
            end = self.line_end(self.end(pairs[anchor][1]))
            values = {name: short[name] for name in sorted(names, key=(order or names).index)}
            gap = "\n" if not key and self.has_gaps(node) else ""
            lines = _block(values, node.start_mark.column)
            new = "".join(f"\n{line}" if line.startswith(" ") else f"\n{gap}{line}" for line in lines)
            self.edits.append((end, end, new))

    def pair(self, name: Node, node: Node, have: Any, want: Any, short: Any, field: FieldInfo | None, key: Key) -> None:
        """Make one key's value what it should be: within, where it is a section over several lines, or as a whole."""
        below = sections_of(field) if field is not None else []
        if self.goes_within(node, have, want):
            if isinstance(node, MappingNode):
                self.mapping(node, have, want, below, key)
            elif isinstance(node, SequenceNode):
                self.sequence(node, have, want, short, below, key)
            return
        start, end = node.start_mark.index, self.end(node)
        colon = self.text.index(":", name.end_mark.index) + 1
        on_line = self.line_end(colon) >= end
        lines = _lines_below(short, name.start_mark.column)
        inline = _inline(short)
        is_flow = isinstance(node, CollectionNode) and node.flow_style and len(inline) < _MAX_WIDTH
        is_flow = is_flow and not (isinstance(short, list) and lines)
        if on_line and (not lines or is_flow):
            self.edits.append((start, end, inline) if end > start else (colon, colon, f" {inline}"))
        elif on_line:
            self.edits += [(colon, end, ""), (self.line_end(end), self.line_end(end), "".join(f"\n{x}" for x in lines))]
        else:
            comment = self.text[colon : self.line_end(colon)] if start > self.line_end(colon) else ""
            head = comment if lines else f" {inline}{comment}"
            self.edits.append((colon, self.line_end(end), head + "".join(f"\n{line}" for line in lines)))

    def sequence(
        self, node: SequenceNode, have: list[Any], want: list[Any], short: Any, below: list[type[Section]], key: Key
    ) -> None:
        """Make a list over several lines hold what it should: items that stay are left alone."""
        shorter = min(len(have), len(want))
        first = next((n for n in range(shorter) if not _same(have[n], want[n])), shorter)
        last = next((n for n in range(shorter - first) if not _same(have[-1 - n], want[-1 - n])), shorter - first)
        changed = range(first, shorter - last)
        for position in changed:
            item, column = node.value[position], node.value[position].start_mark.column
            if self.goes_within(item, have[position], want[position]) and isinstance(item, MappingNode):
                self.mapping(item, have[position], want[position], below, (*key, position))
            else:
                new = "\n".join(_item(short[position], column - 2)).lstrip().removeprefix("- ")
                self.edits.append((item.start_mark.index, self.end(item), new))
        for item in node.value[shorter - last : len(have) - last]:
            self.remove(item, item, [])
        new_items = short[shorter - last : len(want) - last]
        if new_items:
            end = self.line_end(self.end(node.value[max(shorter - last - 1, 0)]))
            lines = [line for item in new_items for line in _item(item, node.start_mark.column)]
            self.edits.append((end, end, "".join(f"\n{line}" for line in lines)))

    def goes_within(self, node: Node, have: Any, want: Any) -> bool:
        """Return whether a value changes piece by piece: a block before and after, with something in common."""
        if not isinstance(node, CollectionNode) or node.flow_style or not want:
            return False
        if isinstance(node, MappingNode):
            written = [str(name.value) for name, _ in node.value]
            return isinstance(have, dict) and isinstance(want, dict) and any(name in want for name in written)
        return isinstance(have, list) and isinstance(want, list)

    def remove(self, first: Node, last: Node, following: list[Node]) -> None:
        """Take out the lines of a key or an item; of one that shares its line with a dash, up to the next key."""
        start, end = first.start_mark.index, self.end(last)
        begin = self.text.rfind("\n", 0, start) + 1
        if first is not last and self.text[begin:start].strip() and following:
            self.edits.append((start, following[0].start_mark.index, ""))
            return
        end = min(self.line_end(end) + 1, len(self.text))
        if (not begin or self.text[:begin].endswith("\n\n")) and self.text[end:].startswith("\n"):
            end += 1
        self.edits.append((begin, end, ""))

    def end(self, node: Node) -> int:
        """Return the end of a node's text, without the comments and line breaks behind it."""
        if isinstance(node, ScalarNode):
            end: int = node.end_mark.index
            return len(self.text[:end].rstrip()) if node.style in ("|", ">") else end
        if not isinstance(node, CollectionNode) or node.flow_style or not node.value:
            return int(node.end_mark.index)
        last = node.value[-1]
        return self.end(last[1] if isinstance(node, MappingNode) else last)

    def line_end(self, index: int) -> int:
        """Return the end of a character's line, before its line break."""
        end = self.text.find("\n", index)
        return len(self.text) if end < 0 else end

    def has_gaps(self, node: MappingNode) -> bool:
        """Return whether empty lines separate the keys of a mapping."""
        between = self.text[node.start_mark.index : self.end(node)]
        return re.search(r"\n[ \t]*\n", between) is not None
