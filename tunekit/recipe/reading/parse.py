"""YAML text to plain values with their locations, and back.

YAML text -> plain values, each with its place; and plain values -> YAML text.

YAML has traps, and they are all sprung here. `1e-4` is a number and `no` is a word (the scalars of YAML 1.2, not of
1.1, which PyYAML would read as a word and as false). A key given twice is refused, and so are tags, which could run
code. Anchors, aliases and merges (`<<`) work within limits, so that a small file cannot unfold into a huge one.

PyYAML splits the text into nodes with positions; what a node means is decided here.

Plain values -> YAML text that reads back to the same values, here and in readers of YAML 1.1.

The two versions of YAML disagree about what an unquoted word means: `no` is false in one, `1e-4` a number in the
other. So a text that either of them would take for something else is written in quotes.

Locations in the user's text, and problems there.

A recipe is read into plain values; beside them, `Places` remembers for every key and value the line and column that
it came from, so that a mistake found much later can still be pointed at. All mistakes are collected as `Problem`s and
raised together, in the order of the file: a user mends them in one go.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from tunekit.errors import RecipeError
from tunekit.files import read_table
from tunekit.redact import redacted

Key = tuple[str | int, ...]
"""A path into the recipe: `("adapter", "rank")`. Numbers are positions in lists."""

_PART = re.compile(r"([^\[\]]+)((?:\[[0-9]{1,9}\])*)")
"""A name, and the positions behind it: `train[0]`."""


@dataclass(frozen=True, order=True)
class Place:
    """A position in a file, or a source without positions. Places sort in reading order."""

    rank: int
    """0 for files and mappings, 1 for what follows them, such as the command line."""

    line: int
    """From 1; 0 where the source has no lines."""

    column: int
    """From 1; 0 where the source has no lines."""

    source: str
    """The file as the user named it, `recipe` for a mapping, or `command line`."""

    def __str__(self) -> str:
        """The place as messages show it: `recipe.yaml:5:3`."""
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


COMMAND_LINE = Place(1, 0, 0, "command line")
MAPPING = Place(0, 0, 0, "recipe")


@dataclass(frozen=True)
class Problem:
    """One mistake: where, at which key, what, and what to do about it."""

    place: Place
    what: str
    key: Key = ()
    hint: str | None = None

    def __str__(self) -> str:
        """The line that the user reads."""
        where = f"{self.place}: {dotted(self.key)}" if self.key else str(self.place)
        return f"{where}: {self.what}; {self.hint}" if self.hint else f"{where}: {self.what}"


@dataclass(frozen=True)
class Fault:
    """One mistake as an editor shows it, beside its line and at its field."""

    line: int
    """From 1; 0 where it is in an override."""

    column: int
    """From 1; 0 where it is in an override."""

    key: str
    """The dotted key; empty where none is at fault, as in a text that is not YAML."""

    problem: str
    hint: str | None

    @property
    def message(self) -> str:
        """Problem, with its remedy."""
        return f"{self.problem}; {self.hint}" if self.hint else self.problem

    def __str__(self) -> str:
        """The line that the command line shows, without the file's name."""
        where = f"{self.line}:{self.column}: " if self.line else "command line: "
        return f"{where}{self.key}: {self.message}" if self.key else f"{where}{self.message}"


@dataclass
class Places:
    """The place of every key and of every value of a recipe."""

    start: Place
    """Where the recipe begins: the place of what is missing at the top."""

    keys: dict[Key, Place] = field(default_factory=dict)
    values: dict[Key, Place] = field(default_factory=dict)

    def of_key(self, key: Key) -> Place:
        """The place of a key, or of the nearest section or list item above it that was written."""
        while key:
            if key in self.keys:
                return self.keys[key]
            if isinstance(key[-1], int) and key in self.values:
                return self.values[key]
            key = key[:-1]
        return self.start

    def of_value(self, key: Key) -> Place:
        """The place of a key's value, or of the nearest value above it that was written."""
        while key:
            if key in self.values:
                return self.values[key]
            key = key[:-1]
        return self.start

    def forget(self, key: Key) -> None:
        """Drop the places of a key and of everything below it, because something else takes its place."""
        for locations in (self.keys, self.values):
            for other in [other for other in locations if other[: len(key)] == key]:
                del locations[other]


