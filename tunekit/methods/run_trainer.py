"""The one trainer of ours: all that a run changes of TRL's trainers, by overrides with `super()`.

`run_trainer(GRPOTrainer)` is TRL's class with these overrides. By themselves they change nothing: the parts of a run
(the heartbeat, the clocks, the guard against non-finite steps, checkpoints, the end at a boundary) stand around a
method with `trainer.wrap`, and are handed the call that they stand around. Other modules know the private names of
transformers and TRL by the words of this class; `tunekit.training.upstream` checks them before a run starts.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

Wrapped = Literal[
    "backward",
    "batches_of_step",
    "begin_training",
    "calculate_rewards",
    "checkpoint_folder",
    "compute_loss_of_answers",
    "create_optimizer",
    "evaluate",
    "finish_step",
    "generate",
    "grad_norm",
    "load_optimizer",
    "load_random_state",
    "load_weights",
    "prediction_step",
    "save_checkpoint",
    "save_optimizer",
    "save_random_state",
    "save_weights",
    "train_sampler",
    "training_step",
]
"""Methods of the trainer that a part of the run may stand around."""


class RunTrainer(Base):  # type: ignore[misc]
    """Mixin over a trainer of TRL's: each method calls what stands around it, and that calls TRL's."""

    _around: Mapping[str, tuple[Callable[..., Any], ...]] = MappingProxyType({})

    def wrap(self, name: Wrapped, around: Callable[..., Any]) -> None:
        """Have a part of the run stand around a method; the last one is the outermost.

        Args:
            name: The method.
            around: Called as `around(call, *args, **kwargs)`, where `call` is the method with what stands around it so
                far.
        """
        assert name in get_args(Wrapped), name
        self._around = {**self._around, name: (*self._around.get(name, ()), around)}

    def _run(self, name: Wrapped, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for around in self._around.get(name, ()):
            call = partial(around, call)
        return call(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, whose backward pass is a part of a step too."""
        super().create_accelerator_and_postprocess()
        # Accelerate has no class of its own to choose here (transformers 5.23).
        self.accelerator.backward = partial(self._run, "backward", self.accelerator.backward)

    def create_optimizer(self, *args: Any) -> Any:
        """Create the optimizer: the place of parameter groups, and of optimizers that torch does not have."""
        return self._run("create_optimizer", super().create_optimizer, *args)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: TRL's would be written beside each checkpoint, before them all."""

    def get_batch_samples(self, *args: Any) -> Any:
        """Take the micro-batches of a step."""
        return self._run("batches_of_step", super().get_batch_samples, *args)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss and the gradients of a micro-batch."""
        return self._run("training_step", super().training_step, *args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a micro-batch."""
        return self._run("prediction_step", super().prediction_step, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate all rows."""
        return self._run("evaluate", super().evaluate, *args, **kwargs)

    def save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint of the step that was taken."""
        self._save_checkpoint(model, trial)

    def load_random_state(self, checkpoint: str) -> None:
        """Restore the random numbers of a checkpoint."""
        self._load_rng_state(checkpoint)

    def load_weights(self, checkpoint: str, model: Any) -> None:
        """Load the weights of a checkpoint."""
        self._load_from_checkpoint(checkpoint, model)

    def token_scores(self, *args: Any, **kwargs: Any) -> Any:
        """Return the log-probability of each token of answers, `(batch, seq)`, and more, as TRL's trainer has it."""
        return self._get_per_token_logps_and_entropies(*args, **kwargs)

    @property
    def metrics(self) -> Any:
        """Metrics measured since the last log, by mode and name."""
        return vars(self)["_stored_metrics" if "_stored_metrics" in vars(self) else "_metrics"]

    @metrics.setter
    def metrics(self, metrics: Any) -> None:
        setattr(self, "_stored_metrics" if "_stored_metrics" in vars(self) else "_metrics", metrics)

    @property
    def answer_logs(self) -> Any:
        """Prompts, answers and rewards of the last step, of a method that generates."""
        return self._logs

    @property
    def buffered_answers(self) -> Any:
        """Answers that further steps learn from, a micro-batch each."""
        return self._buffered_inputs

    @buffered_answers.setter
    def buffered_answers(self, answers: Any) -> None:
        self._buffered_inputs = answers

    @property
    def micro_step(self) -> int:
        """Micro-batches since the beginning, by which a method that generates knows when new answers are due."""
        return int(self._step)

    @micro_step.setter
    def micro_step(self, number: int) -> None:
        self._step = number

    @property
    def summed_loss(self) -> Any:
        """Sum of the losses since the last log, of this process, a scalar tensor."""
        return self._tr_loss

    @summed_loss.setter
    def summed_loss(self, loss: Any) -> None:
        self._tr_loss = loss

    @property
    def logged_step(self) -> int:
        """The step of the last log."""
        return int(self._globalstep_last_logged)

    @logged_step.setter
    def logged_step(self, step: int) -> None:
        self._globalstep_last_logged = step

    @property
    def num_trained_tokens(self) -> int:
        """Tokens that were trained on so far by all processes."""
        if "_total_train_tokens" in vars(self):
            return int(self._total_train_tokens)
        return int(self._num_tokens)

    @num_trained_tokens.setter
    def num_trained_tokens(self, number: int) -> None:
        if "_total_train_tokens" in vars(self):
            self._total_train_tokens = number
        else:
            self._num_tokens = number

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self._run("train_sampler", super()._get_train_sampler, train_dataset)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("begin_training", super()._init_training_state, *args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._run("finish_step", super()._maybe_log_save_evaluate, *args, **kwargs)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("grad_norm", super()._get_grad_norm, *args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("generate", super()._generate_single_turn, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("calculate_rewards", super()._calculate_rewards, *args, **kwargs)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("compute_loss_of_answers", super()._compute_loss, *args, **kwargs)

    def _get_output_dir(self, trial: Any) -> Any:
        return self._run("checkpoint_folder", super()._get_output_dir, trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._run("save_checkpoint", super()._save_checkpoint, model, trial)

    def _save(self, *args: Any, **kwargs: Any) -> None:
        self._run("save_weights", super()._save, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._run("save_optimizer", super()._save_optimizer_and_scheduler, output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        self._run("save_random_state", super()._save_rng_state, output_dir)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._run("load_weights", super()._load_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        self._run("load_optimizer", super()._load_optimizer_and_scheduler, checkpoint)

    def _load_rng_state(self, checkpoint: Any) -> None:
        self._run("load_random_state", super()._load_rng_state, checkpoint)


@cache
def run_trainer(trainer: type) -> Any:
    """Return a trainer class of TRL's with the overrides of a run.

    Args:
        trainer: TRL's class, or one of ours on top of it.
    """
    return type(trainer.__name__, (RunTrainer, trainer), {"__module__": trainer.__module__})
