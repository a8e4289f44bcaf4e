"""Environment of a run's processes: decided here, shown in the plan, set before torch is imported."""

import math
from collections.abc import Iterator, Mapping

from tunekit.estimates.facts import Hardware, ModelFacts
from tunekit.estimates.layout import Layout
from tunekit.estimates.throughput.speed import STORAGE_BYTES_PER_SECOND
from tunekit.planner.plan import Reason, gib
from tunekit.recipe.methods import is_rewarded
from tunekit.recipe.methods.spec import MethodSection
from tunekit.recipe.sections.rewards import CodeReward, JudgeReward

LEAST_TIMEOUT_SECONDS = 600
"""Minimum seconds that a process may make no progress, or wait for others, before the run counts as hung."""

PREPARED_ROWS_PER_SECOND = 200
"""Rate at which the slowest of CPUs tokenizes rows, which TRL does in one process while the others wait."""

REWARD_TRIES = 5
"""Maximum number of requests to a judge for one score."""

SLOW_STORAGE = 3
"""Factor by which storage may be slower than assumed, before a process that reads or writes counts as dead."""

BYTES_PER_TRAINED = 12
"""Of a checkpoint at most: a weight and AdamW's two states in float32."""

BYTES_PER_READ = 2
"""Of a weight as most models store it."""

ALLOCATOR = "PYTORCH_ALLOC_CONF"
"""Setting of torch's allocator (torch 2.9 and later; PYTORCH_CUDA_ALLOC_CONF before)."""

GLIBC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Sizes from which glibc maps a block by itself, and gives back what is free at the end of its heap (mallopt(3))."""

GIVEN_BACK_BYTES = 2**20
"""Value of both thresholds on a CPU: 64 and 128 KiB save no more memory, and make more blocks to map.

glibc raises its own to 32 MiB as blocks are freed, and keeps those that are smaller: a run with checkpointing (88M
LoRA, two rows of 1,024 tokens) held 2.07 to 2.20 GiB, and 1.33 with these, of 1.46 that were planned."""

DECIDED = (ALLOCATOR, *GLIBC, "OMP_NUM_THREADS")
"""Variables that are decided here unless the user has set them."""


def longest_wait_bytes(model: ModelFacts, num_trained: int) -> int:
    """Return the bytes that one process reads or writes while the others wait: the weights at first, a checkpoint
    later.
    """
    return max(BYTES_PER_READ * model.num_params, BYTES_PER_TRAINED * num_trained)


def timeout_of(wait_bytes: int) -> int:
    """Return the timeout of collectives, in whole minutes, as seconds."""
    seconds = SLOW_STORAGE * wait_bytes / STORAGE_BYTES_PER_SECOND
    return max(LEAST_TIMEOUT_SECONDS, 60 * math.ceil(seconds / 60))


def patience_of(wait_bytes: int, num_rows: int, method: MethodSection, num_answers: int) -> int:
    """Return how long a process may make no visible progress, in whole minutes, as seconds.

    That is loading, saving, preparing rows, the first step, answers and their rewards.

    Args:
        wait_bytes: What it reads or writes meanwhile.
        num_rows: Rows that it prepares.
        method: The method, whose rewards may wait for others.
        num_answers: Answers that it has at once.
    """
    seconds = max(num_rows / PREPARED_ROWS_PER_SECOND, _reward_seconds(method, num_answers))
    return max(timeout_of(wait_bytes), 60 * math.ceil(seconds / 60))


def _reward_seconds(method: MethodSection, num_answers: int) -> float:
    """Return the longest time of rewards that have a limit of their own for each answer."""
    seconds = method.tool_seconds if is_rewarded(method) else 0.0
    for reward in method.rewards if is_rewarded(method) else ():
        if isinstance(reward, JudgeReward | CodeReward):
            tries = REWARD_TRIES if isinstance(reward, JudgeReward) else 1
            seconds += tries * reward.timeout_seconds * math.ceil(num_answers / reward.num_parallel)
    return seconds


def timeout_reasons(layout: Layout, wait_bytes: int, forced: int | None, patience_seconds: int) -> Iterator[Reason]:
    """Yield the plan's reasons for the timeouts."""
    why = f"one process may read or write {gib(wait_bytes)} while others wait, {SLOW_STORAGE} times slower than 1 GB/s"
    if forced is not None:
        choice = f"{forced} s without progress in a step, {patience_seconds // 60} min while loading or saving"
        yield Reason(topic="timeout", choice=choice, why=f"set by parallel.timeout_seconds; {why}")
    elif layout.num_processes > 1:
        yield Reason(topic="timeout", choice=f"{timeout_of(wait_bytes) // 60} min per collective", why=why)


def environment_of(hardware: Hardware, layout: Layout, num_nodes: int, method: MethodSection) -> dict[str, str]:
    """Variables of every process of a run.

    Args:
        hardware: The machine.
        layout: How the run is spread.
        num_nodes: Nodes in use.
        method: The method.
    """
    of_a_node = layout.num_processes // num_nodes
    variables = {}
    used = hardware.freest(of_a_node)
    names = [device.visible_as for device in used if device.visible_as is not None]
    if names and num_nodes == 1:
        # A trainer takes all devices that it sees. On several nodes it is to use all of them.
        variables["CUDA_VISIBLE_DEVICES" if used[0].gfx is None else "HIP_VISIBLE_DEVICES"] = ",".join(names)
    if of_a_node > 1 and hardware.num_cores is not None:
        # Each of several processes would take all cores.
        variables["OMP_NUM_THREADS"] = str(max(1, hardware.num_cores // of_a_node))
    if layout.strategy.startswith("zero"):
        # DeepSpeed would otherwise guess it.
        variables["DS_ACCELERATOR"] = hardware.device.kind
    if hardware.device.compute_capability is not None:
        # Segments that grow leave fewer holes where sequences differ in length. CUDA has them, and ROCm has not.
        variables[ALLOCATOR] = "expandable_segments:True"
    if hardware.device.kind == "cpu":
        variables |= dict.fromkeys(GLIBC, str(GIVEN_BACK_BYTES))
    if method.spec.is_experimental:
        # TRL's own switch for its words about what is experimental there, which the plan says too.
        variables["TRL_EXPERIMENTAL_SILENCE"] = "1"
    return variables | {name: value for name, value in hardware.environment.items() if name in DECIDED}


def environment_reasons(environment: Mapping[str, str], hardware: Hardware, num_nodes: int) -> Iterator[Reason]:
    """Yield the plan's reasons for the variables that are set, and for those that each node finds by itself."""
    if environment:
        why = ", ".join(f"{name}={value}" for name, value in environment.items())
        if hardware.environment:
            why += f"; {', '.join(hardware.environment)} from the current environment"
        yield Reason(topic="environment", choice="set before torch is imported", why=why)
    if num_nodes > 1:
        yield Reason(
            topic="network",
            choice="interface toward the first node",
            why="detected on each node, unless GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME set one",
        )
