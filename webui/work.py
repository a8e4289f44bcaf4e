"""Calls of functions of tunekit, by name in processes of their own, that import more than the server may.

A process stays for a while after a call, since its imports take seconds, and ends when nothing more is asked of it, or
when the server does. One that has come to hold memory of a GPU ends after the call, and with it what it holds.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import tunekit

NUM_PROCESSES = 2
"""Number of concurrent processes; further calls wait."""

IDLE_SECONDS = 60.0
"""After how long without a call a process ends."""

GRACE_SECONDS = 15.0
"""Seconds by which the server gives up a process early, so that it asks nothing of one that is about to end."""

_LOOK_SECONDS = 0.2


@dataclass
class _Worker:
    process: SpawnProcess
    connection: Connection
    used: float = field(default_factory=time.monotonic)


_slots = threading.BoundedSemaphore(NUM_PROCESSES)
_lock = threading.Lock()
_idle: list[_Worker] = []


class Cancelled(Exception):
    """Nobody waits for the result of a call any more."""


def call(
    function: str,
    *args: Any,
    on_event: Callable[[Any], None] | None = None,
    until: threading.Event | None = None,
    **options: Any,
) -> Any:
    """Call a function of tunekit in a process of its own and return its result.

    Args:
        function: One of tunekit's root names, such as `data_report`.
        args: Its arguments, plain data.
        on_event: Called with its events as they happen, where it takes such an argument.
        until: Once this is set the process is ended, and there is no result.
        options: Its named arguments.

    Raises:
        TunekitError: It raised this, or its process ended.
        Cancelled: `until` was set before it had a result.
    """
    with _slots:
        worker = _take()
        is_usable = False
        try:
            worker.connection.send((Path.cwd(), function, args, options, on_event is not None))
            while True:
                # Looked at before each message too: where they come without a pause, none would ever be waited for.
                while until is not None:
                    if until.is_set():
                        raise Cancelled
                    if worker.connection.poll(_LOOK_SECONDS):
                        break
                kind, value = worker.connection.recv()
                if kind == "event" and on_event is not None:
                    on_event(value)
                elif kind != "event":
                    break
            is_usable = bool(worker.connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            worker.process.join(5)
            raise tunekit.TunekitError(
                f"the process that worked on {function} exited with code {worker.process.exitcode}",
                hint="see its output in the terminal of `tunekit ui`; -9 usually means out of memory",
            ) from error
        finally:
            _give_back(worker, is_usable=is_usable)
        if kind == "error":
            raise value
        return value


def _take() -> _Worker:
    with _lock:
        while _idle:
            worker = _idle.pop()
            if worker.process.is_alive() and time.monotonic() - worker.used < IDLE_SECONDS - GRACE_SECONDS:
                return worker
            worker.connection.close()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give_back(worker: _Worker, *, is_usable: bool) -> None:
    if not is_usable:
        worker.connection.close()
        worker.process.terminate()
        return
    worker.used = time.monotonic()
    with _lock:
        _idle.append(worker)


def _work(connection: Connection) -> None:
    """Serve calls until none comes for a while. What is not a `TunekitError` ends the process with its traceback."""
    while connection.poll(IDLE_SECONDS):
        try:
            folder, function, args, options, tells = connection.recv()
        except EOFError:
            return
        os.chdir(folder)
        if tells:
            options["on_event"] = lambda event: connection.send(("event", event))
        try:
            result = getattr(tunekit, function)(*args, **options)
        except tunekit.TunekitError as error:
            connection.send(("error", error))
        else:
            connection.send(("result", result))
        connection.send(not _holds_a_gpu())


def _holds_a_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
