"""The devices of this machine as they are now, with the runs that hold them, and how a run is given some of them.

A run sees those that CUDA_VISIBLE_DEVICES names, by UUID: that is the same device in any order of the driver's.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device
from tunekit.launching.local import PROCESSOR, Ticket, tickets
from tunekit.probe.hardware import probe_node


@dataclass(frozen=True)
class DeviceState:
    """A device, and what it is used for.

    Attributes:
        uuid: What it is named by; `cpu` for the processor of a machine that has nothing else.
        name: Its maker's.
        total_bytes: Its memory.
        free_bytes: What nobody uses of that.
        runs: Folders of the runs that hold it.
        waiting: Folders of those that wait for it, in their order.
    """

    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    runs: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


def devices() -> list[DeviceState]:
    """Return the devices of this machine that runs can use: its accelerators, or its processor where it has none.

    Raises:
        PlanError: The driver does not answer.
    """
    line = tickets()
    hardware = probe_node()
    accelerators = _accelerators()
    if accelerators:
        return [_state(device, str(device.visible_as), line) for device in accelerators]
    return [_state(hardware.cpu, PROCESSOR, line)] if hardware.cpu is not None else []


def visible_to(names: Sequence[str]) -> dict[str, str]:
    """The environment of a process that is to see some devices and no others.

    Args:
        names: Their indices, as nvidia-smi lists them, or UUIDs, or beginnings of those.

    Raises:
        PlanError: There is no such device.
    """
    return chosen(names, _accelerators())


def chosen(names: Sequence[str], found: Sequence[Device]) -> dict[str, str]:
    """The same, of devices that were found.

    Raises:
        PlanError: There is no such device, or it is named twice.
    """
    if not found and all(name == PROCESSOR for name in names):
        return {}
    picked = [_device(name.strip(), found) for name in names]
    uuids = [str(device.visible_as) for device in picked]
    if len(set(uuids)) < len(uuids):
        raise PlanError(f"devices: {', '.join(names)} lists a device twice", hint="list each once")
    return {"CUDA_VISIBLE_DEVICES" if picked[0].gfx is None else "HIP_VISIBLE_DEVICES": ",".join(uuids)}


def _accelerators() -> list[Device]:
    hardware = probe_node()
    every = (*hardware.accelerators, *hardware.unused)
    return [device for device in every if device.kind == "cuda" and device.visible_as is not None]


def _device(name: str, found: Sequence[Device]) -> Device:
    """The device that a user names."""
    if re.fullmatch("[0-9]+", name) and int(name) < len(found):
        return found[int(name)]
    matching = [device for device in found if name and str(device.visible_as).startswith(name)]
    if len(matching) != 1:
        there_are = ", ".join(f"{index} {device.name} {device.visible_as}" for index, device in enumerate(found))
        hint = f"available: {there_are}" if found else "no accelerator that this torch build supports"
        raise PlanError(f"devices: no device {name!r}", hint=hint)
    return matching[0]


def _state(device: Device, uuid: str, line: Sequence[Ticket]) -> DeviceState:
    here = [ticket for ticket in line if uuid in ticket.devices]
    return DeviceState(
        uuid=uuid,
        name=device.name,
        total_bytes=device.memory_total_bytes,
        free_bytes=device.memory_free_bytes,
        runs=tuple(ticket.run for ticket in here if not ticket.waits),
        waiting=tuple(ticket.run for ticket in here if ticket.waits),
    )
