"""Compiling kernels for accelerators that are not there: Triton brings the assembler, and needs no device to call it.

Within `compiled_for(90)` a stand-in for a driver says that the device is of compute capability 9.0, and takes what is
compiled where it would be loaded and launched; and tunekit's operations do on `meta` tensors what they do on a device,
where otherwise they only tell the shapes of their results. A public function that is called with `meta` tensors of real
shapes, and its backward pass, then has just those kernels compiled that would run: types, divisibility, constants and
numbers of warps are those of the call. What the machine code uses and how it reads memory is read from the code itself.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch.library import CustomOpDef
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import Benchmarker, DriverBase
from triton.runtime import driver

from tests.kernels import kernel_modules

__all__ = ["LIMITS", "Compiled", "compiled_for"]


class Limits(NamedTuple):
    """What a streaming multiprocessor has, by the tables of the CUDA programming guide."""

    num_threads: int
    num_blocks: int
    shared_bytes: int
    """Of all blocks; each takes 1 KiB more than it asks for, so one has at most 1 KiB less."""


LIMITS = {
    80: Limits(2048, 32, 164 * 1024),  # A100
    89: Limits(1536, 24, 100 * 1024),  # L4, L40S, RTX 40
    90: Limits(2048, 32, 228 * 1024),  # H100, H200
    100: Limits(2048, 32, 228 * 1024),  # B200
    120: Limits(1536, 24, 100 * 1024),  # RTX 50, RTX PRO 6000
}
"""By compute capability, ten times."""

NUM_REGISTERS = 65536
RESERVED_BYTES = 1024
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code: what it takes of a multiprocessor, and how it reads and writes memory."""

    kernel: str
    num_warps: int
    num_registers: int
    """Of each thread."""
    num_spills: int
    """Instructions that read or write what registers had no room for."""
    shared_bytes: int
    num_blocks: int
    """That a multiprocessor holds at once."""
    loads: Counter[int]
    """Instructions by the bits that each thread reads with one."""
    copies: Counter[int]
    """The same of those that go to shared memory without a register."""
    stores: Counter[int]
    products: Counter[str]
    """Instructions of the tensor cores."""


@contextmanager
def compiled_for(arch: int) -> Iterator[list[Compiled]]:
    """A context in which kernels are compiled for a device where they would be launched, each listed once.

    Raises:
        triton.OutOfResources: In the context, by a launch of what needs more shared memory than the device has.
    """
    found: dict[bytes, Compiled] = {}
    kernels: list[Compiled] = []
    with (
        tempfile.TemporaryDirectory(prefix="tunekit-compiled-") as folder,
        knobs.cache.scope(),
        pytest.MonkeyPatch.context() as patch,
    ):
        knobs.cache.dir = folder
        patch.setattr(driver, "_active", OfflineDriver(arch, found))
        # Torch knows no autocast of `meta`, and raises.
        patch.setattr(torch, "is_autocast_enabled", lambda device_type=None: False)
        patch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
        for module in kernel_modules():
            for value in vars(module).values():
                if isinstance(value, CustomOpDef):
                    patch.setattr(value, "_abstract_fn", value._init_fn)
        yield kernels
    kernels += found.values()


@dataclass
class OfflineDriver(DriverBase):
    """A driver of a device that is not there. Triton keeps what it compiled by device, so each has another number."""

    arch: int
    found: dict[bytes, Compiled]
    """What was launched, by its machine code."""
    binaries: list[bytes] = field(default_factory=list)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Benchmarker:
        raise NotImplementedError("there is nothing to measure without a device")

    @property
    def utils(self) -> "OfflineDriver":
        return self

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": LIMITS[self.arch].shared_bytes - RESERVED_BYTES}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, bytes, int, int, int]:
        """The module, which is none, as there is nothing to unload; the function, which is the code; three numbers."""
        return None, binary, 0, 0, LIMITS[self.arch].num_threads

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(grid_x: int, grid_y: int, grid_z: int, stream: int, function: bytes, *_: Any) -> None:
            if function not in self.found:
                self.found[function] = _examined(function, metadata, self.arch)

        return launch


def _examined(binary: bytes, metadata: Any, arch: int) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        command = [CUOBJDUMP, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (num_registers,) = {int(number) for number in re.findall(r"\bREG:(\d+)", text)}
    return Compiled(
        kernel=metadata.name,
        num_warps=metadata.num_warps,
        num_registers=num_registers,
        num_spills=len(re.findall(r"\b(?:LDL|STL)\b", text)),
        shared_bytes=metadata.shared,
        num_blocks=_num_blocks(num_registers, metadata.num_warps, metadata.shared, LIMITS[arch]),
        loads=_widths("LDG", text),
        copies=_widths("LDGSTS", text),
        stores=_widths("STG", text),
        products=Counter(re.findall(r"\b(UTC\w*MMA|[A-Z]G?MMA)\b", text)),
    )


def _widths(instruction: str, text: str) -> Counter[int]:
    widths: Counter[int] = Counter()
    for modifiers in re.findall(rf"\b{instruction}((?:\.\w+)+)", text):
        named = re.search(r"\.[US]?(8|16|64|128|256)\b", re.sub(r"\.LTC\w+|\.ENL\w*", "", modifiers))
        widths[256 if ".ENL2" in modifiers else int(named[1]) if named else 32] += 1
    return widths


def _num_blocks(num_registers: int, num_warps: int, shared_bytes: int, limits: Limits) -> int:
    """Registers are given out to warps, 256 at a time, and so eight to a thread."""
    per_warp = -(-num_registers // 8) * 8 * 32
    return min(
        NUM_REGISTERS // (per_warp * num_warps),
        limits.num_threads // (32 * num_warps),
        limits.shared_bytes // (shared_bytes + RESERVED_BYTES),
        limits.num_blocks,
    )
