"""Computation of a module's forward, read from its source: a list of operations, free of names.

Models of one kind differ in names and order of parameters, in variables that hold a value for a line, in helper
methods, in annotations and comments, and compute the same. So a forward is read as the sequence of the operations that
it performs. `hidden_states = self.norm(x)` and `return self.input_layernorm(hidden_states)` are both

    v0 = self.0(p0)

where `self.0` is the attribute that is used first, `p0` the parameter that is used first, and `v0` what the first
operation gives. Two forwards with equal operations compute the same, each with the attributes that stand in
`Structure.attributes` in the same order.

Methods of the module and functions of its file are read through, torch's are not. Branches on a plain setting of the
module (`if self.with_scale`) are decided by its value; others stay branches. Keywords that hand on a parameter behind
the first by its own name are all written `**`, and told in `Structure.passes`: layers differ in what they hand on to
their attention.
"""

import ast
import builtins
import copy
import functools
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, cast

from torch import nn

MAX_DEPTH = 6
"""Maximum depth of function calls to read through."""


class Unreadable(Exception):
    """A forward whose operations cannot be told from its source, with the reason."""


@dataclass(frozen=True)
class Structure:
    """Computation of a forward.

    Attributes:
        operations: One line each.
        attributes: Names of the module's attributes, in the order of first use.
        parameters: Names of the forward's parameters, in the order of first use; without those that are handed on.
        passes: For each call that hands on parameters by their own names: these names, and `**` for all others.
    """

    operations: tuple[str, ...]
    attributes: tuple[str, ...]
    parameters: tuple[str, ...]
    passes: tuple[tuple[str, ...], ...]

    def bind(self, form: "Structure") -> dict[str, str] | None:
        """The module's name of each attribute of a form that computes the same; None where it does not."""
        if self.operations != form.operations:
            return None
        return dict(zip(form.attributes, self.attributes, strict=True))


def structure_of(module: nn.Module) -> Structure | None:
    """Return the computation of a module; None where it cannot be read."""
    settings = tuple((name, value) for name, value in vars(module).items() if _is_setting(name, value))
    return _structure(cast(Any, type(module)), settings)


@functools.cache
def _structure(owner: type[nn.Module], settings: tuple[tuple[str, Any], ...]) -> Structure | None:
    try:
        return read_structure(owner.forward, owner, dict(settings))
    except Unreadable:
        return None


def read_structure(
    forward: Callable[..., Any], owner: type[nn.Module] | None = None, settings: Mapping[str, Any] | None = None
) -> Structure:
    """Read the computation of a forward.

    Args:
        forward: The function, whose first parameter is the module.
        owner: Class of the module, whose methods are read through.
        settings: Attributes of the module that do not change and decide branches.

    Raises:
        Unreadable: Its source is not to be had, or holds what is not understood here.
    """
    function = inspect.unwrap(forward)
    return _read(_source(function), function.__globals__, _Reader(owner, settings or {}))


def parse_structure(source: str, names: Mapping[str, Any]) -> Structure:
    """Read the computation of a forward that is given as text, with the names that it uses."""
    return _read(_definition(source), names, _Reader(None, {}))


def _read(function: ast.FunctionDef, names: Mapping[str, Any], reader: "_Reader") -> Structure:
    reader.read_outermost(function, names)
    return Structure(tuple(reader.operations), tuple(reader.attributes), tuple(reader.parameters), tuple(reader.passes))


def _is_setting(name: str, held: Any) -> bool:
    return (held is None or isinstance(held, bool | str)) and name != "training" and not name.startswith("_")


