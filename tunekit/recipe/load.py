"""A recipe file, the name of a shipped one, or a mapping, plus `key=value` overrides -> a checked `Recipe`.

The way from text to recipe: `parse` reads YAML into values with places, `overrides` lays the command line over them,
`environment` fills in variables, the schema checks the values, and `trainer_args` checks what is meant for TRL. Every
step collects its problems; they are raised together, in the order of the file. Nothing here imports torch, so a typo
costs a blink.

No secret stands in a recipe: a recipe is shared, and every run keeps a copy of it.

What looks like a key, or is the value of a variable that holds one, is refused without being repeated. Where a secret
is needed, the recipe names the variable that has it.

Files and folders that the fields of a recipe may name on the machine that it runs on.

Whoever lets others write recipes, such as a page in a browser, can say by these which are theirs to use. A name may
also be one of the hub, a URL or a shipped example: what it is depends on the disk, and is not asked here.
"""

import errno
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from tunekit.errors import DependencyError, RecipeError
from tunekit.files import find_recipe, leads_out, list_recipes, near_names
from tunekit.recipe.chat_templates import named_template
from tunekit.recipe.function_source import path_of
from tunekit.recipe.functions import find_function
from tunekit.recipe.reading import parse
from tunekit.recipe.reading.input_paths import find_in_folder
from tunekit.recipe.reading.overrides import Overrides, escape_environment, expand_environment, spell_out
from tunekit.recipe.reading.parse import Fault, Key, Place, Places, Problem, YAMLProblem, dotted
from tunekit.recipe.reading.phrases import show
from tunekit.recipe.reading.wording import to_problems
from tunekit.recipe.schema import Recipe, expands_env, holders_along, is_free_mapping, members, sections_of, tag_of
from tunekit.recipe.sections.data import DataSource
from tunekit.recipe.sections.section import (
    FUNCTION_PATTERN,
    NAME_PATTERN,
    ONE_LENGTH,
    TAG,
    Conflict,
    FunctionPath,
    Section,
)
from tunekit.recipe.trainer_args import CONFIGS, check_trainer_args
from tunekit.redact import redacted, secret_in

_NAME = re.compile(
    r"(?:^|_)(?:(?:hub|auth|api|access|bearer|private|secret)_?(?:token|key)"
    r"|(?<!(?:bos|eos|pad|unk|sep|cls)_)(?<!mask_)token|passw(?:or)?d|secret|credentials?)$",
    re.IGNORECASE,
)
"""Names of fields that can hold nothing else than a secret. A tokenizer's `eos_token` and its like are words."""

_LOG_IN = "remove it, and use an environment variable or the provider's login, such as `hf auth login`"
_IN_URL = "replace it by ${NAME}, and export NAME"


def find_secrets(values: Any, places: Places, commanded: Collection[Key] | None = None) -> list[Problem]:
    """The secrets that stand in a recipe.

    Args:
        values: What it says, with `${NAME}` as it is written.
        places: Where that stands.
        commanded: The keys to look at, with what is below them; all where left out.
    """
    problems = []
    for key, value in parse.leaves(values):
        is_meant = commanded is None or any(key[: len(above)] == above for above in commanded)
        if not is_meant or not isinstance(value, str) or not value:
            continue
        secret = secret_in(value)
        if secret is None and _NAME.search(str(key[-1])) and "trainer_args" in key:
            secret = "a secret, judging by its name"
        if secret is not None:
            hint = _IN_URL if "URL" in secret else _LOG_IN
            problems.append(
                Problem(places.of_value(key), f"contains {secret}; recipes must not contain secrets", key, hint)
            )
    return problems


def named_paths(recipe: Recipe) -> list[tuple[str, str]]:
    """Every text of a recipe that may name a file or a folder, with its dotted key."""
    texts = _texts(recipe, ())
    return [(dotted(key), text) for key, text in texts if key[-1] != "chat_template" or named_template(text) is None]