def dotted(key: Key) -> str:
    """A key as people write it: `adapter.rank`, `adapter.target_modules[1]`."""
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def undotted(text: str) -> Key | None:
    """The key that `dotted` writes so, with spaces around names allowed; None where the text is no key."""
    key: Key = ()
    for part in text.split("."):
        match = _PART.fullmatch(part.strip())
        if match is None:
            return None
        key = (*key, match[1].strip(), *(int(position) for position in re.findall("[0-9]+", match[2])))
    return key


def leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield what mappings and lists hold in the end, however deep, each with its key."""
    if isinstance(value, dict | list):
        for part, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*key, part))
    else:
        yield key, value


def mapped(value: Any, change: Callable[[Any, Key], Any], key: Key = ()) -> Any:
    """Return mappings and lists in which what they hold in the end is changed, by its value and its key."""
    if isinstance(value, dict):
        return {name: mapped(item, change, (*key, name)) for name, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change, (*key, position)) for position, item in enumerate(value)]
    return change(value, key)


def raise_problems(problems: Iterable[Problem], closing: str | None = None) -> None:
    """Raise all problems as one error, in the order of the file, the command line last.

    Args:
        problems: The problems.
        closing: A last line on all of them.

    Raises:
        RecipeError: There is at least one problem.
    """
    lines = [str(problem) for problem in sorted(problems, key=lambda problem: problem.place)]
    if lines:
        raise RecipeError(redacted("\n".join([*dict.fromkeys(lines), *([closing] if closing else [])])))


MAX_BYTES = 256 * 1024
"""Longest recipe file, in bytes. A recipe is a page; a file of this size is something else, such as data."""

MAX_KEPT_LENGTH = 16 * 1024
"""Longest text whose nodes are kept for when it is read again, in characters; they take a hundred times its room."""

MAX_VALUES = 50_000
"""Most keys and values that a recipe may have once its aliases are followed."""

MAX_DEPTH = 50
"""Deepest nesting of sections and lists."""

_PLAIN = "plain"
_QUOTED = "quoted"
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?[0-9]+\Z")
_BASED_INT = re.compile(r"0(?:o[0-7]+|x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")
_SPECIAL_FLOAT = re.compile(r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z")
_MAX_DIGITS = 100


class YAMLProblem(Exception):
    """The text cannot be read on: it carries the one problem that says why."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class _Nodes(yaml.SafeLoader):
    """PyYAML's reader up to nodes. A node's tag is `plain`, `quoted`, empty, or what the user wrote after a `!`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def resolve(self, kind: type[Node], value: Any, implicit: Any) -> str:
        """Say how a value without a tag was written; its meaning is settled later."""
        if kind is not ScalarNode:
            return ""
        return _PLAIN if implicit[0] else _QUOTED

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node, refusing to go too deep."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deep", problem_mark=self.get_mark())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Reading:
    """One text being read: what was found so far."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.places = Places(start=place)
        self.problems: list[Problem] = []
        self.num_values = 0
        self.open_nodes: set[int] = set()

    def at(self, mark: Any) -> Place:
        """The place of a PyYAML mark; that of the whole source where it has no lines."""
        return _at(self.place, mark.line, mark.column)

    def refuse(self, node: Node, what: str, key: Key, hint: str | None = None) -> None:
        self.problems.append(Problem(self.at(node.start_mark), what, key, hint))

    def value(self, node: Node, key: Key) -> Any:
        """The plain value of a node, with the places of all that is in it."""
        self.count(node)
        if id(node) in self.open_nodes:
            raise YAMLProblem(Problem(self.at(node.start_mark), "an anchor contains an alias to itself", key))
        self.places.values[key] = self.at(node.start_mark)
        if node.tag not in (_PLAIN, _QUOTED, ""):
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.refuse(node, f"tags such as {tag} are unsupported", key, "write the plain value")
            return None
        if isinstance(node, ScalarNode):
            return self.scalar(node, key)
        self.open_nodes.add(id(node))
        value = self.mapping(node, key) if isinstance(node, MappingNode) else self.sequence(node, key)
        self.open_nodes.discard(id(node))
        return value

    def count(self, node: Node) -> None:
        """Count a value that is read, and stop when aliases unfold into too many."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            what = f"more than {MAX_VALUES:,} values after expanding aliases"
            raise YAMLProblem(Problem(self.at(node.start_mark), what))

    def scalar(self, node: ScalarNode, key: Key) -> Any:
        if node.tag == _QUOTED:
            return node.value
        if len(node.value) > _MAX_DIGITS and (_INT.match(node.value) or _BASED_INT.match(node.value)):
            self.refuse(node, "the number has too many digits", key)
            return None
        return plain_scalar(node.value)

    def sequence(self, node: Node, key: Key) -> list[Any]:
        assert isinstance(node, SequenceNode)
        return [self.value(item, (*key, position)) for position, item in enumerate(node.value)]

    def mapping(self, node: MappingNode, key: Key) -> dict[str, Any]:
        """The keys of a mapping: its own, and below them those that it merges in."""
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for name_node, value_node in node.value:
            if name_node.tag == _PLAIN and name_node.value == "<<":
                for name, pair in self.merged_pairs(value_node, key).items():
                    merged.setdefault(name, pair)
                continue
            key_name = self.key_name(name_node, key)
            if key_name is None:
                continue
            if key_name in own:
                first = own[key_name][0].start_mark
                what = f"duplicate key, first at line {first.line + 1}, column {first.column + 1}"
                self.refuse(name_node, what, (*key, key_name), "keep one of them")
                continue
            own[key_name] = (name_node, value_node)
        result = {}
        for name, (name_node, value_node) in {**merged, **own}.items():
            self.places.keys[(*key, name)] = self.at(name_node.start_mark)
            result[name] = self.value(value_node, (*key, name))
        return result

    def key_name(self, node: Node, key: Key) -> str | None:
        """A key's text; None, and a problem, where it is not text."""
        if node.tag in (_PLAIN, _QUOTED) and isinstance(node, ScalarNode):
            name = node.value if node.tag == _QUOTED else plain_scalar(node.value)
            if isinstance(name, str):
                return name
            what = f"a key must be a string, got {node.value or 'nothing'}"
            hint = "quote it" if node.value else "write the key before ':'"
        else:
            what, hint = "a key must be a string, got a mapping, a list or a tag", "write a plain name before ':'"
        self.refuse(node, what, key, hint)
        return None

    def merged_pairs(self, node: Node, key: Key) -> dict[str, tuple[Node, Node]]:
        """Return the pairs that `<<: *anchor` or `<<: [*one, *other]` merge; the earlier of two wins."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        pairs: dict[str, tuple[Node, Node]] = {}
        for source in sources:
            if not isinstance(source, MappingNode):
                hint = "write `<<: *name`, with &name on a mapping"
                self.refuse(source, "'<<' merges only mappings", key, hint)
                continue
            if id(source) in self.open_nodes:
                raise YAMLProblem(Problem(self.at(source.start_mark), "an anchor contains an alias to itself", key))
            self.open_nodes.add(id(source))
            for name_node, value_node in source.value:
                self.count(name_node)
                if name_node.tag == _PLAIN and name_node.value == "<<":
                    for name, pair in self.merged_pairs(value_node, key).items():
                        pairs.setdefault(name, pair)
                    continue
                key_name = self.key_name(name_node, key)
                if key_name is not None:
                    pairs.setdefault(key_name, (name_node, value_node))
            self.open_nodes.discard(id(source))
        return pairs


def read_yaml(text: str, place: Place) -> tuple[Any, Places, list[Problem]]:
    """The plain value of a YAML text with the places of its parts, and what is wrong with it.

    Args:
        text: The text, without a byte-order mark.
        place: Where it begins. Positions count from there; a place without lines stands for the whole text.

    Raises:
        YAMLProblem: The text is not YAML, holds several documents, or unfolds into too much.
    """
    reading = _Reading(place)
    try:
        node = _kept_node_of(text) if len(text) <= MAX_KEPT_LENGTH else node_of(text)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        at = _at(place, before.count("\n"), len(before) - before.rfind("\n") - 1)
        what = f"character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise YAMLProblem(Problem(at, what, hint="remove it")) from error
    except yaml.MarkedYAMLError as error:
        raise YAMLProblem(_syntax_problem(error, place)) from error
    return (None if node is None else reading.value(node, ())), reading.places, reading.problems


@lru_cache(maxsize=4)
def _kept_node_of(text: str) -> Node | None:
    """The root of a YAML text, which is kept: a run's recipe is read many times while it works. Nobody changes it."""
    return node_of(text)


