"""NVIDIA's accelerators, by NVML: the driver's own library, which nvidia-smi asks too.

It says what the text of nvidia-smi does not say in one form: MIG devices with their memory, and which two GPUs NVLink
joins. Counting devices by NVML needs no CUDA context, so nothing of a GPU is used up by looking.

Indices count as nvidia-smi lists the devices. CUDA's own order is another where they are unlike and CUDA_DEVICE_ORDER
is not PCI_BUS_ID, so a run is told its device by UUID: that is the planned one in any order.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device
from tunekit.estimates.hardware.catalogue import pcie_bytes_per_second
from tunekit.probe.found import Found, visible_devices
from tunekit.probe.host import host_cpu


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
            hint="run nvidia-smi; a restart may help",
        ) from error


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver responds."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@dataclass(frozen=True)
class DeviceUsage:
    """Use of a GPU or MIG device, by whichever programs.

    Attributes:
        name: Its name.
        busy: Share of the last sample period, at most a second, in which it computed; None where NVML does not tell,
            as of MIG devices.
        used_bytes: Memory in use.
        total_bytes: Its memory.
    """

    name: str
    busy: float | None
    used_bytes: int
    total_bytes: int


def usage_of_devices(uuids: Sequence[str]) -> tuple[DeviceUsage, ...]:
    """Return the use of devices, in order; without those that NVML does not know, and none without a driver."""
    usages: list[DeviceUsage] = []
    if not uuids:
        return ()
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for uuid in uuids:
            with contextlib.suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                total_bytes, free_bytes = _memory(handle)
                name = pynvml.nvmlDeviceGetName(handle)
                usages.append(DeviceUsage(name, _busy(handle), total_bytes - free_bytes, total_bytes))
        pynvml.nvmlShutdown()
    return tuple(usages)


def _busy(handle: Any) -> float | None:
    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:
        return None


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
