"""Training of a run by NeMo Automodel, in one of its processes: rows in, events and checkpoints out.

Automodel's recipe builds the model and takes the steps. The callbacks of a run stand around each step as they do around
a Trainer's, and checkpoints are files of Automodel's in a folder of the run's. Automodel divides the loss by the
trained tokens of the whole step, as tunekit does.
"""

import importlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import Trainer, TrainerControl, TrainerState
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from tunekit.errors import NonFiniteError, RunError
from tunekit.models import load
from tunekit.planner.plan import Plan, Schedule
from tunekit.process.garbage import collected_seldom
from tunekit.process.signals import Wishes
from tunekit.runs.checkpoints import complete
from tunekit.runs.fingerprints import check_run_code
from tunekit.training.automodel_rows import shifted
from tunekit.training.callbacks import Boundary, EvaluationLeft, Watch, evaluation_is_due
from tunekit.training.check_head import NUM_ROWS
from tunekit.training.check_saved import check_losses
from tunekit.training.checkpointing.restore import Start, start_of
from tunekit.training.checkpointing.save import Saver, result_saved
from tunekit.training.engines import automodel, automodel_patches
from tunekit.training.train import publish


@dataclass
class Loop:
    """Progress of Automodel's loop, as callbacks of a Trainer read it."""

    state: TrainerState
    control: TrainerControl = field(default_factory=TrainerControl)

    @property
    def accelerator(self) -> "Loop":
        """Object that waits for the other processes, as Accelerate's does."""
        return self

    def wait_for_everyone(self) -> None:
        """Wait for the other processes."""
        torch.distributed.barrier()


