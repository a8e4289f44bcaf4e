"""Facts of this machine: its processor, its accelerators, the links between them, and how many such nodes there are.

An accelerator as the driver shows it, before it is compared with the others of its node.

NVIDIA's accelerators, by NVML: the driver's own library, which nvidia-smi asks too.

It says what the text of nvidia-smi does not say in one form: MIG devices with their memory, and which two GPUs NVLink
joins. Counting devices by NVML needs no CUDA context, so nothing of a GPU is used up by looking.

Indices count as nvidia-smi lists the devices. CUDA's own order is another where they are unlike and CUDA_DEVICE_ORDER
is not PCI_BUS_ID, so a run is told its device by UUID: that is the planned one in any order.

AMD's accelerators, by what the kernel's driver writes under /sys.

The compute driver's topology is what ROCm itself reads: /sys/class/kfd/kfd/topology has a folder for every processor
and GPU, with its memory and its links, and the graphics driver adds how much memory is in use. It needs no tool, is
there in containers too, and its form is kept by the kernel, whereas that of rocm-smi and amd-smi changed with releases.

The variables that hide accelerators from programs: CUDA_VISIBLE_DEVICES and its like of ROCm.

Each lists devices by index, or else by UUID or the beginning of one. What is named first is device 0. The first entry
that names no device ends the list, so that -1 or an empty one hides all (CUDA C++ programming guide, CUDA environment
variables).
"""

import os
import platform
import re
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import pynvml

from tunekit.errors import PlanError
from tunekit.planner.decisions.environment import DECIDED
from tunekit.planner.facts import Device, Figures, Hardware
from tunekit.planner.hardware.catalogue import NOTES, pcie_bytes_per_second, reported_as
from tunekit.probe.host import ROOT, apple_device, host_cpu, num_cores, processor
from tunekit.probe.nodes import read_launch, use_launch


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


def nvidia_devices(environment: Mapping[str, str]) -> tuple[Found, ...]:
    """The devices that a CUDA program sees, in its order; none without a driver.

    Where a GPU is divided, a program sees one MIG device and nothing else (NVIDIA Multi-Instance GPU user guide,
    "CUDA device enumeration").

    Raises:
        PlanError: There is a driver, and it does not answer.
    """
    try:
        pynvml.nvmlInit()
        try:
            return _visible(environment)
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        # Most often the driver was updated and its old module is still loaded.
        raise PlanError(
            f"the NVIDIA driver does not answer: {str(error).rstrip('.')}",
            hint="see what nvidia-smi says; a restart may help",
        ) from error


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver responds."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


def _visible(environment: Mapping[str, str]) -> tuple[Found, ...]:
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    parts = [_parts(gpu) for gpu in gpus]
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is not None and setting.strip().startswith("MIG-"):
        named = [(part, gpu) for gpu, own in zip(gpus, parts, strict=True) for part in own or ()]
        visible = visible_devices(setting, [_uuid(part) for part, _ in named])
        return tuple(_part(*named[index]) for index in visible[:1])
    chosen = visible_devices(setting, [_uuid(gpu) for gpu in gpus])
    for index in chosen:
        if own := parts[index]:
            return (_part(own[0], gpus[index]),)
    whole = [gpus[index] for index in chosen if parts[index] is None]
    return tuple(_gpu(gpu, [other for other in whole if other is not gpu]) for gpu in whole)


def _gpu(gpu: Any, others: list[Any]) -> Found:
    generation, width = _pcie(gpu)
    pcie = None if generation is None or width is None else pcie_bytes_per_second(generation, width)
    num_links, link_speed = _nvlinks(gpu)
    words = [f"{num_links} × NVLink"] if num_links else []
    if pcie is not None:
        words.append(f"PCIe {generation}.0 x{width}")
    return Found(
        device=_device(gpu, gpu, link=", ".join(words) or None),
        host_bytes_per_second=pcie,
        links_bytes_per_second=None if link_speed is None else num_links * link_speed,
        linked=frozenset(_uuid(other) for other in others if num_links and _has_nvlink(gpu, other)),
    )


def _part(part: Any, gpu: Any) -> Found:
    """A MIG device; it has no link to others."""
    return Found(device=_device(part, gpu, link=None))