def node_of(text: str) -> Node | None:
    """The root of a YAML text as PyYAML composes it, with the positions of all parts; None where it has no content.

    Only for a text that `read_yaml` has read.
    """
    return _Nodes(text).get_single_node()


def plain_scalar(text: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar by the core schema of YAML 1.2; `012` is twelve, `0x1f` is 31."""
    if _NULL.match(text):
        return None
    if _BOOL.match(text):
        return text[0] in "tT"
    if len(text) <= _MAX_DIGITS and _INT.match(text):
        return int(text)
    if len(text) <= _MAX_DIGITS and _BASED_INT.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    if _SPECIAL_FLOAT.match(text):
        return float(text.replace(".", "", 1))
    return text


def _at(start: Place, line: int, column: int) -> Place:
    """A position (from 0) in the text that begins at `start`; `start` itself where that has no lines."""
    return Place(start.rank, line + 1, column + 1, start.source) if start.line else start


def _syntax_problem(error: yaml.MarkedYAMLError, place: Place) -> Problem:
    """PyYAML's complaint in words that help, at the place to look at."""
    complaint = f"{error.context or ''} {error.problem or ''}".strip()
    mark, end = error.problem_mark, error.problem_mark
    opened_at_context = ("end of stream", "expected ':'", "expected ',' or")
    if error.context_mark is not None and any(words in complaint for words in opened_at_context):
        mark = error.context_mark
    at = place if mark is None else _at(place, mark.line, mark.column)
    until = f" before line {end.line + 1}, column {end.column + 1}" if end is not None and place.line else ""
    for pattern, what, hint in read_table(Path(__file__).with_name("syntax.yaml")):
        match = re.search(pattern, complaint)
        if match is not None:
            what = match.expand(what).replace("<until>", until).replace("<depth>", str(MAX_DEPTH))
            return Problem(at, what, hint=hint)
    return Problem(at, f"invalid YAML: {complaint}", hint="quote values with special characters")


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper that also quotes what YAML 1.2 would read as a number, and never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, False)


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"0o[0-7]+\Z"), ["0"])


_LINE_BREAKS = re.compile("[\r\x85\u2028\u2029]")
"""Characters that some readers take for the end of a line, and others not: written as escapes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Line breaks alone would be an empty text over several lines.
    is_escaped = _LINE_BREAKS.search(text) or ("\n" in text and not text.strip())
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if is_escaped else None)


_Dumper.add_representer(str, _represent_text)


class _InlineDumper(_Dumper):
    """The same on one line, so that a line break is written as an escape."""


_InlineDumper.add_representer(
    str,
    lambda dumper, text: (
        dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
        if "\n" in text
        else _represent_text(dumper, text)
    ),
)


def to_yaml(value: Any) -> str:
    """A value as YAML text of several lines, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def to_inline_yaml(value: Any) -> str:
    """A value as YAML on one line, as it may stand behind `key=`."""
    text = yaml.dump(
        value, Dumper=_InlineDumper, sort_keys=False, allow_unicode=True, width=10**9, default_flow_style=True
    )
    return text.removesuffix("\n").removesuffix("\n...")
