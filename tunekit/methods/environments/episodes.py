"""Tools and environments as TRL's trainer calls them, each in a process of its own that can be ended and started again.

TRL makes an environment for each answer of a batch, resets them with the columns of their rows, calls their public
methods as tools, and asks each for its reward (trl 1.16, `GRPOTrainer`). What it is given here are stand-ins with the
same methods, signatures and docstrings, which pass each call to `host`.

- A call that raises is answered to the model by `{'error': …}`, as TRL does with tools.
- A call that does not return in time, or whose process ends, loses the episode: the process is ended with all that it
  has forked, a new one takes its place, further calls are answered by an error, and the episode takes the mean reward
  of its group, so that nothing is learned from it.
- A `reset` that is lost is tried once more, in a new process: nothing of the episode has happened yet.
- What is printed goes to the output of the process that started them, up to a limit.
- An episode is seeded by the run's seed, the step and its row: all answers of a group meet the same episode, and a
  resumed run the same as one that went on. Held-out rows have the same episode at every evaluation.
"""

import hashlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import IO, Any, TextIO

from tunekit.errors import RunError
from tunekit.methods.environments.host import STEP_REWARDS, load, receive, send

EPISODE = "episode"
"""Column of the number of a row, from which its episodes are seeded."""

_START_SECONDS = 120.0
_END_SECONDS = 10.0
_MAX_PRINTED_CHARS, _MAX_CHARS_PER_SECOND = 2**24, 2**18
_LINE_CHARS = 2**12
_LIFECYCLE = ("reset", "get_reward")
_TURN_BASED = "step"


class RaisedError(Exception):
    """A call raised, which says why."""


class LostError(Exception):
    """A call did not return in time, or its process ended.

    Args:
        reason: Which call, and what became of it.
        remedy: What the user can do.
    """

    def __init__(self, reason: str, remedy: str = "see log.txt for what it printed") -> None:
        super().__init__(reason)
        self.remedy = remedy

    def told(self, consequence: str) -> str:
        """Return a line for the user."""
        return f"{self}: {consequence}; {self.remedy}"


@dataclass(frozen=True)
class Limits:
    """Limits of a call.

    Attributes:
        timeout_seconds: Time limit.
        max_chars: Longest result that the model is shown, in characters.
    """

    timeout_seconds: float
    max_chars: int


@dataclass
class Counts:
    """Losses since the counts were read last.

    Attributes:
        num_lost: Episodes or calls whose process hung or ended.
        reasons: Why, a line each.
    """

    num_lost: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, reason: str) -> None:
        """Count a loss."""
        self.num_lost += 1
        self.reasons.append(reason)

    def take(self) -> tuple[int, list[str]]:
        """Return the counts, and begin anew."""
        counts = self.num_lost, self.reasons
        self.num_lost, self.reasons = 0, []
        return counts


