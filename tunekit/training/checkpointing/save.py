"""Checkpoints of a running training: written by all of its processes, and visible only once they are complete.

The Trainer's own methods write them, as it loads them, into a hidden folder. A failed write in one process raises
nothing there: the error is kept until all processes exchange theirs, so that none waits for another that has failed.
Then every file is synced to disk and read back for its checksum, each process reading its share; the main one writes
the manifest and renames the folder.

If the plan says so (FSDP2 and DeepSpeed, whose processes write as many files), training waits only until the states are
copied to host memory. The rest runs in a thread of each process, with collectives in a process group of its own. All
learn of its end or failure at the end of the same later step, before the next checkpoint, or at the end of training.
"""

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tunekit.errors import DiskError, RunError
from tunekit.methods.run_trainer import RunTrainer
from tunekit.planner.plan import Plan
from tunekit.process.watchdog import Heart, any_of, exchange_problem, of_all, same_everywhere
from tunekit.runs.checkpoints import complete
from tunekit.runs.fingerprints import versions
from tunekit.runs.record import Record, free_bytes, not_saved, tokenizers_errors, words_of
from tunekit.training.checkpointing.restore import Start
from tunekit.training.early_stopping import EarlyStopping, is_better
from tunekit.training.engines import deepspeed, fsdp2

T = TypeVar("T")

FAILURES = (OSError, RuntimeError, SafetensorError, CheckpointException)
"""Errors of a failed write, by Python, torch (a plain RuntimeError), safetensors and DCP."""

READERS = 4
"""Files that a process reads back at once. One thread computes about 1 to 2 GB of SHA-256 in a second."""


FULL_BYTES = 2**20
"""With less than this free, a disk is full to those who write tensors."""


SETTLE_SECONDS = 60
"""Seconds that a process which failed waits for the checkpoint that is being written."""


