"""Runs on clusters: Slurm jobs and SkyPilot tasks, for nodes like this machine or like a named one.

Slurm sends SIGUSR1 to a job's script some time before the limit. The script passes it to the processes, which save a
checkpoint after the step and exit; the run's status is then `queued`, and the script requeues the job. Restarted, the
processes resume from the newest checkpoint.

A SkyPilot task runs on cloud nodes that do not share this disk. The run is planned and its rows are prepared here; each
node gets a copy of the run folder, under the same path, and of local files that the run still reads. Results are in the
folder of the first node. Nodes without a shared disk have no common checkpoint, so several of them cannot restart.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tunekit.errors import DependencyError, PlanError, RunError
from tunekit.estimates.facts import Hardware
from tunekit.estimates.hardware.machines import find_machine
from tunekit.estimates.throughput.speed import STORAGE_BYTES_PER_SECOND
from tunekit.files import has_controls, load_template
from tunekit.planner.decisions.automodel import VERSION as AUTOMODEL_VERSION
from tunekit.planner.decisions.environment import BYTES_PER_TRAINED
from tunekit.planner.plan import Plan
from tunekit.probe.hardware import probe_node
from tunekit.probe.nodes import check_for_launcher
from tunekit.recipe.schema import Recipe
from tunekit.redact import redacted, secret_in
from tunekit.runs.run import Run
from tunekit.runs.small_files import write_job


def nodes_of(on: str | None, num_nodes: int | None) -> Hardware:
    """Return the nodes of a run.

    Args:
        on: A machine as for `tunekit plan --on`; by default nodes like this machine.
        num_nodes: Number of nodes; by default one, or as many as `on` has.

    Raises:
        PlanError: There is no such machine, or its number of nodes is another one.
    """
    node = find_machine(on).hardware() if on is not None else probe_node()
    if num_nodes not in (None, 1, node.num_nodes) and node.num_nodes > 1:
        raise PlanError(f"--on {on} has {node.num_nodes} nodes, --num-nodes is {num_nodes}", hint="pass one of them")
    # Which of its devices a program sees holds for this machine alone, and so do the user's variables.
    devices = tuple(device.model_copy(update={"visible_as": None}) for device in node.accelerators)
    return node.model_copy(
        update={"accelerators": devices, "num_nodes": num_nodes or node.num_nodes, "environment": {}}
    )


def with_all_nodes(recipe: Recipe, hardware: Hardware) -> Recipe:
    """The recipe with a process on each of several nodes, where they have no accelerators and it names no number."""
    if hardware.accelerators or hardware.num_nodes == 1 or recipe.parallel.num_processes is not None:
        return recipe
    parallel = recipe.parallel.model_copy(update={"num_processes": hardware.num_nodes})
    return recipe.model_copy(update={"parallel": parallel})


def num_local(plan: Plan) -> int:
    """Processes on each node."""
    return plan.layout.num_processes // plan.num_nodes


def command_of(plan: Plan, python: str, folder: str, *, meeting: str) -> str:
    """Return the shell command for each node: tunekit's own supervisor on a single one, one torchrun on each of
    several.

    Args:
        plan: The plan.
        python: The Python of the nodes.
        folder: The run folder there.
        meeting: Options of torchrun that say how nodes find each other.
    """
    python, folder = shlex.quote(python), shlex.quote(folder)
    if plan.num_nodes == 1:
        return f"{python} -m tunekit.launching.local {folder}"
    check_for_launcher(plan.recipe, "torchrun")
    torchrun = f"{python} -m torch.distributed.run --nnodes={plan.num_nodes} --nproc-per-node={num_local(plan)}"
    return f"{torchrun} {meeting} -m tunekit.training.worker {folder}"


def num_cores(plan: Plan, hardware: Hardware) -> int:
    """Cores for the processes of a node: the share of their accelerators, or else all; what they need where unknown."""
    if hardware.num_cores is None:
        return num_local(plan) * (1 + plan.dataloader_num_workers)
    return max(1, hardware.num_cores * num_local(plan) // max(num_local(plan), len(hardware.accelerators)))


SCRIPT = "job.sbatch"
"""Name of the job's script in the run folder."""

FIRST_PORT, NUM_PORTS = 15000, 15000
"""Ports of the rendezvous, below the ephemeral ones, by the number of the job."""

NOTICE_SECONDS = 60
"""Between the signal and the limit, besides a step and a save."""

EARLY_SECONDS = 60
"""Seconds by which Slurm may send a signal early."""

REPEAT_SECONDS = 10
"""Seconds between two signals to the processes until they end: while they load, they do not listen yet."""


@dataclass(frozen=True)
class Wishes:
    """Options of a job for sbatch.

    Attributes:
        time: Limit, as sbatch has it: minutes, `hours:minutes:seconds` or `days-hours`. The partition's where None.
        partition: The cluster's own where None.
        account: The user's own where None.
        sbatch_args: Other options of sbatch, such as `--qos=high`; they overrule those of tunekit.
    """

    time: str | None = None
    partition: str | None = None
    account: str | None = None
    sbatch_args: Sequence[str] = ()