class Hooks:
    """Methods around those of Automodel's recipe; `recipe_of` puts this class before the recipe's.

    All of them are called by all processes together.
    """

    watch: Watch
    start: Start
    saver: Saver
    boundary: Boundary
    loop: Loop
    schedule: Schedule
    rate_of: Callable[[int], float]
    """Learning rate of a step, the first of which has the number 0."""
    num_tokens: int
    """Tokens trained on so far."""
    losses: list[float]
    """Losses of the steps since the last log."""

    @property
    def _recipe(self) -> Any:
        """This object as Automodel's recipe, whose attributes have no types here."""
        return self

    def load_checkpoint(self, restore_from: str | None = None) -> None:
        """Take the weights, states and random numbers of the newest checkpoint, if there is one."""
        for part, optimizer in zip(self._recipe.model_parts, self._recipe.optimizer, strict=True):
            split_by_decay(part, optimizer)
        # The rows begin behind those of the checkpoint.
        self._recipe.untrack_state("dataloader", "val_dataloaders")
        if (newest := self.start.newest.path) is None:
            return
        if complete.manifest_of(newest).num_processes != self.watch.plan.layout.num_processes:
            self._recipe.untrack_state("rng")
        cast(Any, super()).load_checkpoint(str(newest))

    def save_checkpoint(self, *_: object, **__: object) -> None:
        """Save nothing where Automodel would: `log_train_metrics` does."""

    def _run_train_optim_step(self, batches: list[Any], *args: Any) -> Any:
        step, heart = self.loop.state.global_step, self.watch.heart
        heart.mark("data", step + 1)
        self.boundary.on_step_begin()
        self.watch.on_step_begin()
        heart.mark("forward")
        rate = self.rate_of(step)
        for optimizer in self._recipe.optimizer:
            for group in optimizer.param_groups:
                group["lr"] = rate
        figures = cast(Any, super())._run_train_optim_step(batches, *args)
        heart.mark("optimizer")
        return figures

    def _forward_backward_step(self, *args: Any, **kwargs: Any) -> None:
        self.watch.heart.move()
        cast(Any, super())._forward_backward_step(*args, **kwargs)

    def log_train_metrics(self, log_data: Any) -> None:
        """End a step: check its figures, log, evaluate, save, and stop where the run is to stop.

        Args:
            log_data: The step's figures, as Automodel has gathered them.

        Raises:
            NonFiniteError: The loss or the gradient norm is not finite.
        """
        state, control = self.loop.state, self.loop.control
        step = state.global_step
        loss, norm = float(log_data.metrics["loss"]), float(log_data.metrics["grad_norm"])
        self._check_finite(step + 1, loss, norm)
        self.losses.append(loss)
        self.num_tokens += self._recipe.dataloader.dataset.num_tokens(step - self.start.newest.step)
        state.global_step = step + 1
        state.epoch = state.global_step / (self.schedule.steps_per_epoch or 1)
        self.watch.on_step_end(None, state)
        self.boundary.on_step_end(None, state, control)
        self.saver.poll()
        if state.global_step % self.watch.plan.recipe.train.logging_steps == 0:
            logs = {"loss": sum(self.losses) / len(self.losses), "grad_norm": norm, "learning_rate": self.rate_of(step)}
            self._log({**logs, "num_tokens": float(self.num_tokens), "epoch": state.epoch})
            self.losses.clear()
        is_last, every = state.global_step >= self.schedule.num_steps, self.schedule.eval_steps
        if every is not None and (state.global_step % every == 0 or is_last) and not control.should_training_stop:
            # Where it is left, the run stops.
            with suppress(EvaluationLeft):
                self.evaluate()
        is_due = state.global_step % self.schedule.save_steps == 0 or is_last
        if control.should_save or (is_due and not self.boundary.has_stopped):
            control.should_save = False
            self._make_checkpoint()
        if control.should_training_stop:
            # Automodel's loop ends by it.
            self._recipe.step_scheduler.sigterm_flag = True
        self.watch.timing.mark()

    def _check_finite(self, step: int, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = "the gradient norm is not finite, but the loss is" if math.isfinite(loss) else f"the loss is {loss}"
        change = f"train.learning_rate={self.watch.plan.recipe.learning_rate / 10:g}"
        hint = "lower train.learning_rate, or inspect the rows of this step"
        raise NonFiniteError(f"step {step}: {what}", hint=hint, changes=[change])

    def _log(self, logs: dict[str, float]) -> None:
        self.watch.on_log(None, self.loop.state, None, logs)
        self.saver.on_log(logs=logs)

    def evaluate(self) -> None:
        """Evaluate the held-out rows.

        Raises:
            EvaluationLeft: The run is to stop.
        """
        state, control, heart = self.loop.state, self.loop.control, self.watch.heart
        before = heart.at
        heart.mark("evaluation")
        loss = self.loss_of(self._at_boundaries(self._recipe.val_dataloaders["default"]))
        heart.mark(before)
        self._log({"eval_loss": loss, "epoch": state.epoch or 0.0})
        self.saver.on_evaluate(None, state, control)
        self.watch.on_evaluate()

    def loss_of(self, batches: Iterable[Any]) -> float:
        """Return the mean loss over the trained tokens of batches, which are this process's part."""
        loss = float(self._recipe._run_validation_epoch(batches).metrics["val_loss"])
        for part in self._recipe.model_parts:
            part.train()
        return loss

    def _at_boundaries(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            self.boundary.on_prediction_step(None, self.loop.state, self.loop.control)

    def _make_checkpoint(self) -> None:
        state = self.loop.state
        with self.boundary.saving():
            self.saver.save(state.global_step, self._write_checkpoint)
        self.watch.on_save(None, state)
        self.boundary.on_save(None, state, self.loop.control)

    def _write_checkpoint(self) -> None:
        """Have Automodel write a checkpoint into the draft of the run's."""
        run, step = self.watch.record.run, self.loop.state.global_step
        draft = complete.draft_of(run.path, step)
        target = draft / complete.checkpoint_of(run.path, step).name
        config = self._recipe.checkpointer.config
        config.checkpoint_dir, config.save_consolidated = str(draft), _consolidation("false")
        cast(Any, super()).save_checkpoint(0, step, 0.0)
        if self.watch.record.place.is_main:
            target.rmdir()
            (draft / f"epoch_0_step_{step}").rename(target)
            # Links to the newest checkpoint.
            for extra in [path for path in draft.iterdir() if path != target]:
                extra.unlink()

    def write_model(self, draft: Path) -> None:
        """Write the trained model to a folder, as Transformers reads it."""
        parts, plan = self._recipe.model_parts, self.watch.plan
        self._recipe.checkpointer.config.save_consolidated = _consolidation("every")
        aside = draft.with_name(f"{draft.name}-parts")
        if self.watch.record.place.is_main:
            # Remains of an interrupted save.
            shutil.rmtree(aside, ignore_errors=True)
        torch.distributed.barrier()
        self._recipe.checkpointer.save_model(parts if len(parts) > 1 else parts[0], str(aside))
        if self.watch.record.place.is_main:
            (aside / "model" / "consolidated").rename(draft)
            shutil.rmtree(aside)
            if (whole := draft / "model-00001-of-00001.safetensors").exists():
                whole.rename(draft / SAFE_WEIGHTS_NAME)
                (draft / SAFE_WEIGHTS_INDEX_NAME).unlink()
            config = load.read_config(plan.base)
            config.dtype = plan.trained_dtype
            config.save_pretrained(draft)
        torch.distributed.barrier()

    def losses_of_rows(self, rows: Iterable[list[int]]) -> list[float]:
        """Return the mean loss of each row by the trained model, over all of its tokens."""
        collate = importlib.import_module("nemo_automodel.components.datasets.utils").default_collater
        size = self._recipe.cfg.get("step_scheduler.local_batch_size")
        return [self.loss_of([collate([shifted(ids, ids)] * size)]) for ids in rows]


def _consolidation(mode: str) -> Any:
    """Return Automodel's name of when parts of weights are put together: `false` or `every`."""
    return importlib.import_module("nemo_automodel.components.checkpoint.config").SaveConsolidatedMode(mode)


def split_by_decay(model: Any, optimizer: Any) -> None:
    """Divide the parameters of an optimizer as the Trainer does: norms and biases have no weight decay."""
    (group,) = optimizer.param_groups
    # It reads nothing of a trainer (transformers 5.24).
    decayed = set(Trainer.get_decay_parameter_names(cast(Any, None), model))
    numbers = {id(parameter) for name, parameter in model.named_parameters() if name in decayed}
    settings = {name: value for name, value in group.items() if name != "params"}
    with_decay = [parameter for parameter in group["params"] if id(parameter) in numbers]
    without = [parameter for parameter in group["params"] if id(parameter) not in numbers]
    optimizer.param_groups[:] = [
        {**settings, "params": with_decay},
        {**settings, "params": without, "weight_decay": 0.0},
    ]


def rates_of(plan: Plan, schedule: Schedule) -> Callable[[int], float]:
    """Return the learning rate by the number of a step, as transformers' schedule has it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(
        plan.recipe.train.lr_scheduler_type,
        optimizer,
        num_warmup_steps=schedule.warmup_steps,
        num_training_steps=schedule.num_steps,
    )
    factor = scheduler.lr_lambdas[0]
    return lambda step: plan.learning_rate * factor(step)


def recipe_of(watch: Watch, wishes: Wishes) -> Any:
    """Build Automodel's recipe for a run: model, optimizer, rows, and the states of a checkpoint.

    Args:
        watch: Watch of the run.
        wishes: Stop requests.

    Raises:
        RunError: The plan has no schedule, or Automodel runs something else.
    """
    record, plan = watch.record, watch.plan
    run, schedule = record.run, plan.schedule
    if schedule is None:
        raise RunError(f"{run.path}: the plan has no schedule", hint="plan again with tokenized data")
    with automodel_patches.importable():
        base = importlib.import_module("nemo_automodel.recipes.llm.train_ft").TrainFinetuneRecipeForNextTokenPrediction
        to_node = importlib.import_module("nemo_automodel.components.config.loader").ConfigNode
    config = load.read_config(plan.base)
    if plan.device.kind == "cpu":
        automodel_patches.run_on_cpu(config.architectures or [])
    start = start_of(run, record.place)
    start.tell(record)
    write = automodel.write_configuration if record.place.is_main else automodel.configuration
    sections = write(plan, run.path.resolve(), config.model_type, first_step=start.newest.step)
    recipe: Any = type("Recipe", (Hooks, base), {})(to_node(sections))
    recipe.watch, recipe.start, recipe.schedule = watch, start, schedule
    recipe.loop = Loop(TrainerState(global_step=start.newest.step, max_steps=schedule.num_steps))
    recipe.saver = Saver(record, plan, watch.heart, start)
    recipe.boundary = Boundary(plan, wishes, recipe.saver)
    recipe.losses, recipe.rate_of = [], rates_of(plan, schedule)
    recipe.saver.trainer = recipe.saver.stopping.trainer = watch.trainer = recipe.loop
    recipe.saver.open_group()
    recipe.setup()
    if recipe.pp is not None:
        # Else the last stage keeps the logits of all micro-batches.
        recipe.pp.info.schedule.step = partial(recipe.pp.info.schedule.step, return_outputs=False)
    for part in recipe.model_parts:
        if "update_moe_gate_bias" in dir(part):
            # Experts are chosen by the biases of the base model, as in Transformers.
            part.update_moe_gate_bias = lambda: None
    record.write("engine", **automodel.verify(recipe, plan))
    recipe.num_tokens = recipe.dataloader.dataset.num_tokens_before
    watch.go_on(recipe.num_tokens)
    return recipe


def load_train_save(watch: Watch, wishes: Wishes) -> bool:
    """Load, train and save, and return whether the run was stopped before its end.

    Raises:
        RunError: The plan has no schedule, or a check fails.
    """
    record, plan = watch.record, watch.plan
    run, place, began = record.run, record.place, time.time()
    watch.enter("loading")
    check_run_code(run)
    tokenizer = load.load_tokenizer(plan.recipe.model)
    with collected_seldom():
        recipe = recipe_of(watch, wishes)
    newest, schedule = recipe.start.newest, recipe.schedule
    probes = recipe.dataloader.dataset.rows[:NUM_ROWS]["input_ids"]
    if newest.path is None:
        check_losses(plan, record, probes, recipe.losses_of_rows(probes), None)
    record.enter("training")
    watch.timing.mark()
    is_due = newest.step > 0 and evaluation_is_due(run, schedule, newest, place)
    try:
        if recipe.val_dataloaders and (newest.step == 0 or is_due):
            recipe.evaluate()
    except EvaluationLeft:
        return True
    with recipe.saver:
        recipe.run_train_validation_loop()
    recipe.saver.on_train_end()
    if recipe.boundary.has_ended():
        return True
    watch.enter("saving")
    draft = run.path / ".saving-model"
    with result_saved(record, draft):
        recipe.write_model(draft)
        watch.on_result_saved()
        check_losses(plan, record, probes, recipe.losses_of_rows(probes), draft)
        if place.is_main:
            publish(watch, recipe.saver, tokenizer, draft, time.time() - began)
    record.update_status(phase="finished", exit_reason="trained to the end")
    record.write("phase", phase="finished")
    return False
