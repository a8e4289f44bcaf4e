"""Number of machines of a run, and the rank of this process, from the launcher's environment variables.

The innermost launcher counts: torchrun, mpirun and srun start the processes, Slurm and SkyPilot give them the nodes.
Only this node can be looked at; the others are taken to be like it, and the plan says so.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.errors import PlanError
from tunekit.recipe.schema import Recipe

ACCELERATE = {
    "ACCELERATE_USE_FSDP": (("true", "1"), "FSDP", "remove it, and set parallel.strategy in the recipe"),
    "ACCELERATE_USE_DEEPSPEED": (("true", "1"), "DeepSpeed", "remove it, and set parallel.strategy in the recipe"),
    "ACCELERATE_MIXED_PRECISION": (
        ("bf16", "fp16", "fp8"),
        "mixed precision",
        "remove it, and set model.dtype in the recipe",
    ),
}
"""Variables in which `accelerate launch` hands on what it was asked for: values to refuse, what they mean, and what to
do. The rest of its configuration is forgotten."""


@dataclass(frozen=True)
class Launch:
    """Launcher's description of the machines."""

    launcher: str
    num_nodes: int
    num_local: int | None = None
    """Processes on this node (torchrun, mpirun, srun), or accelerators that it was given (Slurm, SkyPilot); None where
    not said."""
    starts_processes: bool = False
    """True if `num_local` counts processes."""
    is_elsewhere: bool = False
    """True if this process runs on none of the nodes, as on the login node of a cluster."""
    rank: int = 0
    """Number of this process among all that the launcher started."""
    local_rank: int = 0
    """Its number on its node."""

    @property
    def num_processes(self) -> int | None:
        """All processes that the launcher started, where it does."""
        return self.num_nodes * self.num_local if self.starts_processes and self.num_local else None


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Return the launcher of this process; None where there is none.

    Raises:
        PlanError: What it says cannot be true.
    """
    started = _torchrun(environment) or _mpirun(environment) or _srun(environment)
    return started or _slurm(environment) or _skypilot(environment)


def use_launch(launch: Launch, num_visible: int) -> tuple[int, str | None]:
    """Return how many of this node's accelerators a run uses, and a note for every plan.

    Args:
        launch: What the launcher says.
        num_visible: Equal accelerators that this process sees.

    Raises:
        PlanError: The launcher and the machine contradict each other.
    """
    if launch.is_elsewhere:
        return num_visible, _elsewhere(launch, num_visible)
    num_used, note = _share(launch, num_visible)
    several = f"{launch.num_nodes} nodes by {launch.launcher}, all assumed identical to this one"
    notes = [several] if launch.num_nodes > 1 else []
    return num_used, "; ".join([*notes, note] if note else notes) or None


def with_started(recipe: Recipe, environment: Mapping[str, str]) -> Recipe:
    """A recipe that asks for as many processes as a launcher has started, where one has.

    Raises:
        PlanError: It contradicts the launcher, or the launcher was asked for what the plan decides.
    """
    launch = read_launch(environment)
    if launch is None or launch.num_processes is None:
        return recipe
    requested, num = recipe.parallel, launch.num_processes
    if requested.num_processes not in (None, num):
        raise PlanError(
            f"parallel.num_processes: {requested.num_processes} contradicts {launch.launcher}, which started {num}",
            hint="unset it, or start as many",
        )
    if requested.max_restarts:
        raise PlanError(
            f"parallel.max_restarts: only {launch.launcher} can restart its processes",
            hint="unset it, or run `tunekit train` without a launcher; `tunekit resume` resumes a run",
        )
    check_for_launcher(recipe, launch.launcher)
    for name, (values, what, hint) in ACCELERATE.items():
        if environment.get(name, "").lower() in values:
            raise PlanError(f"accelerate launch sets {what}, which the plan decides ({name})", hint=hint)
    return recipe.model_copy(update={"parallel": requested.model_copy(update={"num_processes": num})})


def check_for_launcher(recipe: Recipe, launcher: str) -> None:
    """Refuse what asks for processes that tunekit starts, where somebody else starts them.

    Raises:
        PlanError: The recipe asks for it.
    """
    for name, asks in (
        ("train.non_finite: rollback", recipe.train.non_finite == "rollback"),
        ("train.retry_out_of_memory", recipe.train.retry_out_of_memory),
    ):
        if asks:
            raise PlanError(
                f"{name}: only {launcher} can restart its processes",
                hint="unset it, or run `tunekit train` without a launcher",
            )
    check_starts_no_server(recipe, f"under {launcher}")


def check_starts_no_server(recipe: Recipe, where: str) -> None:
    """Refuse a vLLM server that the run starts, for runs whose processes are not started on this machine by tunekit.

    Raises:
        PlanError: The recipe asks for it.
    """
    if recipe.method.num_server_devices:
        problem = f"method.generation.vllm_mode: no vLLM server is started for runs {where}"
        hint = "start `vllm serve`, and set method.generation.vllm_server_base_url"
        raise PlanError(problem, hint=hint)


def _share(launch: Launch, num_visible: int) -> tuple[int, str | None]:
    """Return how many of a node's accelerators the launcher leaves to a run, and a note on it."""
    num_local = launch.num_local
    if num_local is None or num_local == num_visible:
        return num_visible, None
    if launch.starts_processes:
        if num_visible == 0:
            return 0, None
        if num_local > num_visible:
            raise PlanError(
                f"{launch.launcher} runs {num_local} processes on this node, but this process sees "
                f"{_devices(num_visible)}",
                hint="start as many processes as there are accelerators, or check CUDA_VISIBLE_DEVICES"
                + "; give each task all accelerators of its node: --gpus-per-node" * (launch.launcher == "srun"),
            )
        return num_local, f"{launch.launcher} runs {num_local} processes on this node of {num_visible} accelerators"
    if num_local < num_visible:
        raise PlanError(
            f"{launch.launcher} allocated {_devices(num_local)} on this node, but this process sees "
            f"{_devices(num_visible)}",
            hint="hide the others: set CUDA_VISIBLE_DEVICES to the allocated ones",
        )
    return num_visible, f"{launch.launcher} allocated {_devices(num_local)} on this node; {num_visible} usable"


