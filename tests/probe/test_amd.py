"""AMD's devices, by the files that the kernel's driver writes."""

import pytest

from tunekit.probe.amd import amd_devices
from tunekit.probe.hardware import figures_of, split_by_kind

# Four of the GPUs of a server with MI210 in pairs, from ROCm/k8s-device-plugin, testdata/topo-mi210-xgmi-pcie: the
# lines that are read, and some that are not. Node 2 is joined to 3 by Infinity Fabric, and 6 to 7.
CPU = "cpu_cores_count 64\nsimd_count 0\nmem_banks_count 1\ngfx_target_version 0\nunique_id 0\ndrm_render_minor 0\n"
MI210 = """\
cpu_cores_count 0
simd_count 416
mem_banks_count 1
io_links_count 4
gfx_target_version 90010
vendor_id 4098
device_id 29711
location_id 25344
drm_render_minor {minor}
local_mem_size 0
unique_id {unique}
"""
GPUS = {
    2: (128, 1801979520617338022, 3),
    3: (129, 5847760019078012339, 2),
    6: (132, 12585367064092601175, 7),
    7: (133, 1, 6),
}
PCIE = "type 2\nnode_from {node}\nnode_to 0\nweight 20\nmin_bandwidth 312\nmax_bandwidth 32000\nflags 1\n"
FABRIC = "type 11\nnode_from {node}\nnode_to {to}\nweight 15\nmin_bandwidth 50000\nmax_bandwidth 50000\nflags 1\n"
# What rocm-smi prints as the memory of an MI210, in the form of ROCm/legacy-rocm-build#4750.
BANK = "heap_type 1\nsize_in_bytes 68702699520\nflags 0\nwidth 4096\nmem_clk_max 1600\n"


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def server(tmp_path):
    """A folder with the `sys` of that server."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    write(nodes / "0/properties", CPU)
    for node, (minor, unique, partner) in GPUS.items():
        write(nodes / f"{node}/properties", MI210.format(minor=minor, unique=unique))
        write(nodes / f"{node}/io_links/0/properties", PCIE.format(node=node))
        write(nodes / f"{node}/io_links/1/properties", FABRIC.format(node=node, to=partner))
        write(nodes / f"{node}/mem_banks/0/properties", BANK)
        card = tmp_path / f"sys/class/drm/renderD{minor}/device"
        write(card / "product_name", "AMD Instinct MI210\n")
        write(card / "mem_info_vram_used", "10850304\n")
        write(card / "max_link_speed", "16.0 GT/s PCIe\n")
        write(card / "max_link_width", "16\n")
    return tmp_path


def names(found):
    return [one.device.visible_as for one in found]


def test_devices_are_what_the_kernel_says(server):
    found = amd_devices({}, server)
    assert names(found) == ["0", "1", "2", "3"]
    device = found[0].device
    assert (device.kind, device.name, device.gfx) == ("cuda", "AMD Instinct MI210", "gfx90a")
    assert device.memory_total_bytes == 68702699520
    assert device.memory_free_bytes == 68702699520 - 10850304
    assert device.native_bfloat16 and device.compute_capability is None
    assert device.link == "1 × Infinity Fabric, PCIe 4.0 x16"


def test_a_part_of_an_mi300x_has_its_name_and_not_its_speed(server):
    """The eighth of one that is divided, with the bank of ROCm/legacy-rocm-build#4750; 29857 is an MI300X."""
    node = server / "sys/class/kfd/kfd/topology/nodes/2"
    text = (node / "properties").read_text().replace("90010", "90402").replace("29711", "29857")
    write(node / "properties", text)
    whole = amd_devices({"HIP_VISIBLE_DEVICES": "0"}, server)
    assert whole[0].device.name == "AMD Instinct MI300X"
    write(node / "mem_banks/0/properties", BANK.replace("68702699520", "25767706624"))
    part = amd_devices({"HIP_VISIBLE_DEVICES": "0"}, server)
    assert figures_of(part).flops_16bit is None
    write(node / "mem_banks/0/properties", BANK.replace("68702699520", str(196592 * 2**20)))
    assert figures_of(amd_devices({"HIP_VISIBLE_DEVICES": "0"}, server)).flops_16bit == 1307.4e12


def test_a_machine_without_amd_has_none(tmp_path):
    assert amd_devices({}, tmp_path) == ()


def test_a_pair_speaks_over_infinity_fabric_and_four_over_pcie(server):
    four = amd_devices({}, server)
    assert figures_of(four).link_bytes_per_second == pytest.approx(31.5e9, rel=0.001)
    pair = amd_devices({"HIP_VISIBLE_DEVICES": "2,3"}, server)
    assert figures_of(pair).link_bytes_per_second == 50e9
    assert figures_of(pair).host_bytes_per_second == pytest.approx(31.5e9, rel=0.001)


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, ["1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1901ead3a2ecd4a6"}, ["0"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_hidden_devices_are_left_out(server, environment, left):
    assert names(amd_devices(environment, server)) == left


def test_a_gpu_of_another_container_cannot_be_read_and_is_left_out(server):
    """The kernel refuses to show it; a folder in place of the file makes reading fail for any user."""
    hidden = server / "sys/class/kfd/kfd/topology/nodes/3/properties"
    hidden.unlink()
    hidden.mkdir()
    assert len(amd_devices({}, server)) == 3


def test_a_processor_with_graphics_is_left_out_beside_a_card(server):
    """Numbers of a Radeon 780M as users print them: gfx1103 with 512 MiB."""
    node = server / "sys/class/kfd/kfd/topology/nodes/8"
    text = MI210.format(minor=134, unique=0).replace("90010", "110003")
    write(node / "properties", text)
    write(node / "mem_banks/0/properties", BANK.replace("68702699520", "536870912"))
    used, others = split_by_kind(amd_devices({}, server))
    assert len(used) == 4
    assert [(one.device.name, one.device.gfx) for one in others] == [("AMD gfx1103", "gfx1103")]


@pytest.mark.parametrize(
    ("version", "gfx", "bfloat16"),
    [
        (90006, "gfx906", False),
        (90008, "gfx908", True),
        (90402, "gfx942", True),
        (90500, "gfx950", True),
        (100300, "gfx1030", False),
        (110000, "gfx1100", True),
        (110501, "gfx1151", True),
        (120001, "gfx1201", True),
    ],
)
def test_instruction_sets_are_named_as_amd_names_them(server, version, gfx, bfloat16):
    file = server / "sys/class/kfd/kfd/topology/nodes/2/properties"
    file.write_text(file.read_text().replace("90010", str(version)))
    device = amd_devices({}, server)[0].device
    assert (device.gfx, device.native_bfloat16) == (gfx, bfloat16)
