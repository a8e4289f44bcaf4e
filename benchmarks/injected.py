"""Faults that happen within the processes of a run, for `benchmarks.faults`. tunekit knows nothing of them.

A run is begun or gone on with as by `tunekit train` and `tunekit resume`, with two differences that make a case last
seconds: the process is forked from one that has imported the libraries already, and so are those that it supervises.
They are patched before; in one of them a fault happens once, at one of PLACES or after something is done to a file.
"""

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import psutil

from benchmarks.noticed import Files, Happening

PLACES = ("starting", "loading", "data", "forward", "backward", "optimizer", "evaluation", "result", "finished")
"""Where a fault can happen, in the order in which a run passes them: `forward`, `backward` and `optimizer` when that is
done, and the others when it begins."""

WAIT_SECONDS = 60
"""How long a checkpoint may take to be there."""

BALLAST = "ballast"
"""File in a run folder that fills its disk."""


@dataclass(frozen=True)
class Fault:
    """What happens, where and when.

    Attributes:
        does: `kill`, `kill supervisor`, `record` (nothing happens, but what is done to files is written down), or
            another of `_do`.
        at: One of PLACES, `file`, or `workers`: when the processes that read rows are started, and have read none.
        rank: The process in which it happens.
        step: The step in which it does; for files that with which their checkpoint is saved, and 0 for the result.
        what: For files: what has just been done, one of `noticed.WORDS`.
        path: For files: to which, in the run folder. Otherwise what is to be there before it happens, for checkpoints
            may be written while training goes on.
        mark: A file that says that it has happened, for it does so once.
    """

    does: str
    at: str
    rank: int = 0
    step: int = 0
    what: str = ""
    path: str = ""
    mark: str = ""


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A worker of a supervisor's, forked from it rather than started anew. All else is as it was."""

    def _execute_child(self, *args: Any) -> None:
        given = signature(super()._execute_child).bind(*args).arguments  # type: ignore[misc]
        words = given["args"]
        if words[1:4] != ["-P", "-m", "tunekit.training.worker"]:
            super()._execute_child(*args)  # type: ignore[misc]
            return
        pid = os.fork()
        if pid == 0:
            try:
                _become(words[4:], given)
            finally:
                os._exit(1)
        self.pid = pid
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _become(arguments: list[str], given: dict[str, Any]) -> None:
    """Be a worker, in a process that was just forked."""
    os.setsid()
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        os.dup2(given[name], number)
    kept = sorted(given["pass_fds"])
    for low, high in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
    os.environ.clear()
    os.environ.update(given["env"])
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, signal.default_int_handler if sign == signal.SIGINT else signal.SIG_DFL)
    sys.argv = ["tunekit.training.worker", *arguments]
    from tunekit.training import worker

    try:
        worker.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - an interpreter does so too
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def go(folder: str, fault: Fault | None, *, resumes: bool, notes: str | None = None) -> None:
    """Begin a run or go on with it, in this process; how it ended stands in `answer.json`.

    Args:
        folder: The run.
        fault: What happens to it.
        resumes: Whether it goes on from a checkpoint.
        notes: Folder of that file and others. Default: the one with the run's folder in it.
    """
    beside = Path(notes or Path(folder).parent)
    with (beside / "output.txt").open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.chdir(beside)
    from tunekit.errors import TunekitError
    from tunekit.process import processes
    from tunekit.runs.run import Run

    Injection(Path(folder), fault, beside).patch()
    processes.subprocess.Popen = Forked  # type: ignore[misc]
    answer: dict[str, Any] = {"kind": None, "is_told": False}
    try:
        if resumes:
            from tunekit.api import verbs

            verbs.resume(folder)
        else:
            from tunekit.launching.local import launch

            launch(Run(folder))
    except TunekitError as error:
        answer = {"kind": type(error).__name__, "problem": error.problem, "hint": error.hint, "is_told": True}
    except BaseException as error:  # noqa: BLE001 - it is the outcome
        answer = {"kind": type(error).__name__, "problem": str(error), "hint": None, "is_told": False}
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    (beside / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    sys.stderr.flush()


class Injection:
    """A fault, and the patches through which it comes.

    Args:
        folder: The run.
        fault: None: nothing happens.
        notes: Folder for the numbers of processes, and what is there before a training.
    """

    def __init__(self, folder: Path, fault: Fault | None, notes: Path) -> None:
        self.folder, self.notes = folder, notes
        self.fault = fault
        self.rank = 0
        self.step = 0
        self._files: Files | None = None

    def patch(self) -> None:
        """Patch the libraries, in this process and those that are forked from it."""
        from accelerate import Accelerator
        from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
        from transformers import Trainer
        from transformers.trainer_callback import CallbackHandler

        from tunekit.methods.sft import TokenMeanSFTTrainer
        from tunekit.training import worker

        work = worker.work

        def work_here(run: Any, *args: Any, place: Any = None, **kwargs: Any) -> None:
            self.rank = 0 if place is None else place.rank
            with (self.notes / "pids.txt").open("a", encoding="utf-8") as pids:
                pids.write(f"{os.getpid()}\n")
            self.come_to("starting")
            work(run, *args, place=place, **kwargs)
            if self._files is not None and self.fault is not None and self.fault.does == "record":
                self._files.listen_no_more()
                _write(Path(self.fault.mark), [vars(happening) for happening in self._files.happened])
            self.come_to("finished")

        worker.work = work_here
        around(Trainer, "__init__", before=lambda trainer: self.come_to("loading"))
        around(Trainer, "get_batch_samples", before=self._on_data)
        around(_MultiProcessingDataLoaderIter, "__init__", after=lambda workers, none: self.come_to("workers"))
        around(TokenMeanSFTTrainer, "compute_loss", after=lambda trainer, loss: self.come_to("forward", loss))
        around(Accelerator, "backward", after=lambda accelerator, none: self.come_to("backward"))
        around(CallbackHandler, "on_optimizer_step", before=lambda handler: self.come_to("optimizer"))
        around(TokenMeanSFTTrainer, "prediction_step", before=lambda trainer: self.come_to("evaluation"))
        around(CallbackHandler, "on_train_begin", after=lambda handler, control: self._on_train_begin())
        around(Trainer, "_maybe_log_save_evaluate", before=self._on_maybe_save)
        around(CallbackHandler, "on_train_end", after=lambda handler, control: self._on_train_end())

    def come_to(self, place: str, value: Any = None) -> Any:
        """Let the fault happen, if this is where; returns the value, or another where the fault changes it."""
        fault = self.fault
        if fault is None or fault.at != place or fault.rank != self.rank or (fault.step and fault.step != self.step):
            return value
        return self._happen(value)

    def _happen(self, value: Any = None) -> Any:
        assert self.fault is not None
        if self.fault.at != "file" and self.fault.path:
            _wait_for(self.folder / self.fault.path)
        try:
            os.close(os.open(self.fault.mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return value
        return _do(self.fault, self.folder, value)

    def _on_data(self, trainer: Any) -> None:
        self.step = trainer.state.global_step + 1
        self.come_to("data")

    def _on_train_begin(self) -> None:
        if self.rank == 0:
            _write(self.notes / "before_training.json", contents_of(self.folder / "checkpoints"))
        if self.fault is not None and self.fault.at == "file" and self.fault.rank == self.rank:
            self._files = Files(self.folder, self._on_file)

    def _on_maybe_save(self, trainer: Any) -> None:
        fault = self.fault
        if self._files is None or fault is None or not trainer.control.should_save:
            return
        if trainer.state.global_step == fault.step:
            self._files.listen()
        elif trainer.state.global_step > fault.step and fault.does == "record":
            _wait_for(self.folder / "checkpoints" / f"checkpoint-{fault.step}")
            self._files.listen_no_more()

    def _on_train_end(self) -> None:
        self.come_to("result")
        if self._files is None or self.fault is None:
            return
        if self.fault.does == "record" or not self.fault.step:
            self._files.listen()

    def _on_file(self, happening: Happening) -> None:
        assert self.fault is not None
        if (happening.what, happening.path) == (self.fault.what, self.fault.path):
            self._happen()


def _wait_for(path: Path) -> None:
    """Wait until something is there, and what follows it is over."""
    until = time.monotonic() + WAIT_SECONDS
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    for _ in range(20):
        time.sleep(0.05)


def _do(fault: Fault, run: Path, value: Any) -> Any:
    """What happens; a loss that it happened to."""
    match fault.does:
        case "record":
            pass
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(3600)
        case "not a number":
            return value * math.nan
        case "out of memory":
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        case "fill the disk":
            fill(run / BALLAST)
        case "make it read-only":
            subprocess.run(["mount", "-o", "remount,ro,bind", str(run / "checkpoints")], check=True)
        case "kill a data worker":
            _data_worker().kill()
        case "stop a data worker":
            _data_worker().suspend()
        case _:
            raise ValueError(fault.does)
    return value


def fill(ballast: Path) -> None:
    """Leave no room on the disk of a file."""
    with ballast.open("ab", buffering=0) as stream:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while stream.write(bytes(size)) == size:
                    pass


def _data_worker() -> psutil.Process:
    """A process that reads rows for this one. Other processes of its kind are its children too, as those that track
    what is shared.
    """
    return psutil.Process(multiprocessing.active_children()[0].pid)


def around(
    cls: type,
    name: str,
    before: Callable[[Any], object] | None = None,
    after: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Call something before each call of a method, or after it with the result, in place of which its own is given."""
    original = vars(cls)[name]

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        result = original(self, *args, **kwargs)
        if after is not None:
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    # The trainer and PEFT look at the parameters of some of these.
    called.__signature__ = signature(original)  # type: ignore[attr-defined]
    called.__name__, called.__doc__ = name, original.__doc__
    setattr(cls, name, called)


def contents_of(folder: Path) -> dict[str, str]:
    """The checksum of each file in a folder, by its path in it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")
