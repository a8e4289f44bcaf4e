"""A run that is asked to make room: it saves a checkpoint after the step, and ends to go on later.

Schedulers send SIGUSR1 some time before they end a job, to any of its processes or to all.
"""

import json
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from tunekit.run.run import Run

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

REQUEST = "stop.json"
"""File of a run folder in which somebody asks it to end, from any terminal and any host that sees the folder."""


@dataclass(frozen=True)
class Request:
    """What was asked.

    Attributes:
        now: Whether it is to end at once, rather than with a checkpoint after the step.
        time: When, in seconds since the epoch.
    """

    now: bool
    time: float


def request(run: Run, *, now: bool) -> None:
    """Ask a run to end."""
    draft = run.path / f".{REQUEST}"
    draft.write_text(json.dumps({"now": now, "time": time.time()}), encoding="utf-8")
    draft.replace(run.path / REQUEST)


def requested(run: Run) -> Request | None:
    """What was asked of a run since it began or went on."""
    try:
        return Request(**json.loads((run.path / REQUEST).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def forget_request(run: Run) -> None:
    """Take away what an earlier attempt was asked."""
    (run.path / REQUEST).unlink(missing_ok=True)


class Stop(TrainerCallback):  # type: ignore[misc]
    """Ends the training of all processes after the same step, with a checkpoint, once one of them gets SIGUSR1.

    It listens while the trainer trains, and in the main thread alone: Python tells no other of signals.
    """

    def __init__(self) -> None:
        self.is_early = False
        """Whether training ended before its last step."""
        self._asked = threading.Event()
        self._previous: Any = None

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Listen."""
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGUSR1, self._ask)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """End here if any process was asked to. The last step ends the training by itself."""
        if _any(self._asked.is_set()) and state.global_step < state.max_steps:
            self.is_early = True
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: Any
    ) -> None:
        """Listen no more."""
        if self._previous is not None:
            signal.signal(signal.SIGUSR1, self._previous)

    def _ask(self, signum: int, frame: FrameType | None) -> None:
        self._asked.set()


def _any(mine: bool) -> bool:
    """Whether it is true in any process. One number goes round, over the processors' network."""
    import torch

    if not torch.distributed.is_initialized():
        return mine
    flag = torch.tensor(int(mine))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)