def write_script(run: Run, hardware: Hardware, wishes: Wishes) -> Path:
    """Write the script of a run's job into its folder, on storage that all nodes share.

    Args:
        run: The run, planned for `hardware`.
        hardware: The nodes.
        wishes: What else is asked of Slurm.

    Raises:
        RunError: The limit is shorter than a save takes.
    """
    path = run.path.resolve() / SCRIPT
    options = [_one_line(option) for option in _options(run, hardware, wishes)]
    path.write_text(_script(run, options), encoding="utf-8")
    run.update_status(phase="queued")
    return path


def _one_line(option: str) -> str:
    """Check an sbatch option for a line of the script.

    Raises:
        RunError: It does not fit on a line, or it contains a secret: the script stays in the run folder.
    """
    if has_controls(option):
        raise RunError(f"sbatch: {option!r} does not fit on one line of the job script", hint="change its value")
    if not option.startswith("-"):
        raise RunError(f"sbatch: {option!r} is not an option", hint="write it as --NAME=VALUE")
    secret = secret_in(option)
    if secret is not None:
        problem = f"sbatch: {redacted(option.partition('=')[0])} contains {secret}"
        raise RunError(problem, hint="export it before submitting: jobs inherit the environment")
    return option


def submit(run: Run, script: Path) -> str:
    """Submit a job to Slurm and return its number.

    Raises:
        DependencyError: Slurm is not installed.
        RunError: Slurm rejects it.
    """
    try:
        answer = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        hint = f"submit it on a Slurm node: sbatch {shlex.quote(str(script))}"
        raise DependencyError("sbatch not found", hint=hint) from error
    if answer.returncode != 0:
        words = answer.stderr.strip().replace("\n", "; ")
        run.update_status(phase="failed", exit_reason=words)
        raise RunError(f"Slurm rejected the job: {words}", hint=f"see {script} and `sbatch --help`")
    # A federation's name may follow.
    job_id = answer.stdout.strip().partition(";")[0]
    write_job(run.path, job_id)
    return job_id


def notice_seconds(plan: Plan) -> int:
    """Return the seconds for a step and a checkpoint before a limit: twice their expected time, and a margin."""
    speed, schedule = plan.speed, plan.schedule
    save = plan.num_trainable_params * BYTES_PER_TRAINED / STORAGE_BYTES_PER_SECOND
    step = 0.0
    if speed is not None and speed.seconds is not None and schedule is not None:
        step = speed.seconds.high / schedule.num_steps
    return NOTICE_SECONDS + round(2 * (save + step))


def _options(run: Run, hardware: Hardware, wishes: Wishes) -> Iterator[str]:
    """Options of sbatch; of those given twice the last counts."""
    plan = run.plan
    notice = notice_seconds(plan)
    limit = None if wishes.time is None else seconds_of(wishes.time)
    if limit is not None and limit <= notice + EARLY_SECONDS:
        early = notice + EARLY_SECONDS
        problem = f"--time {wishes.time}: too short: Slurm may request a checkpoint {early} s before the limit"
        raise RunError(problem, hint=f"set more than {-(-early // 60)} minutes")
    yield f"--job-name={shlex.quote(run.name)}"
    yield f"--nodes={plan.num_nodes}"
    yield "--ntasks-per-node=1"
    if plan.device.kind != "cpu":
        yield f"--gpus-per-node={num_local(plan)}"
    yield f"--cpus-per-task={num_cores(plan, hardware)}"
    for name, value in (("time", wishes.time), ("partition", wishes.partition), ("account", wishes.account)):
        if value is not None:
            yield f"--{name}={shlex.quote(value)}"
    yield f"--signal=B:USR1@{notice}"
    yield "--requeue"
    yield "--open-mode=append"
    # A percent sign begins a number of Slurm's.
    yield f"--output={shlex.quote(str(run.path.resolve() / 'launcher.log').replace('%', '%%'))}"
    yield from wishes.sbatch_args


