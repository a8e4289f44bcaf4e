"""Callbacks of the user's own: found by their paths, checked, and named where one of their events raises."""

import traceback
from functools import partial
from typing import Any

from transformers import TrainerCallback

from tunekit.errors import RunError
from tunekit.recipe.functions import find_function

EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_"))
"""Names of a callback's events."""


class OwnCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that passes events to one of the user's own.

    Args:
        path: Where that is found, `module:name`.

    Raises:
        RunError: It returns no callback, or raises; so do events.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._callback: Any = self._call(find_function(path), "")
        if not isinstance(self._callback, TrainerCallback):
            problem = f"train.callbacks: {path} returned {type(self._callback).__name__}, not a TrainerCallback"
            raise RunError(problem, hint="return an instance of a subclass of transformers.TrainerCallback")
        for event in EVENTS:
            setattr(self, event, partial(self._call, getattr(self._callback, event), f".{event}"))

    def _call(self, function: Any, event: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # the code is the user's: it may raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}".rstrip(": ")
            problem = f"train.callbacks: {self._path}{event} raised {what} ({where.filename}:{where.lineno})"
            raise RunError(problem, hint="correct it, and resume") from error