def _elsewhere(launch: Launch, num_visible: int) -> str:
    nodes = "node is" if launch.num_nodes == 1 else f"{launch.num_nodes} nodes are"
    allocation = f"not on a node of the {launch.launcher} allocation"
    note = f"{allocation}: its {nodes} assumed identical to this machine"
    if launch.num_local is not None and launch.num_local != num_visible:
        note += f", which has {_devices(num_visible)} instead of {launch.num_local}: set the node type with --on"
    return note


def _devices(number: int) -> str:
    return "1 accelerator" if number == 1 else f"{number} accelerators"


def _torchrun(environment: Mapping[str, str]) -> Launch | None:
    """Read torchrun's variables; `accelerate launch` sets the same."""
    local = _count(environment, "LOCAL_WORLD_SIZE")
    world = _count(environment, "WORLD_SIZE")
    if not local or not world:
        return None
    nodes = _count(environment, "GROUP_WORLD_SIZE") or _count(environment, "NNODES") or -(-world // local)
    return _started("torchrun", "WORLD_SIZE", world, nodes, local, environment, ("RANK", "LOCAL_RANK"))


def _mpirun(environment: Mapping[str, str]) -> Launch | None:
    """Read Open MPI's variables."""
    local = _count(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    world = _count(environment, "OMPI_COMM_WORLD_SIZE")
    if not local or not world:
        return None
    ranks = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return _started("mpirun", "OMPI_COMM_WORLD_SIZE", world, -(-world // local), local, environment, ranks)


def _srun(environment: Mapping[str, str]) -> Launch | None:
    """Read Slurm's variables in a task of a step, where there are several.

    SLURM_PROCID and SLURM_NTASKS are there in the script of a job too, which is no task; and a step of one task is a
    shell, or a command that is to start its processes itself.
    """
    tasks, nodes = _count(environment, "SLURM_STEP_NUM_TASKS"), _count(environment, "SLURM_STEP_NUM_NODES")
    if not tasks or tasks == 1 or not nodes:
        return None
    # `2(x3)` where three nodes have two tasks each, `2,1` where they differ.
    counts = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    local = max(map(int, counts), default=-(-tasks // nodes))
    return _started("srun", "SLURM_STEP_NUM_TASKS", tasks, nodes, local, environment, ("SLURM_PROCID", "SLURM_LOCALID"))


def _started(
    launcher: str, name: str, world: int, nodes: int, local: int, environment: Mapping[str, str], ranks: tuple[str, str]
) -> Launch:
    """Return the launch of a launcher that starts the processes.

    Args:
        launcher: Which.
        name: Its variable of all processes.
        world: All processes.
        nodes: Nodes.
        local: Processes on this node.
        environment: Environment variables.
        ranks: Its variables of this process among all, and on its node.

    Raises:
        PlanError: There are not as many processes on every node.
    """
    if nodes * local != world:
        raise PlanError(
            f"the launcher set {name}={world}, but {nodes} nodes with {local} processes each are {nodes * local}",
            hint="start the same number of processes on every node",
        )
    rank, local_rank = (_count(environment, name) or 0 for name in ranks)
    return Launch(launcher, nodes, local, starts_processes=True, rank=rank, local_rank=local_rank)


def _slurm(environment: Mapping[str, str]) -> Launch | None:
    """Read Slurm's variables in a job's steps, its script, or the shell of `salloc`, which may run on a login node."""
    nodes = _count(environment, "SLURM_JOB_NUM_NODES") or _count(environment, "SLURM_NNODES")
    if nodes is None:
        return None
    num_gpus = _count(environment, "SLURM_GPUS_ON_NODE")
    if num_gpus is None:
        # As it was asked for: `8`, or with the kind, `h100:8`.
        per_node = environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
        num_gpus = int(per_node) if per_node.isdigit() else None
    return Launch("Slurm", nodes, num_gpus, is_elsewhere="SLURMD_NODENAME" not in environment)


def _skypilot(environment: Mapping[str, str]) -> Launch | None:
    nodes = _count(environment, "SKYPILOT_NUM_NODES")
    return None if nodes is None else Launch("SkyPilot", nodes, _count(environment, "SKYPILOT_NUM_GPUS_PER_NODE"))


def _count(environment: Mapping[str, str], name: str) -> int | None:
    """A number from the environment; None where it is not set.

    Raises:
        PlanError: It is no number.
    """
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise PlanError(f"{name} is {text!r}, not a number", hint=f"unset {name}, or check what set it")
    return int(text)