@dataclass
class _Save:
    """A checkpoint in the making.

    Attributes:
        step: Its step.
        best: The best evaluation so far.
        patience: The progress of early stopping.
        began: When, by the clock of this process.
        writes: What is still to be written, from what was copied.
        wait_seconds: How long the training waited for it.
        seconds: How long it took.
        problem: What went wrong, in any process.
        error: What was raised because another process does not answer.
        warnings: What went wrong besides, in the main process.
        total_bytes: What was written.
        done: Set when it is over in this process.
    """

    step: int
    best: complete.Best | None
    patience: complete.Patience | None
    began: float
    writes: list[Callable[[], None]] = field(default_factory=list)
    wait_seconds: float = 0.0
    seconds: float = 0.0
    problem: str | None = None
    error: RuntimeError | None = None
    warnings: list[str] = field(default_factory=list)
    total_bytes: int | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Saver(TrainerCallback):  # type: ignore[misc]
    """Writes the checkpoints of a trainer, keeps the newest and the best, and records the time of each.

    Args:
        record: Record of the run.
        plan: The plan of the run.
        heart: Heartbeats of the process.
        start: Start of the training, with the best evaluation before.
    """

    def __init__(self, record: Record, plan: Plan, heart: Heart, start: Start) -> None:
        self.record, self.run = record, record.run
        self.plan = plan
        self.heart = heart
        self.best = start.best(plan)
        self.stopping = EarlyStopping(
            record, plan.recipe.train, plan.saving, None if self.best is None else start.newest.patience
        )
        self.seconds: list[float] = []
        """Seconds that each checkpoint took that is whole, since this process began."""
        self._wait_seconds = 0.0
        """Seconds that the training waited for them."""
        self._total_bytes = 0
        self._bytes = self.plan.saving.checkpoint_bytes
        """Bytes of one: first as planned, then of the last one."""
        self._evaluation: dict[str, float] = {}
        self._saving: _Save | None = None

    def open_group(self) -> None:
        """Make the process group of the checkpoints. Called by all processes together."""
        self._group: distributed.ProcessGroup | None = None
        if distributed.is_initialized():
            # Of its own, since exchanges of a thread would come between those of the training.
            self._group = distributed.new_group(timeout=timedelta(seconds=self.plan.timeout_seconds), backend="gloo")

    def attach(self, trainer: RunTrainer) -> None:
        """Save what this trainer saves. Called by all processes together, before its model is wrapped."""
        self.trainer = trainer
        self.open_group()
        self._target: Path | None = None
        self.stopping.attach(trainer)
        trainer.wrap("save_checkpoint", self._save)
        trainer.wrap("save_weights", self._save_main_files)
        trainer.wrap("checkpoint_folder", self._folder_of)
        if self.plan.layout.strategy == "fsdp2":
            trainer.wrap("save_optimizer", self._save_divided)
        trainer.add_callback(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the checkpoint that is being written be done where the training failed, but not where it is interrupted.

        The other processes write their parts whatever this one has seen, unless they are gone, which ends it at once.
        """
        if self._saving is not None and kind is not None and issubclass(kind, Exception):
            self._saving.done.wait(SETTLE_SECONDS)

    def summary(self) -> dict[str, Any]:
        """Summarize the checkpoints and the best evaluation, for the result."""
        return {
            "num": len(self.seconds),
            "bytes": self._total_bytes,
            "wait_seconds": self._wait_seconds,
            "seconds": sum(self.seconds, 0.0),
            "best": None if self.best is None else self.best.model_dump(),
        }

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Have DeepSpeed's engine, which is there now, write what it writes through here."""
        if self.plan.layout.strategy.startswith("zero"):
            deepspeed.write_through(self.trainer, self._write_for_zero)

    def on_log(self, *_: object, logs: dict[str, float], **__: object) -> None:
        """Remember what an evaluation told: TRL adds its own measures to what is logged."""
        if "eval_loss" in logs:
            self._evaluation = dict(logs)

    def on_evaluate(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Have a checkpoint made where an evaluation is better than all before, if one can be made there.

        Raises:
            RunError: It does not tell the measure that the best is to be told by.
        """
        metric = self.plan.saving.metric_for_best_model
        if metric is None:
            return
        if metric not in self._evaluation:
            names = ", ".join(sorted(name for name in self._evaluation if name.startswith("eval_")))
            raise RunError(f"train.metric_for_best_model: evaluations report no {metric}", hint=f"available: {names}")
        schedule = self.plan.schedule
        assert schedule is not None
        if not state.global_step or state.global_step % schedule.save_together:
            return
        value = same_everywhere(float(self._evaluation[metric]), self.record.place)
        self.stopping.count(value, self.best, control)
        if is_better(value, self.best, greater=self.plan.saving.greater_is_better):
            self.best = complete.Best(metric=metric, value=value, step=state.global_step)
            control.should_save = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Hear whether the checkpoint that is being written is done; evaluate before the last one."""
        self.poll()
        if state.global_step >= state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True

    def poll(self) -> None:
        """Report the checkpoint that is being written once it is done in all processes, which call this together."""
        if self._saving is not None and not any_of([not self._saving.done.is_set()], self.record.place)[0]:
            self._finish()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Wait for the last checkpoint."""
        self._finish()

    def _folder_of(self, find: Callable[..., Any], trial: Any) -> Any:
        """Return the folder in which the trainer lays the folder of its checkpoint: the draft, once there is one."""
        return find(trial) if self._target is None else str(self._target)

    def _save(self, save_pieces: Callable[..., Any], model: Any, trial: Any) -> None:
        """Make a checkpoint of the step that was taken, around the trainer's own."""
        step = int(self.trainer.state.global_step)
        self._target = complete.draft_of(self.run.path, step)
        self.save(step, lambda: save_pieces(model, trial))

    def save(self, step: int, write: Callable[[], None]) -> None:
        """Make a checkpoint. Called by all processes together.

        Args:
            step: Its step.
            write: Writes the files of this process into the folder of the checkpoint in `complete.draft_of`.

        Raises:
            DiskError: It cannot be written.
        """
        self.heart.mark("saving")
        self._finish()
        saving = self._saving = _Save(step, self.best, self.stopping.patience, time.perf_counter())
        if self.record.place.is_main:
            self._keep(saving, lambda: self._begin(saving))
        self._agree(saving)
        self._keep(saving, write)
        if self.record.place.is_main:
            self._keep(saving, lambda: self._add_own(saving))
        self._agree(saving)
        if self.plan.saving.in_background:
            # It ends with the process, whatever it waits for.
            threading.Thread(target=self._complete, args=(saving,), name="saving", daemon=True).start()
            saving.wait_seconds = time.perf_counter() - saving.began
        else:
            self._complete(saving)
            self._finish()

    def _begin(self, saving: _Save) -> None:
        complete.clear_drafts(self.run.path)
        target = self._draft_of(saving)
        if self._bytes is not None and free_bytes(target) < self._bytes:
            saving.problem = "too little free disk space"
        else:
            # Not the run's folder again, where somebody has deleted it.
            (self.run.path / complete.CHECKPOINTS).mkdir(exist_ok=True)
            target.mkdir(parents=True)

    def _draft_of(self, saving: _Save) -> Path:
        """Return the folder of a checkpoint that is not visible yet."""
        return complete.draft_of(self.run.path, saving.step) / complete.checkpoint_of(self.run.path, saving.step).name

    def _add_own(self, saving: _Save) -> None:
        target = self._draft_of(saving)
        # A pickle, which nobody reads.
        (target / "training_args.bin").unlink(missing_ok=True)
        for name in complete.COPIES:
            if (self.run.path / name).is_file():
                shutil.copyfile(self.run.path / name, target / name)
        if self.plan.layout.strategy.startswith("zero"):
            deepspeed.write_latest(self.trainer, target)

    def _save_main_files(
        self, save_weights: Callable[..., Any], output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """Write the weights and the tokenizer: what goes wrong is told later.

        Weights that are divided are written in parts, with the optimizer.
        """
        if self._saving is None:
            save_weights(output_dir, state_dict)
        elif self.plan.layout.is_divided_at_load:
            return
        else:
            self._keep(self._saving, lambda: save_weights(output_dir, state_dict))

    def _save_divided(self, save_optimizer: Callable[..., Any], output_dir: str) -> None:
        """Write what FSDP2 divides, and the scheduler, in place of the trainer's own way."""
        assert self._saving is not None
        for name, states in self._copied(fsdp2.states(self.trainer)).items():
            self._saving.writes.append(partial(fsdp2.write_states, states, Path(output_dir) / name, self._group))
        if self.trainer.args.should_save:
            torch.save(fsdp2.schedule(self.trainer), Path(output_dir) / "scheduler.pt")

    def _write_for_zero(self, write: Callable[[Any, str], None], state: Any, path: str) -> None:
        """Write a file of DeepSpeed's, as its processes do between their exchanges: what goes wrong is told later."""
        assert self._saving is not None
        if self.plan.saving.in_background:
            self._saving.writes.append(partial(write, self._copied(state), path))
        else:
            self._keep(self._saving, partial(write, state, path))

    def _copied(self, states: T) -> T:
        """States as they are now, whatever becomes of them in the next steps, if they are written during these."""
        if not self.plan.saving.in_background:
            return states
        stager = DefaultStager(StagingOptions(False, False, False, False))
        copied = cast("dict[str, T]", stager.stage({"states": states}))
        stager.close()
        return copied["states"]

    def _complete(self, saving: _Save) -> None:
        """Write what is to be written, check it and make it visible: in all processes together, maybe in threads."""
        try:
            self._write(saving)
        except RuntimeError as error:
            # Another process does not answer: the training says so, in its own thread.
            saving.error = error
        saving.writes.clear()
        saving.seconds = time.perf_counter() - saving.began
        saving.done.set()

    def _write(self, saving: _Save) -> None:
        target = self._draft_of(saving)
        for write in saving.writes:
            self._keep(saving, write)
        if self._hear_problem(saving):
            return
        problems: list[str] = []
        self._keep(saving, lambda: problems.extend(complete.files_in(target)))
        self._keep(saving, lambda: self._bring_to_disk(target, problems))
        gathered = of_all(problems, self.record.place, self._group)
        files: dict[str, complete.Written] = {}
        self._keep(saving, lambda: files.update(_read_back(target, _share(gathered, self.record.place.rank))))
        if self._hear_problem(saving):
            return
        all_files = {
            name: file for part in of_all(files, self.record.place, self._group) for name, file in part.items()
        }
        saving.total_bytes = sum(file.size for file in all_files.values())
        if self.record.place.is_main:
            self._keep(saving, lambda: self._publish(saving, dict(sorted(all_files.items()))))
        self._hear_problem(saving)

    def _bring_to_disk(self, folder: Path, names: list[str]) -> None:
        """Bring files to the disk: on each node its processes share all that were written there."""
        place = self.record.place
        for name in names[place.local_rank :: place.num_local]:
            complete.to_disk(folder / name)

    def _publish(self, saving: _Save, files: dict[str, complete.Written]) -> None:
        manifest = complete.Manifest(
            format=complete.FORMAT,
            step=saving.step,
            num_processes=self.plan.layout.num_processes,
            strategy=self.plan.layout.saved_as,
            dtype=self.plan.dtype,
            recipe=files["recipe.yaml"].sha256,
            made_of=files["fingerprints.json"].sha256 if "fingerprints.json" in files else None,
            versions=versions(),
            best=saving.best,
            patience=saving.patience,
            files=files,
        )
        complete.publish(self.run.path, manifest)
        limit = self.plan.recipe.train.save_total_limit
        saving.warnings += complete.delete_superseded(self.run.path, limit, saving.best)

    def _finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and tell of it.

        Raises:
            DiskError: It could not be written; every process raises it.
        """
        saving = self._saving
        if saving is None:
            return
        began = time.perf_counter()
        saving.done.wait()
        waited = saving.wait_seconds + time.perf_counter() - began
        saving.wait_seconds = waited if self.plan.saving.in_background else saving.seconds
        if saving.error is not None:
            raise saving.error
        self._raise(saving)
        self._saving = None
        assert saving.total_bytes is not None
        self._bytes = saving.total_bytes
        self._total_bytes += saving.total_bytes
        self._wait_seconds += saving.wait_seconds
        self.seconds.append(saving.seconds)
        self.record.write(
            "checkpoint",
            step=saving.step,
            path=str(complete.checkpoint_of(self.run.path, saving.step)),
            bytes=saving.total_bytes,
            wait_seconds=saving.wait_seconds,
            seconds=saving.seconds,
            best=None if saving.best is None else saving.best.model_dump(),
        )
        self.record.update_status(save_seconds=saving.seconds)
        for message in saving.warnings:
            self.record.write("warning", message=message)

    def _keep(self, saving: _Save, work: Callable[[], None]) -> None:
        """Do what this process does alone, unless something went wrong before, and keep what goes wrong."""
        if saving.problem is not None:
            return
        try:
            with tokenizers_errors():
                work()
        except FAILURES as error:
            if isinstance(error, RuntimeError) and exchange_problem(error, self.record.place) is not None:
                raise
            saving.problem = self._words(error)

    def _words(self, error: BaseException) -> str:
        """Describe the error of a file. torch does not say that a disk is full."""
        if isinstance(error, CheckpointException):
            rank, (first, _) = next(iter(error.failures.items()))
            return f"rank {rank}: {self._words(first)}"
        try:
            is_full = not isinstance(error, OSError) and free_bytes(self.run.path) < FULL_BYTES
        except OSError as missing:
            return words_of(missing)
        return "No space left on device" if is_full else words_of(error)

    def _agree(self, saving: _Save) -> None:
        """Go on if nothing went wrong in any process.

        Raises:
            DiskError: Something did; every process raises it.
        """
        self._hear_problem(saving)
        self._raise(saving)

    def _hear_problem(self, saving: _Save) -> bool:
        """Return whether any process failed; then all know why."""
        gathered = of_all(saving.problem, self.record.place, self._group)
        saving.problem = next((problem for problem in gathered if problem is not None), None)
        if saving.problem is not None and self.record.place.is_main:
            # Nobody writes any more: what was written makes room for the words about it.
            shutil.rmtree(complete.draft_of(self.run.path, saving.step), ignore_errors=True)
        return saving.problem is not None

    def _raise(self, saving: _Save) -> None:
        if saving.problem is None:
            return
        self._saving, words = None, ("", "")
        if self.record.place.is_main:
            error = not_saved(self.run, f"the checkpoint of step {saving.step}", saving.problem, self._bytes)
            words = error.problem, error.hint or ""
        problem, hint = of_all(words, self.record.place, self._group)[0]
        raise DiskError(problem, hint=hint)


@contextlib.contextmanager
def result_saved(record: Record, draft: Path) -> Iterator[None]:
    """While the result is written to a folder beside. Called by all processes together.

    Raises:
        DiskError: It could not be; nothing of it is left.
    """
    run = record.run
    if record.place.is_main:
        shutil.rmtree(draft, ignore_errors=True)
    if distributed.is_initialized():
        # Nobody writes before that.
        distributed.barrier()
    try:
        with tokenizers_errors():
            yield
    except (OSError, SafetensorError) as error:
        if record.place.is_main:
            shutil.rmtree(draft, ignore_errors=True)
        raise not_saved(run, "the result", words_of(error), run.plan.saving.result_bytes) from error


def _share(seen: list[list[str]], rank: int) -> list[str]:
    """The files that a process reads back: one of those that see it does, and all have as many."""
    names = sorted({name for files in seen for name in files})
    readers = [[reader for reader, files in enumerate(seen) if name in files] for name in names]
    return [name for number, name in enumerate(names) if readers[number][number % len(readers[number])] == rank]


def _read_back(folder: Path, names: list[str]) -> dict[str, complete.Written]:
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
        return dict(zip(names, readers.map(lambda name: complete.as_written(folder / name), names), strict=True))
