"""The catalogue's figures against each other: complete, plausible, and in the order of the generations."""

import itertools
import re
from datetime import date

import pytest

from tunekit.estimates.hardware.catalogue import NOT_TRAINED_ON, catalogue, pcie_bytes_per_second, reported_as

BY_NAME = {kind.name: kind for kind in catalogue()}
NAMES = sorted(BY_NAME)


def test_the_accelerators_that_people_rent_are_there():
    wanted = "a100-40gb a100-80gb h100-pcie h100 h200 b200 gb200 l4 l40s t4 rtx3090 rtx4090 rtx5090 rtxpro6000 mi300x"
    assert set(wanted.split()) | {"mi325x", "gaudi3", "trn2", "tpu-v5p"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_is_complete(name):
    kind = BY_NAME[name]
    assert kind.sources and all(kind.sources)
    assert kind.tflops_16bit and kind.memory_gb_per_second
    assert (kind.compute_capability is not None) == (kind.platform == "cuda")
    assert kind.reported or kind.platform in NOT_TRAINED_ON
    if kind.price is not None:
        assert kind.price.source and date.fromisoformat(kind.price.day) >= date(2026, 1, 1)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_what_the_label_says_or_up_to_7_percent_less(name):
    kind = BY_NAME[name]
    labelled = int(re.search(r"(\d+) GB$", kind.label)[1])
    assert 0.93 * labelled <= kind.memory_mib / 1024 <= labelled


@pytest.mark.parametrize("name", NAMES)
def test_peaks_are_dense(name):
    """A sheet's sparse figure is twice the dense one; no chip with its memory speed has so much to do a byte."""
    kind = BY_NAME[name]
    operations_per_byte = kind.tflops_16bit * 1000 / kind.memory_gb_per_second
    assert 70 <= operations_per_byte <= 520
    if kind.tflops_fp8 is not None:
        assert kind.tflops_fp8 / kind.tflops_16bit == pytest.approx(2, rel=0.03) or name in (
            "gaudi3",
            "tpu-v5p",
            "trn2",
        )


@pytest.mark.parametrize("name", NAMES)
def test_fp8_came_with_compute_capability_8_9(name):
    kind = BY_NAME[name]
    if kind.platform == "cuda":
        assert (kind.tflops_fp8 is not None) == (kind.compute_capability >= (8, 9))


@pytest.mark.parametrize(
    "order", ["t4 l4 l40s", "a100-40gb a100-80gb h100 h200 b200", "rtx3090 rtx4090 rtx5090 rtxpro6000", "mi300x mi325x"]
)
def test_later_generations_are_no_slower_and_no_smaller(order):
    kinds = [BY_NAME[name] for name in order.split()]
    for older, newer in itertools.pairwise(kinds):
        assert newer.tflops_16bit >= older.tflops_16bit
        assert newer.memory_gb_per_second >= 0.9 * older.memory_gb_per_second  # L4 saves power against T4
        assert newer.memory_mib >= older.memory_mib - 512  # some stays with the driver
        assert (newer.compute_capability or (0, 0)) >= (older.compute_capability or (0, 0))
        assert (newer.link_gb_per_second or 0) >= (older.link_gb_per_second or 0)


def test_h100_on_pcie_is_the_slower_h100():
    pcie, sxm = BY_NAME["h100-pcie"], BY_NAME["h100"]
    assert pcie.tflops_16bit < sxm.tflops_16bit
    assert pcie.memory_gb_per_second < sxm.memory_gb_per_second
    assert pcie.figures.link_bytes_per_second < sxm.figures.link_bytes_per_second
    assert pcie.price.usd_per_hour < sxm.price.usd_per_hour


@pytest.mark.parametrize(("generation", "gigabytes"), [(3, 15.75), (4, 31.5), (5, 63.0), (6, 121.0)])
def test_pcie_carries_what_the_standard_says_over_16_lanes(generation, gigabytes):
    assert pcie_bytes_per_second(generation, 16) == pytest.approx(gigabytes * 1e9, rel=0.001)


def test_pcie_of_a_generation_to_come_is_not_known():
    assert pcie_bytes_per_second(9, 16) is None


def test_figures_are_in_plain_units():
    figures = BY_NAME["h100"].figures
    assert figures.flops_16bit == 989e12
    assert figures.memory_bytes_per_second == 3350e9
    assert figures.link_bytes_per_second == 450e9
    assert figures.price_source == "RunPod Secure Cloud, 2026-11-09"
    assert BY_NAME["rtx4090"].figures.link_bytes_per_second == pcie_bytes_per_second(4, 16)


def test_drivers_names_belong_to_one_accelerator_each():
    names = [name for kind in catalogue() for name in kind.reported]
    assert len(names) == len(set(names))
    assert reported_as("NVIDIA H100 80GB HBM3") is BY_NAME["h100"]
    assert reported_as("NVIDIA GeForce GTX 1080") is None