class Host:
    """The process that imports tools or an environment, and forks a process for each instance.

    Args:
        name: Field of the recipe, for messages.
        task: Module and class with its arguments, or tools by name.
        limits: Limits of a call.

    Raises:
        RunError: The module cannot be imported there.
    """

    def __init__(self, name: str, task: Mapping[str, Any], limits: Limits) -> None:
        self.name = name
        self.limits = limits
        self.counts = Counts()
        self.on_call: Callable[[], None] = lambda: None
        """Called before each call."""
        self.failure: RunError | None = None
        """Error that ends the run, where it was raised to a caller that goes on."""
        self._task = {"tools": None, **task, "max_chars": limits.max_chars, "parent": os.getpid()}
        self._channels: set[Channel] = set()
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            words = json.dumps({**self._task, "control": theirs.fileno()})
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tunekit.methods.environments.host", words],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        printed = (self._process.stdout, sys.stdout, self.name)
        threading.Thread(target=_pass_on, args=printed, name="tools-output", daemon=True).start()
        self._control.settimeout(_START_SECONDS)
        try:
            reply = receive(self._control)
        except TimeoutError:
            reply = {"raised": f"its import did not end within {_START_SECONDS:g} s"}
        if reply is None or "raised" in reply:
            reason = "its process ended" if reply is None else reply["raised"]
            self.close()
            raise RunError(f"{self.name}: {reason}", hint="see log.txt for what it printed")

    def new(self) -> "Channel":
        """Start an instance. A host that has exited is started again first.

        Raises:
            RunError: The class raises where it is made, or the process does not stay.
        """
        channel = self._new()
        if channel is None:
            reason = "the process that starts its instances exited, and was started again"
            self.counts.reasons.append(f"{reason}; see log.txt for what it printed")
            self.close()
            self._start()
            channel = self._new()
        if channel is None:
            problem = f"{self.name}: the process that starts its instances exits"
            raise RunError(problem, hint="see log.txt; it may have run out of memory: free some, and resume the run")
        return channel

    def _new(self) -> "Channel | None":
        """Start an instance; None where the host has exited."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            except OSError:
                ours.close()
                return None
        ours.settimeout(_START_SECONDS)
        try:
            reply = receive(ours)
        except TimeoutError:
            reply = {"raised": f"it did not start within {_START_SECONDS:g} s"}
        if reply is None and self._has_exited(within_seconds=1.0):
            ours.close()
            return None
        if reply is None or "raised" in reply:
            ours.close()
            reason = "its process ended in its constructor" if reply is None else reply["raised"]
            raise RunError(f"{self.name}: {reason}", hint="see log.txt for what it printed")
        channel = Channel(self, ours, reply["result"])
        self._channels.add(channel)
        return channel

    def _has_exited(self, within_seconds: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_seconds)
            return True
        return False

    def forget(self, channel: "Channel") -> None:
        """Forget an instance that was ended."""
        self._channels.discard(channel)

    def close(self) -> None:
        """End it with all its instances, and all that these have forked."""
        with suppress(OSError):
            # The socket may be open in processes that were forked from this one, too.
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        if not self._has_exited(_END_SECONDS):
            self._process.kill()
            self._process.wait()
        if self._process.returncode == 0:
            # It has ended all that was below it, and their numbers may be those of others by now.
            for channel in list(self._channels):
                channel.close()
            return
        for channel in list(self._channels):
            channel.end()
        _kill_group(self._process.pid)


def _kill_group(leader: int) -> None:
    """Kill a process and all others of the group that it leads."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _pass_on(printed: IO[str], output: TextIO, name: str) -> None:
    """Write what a host and its instances print to an output, up to a limit in each second and in all.

    Secrets are searched for at some MB per second; what prints more than that would wait.
    """
    num_written, second, num_in_second = 0, 0, 0
    with printed:
        for part in iter(lambda: printed.readline(_LINE_CHARS), ""):
            if int(time.monotonic()) != second:
                second, num_in_second = int(time.monotonic()), 0
            if num_written >= _MAX_PRINTED_CHARS or num_in_second >= _MAX_CHARS_PER_SECOND:
                continue
            num_written, num_in_second = num_written + len(part), num_in_second + len(part)
            if num_written >= _MAX_PRINTED_CHARS:
                part += f"\ntunekit: {name}: it has printed {num_written:,} characters; further output is skipped\n"
            elif num_in_second >= _MAX_CHARS_PER_SECOND:
                part += f"\ntunekit: {name}: it prints too much; the rest of this second is skipped\n"
            # A log that is closed, or on a full disk, is no reason to stop what prints.
            with suppress(OSError, ValueError):
                output.write(part)
                output.flush()


