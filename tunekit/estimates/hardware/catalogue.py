"""The accelerators that tunekit knows by name: `catalogue.yaml`, beside this file, says what is known of each."""

from functools import cache
from pathlib import Path
from typing import Literal

from tunekit.estimates.facts import Device, Facts, Figures
from tunekit.files import read_table

GIGA, TERA = 1e9, 1e12

PCIE_BYTES_PER_SECOND_PER_LANE = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""By generation, in one direction: transfers a second, the share of them that are not line code (8b/10b, 128b/130b, or
242 of the 256 bytes of a flit), 8 bits a byte (PCI Express base specification, revisions 1 to 6)."""

Platform = Literal["cuda", "rocm", "hpu", "neuron", "tpu"]

NOT_TRAINED_ON: dict[Platform, str] = {
    "hpu": "Intel Gaudi needs torch for HPU",
    "neuron": "AWS Trainium needs torch for Neuron",
    "tpu": "a TPU needs torch for XLA",
}
"""Platforms for which there is no plan: neither tunekit's training nor its memory formulas hold there."""

NOTES: dict[Platform, str] = {"rocm": "tunekit is untested on ROCm"}


class Price(Facts):
    """List price of an hour of one accelerator."""

    usd_per_hour: float
    source: str
    day: str
    """Date of the listing, as year-month-day."""


class Accelerator(Facts):
    """One kind of accelerator, in the units of its sheet: GB is 10^9 bytes."""

    name: str
    """As it is written after `--on`."""
    label: str
    aliases: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()
    """Names that the driver gives it; of AMD also the PCI vendor and device, since no file of the kernel names all."""
    platform: Platform = "cuda"
    compute_capability: tuple[int, int] | None = None
    memory_mib: int
    """All that programs may use, as the driver reports it."""
    tflops_16bit: float | None = None
    """Dense bfloat16 with float32 sums; float16 where bfloat16 is not computed."""
    tflops_fp8: float | None = None
    memory_gb_per_second: float | None = None
    link_gb_per_second: float | None = None
    """Of its own links to others in the node, one direction; None where there is only PCIe."""
    pcie_generation: int | None = None
    """Of its 16 lanes."""
    network_gb_per_second: float | None = None
    """To other nodes in the vendor's reference system, one direction."""
    max_per_node: int
    """Most in a node of the vendor's reference system; 8 for cards, which is what servers commonly hold."""
    price: Price | None = None
    sources: tuple[str, ...] = ()

    @property
    def device(self) -> Device:
        """One of them, with all its memory free."""
        return Device(
            kind="cuda",
            name=self.label,
            memory_total_bytes=self.memory_mib * 2**20,
            memory_free_bytes=self.memory_mib * 2**20,
            native_bfloat16=self.platform != "cuda" or (self.compute_capability or (0, 0)) >= (8, 0),
            compute_capability=self.compute_capability,
        )

    @property
    def figures(self) -> Figures:
        """Its speeds and its price in plain units."""
        pcie = None if self.pcie_generation is None else pcie_bytes_per_second(self.pcie_generation, 16)
        return Figures(
            flops_16bit=_times(self.tflops_16bit, TERA),
            flops_fp8=_times(self.tflops_fp8, TERA),
            memory_bytes_per_second=_times(self.memory_gb_per_second, GIGA),
            link_bytes_per_second=_times(self.link_gb_per_second, GIGA) or pcie,
            host_bytes_per_second=pcie,
            network_bytes_per_second=_times(self.network_gb_per_second, GIGA),
            usd_per_hour=self.price.usd_per_hour if self.price else None,
            price_source=f"{self.price.source}, {self.price.day}" if self.price else None,
        )


def pcie_bytes_per_second(generation: int, width: int) -> float | None:
    """Return the bandwidth of a PCIe link in one direction; None for a generation that is not known here."""
    lane = PCIE_BYTES_PER_SECOND_PER_LANE.get(generation)
    return None if lane is None else width * lane


@cache
def catalogue() -> tuple[Accelerator, ...]:
    """The accelerators of the table."""
    return tuple(map(Accelerator.model_validate, read_table(Path(__file__).with_suffix(".yaml"))))


def reported_as(name: str) -> Accelerator | None:
    """The accelerator that a driver calls `name`, if it is known."""
    return next((kind for kind in catalogue() if name in kind.reported), None)


def _times(number: float | None, unit: float) -> float | None:
    return None if number is None else number * unit
