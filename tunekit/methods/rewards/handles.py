"""The side of the tests in the sandbox: what they see of a program, and what they ask it (see `sandboxed`)."""

import ast
import builtins
import importlib
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from tunekit.methods.rewards.sandboxed import (
    MAX_REASON,
    MAX_VALUES,
    PLAIN,
    Ended,
    Refused,
    decode,
    encode,
    receive,
    send,
)


class ProgramError(Exception):
    """Error of a program that is none of Python's own."""


OPAQUE: Any = object()
"""Stands for the data of an object that is made of none."""

METHODS = frozenset(name for kind in PLAIN for name in dir(kind) if callable(getattr(kind, name)))
"""Names of the methods of Python's own data."""


class Handle:
    """An object of the program's, of which the tests know nothing but what it answers.

    The program answers calls, attributes, `str` and iteration: none of these shows it what a test expects. Two things
    would let a program pass that computed nothing. They are refused, and the test that does them fails, whatever it
    catches:

    - Operators (`-`, `%`, `<`, `in`, `==` with plain data), and what else makes a number of it. An object of a class
      made from a class of plain data, as a named tuple is, stands for these data there.
    - Methods that Python's own data have too (`issubset`, `startswith`, `count`).

    Where a test makes the object itself, by calling a class, its class is what is tested, and more is the program's to
    answer: all methods, `len`, `bool`, items, and operators with other objects of the program's or those that make
    another object (`Vector(1, 2) * 3`). What has a name with a capital is a class.
    """

    def __init__(self, tests: "Tests", number: int, label: str = "", *, built: bool = False) -> None:
        self.__dict__.update(_tests=tests, _number=number, _label=label, _built=built)

    def __call__(self, *values: Any, **keywords: Any) -> Any:
        """Return the result of calling the object."""
        result = _ask("call", self, *values, **keywords)
        if isinstance(result, Handle) and _is_class_name(self.__dict__["_label"]):
            return Handle(_tests_of(self), number_of(result), built=True)
        return result

    def __getattr__(self, name: str) -> Any:
        value = _ask("getattr", self, name)
        if not isinstance(value, Handle):
            return value
        if name not in METHODS or _is_own(self):
            return Handle(_tests_of(self), number_of(value), name)
        data = _data(self)
        if data is OPAQUE or name not in dir(data):
            raise _refusal(self, f"`{name}`")
        return getattr(data, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Handle):
            if number_of(self) == number_of(other):
                return True
            if _is_own(self) or _is_own(other) or _data(self) is OPAQUE or _data(other) is OPAQUE:
                return _ask("eq", self, other) is True
        data = _data(self)
        if data is OPAQUE and other is not None:
            raise _refusal(self, "`==`")
        return bool(data == _data(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        data = OPAQUE if _is_own(self) else _data(self)
        return hash((Handle, number_of(self)) if data is OPAQUE else data)

    def __bool__(self) -> bool:
        if _is_own(self):
            return _ask("truth", self) is True
        data = _data(self)
        if data is OPAQUE and _ask("always_true", self) is not True:
            raise _refusal(self, "`bool`")
        return data is OPAQUE or bool(data)

    def __len__(self) -> int:
        # A TypeError, for `list` looks for a length too, and does without.
        length = _ask("len", self) if _is_own(self) else None if _data(self) is OPAQUE else len(_data(self))
        if type(length) is not int:
            raise TypeError(_REFUSAL.format("`len`"))
        return length

    def __str__(self) -> str:
        return _text(self, "str")

    def __repr__(self) -> str:
        return _text(self, "repr")

    def __iter__(self) -> Iterator[Any]:
        data = OPAQUE if _is_own(self) else _data(self)
        if data is not OPAQUE:
            return iter(data)
        iterator = _ask("iter", self)
        return Values(iterator) if isinstance(iterator, Handle) else iter(iterator)

    def __next__(self) -> Any:
        _tests_of(self).count(self)
        return _ask("next", self)

    def __contains__(self, item: Any) -> bool:
        data = OPAQUE if _is_own(self) else _data(self)
        return item in (list(self) if data is OPAQUE else data)

    def __getitem__(self, key: Any) -> Any:
        return _ask("getitem", self, key) if _is_own(self) else _needed(self, "`[]`")[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not _is_own(self):
            raise _refusal(self, "`[]`")
        _ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        if not _is_own(self):
            raise _refusal(self, "`[]`")
        _ask("delitem", self, key)

    def __float__(self) -> float:
        return float(_needed(self, "`float`"))

    def __int__(self) -> int:
        return int(_needed(self, "`int`"))

    def __index__(self) -> int:
        return operator.index(_needed(self, "a number"))

    def __round__(self, *places: Any) -> Any:
        return round(_needed(self, "`round`"), *places)

    def __instancecheck__(self, instance: Any) -> bool:
        with suppress(TypeError):
            return _tests_of(self).ask("isinstance", (instance, self), {}) is True
        return False


def number_of(value: Handle) -> int:
    """The number of an object of the program's."""
    return int(value.__dict__["_number"])


def _given(value: Any) -> int | str:
    """Return a handle for a value that is not plain data: one of the program's own objects, or a type."""
    if isinstance(value, Handle):
        return number_of(value)
    if value in PLAIN:
        return str(value.__name__)
    raise TypeError(f"a test passes the program a value of type {type(value).__name__}")


def _tests_of(value: Handle) -> "Tests":
    tests: Tests = value.__dict__["_tests"]
    return tests


def _ask(action: str, value: Handle, *values: Any, **keywords: Any) -> Any:
    return _tests_of(value).ask(action, (value, *values), keywords)


def _is_class_name(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _is_own(value: Any) -> bool:
    """Return whether an object was made by the tests calling a class, or is the class itself or a constant of it."""
    return isinstance(value, Handle) and (value.__dict__["_built"] or _is_class_name(value.__dict__["_label"]))


_REFUSAL = "{} of the program's own objects is unsupported in a test; it needs plain data there"


def _refusal(value: Handle, what: str) -> Refused:
    return _tests_of(value).refusal(_REFUSAL.format(what))


def _data(value: Any) -> Any:
    """The plain data that an object is made of, the same until the tests ask the program for something else."""
    if not isinstance(value, Handle):
        return value
    tests, number = _tests_of(value), number_of(value)
    if number in tests.opaque:
        return OPAQUE
    if number not in tests.data:
        try:
            data = tests.answer("plain", (value,), {})
        except TypeError:
            data = OPAQUE
        if data is OPAQUE or isinstance(data, Handle):
            tests.opaque.add(number)
            return OPAQUE
        tests.data[number] = data
    return tests.data[number]


def _needed(value: Handle, what: str) -> Any:
    data = _data(value)
    if data is OPAQUE:
        raise _refusal(value, what)
    return data


def _text(value: Handle, action: str) -> str:
    text = _ask(action, value)
    if type(text) is not str:
        raise _refusal(value, f"`{action}`")
    return text


class Values:
    """An iterator of the program's, which gives its values one by one; `in` takes them all first."""

    def __init__(self, iterator: Handle) -> None:
        self.iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def __contains__(self, item: Any) -> bool:
        return item in list(self)


def _unary(action: str) -> Callable[[Handle], Any]:
    def apply(value: Handle) -> Any:
        return _ask(action, value) if _is_own(value) else vars(operator)[action](_needed(value, f"`{action}`"))

    return apply


def _binary(action: str, *, reflected: bool = False) -> Callable[[Handle, Any], Any]:
    def apply(value: Handle, other: Any) -> Any:
        pair = (other, value) if reflected else (value, other)
        is_own = _is_own(value) or _is_own(other)
        if is_own and isinstance(other, Handle):
            result = _tests_of(value).ask(action, pair, {})
            return Handle(_tests_of(value), number_of(result), built=True) if isinstance(result, Handle) else result
        data = [_data(operand) for operand in pair]
        if not any(operand is OPAQUE for operand in data):
            return vars(operator)[action](*data)
        result = _tests_of(value).ask(action, pair, {}) if is_own else None
        if _data(result) is not OPAQUE:
            raise _refusal(value, f"`{action}`")
        return result

    return apply


for _name in ("neg", "pos", "abs", "invert"):
    setattr(Handle, f"__{_name}__", _unary(_name))
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (*_ARITHMETIC, "and", "or", "xor", "lshift", "rshift"):
    _action_name = f"{_name}_" if _name in ("and", "or") else _name
    setattr(Handle, f"__{_name}__", _binary(_action_name))
    setattr(Handle, f"__r{_name}__", _binary(_action_name, reflected=True))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Handle, f"__{_name}__", _binary(_name))


class Tests:
    """The tests of one program, which is asked for what they use of it."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = replies
        self.refused = ""
        """Reason that the running test fails, even if it catches that."""

        self.data: dict[int, Any] = {}
        """Data of objects by their numbers, as far as they are known since the program was last asked."""

        self.opaque: set[int] = set()
        """Objects that are made of no plain data, and never will be."""

        self.taken: dict[int, int] = {}
        """Number of values that each iterator gave."""

    def run(self, tests: list[str], verdicts: int) -> None:
        """Run the tests, and write a line for each: why it fails, or an empty text."""
        names = self.names(receive(self.replies), tests)
        for test in tests:
            self.refused = reason = ""
            try:
                exec(compile(test, "<test>", "exec"), names)  # noqa: S102
            except BaseException as error:  # noqa: BLE001  (a test that raises anything has failed)
                says = [argument for argument in error.args if type(argument) is str]
                reason = ": ".join([type(error).__name__, *says])
            os.write(verdicts, json.dumps((self.refused or reason)[:MAX_REASON]).encode() + b"\n")

    def names(self, defined: dict[str, Any], tests: list[str]) -> dict[str, Any]:
        """Return the namespace of the tests. Names of Python's own builtins keep their meaning."""
        names: dict[str, Any] = {"__name__": "tests"}
        modules = _modules(tests)
        for name, value in defined.items():
            if name in modules:
                with suppress(ImportError):
                    names[name] = importlib.import_module(name)
            elif name not in vars(builtins) and not name.startswith("__"):
                names[name] = self.decoded(value, name)
        return names

    def decoded(self, message: Any, label: str = "") -> Any:
        """The value that a message has; an object gets a label."""
        try:
            value = decode(message, lambda number: Handle(self, int(number)))
        except Exception as error:  # noqa: BLE001  (a program may answer anything)
            raise self.refusal(f"the program's answer is not plain data: {error}") from None
        return Handle(self, number_of(value), label) if isinstance(value, Handle) else value

    def refusal(self, reason: str) -> Refused:
        """Have the test that runs fail for a reason."""
        self.refused = self.refused or reason
        return Refused(reason)

    def count(self, iterator: Handle) -> None:
        """Count a value that is taken from an iterator."""
        number = number_of(iterator)
        self.taken[number] = self.taken.get(number, 0) + 1
        if self.taken[number] > MAX_VALUES:
            raise self.refusal(f"a test reads more than {MAX_VALUES} values from an iterator")

    def ask(self, action: str, values: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Have the program do something, which may change every object."""
        self.data.clear()
        return self.answer(action, values, keywords)

    def answer(self, action: str, values: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Send an action to the program and return its reply."""
        encoded = [encode(value, _given) for value in values]
        named = {name: encode(value, _given) for name, value in keywords.items()}
        try:
            send(self.requests, [action, encoded, named])
            reply = receive(self.replies)
        except (Ended, OSError, json.JSONDecodeError) as error:
            self.refusal(str(error) if isinstance(error, Ended) else "the program has exited")
            raise Ended(self.refused) from None
        if isinstance(reply, dict):
            raise _raised(action, reply)
        if not isinstance(reply, list) or len(reply) != 2 or len(reply[1]) != len(values[1:]):
            raise self.refusal("the program's answer is malformed")
        for value, changed in zip(values[1:], reply[1], strict=True):
            _change(value, self.decoded(changed))
        return self.decoded(reply[0])


def _modules(tests: list[str]) -> set[str]:
    """Modules of the standard library that tests use as such, by their names: `math` in `math.isclose(...)`."""
    nodes: list[ast.AST] = []
    for test in tests:
        with suppress(SyntaxError, ValueError):
            nodes += ast.walk(ast.parse(test))
    used = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (used - called) & sys.stdlib_module_names


def _raised(action: str, reply: dict[str, Any]) -> Exception:
    """Return the program's exception, as the tests see it."""
    kind = vars(builtins).get(str(reply["raised"]))
    # The end of an iteration that is none would end one of the test's own, as if all were well.
    is_end = kind is StopIteration and action != "next"
    if is_end or not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = ProgramError
    return kind(str(reply["says"]))


def _change(value: Any, changed: Any) -> None:
    """Let an argument become what the program made of it."""
    if type(value) is not type(changed):
        return
    if isinstance(value, list):
        value[:] = changed
    elif isinstance(value, dict | set):
        value.clear()
        value.update(changed)
