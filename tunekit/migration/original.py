"""Another tool's configuration as it stands in its file: every key with its value and its line.

YAML and JSON are read as a recipe is, and nested keys become dotted ones (`datasets[0].path`). A shell script is
searched for the tool's command, whose `--key value` words are the keys, besides those of the file that it names.
Nothing of the other tool is imported or run.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tunekit.errors import RecipeError
from tunekit.recipe.reading import parse

_HINT = "pass a configuration of Axolotl, LLaMA-Factory, TRL, torchtune or ms-swift"
_COMMANDS = re.compile(
    r"(?:^|[/\s])(?:(swift|megatron)\s+(sft|rlhf|pt)|(trl)\s+(sft|dpo|kto|orpo|grpo|rloo|reward|distillation)"
    r"|(llamafactory-cli)\s+(train)|(trl|examples)/(?:scripts|experimental/\w+)/(\w+)\.py[\"']?"
    r"|(swift[/.]cli(?:[/.]_megatron)?)[/.](sft|rlhf|pt)(?:\.py)?)(?=\s|$)"
)
"""Commands whose arguments are a configuration: the tool's, and what it is to do."""

_ENDS = ("|", "||", "&", "&&", ";", ">", ">>", "2>&1")
"""Words of a shell that end the arguments of a command."""

_TOOLS = {
    "swift": "ms-swift",
    "megatron": "ms-swift",
    "trl": "trl",
    "llamafactory-cli": "llama-factory",
    "examples": "trl",
}

_SCRIPTS = {"sft_vlm": "sft", "dpo_vlm": "dpo", "reward_modeling": "reward"}
"""Scripts of TRL by the command whose arguments they take, where it has another name."""

_PROCESSES = re.compile(r"--(?:num[-_]processes|nproc[-_]per[-_]node)[ =](\d+)")
"""Number of processes that `accelerate launch` or torchrun starts."""

_ASSIGNMENT = re.compile(r"(?:^|\s)([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;]*)")
_QUOTIENT = re.compile(r"\$\((?:expr +|\( *)(\d+) */ *(\d+) *\)?\)")
_INDEX = re.compile(r"\[\d+\]")


class NoConfigurationError(RecipeError):
    """A file is no configuration of a known tool."""


@dataclass(frozen=True)
class Entry:
    """A key of a configuration."""

    key: str
    """Dotted, as in `datasets[0].path`."""
    value: Any
    line: int
    """From 1."""

    @property
    def pattern(self) -> str:
        """The key whatever its positions in lists: `datasets[].path`."""
        return _INDEX.sub("[]", self.key)


@dataclass
class Original:
    """A configuration as it was read."""

    path: str
    """The file, as the user named it."""
    values: dict[str, Any]
    """Its keys and values, nested as they are there."""
    entries: tuple[Entry, ...]
    tool: str | None = None
    """The tool, where the file says it: a shell script calls it by name."""
    task: str | None = None
    """Task of the tool's command, such as `sft`; None where the file does not name it."""
    program: str | None = None
    """The program of that command, where a tool has several: `swift` or `megatron`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that a shell script sets."""
    variable_lines: Mapping[str, int] = field(default_factory=dict)
    """Their lines."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key by its path, `trl.beta`; the default where it is missing or null."""
        at: Any = self.values
        for part in key.split("."):
            at = at.get(part) if isinstance(at, dict) else None
        return default if at is None else at


def read_original(path: str | Path, words: tuple[str, ...] = ()) -> Original:
    """A configuration file.

    Args:
        path: The file.
        words: Arguments of a command line that count besides: `--key value`.

    Raises:
        RecipeError: It cannot be read, or is no configuration.
    """
    label, text = str(path), _text(Path(path))
    if Path(path).suffix == ".py":
        raise NoConfigurationError(f"{label}: is a Python program, not a configuration", hint=_HINT)
    command = _find_command(text) if _is_script(Path(path), text) else None
    if command is None and Path(path).suffix in (".sh", ".bash"):
        problem = f"{label}: no command of a known tool"
        raise NoConfigurationError(problem, hint="pass a script that calls `swift sft`, `trl sft` or similar")
    original = _of_values(label, text) if command is None else _of_command(label, command)
    named = original.values.get("config")
    if command is not None and isinstance(named, str):
        original = _of_named(original, named)
    _override(original, _arguments([(word, 0) for word in words], label))
    return original


