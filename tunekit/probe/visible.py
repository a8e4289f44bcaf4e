"""The variables that hide accelerators from programs: CUDA_VISIBLE_DEVICES and its like of ROCm.

Each lists devices by index, or by UUID or the beginning of one. What is named first is device 0. The first entry that
names no device ends the list, so that -1 or an empty one hides all (CUDA C++ programming guide, CUDA environment
variables).
"""

import re
from collections.abc import Sequence


def visible_devices(setting: str | None, names: Sequence[Sequence[str]]) -> list[int]:
    """Positions of the devices that a setting leaves, in its order.

    Args:
        setting: Value of the variable, None where it is not set.
        names: The names that each device can be called by other than its index.
    """
    if setting is None:
        return list(range(len(names)))
    found: list[int] = []
    for entry in setting.split(","):
        position = _position(entry.strip(), names)
        if position is None:
            break
        if position in found:
            return []
        found.append(position)
    return found


def _position(entry: str, names: Sequence[Sequence[str]]) -> int | None:
    """The device that an entry names; None where it names none, or more than one."""
    if index := re.match("[0-9]+", entry):
        return int(index[0]) if int(index[0]) < len(names) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    matches = [position for position, own in enumerate(names) if any(name.startswith(entry) for name in own)]
    return matches[0] if len(matches) == 1 else None
