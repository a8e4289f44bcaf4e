"""Program of the sandbox: runs an answer, or its tests. It is started by its path, and imports nothing of tunekit.

Two interpreters talk to each other. The first one has the program, which may do to it what it likes. The second one
has the tests, and no line of the program: where a test uses what the program defines, the first interpreter is asked,
and what it answers comes back as plain data. So a program cannot pass a test by printing a verdict, by leaving early,
by changing what `==`, `assert`, `len` or `math.isclose` do, or by looking for the tests: it sees only the arguments of
its calls.

Plain data are values of exactly Python's own types (`PLAIN` and `STANDARD`). Any other object stays where it is, and
the tests hold a `Handle` to it (see `handles`), which says what the program answers of it and what not.
"""

import builtins
import ctypes
import importlib.util
import json
import operator
import os
import resource
import signal
import sys
from base64 import b64decode
from collections.abc import Callable
from typing import Any

MAX_BYTES = 2**22
"""Longest message between the two."""

MAX_DEPTH = 100
"""Deepest nesting of plain data."""

MAX_VALUES = 10_000
"""Most values that the tests take from one iterator of the program's."""

MAX_REASON = 300
"""Longest reason of a failure, in characters."""

_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVS, _SECCOMP, _SECCOMP_FILTER = 1, 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_PATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file access rights in each version of Landlock; the last holds for those after it."""
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6

SCALARS = (bool, str, float, type(None))
COLLECTIONS = (list, tuple, set, frozenset)
PLAIN: tuple[type, ...] = (*SCALARS, int, complex, bytes, dict, *COLLECTIONS)


def _is_short(values: range) -> bool:
    # Its `len` may be more than Python takes for one.
    return not values[MAX_VALUES:]


STANDARD: dict[str, Callable[[Any], list[Any] | None]] = {
    "builtins.bytearray": lambda value: [bytes(value)],
    "builtins.range": lambda value: [value.start, value.stop, value.step] if _is_short(value) else None,
    "builtins.slice": lambda value: [value.start, value.stop, value.step],
    "collections.Counter": lambda value: [dict(value)],
    "collections.OrderedDict": lambda value: [list(value.items())],
    "collections.defaultdict": lambda value: [value.default_factory, dict(value)],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "datetime.date": lambda value: [value.year, value.month, value.day],
    "datetime.datetime": lambda value: [*value.timetuple()[:6], value.microsecond] if value.tzinfo is None else None,
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
}
"""Types of the standard library whose values are plain data too: of what each is made again, if it can be."""


class Ended(BaseException):
    """The other side is gone, or says too much."""


class Refused(BaseException):
    """A test does with an object of the program's what is done with plain data alone."""


