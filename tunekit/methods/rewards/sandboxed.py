"""What runs in the sandbox: a program, or the tests of one. It is started by its path, and imports nothing of tunekit.

Two interpreters talk to each other. The first one has the program, which may do to it what it likes. The second one
has the tests, and no line of the program: where a test uses what the program defines, the first interpreter is asked,
and what it answers comes back as plain data. So a program cannot pass a test by printing a verdict, by leaving early,
by changing what `==` or `assert` do, or by looking for the tests: it sees only the arguments of its calls.

An object that is no plain data stays where it is, and the tests hold a `Handle` to it, whose methods can be called. It
is compared with plain data by the data that it is made of, if it is a kind of list, dict or the like; else it equals
none.
"""

import builtins
import ctypes
import json
import operator
import os
import resource
import signal
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from typing import Any

MAX_BYTES = 2**22
"""Longest message between the two."""

_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVS, _SECCOMP, _SECCOMP_FILTER = 1, 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_PATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights on files each version of Landlock has; the last holds for those after it."""
_NETWORK_SINCE, _SCOPES_SINCE = 4, 6

PLAIN = (bool, str, float, type(None))


class Ended(Exception):
    """The other side is gone, or says too much."""


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
    made = _check(libc.syscall(_LANDLOCK_CREATE, ctypes.byref(ruleset), ctypes.sizeof(ruleset), 0), "Landlock")
    for path in readable:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _Beneath(_READ_FILE | _READ_DIR, folder)
        _check(libc.syscall(_LANDLOCK_ADD, made, _LANDLOCK_PATH, ctypes.byref(rule), 0), "Landlock")
        os.close(folder)
    _check(libc.syscall(_LANDLOCK_RESTRICT, made, 0), "Landlock")
    os.close(made)


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
            raise Ended("the program has ended")
        raw += part
    return bytes(raw)


def encode(value: Any, held: Callable[[Any], int]) -> Any:
    """A value as a message has it. `held` gives a number for what is no plain data."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is int:
        return value if abs(value) < 2**53 else {"int": hex(value)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is dict:
        return {"dict": [[encode(name, held), encode(item, held)] for name, item in value.items()]}
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode(item, held) for item in value]}
    return {"handle": held(value)}


def decode(message: Any, holding: Callable[[int], Any]) -> Any:
    """The value that a message has. `holding` finds what a number stands for."""
    if type(message) is not dict:
        return message
    ((kind, given),) = message.items()
    match kind:
        case "int":
            return int(given, 16)
        case "complex":
            return complex(*given)
        case "bytes":
            return bytes.fromhex(given)
        case "dict":
            return {decode(name, holding): decode(item, holding) for name, item in given}
        case "list" | "tuple" | "set" | "frozenset":
            return vars(builtins)[kind](decode(item, holding) for item in given)
        case "handle":
            return holding(given)
    raise ValueError("no such kind of data")


# The side of the program


def serve(program: str, requests: int, replies: int) -> None:
    """Run a program, then do what its tests ask of it."""
    objects: list[Any] = []

    def held(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    names: dict[str, Any] = {"__name__": "program", "__builtins__": builtins}
    exec(compile(program, "<program>", "exec"), names)  # noqa: S102  (that is what the sandbox is for)
    defined = {name: value for name, value in names.items() if not name.startswith("__")}
    send(replies, {name: encode(value, held) for name, value in defined.items()})
    while True:
        action, given, named = receive(requests)
        try:
            values = [decode(one, objects.__getitem__) for one in given]
            keywords = {name: decode(one, objects.__getitem__) for name, one in named.items()}
            result = _action(action)(*values, **keywords)
            # What a program changes in place, it changes in a copy: so the arguments go back as well.
            send(replies, [encode(result, held), [encode(one, held) for one in values[1:]]])
        except Exception as error:  # noqa: BLE001  (the program may raise anything)
            send(replies, {"raised": type(error).__name__, "says": str(error)[:1000]})


def _action(name: str) -> Callable[..., Any]:
    if name == "call":
        return lambda function, *values, **keywords: function(*values, **keywords)
    if name == "plain":
        return _plain
    found: Callable[..., Any] = vars(operator).get(name) or vars(builtins)[name]
    return found


def _plain(value: Any) -> Any:
    """The data of an object whose class is made from a class of plain data, such as a Counter's dict."""
    kinds: tuple[Any, ...] = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(dict.items(value)) if kind is dict else kind(value)
    raise TypeError("not plain data")


# The side of the tests


class ProgramError(Exception):
    """What a program raised that is no error of Python's own."""


class Handle:
    """An object of the program's, of which the tests know nothing but what it answers."""

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        self.__dict__.update(_ask=ask, _number=number)

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        """What the object returns when it is called."""
        return self._ask("call", self, *values, **keywords)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Handle):
            return self._ask("eq", self, other) is True
        try:
            data = self._ask("plain", self)
        except TypeError:
            return False
        return not isinstance(data, Handle) and bool(data == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._number)

    def __bool__(self) -> bool:
        return self._ask("truth", self) is True

    def __len__(self) -> int:
        return int(self._ask("len", self))

    def __str__(self) -> str:
        return str(self._ask("str", self))

    def __repr__(self) -> str:
        return str(self._ask("repr", self))

    def __iter__(self) -> Iterator[Any]:
        iterator = self._ask("iter", self)
        while True:
            try:
                yield self._ask("next", iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __contains__(self, item: Any) -> bool:
        return any(item is one or item == one for one in self)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Handle) and self._ask("isinstance", instance, self) is True


