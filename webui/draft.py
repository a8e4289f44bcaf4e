"""The draft of a run: a recipe's text that is being written. Where it comes from, what it says, and where it goes.

A draft is nothing but its text, and belongs to the browser; these functions are given it and give it back.
"""

import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

import tunekit
from tunekit import frontend
from webui import work
from webui.fields import meant, shown
from webui.site import Site

FIRST = "recipe:sft/quickstart"
"""Initial draft of a browser that has none yet."""

_SUFFIXES = (".yaml", ".yml")
_MAX_FILES = 200
_MAX_BYTES = 256 * 1024


def recipes(method: str = "", gpu_gb: int | None = None) -> list[tuple[str, str]]:
    """Return shipped recipes as sources of a draft: the label and the value in links.

    Args:
        method: Only those of this `method.type`; empty: all.
        gpu_gb: Only those that fit on one GPU with so many GB, 0 for those made for a CPU; None: all.
    """
    return [
        (f"{shipped.name}: {shipped.description} · {shipped.memory}", f"recipe:{shipped.name}")
        for shipped in tunekit.list_recipes()
        if method in ("", shipped.method)
        and (gpu_gb is None or (shipped.gpu_gb is not None and shipped.gpu_gb <= gpu_gb))
    ]


def sources(site: Site) -> dict[str, list[tuple[str, str]]]:
    """Return the sources of a draft: by kind, the label and the value in links (`recipe:sft/quickstart`)."""
    runs = tunekit.list_runs(site.root / "runs")
    return {
        "recipe": recipes(),
        "file": [(name, f"file:{name}") for name in _files(site.root)],
        "run": [(run.name, f"run:{run.name}") for run in runs],
    }


def _files(root: Path) -> list[str]:
    """The recipe files of a workspace, at the top and one folder down."""
    paths = [path for pattern in ("*", "*/*") for path in root.glob(pattern) if path.suffix in _SUFFIXES]
    inside = [
        path.relative_to(root) for path in paths if path.is_file() and path.resolve().is_relative_to(root.resolve())
    ]
    return sorted(path.as_posix() for path in inside if path.parts[0] != "runs" and not path.name.startswith("."))[
        :_MAX_FILES
    ]


def opened(site: Site, source: str, changes: list[str]) -> str:
    """The text of a draft that begins from something, such as `run:NAME`, with `key=value` changes.

    Raises:
        TunekitError: There is no such thing, it cannot be read, or a change is none.
    """
    kind, _, name = source.partition(":")
    if kind == "recipe":
        text = frontend.recipe_text(name)
    elif kind == "file":
        text = _read(site.inside(name), name)
    elif kind == "run":
        recipe = site.run(name).recipe
        text = frontend.edit_text(frontend.short_recipe(recipe), "output.dir", frontend.UNSET)
        for key, path in frontend.named_paths(recipe):
            text = frontend.edit_text(text, key, _name_of(site, path))
    else:
        raise tunekit.TunekitError(
            f"{source!r} is not a source of a draft", hint="write recipe:NAME, file:PATH or run:NAME"
        )
    for change in changes:
        key, equals, written = change.partition("=")
        if not equals:
            raise tunekit.TunekitError(f"cannot read the change {change!r}", hint="write key=value")
        value = frontend.read_text(f"value: {written}\n").get("value")
        text = frontend.edit_text(text, key, frontend.UNSET if value is None else value)
    return text


def _name_of(site: Site, path: str) -> str:
    """Return the name of what is in the workspace, whose absolute path a run records: of a run, if it is its model."""
    root = site.root.resolve()
    if not path.startswith(f"{root}/"):
        return path
    inside = Path(path).relative_to(root)
    is_model = len(inside.parts) == 3 and (inside.parts[0], inside.name) == ("runs", "model")
    return inside.parts[1] if is_model else inside.as_posix()


def _read(path: Path, name: str) -> str:
    if path.suffix not in _SUFFIXES or not path.is_file():
        raise tunekit.TunekitError(f"{name}: no such recipe", hint="use a .yaml file of the workspace")
    if path.stat().st_size > _MAX_BYTES:
        raise tunekit.TunekitError(f"{name}: is larger than 256 KiB", hint="use a recipe, not its data")
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise tunekit.TunekitError(f"{name}: cannot be read: {error}", hint="save the file as UTF-8") from error


def check_draft(text: str) -> tuple[tunekit.Recipe | None, list[frontend.Fault]]:
    """The recipe that a draft makes, or all that is wrong with it: what the command line says, and what a page may not.

    The user's own functions are looked up in a process of their own. Code that comes with a model can be asked for on
    the command line only.
    """
    recipe, faults = tunekit.check_text(text, find_functions=False)
    entries = entries_of(text) if not faults else []
    if any(_is_function(entry) for entry in entries):
        recipe, faults = work.call("check_text", text)
    refused = remote_code(text) if not faults else []
    return (None, refused) if refused else (recipe, faults)


def remote_code(text: str) -> list[frontend.Fault]:
    """Return the places where a draft asks for code that comes with a model: no page runs it."""
    try:
        places = [
            code_entry
            for code_entry in entries_of(text)
            if code_entry.key.endswith("trust_remote_code") and code_entry.value is True
        ]
    except tunekit.TunekitError:
        return []  # What cannot be read asks for nothing.
    line = next((n for n, words in enumerate(text.splitlines(), 1) if "trust_remote_code" in words), 1)
    what, hint = "does not run from the web UI", "read the code, and use `tunekit train` in a terminal"
    return [frontend.Fault(line, 1, entry.key, what, hint) for entry in places]


