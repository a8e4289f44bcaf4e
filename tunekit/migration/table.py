"""The keys of a tool as a table: YAML beside this file, read into the rules by which keys come into a recipe.

A table has a section for each thing that may become of a key. Most keys need no code: they are a field of the recipe by
another name (`fields`), or are left out for a reason. `computed` names the functions of this package that look closer.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tunekit.migration.draft import READERS, Draft, Rule, Rules, carried, data_file, is_off, reason, trainer_arg, truth
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.recipe.schema import holders_along, is_free_mapping, members
from tunekit.recipe.sections.section import Tracker

Kind = Literal["decided", "different", "refused", "silent"]
KINDS: tuple[Kind, ...] = ("decided", "different", "refused", "silent")
"""Fates of keys that are no field of the recipe; `refused` is `unsupported` unless the key is off."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Part):
    """Fate of a key: a field of the recipe, or dropped for one of the reasons."""

    field: str | None = None
    """The recipe's field that it becomes."""
    value: Any = None
    """Fixed value of the field, whatever the key says."""
    read: str | None = Field(None, alias="as")
    """The conversion of its value, one of `READERS`; by default that of the field's type."""
    values: dict[Any, Any] = {}
    """Values that have another name in the recipe, alone or as a list of one."""
    default: Any = None
    """The value that holds anyway."""
    ignored: tuple[Any, ...] = ()
    """Values that ask for nothing."""
    prepared: str | None = None
    """The recipe's field that the tool's `prepare` has laid in for it."""
    decided: str | None = None
    different: str | None = None
    refused: str | None = None
    silent: str | None = None
    suspect: str | None = None
    """Why the key may not be meant."""
    remedy: str = ""
    """The recipe's field that makes the same of what is different."""

    def rule(self, key: str) -> Rule:
        """Return the rule of a key."""
        if self.suspect is not None:
            return _suspected(self.model_copy(update={"suspect": None}).rule(key), self.suspect)
        if self.field is not None:
            return self._carry(self.field)
        if self.prepared is not None:
            target = self.prepared
            return lambda draft, entry: (
                Fate("silent", f"{self.default} is the default")
                if entry.value == self.default
                else carried(target, draft.values.get(target))
            )
        kind = next(kind for kind in KINDS if dict(self)[kind] is not None)
        words = reason(dict(self)[kind]).replace("{key}", key)
        if kind != "refused":
            return lambda draft, entry: Fate(kind, words, self.remedy)
        return lambda draft, entry: (
            Fate("silent", "is off")
            if is_off(entry.value) or entry.value in self.ignored
            else Fate("unsupported", words)
        )

    def _carry(self, target: str) -> Rule:
        of_type = _reader(target)
        read = READERS[self.read or of_type]

        def rule(draft: Draft, entry: Entry) -> Fate:
            value = read(entry.value) if self.value is None else self.value
            if value in self.ignored:
                return Fate("silent", "is off")
            if value == self.default:
                return Fate("silent", f"{self.default} is the default")
            word = value[0] if isinstance(value, list) and len(value) == 1 else value
            return draft.carry(
                entry, target, next((ours for theirs, ours in self.values.items() if theirs == word), value)
            )

        return rule


class Switch(_Part):
    """Fate of a key that is on or off."""

    when_on: Row
    when_off: Row = Row(silent="is off")

    def rule(self, key: str) -> Rule:
        """Return the rule of a key."""
        on, off = self.when_on.rule(key), self.when_off.rule(key)
        return lambda draft, entry: on(draft, entry) if truth(entry.value) else off(draft, entry)


class Group(_Part):
    """Keys that are left out for one reason: its words, or its name among the reasons that many tables give."""

    why: str
    keys: str
    ignored: tuple[Any, ...] = ()
    remedy: str = ""


