"""Facts of `tunekit doctor`: installed packages, the machine, and the features that follow from both.

The bounds come from tunekit's own package metadata and the versions from that of the others, so nothing heavy is
imported. Nothing is printed here.
"""

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tunekit.errors import PlanError
from tunekit.estimates.facts import Device, Hardware
from tunekit.files import read_table
from tunekit.probe.amd import amd_devices
from tunekit.probe.hardware import probe_node, with_nodes
from tunekit.probe.host import ROOT
from tunekit.recipe.sections.section import Tracker

Driver = Literal["NVIDIA", "AMD"]

BUNDLES = {"all", "dev", "test"}
"""Extras of tunekit that bring the packages of other extras."""

BY_DRIVER: dict[Driver, tuple[str, str, str]] = {
    "NVIDIA": ("cu", "nvidia-smi", "CUDA_VISIBLE_DEVICES"),
    "AMD": ("rocm", "amd-smi", "HIP_VISIBLE_DEVICES"),
}
"""Build tag in torch's version, tool that lists the GPUs, and variable that hides them, for each driver."""

FLASH_ATTENTION_2_CAPABILITY = (8, 0)
"""Oldest CUDA compute capability that the flash-attn package runs on."""

FOUR_BIT_CAPABILITY = (6, 0)
"""Oldest CUDA compute capability with bitsandbytes' NF4 and FP4."""


@dataclass(frozen=True)
class Package:
    """A distribution of the stack, and the versions of it that tunekit is made for."""

    name: str
    version: str | None
    """Installed version; None when it is not installed."""
    bounds: str = ""
    """Versions that tunekit's metadata allows; empty where it names none."""
    extra: str | None = None
    """Extra of tunekit that brings the package; None for a core dependency, or one that tunekit does not ask for."""

    @property
    def state(self) -> Literal["ok", "absent", "missing", "outside"]:
        """`missing` and `outside` want mending; `absent` is a package that one can do without."""
        if self.version is None:
            return "missing" if self.bounds and self.extra is None else "absent"
        return "ok" if SpecifierSet(self.bounds).contains(self.version, prereleases=True) else "outside"

    @property
    def hint(self) -> str | None:
        """The command that mends it; None when it is fine, or not needed."""
        if self.state == "ok" or not self.bounds:
            return None
        if self.extra is not None:
            return f"pip install 'tunekit[{self.extra}]'"
        return f"pip install '{self.name}{self.bounds}'"


@dataclass(frozen=True)
class Feature:
    """Something that tunekit can do if the machine and the packages allow it."""

    name: str
    available: bool
    detail: str
    """Package or device that the feature uses, or lacks."""
    hint: str | None = None
    """Command or step that provides the feature; None when it is available, or this machine cannot have it."""


@dataclass(frozen=True)
class Diagnosis:
    """All that `tunekit doctor` shows."""

    tunekit: str
    """Version of tunekit."""
    python: str
    system: str
    hardware: Hardware | None
    """The devices; None when torch is missing, for its build decides which count, or when they cannot be looked at."""
    packages: tuple[Package, ...]
    features: tuple[Feature, ...]
    problem: str | None = None
    """Reason that no plan can be made here: a driver that does not answer, or a launcher that contradicts the machine.
    """

    @property
    def healthy(self) -> bool:
        """True if every core dependency is installed and every package is inside its bounds."""
        return all(package.state in ("ok", "absent") for package in self.packages)

    def fixes(self) -> str:
        """Return a shell script that installs what is missing or outside its bounds.

        What only optional features need is in it as comments: extras such as vLLM ask for one version of torch.
        """
        broken = [package for package in self.packages if package.state in ("missing", "outside")]
        lines = [f"# {package.name} {package.version or 'is missing'}, needs {package.bounds}" for package in broken]
        if broken:
            requirements = (f"{package.name}{package.bounds}" for package in broken)
            lines.append(_pip_install(*requirements))
        by_package = {None, *(package.hint for package in self.packages)}
        lines += [f"# {feature.name}: {feature.hint}" for feature in self.features if feature.hint not in by_package]
        by_extra: dict[str, list[str]] = {}
        for package in self.packages:
            if package.state == "absent" and package.extra is not None:
                by_extra.setdefault(package.extra, []).append(package.name)
        for extra, names in by_extra.items():
            lines.append(f"# optional, {', '.join(names)}: {_pip_install(f'tunekit[{extra}]')}")
        return "\n".join(lines or ["# nothing is missing"])


