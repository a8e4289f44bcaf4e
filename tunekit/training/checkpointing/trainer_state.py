"""State of a trainer between steps besides the one that transformers saves: without it a resume is not exact.

A checkpoint of transformers has weights, optimizer, schedule and the random numbers of each process. It takes a file of
these that is missing for one that is not needed, and says so in its log at most. It does not have the answers that
several steps learn from, the tokens that were counted, what was measured since something was logged last, in which
passage through a stream a run is, and a reference that follows the model (transformers 5.23, trl 1.16). That is written
here, by each process into its own file, and looked for before anything is loaded.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunekit.errors import RunError
from tunekit.planner.plan import Plan
from tunekit.recipe.methods import generates, is_rewarded
from tunekit.runs.checkpoints.complete import manifest_of
from tunekit.runs.rank import Place

REFERENCE = "reference.safetensors"
"""File of a checkpoint with a reference that follows the model."""


def carried_name(place: Place) -> str:
    """Name of the file of a process."""
    return f"carried-{place.rank}.pt"


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
        import torch

        saved = manifest_of(source)
        if (saved.num_processes, saved.strategy) == (self.place.num_processes, self.plan.layout.strategy):
            check_whole(source, saved.strategy, self.place)
            own: dict[str, Any] = torch.load(source / carried_name(self.place), weights_only=True)
            return own
        files = [source / carried_name(Place(rank=rank)) for rank in range(saved.num_processes)]
        first: dict[str, Any]
        first, *remaining = (torch.load(file, weights_only=True) for file in files)
        if "answers" in first and saved.num_processes != self.place.num_processes:
            raise RunError(
                f"{source.name} holds answers of {saved.num_processes} processes that are not used up",
                hint=f"go on with as many: parallel.num_processes={saved.num_processes}",
            )
        # It is what is logged next: the mean of all processes.
        first["loss"] = sum((other["loss"] for other in remaining), first["loss"]) / saved.num_processes
        return first

    @property
    def num_tokens(self) -> int:
        """Tokens that were trained on so far by all processes."""
        if generates(self.method):
            return int(self.trainer.state.num_input_tokens_seen)
        return int(self.trainer.num_trained_tokens)

    def _save(self, save_random: Callable[..., Any], folder: str) -> None:
        """Write random numbers, and what else is carried, into a checkpoint. Called in every process."""
        import torch

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
        if is_rewarded(self.method) and state.global_step % self.method.num_iterations:
            carried["answers"] = trainer.buffered_answers
        torch.save(carried, Path(folder) / carried_name(self.place))
        if self._reference_follows() and self.place.is_main:
            from safetensors.torch import save_model

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
        if trainer.state.global_step >= trainer.state.max_steps:
            # transformers does it within the first epoch, of which nothing is left.
            trainer.load_random_state(str(self.source))
        if self._reference_follows():
            from safetensors.torch import load_model

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
    needed.append(carried_name(place))
    if strategy.startswith("zero"):
        needed.append("latest")
    else:
        needed.append("optimizer_0" if strategy == "fsdp2" else "optimizer.pt")
    missing = [name for name in needed if not (folder / name).exists()]
    if missing:
        raise RunError(
            f"{folder.name} lacks {', '.join(missing)}: rank {place.rank} would go on with something else",
            hint=f"move {folder} away, so that an earlier checkpoint is taken",
        )
