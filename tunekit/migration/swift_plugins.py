"""Reward classes of an ms-swift plugin -> a Python file of functions that a recipe names.

ms-swift imports the files of `external_plugins`, which register classes by name (`orms['my_reward'] = MyReward`) and
need ms-swift to be imported. Here they are read, not run: the classes, and what they use of their file, are copied as
they stand, next to a function for each that TRL's trainer can call. How rewards are made and called was read in
ms-swift 4.6.0 (`rl_core/grpo_algorithm.py`, `rewards/orm.py`).
"""

import ast
import builtins
import keyword
import re
import symtable
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import TypeIs

from tunekit.migration.draft import UnfitError

_BASE = "ORM"
_ROLLOUT = {
    "messages", "images", "videos", "audios", "tools", "objects", "prompt_id", "request_id", "finish_reason",
    "is_truncated", "rollout_infos", "response_token_ids", "trajectory_inputs",
}  # fmt: skip
"""Arguments of rewards in ms-swift besides the columns of the rows."""

_STAND_IN = '''class ORM:
    """In place of the base class of ms-swift's rewards."""

    def __init__(self, args=None, **kwargs):
        pass'''
_BASE_CLASS = ast.parse(_STAND_IN).body[0]

_TEXTS = '''def _texts(completions):
    """The answers as texts, as ms-swift passes them."""
    return [answer if isinstance(answer, str) else answer[-1]["content"] for answer in completions]'''


