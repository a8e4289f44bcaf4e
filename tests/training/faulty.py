"""Steps that go wrong in real runs, in the process and the micro-batch that are named, and what was really in them."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from tests.processes import PRELOADED, own_port
from tests.training.engines import worked


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a micro-batch.

    Attributes:
        kind: `loss`: it is not a number, and its gradients are as ever. `gradient`: the other way round. `memory`: it
            runs out where the micro-batch has more than one row. `crash`: the process fails.
        step: In which step.
        rank: In which process.
        micro_batch: In which micro-batch of the step.
    """

    kind: Literal["loss", "gradient", "memory", "crash"]
    step: int
    rank: int = 0
    micro_batch: int = 0


@contextmanager
def faulty(*faults: Fault) -> Iterator[list[dict[str, Any]]]:
    """While runs of SFT go wrong so; what they compute is noted: step, rank, token ids, and a digest of what they hold.

    The digest is of weights and optimizer states of this process at the beginning of a step.
    """
    from tunekit.methods.sft import TokenMeanSFTTrainer

    seen: list[dict[str, Any]] = []
    original = TokenMeanSFTTrainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if not self.model.training:
            return original(self, model, inputs, *given, **named)
        ids = inputs["input_ids"].clone()
        step, rank = self.state.global_step + 1, self.accelerator.process_index
        number = sum(one["step"] == step for one in seen)
        texts, digest = _texts(self, ids, inputs.get("position_ids")), None if number else _digest(self)
        seen.append({"step": step, "rank": rank, "texts": texts, "digest": digest})
        loss = original(self, model, inputs, *given, **named)
        for fault in faults:
            if (fault.step, fault.rank, fault.micro_batch) == (step, rank, number):
                if fault.kind == "memory" and len(ids) > 1:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                if fault.kind == "crash":
                    raise RuntimeError("it fails here")
                if fault.kind == "loss":
                    loss = loss + float("nan")
                if fault.kind == "gradient":
                    loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    TokenMeanSFTTrainer.compute_loss = compute_loss  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        TokenMeanSFTTrainer.compute_loss = original  # type: ignore[method-assign]


def worked_faulty(folder: Path, *faults: Fault) -> tuple[str | None, list[dict[str, Any]]]:
    """Work on a run as one of its processes while it goes wrong: the error that ended it, and what was computed."""
    from tunekit.errors import TunekitError

    with faulty(*faults) as seen:
        try:
            worked(folder)
        except TunekitError as error:
            return str(error), seen
    return None, seen


def _texts(trainer: Any, ids: torch.Tensor, positions: torch.Tensor | None) -> list[str]:
    """The documents of a micro-batch, as text."""
    documents = []
    for row, tokens in enumerate(ids):
        starts = [0] if positions is None else (positions[row] == 0).nonzero().flatten().tolist()
        documents += [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]
    return [trainer.processing_class.decode(one.tolist(), skip_special_tokens=True) for one in documents]


def _digest(trainer: Any) -> str:
    """What this process holds of the weights and of the optimizer's states."""
    from tunekit.training.timing import _torch_optimizer

    optimizer = _torch_optimizer(trainer.optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held += [value for states in optimizer.state.values() for value in states.values()]
    for parameter in trainer.model.parameters():
        held.append(vars(parameter).get("ds_tensor", parameter))
    digest = hashlib.sha256()
    for one in held:
        if isinstance(one, torch.Tensor):
            local = one.to_local() if isinstance(one, torch.distributed.tensor.DTensor) else one
            # A copy: FSDP2 cannot free what numpy has seen.
            digest.update(local.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Forked:
    """The processes of a run as a supervisor sees them, forked from one that has the libraries: they start fast.

    Args:
        folder: The run folder.
        num: How many there are.
        faults: What goes wrong in them.
    """

    def __init__(self, folder: Path, num: int, faults: tuple[Fault, ...]) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        port = own_port()
        self._processes = [context.Process(target=_run, args=(folder, num, rank, port, faults)) for rank in range(num)]

    def __enter__(self) -> "Forked":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def codes(self) -> dict[int, int | None]:
        """Exit code of each by rank."""
        return {rank: process.exitcode for rank, process in enumerate(self._processes)}

    def wait(self, seconds: float) -> None:
        """Wait until all are gone, at most so long."""
        ends = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0.0, ends - time.monotonic()))


def _run(folder: Path, num: int, rank: int, port: int, faults: tuple[Fault, ...]) -> None:
    from tunekit.errors import TunekitError
    from tunekit.runs.run import Run
    from tunekit.runs.small_files import place_of
    from tunekit.training.worker import work

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num}
    if num > 1:
        os.environ |= {name: str(value) for name, value in (names | {"MASTER_PORT": port}).items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    with faulty(*faults):
        try:
            work(Run(folder), place=place_of(), supervised=True)
        except TunekitError:
            os._exit(2)
    os._exit(0)
