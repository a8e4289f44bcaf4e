"""A recipe that is being made of a configuration, and the rules by which keys come into it.

A tool is a table from its keys to rules. A rule looks at one key, lays what it means into the draft, and says what
became of the key. So no key can get lost: one without a rule is unknown, and is named.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
from tunekit.files import read_table
from tunekit.migration.original import Entry, Original
from tunekit.migration.report import Assumed, Fate, Line, Suspicion
from tunekit.recipe.methods import METHODS
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.recipe.reading.phrases import near, show
from tunekit.recipe.sections.section import Tracker

_METHODS = "sft, dpo, kto, orpo, cpo, reward, prm, grpo, rloo, gmpo, ebft, distillation and gkd"


class UnfitError(Exception):
    """A value that cannot be carried over; the text says why."""


class Draft:
    """Recipe under construction, with the fate of each key so far.

    Args:
        original: The configuration.
        tool: The tool's name as it is written.
        num_devices: Devices that it was meant for, where that is known.
    """

    def __init__(self, original: Original, tool: str, num_devices: int | None) -> None:
        self.original = original
        self.tool = tool
        self.num_devices = num_devices
        self.values: dict[str, Any] = {}
        """Dotted keys of the recipe and their values."""
        self.origins: dict[str, list[str]] = {}
        """The keys of the original that made each of them."""
        self.comments: dict[str, str] = {}
        self.fates: dict[str, Fate] = {}
        self.files: dict[str, str] = {}
        """Text of files that the recipe needs next to it, by their names."""
        self.assumed: list[Assumed] = []
        self.suspicious: list[Suspicion] = []
        self.unsaid: list[Line] = []
        self.has_images = False
        self.has_audio = False
        self.has_videos = False
        """True if its rows are known to have images."""

    @property
    def method(self) -> str:
        """The recipe's method so far."""
        return str(self.values.get("method.type", "sft"))

    @property
    def has_own_rows(self) -> bool:
        """True if tunekit itself lays out the rows of the method, in masks, packs and lengths."""
        return METHODS[self.method].spec.masks_as_told

    @property
    def drops_too_long(self) -> bool:
        """True if the method can drop rows that are too long."""
        return METHODS[self.method].offers(("data", "too_long"))

    @property
    def has_adapter(self) -> bool:
        """True if not all weights are trained."""
        return self.values.get("adapter.type") != "full"

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the original; the default where it is missing or null."""
        return self.original.get(key, default)

    def line_of(self, key: str) -> int:
        """Return the line of a key in the original; 0 where it is absent."""
        return next(
            (entry.line for entry in self.original.entries if entry.key == key or entry.key.startswith(f"{key}.")), 0
        )

    def put(self, target: str, value: Any, *keys: str) -> None:
        """Let the recipe say something, because keys of the original do."""
        self.values[target] = value
        self.origins[target] = [*self.origins.get(target, []), *keys]

    def carry(self, entry: Entry, target: str, value: Any) -> Fate:
        """Let the recipe say what a key of the original does, and return its fate."""
        self.put(target, value, entry.key)
        return carried(target, value)

    def track(self, entry: Entry, tracker: Tracker) -> Fate:
        """Let the recipe report to a tracker besides those that it has, because a key of the original does."""
        before = self.values.get("output.report_to", [])
        trackers = list(dict.fromkeys([*([before] if isinstance(before, str) else before), tracker]))
        return self.carry(entry, "output.report_to", trackers[0] if len(trackers) == 1 else trackers)

    def assume(self, values: Mapping[str, Any], words: str = "") -> None:
        """Let the recipe say what the tool does where the original is silent."""
        for target, value in values.items():
            if target not in self.values:
                self.values[target] = value
                self.assumed.append(Assumed(target, value, words or f"{self.tool}'s default; not set in the file"))

    def differ(self, key: str, value: Any, words: str, *, remedy: str = "") -> None:
        """Note what the tool does by itself, and the recipe otherwise.

        Args:
            key: The tool's key of it, which the original need not have.
            value: What the tool takes there.
            words: How they differ.
            remedy: The recipe's field that makes it the same, if there is one.
        """
        self.unsaid.append(Line("different", key, value, self.line_of(key), words, remedy))

    def suspect(self, key: str, words: str) -> None:
        """Note what may not be meant, at a key of the original."""
        self.suspicious.append(Suspicion(self.line_of(key), words))

    def no_method(self, key: str, what: object) -> RecipeError:
        """Return the error of a method that is not there: the recipe would be one of something else."""
        where = f"{self.original.path}:{self.line_of(key)}" if self.line_of(key) else self.original.path
        problem = f"{where}: {key}: method {what} is unsupported"
        return RecipeError(problem, hint=f"available: {_METHODS}")


Rule = Callable[[Draft, Entry], Fate]
"""Handler of a key."""

Rules = Mapping[str, Rule]
"""Rules by key, `datasets[].path`; one of a key holds for what is below it and has none itself."""


def apply(draft: Draft, rules: Rules) -> None:
    """Decide about every key of the original by the rules of its tool."""
    for entry in draft.original.entries:
        rule = rule_of(rules, entry.pattern)
        if rule is None:
            draft.fates[entry.key] = _unknown(draft, entry, rules)
        elif entry.value is None or entry.value in ("", [], {}):
            draft.fates[entry.key] = Fate("silent", "has no value")
        else:
            try:
                draft.fates[entry.key] = rule(draft, entry)
            except UnfitError as error:
                draft.fates[entry.key] = Fate("unsupported", str(error))


def rule_of(rules: Rules, pattern: str) -> Rule | None:
    """The rule of a key, or of the nearest key above it that has one."""
    while pattern:
        if pattern in rules:
            return rules[pattern]
        pattern = pattern[:-2] if pattern.endswith("[]") else pattern.rpartition(".")[0]
    return None


def _unknown(draft: Draft, entry: Entry, known: Iterable[str]) -> Fate:
    likely = near(entry.pattern, known, cutoff=0.75)
    suggestion = f"; did you mean '{likely}'?" if likely else ""
    return Fate("unsupported", f"unknown key of {draft.tool}{suggestion}")


def data_file(name: str) -> Any:
    """Return what stands in one of the files beside this one."""
    return read_table(Path(__file__).parent / "tables" / f"{name}.yaml")


def reason(words: str) -> str:
    """Return a reason by its name among those that many tables give; what is no name stands for itself."""
    return str(data_file("reasons")[words]) if words.isidentifier() else words


def carried(target: str, value: Any) -> Fate:
    """The fate of a key that the recipe says."""
    return Fate("carried", f"{target}: {to_inline_yaml(value)}")


def trainer_arg(name: str) -> Rule:
    """Something that TRL's trainer takes by this name, and that is off where it is nothing."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        root = entry.key.partition(".")[0]
        value = draft.get(root) if root == name else entry.value
        return Fate("silent", "is off") if is_off(value) else draft.carry(entry, f"method.trainer_args.{name}", value)

    return rule


