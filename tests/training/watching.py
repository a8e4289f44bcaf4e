"""Runs that are cut off or held up, and what trainers do in them, seen without replacing anything."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tunekit
from tests.waiting import until
from tunekit.api import verbs
from tunekit.launching.local import launch
from tunekit.runs.run import Run


def logged(run: Run, kind: str = "log") -> list[dict[str, Any]]:
    """The events of a kind."""
    return [event for event in run.events() if event["event"] == kind]


def cut_off_and_resumed(recipe: Any, *, after: int) -> Run:
    """A run whose power goes when it has taken some steps, and which is gone on with."""
    from tunekit.training.callbacks import Watch

    run, begin = verbs.make_run(recipe), Watch.on_step_begin

    def end_there(self, args, state, *others, **kwargs):
        if state.global_step == after:
            raise ConnectionError("the power is gone")
        begin(self, args, state, *others, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "on_step_begin", end_there)
        with pytest.raises(ConnectionError, match="the power is gone"):
            launch(run, None)
    verbs.resume(run)
    assert len(logged(run, "resume")) == 1
    return run


def assert_resumed_alike(recipe: Any, names: Sequence[str], *, after: int) -> None:
    """Assert that metrics of ten steps are to the bit those of a run that was not cut off."""
    whole = last_words(tunekit.train(recipe))
    resumed = last_words(cut_off_and_resumed(recipe, after=after))
    for name in names:
        assert [resumed[step][name] for step in range(1, 11)] == [whole[step][name] for step in range(1, 11)], name


def last_words(run: Run) -> dict[int, dict[str, Any]]:
    """What was logged of each step, the later word of those that were taken twice."""
    return {event["step"]: event for event in logged(run)}


@contextlib.contextmanager
def seeing(cls: type, method: str, see: Callable[..., Any]) -> Iterator[None]:
    """Within it, `see(self, result)` is called after every call of a method."""
    original = getattr(cls, method)

    def seen(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        see(self, result)
        return result

    setattr(cls, method, seen)
    try:
        yield
    finally:
        setattr(cls, method, original)


@contextlib.contextmanager
def micro_batches(trainer: type) -> Iterator[list[dict[str, Any]]]:
    """The tensors of the micro-batches that trainers of a class train on within it."""
    batches: list[dict[str, Any]] = []
    original = trainer.training_step

    def step(self, model, inputs, *args, **kwargs):
        batches.append({name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)})
        return original(self, model, inputs, *args, **kwargs)

    trainer.training_step = step
    try:
        yield batches
    finally:
        trainer.training_step = original


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Within it a command of tunekit's may handle signals as in a process of its own, which it never takes back."""
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


HOLD = """\
import os, sys, time

def hold(event, args):
    if event == "open" and {words!r} in str(args[0]):
        os.makedirs({held!r}, exist_ok=True)
        while not os.path.exists({go_on!r}):
            time.sleep(0.02)

if not {supervised} or "TUNEKIT_SUPERVISOR" in os.environ:
    sys.addaudithook(hold)
"""


class Hold:
    """Holds up processes that are started anew where they open a file, until the test lets them go on.

    They are those that have its folder among the first from which they import modules.

    Args:
        folder: Where the module is written that holds them up.
        words: What the file's path has in it.
        supervised: Only processes that tunekit starts for a run.
    """

    def __init__(self, folder: Path, words: str, *, supervised: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._go_on, self._held = folder, folder / "goes-on", folder / "held"
        self._go_on.unlink(missing_ok=True)
        if self._held.exists():
            self._held.rmdir()
        text = HOLD.format(words=words, go_on=str(self._go_on), held=str(self._held), supervised=supervised)
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")

    @property
    def holds(self) -> bool:
        """Whether it still does."""
        return not self._go_on.exists()

    def wait(self) -> None:
        """Wait until a process is held up."""
        until(self._held.exists)

    def go_on(self) -> None:
        """Let them go on, now and later."""
        self._go_on.touch()

    def environment(self) -> dict[str, str]:
        """What to start processes with that are to be held up."""
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))}


class MicroBatch(NamedTuple):
    """A micro-batch that was trained on, in float64."""

    step: int
    weights: dict[str, torch.Tensor]
    """Before it."""
    ids: list[list[int]]
    loss: float
    grads: dict[str, torch.Tensor]
    """Its own, without those of the micro-batches before it."""


def micro_batches_of(trainer_class, monkeypatch):
    """Return a list into which each micro-batch goes that a trainer of a class trains on from now on."""
    batches, training_step = [], trainer_class.training_step

    def record(trainer, model, inputs, *args):
        named = dict(trainer.model.named_parameters())
        weights = {name: value.detach().double() for name, value in named.items()}
        pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ids = [row[mask.bool()].tolist() for row, mask in pairs]
        before = {name: 0 if value.grad is None else value.grad.double() for name, value in named.items()}
        loss = training_step(trainer, model, inputs, *args)
        grads = {name: value.grad.double() - before[name] for name, value in named.items()}
        batches.append(MicroBatch(trainer.state.global_step, weights, ids, float(loss), grads))
        return loss

    monkeypatch.setattr(trainer_class, "training_step", record)
    return batches