class Channel:
    """An instance in its process."""

    def __init__(self, host: Host, channel: socket.socket, process_id: int) -> None:
        self._host = host
        self._channel = channel
        self._process_id = process_id
        self._timeout_seconds = host.limits.timeout_seconds

    def call(self, action: str, arguments: Mapping[str, Any], seed: int | None = None) -> Any:
        """Carry out an action.

        Raises:
            RaisedError: It raised.
            LostError: It did not return in time, or its process ended. The process is gone.
        """
        self._host.on_call()
        deadline = time.monotonic() + self._timeout_seconds
        try:
            self._channel.settimeout(self._timeout_seconds)
            send(self._channel, {"action": action, "arguments": dict(arguments), "seed": seed})
            self._channel.settimeout(max(0.001, deadline - time.monotonic()))
            reply = receive(self._channel)
        except TimeoutError:
            self.end()
            remedy = "if it only takes long, raise method.tool_timeout_seconds"
            raise LostError(f"{action} did not return within {self._timeout_seconds:g} s", remedy) from None
        except ConnectionError:
            self.end()
            raise LostError(f"its process had exited before {action}") from None
        except (OSError, ValueError) as error:
            self.end()
            raise LostError(f"{action}: {error}") from None
        if reply is None:
            self.end()
            raise LostError(f"its process exited in {action}")
        if "raised" in reply:
            raise RaisedError(reply["raised"])
        return reply["result"]

    def close(self) -> None:
        """Forget the process, which has ended."""
        self._channel.close()
        self._host.forget(self)

    def end(self) -> None:
        """End the process, and those of its session."""
        self.close()
        _kill_group(self._process_id)


@dataclass
class Seeds:
    """Seeds of episodes.

    Attributes:
        seed: Of the run.
        occasion: Returns the number of the step, or `eval`.
    """

    seed: int
    occasion: Callable[[], int | str] = lambda: 0

    def of(self, row: object) -> int:
        """Return the seed of a row's episode."""
        text = f"{self.seed}/{self.occasion()}/{row}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def tool_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of an environment that the model may call, by name."""
    functions = dict(inspect.getmembers(cls, inspect.isfunction))
    if is_turn_based(cls):
        return {_TURN_BASED: functions[_TURN_BASED]}
    return {name: function for name, function in functions.items() if name[0] != "_" and name not in _LIFECYCLE}


def is_turn_based(cls: type) -> bool:
    """Return whether an environment rewards each step, in the way of Gymnasium."""
    return hasattr(cls, _TURN_BASED) and not hasattr(cls, "get_reward")


def owns_reward(cls: type) -> bool:
    """Return whether an environment scores its episodes."""
    return hasattr(cls, "get_reward") or is_turn_based(cls)


def environment_class(cls: type, host: Host, seeds: Seeds) -> type:
    """Return the class of stand-ins for an environment.

    Args:
        cls: The environment.
        host: Its process.
        seeds: Seeds of the episodes.
    """

    class Episode:
        """Stand-in for an environment in its own process."""

        def __init__(self) -> None:
            self._channel = host.new()
            self._lost = ""

        def _call(self, action: str, arguments: Mapping[str, Any]) -> Any:
            if self._lost:
                raise RaisedError(f"the environment was lost: {self._lost}")
            try:
                return self._channel.call(action, arguments)
            except LostError as error:
                self._lose(error)
                raise RaisedError(f"the environment was lost: {error}") from None

        def _lose(self, error: LostError) -> None:
            self._lost = str(error)
            host.counts.add(error.told("the episode takes the mean reward of its group"))

        def reset(self, **row: Any) -> str | None:
            """Begin an episode; return what the model sees first."""
            if self._lost:
                self._channel, self._lost = host.new(), ""
            seed = seeds.of(row.pop(EPISODE, ""))
            try:
                try:
                    return self._reset(row, seed)
                except LostError as error:
                    host.counts.reasons.append(error.told("it was called again in a new process"))
                    self._channel = host.new()
                    return self._reset(row, seed)
            except RaisedError as error:
                problem = f"{host.name}: reset raised {error}, for the row {_cut(row)}"
                raise RunError(problem, hint="reset must accept every row") from None
            except LostError as error:
                raise RunError(f"{host.name}: {error}, twice, for the row {_cut(row)}", hint=error.remedy) from None

        def _reset(self, row: Mapping[str, Any], seed: int) -> str | None:
            observation: str | None = self._channel.call("reset", row, seed)
            return observation

        def get_reward(self) -> float | None:
            """Return the reward of the episode; None where it was lost."""
            if self._lost:
                return None
            try:
                reward: float | None = self._channel.call("get_reward", {})
            except RaisedError as error:
                raise RunError(f"{host.name}: get_reward raised {error}", hint="return a finite number") from None
            except LostError as error:
                self._lose(error)
                return None
            return reward

        @property
        def step_rewards(self) -> tuple[float, ...]:
            """Reward of each step; none where the episode was lost, or is scored as a whole."""
            if self._lost or not is_turn_based(cls):
                return ()
            try:
                return tuple(self._channel.call(STEP_REWARDS, {}))
            except LostError as error:
                self._lose(error)
                return ()

        @property
        def is_lost(self) -> bool:
            """True if the episode's process hung or ended."""
            return bool(self._lost)

    if not owns_reward(cls):
        del Episode.get_reward
    Episode.__name__ = Episode.__qualname__ = cls.__name__
    for name, function in tool_methods(cls).items():
        setattr(Episode, name, _passed_on(name, function))
    return Episode