def _pip_install(*requirements: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def diagnose() -> Diagnosis:
    """Look at the installation and the machine."""
    try:
        own = metadata.metadata("tunekit")
        version, requires, extras = own["Version"], own.get_all("Requires-Dist"), own.get_all("Provides-Extra")
    except metadata.PackageNotFoundError:
        version, requires, extras = "source tree, not installed", None, None
    packages = compare(requires or [], extras or [], installed(stack()))
    hardware, problem = None, None
    if any(package.name == "torch" and package.version for package in packages):
        try:
            hardware = probe_node()
            hardware = with_nodes(hardware, os.environ)
        except PlanError as error:
            problem = str(error)
    return Diagnosis(
        tunekit=version,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=platform.platform(),
        hardware=hardware,
        packages=packages,
        features=features(packages, hardware, driver=_driver()),
        problem=problem,
    )


def stack() -> list[str]:
    """The packages that decide how training goes, from `stack.yaml`."""
    names: list[str] = read_table(Path(__file__).with_name("stack.yaml"))
    return names


def _driver() -> Driver | None:
    """Return the driver that an accelerator of this machine has, whether or not torch can use it."""
    from tunekit.probe.nvidia import has_nvidia_driver

    if has_nvidia_driver():
        return "NVIDIA"
    return "AMD" if amd_devices({}, ROOT) else None


def installed(names: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each distribution, or None."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def compare(requires: Iterable[str], extras: Iterable[str], versions: Mapping[str, str | None]) -> tuple[Package, ...]:
    """Put what is installed beside what is asked for.

    Args:
        requires: tunekit's requirements, as its metadata has them (`Requires-Dist`).
        extras: The names of its extras.
        versions: Installed version by distribution, None where there is none.
    """
    packages = {name: Package(name, version) for name, version in versions.items()}
    for need in map(Requirement, requires):
        name = need.name.lower()
        if name not in packages or packages[name].bounds:
            continue
        core = need.marker is None or need.marker.evaluate({"extra": ""})
        extra = None if core else _extra_of(need, extras)
        if core or extra is not None:
            bounds = ",".join(sorted(map(str, need.specifier), reverse=True))
            packages[name] = Package(name, versions[name], bounds, extra)
    return tuple(packages.values())


def _extra_of(need: Requirement, extras: Iterable[str]) -> str | None:
    """The extra that brings the package on this machine, or None."""
    marker = need.marker
    holds = [extra for extra in extras if marker is not None and marker.evaluate({"extra": extra})]
    return next((extra for extra in holds if extra not in BUNDLES), None)


def features(packages: Iterable[Package], hardware: Hardware | None, *, driver: Driver | None) -> tuple[Feature, ...]:
    """Return the features of tunekit with their state on this machine and the remedy for each that is missing.

    Args:
        packages: The stack.
        hardware: The devices, or None when they could not be looked at.
        driver: Whose driver there is for an accelerator.
    """
    by_name = {package.name: package for package in packages}
    plots = _brought("plots as figures and PNG", by_name["matplotlib"])
    trackers = (_brought(f"output.report_to: {name}", by_name[name]) for name in get_args(Tracker))
    available = (_four_bit(by_name["bitsandbytes"], hardware), plots, *trackers)
    if hardware is None:
        return available
    flash = _flash_attention(by_name["flash-attn"], hardware)
    return _gpu(by_name["torch"], hardware, driver), _bfloat16(hardware), *available, flash


def _gpu(torch: Package, hardware: Hardware, driver: Driver | None) -> Feature:
    name = "training on a GPU"
    if hardware.accelerators:
        return Feature(name, True, f"{len(hardware.accelerators)} × {hardware.accelerators[0].name}")
    if hardware.unused:
        return Feature(name, False, f"tunekit does not train on the {hardware.unused[0].name}; the CPU is used")
    if driver is None or torch.version is None:
        return Feature(name, False, "no GPU; training runs on the CPU")
    platform, tool, variable = BY_DRIVER[driver]
    if any(f"+{other}" in torch.version for other in ("cpu", "cu", "rocm") if other != platform):
        detail = f"an {driver} driver is installed, but torch {torch.version} is not built for it"
        api_name = "CUDA" if driver == "NVIDIA" else "ROCm"
        return Feature(name, False, detail, f"install a {api_name} build of torch: https://pytorch.org/get-started")
    detail = f"an {driver} driver is installed, but no GPU is visible"
    return Feature(name, False, detail, f"check {tool} and {variable}")


def _bfloat16(hardware: Hardware) -> Feature:
    name, is_fast = hardware.device.name, hardware.device.native_bfloat16
    detail = name if is_fast else f"{name} has no fast bfloat16; float32 is used"
    return Feature("bfloat16 at full speed", is_fast, detail)


def _brought(name: str, package: Package) -> Feature:
    """A feature that there is where a package is installed."""
    if package.version is not None:
        return Feature(name, True, f"{package.name} {package.version}")
    return Feature(name, False, f"needs {package.name}", package.hint)


def _four_bit(bitsandbytes: Package, hardware: Hardware | None) -> Feature:
    name = "4-bit base model (adapter: qlora)"
    if bitsandbytes.version is None:
        return Feature(name, False, "needs bitsandbytes", bitsandbytes.hint)
    if hardware is None or not hardware.accelerators:
        return Feature(name, True, f"bitsandbytes {bitsandbytes.version}, on the CPU: correct, but slow")
    nvidia = (gpu for gpu in hardware.accelerators if gpu.gfx is None)
    old = [gpu.name for gpu in nvidia if not _is_at_least(gpu, FOUR_BIT_CAPABILITY)]
    if old:
        return Feature(name, False, f"{old[0]} is older than compute capability {_dotted(FOUR_BIT_CAPABILITY)}")
    return Feature(name, True, f"bitsandbytes {bitsandbytes.version}, on the GPU")


def _flash_attention(flash_attn: Package, hardware: Hardware) -> Feature:
    name = "attn_implementation: flash_attention_2"
    able = [gpu for gpu in hardware.accelerators if _is_at_least(gpu, FLASH_ATTENTION_2_CAPABILITY)]
    if not able or len(able) < len(hardware.accelerators):
        needed = f"needs a GPU of compute capability {_dotted(FLASH_ATTENTION_2_CAPABILITY)} or newer"
        return Feature(name, False, f"{needed}; sdpa is used")
    if flash_attn.version is None:
        return Feature(name, False, "needs flash-attn; sdpa is used", "pip install flash-attn --no-build-isolation")
    return Feature(name, True, f"flash-attn {flash_attn.version}")


def _is_at_least(device: Device, capability: tuple[int, int]) -> bool:
    return device.compute_capability is not None and device.compute_capability >= capability


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