def _asking(action: str) -> Callable[..., Any]:
    return lambda self, *values: self._ask(action, self, *values)


def _comparing(action: str) -> Callable[..., Any]:
    def compare(self: Handle, other: Any) -> bool:
        if isinstance(other, Handle):
            return self._ask(action, self, other) is True
        data = self._ask("plain", self)
        if isinstance(data, Handle):
            raise TypeError("an object of the program's is compared with plain data")
        return bool(vars(operator)[action](data, other))

    return compare


for _name in ("getitem", "setitem", "delitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    setattr(Handle, f"__{_name}__", _asking(_name))
for _name in ("neg", "pos", "abs", "invert", "and", "or", "xor", "lshift", "rshift"):
    setattr(Handle, f"__{_name}__", _asking(_name if _name not in ("and", "or") else f"{_name}_"))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Handle, f"__{_name}__", _comparing(_name))


class Tests:
    """The tests of one program, which is asked for what they use of it."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = replies

    def run(self, tests: list[str], verdicts: int) -> None:
        """Run the tests, and write a 1 or a 0 for each."""
        # What the tests call by the names of Python's own stays Python's own, whatever the program makes of it.
        taken = {*vars(builtins), "__builtins__", "__name__"}
        defined = receive(self.replies).items()
        names = {name: self.decoded(value) for name, value in defined if name not in taken} | {"__name__": "tests"}
        for test in tests:
            try:
                exec(compile(test, "<test>", "exec"), names)  # noqa: S102
                passed = b"1"
            except Ended:
                return
            except BaseException:  # noqa: BLE001  (a test that raises anything has failed)
                passed = b"0"
            os.write(verdicts, passed)

    def decoded(self, message: Any) -> Any:
        """The value that a message has."""
        return decode(message, lambda number: Handle(self.ask, number))

    def ask(self, action: str, *values: Any, **keywords: Any) -> Any:
        """Have the program do something."""
        given = [encode(value, self.number) for value in values]
        send(self.requests, [action, given, {name: encode(value, self.number) for name, value in keywords.items()}])
        reply = receive(self.replies)
        if isinstance(reply, dict):
            kind = vars(builtins).get(str(reply["raised"]))
            # The end of an iteration that is none would end one of the test's own, as if all were well.
            is_end = kind is StopIteration and action != "next"
            if is_end or not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = ProgramError
            raise kind(str(reply["says"]))
        result, after = reply
        for value, changed in zip(values[1:], after, strict=True):
            _change(value, self.decoded(changed))
        return self.decoded(result)

    @staticmethod
    def number(value: Any) -> int:
        """The number of an object of the program's; tests have no others to give."""
        if not isinstance(value, Handle):
            raise TypeError(f"a test gives the program a value of type {type(value).__name__}")
        return int(value.__dict__["_number"])


def _change(value: Any, changed: Any) -> None:
    """Let an argument become what the program made of it."""
    if type(value) is not type(changed):
        return
    if isinstance(value, list):
        value[:] = changed
    elif isinstance(value, dict | set):
        value.clear()
        value.update(changed)


def main() -> None:
    """Read the task from standard input, give up all rights, and carry it out."""
    task = json.load(sys.stdin.buffer)
    end_with(task["parent"])
    nothing = os.open(os.devnull, os.O_RDWR)
    verdicts = os.dup(1)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    lock_down(task["limits"], task["readable"], b64decode(task["filter"]))
    if "program" in task:
        os.close(verdicts)
        serve(task["program"], task["requests"], task["replies"])
    else:
        Tests(task["requests"], task["replies"]).run(task["tests"], verdicts)


if __name__ == "__main__":
    main()