def is_off(value: Any) -> bool:
    """Return whether a value switches something off: false, 0, and the words for it, in YAML 1.1 too."""
    return value in (False, 0) or (isinstance(value, str) and value.lower() in ("false", "no", "off", "none", "n", ""))


def truth(value: Any) -> bool:
    """Return the boolean value of a switch.

    Raises:
        UnfitError: It is no switch.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "yes", "on", "y", "false", "no", "off", "n", "none"):
        return not is_off(value)
    if value in (0, 1):
        return bool(value)
    raise UnfitError(f"must be true or false, got {show(value)}")


def number(value: Any) -> float:
    """A number, also one that stands in quotes.

    Raises:
        UnfitError: It is none.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise UnfitError(f"must be a number, got {show(value)}") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnfitError(f"must be a number, got {show(value)}")
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1 else value


def whole(value: Any) -> int:
    """A whole number.

    Raises:
        UnfitError: It is none.
    """
    parsed = number(value)
    if parsed != int(parsed):
        raise UnfitError(f"must be a whole number, got {show(value)}")
    return int(parsed)


def text(value: Any) -> str:
    """A text; a number is taken as it is written.

    Raises:
        UnfitError: It is a list, a mapping or a switch.
    """
    if isinstance(value, bool | list | dict):
        raise UnfitError(f"must be text, got {show(value)}")
    return str(value)


def names(value: Any) -> list[str]:
    """A list of names, also written as one text with commas."""
    items = value if isinstance(value, list) else str(value).split(",")
    return [text(item).strip() for item in items]


def figure(value: Any) -> Any:
    """A number by its shortest form; any other value as it is."""
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def same(value: Any) -> Any:
    """A value as it is."""
    return value


def lower(value: Any) -> str:
    """A text in lower case."""
    return text(value).lower()


READERS: Mapping[str, Callable[[Any], Any]] = {
    read.__name__: read for read in (figure, lower, names, number, same, text, truth, whole)
}
"""Conversions of values, by the names that tables give them."""
