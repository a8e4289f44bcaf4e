"""Facts of this machine: its processor, its accelerators, the links between them, and how many such nodes there are."""

import os
import platform
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from packaging.version import Version

from tunekit.estimates.facts import Figures, Hardware
from tunekit.estimates.hardware.catalogue import NOTES, reported_as
from tunekit.planner.decisions.automodel import VERSION as AUTOMODEL_VERSION
from tunekit.planner.decisions.environment import DECIDED
from tunekit.probe.amd import amd_devices
from tunekit.probe.found import Found
from tunekit.probe.host import ROOT, apple_device, host_cpu, num_cores, processor
from tunekit.probe.nodes import read_launch, use_launch


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
        from tunekit.probe.nvidia import nvidia_devices

        devices = nvidia_devices(os.environ)
    elif build.hip is not None:
        devices = amd_devices(os.environ, ROOT)
        notes += [NOTES["rocm"]] if devices else []
    used, unequal = split_by_kind(devices)
    unused = tuple(accelerator.device for accelerator in unequal)
    if unused:
        names = ", ".join(dict.fromkeys(device.name for device in unused))
        notes.append(f"runs use identical accelerators: {names} {'is' if len(unused) == 1 else 'are'} not used")
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        unused = (apple_device(processor(), cpu),)
        notes.append(f"the {unused[0].name} is not used: tunekit does not train on MPS, but on the CPU")
    return Hardware(
        cpu=cpu,
        accelerators=tuple(accelerator.device for accelerator in used),
        unused=unused,
        num_cores=num_cores(),
        flash_attn=_is_installed("flash-attn"),
        flash_attn_3=find_spec("flash_attn_interface") is not None,
        flash_attn_4=_is_installed("flash-attn-4"),
        triton=find_spec("triton") is not None,
        liger_kernel=find_spec("liger_kernel") is not None,
        torchao=find_spec("torchao") is not None,
        schedulefree=find_spec("schedulefree") is not None,
        compressed_tensors=find_spec("compressed_tensors") is not None,
        shards_4bit=Version(version("torch")).release >= (2, 12),
        cxx=which(os.environ.get("CXX", "g++")) is not None,
        environment={name: os.environ[name] for name in DECIDED if name in os.environ},
        deepspeed=find_spec("deepspeed") is not None,
        vllm=_has_vllm(),
        automodel=_is_installed("nemo-automodel", AUTOMODEL_VERSION),
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


MIN_VLLM = Version("0.24")
"""The first vLLM that takes devices by UUID in CUDA_VISIBLE_DEVICES, as plans name them."""


def _has_vllm() -> bool:
    return find_spec("vllm") is not None and Version(version("vllm")) >= MIN_VLLM


def _is_installed(name: str, needed: str | None = None) -> bool:
    """Return whether a distribution is installed; two of FlashAttention share their import name.

    Args:
        name: Name of the distribution.
        needed: Its version; None for any.
    """
    try:
        return distribution(name).version == needed or needed is None
    except PackageNotFoundError:
        return False


def torch_build() -> TorchBuild:
    """Return torch's build from the one small file that names it; torch itself is not imported."""
    variables = runpy.run_path(str(distribution("torch").locate_file(Path("torch", "version.py"))))
    return TorchBuild(cuda=variables["cuda"], hip=variables["hip"])


def split_by_kind(found: Sequence[Found]) -> tuple[tuple[Found, ...], tuple[Found, ...]]:
    """The equal accelerators that hold the most memory together, and the others.

    A run computes on equal ones: the slowest sets the pace of all, and the smallest says what fits.
    """
    groups: dict[tuple[object, ...], list[Found]] = {}
    for each in found:
        device = each.device
        kind = (device.name, device.memory_total_bytes, device.compute_capability, device.gfx)
        groups.setdefault(kind, []).append(each)
    best = max(groups.values(), key=lambda group: sum(each.device.memory_total_bytes for each in group), default=[])
    return tuple(best), tuple(each for each in found if each not in best)


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