def _texts(section: Section, key: Key) -> Iterator[tuple[Key, str]]:
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), (*key, name)
        if expands_env(field) or is_free_mapping(field):
            yield from ((key, text) for key, text in parse.leaves(value, here) if isinstance(text, str))
        for position, item in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(item, Section):
                yield from _texts(item, here if position is None else (*here, position))


_SUFFIXES = (".yaml", ".yml")

MANY_UNKNOWN = 3
"""Unknown sections from which on a file looks like a configuration of another tool."""

_Secrets = Literal["anywhere", "in overrides", "nowhere"]
"""Where a recipe is looked through for secrets."""

_START = Place(0, 1, 1, "recipe")
_EXAMPLE = "start from an example: `tunekit recipes copy sft/quickstart`"
_TOO_LARGE = f"is larger than {parse.MAX_BYTES // 1024} KiB"
_NO_DATA = "pass a recipe, not its data"


AnyOverrides = Sequence[str] | Mapping[str, Any]
"""Changes to a recipe: `key=value` words, or values by key."""


def override_words(overrides: AnyOverrides) -> list[str]:
    """Return overrides as `key=value` words.

    Example:
        >>> override_words({"train": {"max_steps": 5}, "adapter.type": "qlora"})
        ['train.max_steps=5', 'adapter.type=qlora']

    Args:
        overrides: Words, or values by dotted key. Mappings reach into sections; any other value replaces that of the
            recipe, and None goes back to the default.

    Raises:
        RecipeError: They are neither, or hold what no recipe holds.
    """
    if isinstance(overrides, str):
        raise RecipeError(f"overrides: got a string, {overrides!r}", hint=f"pass a list: [{overrides!r}]")
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return list(_words_of(as_plain(overrides), "", [Recipe]))


def _words_of(values: Mapping[str, Any], above: str, sections: Sequence[type[Section]]) -> Iterator[str]:
    for name, value in values.items():
        below = list(sections)
        for part in parse.undotted(name) or ():
            if isinstance(part, str):
                fields = [section.model_fields[part] for section in below if part in section.model_fields]
                below = [section for field in fields for section in sections_of(field)]
        if isinstance(value, dict) and below:
            yield from _words_of(value, f"{above}{name}.", below)
        else:
            yield f"{above}{name}={parse.to_inline_yaml(value)}"


def load_recipe(source: str | Path | Mapping[str, Any] | Recipe, overrides: AnyOverrides = ()) -> Recipe:
    """The checked recipe, with `output.name` filled in.

    Args:
        source: A YAML file's path, the name of a shipped recipe such as `sft/quickstart`, a mapping of sections, or a
            recipe to lay overrides over.
        overrides: `dotted.key=value` words; the value is read as YAML, and `null` goes back to the default. Or values
            by key: `{"train.max_steps": 5}`, `{"train": {"max_steps": 5}}`.

    Raises:
        RecipeError: It cannot be read or is not valid; the message has a line for every mistake, each with its place.
    """
    return load_recipe_with_notes(source, overrides)[0]


def load_recipe_with_notes(
    source: str | Path | Mapping[str, Any] | Recipe,
    overrides: AnyOverrides = (),
    *,
    find_functions: bool = True,
    conflicts_of: Callable[[Recipe], Iterable[Conflict]] | None = None,
) -> tuple[Recipe, list[str]]:
    """As `load_recipe`, with notes of what an override made meaningless in the file and therefore was left out.

    Args:
        source: As for `load_recipe`.
        overrides: As for `load_recipe`.
        find_functions: Whether the user's own functions are looked up, for which their modules are imported.
        conflicts_of: Finds what a valid recipe says that does not go together with what it names, such as a run.
    """
    # One that was loaded before was looked through for secrets then; its variables are filled in now.
    secrets: _Secrets = "in overrides" if isinstance(source, Recipe) else "anywhere"
    secrets = secrets if find_functions else "nowhere"
    words = override_words(overrides)
    draft = _read(source)
    if not find_functions:
        draft.folder = None  # a run's recipe names what its run read
    recipe, problems, notes = _check(draft, words, secrets, conflicts_of, find_functions=find_functions)
    parse.raise_problems(problems, _of_another_tool(source, problems))
    assert recipe is not None, "a recipe without problems is valid"
    return recipe, notes


