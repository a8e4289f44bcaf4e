"""A run as a task of SkyPilot, on nodes of a cloud that do not share this disk.

The run is planned and its rows are prepared here. Each node gets a copy of the run folder, under the same path, and of
local files that the run still reads; the folder on the first node is the one that fills. Nodes that share no disk have
no checkpoint in common, so that several of them cannot start again by themselves.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tunekit.errors import DependencyError, PlanError, RunError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.launching.cluster import command_of, num_local
from tunekit.planner.plan import Plan
from tunekit.runs.run import Run

TASK = "task.sky.yaml"
"""Name of the task's file in the run folder."""

NAMES = {"a100-40gb": "A100", "h100-pcie": "H100"}
"""SkyPilot's names of accelerators, where they are others than ours. Capitals do not count."""

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
        raise RunError(
            "parallel.max_restarts: nodes of a cloud share no disk, so they have no checkpoint to start again from",
            hint="set it to 0, or train on one node",
        )
    folder = str(run.path.resolve())
    task: dict[str, Any] = {
        "name": _name(run),
        "resources": {"accelerators": f"{_accelerator(on)}:{num_local(plan)}"},
        "num_nodes": plan.num_nodes,
        "file_mounts": {path: path for path in (folder, *_local_files(plan))},
        "envs": dict(plan.environment),
        "setup": f"pip install 'tunekit=={version('tunekit')}'\n",
        "run": command_of(plan, "python", folder, meeting=MEETING) + "\n",
    }
    path = Path(folder) / TASK
    path.write_text(yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=1000), encoding="utf-8")
    run.update_status(phase="queued")
    return path


def launch_task(run: Run, task: Path) -> str:
    """Have SkyPilot find nodes and start the task on them, and return how its results are fetched.

    Raises:
        DependencyError: SkyPilot is not installed.
        RunError: It did not start the task.
    """
    command = ["sky", "launch", "--cluster", _name(run), "--detach-run", str(task)]
    if shutil.which("sky") is None:
        hint = f"pip install skypilot, with the extra of your cloud, and then: {shlex.join(command)}"
        raise DependencyError(f"{task} is written, but SkyPilot is not installed here", hint=hint)
    # It shows what it found and what that costs, and asks.
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        run.update_status(phase="failed", exit_reason=f"sky launch ended with exit code {code}")
        raise RunError(f"`sky launch` ended with exit code {code}", hint="see what it said, and `sky check`")
    folder = shlex.quote(f"{run.path.resolve()}/")
    return f"rsync -a {_name(run)}:{folder} {folder}"


def _name(run: Run) -> str:
    """A name that SkyPilot allows for a cluster."""
    return f"tunekit-{re.sub('[^a-zA-Z0-9-]+', '-', run.name).strip('-')}"


def _accelerator(on: str) -> str:
    """SkyPilot's name of the accelerators of a machine."""
    name = find_machine(on).accelerator.name
    return NAMES.get(name, name.upper())


def _local_files(plan: Plan) -> Iterator[str]:
    """Files of this machine that the processes read; the rows are in the run folder.

    Raises:
        PlanError: The rows are not, and lie here.
    """
    recipe = plan.recipe
    train = recipe.data.train
    sources = train if isinstance(train, list) else [train]
    if recipe.data.streaming and any(Path(source.path).is_absolute() for source in sources):
        raise PlanError("data.streaming: rows would be read from this disk by other machines", hint="set it to false")
    for path in dict.fromkeys((recipe.model.path, plan.base.path, recipe.model.chat_template)):
        if path is not None and Path(path).is_absolute() and Path(path).exists():
            yield path
