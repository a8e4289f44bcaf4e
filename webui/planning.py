"""Plans of drafts: worked out in a process of their own, and once for all who ask for the same within a minute."""

import threading
import time
from collections import OrderedDict

import tunekit
from tunekit import frontend
from webui import work
from webui.reach import check_machine, check_reach
from webui.site import Site

HERE = "here"
"""Stands for this machine where machines are named."""

KEPT_SECONDS = 60.0
"""Seconds for which a plan stays valid: rows, and the free memory, change."""

KEPT_PLANS = 64
"""Number of plans that are kept."""

Planned = tunekit.Plan | tunekit.TunekitError

_lock = threading.Lock()
_kept: OrderedDict[tuple[str, str], tuple[float, Planned]] = OrderedDict()


def planned(site: Site, recipe: tunekit.Recipe, machine: str) -> Planned:
    """Plan a recipe on a machine; the result says why where that fails.

    Args:
        site: The workspace.
        recipe: The recipe.
        machine: `HERE`, a machine's name, or a file of the workspace that describes one.
    """
    key = recipe.model_dump_json(), machine
    try:
        check_reach(site, recipe)
        check_machine(site, machine)
    except tunekit.TunekitError as error:
        return error
    with _lock:
        made_at, planned_result = _kept.get(key, (0.0, None))
    if planned_result is not None and time.monotonic() - made_at < KEPT_SECONDS:
        return planned_result
    try:
        # Nobody waits for a trace while a recipe is written.
        result: Planned = work.call("plan", recipe, on=None if machine == HERE else machine, trace=False)
    except tunekit.TunekitError as error:
        result = error
    with _lock:
        _kept[key] = time.monotonic(), result
        _kept.move_to_end(key)
        while len(_kept) > KEPT_PLANS:
            _kept.popitem(last=False)
    return result


def with_changes(text: str, changes: str) -> str:
    """A draft with the changes that an error names, `key=value` a line.

    Raises:
        TunekitError: The draft cannot be read.
    """
    for change in changes.splitlines():
        key, _, written = change.partition("=")
        value = frontend.read_text(f"value: {written}\n").get("value")
        text = frontend.edit_text(text, key, frontend.UNSET if value is None else value)
    return text