class Table(_Part):
    """Keys of a tool by what becomes of them. Several keys, and several methods, are one text of words."""

    marks: str = ""
    """Keys by which a configuration of the tool is told from others."""
    prefixes: str = ""
    """Sections that hold the keys of datasets."""
    inherits: str = ""
    """Other tables, whose keys the tool has too, unless it has its own of a name; later ones go before."""
    words: dict[str, dict[str, Any]] = {}
    """Names of the tool that functions look up, by kind."""
    fields: dict[str, str | Row] = {}
    prepared: dict[str, str | Row] = {}
    """Keys that the tool's `prepare` has laid in, and the fields of the recipe that they became."""
    methods: dict[str, dict[str, str | Row | Switch]] = {}
    """Keys that go with some methods."""
    methods_as: str | None = None
    """Their conversion."""
    switches: dict[str, Switch] = {}
    trainer_args: dict[str, str] = {}
    """Arguments of TRL's trainers, by their names there."""
    trackers: dict[str, Tracker] = {}
    """Keys that switch a tracker on."""
    variables: dict[str, str | tuple[str, Tracker]] = {}
    """Variables of the environment that say it instead, and the tracker that the key switches on."""
    computed: dict[str, str] = {}
    """Functions of this package, as `module.function`, and their keys."""
    decided: list[Group] = []
    different: list[Group] = []
    refused: list[Group] = []
    silent: list[Group] = []
    suspicious: dict[str, str] = {}
    """Why a key may not be meant."""
    adapter: "Table | None" = None
    """Keys that ask for nothing where all weights are trained."""
    rows: "Table | None" = None
    """Keys of data sets."""

    @model_validator(mode="after")
    def _names_each_key_once(self) -> "Table":
        keys = [key for key, _ in self._rules()]
        wrong = {key for key in keys if keys.count(key) > 1} | (self.suspicious.keys() - {*keys})
        if wrong:
            raise ValueError(f"set twice, or only suspicious: {', '.join(sorted(wrong))}")
        return self

    def rules(self) -> dict[str, Rule]:
        """Return the rule of each key."""
        rules: dict[str, Rule] = {}
        for name in self.inherits.split():
            rules |= tool_rules(name)
        rules |= dict(self._rules())
        rules |= {key: _suspected(rules[key], words) for key, words in self.suspicious.items()}
        if self.adapter is not None:
            rules |= {key: _of_adapter(rule) for key, rule in self.adapter.rules().items()}
        if self.rows is not None:
            of_rows = self.rows.rules()
            rules |= {f"{prefix}.{key}": of_rows[key] for prefix in self.rows.prefixes.split() for key in of_rows}
        return rules

    def _rules(self) -> Iterator[tuple[str, Rule]]:
        for key, field in self.fields.items():
            yield key, _row(field).rule(key)
        for key, laid in self.prepared.items():
            yield key, (Row(prepared=laid) if isinstance(laid, str) else laid).rule(key)
        for methods, rows in self.methods.items():
            for key, row in rows.items():
                yield key, _of_methods(_row(row, self.methods_as).rule(key), methods)
        for key, switch in self.switches.items():
            yield key, switch.rule(key)
        for key, name in self.trainer_args.items():
            yield key, trainer_arg(name)
        for key, tracker in self.trackers.items():
            yield key, _tracker(tracker)
        for key, variable in self.variables.items():
            yield key, _variable(*((variable, None) if isinstance(variable, str) else variable))
        for function, keys in self.computed.items():
            for key in keys.split():
                yield key, resolve_name(f"tunekit.migration.{function}")
        for kind in KINDS:
            for group in dict(self)[kind]:
                row = Row.model_validate({kind: group.why, "ignored": group.ignored, "remedy": group.remedy})
                for key in group.keys.split():
                    yield key, row.rule(key)


def _row(row: str | Row | Switch, read: str | None = None) -> Row | Switch:
    return Row.model_validate({"field": row, "as": read}) if isinstance(row, str) else row


def _reader(target: str) -> str:
    """Return the conversion to the type of a field of the recipe.

    Raises:
        ValueError: There is no such field.
    """
    parts = tuple(target.split("."))
    path = holders_along(parts)
    if len(path) < len(parts) and not (path and is_free_mapping(path[-1][0].field)):
        raise ValueError(f"{target}: not a recipe field")
    kinds = {kind for holder in path[-1] for kind in members(holder.field.annotation)}
    if any(str(kind).startswith("list") for kind in kinds):
        return "names"
    return next((reader for kind, reader in _READERS.items() if kind in kinds), "text")


_READERS: Mapping[type, str] = {bool: "truth", int: "whole", float: "number"}


def _tracker(tracker: Tracker) -> Rule:
    return lambda draft, entry: Fate("silent", "is off") if is_off(entry.value) else draft.track(entry, tracker)


def _variable(name: str, implies: Tracker | None) -> Rule:
    """A setting that a variable of the environment says, and that switches on a tracker where it implies one."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        if is_off(entry.value) or entry.value == "disabled":
            return Fate("silent", "is off")
        if implies is not None:
            draft.track(entry, implies)
        return Fate("decided", f"set in the environment: {name}={entry.value}")

    return rule


def _suspected(rule: Rule, words: str) -> Rule:
    """A rule, and something suspicious about its key."""

    def doubted(draft: Draft, entry: Entry) -> Fate:
        draft.suspect(entry.key, f"{entry.key}: {words}")
        return rule(draft, entry)

    return doubted


def _of_methods(rule: Rule, methods: str) -> Rule:
    return lambda draft, entry: (
        rule(draft, entry) if draft.method in methods.split() else Fate("silent", f"only used with {methods}")
    )


def _of_adapter(rule: Rule) -> Rule:
    return lambda draft, entry: (
        rule(draft, entry) if draft.has_adapter else Fate("silent", "no effect in full fine-tuning")
    )


@cache
def tool_table(name: str) -> Table:
    """Return a table: a tool's, or that of transformers' Trainer, whose arguments most tools take."""
    return Table.model_validate(data_file(name))


@cache
def tool_rules(name: str) -> Rules:
    """Return the rules of a tool's table."""
    return tool_table(name).rules()