@functools.cache
def _source(function: Callable[..., Any]) -> ast.FunctionDef:
    try:
        return _definition(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise Unreadable("its source is not available") from error


def _definition(source: str) -> ast.FunctionDef:
    tree = ast.parse(source).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise Unreadable("its forward is not a function")
    return tree


class _Tuple(str):
    """A word for a tuple that is written out, with the words of its parts."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, parts: list[str]) -> "_Tuple":
        word = cls(f"({', '.join(parts)},)")
        word.parts = tuple(parts)
        return word

    @property
    def is_plain(self) -> bool:
        """True if none of its parts stands for several."""
        return not any(part.startswith("*") for part in self.parts)


class _Reader:
    """Follows a forward statement by statement. A value is written as a word: `p0`, `v3`, `self.1`, or a constant."""

    def __init__(self, owner: type[nn.Module] | None, settings: Mapping[str, Any]) -> None:
        self.owner = owner
        self.settings = settings
        self.operations: list[str] = []
        self.attributes: dict[str, int] = {}
        self.parameters: dict[str, int] = {}
        self.passes: list[tuple[str, ...]] = []
        self.own: frozenset[str] = frozenset()
        self.first = ""
        self.returned = ""
        self.names: dict[str, str] = {}
        self.globals: Mapping[str, Any] = {}
        self.itself = ""
        self.depth = 0

    def read_outermost(self, function: ast.FunctionDef, names: Mapping[str, Any]) -> None:
        arguments = function.args
        parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        self.itself, self.globals = parameters[0], names
        self.own, self.first = frozenset(parameters[1:]), parameters[1] if len(parameters) > 1 else ""
        if arguments.vararg is not None:
            self.names[arguments.vararg.arg] = "*args"
        if arguments.kwarg is not None:
            self.names[arguments.kwarg.arg] = "**"
        self.statements(function.body)

    def emit(self, operation: str) -> str:
        self.operations.append(f"v{len(self.operations)} = {operation}")
        return f"v{len(self.operations) - 1}"

    # Statements.

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)
            if isinstance(statement, ast.Return):
                return

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Expr(value=value):
                self.value(value)
            case ast.Assign(targets=targets, value=value):
                result = self.value(value)
                for target in targets:
                    self.assign(target, result)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, self.value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self.assign(target, self.emit(f"in place {_word(op)}({self.value(target)}, {self.value(value)})"))
            case ast.Return(value=value):
                self.returned = "None" if value is None else self.value(value)
                self.operations.append(f"return {self.returned}")
            case ast.If(test=test, body=body, orelse=orelse):
                self.branch(test, body, orelse)
            case _:
                raise Unreadable(f"unsupported statement in its forward: {type(node).__name__.lower()}")

    def assign(self, target: ast.expr, value: str) -> None:
        match target:
            case ast.Name(id=name):
                self.names[name] = value
            case ast.Tuple(elts=parts):
                for index, part in enumerate(parts):
                    self.assign(part, _part(value, index))
            case ast.Subscript(value=whole, slice=index):
                self.emit(f"setitem({self.value(whole)}, {self.value(index)}, {value})")
            case _:
                raise Unreadable("its forward sets attributes")

    def branch(self, test: ast.expr, body: list[ast.stmt], orelse: list[ast.stmt]) -> None:
        decided = self.decide(test)
        if decided is not None:
            self.statements(body if decided else orelse)
            return
        self.operations.append(f"if {self.value(test)}")
        before = dict(self.names)
        self.statements(body)
        first, self.names = self.names, before
        self.operations.append("else")
        self.statements(orelse)
        self.operations.append("end")
        second = self.names
        self.names = {name: self.joined(name, first, second) for name in dict.fromkeys([*first, *second])}

    def joined(self, name: str, first: dict[str, str], second: dict[str, str]) -> str:
        """Return the value of a name behind a branch."""
        if name in first and first.get(name) == second.get(name):
            return first[name]
        unset = self.parameter(name) if self.depth == 0 and name in self.own else "unset"
        return self.emit(f"either({first.get(name, unset)}, {second.get(name, unset)})")

    def decide(self, test: ast.expr) -> bool | None:
        """Evaluate a test on plain settings of the module; None where it depends on more."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.decide(operand)
                return None if inner is None else not inner
            case ast.Attribute():
                is_setting, setting = self.setting(test)
                return bool(setting) if is_setting else None
            case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=constant)]):
                is_setting, setting = self.setting(left)
                if is_setting and isinstance(op, ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
                    return bool(setting == constant) == isinstance(op, ast.Eq | ast.Is)
        return None

    def setting(self, node: ast.expr) -> tuple[bool, Any]:
        """Return whether an expression is a plain setting of the module, and its value."""
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == self.itself:
                return name in self.settings, self.settings.get(name)
        return False, None

    # Expressions.

    def value(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=constant):
                return repr(constant)
            case ast.Name(id=name):
                return self.name(name)
            case ast.Attribute():
                return self.attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.BinOp(left=first, op=op, right=right):
                return self.emit(f"{_word(op)}({self.value(first)}, {self.value(right)})")
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=constant)):
                return f"-{constant!r}"
            case ast.UnaryOp(op=op, operand=operand):
                return self.emit(f"{_word(op)}({self.value(operand)})")
            case ast.Compare(left=first, ops=ops, comparators=comparators):
                words = [
                    self.value(first),
                    *(f"{_word(op)} {self.value(o)}" for op, o in zip(ops, comparators, strict=True)),
                ]
                return self.emit(f"compare({' '.join(words)})")
            case ast.BoolOp(op=op, values=values):
                return self.emit(f"{_word(op)}({', '.join(map(self.value, values))})")
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return _Tuple.of([self.value(part) for part in parts])
            case ast.Starred(value=value):
                return f"*{self.value(value)}"
            case ast.Subscript(value=whole, slice=ast.Constant(value=int(index))):
                return _part(self.value(whole), index)
            case ast.Subscript(value=whole, slice=index):
                return f"{self.value(whole)}[{self.value(index)}]"
            case ast.Slice(lower=lower, upper=upper, step=step):
                return ":".join("" if part is None else self.value(part) for part in (lower, upper, step))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                decided = self.decide(test)
                if decided is not None:
                    return self.value(body if decided else orelse)
                return self.emit(f"choose({self.value(test)}, {self.value(body)}, {self.value(orelse)})")
        raise Unreadable(f"unsupported expression in its forward: {type(node).__name__.lower()}")

    def name(self, name: str) -> str:
        if self.is_itself(name):
            return "self"
        if name in self.names:
            return self.names[name]
        if self.depth == 0 and name in self.own:
            return self.parameter(name)
        return self.known(self.look_up(name), name)

    def parameter(self, name: str) -> str:
        return f"p{self.parameters.setdefault(name, len(self.parameters))}"

    def look_up(self, name: str) -> Any:
        return self.globals.get(name, vars(builtins).get(name))

    def known(self, held: Any, name: str) -> str:
        """A word for what a name outside the forward stands for, the same wherever it comes from."""
        if isinstance(held, ModuleType):
            return held.__name__
        if callable(held) and inspect.getmodule(held) is not None and isinstance(held, FunctionType | type):
            return f"{held.__module__}.{held.__qualname__}" if held.__module__.startswith("torch") else name
        return name

    def attribute(self, node: ast.Attribute) -> str:
        if self.is_own(node):
            if node.attr == "training":
                return "self.training"
            return f"self.{self.attributes.setdefault(node.attr, len(self.attributes))}"
        target = self.held(node)
        if target is not None:
            return self.known(target, ast.unparse(node))
        return f"{self.value(node.value)}.{node.attr}"

    def is_outside(self, name: str) -> bool:
        return name not in self.names and name != self.itself and not (self.depth == 0 and name in self.own)

    def held(self, node: ast.expr) -> Any:
        """Resolve a dotted name of modules, such as `nn.functional.silu`; None where that fails."""
        match node:
            case ast.Name(id=name) if self.is_outside(name):
                return self.look_up(name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.held(value)
                return vars(owner).get(attr) if isinstance(owner, ModuleType) else None
        return None

    def call(self, node: ast.Call) -> str:
        function = self.read_through(node)
        if function is not None:
            try:
                return self.inlined(node, *function)
            except Unreadable:
                pass
        called = None if self.is_own(node.func) else self.callee(node.func)
        arguments = [self.value(argument) for argument in node.args]
        named: list[str] = []
        passed: list[str] = []
        for keyword in node.keywords:
            if keyword.arg is None:
                value = self.value(keyword.value)
                (passed if value == "**" else named).append(value if value == "**" else f"**{value}")
            elif self.is_handed_on(keyword):
                passed.append(keyword.arg)
            else:
                named.append(f"{keyword.arg}={self.value(keyword.value)}")
        if passed:
            self.passes.append(tuple(sorted(passed)))
        # Behind its arguments, which may use attributes before it does.
        called = called or self.attribute(cast(ast.Attribute, node.func))
        words = [*arguments, *sorted(named), *(["**"] if passed else [])]
        return self.emit(f"{called}({', '.join(words)})")

    def is_own(self, node: ast.expr) -> bool:
        """Return whether an expression is an attribute of the module."""
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and self.is_itself(node.value.id)

    def is_itself(self, name: str) -> bool:
        return name == self.itself and name not in self.names

    def is_handed_on(self, keyword: ast.keyword) -> bool:
        if self.depth > 0 or not isinstance(keyword.value, ast.Name) or keyword.value.id != keyword.arg:
            return False
        return keyword.arg in self.own - {self.first} and keyword.arg not in self.names

    def callee(self, node: ast.expr) -> str:
        if isinstance(node, ast.Attribute) and self.held(node) is None:
            return f"{self.value(node.value)}.{node.attr}"
        return self.value(node)

    def read_through(self, node: ast.Call) -> tuple[FunctionType, bool] | None:
        """The function of our own side that a call goes to, and whether it is a method of the module."""
        match node.func:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (
                self.owner is not None and owner == self.itself and owner not in self.names
            ):
                method = inspect.getattr_static(self.owner, name, None)
                return (method, True) if isinstance(method, FunctionType) else None
            case ast.Name(id=name) if self.is_outside(name):
                function = self.look_up(name)
                if isinstance(function, FunctionType) and not function.__module__.startswith("torch"):
                    return function, False
        return None

    def inlined(self, node: ast.Call, function: FunctionType, is_method: bool) -> str:
        """Return the result of a call by inlining the called function. Nothing has changed where this raises."""
        if self.depth >= MAX_DEPTH or any(k.arg is None for k in node.keywords):
            raise Unreadable("calls nested too deeply, or with unknown arguments")
        function = inspect.unwrap(function)
        source = _source(function)
        outside = self.names, self.globals, self.itself, self.depth
        before = {name: copy.copy(value) for name, value in vars(self).items()}
        try:
            names = self.arguments(node, function, is_method)
            start = len(self.operations)
            self.itself = source.args.args[0].arg if is_method else ""
            self.names, self.globals, self.depth = names, function.__globals__, self.depth + 1
            self.statements(source.body)
            returned = [line for line in self.operations[start:] if line.startswith("return ")]
            if len(returned) != 1 or self.operations[-1] != returned[0]:
                raise Unreadable("it returns from a branch")
            self.names, self.globals, self.itself, self.depth = outside
            self.operations.pop()
            return self.returned
        except Unreadable:
            vars(self).update(before)
            raise

    def arguments(self, node: ast.Call, function: FunctionType, is_method: bool) -> dict[str, str]:
        positional = ["self"] if is_method else []
        positional += [self.value(argument) for argument in node.args]
        named = {k.arg: self.value(k.value) for k in node.keywords if k.arg is not None}
        try:
            bound = inspect.signature(function).bind(*positional, **named)
        except TypeError as error:
            raise Unreadable("its arguments do not match") from error
        values: dict[str, str] = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                if name in bound.arguments:
                    raise Unreadable("it accepts arbitrary arguments")
                continue
            values[name] = bound.arguments[name] if name in bound.arguments else repr(parameter.default)
        if is_method:
            del values[next(iter(values))]
        return values


def _part(value: str, index: int) -> str:
    if isinstance(value, _Tuple) and value.is_plain and -len(value.parts) <= index < len(value.parts):
        return value.parts[index]
    return f"{value}[{index}]"


def _word(op: ast.AST) -> str:
    return type(op).__name__.lower()
