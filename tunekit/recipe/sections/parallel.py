"""The section of a recipe that says how a run is spread over devices, and what is done when one of them fails."""

from typing import Annotated, Literal

from pydantic import Field

from tunekit.recipe.sections.section import EXPANDS_ENV, Section

Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
"""How devices work together: one alone, torch's DistributedDataParallel, its `fully_shard`, DeepSpeed's ZeRO by
its stage."""

OffloadDevice = Literal["none", "cpu", "nvme"]
"""Where something lies while the device does not need it: it stays, in main memory, or on a disk."""


class ParallelSection(Section):
    """How the run is spread over devices, where the plan is not to choose by itself. Sizes have Accelerate's names."""

    strategy: Literal["auto"] | Strategy = "auto"
    """`single` (one device), `ddp`, `fsdp2`, or DeepSpeed's `zero1`, `zero2`, `zero3`. `auto`: the first that fits, in
    the order of their cost; the plan says what ruled the others out."""

    num_processes: Annotated[int, Field(gt=0)] | None = None
    """Processes in all, one for each device. On a machine without accelerators they share the processor. Left out: as
    many as there are accelerators for, and one without any."""

    dp_shard_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide weights, gradients and optimizer states among them; groups of them hold a copy each (hybrid
    shard). Left out: the plan chooses."""

    tp_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide the products of each layer (tensor parallel). Left out: the plan chooses."""

    cp_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide each sequence, in a ring (context parallel). Left out: the plan chooses."""

    sp_size: Annotated[int, Field(gt=0)] | None = None
    """Devices that divide each sequence, by heads (DeepSpeed's Ulysses). Left out: the plan chooses."""

    reshard_after_forward: Literal["auto"] | bool = "auto"
    """fsdp2: free a layer's weights after its forward pass, and gather them again for the backward pass. `auto`: where
    they would not fit otherwise."""

    offload_param_device: Literal["auto"] | OffloadDevice = "auto"
    """Where the weights lie while they are not needed: `none` (on the device), `cpu` (in main memory) or `nvme` (zero3:
    on a disk). `auto`: on the device, or else where they fit."""

    offload_optimizer_device: Literal["auto"] | OffloadDevice = "auto"
    """The same for gradients and optimizer states, which the processor then updates."""

    nvme_path: Annotated[str | None, Field(min_length=1, json_schema_extra=EXPANDS_ENV)] = None
    """Folder on a fast local disk, for what is offloaded to `nvme`. Without it nothing is."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """How often the processes are started again after one of them failed, each time from the last checkpoint."""

    timeout_seconds: Annotated[int, Field(gt=0)] | None = None
    """How long a process may wait for the others, or stand still itself, before the run is taken for hung and ends.
    Left out: as long as reading or writing the model may take on slow storage, ten minutes at least."""

    grace_seconds: Annotated[float, Field(gt=0)] = 30.0
    """How long a run has that is told to end by SIGTERM, until the scheduler kills it: it saves a checkpoint if
    there is time for one."""