def _of_another_tool(source: object, problems: Sequence[Problem]) -> str | None:
    """Return how to convert a file, if many of its sections are none of a recipe."""
    unknown = {problem.key for problem in problems if len(problem.key) == 1 and problem.what == "unknown key"}
    if not isinstance(source, str | Path) or len(unknown) < MANY_UNKNOWN:
        return None
    return f"is this a configuration of another tool? `tunekit migrate {source}` converts it"


def as_plain(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a mapping as a YAML file would hold them, with functions by their paths.

    Raises:
        RecipeError: It holds what no file can hold.
    """
    problems: list[Problem] = []
    values: dict[str, Any] = _plain(source, (), problems)
    parse.raise_problems(problems)
    return values


def sets(source: str | Path | Mapping[str, Any] | Recipe, overrides: Sequence[str], key: Key) -> bool:
    """Return whether a recipe sets a key, with its overrides; nothing is checked."""
    draft = _read(source)
    Overrides(draft.values, draft.places).apply(list(overrides))
    value: Any = draft.values
    for part in key:
        value = value.get(part) if isinstance(value, dict) else None
    return value is not None


def reload_recipe(path: Path, overrides: AnyOverrides = ()) -> Recipe:
    """A recipe as `dump_recipe` wrote it for a run, in which its functions have done their work.

    They are not looked up again: where the run is looked at, their module need not be.
    """
    if not path.is_file():
        what = "is not a file" if path.exists() else "file not found"
        raise RecipeError(f"{path}: {what}", hint="restore it from a copy")
    if leads_out(path):
        # What is said of a recipe shows parts of it, which may be those of any file here.
        raise RecipeError(f"{path}: a link out of its folder", hint="restore it from a copy")
    return load_recipe_with_notes(path, overrides, find_functions=False)[0]


def check_text(
    text: str,
    overrides: AnyOverrides = (),
    *,
    find_functions: bool = True,
    conflicts_of: Callable[[Recipe], Iterable[Conflict]] | None = None,
) -> tuple[Recipe | None, list[Fault]]:
    """The recipe of a YAML text, or what is wrong with the text: what would be said of a file that holds it.

    Args:
        text: The text, such as one that is being written in an editor.
        overrides: As for `load_recipe`.
        find_functions: Whether the user's own functions are looked up, for which their modules are imported.
        conflicts_of: As for `load_recipe_with_notes`.
    """
    draft = _draft(text, _START, None)
    recipe, problems, _ = _check(
        draft, override_words(overrides), "anywhere", conflicts_of, find_functions=find_functions
    )
    faults = [
        Fault(bad.place.line, bad.place.column, dotted(bad.key), redacted(bad.what), bad.hint and redacted(bad.hint))
        for bad in sorted(problems, key=lambda bad: bad.place)
    ]
    return (None if faults else recipe), list(dict.fromkeys(faults))


def read_text(text: str) -> dict[str, Any]:
    """Parse a YAML text, unchecked, with each shorthand expanded, such as `model: pico`; {} of an empty text.

    Raises:
        RecipeError: It cannot be read as one mapping; the message has the place.
    """
    draft = _draft(text, _START, None)
    if not draft.is_empty:
        parse.raise_problems(draft.problems)
    return draft.values


def _check(
    draft: "_Draft",
    overrides: Sequence[str],
    secrets: _Secrets,
    conflicts_of: Callable[[Recipe], Iterable[Conflict]] | None,
    *,
    find_functions: bool,
) -> tuple[Recipe | None, list[Problem], list[str]]:
    """Return the recipe that a draft makes with overrides, what is wrong with it, and notes."""
    if not draft.is_mapping:
        return None, draft.problems, []
    laid = Overrides(draft.values, draft.places)
    laid.apply(list(overrides))
    values, unexpanded = expand_environment(draft.values, draft.places)
    problems = [*draft.problems, *laid.problems, *unexpanded]
    if draft.folder is not None:
        values, notes = find_in_folder(values, draft.folder, laid.commanded)
        laid.notes += notes
    if secrets != "nowhere":
        problems += find_secrets(draft.values, draft.places, laid.commanded if secrets == "in overrides" else None)
    recipe, invalid = _validate(values, draft.places)
    invalid += _missing_functions(values, draft.places, draft.folder) if find_functions else []
    # What could not be read has been reported; what the schema then says of its place would only repeat it.
    reported = {bad.key for bad in problems if bad.key}
    problems += [bad for bad in invalid if not any(bad.key[: len(key)] == key for key in reported)]
    if not problems and recipe is not None and conflicts_of is not None:
        problems = [
            Problem(draft.places.of_key(conflict.key), conflict.what, conflict.key, conflict.hint)
            for conflict in conflicts_of(recipe)
        ]
    return None if recipe is None else _named(recipe, draft.name), problems, laid.notes


def dump_recipe(recipe: Recipe) -> str:
    """The complete recipe as YAML, every default written out; `load_recipe` reads it back to an equal recipe."""
    return parse.to_yaml(escape_environment(recipe.model_dump()))


@dataclass
class _Draft:
    """A recipe's values before they are checked."""

    values: dict[str, Any]
    places: Places
    problems: list[Problem]
    name: str | None
    """Name of the run where the recipe gives none; None: after the method and the model."""

    is_mapping: bool = True
    """Whether it has values at all: where it has not, the problems say why."""

    is_empty: bool = False

    folder: Path | None = None
    """Folder of its file, where relative paths are looked up after the working directory."""


def _read(source: str | Path | Mapping[str, Any] | Recipe) -> _Draft:
    if isinstance(source, Recipe):
        values = asked_for(source) | {name: asked_for(section) for name, section in source if tag_of(type(section))}
        # Of an adapter it matters what was asked for, also where that is the default: what was not is left to a run.
        values["adapter"] |= source.adapter.model_dump(include=source.adapter.model_fields_set)
        return _Draft(escape_environment(values), Places(start=parse.MAPPING), [], None)
    if isinstance(source, Mapping):
        problems: list[Problem] = []
        values = _plain(source, (), problems)
        return _Draft(spell_out(values), Places(start=parse.MAPPING), problems, None)
    return _read_file(source)


def asked_for(value: Any) -> Any:
    """A section's values without its defaults, so that overrides only meet what was asked for; always with its tag."""
    if isinstance(value, Section):
        fields = type(value).model_fields
        return {name: asked_for(item) for name, item in value if name == TAG or item != fields[name].default}
    return [asked_for(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any, key: Key, problems: list[Problem]) -> Any:
    """A Python value in the types that YAML has: mappings as dicts, tuples as lists, paths and functions as text."""
    if (problem := _in_memory(value, key)) is not None:
        problems.append(problem)
        return None
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                problems.append(Problem(parse.MAPPING, f"a key must be a string, got {name!r}", key, "quote it"))
        return {name: _plain(item, (*key, name), problems) for name, item in value.items() if isinstance(name, str)}
    if isinstance(value, list | tuple):
        return [_plain(item, (*key, position), problems) for position, item in enumerate(value)]
    if callable(value):
        try:
            return path_of(value)
        except RecipeError as error:
            problems.append(Problem(parse.MAPPING, error.problem, key, error.hint))
            return None
    return str(value) if isinstance(value, PurePath) else value


def _in_memory(value: Any, key: Key) -> Problem | None:
    """Return how to pass rows or a model that stand in a recipe instead of their path; None for all else."""
    where = dotted(key)
    got = f"got a Python {type(value).__name__}"
    if where in ("data.train", "data.eval"):
        rows = [row for row in value if isinstance(row, Mapping) and row] if isinstance(value, list | tuple) else []
        is_rows = any(row.keys().isdisjoint(DataSource.model_fields) for row in rows)
        if is_rows or not (value is None or isinstance(value, str | int | float | Mapping | list | tuple | PurePath)):
            hint = f"pass rows in memory as {where.removeprefix('data.')}_dataset"
            return Problem(parse.MAPPING, f"must name the rows, {got}", key, hint)
    is_model = where.partition(".")[0] == "model" or where.startswith("method.teacher")
    if is_model and callable(value):
        hint = "save it with save_pretrained, and pass the folder"
        return Problem(parse.MAPPING, f"must be a folder or name, {got}", key, hint)
    return None


def _read_file(source: str | Path) -> _Draft:
    path = _find(source)
    text = _read_text(path, str(source))
    draft = _draft(text, Place(0, 1, 1, str(source)), _safe_name(path.stem, otherwise="recipe"))
    draft.folder = path.parent
    return draft


def _draft(text: str, start: Place, name: str | None) -> _Draft:
    """Parse a YAML text into a draft."""
    if len(text.encode("utf-8", "surrogatepass")) > parse.MAX_BYTES:
        return _Draft({}, Places(start), [Problem(start, _TOO_LARGE, hint=_NO_DATA)], name, is_mapping=False)
    try:
        values, places, problems = parse.read_yaml(text, start)
    except YAMLProblem as error:
        return _Draft({}, Places(start), [error.problem], name, is_mapping=False)
    if values is None and not problems:
        problems = [Problem(start, "the file is empty", hint=_EXAMPLE)]
        return _Draft({}, places, problems, name, is_mapping=False, is_empty=True)
    if not isinstance(values, dict):
        what = f"a recipe must be a mapping of sections (model, data, ...), got {show(values)}"
        bad = Problem(places.of_value(()), what, hint=_EXAMPLE)
        return _Draft({}, places, problems or [bad], name, is_mapping=False)
    return _Draft(spell_out(values), places, problems, name)


def _find(source: str | Path) -> Path:
    """The file that is meant: an existing one, or else a shipped recipe of this name."""
    path, label = Path(source), str(source)
    if "\n" in label or "\0" in label or not label:
        raise RecipeError(f"{label!r} is not a path or a name", hint="write YAML text to a file, or pass a mapping")
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise RecipeError(f"{label[:40]}...: {error.strerror}", hint="pass a recipe file") from None
    if path.exists() and not path.is_dir():
        return path
    if isinstance(source, str) and source in [recipe.name for recipe in list_recipes()]:
        return find_recipe(source)
    if path.is_dir():
        inside = sorted(child for child in path.iterdir() if child.suffix in _SUFFIXES)
        hint = f"pass a file in it, such as {inside[0]}" if inside else "pass a recipe file"
        raise RecipeError(f"{label}: is a folder, not a recipe", hint=hint)
    if path.suffix not in _SUFFIXES:
        what = "no such file, and no shipped recipe has this name"
    else:
        what = "file not found" if path.parent.is_dir() else f"file not found, folder {path.parent} does not exist"
    raise RecipeError(f"{label}: {what}", hint=_nearby(path))


def _nearby(path: Path) -> str:
    """Suggest recipe files in the same folder and shipped recipes."""
    folder = path.parent
    files = sorted(str(file) for file in folder.iterdir() if file.suffix in _SUFFIXES) if folder.is_dir() else []
    near = near_names(str(path), files) or near_names(str(path), [recipe.name for recipe in list_recipes()])
    lists = "`tunekit recipes` lists the shipped recipes"
    return f"did you mean {near}? {lists}" if near else lists


def _read_text(path: Path, shown: str) -> str:
    """The text of a recipe file, without a byte-order mark."""
    try:
        with path.open("rb") as file:
            raw = file.read(parse.MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{shown}: cannot read the file: {error.strerror}") from None
    if len(raw) > parse.MAX_BYTES:
        raise RecipeError(f"{shown}: {_TOO_LARGE}", hint=_NO_DATA)
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RecipeError(f"{shown}: is UTF-16 text", hint="save the file as UTF-8")
    if b"\0" in raw:
        raise RecipeError(f"{shown}: is a binary file, not YAML", hint="pass a recipe file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        what = f"is not UTF-8 text (byte 0x{raw[error.start]:02x})"
        raise RecipeError(f"{shown}:{line}:{column}: {what}", hint="save the file as UTF-8") from None


def _validate(values: dict[str, Any], places: Places) -> tuple[Recipe | None, list[Problem]]:
    """The recipe that the values make, or the problems why they make none."""
    problems: list[Problem] = []
    recipe = None
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        problems += to_problems(error.errors(include_url=False), places)
    if all(_mapping(values.get("train")).get(name) is not None for name in ONE_LENGTH):
        # The schema says so too, but only of a section that is right otherwise, and not at which of the two keys.
        problems = [bad for bad in problems if bad.key != ("train",)]
        keys = [("train", name) for name in ONE_LENGTH]
        later = max(keys, key=places.of_key)
        other = keys[1 - keys.index(later)]
        what = f"mutually exclusive with {dotted(other)}"
        problems.append(Problem(places.of_key(later), what, later, "keep one of them"))
    return recipe, problems + _trainer_args_problems(values, places)


def _missing_functions(values: dict[str, Any], places: Places, folder: Path | None) -> list[Problem]:
    """The user's own functions that cannot be found."""
    missing = []
    for key, value in parse.leaves(values):
        if isinstance(value, str) and re.fullmatch(FUNCTION_PATTERN, value) and _takes_function(key, values):
            try:
                find_function(value, folder)
            except RecipeError as error:
                # A reward that stands alone has no path of its own in the file.
                key = key[:-1] if key[-1] == "path" and key not in places.values else key
                missing.append(Problem(places.of_value(key), error.problem, key, error.hint))
    return missing


def _takes_function(key: Key, values: dict[str, Any]) -> bool:
    """Return whether a field takes a function of the user's own, in whichever variant the values choose."""
    field = key[:-1] if isinstance(key[-1], int) else key
    path = holders_along(field, values)
    return len(path) == len(field) and all(FunctionPath in _kinds(holder.field.annotation) for holder in path[-1])


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that a field takes, and those of the items of its lists."""
    kinds = list(members(annotation))
    return [*kinds, *(item for kind in kinds if get_origin(kind) is list for item in members(get_args(kind)[0]))]


def _mapping(value: Any) -> dict[str, Any]:
    """A value where a section belongs; empty if it is something else, which the schema reports."""
    return value if isinstance(value, dict) else {}


def _trainer_args_problems(values: dict[str, Any], places: Places) -> list[Problem]:
    """Return the problems of `method.trainer_args`; nothing of TRL is looked at where it is empty."""
    method = {TAG: Recipe.model_fields["method"].default.type, **_mapping(values.get("method"))}
    args = _mapping(method.get("trainer_args"))
    if not args or method[TAG] not in CONFIGS:
        return []
    above: Key = ("method", "trainer_args")
    try:
        faults = check_trainer_args(method[TAG], args)
    except DependencyError as error:
        return [Problem(places.of_key(above), error.problem, above, error.hint)]
    return [
        Problem((places.of_value if in_value else places.of_key)((*above, name)), what, (*above, name), hint)
        for name, what, hint, in_value in faults
    ]


def _named(recipe: Recipe, name: str | None) -> Recipe:
    """The recipe with its run's name filled in."""
    if recipe.output.name is not None:
        return recipe
    if name is None:
        base = re.split(r"[/\\]", recipe.model.path.rstrip("/\\"))[-1]
        name = f"{recipe.method.type}-{_safe_name(base, otherwise='model')}"
    output = recipe.output.model_copy(update={"name": name[:100]})
    return recipe.model_copy(update={"output": output})


def _safe_name(text: str, *, otherwise: str) -> str:
    """Text as a run's name: other characters than a name may hold become `-`."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return name if re.match(NAME_PATTERN, name) else otherwise
