"""NVIDIA's devices, as NVML tells them: a driver library that is compiled here answers with what real ones said."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tunekit.estimates.facts import Hardware

COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler and Linux")

ROOT = Path(__file__).parents[2]
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """A row of the driver's table."""

    uuid: str
    name: str
    total_mib: int
    free_mib: int
    capability: tuple[int, int]
    pcie: tuple[int, int] = (4, 16)
    num_nvlinks: int = 0
    num_active: int | None = None
    nvlink_mbps: int = 0
    parts: tuple["Gpu", ...] | None = None
    """MIG devices; None where MIG is off."""

    def row(self, number: int) -> str:
        active = self.num_nvlinks if self.num_active is None else self.num_active
        links = f"{self.num_nvlinks}, {active}, {self.nvlink_mbps}"
        mig = -1 if self.parts is None else len(self.parts)
        parts = f"parts{number}" if self.parts else "0"
        pcie = f"{self.pcie[0]}, {self.pcie[1]}"
        memory = f"{self.total_mib}ULL << 20, {self.free_mib}ULL << 20"
        capability = f"{self.capability[0]}, {self.capability[1]}"
        return f'{{"{self.uuid}", "{self.name}", {memory}, {capability}, {pcie}, {links}, {mig}, {parts}}}'


