"""A node finds its own way to another, and what a link lets expect is held against the right one."""

import socket
from pathlib import Path

import psutil
import pytest

from tunekit.estimates.facts import Device, Figures, Hardware
from tunekit.launching.bandwidth import Measured, expected
from tunekit.process.processes import infiniband, name_interface, way_to


def gpus(num: int, num_nodes: int, **figures: float) -> Hardware:
    one = Device(
        kind="cuda", name="GPU", memory_total_bytes=2**36, memory_free_bytes=2**36, native_bfloat16=True, link="NVLink"
    )
    return Hardware(accelerators=(one,) * num, num_nodes=num_nodes, figures=Figures(**figures) if figures else None)


def test_the_way_to_oneself_is_the_loopback():
    way = way_to("127.0.0.1")
    assert (way.address, way.is_loopback) == ("127.0.0.1", True)
    assert "127.0.0.1" in [found.address for found in psutil.net_if_addrs()[way.interface]]


def test_the_way_to_an_own_address_is_the_interface_that_has_it():
    for interface, addresses in psutil.net_if_addrs().items():
        for found in addresses:
            if found.family == socket.AF_INET and not found.address.startswith("127."):
                way = way_to(found.address)
                assert (way.address, way.interface, way.is_loopback) == (found.address, interface, False)


def test_a_host_without_an_address_has_no_way():
    with pytest.raises(OSError):
        way_to("no-such-host.invalid")


def test_an_interface_that_the_user_names_stays():
    environment = {"NCCL_SOCKET_IFNAME": "=ib0"}
    name_interface(environment, "eth0")
    assert environment == {"NCCL_SOCKET_IFNAME": "=ib0", "GLOO_SOCKET_IFNAME": "eth0"}


def test_infiniband_counts_where_a_port_is_up(tmp_path: Path):
    for adapter, port, state in (("mlx5_0", 1, "4: ACTIVE"), ("mlx5_1", 1, "1: DOWN"), ("mlx5_1", 2, "4: ACTIVE")):
        folder = tmp_path / "sys/class/infiniband" / adapter / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n", encoding="ascii")
    (tmp_path / "sys/class/infiniband/mlx5_1/ports/2/state").write_text("2: INIT\n", encoding="ascii")
    assert infiniband(tmp_path) == ["mlx5_0"]
    assert infiniband(tmp_path / "nothing") == []


def test_bus_bandwidth_is_that_of_nccl_tests():
    # doc/PERFORMANCE.md of nccl-tests: an all-reduce of 8 ranks at 100 GB/s of its own has a bus bandwidth of 175.
    assert Measured("all-reduce", 10**9, 8, 0.01).bus_bytes_per_second == pytest.approx(175e9)
    assert Measured("all-gather", 10**9, 8, 0.01).bus_bytes_per_second == pytest.approx(87.5e9)


def test_what_is_expected_is_the_speed_of_the_slowest_link():
    figures = {"link_bytes_per_second": 450e9, "host_bytes_per_second": 63e9, "network_bytes_per_second": 25e9}
    inside, across = expected(gpus(8, 1, **figures), 8), expected(gpus(8, 2, **figures), 8)
    alone = expected(gpus(1, 2, **figures), 1)
    assert inside is not None and across is not None and alone is not None
    assert 0.25 * 450e9 < inside.low < inside.high <= 450e9
    # Eight adapters of 25 GB/s in each node, and one.
    assert 0.25 * 200e9 < across.low < across.high <= 200e9
    assert 0.25 * 25e9 < alone.low < alone.high <= 25e9
    assert expected(gpus(8, 1), 8) is None