def _passed_on(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method with the signature and the docstring of another, which passes its call on."""

    @wraps(function)
    def method(self: Any, **arguments: Any) -> Any:
        return self._call(name, arguments)

    return method


def tool_functions(paths: Mapping[str, tuple[str, Mapping[str, Any]]], host: Host) -> list[Callable[..., Any]]:
    """Return stand-ins for tools that are functions.

    Args:
        paths: Module and function of each tool with its settings, by name.
        host: Their process.
    """
    channel = [host.new()]

    def passed_on(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def tool(**arguments: Any) -> Any:
            try:
                return channel[0].call(name, arguments)
            except LostError as error:
                host.counts.add(error.told("the model reads an error, and the tools were started again"))
                try:
                    channel[0] = host.new()
                except RunError as failure:
                    # TRL would show it to the model as the result of the call.
                    host.failure = failure
                raise RaisedError(str(error)) from None

        tool.__name__ = name
        return tool

    return [passed_on(name, described(path)) for name, (path, _) in paths.items()]


def described(path: str) -> Callable[..., Any]:
    """Return a function with the signature, type hints and docstring of a tool."""
    tool = load(path)
    if not inspect.isclass(tool):
        return tool
    call = vars(tool)["__call__"]

    def function(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    signature = inspect.signature(call)
    function.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    function.__annotations__ = typing.get_type_hints(call)
    function.__doc__ = call.__doc__
    return function


def fill_lost(rewards: Any, lost: Sequence[bool], num_generations: int) -> Any:
    """Give each lost episode the mean reward of its group, from which nothing is learned.

    Args:
        rewards: Of each reward, `(answers, rewards)`, NaN where it had nothing to say.
        lost: Whether the episode of each answer was lost.
        num_generations: Answers of a group, which stand one behind the other.

    Returns:
        The same with the lost ones filled; zero where a whole group was lost.
    """
    import torch

    if not any(lost):
        return rewards
    is_lost = torch.tensor(lost, device=rewards.device).view(-1, num_generations, 1)
    grouped = rewards.view(-1, num_generations, rewards.shape[-1])
    is_absent = is_lost | grouped.isnan()
    sums = grouped.masked_fill(is_absent, 0.0).sum(1, keepdim=True)
    means = sums / (~is_absent).sum(1, keepdim=True).clamp(min=1)
    return torch.where(is_lost, means, grouped).view_as(rewards)


def _cut(row: Mapping[str, Any]) -> str:
    text = json.dumps(dict(row), ensure_ascii=False, default=str)
    return text if len(text) <= 200 else text[:200] + "..."
