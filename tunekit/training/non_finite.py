"""Non-finite losses and gradients, detected by all processes before a step changes anything.

One such step makes all weights NaN. So every step is checked, logged or not: each process checks the losses of its
micro-batches and the gradient norm, and they exchange the results over the CPU network, because a loss may be bad in
one process alone. All then decide alike: to stop the run, to skip the step, or to roll back.

A skipped step changes neither weights nor optimizer states; the schedule counts it. It is recorded, and skipped again
whenever it comes again, so that a resumed run equals one that was not interrupted.

With fp16 gradients overflow now and then, and the scaler skips the step and lowers the scale: that is no fault, as long
as there is a scale to lower.

On an accelerator this waits once a step until the backward pass is done, for losses and norm together; with DeepSpeed,
which has the norm on the processor by then, for the losses alone.

Rows of a process in a step, by name, for reports of failures.

The rows of a micro-batch follow from the seed, the epoch, the step and the process alone (see
`tunekit.methods.run_trainer`), and are worked out on demand. Prompts are found by their text. Of a stream only the
tokens are known.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from datasets import Dataset
from torch import Tensor
from transformers import Trainer

from tunekit.data.media.in_rows import as_parts
from tunekit.data.media.kinds import KINDS
from tunekit.data.prepare import read_dataset
from tunekit.data.sources.rows import Places
from tunekit.data.tokenization.alignment import read_rows
from tunekit.errors import NonFiniteError, RollbackError
from tunekit.methods.run_trainer import Order, RunTrainer, num_missing
from tunekit.planner.plan import Plan
from tunekit.process.watchdog import any_of, of_all, same_everywhere
from tunekit.runs.prepared_data import FILES, PLACES
from tunekit.runs.record import Record
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place, read_list, write_whole

NUM_TOKENS = 64
"""Tokens of a sequence that are shown."""

NUM_CHARACTERS = 60
"""Characters of a row that are shown."""


class Rows:
    """The rows of each step of a run.

    Args:
        trainer: Its trainer.
        run: Its folder.
        plan: Its plan.
        place: Which process this is.
    """

    def __init__(self, trainer: Trainer, run: Run, plan: Plan, place: Place) -> None:
        self._trainer = trainer
        self._folder = run.path / "data"
        self._plan = plan
        self._rank = place.rank

    def name(self, step: int, batches: dict[int, Any]) -> list[str]:
        """The rows of micro-batches of this process, each as the place where it stands and how it begins.

        Args:
            step: The step, from 1.
            batches: What the trainer was given, by the number of the micro-batch in the step.
        """
        if any(isinstance(batch, list) for batch in batches.values()):
            prompts = [row["prompt"] for batch in batches.values() for row in batch]
            return list(self._found(prompts))
        if self._order is None:
            return [words for batch in batches.values() for words in self._read(batch)]
        rows = (row for number in batches for row in self.of_micro_batch(step, number))
        return [words for row in dict.fromkeys(rows) for words in self._named(row)]

    def of_micro_batch(self, step: int, number: int) -> list[int]:
        """Indices of the rows of a micro-batch among those that are trained on; rows that only fill it are left out.

        Args:
            step: The step, from 1.
            number: Which micro-batch of this process in it, from 0.
        """
        plan, layout, order = self._plan, self._plan.layout, self._order
        assert order is not None
        size = plan.micro_batch_size
        per_step = size * layout.num_batches * plan.gradient_accumulation_steps
        epoch, num_done = divmod(step - 1, -(-len(order) // per_step))
        first, many = num_done * per_step, per_step
        # Processes that divide sequences take the rows of one another, so that all of a step are meant.
        if layout.sp_size == 1:
            beside = self._rank // layout.devices_per_sequence
            first, many = first + (number * layout.num_batches + beside) * size, size
        # KTO's rows have the first epoch's order in each.
        rows = list(order.of_epoch(0 if plan.recipe.method.couples_rows else epoch))[first : first + many]
        return [row for row in rows if row < order.num_rows]

    @cached_property
    def _order(self) -> Order | None:
        """The order of the rows; None where it is not ours."""
        recipe = self._plan.recipe
        callbacks = self._trainer.callback_handler.callbacks
        order_callback = next((callback for callback in callbacks if isinstance(callback, Order)), None)
        if order_callback is None and recipe.method.couples_rows:
            # Its rows were put in their order before training (see `tunekit.methods.kto`).
            num_rows = len(self._rows)
            missing = num_missing(num_rows, recipe.train.global_batch_size)
            return Order(num_rows, missing, repeats=True, shuffle=recipe.data.shuffle, seed=recipe.train.seed)
        return order_callback

    @cached_property
    def _rows(self) -> Dataset:
        read = read_dataset if self._plan.recipe.method.spec.trains_on == "tokens" else read_rows
        return read(self._folder / FILES["train"])

    @cached_property
    def _places(self) -> Places:
        return Places.read(self._folder / PLACES)

    def _named(self, row: int) -> Iterator[str]:
        """A row by its name, or those that were packed into it."""
        fields = self._rows[row]
        if "prompt" in fields:
            yield _words(self._places[row], _text(fields["prompt"]))
            return
        first, start = row, 0
        if "seq_lengths" in fields:
            first = self._num_packed_before(row)
        for number, length in enumerate(fields.get("seq_lengths", [len(fields["input_ids"])])):
            yield _words(self._places[first + number], self._decoded(fields["input_ids"][start : start + length]))
            start += length

    def _num_packed_before(self, pack: int) -> int:
        """Sequences in the packs before one."""
        sizes = pc.list_value_length(self._rows.data.column("seq_lengths").slice(0, pack))
        return pc.sum(sizes).as_py() or 0

    def _found(self, prompts: list[Any]) -> Iterator[str]:
        """The rows that have one of some prompts."""
        keys = {_key(prompt) for prompt in prompts}
        for number, row in enumerate(self._rows):
            if _key(row["prompt"]) in keys:
                yield _words(self._places[number], _text(row["prompt"]))

    def _read(self, batch: Any) -> Iterator[str]:
        """Yield descriptions of a micro-batch whose rows are not known."""
        for row, ids in enumerate(batch["input_ids"]):
            starts = [0]
            if "position_ids" in batch:
                starts = (batch["position_ids"][row] == 0).nonzero().flatten().tolist()
            for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
                words = self._decoded(ids[start:end].tolist())
                if words:  # an empty one fills a step
                    yield f"a row starting with {words!r}"

    def _decoded(self, ids: Iterable[int]) -> str:
        tokenizer = self._trainer.processing_class
        return _cut(tokenizer.decode(list(ids)[:NUM_TOKENS], skip_special_tokens=True))


def _words(place: str, text: str) -> str:
    return f"{place} ({text!r})"


def _key(prompt: Any) -> str:
    """Return a prompt as JSON, with contents as lists of parts: with pictures the trainer has them so."""
    if isinstance(prompt, str):
        return json.dumps(prompt)
    return json.dumps([m if isinstance(m["content"], list) else as_parts([m])[0] for m in prompt])


def _text(prompt: Any) -> str:
    """Return the last message of a prompt."""
    words = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
    for name, kind in KINDS.items():
        words = words.replace(kind.mark, f"[{name}] ")
    return _cut(words)


def _cut(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= NUM_CHARACTERS else words[: NUM_CHARACTERS - 1] + "…"


LEFT_OUT = "left_out.json"
"""File of a run folder with the skipped steps: of each its number, its problem, and its rows."""

NUM_NAMED = 8
"""Rows that are named in a message; the file has all of them."""


class Guard:
    """Detector of non-finite steps of a trainer whose model is wrapped.

    Args:
        trainer: The trainer.
        plan: The plan, with the policy for such steps.
        record: Record of the run.
    """

    def __init__(self, trainer: RunTrainer, plan: Plan, record: Record) -> None:
        self.trainer = trainer
        self.train = plan.recipe.train
        usual = plan.recipe.method.default_learning_rate(plan.recipe.adapter)
        self._changes = [f"train.learning_rate={min(plan.recipe.learning_rate / 10, usual):g}"]
        self.record = record
        self.rows = Rows(trainer, record.run, plan, record.place)
        self.leaves_out = False
        """True if the current step changes nothing."""
        self._left_out = same_everywhere(left_out(record.run.path), record.place)
        self._scales = plan.autocast and plan.dtype == "float16"
        self._measures = trainer.metrics
        self._batches: list[Any] = []
        self._losses: list[Tensor] = []
        self._loss_before: Tensor | None = None
        self._watch()

    def _watch(self) -> None:
        """Stand behind what the trainer does in a step."""
        trainer = self.trainer

        def training_step(compute: Callable[..., Any], model: Any, inputs: Any, *given: Any) -> Tensor:
            if not self._batches:
                self._loss_before = trainer.summed_loss.clone()
                self.leaves_out = False
            self._batches.append(inputs)
            loss: Tensor = compute(model, inputs, *given)
            return loss

        def noted_backward(backward: Callable[..., Any], loss: Tensor, **given: Any) -> None:
            self._losses.append(loss.detach())
            backward(loss, **given)

        def get_grad_norm(take_norm: Callable[..., Any], *given: Any, **named: Any) -> Any:
            norm = take_norm(*given, **named)
            if not trainer.is_deepspeed_enabled:
                self._look(norm)
                if self.leaves_out:
                    # No optimizer changes anything where there are no gradients, nor its states.
                    trainer.optimizer.zero_grad()
            return self._settled(norm)

        trainer.wrap("training_step", training_step)
        trainer.wrap("backward", noted_backward)
        trainer.wrap("grad_norm", get_grad_norm)
        if trainer.is_deepspeed_enabled:
            self._watch_deepspeed(trainer.model_wrapped.optimizer)

    def _watch_deepspeed(self, optimizer: Any) -> None:
        """Stand where DeepSpeed, which takes the step within the backward pass, knows the norm and has changed nothing.

        Both of its optimizers then adjust the scale of fp16, and leave a step out that overflows (deepspeed 0.19,
        `DeepSpeedZeroOptimizer.step` and `DeepSpeedZeroOptimizer_Stage3.step`).
        """
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        assert isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3), type(optimizer)
        adjust = optimizer._update_scale

        def look_and_adjust(overflows: bool = False) -> None:
            self._look(math.inf if overflows else 0.0)
            # Where gradients are finite and a loss is not, the scale is good.
            adjust(overflows)
            optimizer.overflow = overflows or self.leaves_out

        optimizer._update_scale = look_and_adjust

    def _look(self, norm: Tensor | float) -> None:
        """Exchange losses and norm with the other processes, and decide alike. Called by all together."""
        place, step = self.record.place, self.trainer.state.global_step + 1
        losses, norm = self._numbers(norm)
        bad = {number: loss for number, loss in enumerate(losses) if not math.isfinite(loss)}
        bad_norm = not math.isfinite(norm) and not self._is_scaled()
        is_loss, is_norm = any_of((bool(bad), bad_norm), place)
        if step in self._left_out:
            self.leaves_out = True
        elif is_loss or is_norm:
            # Where gradients alone are not finite, any row may be why.
            numbers = bad if is_loss else range(len(self._batches))
            mine = self.rows.name(step, {number: self._batches[number] for number in numbers})
            gathered = of_all((bad, mine), place)
            rows = list(dict.fromkeys(row for _, own in gathered for row in own))
            self._decide(step, f"{_problem(step, [losses for losses, _ in gathered])}, for {_listed(rows)}", rows)

    def _numbers(self, norm: Tensor | float) -> tuple[list[float], float]:
        """The losses of the micro-batches and the norm, brought here at once."""
        loss_tensors = [loss.float().reshape(1) for loss in self._losses]
        if not isinstance(norm, torch.Tensor):
            return torch.cat(loss_tensors).tolist(), norm
        if isinstance(norm, torch.distributed.tensor.DTensor):
            norm = norm.full_tensor()
        *losses, here = torch.cat([*loss_tensors, norm.float().reshape(1).to(loss_tensors[0].device)]).tolist()
        return losses, here

    def _is_scaled(self) -> bool:
        """Return whether gradients may overflow because of loss scaling, and will be scaled less."""
        if not self._scales:
            return False
        if self.trainer.is_deepspeed_enabled:
            return True  # It raises by itself where there is nothing to lower.
        return bool(self.trainer.accelerator.scaler.get_scale() > 1)

    def _decide(self, step: int, problem: str, rows: list[str]) -> None:
        """Apply the recipe's policy, in all processes alike."""
        policy, most = self.train.non_finite, self.train.max_non_finite
        end_of_list = "\n" if "\n" in problem else None
        if policy == "stop":
            hint = "lower train.learning_rate, inspect these rows, or skip such steps: train.non_finite=skip"
            raise NonFiniteError(problem, hint=hint, changes=self._changes)
        if len(self._left_out) == most:
            what = f"{problem}{end_of_list or '; '}{most} such steps were skipped before"
            hint = "lower train.learning_rate, inspect these rows, or raise train.max_non_finite"
            raise NonFiniteError(what, hint=hint, changes=self._changes)
        self._left_out.add(step)
        if self.record.place.is_main:
            file = self.record.run.path / LEFT_OUT
            steps = [*_read(file), {"step": step, "problem": problem, "rows": rows}]
            write_whole(file, json.dumps(steps, ensure_ascii=False, indent=2))
        if policy == "rollback":
            raise RollbackError(problem, hint="`tunekit resume` continues without this step")
        self.leaves_out = True
        self.record.write(
            "warning",
            message=f"{problem}{end_of_list or ': '}step skipped ({len(self._left_out)} of {most} allowed)",
            left_out=step,
            rows=rows,
        )

    def _settled(self, norm: Any) -> Any:
        """The norm to be logged, once the step is decided and its losses are counted."""
        trainer = self.trainer
        self._batches, self._losses = [], []
        if not self.leaves_out:
            return norm
        # What is logged is a mean over the steps that were taken.
        assert self._loss_before is not None
        trainer.summed_loss.copy_(self._loss_before)
        trainer.logged_step += 1
        measures = self._measures["train"]
        for name, values in list(measures.items()):
            measures[name] = [value for value in values if math.isfinite(value)]
            if not measures[name]:
                del measures[name]
        if trainer.is_deepspeed_enabled:
            # The schedule counts the step.
            trainer.model_wrapped.optimizer.overflow = False
        return None


def left_out(run_folder: Path) -> set[int]:
    """Return the skipped steps of a run."""
    return {record["step"] for record in _read(run_folder / LEFT_OUT)}


def _read(file: Path) -> list[dict[str, Any]]:
    return read_list(file) if file.exists() else []


def _problem(step: int, losses: Sequence[dict[int, float]]) -> str:
    """Describe the fault of a step, by the losses of micro-batches that each process found to be bad."""
    bad = {rank: next(iter(own.values())) for rank, own in enumerate(losses) if own}
    if not bad:
        return f"step {step}: the gradient norm is not finite, but the loss is"
    descriptions = (f"{loss}{f' on rank {rank}' * (len(losses) > 1)}" for rank, loss in bad.items())
    return f"step {step}: the loss is {' and '.join(descriptions)}"


def _listed(rows: list[str]) -> str:
    """Return the rows as text: several in a line each, below their number."""
    if len(rows) < 2:
        return "".join(rows)
    more = [f"and {len(rows) - NUM_NAMED} more"] if len(rows) > NUM_NAMED else []
    return "\n  ".join([f"{len(rows)} rows:", *rows[:NUM_NAMED], *more])
