"""The accelerators that tunekit knows by name, and what is known of each, with its sources.

Sheets are read with care here: floating-point peaks are the dense ones (vendors like to print the twice as high ones
of structured sparsity), a link counts one direction (NVLink is sold by both), and memory is what the driver offers to
programs, which is up to 6 % less than the number on the box. Prices age: each carries its day, and the last of an
entry's sources says where it was read. Those of RunPod's Community Cloud of 2026-03-10 were read in a third party's
table, which agrees for A100 and H100 with RunPod's own list of 2026-11-09.

Peaks of data-centre chips were compared with the tables of torchtitan and Lightning, which cite the same sheets, those
of RTX cards with third parties' tables, and memory with what nvidia-smi and rocm-smi print in public logs (2026-11-21).
Not confirmed so: the memory speed of RTX 3090, and the network adapters of the DGX systems.
"""

from typing import Literal

from tunekit.estimates.facts import Device, Facts, Figures

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
    "hpu": "Intel's Gaudi needs torch for HPU",
    "neuron": "AWS Trainium needs torch for Neuron",
    "tpu": "a TPU needs torch for XLA",
}
"""Platforms for which there is no plan: neither tunekit's training nor its memory formulas hold there."""

NOTES: dict[Platform, str] = {"rocm": "tunekit was not tried on ROCm"}


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


def reported_as(name: str) -> Accelerator | None:
    """The accelerator that a driver calls `name`, if it is known."""
    return next((figures for figures in CATALOGUE if name in figures.reported), None)


def _times(number: float | None, unit: float) -> float | None:
    return None if number is None else number * unit


