"""Early stopping: count evaluations without improvement, and end the training once there are as many as planned.

The count is a part of each checkpoint, so that a resumed run stops where an uninterrupted one does. Every process
counts by the figures of the main one. A training that stops ends as it does after its last step: with a checkpoint of
that step, whose state is the result.
"""

from collections.abc import Callable
from typing import Any

from transformers import TrainerControl

from tunekit.estimates.memory.memory import Saving
from tunekit.methods.run_trainer import RunTrainer
from tunekit.recipe.sections.section import TrainSection
from tunekit.runs.checkpoints.complete import Best, Patience
from tunekit.runs.record import Record


def is_better(value: float, best: Best | None, *, greater: bool, by: float = 0.0) -> bool:
    """Return whether an evaluation is better than the best before; one that is not a number is not.

    Args:
        value: The evaluation.
        best: The best before; None for the first one.
        greater: Whether a greater one is better.
        by: Difference that it has to exceed.
    """
    if value != value:
        return False
    return best is None or (value - best.value if greater else best.value - value) > by


class EarlyStopping:
    """Counts the evaluations of a trainer that are no improvement, and stops it.

    Args:
        record: Record of the run.
        train: The optimization, with the patience.
        saving: The plan of the checkpoints, with the metric.
        patience: The count before, on resume.
    """

    def __init__(self, record: Record, train: TrainSection, saving: Saving, patience: Patience | None) -> None:
        self.record = record
        self.limit, self.threshold = train.early_stopping_patience, train.early_stopping_threshold
        self.saving = saving
        self.patience = None
        if self.limit is not None:
            self.patience = patience or Patience(counter=0, since=0, step=0)

    def attach(self, trainer: RunTrainer) -> None:
        """Keep a trainer from training further where the checkpoint that it resumes from is the last one."""
        self.trainer = trainer
        trainer.wrap("batches_of_step", self._take_batches)

    def _take_batches(self, take: Callable[..., Any], *args: Any) -> Any:
        if self.is_exhausted:
            self.trainer.control.should_training_stop = True
            return [], None
        return take(*args)

    def count(self, value: float, best: Best | None, control: TrainerControl) -> None:
        """Count an evaluation of the current step, and stop the training if it was one too many.

        Args:
            value: The evaluation, the same in every process.
            best: The best before it.
            control: What the trainer does next.
        """
        if self.patience is None:
            return
        step = self.trainer.state.global_step
        if is_better(value, best, greater=self.saving.greater_is_better, by=self.threshold):
            self.patience = Patience(counter=0, since=step, step=step)
        else:
            self.patience = Patience(counter=self.patience.counter + 1, since=self.patience.since, step=step)
        if self.is_exhausted:
            control.should_training_stop = control.should_save = True
            self.record.write("early_stop", step=step, message=self.words)

    @property
    def is_exhausted(self) -> bool:
        """True if the training ends here, before its last step."""
        state = self.trainer.state
        if self.patience is None or self.limit is None:
            return False
        return self.patience.counter >= self.limit and state.global_step < state.max_steps

    @property
    def words(self) -> str | None:
        """Reason of the end in words; None where the training went on to its last step."""
        if self.patience is None or not self.is_exhausted:
            return None
        least = f" by more than {self.threshold:g}" if self.threshold else ""
        what = f"{self.saving.metric_for_best_model} has not improved{least} since step {self.patience.since}"
        return f"stopped early at step {self.patience.step}: {what}"