class _Filter(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def lock_down(limits: dict[str, int], readable: list[str], program: bytes) -> None:
    """Give up all but computing, for good: no writing, no reading elsewhere, no network, no process, no thread.

    Args:
        limits: By the name of a resource, such as `AS`.
        readable: Folders that may be read.
        program: The filter of system calls, as the kernel takes it.
    """
    for name, limit in limits.items():
        resource.setrlimit(vars(resource)[f"RLIMIT_{name}"], (limit, limit))
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _landlock(libc, readable)
    filters = _Filter(len(program) // 8, program)
    _check(libc.prctl(_SECCOMP, _SECCOMP_FILTER, ctypes.byref(filters), 0, 0), "seccomp")


def end_with(parent: int) -> None:
    """End when the thread that started this process does, however it ends: nobody else would end a program then."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _landlock(libc: ctypes.CDLL, readable: list[str]) -> None:
    version = _check(libc.syscall(_LANDLOCK_CREATE, None, 0, 1), "Landlock")
    handled = [(1 << _FILE_RIGHTS.get(version, 16)) - 1]
    handled += [0b11] if version >= _NETWORK_SINCE else []
    handled += [0b11] if version >= _SCOPES_SINCE else []
    ruleset = (ctypes.c_uint64 * len(handled))(*handled)
    ruleset_fd = _check(libc.syscall(_LANDLOCK_CREATE, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0), "Landlock")
    for path in readable:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _Beneath(_READ_FILE | _READ_DIR, folder)
        _check(libc.syscall(_LANDLOCK_ADD, ruleset_fd, _LANDLOCK_PATH, ctypes.byref(rule), 0), "Landlock")
        os.close(folder)
    _check(libc.syscall(_LANDLOCK_RESTRICT, ruleset_fd, 0), "Landlock")
    os.close(ruleset_fd)


def _check(returned: int, what: str) -> int:
    if returned < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return returned


# Messages


def send(descriptor: int, message: Any) -> None:
    """Write a message: its length, then itself."""
    raw = json.dumps(message).encode()
    if len(raw) > MAX_BYTES:
        raise ValueError("too much data")
    raw = len(raw).to_bytes(4, "big") + raw
    while raw:
        raw = raw[os.write(descriptor, raw) :]


def receive(descriptor: int) -> Any:
    """Read a message.

    Raises:
        Ended: The other side is gone, or says too much.
    """
    size = int.from_bytes(_read(descriptor, 4), "big")
    if size > MAX_BYTES:
        raise Ended("too much data")
    return json.loads(_read(descriptor, size))


def _read(descriptor: int, size: int) -> bytes:
    raw = bytearray()
    while len(raw) < size:
        part = os.read(descriptor, size - len(raw))
        if not part:
            raise Ended("the program has exited")
        raw += part
    return bytes(raw)


def encode(value: Any, held: Callable[[Any], int | str]) -> Any:
    """A value as a message has it. `held` gives what stands for it where it is no plain data."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is int:
        return value if abs(value) < 2**53 else {"int": hex(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is dict:
        return {"dict": [[encode(name, held), encode(item, held)] for name, item in value.items()]}
    if kind in COLLECTIONS:
        return {kind.__name__: [encode(item, held) for item in value]}
    name = f"{kind.__module__}.{kind.__qualname__}"
    parts = STANDARD[name](value) if name in STANDARD else None
    if parts is not None:
        return {"standard": [name, [encode(part, held) for part in parts]]}
    return {"handle": held(value)}


def decode(message: Any, holding: Callable[[Any], Any], depth: int = 0) -> Any:
    """The value that a message has. `holding` finds what something stands for.

    Raises:
        ValueError: It is nested too deeply, or no message. (One that somebody forged may raise other errors.)
    """
    if type(message) in (*SCALARS, int):
        return message
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    ((kind, content),) = message.items()
    match kind:
        case "int":
            return int(content, 16)
        case "complex":
            return complex(*content)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {decode(name, holding, depth + 1): decode(item, holding, depth + 1) for name, item in content}
        case "list" | "tuple" | "set" | "frozenset":
            return vars(builtins)[kind](decode(item, holding, depth + 1) for item in content)
        case "standard" if content[0] in STANDARD:
            module, _, name = content[0].partition(".")
            kind = vars(importlib.import_module(module))[name]
            value = kind(*(decode(part, holding, depth + 1) for part in content[1]))
            if kind is range and not _is_short(value):
                raise ValueError("range with too many values")
            return value
        case "handle":
            return holding(content)
    raise ValueError("unknown kind")


# The side of the program


def serve(program: str, requests: int, replies: int) -> None:
    """Run a program, then do what its tests ask of it."""
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def held(value: Any) -> int:
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return numbers[id(value)]

    def holding(number: int | str) -> Any:
        return _TYPES[number] if isinstance(number, str) else objects[number]

    names: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    exec(compile(program, "<program>", "exec"), names)  # noqa: S102  (that is what the sandbox is for)
    defined = {name: value for name, value in names.items() if not name.startswith("__")}
    send(replies, {name: encode(value, held) for name, value in defined.items()})
    while True:
        action, arguments, named = receive(requests)
        try:
            values = [decode(argument, holding) for argument in arguments]
            keywords = {name: decode(argument, holding) for name, argument in named.items()}
            result = _action(action)(*values, **keywords)
            # What a program changes in place, it changes in a copy: so the arguments go back as well.
            send(replies, [encode(result, held), [encode(argument, held) for argument in values[1:]]])
        except Exception as error:  # noqa: BLE001  (the program may raise anything)
            send(replies, {"raised": type(error).__name__, "says": str(error)[:1000]})


def show(program: str) -> None:
    """Run a program that prints; an error ends what it prints."""
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__", "__builtins__": builtins})  # noqa: S102
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001  (the program may raise anything)
        print(f"{type(error).__name__}: {error}"[:1000])
    sys.stdout.flush()


_TYPES = {kind.__name__: kind for kind in PLAIN}


def _action(name: str) -> Callable[..., Any]:
    if name == "call":
        return lambda function, *values, **keywords: function(*values, **keywords)
    if name == "plain":
        return _plain
    if name == "always_true":
        return lambda value: not hasattr(type(value), "__bool__") and not hasattr(type(value), "__len__")
    operation: Callable[..., Any] = vars(operator).get(name) or vars(builtins)[name]
    return operation


def _plain(value: Any) -> Any:
    """The data of an object whose class is made from a class of plain data, such as a named tuple's tuple."""
    collections: tuple[Any, ...] = (*COLLECTIONS, bytes)
    for kind in collections:
        if isinstance(value, kind):
            return kind(kind.__iter__(value))
    if isinstance(value, dict):
        return dict(dict.items(value))
    if isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        return list(value)
    scalars: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
    for kind, plain in scalars.items():
        if isinstance(value, kind):
            return plain(value)
    raise TypeError("not plain data")


def main() -> None:
    """Read the task from standard input, give up all rights, and carry it out."""
    task = json.load(sys.stdin.buffer)
    end_with(task["parent"])
    if "tests" in task:
        tests = _tests_module(task["module"]).Tests(task["requests"], task["replies"])
    nothing = os.open(os.devnull, os.O_RDWR)
    verdicts = os.dup(1)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    if "printing" in task:
        os.dup2(verdicts, 1)
    lock_down(task["limits"], task["readable"], b64decode(task["filter"]))
    if "printing" in task:
        show(task["printing"])
    elif "program" in task:
        os.close(verdicts)
        serve(task["program"], task["requests"], task["replies"])
    else:
        tests.run(task["tests"], verdicts)


def _tests_module(path: str) -> Any:
    """The module of the tests' side. What it imports of tunekit is this module, which is there already."""
    sys.modules["tunekit.methods.rewards.sandboxed"] = sys.modules[__name__]
    spec = importlib.util.spec_from_file_location("handles", path)
    assert spec is not None and spec.loader is not None, "it is a file of Python"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
