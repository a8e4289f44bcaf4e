"""The checkpoints that a run has kept, as whoever wants to go on from one of them looks at them."""

from dataclasses import dataclass
from pathlib import Path

from tunekit.runs.checkpoints.complete import CHECKPOINTS, fault_of, files_in, newest_complete
from tunekit.runs.checkpoints.reference import steps_of
from tunekit.runs.reader import EventReader
from tunekit.runs.run import Run


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a run.

    Attributes:
        name: What `tunekit resume --from` knows it by.
        path: Its folder.
        step: After which step it was made.
        size_bytes: What its files take on the disk.
        loss: The loss of the step, or of the last one before it that was logged; None where none was.
        eval_loss: The same of the evaluation.
        is_best: Whether it is the best by what the recipe's evaluations are judged by.
        fault: What is wrong with it, so that nothing goes on from it; None where it is whole. What its large files hold
            is read only when a run goes on from it.
    """

    name: str
    path: Path
    step: int
    size_bytes: int
    loss: float | None
    eval_loss: float | None
    is_best: bool
    fault: str | None


def checkpoints(run: Run, history: EventReader | None = None) -> list[Checkpoint]:
    """The checkpoints of a run, the newest first; then those that were set aside, damaged or left behind.

    Args:
        run: The run.
        history: What happened in it, by whoever has read that already; it is read where left out.
    """
    folders = folders_of(run)
    if folders and history is None:
        history = EventReader(run.path / "events.jsonl")
        history.read()
    best = _best_name(run)
    checkpoints_list = []
    for name, path in folders.items():
        loss, eval_loss = (None, None) if history is None else history.losses_at(steps_of(path))
        checkpoints_list.append(
            Checkpoint(
                name=name,
                path=path,
                step=steps_of(path),
                size_bytes=_size_of(path),
                loss=loss,
                eval_loss=eval_loss,
                is_best=name == best,
                fault=_fault_of(path),
            )
        )
    return checkpoints_list


def folders_of(run: Run) -> dict[str, Path]:
    """The folders of a run's checkpoints by their names, the newest first, and last those that were set aside."""
    root = run.path / CHECKPOINTS
    folders = [path for path in (*root.glob("checkpoint-*"), *root.glob("aside-*/checkpoint-*")) if steps_of(path) >= 0]
    folders.sort(key=lambda path: (path.parent != root, path.suffix != "", -steps_of(path)))
    return {path.relative_to(root).as_posix(): path for path in folders}


def _fault_of(path: Path) -> str | None:
    if path.suffix:
        return "set aside, because it was damaged"
    return fault_of(path, contents=False)


def _best_name(run: Run) -> str | None:
    """The name of the checkpoint of the best evaluation, as the newest whole one tells it."""
    best = newest_complete(run.path).best
    return None if best is None else f"checkpoint-{best.step}"


def _size_of(path: Path) -> int:
    return sum((path / name).lstat().st_size for name in files_in(path))
