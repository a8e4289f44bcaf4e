"""Classify edits of a recipe on resume: applied, ignored or refused, field by field, from the recipe alone.

A checkpoint holds the weights, the optimizer and its learning rates, the schedule's position, the random numbers and
how many rows were seen. An edit that these know nothing of takes effect. One that they hold themselves would be
overruled by them, and takes effect only where they begin afresh. What the weights or the prepared rows would not fit
is another run.

In what recipes differ, by dotted key.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tunekit.files import read_table
from tunekit.recipe.reading.parse import dotted, to_inline_yaml
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.section import Section, Strategy

Effect = Literal["takes effect", "saved state", "refused"]
"""What becomes of an edit: it holds from here on; the saved state holds the earlier value, so that it takes effect only
where that state is left; or it cannot be had in this run."""


class Ruling(NamedTuple):
    """Effect of an edit of a field, or of any field of a section."""

    effect: Effect
    why: str = ""
    """Why it does not take effect."""
    replans: bool = False
    """True if it takes effect by a new plan for this machine, rather than by another schedule at most."""


class Edit(NamedTuple):
    """A field that differs between two recipes."""

    key: tuple[str, ...]
    before: Any
    now: Any

    @property
    def name(self) -> str:
        """Its dotted key."""
        return dotted(self.key)

    @property
    def words(self) -> str:
        """The edit in words: `train.max_steps 100 -> 200`."""
        return f"{self.name} {self.shown_before} -> {self.shown_now}"

    @property
    def shown_before(self) -> str:
        """The value that it had, on a line of YAML that may be cut."""
        return _shown(self.before)

    @property
    def shown_now(self) -> str:
        """The same of the value that it has now."""
        return _shown(self.now)

    @property
    def override(self) -> str:
        """The edit as it is given to a command: `train.max_steps=200`."""
        return f"{self.name}={to_inline_yaml(_plain(self.now))}"


_TAKES_EFFECT = Ruling("takes effect")
_TABLE = Path(__file__).parent / "rulings.yaml"


@cache
def rulings() -> dict[str, Ruling]:
    """Effects of edits by dotted key; that of a section holds for all below it without one."""
    return {
        key: Ruling(group["effect"], group.get("why", ""), group.get("replans", False))
        for group in read_table(_TABLE)
        for key in group["keys"]
    }


def ruling_of(key: tuple[str, ...]) -> Ruling | None:
    """Return the general effect of an edit of a field; None where no rule covers it."""
    names = (dotted(key[:length]) for length in range(len(key), 0, -1))
    return next((rulings()[name] for name in names if name in rulings()), None)


def ruling(edit: Edit, recipe: Recipe, strategy: Strategy) -> Ruling:
    """Return the effect of an edit in a run.

    Args:
        edit: The edit.
        recipe: The recipe as it was.
        strategy: How the checkpoint was spread.
    """
    name = edit.name
    if name == "train.max_grad_norm" and strategy in ("zero1", "zero2"):
        return Ruling("saved state", "DeepSpeed stores it in the checkpoint")
    if name == "data.max_bad_rows" and recipe.data.streaming:
        return _TAKES_EFFECT
    if name == "train.learning_rate" and edit.now in (None, edit.before):
        return _TAKES_EFFECT
    effect = ruling_of(edit.key)
    assert effect is not None, f"{name}: no ruling on edits of this field"
    return effect


def edits(before: Recipe, now: Recipe) -> list[Edit]:
    """The fields in which a recipe differs from what it was."""
    all_edits = list(_edits(before, now))
    default = before.method.default_learning_rate(before.adapter)
    # To leave it out is to ask for the default.
    return [
        edit
        for edit in all_edits
        if edit.name != "train.learning_rate" or (edit.before or default) != (edit.now or default)
    ]


def _edits(before: Section, now: Section, above: tuple[str, ...] = ()) -> Iterator[Edit]:
    if type(before) is not type(now):
        yield Edit((*above, "type"), dict(before)["type"], dict(now)["type"])
        return
    for name, value in before:
        other, key = dict(now)[name], (*above, name)
        if isinstance(value, Section) and isinstance(other, Section):
            yield from _edits(value, other, key)
        elif value != other:
            yield Edit(key, value, other)


def _shown(value: Any) -> str:
    if value is None:
        return "(not set)"
    text = to_inline_yaml(_plain(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.model_dump(exclude_defaults=True) if isinstance(value, Section) else value


def recipe_diff(*recipes: Recipe) -> dict[str, tuple[str | None, ...]]:
    """The fields in which recipes differ, each with its value in every one of them as YAML.

    None stands where a recipe has no such field, as where another method has one. Defaults count: what two recipes say
    in other words is no difference.
    """
    flat = [_flat(recipe.model_dump(mode="json")) for recipe in recipes]
    keys = dict.fromkeys(key for fields in flat for key in fields)
    # Writing YAML takes longest, and most fields of most recipes are alike.
    unequal = [key for key in keys if any(key not in fields or fields[key] != flat[0].get(key) for fields in flat)]
    differing = {
        key: tuple(to_inline_yaml(fields[key]) if key in fields else None for fields in flat) for key in unequal
    }
    return {key: values for key, values in differing.items() if len(set(values)) > 1}


def _flat(fields: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat
