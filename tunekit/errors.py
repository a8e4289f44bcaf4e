"""The errors a user can meet: each says where, what is wrong, and what to do about it.

Everything that tunekit raises on purpose is a `TunekitError`; the command line prints it without a traceback and
exits with 2. Any other exception is a defect of tunekit and keeps its traceback.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class TunekitError(Exception):
    """A problem that the user can fix.

    Args:
        problem: Where and what, in one line or a list of lines.
        hint: What to do about it, in the imperative.
        changes: Changes of the recipe that mend it, each as `key=value`, where it is known which do.
    """

    def __init__(self, problem: str, *, hint: str | None = None, changes: Sequence[str] = ()) -> None:
        self.problem = problem
        self.hint = hint
        self.changes = tuple(changes)
        super().__init__(problem if hint is None else f"{problem}; {hint}")

    def to_words(self) -> dict[str, Any]:
        """Plain values of which `from_words` makes the error again in another process.

        Its kind is the nearest class of this module: a subclass elsewhere is private to where it is raised.
        """
        kind = next(error_class.__name__ for error_class in type(self).__mro__ if error_class.__module__ == __name__)
        return {"kind": kind, "problem": self.problem, "hint": self.hint, "changes": list(self.changes)}


def loading_errors() -> tuple[type[Exception], ...]:
    """Return what libraries raise where a file of a model folder is damaged, or a file or package is missing."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, ImportError,
        StrictDataclassError,
    )  # fmt: skip


class RecipeError(TunekitError):
    """The recipe, or an override of it, cannot be read or is not valid."""


class PlanError(TunekitError):
    """A recipe does not fit the machine, or cannot run correctly on it.

    Args:
        problem: What is wrong.
        hint: What would fit or run.
        changes: Changes of the recipe with which it would.
        needed_bytes: What each device would need at least, where that is too much.
        limit_bytes: What may be used of each.
    """

    def __init__(
        self,
        problem: str,
        *,
        hint: str | None = None,
        changes: Sequence[str] = (),
        needed_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes
        super().__init__(problem, hint=hint, changes=changes)

    def to_words(self) -> dict[str, Any]:
        """The same, with the sizes."""
        return super().to_words() | {"needed_bytes": self.needed_bytes, "limit_bytes": self.limit_bytes}


class ModelError(TunekitError):
    """The model or its tokenizer cannot be found or loaded."""


class DataError(TunekitError):
    """A dataset cannot be found, read, or trained on."""


class DependencyError(TunekitError):
    """A package that a requested feature needs is not installed."""


class RunError(TunekitError):
    """A run cannot be started, found or read, or it failed."""


class NonFiniteError(RunError):
    """A step of a run had a NaN or infinite loss or gradient."""


class RollbackError(NonFiniteError):
    """A step of a run was not finite; the run resumes from its newest checkpoint and skips it."""


class MemoryShortError(RunError):
    """A device of a run ran out of memory."""


class DiskError(RunError):
    """The disk is full or not writable."""


class ExchangeError(RunError):
    """A process of a run timed out waiting for another, whose own error says more if it left one."""


class StandstillError(RunError):
    """A process of a run made no progress for longer than the timeout."""


class DataWorkerError(RunError):
    """A data-loading worker of a run exited early."""


class HostLostError(RunError):
    """A host of a run does not respond, or its processes were stopped."""


FAULTS = (ExchangeError.__name__, StandstillError.__name__, DataWorkerError.__name__)
"""Errors that a restart may avoid. All others with a hint are for the user to fix first."""


class Stopped(KeyboardInterrupt):
    """A run was stopped by Ctrl-C, another signal, or `tunekit stop`.

    Args:
        reason: By whom, at which step, and with which checkpoint.
        hint: How to resume, where that is possible.
        exit_code: That of a program that has nothing else to do.
    """

    def __init__(self, reason: str, *, hint: str | None, exit_code: int) -> None:
        self.reason = reason
        self.hint = hint
        self.exit_code = exit_code
        super().__init__(reason if hint is None else f"{reason}; {hint}")


def kind_named(name: str) -> type[TunekitError] | None:
    """The kind of error of a name; None where this module has none of it."""
    error_class = globals().get(name)
    return error_class if isinstance(error_class, type) and issubclass(error_class, TunekitError) else None


def from_words(words: Mapping[str, Any]) -> TunekitError:
    """The error that another process told with `to_words`. A kind of another version is a `TunekitError`."""
    kind = kind_named(words["kind"]) or TunekitError
    options = {"hint": words["hint"], "changes": words.get("changes", ())}
    if issubclass(kind, PlanError):
        options |= {key: words.get(key) for key in ("needed_bytes", "limit_bytes")}
    return kind(words["problem"], **options)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a file that the user named.

    Raises:
        TunekitError: It cannot be written.
    """
    try:
        yield
    except OSError as error:
        hint = "pass a file in an existing folder"
        raise TunekitError(f"cannot write '{path}': {error.strerror}", hint=hint) from error