def _device(handle: Any, gpu: Any, *, link: str | None) -> Device:
    total_bytes, free_bytes = _memory(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(gpu)
    return Device(
        kind="cuda",
        name=pynvml.nvmlDeviceGetName(handle),
        memory_total_bytes=total_bytes,
        memory_free_bytes=free_bytes,
        native_bfloat16=major >= 8,
        compute_capability=(major, minor),
        link=link,
        visible_as=_uuid(handle),
    )


def _memory(handle: Any) -> tuple[int, int]:
    """Total and free memory. A GPU that has none of its own, as of a DGX Spark, shares the main memory."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError_NotSupported:
        cpu = host_cpu()
        return cpu.memory_total_bytes, cpu.memory_free_bytes
    return memory.total, memory.free


def _uuid(handle: Any) -> str:
    return str(pynvml.nvmlDeviceGetUUID(handle))


def _parts(gpu: Any) -> list[Any] | None:
    """The MIG devices of a GPU; None where it is not divided."""
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(gpu)
    except pynvml.NVMLError_NotSupported:
        return None
    if current != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    parts = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            parts.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        except pynvml.NVMLError_NotFound:
            continue
    return parts


def _pcie(gpu: Any) -> tuple[int | None, int | None]:
    """Generation and lanes that GPU and board can do together. A virtual machine may hide them."""
    try:
        return pynvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu), pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
    except pynvml.NVMLError:
        return None, None


def _nvlinks(gpu: Any) -> tuple[int, float | None]:
    """Number of active NVLinks, and bytes a second of each in one direction, where the driver says so."""
    active = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += pynvml.nvmlDeviceGetNvLinkState(gpu, link)
        except pynvml.NVMLError:
            break
    if not active:
        return 0, None
    (speed,) = pynvml.nvmlDeviceGetFieldValues(gpu, [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    bandwidth = speed.nvmlReturn == pynvml.NVML_SUCCESS and speed.value.uiVal
    return active, speed.value.uiVal * 1e6 if bandwidth else None


def _has_nvlink(gpu: Any, other: Any) -> bool:
    """Return whether NVLink joins two GPUs, directly or through a switch."""
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(gpu, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except pynvml.NVMLError:
        return False
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


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
    generation, width = _pcie_of_amd(card)
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


def _pcie_of_amd(card: Path) -> tuple[int, int]:
    """Generation and lanes that the card can do; 0 where they are not said."""
    speed = re.match(r"([0-9.]+) GT/s", _text(card / "max_link_speed"))
    return GENERATION_BY_SPEED.get(speed[1], 0) if speed else 0, int(_text(card / "max_link_width") or 0)


def _text(file: Path) -> str:
    """Return the content of a file of /sys; empty where it is missing or the driver does not tell."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class TorchBuild:
    """Accelerator that the installed torch was built for."""

    cuda: str | None
    hip: str | None
    """Version of ROCm's HIP."""


def probe_hardware() -> Hardware:
    """Probe the hardware of a run on all nodes.

    Raises:
        PlanError: The driver does not answer, or the launcher and the machine contradict each other.
    """
    return with_nodes(probe_node(), os.environ)


def probe_node() -> Hardware:
    """Probe this machine, regardless of launchers. Accelerators count only where torch is built for them.

    Raises:
        PlanError: The driver does not answer.
    """
    build = torch_build()
    cpu = host_cpu()
    devices: tuple[Found, ...] = ()
    notes = []
    if build.cuda is not None:
        # Loading NVML takes a fifth of the time of a command that looks at no machine.

        devices = nvidia_devices(os.environ)
    elif build.hip is not None:
        devices = amd_devices(os.environ, ROOT)
        notes += [NOTES["rocm"]] if devices else []
    used, unused_devices = split_by_kind(devices)
    unused = tuple(unused_device.device for unused_device in unused_devices)
    if unused:
        names = ", ".join(dict.fromkeys(device.name for device in unused))
        notes.append(f"a run computes on equal accelerators, so {names} {'is' if len(unused) == 1 else 'are'} left out")
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        unused = (apple_device(processor(), cpu),)
        notes.append(f"the {unused[0].name} is not used: tunekit does not train on MPS, and computes on the CPU")
    return Hardware(
        cpu=cpu,
        accelerators=tuple(unused_device.device for unused_device in used),
        unused=unused,
        num_cores=num_cores(),
        flash_attn=_is_installed("flash-attn"),
        flash_attn_3=find_spec("flash_attn_interface") is not None,
        flash_attn_4=_is_installed("flash-attn-4"),
        triton=find_spec("triton") is not None,
        liger_kernel=find_spec("liger_kernel") is not None,
        torchao=find_spec("torchao") is not None,
        cxx=which(os.environ.get("CXX", "g++")) is not None,
        environment={name: os.environ[name] for name in DECIDED if name in os.environ},
        deepspeed=find_spec("deepspeed") is not None,
        vllm=find_spec("vllm") is not None,
        figures=figures_of(used),
        note="; ".join(notes) or None,
    )


def with_nodes(node: Hardware, environment: Mapping[str, str]) -> Hardware:
    """A machine with the nodes that the launcher gave; without accelerators its processes share the processor.

    Args:
        node: This node.
        environment: Environment variables.

    Raises:
        PlanError: The launcher and the machine contradict each other.
    """
    launch = read_launch(environment)
    if launch is None:
        return node
    used, note = use_launch(launch, len(node.accelerators))
    # torchrun sets one thread where nobody said a number.
    unset = ("OMP_NUM_THREADS",) if launch.starts_processes else ()
    hardware = node.model_copy(
        update={
            "accelerators": node.accelerators[:used],
            "unused": node.accelerators[used:] + node.unused,
            "num_nodes": launch.num_nodes,
            "environment": {name: value for name, value in node.environment.items() if name not in unset},
            "note": "; ".join(filter(None, (node.note, note))) or None,
        }
    )
    return hardware.with_processes(launch.num_processes)


def _is_installed(name: str) -> bool:
    """Return whether a distribution is installed; two of FlashAttention share their import name."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def torch_build() -> TorchBuild:
    """Return torch's build from the one small file that names it; torch itself is not imported."""
    variables = runpy.run_path(str(distribution("torch").locate_file(Path("torch", "version.py"))))
    return TorchBuild(cuda=variables["cuda"], hip=variables["hip"])
