"""A recipe that is being made of a configuration, and the rules by which keys come into it.

A tool is a table from its keys to rules. A rule looks at one key, lays what it means into the draft, and says what
became of the key. So no key can get lost: one without a rule is unknown, and is named.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunekit.errors import RecipeError
from tunekit.migration.original import Entry, Original
from tunekit.migration.report import Assumed, Fate, Line, Suspicion
from tunekit.recipe.reading.parse import to_inline_yaml
from tunekit.recipe.reading.phrases import near, show


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
        self.assumed: list[Assumed] = []
        self.suspicious: list[Suspicion] = []
        self.unsaid: list[Line] = []

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

    def assume(self, target: str, value: Any, words: str) -> None:
        """Let the recipe say what the tool does where the original is silent."""
        if target not in self.values:
            self.values[target] = value
            self.assumed.append(Assumed(target, value, words))

    def differ(self, key: str, value: Any, words: str) -> None:
        """Note what the tool does by itself, and the recipe otherwise.

        Args:
            key: The tool's key of it, which the original need not have.
            value: What the tool takes there.
            words: How they differ.
        """
        self.unsaid.append(Line("different", key, value, self.line_of(key), words))

    def suspect(self, key: str, words: str) -> None:
        """Note what may not be meant, at a key of the original."""
        self.suspicious.append(Suspicion(self.line_of(key), words))


Rule = Callable[[Draft, Entry], Fate]
"""Handler of a key."""

Rules = Mapping[str, Rule]
"""Rules by key, `datasets[].path`; one of a key holds for what is below it and has none itself."""


def apply(draft: Draft, rules: Rules, more: Iterable[str] = ()) -> None:
    """Decide about every key of the original.

    Args:
        draft: What is made.
        rules: Those of the tool.
        more: Keys of the tool that have no rule, for what may have been meant by an unknown one.
    """
    rule_names = [*rules, *more]
    for entry in draft.original.entries:
        rule = rule_of(rules, entry.pattern)
        if rule is None:
            draft.fates[entry.key] = _unknown(draft, entry, rule_names)
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
    return Fate("unsupported", f"unknown: not a key of {draft.tool}{suggestion}")


# Rules


def same(value: Any) -> Any:
    """A value as it is."""
    return value


def each(rule: Rule, keys: str) -> dict[str, Rule]:
    """One rule for several keys, which are given as one text of words."""
    return dict.fromkeys(keys.split(), rule)


def to(target: str, change: Callable[[Any], Any] = same) -> Rule:
    """The key becomes one of the recipe's.

    Args:
        target: The recipe's key.
        change: Makes the value that is said there.
    """

    def rule(draft: Draft, entry: Entry) -> Fate:
        value = change(entry.value)
        draft.put(target, value, entry.key)
        return carried(target, value)

    return rule


def carried(target: str, value: Any) -> Fate:
    """A key that the recipe says."""
    return Fate("carried", f"{target}: {to_inline_yaml(value)}")


def decided(why: str) -> Rule:
    """Tunekit decides this by itself, whatever the key says."""
    return lambda draft, entry: Fate("decided", why)


def different(how: str) -> Rule:
    """The recipe trains otherwise in this."""
    return lambda draft, entry: Fate("different", how)


def refused(why: str, *, off: tuple[Any, ...] = ()) -> Rule:
    """This cannot be had; the key asks for nothing where it is off.

    Args:
        why: Why not, and what there is instead.
        off: Values that ask for nothing, besides false, 0, none, no.
    """

    def rule(draft: Draft, entry: Entry) -> Fate:
        if is_off(entry.value) or entry.value in off:
            return Fate("silent", "is off")
        return Fate("unsupported", why)

    return rule


def silent(why: str) -> Rule:
    """The key asks for nothing that concerns training."""
    return lambda draft, entry: Fate("silent", why)


def flag(on: Rule, off: Rule | None = None) -> Rule:
    """One rule where a switch is on, and another where it is off: by default it then asks for nothing."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        if truth(entry.value):
            return on(draft, entry)
        return off(draft, entry) if off is not None else Fate("silent", "is off")

    return rule


def both(rule: Rule, suspicion: str) -> Rule:
    """A rule, and something suspicious about the key."""

    def doubted(draft: Draft, entry: Entry) -> Fate:
        draft.suspect(entry.key, f"{entry.key}: {suspicion}")
        return rule(draft, entry)

    return doubted


# Values


def with_adapter(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Rules of an adapter's keys, which ask for nothing where all weights are trained."""

    def wrapped(rule: Rule) -> Rule:
        def asked(draft: Draft, entry: Entry) -> Fate:
            if draft.values.get("adapter.type") == "full":
                return Fate("silent", "all weights are trained, without an adapter")
            return rule(draft, entry)

        return asked

    return {key: wrapped(rule) for key, rule in rules.items()}


def no_method(draft: Draft, key: str, what: str) -> RecipeError:
    """The error of a method that is not there: the recipe would be one of something else."""
    where = f"{draft.original.path}:{draft.line_of(key)}" if draft.line_of(key) else draft.original.path
    return RecipeError(
        f"{where}: {key}: {what} is no method of tunekit's",
        hint="there are sft, dpo, kto, orpo, cpo, reward, grpo, rloo and distillation",
    )


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