def _override(original: Original, added: tuple[Entry, ...]) -> None:
    """Let further arguments replace those of a configuration."""
    present = {entry.key for entry in added}
    original.entries = (*(entry for entry in original.entries if entry.key not in present), *added)
    original.values |= {entry.key: entry.value for entry in added}


def _of_named(script: Original, named: str) -> Original:
    """Read the configuration that a script's command names, which the command's further arguments override.

    Raises:
        RecipeError: It is neither beside the script nor in the working directory, or cannot be read.
    """
    file = next((file for file in (Path(script.path).parent / named, Path(named)) if file.is_file()), None)
    if file is None:
        raise RecipeError(f"{script.path}: the command reads {named}: file not found", hint="put it next to the script")
    original = _of_values(str(file), _text(file))
    # Line numbers are those of the named file.
    _override(original, tuple(replace(entry, line=0) for entry in script.entries if entry.key != "config"))
    return replace(
        original,
        tool=script.tool,
        task=script.task,
        program=script.program,
        environment=script.environment,
        variable_lines=dict.fromkeys(script.variable_lines, 0),
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a mapping from another file beside a configuration, such as LLaMA-Factory's dataset_info.json.

    Raises:
        RecipeError: It cannot be read, or holds no mapping.
    """
    return _of_values(str(path), _text(path)).values


def _text(path: Path) -> str:
    if path.is_dir():
        raise RecipeError(f"{path}: is a folder, not a configuration", hint="pass a file in it")
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RecipeError(f"{path}: file not found", hint=_HINT) from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > parse.MAX_BYTES:
        raise RecipeError(f"{path}: is larger than {parse.MAX_BYTES // 1024} KiB", hint=_HINT)
    if b"\0" in raw:
        raise RecipeError(f"{path}: is a binary file, not a configuration", hint=_HINT)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}:{line}: is not UTF-8 text", hint="save the file as UTF-8") from None


def _of_values(shown: str, text: str) -> Original:
    """A configuration in YAML, or in JSON, which is YAML as well but for tabs between its tokens."""
    if text.lstrip().startswith(("{", "[")):
        text = re.sub(r"^\t+", lambda tabs: "  " * len(tabs[0]), text, flags=re.MULTILINE)
    try:
        values, places, problems = parse.read_yaml(text, parse.Place(0, 1, 1, shown))
    except parse.YAMLProblem as error:
        raise RecipeError(str(error.problem)) from None
    parse.raise_problems(problems)
    if values is None:
        raise NoConfigurationError(f"{shown}: is empty", hint=_HINT)
    if not isinstance(values, dict):
        kind = "a list" if isinstance(values, list) else "a single value"
        raise NoConfigurationError(f"{shown}: is {kind}, not a YAML mapping", hint=_HINT)
    return Original(shown, values, tuple(_flat(values, (), places)))


def _flat(value: Any, key: parse.Key, places: parse.Places) -> Iterator[Entry]:
    """The keys below a value, down to values and to lists of values."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(item, (*key, name), places)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for position, item in enumerate(value):
            yield from _flat(item, (*key, position), places)
    else:
        yield Entry(parse.dotted(key), value, places.of_key(key).line)


# Shell scripts


def _is_script(path: Path, text: str) -> bool:
    return path.suffix in (".sh", ".bash") or text.startswith("#!") or (path.suffix == "" and "--" in text)


@dataclass
class _Command:
    """A command of a known tool in a script."""

    program: str
    task: str
    line: int
    arguments: str
    variables: Mapping[str, str]
    variable_lines: Mapping[str, int]


def _find_command(text: str) -> _Command | None:
    """The first command of a known tool in a script."""
    variables: dict[str, str] = {}
    lines: dict[str, int] = {}
    joined, start = "", 1
    # The last line may end in a backslash, too.
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        bare = "" if line.lstrip().startswith("#") else line
        if not joined:
            start = number
        joined += bare.rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + "\n"
            continue
        if line.lstrip().startswith("#") and joined.endswith("\n"):
            joined += "\n"
            continue
        match = _COMMANDS.search(joined)
        before = joined[: match.start()] if match else joined
        for found in _ASSIGNMENT.finditer(before):
            variables[found[1]] = _filled(found[2].strip("\"'"), variables)
            lines[found[1]] = start + before[: found.start(1)].count("\n")
        if match is not None:
            program, task = next((match[i], match[i + 1]) for i in (1, 3, 5, 7, 9) if match[i])
            if match[9]:
                program = "megatron" if "_megatron" in program else "swift"
            line_of_command = start + joined[: match.end()].count("\n")
            processes = _PROCESSES.search(_filled(before, variables)) if match[7] or match[9] else None
            arguments = joined[match.end() :]
            if processes is not None and match[9]:
                # By this variable `swift` itself starts processes.
                variables["NPROC_PER_NODE"] = processes[1]
                lines["NPROC_PER_NODE"] = start + before[: processes.start()].count("\n")
            elif processes is not None:
                arguments = f" --num_processes {processes[1]}{arguments}"
            return _Command(program, _SCRIPTS.get(task, task), line_of_command, arguments, variables, lines)
        joined = ""
    return None


def _of_command(shown: str, command: _Command) -> Original:
    words: list[tuple[str, int]] = []
    for line, part in enumerate(command.arguments.split("\n"), start=command.line):
        try:
            of_line = shlex.split(_filled(part, command.variables))
        except ValueError as error:
            raise RecipeError(f"{shown}:{line}: {str(error).lower()}", hint="close the quote on its line") from None
        words += ((word, line) for word in takewhile(lambda word: not word.startswith("#"), of_line))
    if words and words[0][0].endswith((".yaml", ".yml", ".json")):
        words.insert(0, ("--config", words[0][1]))
    entries = _arguments(takewhile(lambda word: word[0] not in _ENDS, words), shown)
    values = {entry.key: entry.value for entry in entries}
    return Original(
        shown,
        values,
        entries,
        _TOOLS[command.program],
        command.task,
        command.program,
        command.variables,
        command.variable_lines,
    )


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """The text with the variables that the script sets filled in, and quotients worked out; what else there is stays.

    `$(expr 16 / $nproc_per_node)` is how scripts divide an accumulation among devices.
    """

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return variables.get(name, found[0] if default is None else default)

    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)
    return _QUOTIENT.sub(lambda found: str(int(found[1]) // max(1, int(found[2]))), text)


def _arguments(words: Iterable[tuple[str, int]], shown: str) -> tuple[Entry, ...]:
    """Parse `--key value`, `--key=value` and `--flag` words with their lines; several values make a list."""
    options: dict[str, tuple[list[str], int]] = {}
    key = None
    for word, line in words:
        if word.startswith("--") and len(word) > 2:
            key, _, value = word[2:].partition("=")
            key = key.replace("-", "_")
            options[key] = ([value] if value else [], line)
        elif key is None:
            raise RecipeError(f"{shown}:{line}: '{word}' has no --key", hint="write --key value")
        else:
            options[key][0].append(word)
    return tuple(Entry(name, _value(*values), line) for name, (values, line) in options.items())


def _value(*words: str) -> Any:
    values = [parse.plain_scalar(word) for word in words] or [True]
    return values[0] if len(values) == 1 else values
