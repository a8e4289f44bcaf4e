"""A run that a cluster's scheduler starts: which job it is, and whether that one still waits or runs."""

import json
import subprocess
from pathlib import Path

from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.small_files import damaged, read_object

JOB = "job.json"
"""Name of the file of a run folder that says which job it is."""

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
"""Slurm's names of states in which a job has no nodes, and will have some."""

ASK_SECONDS = 10
"""Seconds for Slurm to answer."""


def write_job(folder: Path, job_id: str) -> None:
    """Say which of Slurm's jobs a run is."""
    (folder / JOB).write_text(json.dumps({"scheduler": "slurm", "id": job_id}), encoding="utf-8")


def read_job(folder: Path) -> str | None:
    """Slurm's number of the job that a run is; None for one that is no job."""
    try:
        job = read_object(folder / JOB)
    except FileNotFoundError:
        return None
    if "id" not in job:
        raise damaged(folder / JOB, "it has no id")
    return str(job["id"])


def state_of(job_id: str, phase: str) -> str:
    """Return the state of a run whose processes a job runs.

    Args:
        job_id: Slurm's number of the job.
        phase: What the run itself said last. After the end of a job that was interrupted, Slurm may start it again.
    """
    state = _slurm_state(job_id)
    if state is None:
        return phase
    if not state:
        return phase if phase in FINAL_PHASES else "died"
    if state in WAITING:
        return "queued"
    return "starting" if phase == "queued" else phase


def _slurm_state(job_id: str) -> str | None:
    """Slurm's name of the state of a job; empty where it is over, None where Slurm cannot be asked."""
    command = ["squeue", "--noheader", "--jobs", job_id, "--format", "%T"]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if completed.returncode != 0 and "Invalid job id" not in completed.stderr:
        return None
    # Slurm forgets a job some minutes after its end, and then says that its number is not valid.
    return completed.stdout.strip()