def _is_function(entry: frontend.Entry) -> bool:
    return entry.is_open and isinstance(entry.value, str) and ":" in entry.value


def entries_of(text: str) -> list[frontend.Entry]:
    """The fields that apply to a draft.

    Raises:
        TunekitError: It is not YAML.
    """
    return frontend.recipe_entries(frontend.read_text(text))


def differences(text: str) -> list[frontend.Entry]:
    """The fields of a draft whose values differ from the defaults."""
    return [entry for entry in entries_of(text) if entry.kind not in ("section", "sections") and _differs(entry)]


def _differs(entry: frontend.Entry) -> bool:
    is_one_in_list = isinstance(entry.default, list) and [entry.value] == entry.default
    return entry.value is not frontend.UNSET and entry.value != entry.default and not is_one_in_list


def overrides(base: str, text: str) -> list[str] | None:
    """The `key=value` words that make one text say what another says; None where no such words do."""
    before = {entry.key: entry for entry in entries_of(base)}
    now = {entry.key: entry for entry in entries_of(text)}
    words: list[str] = []
    whole: list[str] = []
    for key, entry in now.items():
        if any(key.startswith((f"{above}.", f"{above}[")) for above in whole):
            continue
        there = before.get(key)
        if entry.kind == "sections" and (there is None or _shape(entry) != _shape(there)):
            whole.append(key)
            words.append(f"{key}={_word(entry.value)}")
        elif entry.kind not in ("section", "sections") and entry.value != (there.value if there else frontend.UNSET):
            words.append(f"{key}={_word(entry.value)}")
    checked, faults = tunekit.check_text(base, words, find_functions=False)
    recipe, wrong = tunekit.check_text(text, find_functions=False)
    if faults or wrong or checked is None or recipe is None:
        return None
    but_name = {"output": {"name"}}
    return words if checked.model_dump(exclude=but_name) == recipe.model_dump(exclude=but_name) else None


def _shape(entry: frontend.Entry) -> tuple[int | None, bool, list[Any]]:
    items = entry.value if isinstance(entry.value, list) else [entry.value]
    return entry.num_items, entry.is_list, [item.get("type") for item in items if isinstance(item, dict)]


def _word(value: Any) -> str:
    if value is frontend.UNSET:
        return "null"
    return (
        value if isinstance(value, str) and value.replace("_", "").isalpha() else json.dumps(value, ensure_ascii=False)
    )


def command_and_python(source: str, text: str, file: str) -> tuple[str, str]:
    """Return how to train a draft in a terminal and in Python: from its source, with its changes, or from its file."""
    kind, _, name = source.partition(":")
    words: list[str] | None = None
    if kind == "recipe":
        words = overrides(frontend.recipe_text(name), text)
    where = name if words is not None else file
    command = shlex.join(["tunekit", "train", where, *(words or [])])
    listed = f", {json.dumps(words, ensure_ascii=False)}" if words else ""
    python = f"import tunekit\n\nrun = tunekit.train({json.dumps(where)}{listed}, on_event=tunekit.Progress())"
    return command, python


def save(site: Site, name: str, text: str, *, replace: bool) -> Path:
    """Write a draft into the workspace, whole or not at all.

    Raises:
        TunekitError: The name leads elsewhere or is none of a recipe, a file of that name is there and not to be
            replaced, or it cannot be written.
        FileExistsError: A file of that name is there, and `replace` was not said.
    """
    if site.read_only:
        raise tunekit.TunekitError(
            "this server is read-only", hint="copy the text, or start `tunekit ui` without --read-only"
        )
    path = site.inside(name)
    if path.suffix not in _SUFFIXES or path.is_relative_to(site.root.resolve() / "runs"):
        raise tunekit.TunekitError(f"{name}: is not a recipe name", hint="use one such as mine.yaml")
    if path.exists() and not replace:
        raise FileExistsError(name)
    if not path.parent.is_dir() or path.is_dir():
        raise tunekit.TunekitError(f"{name}: its folder does not exist", hint="pass a file in an existing folder")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text if text.endswith("\n") else f"{text}\n")  # An editor in a page takes it off.
        Path(temporary).replace(path)
    except OSError as error:
        raise tunekit.TunekitError(f"{name}: cannot be written: {error.strerror}") from error
    return path


def keys_of(entries: list[frontend.Entry]) -> list[tuple[str, str, int | None]]:
    """Return the part of the entries that decides which fields a form has."""
    return [(entry.key, entry.kind, entry.num_items) for entry in entries]


def merged(text: str, known: str, given: dict[str, Any]) -> str:
    """A draft with what somebody changed in a form.

    Args:
        text: The draft as it is now; it may say more than the form knows.
        known: The draft that the form shows.
        given: What stands in the fields of the form now, by key.

    Raises:
        TunekitError: The draft is not YAML, or has no such field any more.
    """
    for entry in entries_of(known):
        if entry.key in given and given[entry.key] != shown(entry):
            text = frontend.edit_text(text, entry.key, meant(entry, given[entry.key]))
    return text
