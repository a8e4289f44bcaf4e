"""What a trainer carries from one step to the next besides what transformers saves: without it a run goes on inexactly.

A checkpoint of transformers has weights, optimizer, schedule and the random numbers of each process. It takes a file of
these that is missing for one that is not needed, and says so in its log at most. It does not have the answers that
several steps learn from, the tokens that were counted, what was measured since something was logged last, in which
passage through a stream a run is, and a reference that follows the model (transformers 5.23, trl 1.16). That is written
here, by each process into its own file, and looked for before anything is loaded.
"""

import math
from pathlib import Path
from typing import Any

from tunekit.errors import RunError
from tunekit.planner.plan import Plan
from tunekit.recipe.methods import CPOMethod, OnPolicyMethod, ORPOMethod, RewardedMethod
from tunekit.run.checkpoint import manifest_of
from tunekit.run.place import Place

REFERENCE = "reference.safetensors"
"""File of a checkpoint with a reference that follows the model."""


def carried_name(place: Place) -> str:
    """Name of the file of a process."""
    return f"carried-{place.rank}.pt"


class Carried:
    """What a trainer carries besides, written into each of its checkpoints and read from the one it goes on from.

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
        self._save_random = trainer._save_rng_state
        self._begin = trainer._init_training_state
        trainer._save_rng_state = self._save
        if source is None:
            return
        import torch

        manifest = manifest_of(source)
        same = manifest.num_processes == place.num_processes
        check_whole(source, manifest.strategy, place if same else None)
        self.source = source
        # What all have in common the first one has too.
        self.state = torch.load(source / carried_name(place if same else Place()), weights_only=True)
        if not same or len(self.state.get("answers", ())) != plan.gradient_accumulation_steps:
            # They are answers of other processes, or divided in another way: new ones are generated.
            self.state.pop("answers", None)
        trainer._init_training_state = self._begin_where_it_was
        # It was evaluated before the first step, and wherever else it was due.
        trainer.args.eval_on_start = False

    @property
    def num_tokens(self) -> int:
        """Tokens that were trained on so far by all processes."""
        if isinstance(self.method, OnPolicyMethod):
            return int(self.trainer.state.num_input_tokens_seen)
        if isinstance(self.method, ORPOMethod | CPOMethod):
            return int(self.trainer._num_tokens)
        return int(self.trainer._total_train_tokens)

    def _measured(self) -> Any:
        """What was measured since it was logged last, by when and name."""
        is_experimental = isinstance(self.method, ORPOMethod | CPOMethod)
        return self.trainer._stored_metrics if is_experimental else self.trainer._metrics

    def _save(self, folder: str) -> None:
        """Write random numbers, and what else is carried, into a checkpoint. Called in every process."""
        import torch

        self._save_random(folder)
        trainer, state = self.trainer, self.trainer.state
        # A step is behind it, so that an epoch which is at its end is not the next one yet.
        epoch = math.ceil(state.epoch) - 1
        carried = {
            "epoch": epoch,
            "steps_of_epoch": round((state.epoch - epoch) * state.max_steps),
            "loss": trainer._tr_loss,
            "logged_step": trainer._globalstep_last_logged,
            "num_tokens": self.num_tokens,
            "measured": {
                mode: {name: [_plain(value) for value in values] for name, values in found.items()}
                for mode, found in self._measured().items()
            },
        }
        if isinstance(self.method, RewardedMethod) and state.global_step % self.method.num_iterations:
            carried["answers"] = trainer._buffered_inputs
        torch.save(carried, Path(folder) / carried_name(self.place))
        if self._reference_follows() and self.place.is_main:
            from safetensors.torch import save_model

            save_model(trainer.ref_model, str(Path(folder) / REFERENCE))

    def restore(self) -> None:
        """Give the trainer what it carried, once passes are over that are not those of training."""
        if not self.state:
            return
        trainer, carried = self.trainer, self.state
        trainer._tr_loss = carried["loss"].to(trainer.args.device)
        trainer._globalstep_last_logged = carried["logged_step"]
        for mode, found in carried["measured"].items():
            self._measured()[mode].clear()
            self._measured()[mode].update(found)
        if isinstance(self.method, ORPOMethod | CPOMethod):
            trainer._num_tokens = carried["num_tokens"]
        elif not isinstance(self.method, OnPolicyMethod):
            trainer._total_train_tokens = carried["num_tokens"]
        if "answers" in carried:
            trainer._buffered_inputs = carried["answers"]
        if self._reference_follows():
            from safetensors.torch import load_model

            load_model(trainer.ref_model, self.source / REFERENCE)

    def _begin_where_it_was(
        self, num_steps: int, steps_per_epoch: int, num_epochs: int, *others: Any
    ) -> tuple[int, int]:
        """The epoch to begin with, and its micro-batches that were trained on.

        By itself transformers goes on after the last step with another one, and takes everything that was read from a
        stream for its first passage (transformers 5.23).
        """
        epoch, num_batches = self._begin(num_steps, steps_per_epoch, num_epochs, *others)
        if self.trainer.state.global_step >= num_steps:
            self.trainer._load_rng_state(str(self.source))
            return num_epochs, 0
        if self.plan.recipe.data.streaming:
            return self.state["epoch"], self.state["steps_of_epoch"] * self.trainer.args.gradient_accumulation_steps
        return epoch, num_batches

    def _reference_follows(self) -> bool:
        """Whether the reference changes in training."""
        return bool(self.method.trainer_args.get("sync_ref_model"))


def _plain(value: Any) -> float | int:
    return value if isinstance(value, int) else float(value)


def check_whole(folder: Path, strategy: str, place: Place | None) -> None:
    """See that a checkpoint has everything that a process goes on with exactly.

    Args:
        folder: The checkpoint.
        strategy: How the run was spread that wrote it.
        place: The process, if it is one of those that wrote it.

    Raises:
        RunError: Something is missing.
    """
    needed = ["trainer_state.json", "scheduler.pt", carried_name(place or Place())]
    if place is not None:
        needed.append("rng_state.pth" if place.num_processes == 1 else f"rng_state_{place.rank}.pth")
    if strategy.startswith("zero"):
        needed.append("latest")
    else:
        needed.append("optimizer_0" if strategy == "fsdp2" else "optimizer.pt")
    missing = [name for name in needed if not (folder / name).exists()]
    if missing:
        raise RunError(
            f"{folder.name} lacks {', '.join(missing)}: the run would go on with something else in its place",
            hint=f"move {folder} away, so that an earlier checkpoint is taken",
        )
