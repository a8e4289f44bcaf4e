"""Runs that are cut off, and what trainers do in them, seen without replacing anything."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tunekit import api
from tunekit.run.launch import launch
from tunekit.run.run import Run


def logged(run: Run, kind: str = "log") -> list[dict[str, Any]]:
    """The events of a kind."""
    return [event for event in run.events() if event["event"] == kind]


def cut_off_and_resumed(recipe: Any, *, after: int) -> Run:
    """A run whose power goes when it has taken some steps, and which is gone on with."""
    from tunekit.run.callback import Watch

    run, begin = api.make_run(recipe), Watch.on_step_begin

    def end_there(self, args, state, *others, **kwargs):
        if state.global_step == after:
            raise ConnectionError("the power is gone")
        begin(self, args, state, *others, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watch, "on_step_begin", end_there)
        with pytest.raises(ConnectionError, match="the power is gone"):
            launch(run, None)
    api.resume(run)
    assert len(logged(run, "resume")) == 1
    return run


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