def seconds_of(time: str) -> int | None:
    """Return the seconds of a limit in sbatch's format; None if unlimited.

    Raises:
        RunError: It is invalid.
    """
    if time.lower() in ("infinite", "unlimited"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise RunError(f"--time {time}: invalid time", hint="write it as 90 (minutes), 01:30:00 or 2-12 (days-hours)")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    # With days it begins with hours; without, one number or two begin with minutes.
    units = [3600, 60, 1] if days is not None or len(numbers) == 3 else [60, 1]
    clock = sum(number * unit for number, unit in zip(numbers, units, strict=False))
    return int(days or 0) * 86400 + clock


def _script(run: Run, options: Sequence[str]) -> str:
    """The script of a job with options of sbatch."""
    plan, folder = run.plan, run.path.resolve()
    variables = {**plan.environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = command_of(plan, sys.executable, str(folder), meeting=_meeting(plan))
    return load_template(Path(__file__).with_name("job.sbatch.jinja")).render(
        options=options,
        variables=[(name, shlex.quote(value)) for name, value in variables.items()],
        # Python leaves a signal ignored that was ignored when it started. What has no use for this one is started so.
        on_each=shlex.quote(f"trap '' USR1; exec {command}"),
        job=shlex.quote(str(folder / "job.json")),
        status=shlex.quote(str(folder / "status.json")),
        first_port=FIRST_PORT,
        num_ports=NUM_PORTS,
        repeat_seconds=REPEAT_SECONDS,
    )


def _meeting(plan: Plan) -> str:
    """Return the rendezvous of several nodes, expanded on each: the first one hosts the store."""
    return (
        f"--max-restarts={plan.recipe.parallel.max_restarts} "
        '--rdzv-backend=c10d --rdzv-endpoint="$TUNEKIT_MEET" '
        '--rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv-conf="is_host=$((SLURM_NODEID == 0))"'
    )


TASK = "task.sky.yaml"
"""Name of the task's file in the run folder."""

NAMES = {"a100-40gb": "A100", "h100-pcie": "H100"}
"""SkyPilot's names of accelerators, where they differ from ours. Case does not matter."""

MEETING = (
    '--node-rank="$SKYPILOT_NODE_RANK" --master-addr="$(echo "$SKYPILOT_NODE_IPS" | head -n 1)" --master-port=29511'
)
"""Rendezvous of several nodes. Ranks begin on the first, so that what the main process writes is in its folder."""


def write_task(run: Run, on: str) -> Path:
    """Write the task of a run into its folder.

    Args:
        run: The run, planned for the machine.
        on: The machine, as `tunekit plan --on` takes it.

    Raises:
        RunError: The nodes would start again, with no checkpoint in common.
    """
    plan = run.plan
    if plan.num_nodes > 1 and plan.recipe.parallel.max_restarts:
        what = "parallel.max_restarts: unsupported on several cloud nodes, which share no disk for a common checkpoint"
        raise RunError(what, hint="set it to 0, or train on one node")
    if plan.num_nodes > 1 and plan.layout.engine == "automodel":
        what = (
            "parallel.engine=automodel: NeMo Automodel writes checkpoints to one disk, which cloud nodes do not share"
        )
        raise RunError(what, hint="use --slurm or --nodes, or train on one node")
    folder, accelerator = str(run.path.resolve()), find_machine(on).accelerator.name
    task: dict[str, Any] = {
        "name": _name(run),
        "resources": {"accelerators": f"{NAMES.get(accelerator, accelerator.upper())}:{num_local(plan)}"},
        "num_nodes": plan.num_nodes,
        "file_mounts": {path: path for path in (folder, *_local_files(plan))},
        "envs": dict(plan.environment),
        "setup": _setup(plan),
        "run": command_of(plan, "python", folder, meeting=MEETING) + "\n",
    }
    path = Path(folder) / TASK
    path.write_text(yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=1000), encoding="utf-8")
    run.update_status(phase="queued")
    return path


def _setup(plan: Plan) -> str:
    """Return the commands that install tunekit with the engine of a plan."""
    layout = plan.layout
    extra = "[deepspeed]" if layout.strategy.startswith("zero") else ""
    if layout.engine == "automodel":
        extra = "[automodel]"
    lines = [f"pip install 'tunekit{extra}=={version('tunekit')}'"]
    if layout.engine == "automodel":
        lines.append(f"pip install --no-deps nemo-automodel=={AUTOMODEL_VERSION}")
    return "\n".join(lines) + "\n"


def launch_task(run: Run, task: Path) -> str:
    """Launch a task with SkyPilot, and return the command that fetches its results.

    Raises:
        DependencyError: SkyPilot is not installed.
        RunError: It did not start the task.
    """
    command = ["sky", "launch", "--cluster", _name(run), "--detach-run", str(task)]
    if shutil.which("sky") is None:
        hint = f"pip install skypilot with the extra of your cloud, then run: {shlex.join(command)}"
        raise DependencyError(f"{task} is written, but SkyPilot is not installed", hint=hint)
    # It shows what it found and what that costs, and asks.
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        run.update_status(phase="failed", exit_reason=f"sky launch failed with exit code {code}")
        raise RunError(f"`sky launch` failed with exit code {code}", hint="see its output and `sky check`")
    folder = shlex.quote(f"{run.path.resolve()}/")
    return f"rsync -a {_name(run)}:{folder} {folder}"


def _name(run: Run) -> str:
    """A name that SkyPilot allows for a cluster."""
    return f"tunekit-{re.sub('[^a-zA-Z0-9-]+', '-', run.name).strip('-')}"


def _local_files(plan: Plan) -> Iterator[str]:
    """Files of this machine that the processes read; the rows are in the run folder.

    Raises:
        PlanError: The rows are not, and lie here.
    """
    recipe = plan.recipe
    train = recipe.data.train
    sources = train if isinstance(train, list) else [train]
    if recipe.data.streaming and any(Path(source.path).is_absolute() for source in sources):
        raise PlanError("data.streaming: cloud nodes cannot read rows from this disk", hint="set it to false")
    for path in dict.fromkeys((recipe.model.path, plan.base.path, recipe.model.chat_template)):
        if path is not None and Path(path).is_absolute() and Path(path).exists():
            yield path
