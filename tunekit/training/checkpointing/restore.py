"""Restore of a trainer on resume, in every process, of state that the trainer does not restore itself.

The trainer takes from a checkpoint the steps to log, evaluate and save at, and the learning rate of the next step, even
if the recipe has others now. It only loads checkpoints of FSDP2 in another number of processes, and does not convert
between FSDP2 and unsharded ones. And it loads all of a checkpoint, or nothing.

A checkpoint of transformers has weights, optimizer, schedule and the random state of each process; a missing file of
these is skipped, at most with a line in the log. It lacks the answers that several steps learn from, token counts,
metrics since the last log, the epoch of a stream, and a reference that follows the model (transformers 5.23, trl 1.16).
Without these a resume is not exact. They are written here, by each process into its own file, and checked for before
anything is loaded.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel, Trainer, set_seed

from tunekit.errors import RunError
from tunekit.planner.plan import Plan
from tunekit.planner.resume import WHOLE
from tunekit.process.watchdog import same_everywhere
from tunekit.recipe.methods import generates, is_rewarded
from tunekit.runs.checkpoints.complete import Best, Newest, manifest_of, take_newest
from tunekit.runs.record import Record
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place, read_continuation
from tunekit.training.engines import expert_parallel

WEIGHTS_IN_PARTS, OPTIMIZER_IN_PARTS = "pytorch_model_fsdp_0", "optimizer_0"
"""Folders of a checkpoint of FSDP2, by Accelerate's names."""


@dataclass(frozen=True)
class Start:
    """Start of a run's training: at its beginning, at a checkpoint, or with the weights of one.

    Attributes:
        newest: The newest whole checkpoint.
        weights: The checkpoint of which only the weights are taken, where there is no newer one.
        changes: What is otherwise than before, a phrase each.
    """

    newest: Newest
    weights: Path | None
    changes: tuple[str, ...]

    @property
    def goes_on(self) -> bool:
        """True if the model was trained before."""
        return self.newest.path is not None or self.weights is not None

    def best(self, plan: Plan) -> Best | None:
        """The best evaluation before, by the measure that the plan has now."""
        best = self.newest.best
        return best if best is not None and best.metric == plan.saving.metric_for_best_model else None

    def tell(self, record: Record) -> None:
        """Write where it starts, unless at the beginning."""
        if self.goes_on:
            record.write(
                "resume",
                step=self.newest.step,
                path=str(self.newest.path or self.weights),
                skipped=self.newest.skipped,
                changes=self.changes,
                weights_only=self.newest.path is None,
            )

    def before_training(self, trainer: Trainer, plan: Plan, place: Place) -> None:
        """Restore state before anything is wrapped."""
        if self.newest.path is not None:
            _take_checkpoint_of_others(trainer, plan, self.newest, place)
        elif self.weights is not None and plan.layout.strategy != "fsdp2":
            _load_weights(trainer, plan, self.weights)

    def once_placed(self, trainer: Trainer, plan: Plan) -> None:
        """Restore state once the model is on its device, and the trainer has loaded its own part."""
        if self.newest.path is not None:
            _follow_plan(trainer)
        elif self.weights is not None and plan.layout.strategy == "fsdp2":
            _load_weights(trainer, plan, self.weights)


def start_of(run: Run, place: Place) -> Start:
    """Return the start of a run's training as the main process sees it; all call it together."""
    newest, leftover = same_everywhere(
        (take_newest(run.path) if place.is_main else Newest(), read_continuation(run.path)), place
    )
    begun = None if leftover.weights is None else run.path / leftover.weights
    weights = begun if newest.path is None else None
    # Of a run that began with weights, a checkpoint has all that was changed then.
    return Start(newest, weights, leftover.changes if weights is not None or begun is None else ())


def _take_checkpoint_of_others(trainer: Trainer, plan: Plan, newest: Newest, place: Place) -> None:
    """Have a trainer take a checkpoint that it would not take itself: of other processes, or by the hub's names."""
    assert newest.path is not None, "there is a checkpoint"
    saved = manifest_of(newest.path)
    if saved.num_processes != plan.layout.num_processes:
        # Random numbers of a process that no checkpoint has: others for each rank, the same ones each time.
        entropy = (plan.recipe.train.seed, newest.step, place.rank)
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        trainer.wrap("load_random_state", lambda load, folder: set_seed(seed))
    if saved.strategy == "fsdp2" and (plan.layout.strategy in WHOLE or plan.layout.is_divided_at_load):
        load_weights, load_states = _weights_of_parts, _states_of_parts
    elif saved.strategy in WHOLE and plan.layout.strategy == "fsdp2":
        load_weights, load_states = _fill_from_whole, _parts_of_states
    else:
        if plan.layout.strategy in WHOLE and not isinstance(trainer.model, PeftModel):
            trainer.wrap("load_weights", lambda load, folder, model=None: _fill_from_whole(trainer.model, Path(folder)))
        return
    trainer.wrap("load_weights", lambda load, folder, model=None: load_weights(trainer.model, Path(folder)))
    trainer.wrap("load_optimizer", lambda load, folder: load_states(trainer, Path(folder)))


