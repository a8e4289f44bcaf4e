"""Each kernel compiles for five generations of devices, within their limits, to what `compiled.md` says."""

import difflib
import re

import pytest
import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from tests.kernels import compile_gate, kernel_modules, offline
from tests.kernels.compile_gate import MAX_SCALARS, NAMES, compiled, complaints, line, read_table
from tests.kernels.entries import ENTRIES, new
from tests.kernels.offline import LIMITS, compiled_for
from tunekit.kernels.backend import jit, tl

SAVE = "python -m tests.kernels.compile_gate --save"


@jit
def _copy(x_ptr, y_ptr, stride, block: tl.constexpr, copies: tl.constexpr):
    index = tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for row in tl.static_range(copies):
        total += tl.load(x_ptr + row * block + index * stride).to(tl.float32)
    tl.store(y_ptr + index * stride, total.to(y_ptr.dtype.element_ty))


@jit
def _product(x_ptr, y_ptr, rows: tl.constexpr, columns: tl.constexpr):
    row = tl.arange(0, rows)
    x = tl.load(x_ptr + row[:, None] * columns + tl.arange(0, columns)[None, :])
    tl.store(y_ptr + row[:, None] * rows + row[None, :], tl.dot(x, tl.trans(x)))


@pytest.mark.slow
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_within_the_limits_and_as_the_table_says(name, arch):
    kernels = compiled(name, arch)
    assert kernels, f"{name} launches no kernel"
    assert not [complaint for kernel in kernels for complaint in complaints(kernel)]
    version, table = read_table()
    if triton.__version__ == version:
        before, now = table.get((f"sm_{arch}", name), []), [line(name, arch, kernel) for kernel in kernels]
        difference = "\n".join(difflib.unified_diff(before, now, "compiled.md", "now", lineterm="", n=0))
        assert before == now, f"{difference}\nIf that is meant: {SAVE}"


def test_the_table_has_nothing_else():
    _, table = read_table()
    assert table.keys() == {(f"sm_{arch}", name) for arch in LIMITS for name in NAMES}, f"bring it up to date: {SAVE}"


def test_each_kernel_is_in_an_entry():
    """By the table, which the tests above hold against what is compiled."""
    compiled_kernels = {row.split(" | ")[2] for rows in read_table()[1].values() for row in rows}
    functions = [
        value
        for module in kernel_modules()
        for value in vars(module).values()
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__
    ]
    called = {name for function in functions for name in function.fn.__code__.co_names}
    missing = sorted(
        f"{function.fn.__module__}.{function.fn.__name__}"
        for function in functions
        if function.fn.__name__ not in called | compiled_kernels
    )
    assert not missing, f"no entry in tests/kernels/entries.py launches {', '.join(missing)}"


def test_a_part_of_the_table_is_saved_beside_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_gate, "TABLE", tmp_path / "compiled.md")
    first, second = (("sm_90", name) for name in NAMES[:2])
    for keys in ([second], [first], [first, ("sm_90", "of old: none")]):
        compile_gate.save({key: [f"| {' | '.join(key)} | kernel |"] for key in keys})
    version, table = read_table()
    assert version == triton.__version__
    assert list(table) == [first, second]


def test_entries_are_filed_under_the_modules_that_they_are_for():
    assert ENTRIES.keys() <= {module.__name__.rpartition(".")[2] for module in kernel_modules()}


def test_contiguous_numbers_are_read_sixteen_bytes_at_a_time():
    with compiled_for(90) as kernels:
        _copy[(1,)](new(1024), new(1024), 1, 1024, 1, num_warps=4)
    (kernel,) = kernels
    assert (kernel.kernel, kernel.num_warps) == ("_copy", 4)
    assert (dict(kernel.loads), dict(kernel.stores)) == ({128: 1}, {128: 1})
    assert not complaints(kernel)


def test_scalar_reads_are_refused():
    with compiled_for(90) as kernels:
        _copy[(1,)](new(4096), new(4096), 3, 1024, 1, num_warps=4)
    (kernel,) = kernels
    assert kernel.loads[16] == 8 > MAX_SCALARS
    assert re.search("8 loads of a single number of 16 bits or less", complaints(kernel)[0])


@pytest.mark.slow
def test_spills_are_refused():
    with compiled_for(90) as kernels:
        _copy[(1,)](new(65536), new(16384), 1, 16384, 4, num_warps=1)
    (kernel,) = kernels
    assert re.search("instructions spill", complaints(kernel)[0])


@pytest.mark.parametrize(("arch", "instruction"), {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}.items())
def test_products_are_those_of_the_tensor_cores_of_each_generation(arch, instruction):
    with compiled_for(arch) as kernels:
        _product[(1,)](new(64, 64), new(64, 64, dtype=torch.float32), 64, 64, num_warps=4)
    assert list(kernels[0].products) == [instruction]


def test_more_shared_memory_than_a_device_has_is_refused():
    with compiled_for(90):
        _product[(1,)](new(64, 1024), new(64, 64, dtype=torch.float32), 64, 1024, num_warps=8)
    with (
        compiled_for(120),
        pytest.raises(OutOfResources, match=r"shared memory, Required: \d+, Hardware limit: 101376"),
    ):
        _product[(1,)](new(64, 1024), new(64, 64, dtype=torch.float32), 64, 1024, num_warps=8)


@pytest.mark.parametrize(
    ("num_registers", "num_warps", "shared_bytes", "arch", "num_blocks"),
    [
        (32, 4, 0, 90, 16),  # threads
        (128, 8, 0, 90, 2),  # registers
        (121, 8, 0, 90, 2),  # rounded up to 128
        (32, 4, 48 * 1024, 90, 4),  # shared memory, with 1 KiB for each block
        (16, 1, 0, 89, 24),  # blocks
    ],
)
def test_blocks_of_a_multiprocessor_are_counted(num_registers, num_warps, shared_bytes, arch, num_blocks):
    assert offline._num_blocks(num_registers, num_warps, shared_bytes, LIMITS[arch]) == num_blocks
