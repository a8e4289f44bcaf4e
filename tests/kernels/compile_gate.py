"""What compilers make of the kernels for five generations of devices, kept in `compiled.md` so that a change shows.

    python -m tests.kernels.compile_gate            show it
    python -m tests.kernels.compile_gate --save     and write it to the table
    python -m tests.kernels.compile_gate rope 90    show a part: of a file, or an entry, for a device; or save that

A kernel must keep what it computes in registers, fit in the shared memory that a device has, and read and write memory
in more than single 16-bit numbers wherever there are neighbours to read with them.
"""

import sys
import warnings
from pathlib import Path

import triton
from triton.errors import TritonError

from tests.kernels.entries import ENTRIES
from tests.kernels.offline import LIMITS, Compiled, compiled_for

__all__ = ["NAMES", "TABLE", "compiled", "complaints", "line", "read_table", "save"]

TABLE = Path(__file__).parent / "compiled.md"
NAMES = [f"{file}: {name}" for file, entries in ENTRIES.items() for name in entries]

MAX_SCALARS = 4
"""Loads or stores of single 16-bit or 8-bit numbers that a kernel may have: a label, a scale, an offset of its row."""

HEAD = f"""# What the kernels compile to

Made with Triton {{version}} by `python -m tests.kernels.compile_gate --save`. Behind the bits that each thread reads or
writes with an instruction stands the number of these; `copies` go to shared memory without a register. `blocks` is how
many a multiprocessor holds at once. More than {MAX_SCALARS} loads or stores of 16 bits or less
are refused, and any spill.

| device | entry | kernel | warps | registers | spills | shared KiB | blocks | loads | copies | stores | tensor cores |
| - | - | - | - | - | - | - | - | - | - | - | - |
"""


def compiled(name: str, arch: int) -> list[Compiled]:
    """The kernels that an entry launches on a device of a compute capability."""
    file, _, entry = name.partition(": ")
    with compiled_for(arch) as kernels, warnings.catch_warnings():
        # Triton says that a later version will have another default than it has now.
        warnings.filterwarnings("ignore", message=".*FP fusion", category=UserWarning)
        ENTRIES[file][entry]()
    return kernels


def line(name: str, arch: int, kernel: Compiled) -> str:
    """A kernel's line of the table."""
    cells = [
        f"sm_{arch}",
        name,
        kernel.kernel,
        kernel.num_warps,
        kernel.num_registers,
        kernel.num_spills,
        f"{kernel.shared_bytes / 1024:.1f}",
        kernel.num_blocks,
        *(_counts(counter) for counter in (kernel.loads, kernel.copies, kernel.stores, kernel.products)),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _counts(counter: dict[int, int] | dict[str, int]) -> str:
    return ", ".join(f"{kind} x{number}" for kind, number in sorted(counter.items(), reverse=True)) or "-"


def complaints(kernel: Compiled) -> list[str]:
    """What is wrong with a kernel."""
    found = []
    if kernel.num_spills:
        found.append(
            f"{kernel.kernel}: {kernel.num_spills} instructions spill registers; use smaller blocks or more warps"
        )
    for kind, counter in (("loads", kernel.loads), ("copies", kernel.copies), ("stores", kernel.stores)):
        if (number := counter[16] + counter[8]) > MAX_SCALARS:
            found.append(
                f"{kernel.kernel}: {number} {kind} of a single number of 16 bits or less; "
                "are neighbours read by neighbouring threads, and is the stride known to be a multiple of 16?"
            )
    return found


def read_table() -> tuple[str, dict[tuple[str, str], list[str]]]:
    """The version of Triton that the table was made with, and its lines by device and entry."""
    text = TABLE.read_text() if TABLE.exists() else ""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in text.splitlines():
        if row.startswith("| sm_"):
            device, name, _ = row.removeprefix("| ").split(" | ", 2)
            lines.setdefault((device, name), []).append(row)
    version = text.partition("Made with Triton ")[2].partition(" ")[0]
    return version, lines


def save(found: dict[tuple[str, str], list[str]]) -> None:
    """Put lines into the table, in the place of those of the same devices and entries; what has no entry is dropped."""
    version, lines = read_table()
    lines = {**(lines if version == triton.__version__ else {}), **found}
    keys = [(f"sm_{arch}", name) for arch in LIMITS for name in NAMES]
    text = "".join(f"{row}\n" for key in keys for row in lines.get(key, []))
    TABLE.write_text(HEAD.format(version=triton.__version__) + text)


def main(arguments: list[str]) -> int:
    """Compile all, or what is named, show it, and save it where that is asked for."""
    archs = [arch for arch in LIMITS if str(arch) in arguments] or list(LIMITS)
    prefixes = tuple(word for word in arguments if not word.isdigit() and word != "--save") or ("",)
    found: dict[tuple[str, str], list[str]] = {}
    wrong = []
    for arch in archs:
        for name in (name for name in NAMES if name.startswith(prefixes)):
            try:
                kernels = compiled(name, arch)
            except TritonError as error:
                wrong.append(f"sm_{arch} {name}: {error}")
                continue
            found[f"sm_{arch}", name] = [line(name, arch, kernel) for kernel in kernels]
            wrong += [f"sm_{arch} {name}: {complaint}" for kernel in kernels for complaint in complaints(kernel)]
            print(*found[f"sm_{arch}", name], sep="\n", flush=True)
            if "--save" in arguments:
                save(found)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