_A100_SHEET = (
    "nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100_SHEET = "resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (printed with sparsity; halved)"
_BLACKWELL_SHEET = "nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703 (printed with sparsity; halved)"
_DGX_NETWORK = "network: one adapter for each GPU, as in the vendor's DGX user guide"
_ADA_PAPER = "NVIDIA Ada GPU architecture paper, appendix: dense, float32 sums"

CATALOGUE = (
    Accelerator(
        name="a100-40gb",
        label="A100 SXM 40 GB",
        aliases=("a100-40", "a100-sxm-40gb"),
        reported=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        compute_capability=(8, 0),
        memory_mib=40960,
        tflops_16bit=312,
        memory_gb_per_second=1555,
        link_gb_per_second=300,
        pcie_generation=4,
        network_gb_per_second=25,
        max_per_node=8,
        price=Price(usd_per_hour=1.99, source="Lambda, 8x A100 SXM 40 GB", day="2026-09-20"),
        sources=(_A100_SHEET, f"{_DGX_NETWORK} A100: 200 Gb/s", "lambda.ai/instances"),
    ),
    Accelerator(
        name="a100-80gb",
        label="A100 SXM 80 GB",
        aliases=("a100", "a100-80", "a100-sxm", "a100-sxm-80gb"),
        reported=("NVIDIA A100-SXM4-80GB",),
        compute_capability=(8, 0),
        memory_mib=81920,
        tflops_16bit=312,
        memory_gb_per_second=2039,
        link_gb_per_second=300,
        pcie_generation=4,
        network_gb_per_second=25,
        max_per_node=8,
        price=Price(usd_per_hour=1.79, source="RunPod Secure Cloud", day="2026-11-09"),
        sources=(_A100_SHEET, f"{_DGX_NETWORK} A100: 200 Gb/s", "runpod.io/pricing"),
    ),
    Accelerator(
        name="h100-pcie",
        label="H100 PCIe 80 GB",
        aliases=("h100-pcie-80gb",),
        reported=("NVIDIA H100 PCIe",),
        compute_capability=(9, 0),
        memory_mib=81559,
        tflops_16bit=756,
        tflops_fp8=1513,
        memory_gb_per_second=2000,
        pcie_generation=5,
        max_per_node=8,
        price=Price(usd_per_hour=2.89, source="RunPod Secure Cloud", day="2026-11-09"),
        sources=(
            _H100_SHEET,
            "memory: NVIDIA H100 PCIe product brief PB-11133-001; pairs may be bridged by NVLink, not counted here",
            "runpod.io/pricing",
        ),
    ),
    Accelerator(
        name="h100",
        label="H100 SXM 80 GB",
        aliases=("h100-80gb", "h100-sxm", "h100-sxm5", "h100-sxm-80gb"),
        reported=("NVIDIA H100 80GB HBM3",),
        compute_capability=(9, 0),
        memory_mib=81559,
        tflops_16bit=989,
        tflops_fp8=1979,
        memory_gb_per_second=3350,
        link_gb_per_second=450,
        pcie_generation=5,
        network_gb_per_second=50,
        max_per_node=8,
        price=Price(usd_per_hour=3.99, source="RunPod Secure Cloud", day="2026-11-09"),
        sources=(_H100_SHEET, f"{_DGX_NETWORK} H100: 400 Gb/s", "runpod.io/pricing"),
    ),
    Accelerator(
        name="h200",
        label="H200 SXM 141 GB",
        aliases=("h200-sxm", "h200-141gb", "h200-sxm-141gb"),
        reported=("NVIDIA H200",),
        compute_capability=(9, 0),
        memory_mib=143771,
        tflops_16bit=989,
        tflops_fp8=1979,
        memory_gb_per_second=4800,
        link_gb_per_second=450,
        pcie_generation=5,
        network_gb_per_second=50,
        max_per_node=8,
        price=Price(usd_per_hour=4.59, source="RunPod", day="2026-10-07"),
        sources=("nvidia.com/en-us/data-center/h200 (halved)", f"{_DGX_NETWORK} H200: 400 Gb/s", "runpod.io/pricing"),
    ),
    Accelerator(
        name="b200",
        label="B200 180 GB",
        aliases=("b200-180gb", "b200-192gb", "b200-sxm"),
        reported=("NVIDIA B200",),
        compute_capability=(10, 0),
        memory_mib=183359,
        tflops_16bit=2250,
        tflops_fp8=4500,
        memory_gb_per_second=8000,
        link_gb_per_second=900,
        pcie_generation=5,
        network_gb_per_second=50,
        max_per_node=8,
        price=Price(usd_per_hour=6.79, source="RunPod", day="2026-10-07"),
        sources=(
            _BLACKWELL_SHEET,
            "memory: 192 GB are on the package; systems offer 180 (DGX B200 has 1,440 GB for 8)",
            f"{_DGX_NETWORK} B200: 400 Gb/s",
            "runpod.io/pricing",
        ),
    ),
    Accelerator(
        name="gb200",
        label="GB200 186 GB",
        aliases=("gb200-nvl72", "gb200-186gb"),
        reported=("NVIDIA GB200",),
        compute_capability=(10, 0),
        memory_mib=189471,
        tflops_16bit=2500,
        tflops_fp8=5000,
        memory_gb_per_second=8000,
        link_gb_per_second=900,
        network_gb_per_second=50,
        max_per_node=72,
        price=Price(usd_per_hour=10.50, source="CoreWeave, a quarter of 4 GPUs", day="2026-09-20"),
        sources=(
            _BLACKWELL_SHEET,
            "one NVLink domain of 72 counts as a node: NVIDIA GB200 NVL72",
            f"{_DGX_NETWORK} GB200: 400 Gb/s",
            "coreweave.com/pricing",
        ),
    ),
    Accelerator(
        name="l4",
        label="L4 24 GB",
        aliases=("l4-24gb",),
        reported=("NVIDIA L4",),
        compute_capability=(8, 9),
        memory_mib=23034,
        tflops_16bit=121,
        tflops_fp8=242,
        memory_gb_per_second=300,
        pcie_generation=4,
        max_per_node=8,
        price=Price(usd_per_hour=0.44, source="RunPod Community Cloud", day="2026-03-10"),
        sources=(
            "nvidia.com/en-us/data-center/l4 (printed with sparsity; halved)",
            "deploybase.ai/articles/runpod-gpu-pricing",
        ),
    ),
    Accelerator(
        name="l40s",
        label="L40S 48 GB",
        aliases=("l40s-48gb",),
        reported=("NVIDIA L40S",),
        compute_capability=(8, 9),
        memory_mib=46068,
        tflops_16bit=362,
        tflops_fp8=733,
        memory_gb_per_second=864,
        pcie_generation=4,
        max_per_node=8,
        price=Price(usd_per_hour=0.79, source="RunPod Community Cloud", day="2026-03-10"),
        sources=("resources.nvidia.com/en-us-l40s/l40s-datasheet-28413", "deploybase.ai/articles/runpod-gpu-pricing"),
    ),
    Accelerator(
        name="t4",
        label="T4 16 GB",
        aliases=("t4-16gb",),
        reported=("Tesla T4", "NVIDIA T4"),
        compute_capability=(7, 5),
        memory_mib=15360,
        tflops_16bit=65,
        memory_gb_per_second=320,
        pcie_generation=3,
        max_per_node=8,
        sources=(
            "nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf (float16)",
        ),
    ),
    Accelerator(
        name="rtx3090",
        label="RTX 3090 24 GB",
        aliases=("3090", "rtx3090-24gb"),
        reported=("NVIDIA GeForce RTX 3090",),
        compute_capability=(8, 6),
        memory_mib=24576,
        tflops_16bit=71,
        memory_gb_per_second=936,
        pcie_generation=4,
        max_per_node=8,
        price=Price(usd_per_hour=0.22, source="RunPod Community Cloud", day="2026-03-10"),
        sources=(
            "NVIDIA Ampere GA102 architecture paper: dense, float32 sums",
            "link: pairs may be bridged by NVLink, which is not counted here",
            "deploybase.ai/articles/runpod-gpu-pricing",
        ),
    ),
    Accelerator(
        name="rtx4090",
        label="RTX 4090 24 GB",
        aliases=("4090", "rtx4090-24gb"),
        reported=("NVIDIA GeForce RTX 4090",),
        compute_capability=(8, 9),
        memory_mib=24564,
        tflops_16bit=165.2,
        tflops_fp8=330.3,
        memory_gb_per_second=1008,
        pcie_generation=4,
        max_per_node=8,
        price=Price(usd_per_hour=0.34, source="RunPod Community Cloud", day="2026-03-10"),
        sources=(_ADA_PAPER, "deploybase.ai/articles/runpod-gpu-pricing"),
    ),
    Accelerator(
        name="rtx5090",
        label="RTX 5090 32 GB",
        aliases=("5090", "rtx5090-32gb"),
        reported=("NVIDIA GeForce RTX 5090",),
        compute_capability=(12, 0),
        memory_mib=32607,
        tflops_16bit=209.5,
        tflops_fp8=419,
        memory_gb_per_second=1792,
        pcie_generation=5,
        max_per_node=8,
        price=Price(usd_per_hour=0.69, source="RunPod Community Cloud", day="2026-03-10"),
        sources=(
            "NVIDIA RTX Blackwell GPU architecture paper: dense, float32 sums (838 with sparsity and float16 sums)",
            "deploybase.ai/articles/runpod-gpu-pricing",
        ),
    ),
    Accelerator(
        name="rtxpro6000",
        label="RTX PRO 6000 Blackwell 96 GB",
        aliases=("pro6000", "rtx6000pro", "rtxpro6000-blackwell", "rtxpro6000-96gb"),
        reported=(
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        ),
        compute_capability=(12, 0),
        memory_mib=97887,
        tflops_16bit=500,
        tflops_fp8=1000,
        memory_gb_per_second=1792,
        pcie_generation=5,
        max_per_node=8,
        price=Price(usd_per_hour=2.04, source="Akash, Server Edition", day="2026-09-20"),
        sources=(
            "NVIDIA's 4,000 AI TOPS are fp4 with sparsity: an eighth is dense 16-bit, a quarter dense fp8",
            "memory: Workstation Edition; the Server Edition is somewhat slower",
            "akash.network/pricing/gpus",
        ),
    ),
    Accelerator(
        name="mi300x",
        label="MI300X 192 GB",
        aliases=("mi300", "mi300x-192gb"),
        reported=("AMD Instinct MI300X", "1002:74a1", "1002:74b5"),
        platform="rocm",
        memory_mib=196592,
        tflops_16bit=1307.4,
        tflops_fp8=2614.9,
        memory_gb_per_second=5300,
        link_gb_per_second=448,
        pcie_generation=5,
        max_per_node=8,
        price=Price(usd_per_hour=1.85, source="Vultr", day="2026-05-18"),
        sources=(
            "amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
            "link: 7 Infinity Fabric links of 128 GB/s, both directions",
            "cliffcenter.com/research/amd-inference-economics",
        ),
    ),
    Accelerator(
        name="mi325x",
        label="MI325X 256 GB",
        aliases=("mi325", "mi325x-256gb"),
        reported=("AMD Instinct MI325X", "1002:74a5"),
        platform="rocm",
        memory_mib=262144,
        tflops_16bit=1307.4,
        tflops_fp8=2614.9,
        memory_gb_per_second=6000,
        link_gb_per_second=448,
        pcie_generation=5,
        max_per_node=8,
        price=Price(usd_per_hour=1.95, source="TensorWave", day="2026-05-18"),
        sources=(
            "amd.com/en/products/accelerators/instinct/mi300/mi325x.html",
            "memory: rocm.docs.amd.com/en/latest/reference/gpu-specs.html, in GiB; the driver may offer a little less",
            "cliffcenter.com/research/amd-inference-economics",
        ),
    ),
    Accelerator(
        name="gaudi3",
        label="Gaudi 3 128 GB",
        aliases=("gaudi-3-128gb", "hl-325l"),
        platform="hpu",
        memory_mib=131072,
        tflops_16bit=1835,
        tflops_fp8=1835,
        memory_gb_per_second=3670,
        link_gb_per_second=600,
        pcie_generation=5,
        max_per_node=8,
        sources=(
            "Intel at Hot Chips 2024, Gaudi 3 specification",
            "link: all 24 ports of 200 Gb/s, also those to other nodes",
        ),
    ),
    Accelerator(
        name="trn2",
        label="Trainium2 96 GB",
        aliases=("trainium2", "trainium-2"),
        platform="neuron",
        memory_mib=96 * 1024,
        tflops_16bit=667,
        tflops_fp8=1299,
        memory_gb_per_second=2900,
        link_gb_per_second=640,
        max_per_node=16,
        sources=(
            "awsdocs-neuron.readthedocs-hosted.com/en/latest/general/arch/neuron-hardware/trainium2.html",
            "link: the 1.28 TB/s of a chip taken as both directions",
        ),
    ),
    Accelerator(
        name="tpu-v5p",
        label="TPU v5p 95 GB",
        aliases=("v5p", "tpu5p"),
        platform="tpu",
        memory_mib=95 * 1024,
        tflops_16bit=459,
        tflops_fp8=459,
        memory_gb_per_second=2765,
        link_gb_per_second=600,
        network_gb_per_second=6.25,
        max_per_node=4,
        sources=("docs.cloud.google.com/tpu/docs/v5p-training",),
    ),
)
