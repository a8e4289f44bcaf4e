"""The trainer of a recipe for those who run the loop themselves."""

import os
from collections.abc import Callable
from io import StringIO
from typing import TYPE_CHECKING

from tunekit.api.verbs import Source, make_run
from tunekit.api.verbs import plan as make_plan
from tunekit.data.sources.in_memory import RowData
from tunekit.errors import RunError
from tunekit.launching.local import begin
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.process.signals import Wishes
from tunekit.process.watchdog import Heart
from tunekit.recipe.functions import importable
from tunekit.recipe.load import AnyOverrides
from tunekit.runs.events import Event
from tunekit.runs.fingerprints import read_recipe
from tunekit.runs.record import Record, give_room
from tunekit.runs.run import INPUTS, Run
from tunekit.runs.small_files import Place, place_of
from tunekit.training.measured_memory import set_allocator

if TYPE_CHECKING:
    from tunekit.methods.run_trainer import RunTrainer

EXIT_REASON = "its trainer was run by its caller, who saves the result"


def trainer(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    train_dataset: RowData | None = None,
    eval_dataset: RowData | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> "RunTrainer":
    """Build the TRL trainer of a recipe in this process, for those who run the loop themselves.

    It is the trainer of a worker: planned, with the model, adapter, kernels and rows of the plan. Its `train()` proves
    what a worker proves before the first step, and writes events and checkpoints to the folder of a run.

    There is no supervisor: no restart after a fault, no watchdog, no stop from another process, no trackers, no log
    file, and no result at the end. `trainer.save_model(folder)` saves the model; or `tunekit.resume` of the run, whose
    folder is above `trainer.args.output_dir`, goes on from the last checkpoint and saves and checks the result.

    Example:
        >>> rows = [{"prompt": f"What is {n} plus 1?", "completion": f"{n + 1}"} for n in range(32)]
        >>> trainer = tunekit.trainer({"model": "pico", "train": {"max_steps": 2}}, train_dataset=rows)
        >>> trainer.train().global_step
        2

    Args:
        source: The recipe.
        overrides: Changes to it, as for `train`.
        train_dataset: Rows to train on instead of `data.train`, as for `train`.
        eval_dataset: The same instead of `data.eval`.
        on_event: Called with every event of the run as it happens; `tunekit.Progress()` shows them.

    Raises:
        TunekitError: The recipe has a fault, or its plan needs more than this process.
    """
    recipe, notes = read_recipe(source, overrides, train_dataset=train_dataset, eval_dataset=eval_dataset)
    if recipe.output.report_to:
        problem = "output.report_to: unsupported for a trainer in this process"
        raise RunError(problem, hint="unset it; trainer.add_callback takes callbacks of transformers")
    if place_of().num_processes > 1:
        raise RunError("a trainer in this process is unsupported under a launcher", hint="use tunekit.train")
    layout = make_plan(recipe).layout
    if layout.num_processes > 1 or layout.strategy.startswith("zero"):
        problem = f"the plan has {layout.name}, which needs separate processes"
        raise RunError(problem, hint="set parallel.num_processes=1, or use tunekit.train")
    run = make_run(recipe, notes=notes, on_event=on_event)
    begin(run)
    send_nothing_at_all()
    os.environ.update(run.plan.environment)
    set_allocator(run.plan.environment)
    return _built(run, on_event)


def _built(run: Run, on_event: Callable[[Event], None] | None) -> "RunTrainer":
    """Build the trainer of a run, whose processes end with its training."""
    from transformers import TrainerCallback

    from tunekit.training.callbacks import Watch
    from tunekit.training.train import make_ready

    class End(TrainerCallback):  # type: ignore[misc]
        """Records that the training is over, and that no result was saved."""

        def on_train_end(self, *_: object, **__: object) -> None:
            record.update_status(phase="interrupted", exit_reason=EXIT_REASON)
            record.write("phase", phase="interrupted")
            give_room(run)

    record = Record(run, Place(), on_event)
    watch = Watch(record, run.plan, Heart(run, Place()))
    # Neither is entered: signals and heartbeats are the caller's.
    wishes = Wishes(run, run.recipe.parallel.grace_seconds)
    words = StringIO()
    try:
        with library_words_to(words), importable(run.path.resolve() / INPUTS):
            built: RunTrainer = make_ready(watch, wishes).trainer
    except BaseException as error:
        record.end("failed", str(error))
        raise
    built.add_callback(End())
    return built
