"""Request of the last resume of a run, left by the command for the processes: `resume.json`."""

import json
from dataclasses import asdict, dataclass

from tunekit.errors import RunError
from tunekit.runs.checkpoints.complete import CHECKPOINTS
from tunekit.runs.run import Run
from tunekit.runs.small_files import damaged, read_object

CONTINUATION = "resume.json"
"""File of a run folder that says it."""


@dataclass(frozen=True)
class Continuation:
    """Request of a resume.

    Attributes:
        step: The step of the checkpoint.
        changes: What is otherwise than before, a phrase each.
        weights: The checkpoint, below the run folder, of which only the weights are taken, while there is no newer one.
    """

    step: int = 0
    changes: tuple[str, ...] = ()
    weights: str | None = None


def write_continuation(run: Run, continuation: Continuation) -> None:
    """Leave it to the processes; they find this one or the one before."""
    draft = run.path / f".{CONTINUATION}"
    draft.write_text(json.dumps(asdict(continuation), indent=2), encoding="utf-8")
    draft.replace(run.path / CONTINUATION)


def read_continuation(run: Run) -> Continuation:
    """Read the request of the last resume of a run; empty if there was none.

    Raises:
        RunError: The file is damaged, or names something outside the run.
    """
    try:
        content = read_object(run.path / CONTINUATION, hint="remove the file")
    except FileNotFoundError:
        return Continuation()
    step, changes, weights = (content.get(name) for name in ("step", "changes", "weights"))
    if not (isinstance(step, int) and isinstance(changes, list) and isinstance(weights, str | None)):
        raise damaged(run.path / CONTINUATION, "it is no continuation", "remove the file")
    checkpoints = (run.path / CHECKPOINTS).resolve()
    if weights is not None and not (run.path / weights).resolve().is_relative_to(checkpoints):
        raise RunError(f"{run.path / CONTINUATION}: {weights} is none of its checkpoints", hint="remove the file")
    return Continuation(step, tuple(map(str, changes)), weights)
