"""AMD's accelerators, by what the kernel's driver writes under /sys.

The compute driver's topology is what ROCm itself reads: /sys/class/kfd/kfd/topology has a folder for every processor
and GPU, with its memory and its links, and the graphics driver adds how much memory is in use. It needs no tool, is
there in containers too, and its form is kept by the kernel, whereas that of rocm-smi and amd-smi changed with releases.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from tunekit.estimates.facts import Device
from tunekit.estimates.hardware.catalogue import pcie_bytes_per_second, reported_as
from tunekit.probe.found import Found, visible_devices

XGMI = 11
"""Type of a link over Infinity Fabric, as opposed to PCIe's 2 (crat.h of the kernel's amdkfd)."""

LOCAL_MEMORY = {1, 2}
"""Types of a memory bank that is the GPU's own, seen by the processor or not (KFD_HEAP_TYPE_FB_* of the kernel)."""

GENERATION_BY_SPEED = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""PCIe generation by transfers a second, in 10^9."""


def amd_devices(environment: Mapping[str, str], root: Path) -> tuple[Found, ...]:
    """The devices that a ROCm program sees, in its order.

    ROCR_VISIBLE_DEVICES is applied first; HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, counts what it leaves.

    Args:
        environment: Environment variables.
        root: The folder that `sys` is in.
    """
    nodes = _gpu_nodes(root / "sys/class/kfd/kfd/topology/nodes")
    uuids = [f"GPU-{_properties(node)['unique_id']:016x}" for node in nodes]
    visible = visible_devices(environment.get("ROCR_VISIBLE_DEVICES"), uuids)
    setting = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    chosen = visible_devices(setting, [uuids[index] for index in visible])
    by_node = {int(nodes[visible[index]].name): str(index) for index in chosen}
    return tuple(_found(nodes[visible[index]], root, by_node) for index in chosen)


def _gpu_nodes(nodes: Path) -> list[Path]:
    """Folders of the GPUs that this process may use. In a container those of the others cannot be read."""
    gpu_nodes = []
    for node in sorted(nodes.glob("[0-9]*"), key=lambda node: int(node.name)):
        try:
            properties = _properties(node)
        except OSError:
            continue
        if properties.get("gfx_target_version"):
            gpu_nodes.append(node)
    return gpu_nodes


def _found(node: Path, root: Path, by_node: Mapping[int, str]) -> Found:
    properties = _properties(node)
    card = root / f"sys/class/drm/renderD{properties['drm_render_minor']}/device"
    links = [_properties(link) for link in sorted(node.glob("io_links/[0-9]*"))]
    fabric = [link for link in links if link["type"] == XGMI]
    total = sum(bank["size_in_bytes"] for bank in map(_properties, node.glob("mem_banks/[0-9]*")) if _is_local(bank))
    used = int(_text(card / "mem_info_vram_used") or 0)
    generation, width = _pcie(card)
    words = [f"{len(fabric)} × Infinity Fabric"] if fabric else []
    words += [f"PCIe {generation}.0 x{width}"] if generation else []
    return Found(
        device=Device(
            kind="cuda",
            name=_name(properties, card),
            memory_total_bytes=total,
            memory_free_bytes=max(0, total - used),
            native_bfloat16=_has_bfloat16(properties["gfx_target_version"]),
            gfx=_gfx(properties["gfx_target_version"]),
            link=", ".join(words) or None,
            visible_as=by_node[int(node.name)],
        ),
        host_bytes_per_second=pcie_bytes_per_second(generation, width) if generation else None,
        links_bytes_per_second=sum(link["max_bandwidth"] for link in fabric) * 1e6 or None,
        linked=frozenset(by_node[link["node_to"]] for link in fabric if link["node_to"] in by_node),
    )


def _name(properties: Mapping[str, int], card: Path) -> str:
    """Its name on the market where the catalogue has it: the board's own is another (MI350 OAM for an MI350X)."""
    figures = reported_as(f"{properties['vendor_id']:04x}:{properties['device_id']:04x}")
    if figures is not None:
        return figures.reported[0]
    return _text(card / "product_name") or f"AMD {_gfx(properties['gfx_target_version'])}"


def _properties(folder: Path) -> dict[str, int]:
    """The numbers of a `properties` file: a name and a number in every line."""
    lines = (folder / "properties").read_text(encoding="ascii").splitlines()
    return {name: int(number) for name, _, number in (line.partition(" ") for line in lines)}


def _is_local(bank: Mapping[str, int]) -> bool:
    return bank["heap_type"] in LOCAL_MEMORY


def _gfx(version: int) -> str:
    """AMD's name for the instruction set of version 90402, that is 9.4.2: its last two numbers are hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _has_bfloat16(version: int) -> bool:
    """Return whether matrix products are computed in bfloat16: from MI100 (gfx908) and Radeon RX 7000 (gfx11) on."""
    return 90008 <= version < 100000 or version >= 110000


def _pcie(card: Path) -> tuple[int, int]:
    """Generation and lanes that the card can do; 0 where they are not said."""
    speed = re.match(r"([0-9.]+) GT/s", _text(card / "max_link_speed"))
    return GENERATION_BY_SPEED.get(speed[1], 0) if speed else 0, int(_text(card / "max_link_width") or 0)


def _text(file: Path) -> str:
    """Return the content of a file of /sys; empty where it is missing or the driver does not tell."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
