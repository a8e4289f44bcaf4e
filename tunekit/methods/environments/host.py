"""The process that tools and environments run in. It is started by `episodes`, and forks one process for each instance.

An environment may hang, crash, fill the memory or leave threads behind; in a process of its own all that ends with it.
The host imports the class once and forks, so that a new instance takes milliseconds. Messages are JSON, behind their
length in four bytes: an action with its arguments in one direction, `{"result": …}` or `{"raised": …}` in the other.

Each instance leads a session, so that what it forks ends with it. What has left that session is adopted by the host,
which kills all of its descendants before it ends itself: when it is closed, or when the process that started it dies.
"""

import contextlib
import ctypes
import importlib
import inspect
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

import psutil

from tunekit.recipe.functions import find_function

MAX_BYTES = 2**24
"""Longest message, in bytes."""

MAX_REASON_CHARS = 4000
"""Longest message of an exception outside of a call, in characters."""

_PARENT_DEATH_SIGNAL, _CHILD_SUBREAPER = 1, 36
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def send(channel: socket.socket, message: Any) -> None:
    """Write a message.

    Raises:
        OSError: The other side is gone.
        ValueError: It holds what JSON cannot.
    """
    raw = json.dumps(message, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
    channel.sendall(len(raw).to_bytes(4, "big") + raw)


def receive(channel: socket.socket) -> Any:
    """Read a message; None where the other side is gone.

    Raises:
        TimeoutError: It did not come within the channel's time limit.
        OSError: It is longer than `MAX_BYTES`.
    """
    head = _read(channel, 4)
    if head is None:
        return None
    size = int.from_bytes(head, "big")
    if size > MAX_BYTES:
        raise OSError("message too long")
    raw = _read(channel, size)
    return None if raw is None else json.loads(raw.decode("utf-8", "surrogatepass"))


def _read(channel: socket.socket, size: int) -> bytes | None:
    raw = bytearray()
    while len(raw) < size:
        try:
            part = channel.recv(size - len(raw))
        except ConnectionError:
            return None
        if not part:
            return None
        raw += part
    return bytes(raw)


def load(path: str) -> Callable[..., Any]:
    """Return a class or function by its path; those of tunekit are no functions of the user's own."""
    module, _, name = path.partition(":")
    if module.startswith("tunekit."):
        own: Callable[..., Any] = vars(importlib.import_module(module))[name]
        return own
    return find_function(path)


def takes(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def as_text(result: Any, max_chars: int) -> str:
    """Return the result of a tool as the model reads it: JSON of lists and mappings, else `str`, cut.

    Halves of surrogate pairs, which no tokenizer takes, become question marks.
    """
    structured = isinstance(result, dict | list | tuple)
    text = json.dumps(result, ensure_ascii=False, default=str) if structured else str(result)
    short = whole_characters(text[:max_chars])
    return short if len(text) <= max_chars else f"{short} [{len(text) - max_chars:,} characters cut]"


def whole_characters(text: str) -> str:
    """Return a text with question marks in place of halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode("utf-8")


def words_of(error: Exception, max_chars: int) -> str:
    """Return kind and message of an exception, cut."""
    message = whole_characters(str(error)[:max_chars])
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def seed_everything(seed: int) -> None:
    """Seed the random generators that a class may draw from."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


STEP_REWARDS = "__step_rewards__"
"""Action that asks for the reward of each step."""


class Instance:
    """An environment, or a set of tools, as its process holds it.

    A class with `step` and without `get_reward` is one in the way of Gymnasium and OpenEnv: `step(action)` returns a
    tuple `(observation, reward, terminated, …)`, or an object with these attributes (`done` for `terminated`). Its
    reward is the sum over the steps.
    """

    def __init__(self, make: Callable[[], Any], max_chars: int) -> None:
        self._make = make
        self._environment = make()
        self._max_chars = max_chars
        self._step_rewards: list[float] = []
        self._is_over = False

    def do(self, action: str, arguments: dict[str, Any], seed: int | None) -> Any:
        """Carry out an action, and return what a message can hold."""
        if action == "reset":
            return self._reset(arguments, seed)
        if action == "get_reward":
            reward = (
                self._environment.get_reward() if hasattr(self._environment, "get_reward") else sum(self._step_rewards)
            )
            return None if reward is None else float(reward)
        if action == STEP_REWARDS:
            return self._step_rewards
        if action == "step" and not hasattr(self._environment, "get_reward"):
            return self._step(arguments)
        return as_text(getattr(self._environment, action)(**arguments), self._max_chars)

    def _reset(self, arguments: dict[str, Any], seed: int | None) -> str | None:
        self._step_rewards, self._is_over = [], False
        if seed is not None:
            seed_everything(seed)
            arguments = {**arguments, "seed": seed}
        reset = self._environment.reset
        observation = reset(**takes(reset, arguments))
        if isinstance(observation, tuple):
            observation = observation[0]
        if hasattr(observation, "observation"):
            observation = observation.observation
        return None if observation is None else as_text(observation, self._max_chars)

    def _step(self, arguments: dict[str, Any]) -> str:
        if self._is_over:
            raise RuntimeError("the episode is over")
        result = self._environment.step(**arguments)
        if isinstance(result, tuple):
            observation, reward, *ends = result
            # Gymnasium: terminated, truncated, info. Gym before it: done, info.
            ended = any(end is True for end in ends[:2])
        else:
            observation, reward, ended = result.observation, result.reward, result.done
        self._step_rewards.append(float(reward or 0.0))
        self._is_over = bool(ended)
        text = as_text(observation, self._max_chars)
        return f"{text} (The episode is over.)" if self._is_over else text


def serve(channel: socket.socket, make: Callable[[], Any], max_chars: int) -> None:
    """Do what is asked of one instance until the other side is gone."""
    try:
        instance = Instance(make, max_chars)
    except Exception as error:  # noqa: BLE001  (the class is the user's: it may raise anything)
        send(channel, {"raised": words_of(error, MAX_REASON_CHARS)})
        return
    send(channel, {"result": os.getpid()})
    while (message := receive(channel)) is not None:
        try:
            reply = {"result": instance.do(message["action"], message["arguments"], message["seed"])}
        except Exception as error:  # noqa: BLE001  (so may its methods)
            reply = {"raised": words_of(error, max_chars)}
        try:
            send(channel, reply)
        except ValueError as error:
            send(channel, {"raised": f"ValueError: {error}"})


class Tools:
    """Functions as the methods of one object."""

    def __init__(self, paths: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        for name, (path, settings) in paths.items():
            function = load(path)
            setattr(self, name, function(**settings) if inspect.isclass(function) else function)


def end_with(parent: int, sign: signal.Signals = signal.SIGKILL) -> None:
    """Have a signal end this process when the one that started it ends, however it does."""
    if sys.platform == "linux":
        _set(_PARENT_DEATH_SIGNAL, sign)
        if os.getppid() != parent:
            sys.exit(1)


def _set(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    """End this process with all below it, whatever it is at: the end of the channel may have been seen first."""
    end_descendants()
    os._exit(1)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Ignore a signal; unlike with `SIG_IGN`, programs that are started do not inherit that."""


def end_descendants() -> None:
    """Kill all processes below this one, also those that they start meanwhile."""
    while _has_children():
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.01)


def _has_children() -> bool:
    """Return whether a child is left, as the kernel knows it.

    A list of processes lacks what is below a child that ends while it is made. As this process adopts what is below its
    children, nothing is left once it has none.
    """
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def main() -> None:
    """Import what is hosted, and fork a process for each channel that arrives."""
    task = json.loads(sys.argv[1])
    end_with(task["parent"])
    # Signals that stop a run may go to all processes of a job; the trainer finishes its step, and then ends this one.
    for sign in _STOP_SIGNALS:
        signal.signal(sign, _ignore)
    if sys.platform == "linux":
        _set(_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=task["control"])
    control.set_inheritable(False)
    try:
        make = _maker(task)
    except Exception as error:  # noqa: BLE001  (importing runs the user's code)
        send(control, {"raised": words_of(error, MAX_REASON_CHARS)})
        end_descendants()
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what has ended is nobody's to wait for
    signal.signal(signal.SIGQUIT, _end)
    host = os.getpid()
    try:
        end_with(task["parent"], signal.SIGQUIT)
        send(control, {"result": host})
        while (channel := _next_channel(control)) is not None:
            if os.fork():
                channel.close()
                continue
            control.close()
            _be_instance(host, channel, make, task["max_chars"])
    except OSError:
        sys.excepthook(*sys.exc_info())  # no process or file can be had
    finally:
        if os.getpid() == host:
            end_descendants()
            os._exit(0)  # threads of the user's module do not end by themselves


def _maker(task: Mapping[str, Any]) -> Callable[[], Any]:
    """Import what is hosted, and return what makes an instance of it."""
    tools = task["tools"]
    if tools:
        for path, _ in tools.values():
            load(path)
        return lambda: Tools(tools)
    cls, arguments = load(task["path"]), task["arguments"]
    return lambda: cls(**arguments)


def _next_channel(control: socket.socket) -> socket.socket | None:
    """Return the channel of a new instance; None where the other side is gone."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not descriptors:
        return None
    channel = socket.socket(fileno=descriptors[0])
    channel.set_inheritable(False)
    return channel


def _be_instance(host: int, channel: socket.socket, make: Callable[[], Any], max_chars: int) -> NoReturn:
    """Be an instance, in a process that was just forked."""
    code = 1
    try:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        end_with(host)
        os.setsid()
        # The end of the channel tells that this process has ended: none that it forks holds it.
        os.register_at_fork(
            before=_hold_signals, after_in_parent=_release_signals, after_in_child=lambda: _be_forked(channel)
        )
        with channel:
            serve(channel, make, max_chars)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  (the user's code raised it; an interpreter does so too)
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _be_forked(channel: socket.socket) -> None:
    """Be a process that an instance forked: it has nobody's signals but its own."""
    channel.close()
    for sign in _STOP_SIGNALS:
        if signal.getsignal(sign) is _ignore:
            signal.signal(sign, signal.default_int_handler if sign == signal.SIGINT else signal.SIG_DFL)
    _release_signals()


_held = threading.local()
"""Signals that the thread which forks had blocked before."""


def _hold_signals() -> None:
    """Hold back the signals that stop a run: what is forked would ignore those that come before it is ready."""
    _held.before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.before)


if __name__ == "__main__":
    main()