# As nvidia-smi printed them: NVIDIA/nccl-tests#228 (A100's links) and NVIDIA/k8s-test-infra#371 (GB200's).
A100 = Gpu(
    uuid="GPU-ff8a40d4-abc6-08d1-f939-15848b5d4e05",
    name="NVIDIA A100-SXM4-80GB",
    total_mib=81920,
    free_mib=81037,
    capability=(8, 0),
    num_nvlinks=12,
    nvlink_mbps=25000,
)
SECOND_A100 = replace(A100, uuid="GPU-0c512562-871f-8257-6187-b5ae1b986d5e", free_mib=80101)
GB200 = Gpu(
    uuid="GPU-d1b93026-6d5b-03bd-3a71-f85b47a61bde",
    name="NVIDIA GB200",
    total_mib=189471,
    free_mib=188000,
    capability=(10, 0),
    pcie=(6, 16),
    num_nvlinks=18,
    nvlink_mbps=53125,
)
RTX4090 = Gpu("GPU-a1", "NVIDIA GeForce RTX 4090", 24564, 24100, (8, 9))
GTX1080 = Gpu("GPU-b2", "NVIDIA GeForce GTX 1080", 8192, 8000, (6, 1), pcie=(3, 16))
# Names and UUIDs of the MIG devices as in NVIDIA's Multi-Instance GPU user guide.
MIG = replace(
    A100,
    name="NVIDIA A100-SXM4-40GB",
    num_nvlinks=0,
    parts=(
        Gpu("MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, 4850, (0, 0)),
        Gpu("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", 19968, 19900, (0, 0)),
    ),
)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Compiles the driver library for a list of GPUs, once for each list."""
    built = {}

    def compiled(gpus, bridged):
        if (gpus, bridged) not in built:
            folder = built[gpus, bridged] = tmp_path_factory.mktemp("driver")
            lines = [
                f"static const struct device parts{n}[] = {{{', '.join(part.row(0) for part in gpu.parts)}}};"
                for n, gpu in enumerate(gpus)
                if gpu.parts
            ]
            lines.append(
                f"static const struct device devices[] = {{{', '.join(g.row(n) for n, g in enumerate(gpus))}}};"
            )
            rows = (
                "{" + ", ".join(str(int(frozenset({one, other}) in bridged)) for other in range(8)) + "}"
                for one in range(8)
            )
            lines.append(f"static const int p2p[][8] = {{{', '.join(rows)}}};")
            (folder / "devices.h").write_text("\n".join(lines))
            source = Path(__file__).with_name("nvml.c")
            library = folder / "libnvidia-ml.so.1"
            subprocess.run([COMPILER, "-shared", "-fPIC", f"-I{folder}", "-o", library, source], check=True)
            (folder / "torch").mkdir()
            (folder / "torch/version.py").write_text("cuda, hip = '13.0', None\n")
            (folder / "torch-2.13.0.dist-info").mkdir()
            (folder / "torch-2.13.0.dist-info/METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
        return built[gpus, bridged]

    return compiled


PROBE = "from tunekit.probe.hardware import probe_hardware as look; print(look().model_dump_json())"


@pytest.fixture
def machine(build):
    """What is found on a machine with given GPUs, by a process of its own, with a torch that was built for CUDA."""

    def found(*gpus, bridged=(), code=PROBE, **environment):
        folder = build(gpus, frozenset(map(frozenset, bridged)))
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        paths = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-c", code]
        answer = subprocess.run(
            command, capture_output=True, text=True, env=kept | paths | environment, check=False, cwd=folder
        )
        if answer.returncode:
            raise AssertionError(answer.stderr)
        return Hardware.model_validate_json(answer.stdout) if code == PROBE else answer.stdout

    return found


def all_to_all(number):
    return [(one, other) for one in range(number) for other in range(one)]


def test_devices_are_what_the_driver_says(machine):
    hardware = machine(A100, SECOND_A100, bridged=all_to_all(2))
    assert [device.name for device in hardware.accelerators] == ["NVIDIA A100-SXM4-80GB"] * 2
    assert hardware.device.memory_total_bytes == 80 * 2**30
    assert hardware.accelerators[1].memory_free_bytes == 80101 * MIB
    assert hardware.device.compute_capability == (8, 0) and hardware.device.native_bfloat16
    assert hardware.device.link == "12 × NVLink, PCIe 4.0 x16"
    assert (hardware.num_accelerators, hardware.unused, hardware.note) == (2, (), None)


def test_one_process_computes_on_the_device_with_the_most_memory_free(machine):
    hardware = machine(SECOND_A100, A100)
    assert hardware.device.visible_as == A100.uuid
    assert [device.visible_as for device in hardware.freest(2)] == [SECOND_A100.uuid, A100.uuid]


def test_speeds_of_a_known_device_are_its_sheets_and_its_links_are_those_that_are_here(machine):
    figures = machine(A100, SECOND_A100, bridged=all_to_all(2)).figures
    assert figures.flops_16bit == 312e12
    assert figures.link_bytes_per_second == 300e9
    assert figures.host_bytes_per_second == pytest.approx(31.5e9, rel=0.001)
    assert figures.usd_per_hour is None and figures.network_bytes_per_second is None


def test_inactive_links_do_not_count(machine):
    halved = [replace(gpu, num_active=6) for gpu in (A100, SECOND_A100)]
    assert machine(*halved, bridged=all_to_all(2)).figures.link_bytes_per_second == 150e9


def test_line_code_is_no_data(machine):
    """The driver says 18 × 53.125 GB/s; NVIDIA sells 1.8 TB/s for both directions."""
    two = GB200, replace(GB200, uuid="GPU-e1")
    assert machine(*two, bridged=all_to_all(2)).figures.link_bytes_per_second == 900e9


def test_a_driver_that_does_not_tell_the_speed_of_its_links_leaves_it_to_the_sheet(machine):
    two = replace(A100, nvlink_mbps=0), replace(SECOND_A100, nvlink_mbps=0)
    assert machine(*two, bridged=all_to_all(2)).figures.link_bytes_per_second == 300e9


def test_bridges_between_pairs_do_not_carry_what_four_devices_exchange(machine):
    four = [replace(A100, uuid=f"GPU-{number}") for number in range(4)]
    figures = machine(*four, bridged=[(0, 1), (2, 3)]).figures
    assert figures.link_bytes_per_second == figures.host_bytes_per_second
    pair = machine(*four, bridged=[(0, 1), (2, 3)], CUDA_VISIBLE_DEVICES="2,3")
    assert pair.figures.link_bytes_per_second == 300e9


def test_without_nvlink_devices_speak_over_pcie(machine):
    figures = machine(RTX4090, replace(RTX4090, uuid="GPU-a2")).figures
    assert figures.link_bytes_per_second == figures.host_bytes_per_second == pytest.approx(31.5e9, rel=0.001)


def test_a_virtual_machine_that_hides_its_pcie_link_still_has_devices(machine):
    hardware = machine(Gpu("GPU-c", "Abacus 9", 16384, 16000, (7, 5), pcie=(0, 0)))
    assert hardware.device.name == "Abacus 9" and not hardware.device.native_bfloat16
    assert hardware.figures.link_bytes_per_second is None and hardware.figures.flops_16bit is None
    assert hardware.device.link is None


def test_a_small_card_for_the_screen_is_left_out_and_said_to_be(machine):
    hardware = machine(GTX1080, RTX4090, replace(RTX4090, uuid="GPU-a2"))
    assert [device.visible_as for device in hardware.accelerators] == ["GPU-a1", "GPU-a2"]
    assert [device.name for device in hardware.unused] == ["NVIDIA GeForce GTX 1080"]
    assert hardware.num_accelerators == 2 and hardware.figures.flops_16bit == 165.2e12
    assert hardware.note == "runs use identical accelerators: NVIDIA GeForce GTX 1080 is not used"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-0c", [1]),
        ("GPU-0c512562-871f-8257-6187-b5ae1b986d5e,GPU-ff", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("GPU-", []),
        ("GPU-ff,GPU-none", [0]),
    ],
)
def test_hidden_devices_are_left_out(machine, setting, left):
    found = machine(A100, SECOND_A100, CUDA_VISIBLE_DEVICES=setting)
    uuids = [gpu.uuid for gpu in (A100, SECOND_A100)]
    assert [device.visible_as for device in found.accelerators] == [uuids[index] for index in left]
    assert (found.figures is None) == (not left)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("setting", "part"),
    [
        (None, 0),
        ("0", 0),
        ("1", None),
        ("MIG-cba663e8", 1),
        ("GPU-ff8a", 0),
        ("MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb,MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", 1),
    ],
)
def test_a_divided_gpu_is_the_one_part_that_a_program_sees(machine, setting, part):
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    (device,) = machine(MIG, SECOND_A100, **environment).accelerators
    if part is None:
        assert device.visible_as == SECOND_A100.uuid
    else:
        wanted = MIG.parts[part]
        assert (device.visible_as, device.name) == (wanted.uuid, wanted.name)
        assert device.memory_total_bytes == wanted.total_mib * MIB
        assert device.compute_capability == (8, 0) and device.link is None


def test_a_gpu_that_is_divided_into_nothing_is_no_device(machine):
    assert machine(replace(MIG, parts=())).accelerators == ()


def test_a_gpu_without_memory_of_its_own_has_the_main_memory(machine):
    """As nvidia-smi on a DGX Spark: memory is not supported."""
    hardware = machine(Gpu("GPU-d", "NVIDIA GB10", 0, 0, (12, 1), pcie=(0, 0)))
    assert hardware.device.memory_total_bytes == hardware.cpu.memory_total_bytes


def test_a_driver_library_without_a_driver_is_a_machine_without_devices(machine):
    """As in a container that was started without its GPUs."""
    assert machine(A100, NVML_INIT="9").accelerators == ()


def test_a_driver_that_was_updated_under_way_is_no_machine_without_devices(machine):
    with pytest.raises(AssertionError) as caught:
        machine(A100, NVML_INIT="18")
    assert "PlanError: the NVIDIA driver does not answer: RM has detected an NVML/RM version mismatch; run" in str(
        caught.value
    )


def test_the_use_of_devices_is_read_by_their_uuids(machine):
    names = [SECOND_A100.uuid, MIG.parts[1].uuid, "GPU-unknown"]
    code = f"from tunekit.probe.nvidia import usage_of_devices as look; print(*look({names!r}), sep='\\n')"
    whole, part = machine(replace(MIG, uuid="GPU-divided"), SECOND_A100, code=code).splitlines()
    assert whole == (
        f"DeviceUsage(name='NVIDIA A100-SXM4-80GB', busy=0.93, used_bytes={(81920 - 80101) * MIB}, "
        f"total_bytes={81920 * MIB})"
    )
    assert "3g.20gb" in part and "busy=None" in part and f"used_bytes={68 * MIB}" in part
    assert machine(A100, code=code, NVML_INIT="9") == "\n"