def _follow_plan(trainer: Trainer) -> None:
    """Log, evaluate and save when the recipe says so, and take the next step at the rate of the schedule as it is now.

    Where the recipe is the same this changes nothing, to the bit.
    """
    trainer.state.compute_steps(trainer.args, trainer.state.max_steps)
    scheduler = trainer.lr_scheduler
    rates = [base * of(scheduler.last_epoch) for base, of in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


def _load_weights(trainer: Trainer, plan: Plan, folder: Path) -> None:
    """Give the model the weights of a checkpoint, and nothing else of it.

    Args:
        trainer: The trainer: with FSDP2 once the model is divided, else before.
        plan: How it is spread.
        folder: The checkpoint.
    """
    in_parts, is_adapter = (folder / WEIGHTS_IN_PARTS).is_dir(), isinstance(trainer.model, PeftModel)
    if plan.layout.strategy != "fsdp2" and in_parts:
        _weights_of_parts(trainer.model, folder)
    elif not in_parts and (plan.layout.strategy == "fsdp2" or (plan.layout.strategy in WHOLE and not is_adapter)):
        _fill_from_whole(trainer.model, folder)
    else:
        # Parameters of ZeRO-3 are in parts already.
        if not in_parts and not is_adapter and _lacks_names(trainer.model, _whole_weights(folder)):
            problem = f"{folder}: weights have Hub names, which ZeRO cannot load"
            raise RunError(problem, hint="set parallel.strategy to ddp or fsdp2")
        trainer.load_weights(str(folder), trainer.model_wrapped)


def _weights(model: Module) -> dict[str, Tensor]:
    """Return the part of a model that a checkpoint holds, by the names there: the trained adapter, or all weights."""
    if isinstance(model, PeftModel):
        adapter: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
        return adapter
    return cast("dict[str, Tensor]", state_dict.get_model_state_dict(model))


def _weights_of_parts(model: Module, folder: Path) -> None:
    read = {"model": _weights(model)}
    # Each process reads all that it asks for, and tensors of a divided model into their place.
    load(expert_parallel.in_order(read), storage_reader=FileSystemReader(folder / WEIGHTS_IN_PARTS), no_dist=True)
    if not any(isinstance(tensor, DTensor) for tensor in read["model"].values()):
        _fill(model, read["model"])


def _fill_from_whole(model: Module, folder: Path) -> None:
    """Give a model, whole or in parts, the weights of a checkpoint that has them whole.

    transformers saves weights by the names of the hub, which for many models are not those of its modules
    (vision-language models, experts). Its trainer loads by the latter, and passes over all other names in silence
    (transformers 5.24, `_load_from_checkpoint`).
    """
    weights = _whole_weights(folder)
    if isinstance(model, PreTrainedModel) and _lacks_names(model, weights):
        cls: Any = next(cls for cls in type(model).__mro__ if not issubclass(cls, FSDPModule))
        config = copy.deepcopy(model.config)
        weights = cls.from_pretrained(folder, config=config, dtype=model.dtype, use_safetensors=True).state_dict()
    _fill(model, weights)


def _whole_weights(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*model*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            weights |= {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - it is no dict
    return weights


def _lacks_names(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> bool:
    """Return whether weights lack one of a model's, by the names of its modules."""
    tied = model.all_tied_weights_keys
    return any(name not in weights and tied.get(name) not in weights for name in _weights(model))


def _fill(model: Module, found: dict[str, Tensor]) -> None:
    """Give tensors of a model, whole or in parts, the values of whole ones."""
    # A tensor that has two names is stored under one.
    other_names = model.all_tied_weights_keys if isinstance(model, PreTrainedModel) else {}
    with torch.no_grad():
        for name, tensor in _weights(model).items():
            tensor.copy_(_as_is(found[name if name in found else other_names[name]], tensor))


def _as_is(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor as another one lies: whole, or this process's part. Every process has the whole one."""
    if not isinstance(like, DTensor):
        return value.to(like.device)
    return expert_parallel.placed_like(value, like)


def _states_of_parts(trainer: Trainer, folder: Path) -> None:
    # The optimizer itself, without what Accelerate puts around it.
    model, optimizer = trainer.model, trainer.optimizer.optimizer
    own: dict[str, Any] = dict(state_dict.get_optimizer_state_dict(model, optimizer))
    groups = expert_parallel.joined_groups(own["param_groups"], optimizer, model)
    saved = expert_parallel.in_order({"optimizer": {"state": own["state"], "param_groups": groups}})
    load(saved, storage_reader=FileSystemReader(folder / OPTIMIZER_IN_PARTS), no_dist=True)
    read = saved["optimizer"]
    # Parts were read into their place.
    states = tree_map(lambda part, value: part if isinstance(part, DTensor) else value, own["state"], read["state"])
    groups = expert_parallel.divided_groups(read["param_groups"], own["param_groups"], optimizer)
    state_dict.set_optimizer_state_dict(model, optimizer, {"state": states, "param_groups": groups})
    _load_scheduler(trainer, folder)


def _parts_of_states(trainer: Trainer, folder: Path) -> None:
    optimizer = trainer.optimizer.optimizer
    saved = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
    # States are kept by the numbers of the parameters, in the order of the groups, which are the same ones everywhere.
    groups = expert_parallel.joined_groups(optimizer.param_groups, optimizer, trainer.model)
    for group, group_saved in zip(groups, saved["param_groups"], strict=True):
        for parameter, number in zip(group["params"], group_saved["params"], strict=True):
            optimizer.state[parameter] = {
                name: _state_as_is(name, value, parameter, group) for name, value in saved["state"][number].items()
            }
    settings = expert_parallel.divided_groups(saved["param_groups"], optimizer.param_groups, optimizer)
    for group, of_group in zip(optimizer.param_groups, settings, strict=True):
        group |= of_group
    _load_scheduler(trainer, folder)


def _state_as_is(name: str, value: Any, parameter: Tensor, group: dict[str, Any]) -> Any:
    """A state as its weight lies, or whole where each process has it so.

    Whole are states of a low rank, and second moments of blocks of several rows, or of a vector.
    """
    if not torch.is_tensor(value) or not value.dim():
        return value
    rows = group.get("rows_per_block", 0)
    is_block = name == "exp_avg_sq" and (rows > 1 or (rows == 1 and parameter.dim() < 2))
    return value.to(parameter.device) if group.get("low_rank") or is_block else _as_is(value, parameter)


def _load_scheduler(trainer: Trainer, folder: Path) -> None:
    state = torch.load(folder / "scheduler.pt", weights_only=True)
    trainer.lr_scheduler.load_state_dict(expert_parallel.divided_schedule(state, trainer.optimizer))


REFERENCE = "reference.safetensors"
"""File of a checkpoint with a reference that follows the model."""


def carried_name(rank: int) -> str:
    """Name of the file of a process."""
    return f"carried-{rank}.pt"


class Carried:
    """Additional state of a trainer, written into each of its checkpoints and read from the one that it resumes from.

    Args:
        trainer: The trainer, before training.
        plan: What is trained, and how it is spread.
        place: Which process this is.
        source: The checkpoint that the run goes on from, if it does.

    Raises:
        RunError: A file of that checkpoint is missing that this process needs.
    """

    def __init__(self, trainer: Any, plan: Plan, place: Place, source: Path | None) -> None:
        self.trainer = trainer
        self.plan = plan
        self.method = plan.recipe.method
        self.place = place
        self.state: dict[str, Any] = {}
        trainer.wrap("save_random_state", self._save)
        if source is None:
            return
        self.source = source
        self.state = self._read(source)
        trainer.wrap("begin_training", self._begin_where_it_was)
        # It was evaluated before the first step, and wherever else it was due.
        trainer.args.eval_on_start = False

    def _read(self, source: Path) -> dict[str, Any]:
        """Return the state for this process; of another number of processes only what holds for all."""
        saved = manifest_of(source)
        states: list[dict[str, Any]]
        if (saved.num_processes, saved.strategy) == (self.place.num_processes, self.plan.layout.strategy):
            check_whole(source, saved.strategy, self.place)
            states = [torch.load(source / carried_name(self.place.rank), weights_only=True)]
            return states[0]
        states = [torch.load(source / carried_name(rank), weights_only=True) for rank in range(saved.num_processes)]
        first = states[0]
        if "answers" in first and saved.num_processes != self.place.num_processes:
            problem = f"{source.name} contains unused answers of {saved.num_processes} processes"
            raise RunError(problem, hint=f"resume with the same number: parallel.num_processes={saved.num_processes}")
        # It is what is logged next: the mean of all processes.
        first["loss"] = sum((other["loss"] for other in states[1:]), first["loss"]) / saved.num_processes
        return first

    @property
    def num_tokens(self) -> int:
        """Tokens that were trained on so far by all processes."""
        if generates(self.method):
            return int(self.trainer.state.num_input_tokens_seen)
        return int(self.trainer.num_trained_tokens)

    def _save(self, save_random: Callable[..., Any], folder: str) -> None:
        """Write random numbers, and what else is carried, into a checkpoint. Called in every process."""
        save_random(folder)
        trainer, state = self.trainer, self.trainer.state
        # A step is behind it, so that an epoch which is at its end is not the next one yet.
        epoch = math.ceil(state.epoch) - 1
        carried = {
            "epoch": epoch,
            "steps_of_epoch": round((state.epoch - epoch) * state.max_steps),
            "loss": trainer.summed_loss,
            "logged_step": trainer.logged_step,
            "num_tokens": self.num_tokens,
            "measured": {
                mode: {name: [_plain(value) for value in values] for name, values in metrics.items()}
                for mode, metrics in trainer.metrics.items()
            },
        }
        if is_rewarded(self.method) and state.global_step % self.method.steps_per_generation:
            carried["answers"] = trainer.buffered_answers
        if trainer.replayed_groups is not None:
            carried["replayed_groups"] = trainer.replayed_groups
        if trainer.rollouts_ahead is not None:
            trainer.await_rollouts()
            carried["rollouts_ahead"] = trainer.rollouts_ahead
        torch.save(carried, Path(folder) / carried_name(self.place.rank))
        if self._reference_follows() and self.place.is_main:
            save_model(trainer.ref_model, str(Path(folder) / REFERENCE))

    def restore(self) -> None:
        """Give the trainer what it carried, once passes are over that are not those of training."""
        if not self.state:
            return
        trainer, carried = self.trainer, self.state
        trainer.summed_loss = carried["loss"].to(trainer.args.device)
        trainer.logged_step = carried["logged_step"]
        for mode, metrics in carried["measured"].items():
            trainer.metrics[mode].clear()
            trainer.metrics[mode].update(metrics)
        if not generates(self.method):
            trainer.num_trained_tokens = carried["num_tokens"]
        # Of micro-batches of another size they are generated anew.
        if len(carried.get("answers", ())) == trainer.args.gradient_accumulation_steps:
            trainer.buffered_answers = carried["answers"]
        if trainer.replayed_groups is not None:
            trainer.replayed_groups = carried.get("replayed_groups", [])
        if trainer.rollouts_ahead is not None:
            trainer.rollouts_ahead = carried.get("rollouts_ahead", [])
        if trainer.state.global_step >= trainer.state.max_steps:
            # transformers does it within the first epoch, of which nothing is left.
            trainer.load_random_state(str(self.source))
        if self._reference_follows():
            load_model(trainer.ref_model, self.source / REFERENCE)

    def _begin_where_it_was(
        self, begin: Callable[..., Any], num_steps: int, steps_per_epoch: int, num_epochs: int, *others: Any
    ) -> tuple[int, int]:
        """The epoch to begin with, and its micro-batches that were trained on.

        By itself transformers goes on after the last step with another one, and takes everything that was read from a
        stream for its first passage (transformers 5.23).
        """
        epoch, num_batches = begin(num_steps, steps_per_epoch, num_epochs, *others)
        if self.trainer.state.global_step >= num_steps:
            return num_epochs, 0
        if self.plan.recipe.data.streaming:
            return self.state["epoch"], self.state["steps_of_epoch"] * self.trainer.args.gradient_accumulation_steps
        return epoch, num_batches

    def _reference_follows(self) -> bool:
        """Return whether the reference changes in training."""
        return bool(self.method.trainer_args.get("sync_ref_model"))


def _plain(value: Any) -> float | int:
    return value if isinstance(value, int) else float(value)


def check_whole(folder: Path, strategy: str, place: Place) -> None:
    """See that a checkpoint has everything that a process goes on with exactly.

    Raises:
        RunError: Something is missing.
    """
    alone = place.num_processes == 1
    needed = ["trainer_state.json", "scheduler.pt", "rng_state.pth" if alone else f"rng_state_{place.rank}.pth"]
    needed.append(carried_name(place.rank))
    if strategy.startswith("zero"):
        needed.append("latest")
    else:
        needed.append("optimizer_0" if strategy == "fsdp2" else "optimizer.pt")
    missing = [name for name in needed if not (folder / name).exists()]
    if missing:
        problem = f"{folder.name} lacks {', '.join(missing)}: rank {place.rank} cannot resume exactly"
        raise RunError(problem, hint=f"move {folder} away to resume from an earlier checkpoint")