@dataclass(frozen=True)
class Plugin:
    """A file of ms-swift's `external_plugins`."""

    path: Path
    text: str
    body: tuple[ast.stmt, ...]

    @property
    def rewards(self) -> dict[str, str]:
        """Names that the file registers for rewards, with those of their classes."""
        return dict(pair for statement in self.body for pair in _registered(statement))

    @property
    def only_registers(self) -> bool:
        """True if nothing in the file has an effect but by a name that a key must ask for."""
        return bool(self.rewards) and not any(
            isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant) for node in self.body
        )

    @property
    def _definitions(self) -> dict[str, ast.stmt]:
        """Statements of the file by the names that they bind; the last one counts."""
        definitions = {name: statement for statement in self.body for name in _bound(statement)}
        if _BASE not in definitions or _is_of_swift(definitions[_BASE]):
            definitions[_BASE] = _BASE_CLASS
        return definitions

    def columns_of(self, reward: str) -> set[str]:
        """Names of the columns that a reward reads.

        Raises:
            UnfitError: It cannot be copied.
        """
        needed = self._needed(reward)
        return _read_names(self._call(reward, needed), needed)

    def module(self, names: Sequence[str], columns: Mapping[str, str]) -> str:
        """Return a Python module with a function for each of the rewards.

        Args:
            names: Names of rewards that the file registers.
            columns: Columns of the rows by the names that the rewards read them by, where these differ.

        Raises:
            UnfitError: A class needs ms-swift, or a part of a rollout that TRL's trainer does not pass.
        """
        needed: set[ast.stmt] = set()
        functions = []
        for name in names:
            of_class = self._needed(name)
            needed |= of_class
            functions.append(self._function(name, of_class, columns))
        statements = [statement for statement in (_BASE_CLASS, *self.body) if statement in needed]
        head = [f'"""Rewards of {self.path.name}, a plugin of ms-swift, as functions of TRL\'s signature."""']
        head += [self._source(node) for node in statements if _is_future(node)]
        imports = [self._source(node) for node in statements if _is_import(node) and not _is_future(node)]
        copied = [self._source(node) for node in statements if not _is_import(node)]
        parts = ["\n".join(imports)] if imports else []
        return "\n\n\n".join(["\n\n".join([*head, *parts]), *copied, _TEXTS, *functions]) + "\n"

    def _needed(self, reward: str) -> set[ast.stmt]:
        """The statements of the file that a reward's class is made of."""
        definitions, needed = self._definitions, {node for node in self.body if _is_future(node)}
        wanted = [self.rewards[reward]]
        while wanted:
            name = wanted.pop()
            statement = definitions.get(name)
            if statement is None:
                if name not in dir(builtins) and not name.startswith("__"):
                    raise UnfitError(f"{reward}: {self.path} does not define {name}")
                continue
            if _is_of_swift(statement):
                raise UnfitError(f"{reward}: needs {name} of ms-swift ({self.path}:{statement.lineno})")
            if _is_import(statement) and self._is_near(statement):
                raise UnfitError(f"{reward}: needs {name} of a file next to {self.path} (line {statement.lineno})")
            if statement not in needed:
                needed.add(statement)
                wanted += _globals_of(self._source(statement), self.path)
        return needed

    def _function(self, reward: str, needed: set[ast.stmt], columns: Mapping[str, str]) -> str:
        """The source of a function that calls an object of the class."""
        if not reward.isidentifier() or keyword.iskeyword(reward):
            raise UnfitError(f"{reward}: is no name of a function; rename it in {self.path}")
        name, call = self.rewards[reward], self._call(reward, needed)
        for of_class in _classes(needed).values():
            _check_arguments(reward, of_class)
        read_names = _read_names(call, needed)
        missing = sorted(_ROLLOUT & read_names)
        if missing:
            raise UnfitError(f"{reward}: reads {', '.join(missing)}, which TRL's trainer does not pass")
        # The others are among the further columns, by the same names.
        named = {*_parameters(call, skip=2, required=True), *columns}
        column_of = {read: columns.get(read, read) for read in sorted(read_names & named)}
        for column in column_of.values():
            if not column.isidentifier() or keyword.iskeyword(column):
                raise UnfitError(f"{reward}: the column {column!r} is no name of a parameter; rename it in the rows")
        parameters = "".join(f", {column}" for column in dict.fromkeys(column_of.values()))
        passed = "".join(f", {read}={column}" for read, column in column_of.items())
        return (
            f"_{reward} = {name}()\n\n\n"
            f"def {reward}(completions{parameters}, **columns):\n"
            f'    """Rewards of {name}."""\n'
            f"    return _{reward}(_texts(completions){passed}, **columns)"
        )

    def _call(self, reward: str, needed: set[ast.stmt]) -> ast.FunctionDef:
        """The method by which a reward is called."""
        name, classes = self.rewards[reward], _classes(needed)
        if name not in classes:
            raise UnfitError(f"{reward}: {name} is not a class of {self.path}")
        call = _method(classes, name, "__call__")
        if call is None:
            raise UnfitError(f"{reward}: {name} has no __call__")
        if isinstance(call, ast.AsyncFunctionDef):
            raise UnfitError(f"{reward}: asynchronous rewards are unsupported")
        return call

    def _is_near(self, statement: ast.Import | ast.ImportFrom) -> bool:
        """Return whether an import is of a file next to the plugin, which may not be importable from elsewhere."""
        if isinstance(statement, ast.ImportFrom):
            if statement.level:
                return True
            modules = [str(statement.module)]
        else:
            modules = [alias.name for alias in statement.names]
        folder = self.path.resolve().parent
        places = [folder / module.partition(".")[0] for module in modules] if folder != Path.cwd() else []
        return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)

    def _source(self, statement: ast.stmt) -> str:
        """The text of a statement, with its decorators."""
        if statement is _BASE_CLASS:
            return _STAND_IN
        first = statement.lineno
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min([first, *(decorator.lineno for decorator in statement.decorator_list)])
        return "\n".join(self.text.split("\n")[first - 1 : statement.end_lineno])


def read_plugin(path: str) -> Plugin:
    """Read a plugin.

    Raises:
        UnfitError: It is not there, or is no Python.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        body = ast.parse(text).body
    except OSError:
        raise UnfitError(f"no file '{path}': run migrate where ms-swift ran") from None
    except (SyntaxError, ValueError) as error:
        raise UnfitError(f"'{path}' is not Python: {error}") from None
    return Plugin(Path(path), text, tuple(body))


def module_name(path: str, place: int) -> str:
    """Return the name of a module of rewards, of a plugin by its place among several, for a configuration file."""
    name = re.sub(r"\W", "_", Path(path).name)
    return f"{'_' if name[:1].isdigit() else ''}{name}_rewards{place or ''}"


def _registered(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """A reward that a statement registers: `orms['name'] = Class`."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Name):
        return
    for target in statement.targets:
        if (
            isinstance(target, ast.Subscript)
            and isinstance(target.value, ast.Name)
            and target.value.id == "orms"
            and isinstance(target.slice, ast.Constant)
            and isinstance(target.slice.value, str)
        ):
            yield target.slice.value, statement.value.id


