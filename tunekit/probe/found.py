"""An accelerator as the driver shows it, before it is compared with the others of its node.

The variables that hide accelerators from programs: CUDA_VISIBLE_DEVICES and its like of ROCm.

Each lists devices by index, or else by UUID or the beginning of one. What is named first is device 0. The first entry
that names no device ends the list, so that -1 or an empty one hides all (CUDA C++ programming guide, CUDA environment
variables).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tunekit.estimates.facts import Device, Figures
from tunekit.estimates.hardware.catalogue import reported_as


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


def split_by_kind(found: Sequence[Found]) -> tuple[tuple[Found, ...], tuple[Found, ...]]:
    """The equal accelerators that hold the most memory together, and the others.

    A run computes on equal ones: the slowest sets the pace of all, and the smallest says what fits.
    """
    groups: dict[tuple[object, ...], list[Found]] = {}
    for device_found in found:
        device = device_found.device
        kind = (device.name, device.memory_total_bytes, device.compute_capability, device.gfx)
        groups.setdefault(kind, []).append(device_found)
    if not groups:
        return (), ()
    best = max(groups.values(), key=lambda group: sum(device_found.device.memory_total_bytes for device_found in group))
    return tuple(best), tuple(device_found for device_found in found if device_found not in best)


def figures_of(used: Sequence[Found]) -> Figures | None:
    """Speeds of equal accelerators: their sheet's where the catalogue has them, their links as they are here."""
    if not used:
        return None
    figures = reported_as(used[0].device.name)
    # A part of a divided one has its name on AMD's, but not its speed.
    is_whole = figures is not None and used[0].device.memory_total_bytes > 0.9 * figures.device.memory_total_bytes
    sheet = figures.figures if figures is not None and is_whole else Figures()
    host = used[0].host_bytes_per_second
    # Nobody pays by the hour for a machine because somebody else lists one like it.
    priceless = {"usd_per_hour": None, "price_source": None, "network_bytes_per_second": None}
    link = {"link_bytes_per_second": _link(used, sheet), "host_bytes_per_second": host}
    return sheet.model_copy(update={**priceless, **link})


def _link(used: Sequence[Found], sheet: Figures) -> float | None:
    """Return the bandwidth of the slowest device: over direct links if those join every two, else over PCIe."""
    everyone = {device.device.visible_as for device in used}
    if len(used) < 2 or any(everyone - device.linked - {device.device.visible_as} for device in used):
        return used[0].host_bytes_per_second
    bandwidths = [device.links_bytes_per_second for device in used if device.links_bytes_per_second is not None]
    if not bandwidths:
        return sheet.link_bytes_per_second
    # Drivers count line code too from NVLink 4 on: 26.6 GB/s for a link of 25.
    has_own_links = (sheet.link_bytes_per_second or 0) > (sheet.host_bytes_per_second or 0)
    return min(min(bandwidths), sheet.link_bytes_per_second or min(bandwidths)) if has_own_links else min(bandwidths)


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
