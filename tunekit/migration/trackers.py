"""Trackers of other tools: those that tunekit reports to, and what their own variables say rather than a recipe."""

from typing import get_args

from tunekit.migration.draft import Draft, Rule, carried, is_off
from tunekit.migration.original import Entry
from tunekit.migration.report import Fate
from tunekit.recipe.sections.section import Tracker

KNOWN: tuple[Tracker, ...] = get_args(Tracker)

NO_TRACKER = f"output.report_to takes {', '.join(KNOWN[:-1])} and {KNOWN[-1]}"
UPLOADS = "figures go to trackers; weights and gradients do not"
NAME = "a run is called the same in every tracker: output.name"


def report_to(draft: Draft, entry: Entry) -> Fate:
    """The trackers, of which those that tunekit does not know are named."""
    values = entry.value if isinstance(entry.value, list) else str(entry.value).split(",")
    names = [str(value).strip().lower() for value in values if not is_off(value) and str(value).strip() != "[]"]
    if not names:
        return Fate("silent", "is off")
    if "all" in names:
        return Fate("unsupported", f"all: trackers are named; {NO_TRACKER}")
    for name in KNOWN:
        if name in names:
            _add(draft, name, entry.key)
    unsupported = [name for name in names if name not in KNOWN]
    if unsupported:
        return Fate("unsupported", f"{', '.join(unsupported)}: {NO_TRACKER}")
    return carried("output.report_to", draft.values["output.report_to"])


def switch(tracker: Tracker) -> Rule:
    """A key that switches a tracker on."""

    def rule(draft: Draft, entry: Entry) -> Fate:
        if is_off(entry.value):
            return Fate("silent", "is off")
        _add(draft, tracker, entry.key)
        return carried("output.report_to", draft.values["output.report_to"])

    return rule


def variable(name: str, implies: Tracker | None = None) -> Rule:
    """A setting of a tracker's that its own variable says.

    Args:
        name: The variable.
        implies: The tracker that the key switches on.
    """

    def rule(draft: Draft, entry: Entry) -> Fate:
        if is_off(entry.value) or entry.value == "disabled":
            return Fate("silent", "is off")
        if implies is not None:
            _add(draft, implies, entry.key)
        return Fate("unsupported", f"no key of a recipe: set {name}={entry.value}")

    return rule


def _add(draft: Draft, tracker: Tracker, key: str) -> None:
    before = draft.values.get("output.report_to", [])
    trackers = [before] if isinstance(before, str) else before
    all_trackers = [*trackers, *([] if tracker in trackers else [tracker])]
    draft.put("output.report_to", all_trackers[0] if len(all_trackers) == 1 else all_trackers, key)