def _bound(statement: ast.AST) -> Iterator[str]:
    """Names that a statement binds in its module: of an import, a definition, or an assignment, also in a branch."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
        return
    for part in ast.iter_child_nodes(statement):
        if isinstance(part, ast.stmt | ast.excepthandler | ast.withitem):
            yield from _bound(part)
        else:
            yield from (
                node.id for node in ast.walk(part) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )


def _is_of_swift(statement: ast.stmt) -> bool:
    """Return whether a statement imports from ms-swift."""
    if isinstance(statement, ast.ImportFrom):
        return statement.level == 0 and str(statement.module).partition(".")[0] == "swift"
    return isinstance(statement, ast.Import) and any(
        alias.name.partition(".")[0] == "swift" for alias in statement.names
    )


def _is_import(statement: ast.stmt) -> TypeIs[ast.Import | ast.ImportFrom]:
    return isinstance(statement, ast.Import | ast.ImportFrom)


def _is_future(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _globals_of(source: str, path: Path) -> set[str]:
    """Names of the module that a statement of it reads."""
    names: set[str] = set()
    tables = [symtable.symtable(source, str(path), "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_module = table.get_type() == "module"
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (is_module or symbol.is_global())
        }
    return names


def _method(
    classes: Mapping[str, ast.ClassDef], name: str, method: str
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """A method of a class, or of the nearest of its bases in the file."""
    own = classes.get(name)
    if own is None:
        return None
    for node in own.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == method:
            return node
    inherited = (_method(classes, ast.unparse(base), method) for base in own.bases)
    return next((node for node in inherited if node is not None), None)


def _classes(statements: Iterable[ast.stmt]) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in statements if isinstance(node, ast.ClassDef)}


def _read_names(call: ast.FunctionDef, needed: set[ast.stmt]) -> set[str]:
    """Names by which a reward reads more than the answers."""
    return {*_parameters(call, skip=2), *_read_by_key(needed)} - {"trainer_state"}


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, *, skip: int, required: bool = False) -> list[str]:
    """Names of the parameters behind the first ones, or of those without a default."""
    arguments = function.args
    by_place = [*arguments.posonlyargs, *arguments.args]
    num_defaults = len(arguments.defaults)
    defaults = [*[None] * (len(by_place) - num_defaults), *arguments.defaults, *arguments.kw_defaults]
    pairs = zip([*by_place, *arguments.kwonlyargs], defaults, strict=True)
    return [parameter.arg for parameter, default in [*pairs][skip:] if default is None or not required]


def _check_arguments(reward: str, of_class: ast.ClassDef) -> None:
    """Refuse a class that reads the arguments of ms-swift's run, or cannot be made without any.

    Raises:
        UnfitError: It does.
    """
    for node in ast.walk(of_class):
        if isinstance(node, ast.Attribute) and node.attr == "args" and ast.unparse(node.value) == "self":
            raise UnfitError(f"{reward}: reads the arguments of ms-swift's run (self.args, line {node.lineno})")
    init = _method({of_class.name: of_class}, of_class.name, "__init__")
    if init is None:
        return
    names = set(_parameters(init, skip=1))
    if init.args.kwarg is not None:
        names.add(init.args.kwarg.arg)
    above = [node for node in ast.walk(init) if isinstance(node, ast.Call) and _is_init_of_base(node.func)]
    handed_on = {name for call in above for name in ast.walk(call)}
    for node in ast.walk(init):
        if isinstance(node, ast.Name) and node.id in names and node not in handed_on:
            raise UnfitError(f"{reward}: reads the arguments of ms-swift's run ({node.id}, line {node.lineno})")
    if _parameters(init, skip=1, required=True):
        raise UnfitError(f"{reward}: {of_class.name} cannot be made without arguments (line {init.lineno})")


def _is_init_of_base(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "__init__"
        and isinstance(function.value, ast.Call)
        and ast.unparse(function.value.func) == "super"
    )


def _read_by_key(statements: set[ast.stmt]) -> Iterator[str]:
    """Keys by which functions read their further arguments: `kwargs["solution"]`, `kwargs.get("solution")`."""
    for statement in statements:
        for function in ast.walk(statement):
            if isinstance(function, ast.FunctionDef) and function.args.kwarg is not None:
                mapping = function.args.kwarg.arg
                for node in ast.walk(function):
                    match node:
                        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                            if name == mapping:
                                yield key
                        case ast.Call(
                            func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop"),
                            args=[ast.Constant(value=str(key)), *_],
                        ):
                            if name == mapping:
                                yield key
