"""An accelerator as the driver shows it, before it is compared with the others of its node, and which ones it shows.

CUDA_VISIBLE_DEVICES and its like of ROCm hide accelerators from programs. Each lists devices by index, or else by UUID
or the beginning of one. What is named first is device 0. The first entry that names no device ends the list, so that -1
or an empty one hides all (CUDA C++ programming guide, CUDA environment variables).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunekit.estimates.facts import Device


@dataclass(frozen=True)
class Found:
    """An accelerator with what the driver says of its links."""

    device: Device
    host_bytes_per_second: float | None = None
    """Over PCIe, in one direction."""
    links_bytes_per_second: float | None = None
    """Over all its own links to other accelerators, such as NVLink, in one direction."""
    linked: frozenset[str] = frozenset()
    """The accelerators that those links reach, by `visible_as`."""


def visible_devices(setting: str | None, uuids: Sequence[str]) -> list[int]:
    """Positions of the devices that a setting leaves, in its order.

    Args:
        setting: Value of the variable, None where it is not set.
        uuids: UUID of each device, by index.
    """
    if setting is None:
        return list(range(len(uuids)))
    by_uuid = setting.startswith(("GPU-", "MIG-"))
    devices: list[int] = []
    for entry in setting.split(","):
        position = _with_uuid(entry, uuids) if by_uuid else _with_index(entry.strip(), len(uuids))
        if position is None:
            break
        if position in devices:
            return []
        devices.append(position)
    return devices


def _with_index(entry: str, num: int) -> int | None:
    """The device that an entry names by a number; what follows the number does not count."""
    index = re.match("[0-9]+", entry)
    return int(index[0]) if index and int(index[0]) < num else None


def _with_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """The device whose UUID begins like an entry; None for none, or for more than one."""
    matches = [position for position, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
