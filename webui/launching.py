"""Drafts become runs: each a process of its own, which lives on when this one ends."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import tunekit
from tunekit import frontend
from webui import work
from webui.planning import HERE
from webui.reach import check_reach
from webui.site import Site
from webui.words import Words


def begin(site: Site, text: str, name: str, devices: Sequence[str], *, waits: bool, machine: str = HERE) -> tunekit.Run:
    """Start a run of a draft, and return it when all can see it.

    Args:
        site: The workspace.
        text: The draft.
        name: What the run is called, with the time behind it; what the draft says where empty.
        devices: UUIDs of the accelerators to use; the plan's choice where empty.
        waits: Whether it waits in line while other runs have them.
        machine: The machine whose plan its visitor looks at.

    Raises:
        TunekitError: There is no run.
    """
    if machine != HERE:
        raise tunekit.TunekitError(
            f"runs start on this machine, but the plan shown is for {machine}",
            hint="review the plan for this machine before starting",
        )
    recipe = named(site, text, name)
    named_devices = [device for device in devices if device != "cpu"] or None
    with tempfile.TemporaryDirectory(prefix="tunekit-draft-") as folder:
        file = Path(folder) / f"{recipe.output.name}.yaml"
        file.write_text(text, encoding="utf-8")
        return tunekit.start(file, _overrides(name), devices=named_devices, queue=waits)


def checked(site: Site, text: str, name: str) -> list[str]:
    """Check a draft with all its rows, its model and the disk; what is worth knowing.

    Raises:
        TunekitError: There is a fault.
    """
    notes: list[str] = work.call("check", named(site, text, name))
    return notes


def named(site: Site, text: str, name: str) -> tunekit.Recipe:
    """The recipe of a draft, with another name for its runs where one is given.

    Raises:
        TunekitError: The draft is not valid, leads out of the workspace, or cannot be called so.
    """
    recipe, faults = tunekit.check_text(text, _overrides(name), find_functions=False)
    if recipe is None:
        raise tunekit.TunekitError("\n".join(map(str, faults)), hint="fix the draft first")
    check_reach(site, recipe)
    return recipe


def _overrides(name: str) -> list[str]:
    return [f"output.name={name.strip()}"] if name.strip() else []


def choices(found: Sequence[frontend.DeviceState], words: Words) -> list[tuple[str, str]]:
    """Devices as they are offered: name, the end of the UUID, free memory, who has it, and its UUID as the value."""
    return [(_label(device, words), device.uuid) for device in found]


def _label(device: frontend.DeviceState, words: Words) -> str:
    parts = [device.name]
    if device.uuid != "cpu":
        parts.append(f"…{device.uuid[-8:]}")
    parts.append(words("plan.free", free=frontend.gib(device.free_bytes), total=frontend.gib(device.total_bytes)))
    if device.runs:
        parts.append(words("plan.held", runs=", ".join(Path(run).name for run in device.runs)))
    if device.waiting:
        parts.append(words("plan.waiting", number=len(device.waiting)))
    return " · ".join(parts)
