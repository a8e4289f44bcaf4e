"""Request of the data page: files of the workspace, a shipped example, or the data of a recipe.

Everything comes from a browser, so nothing is read before it is known to lie in the workspace, and no module of the
user's is imported here: a recipe that names functions is only read by a process of its own.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

import tunekit
from tunekit import frontend
from webui.reach import check_reach
from webui.site import Site

EXAMPLE = "example:"
"""Prefix of a shipped file's name."""

MOST_FILES, MOST_LOOKED_AT, DEEPEST = 500, 20_000, 8
"""So many files are offered, of so many names, in folders so deep."""

MOST_ANSWER_TOKENS = 512

MOST_RECIPE_BYTES = 2**20
"""A recipe with more is none, and is refused as too large."""


@cache
def methods() -> Mapping[str, frontend.MethodInfo]:
    """Return the methods that may learn from the data, by name."""
    return {method.name: method for method in frontend.list_methods()}


@dataclass(frozen=True)
class Asked:
    """Values of the page's fields.

    Attributes:
        path: A file or folder of the workspace, an example, a dataset of the hub, or a URL.
        method: How the model is to learn.
        model: The model whose template and tokens are shown.
        max_length: Longest sequence, in tokens.
        format: What the rows are, or `auto`.
        columns: From our names of columns to those of the file.
        rewards: What judges answers, a name or several.
        origin: A recipe instead of all that: `recipe:NAME`, `file:PATH` or `run:NAME`.
        changes: Changes to that recipe.
        key: Which of its sources.
    """

    path: str = ""
    method: str = "sft"
    model: str = "pico"
    max_length: int = 1024
    format: str = "auto"
    columns: tuple[tuple[str, str], ...] = ()
    rewards: str = ""
    origin: str = ""
    changes: tuple[str, ...] = ()
    key: str | None = None

    def overrides(self) -> list[str]:
        """Return the changes of a recipe by the fields, as on the command line."""
        if self.origin:
            return list(self.changes)
        changes = [f"data.train={_word(self.path)}", "data.eval=null", f"data.max_length={self.max_length}"]
        changes += [f"data.format={self.format}"] if self.format != "auto" else []
        changes += [f"data.columns={json.dumps(dict(self.columns), ensure_ascii=False)}"] if self.columns else []
        changes += [f"model={_word(self.model)}"]
        changes += [f"method={self.method}"] if self.method != "sft" else []
        return changes


def _word(text: str) -> str:
    """A text as YAML reads it back from behind an equals sign."""
    return json.dumps(text, ensure_ascii=False)


def recipe_of(site: Site, asked: Asked) -> tunekit.Recipe:
    """The recipe that says what is looked at, which leads nowhere but to the workspace.

    Raises:
        TunekitError: There is none, it is not valid, or it leads elsewhere.
    """
    text = _text_of(site, asked.origin) if asked.origin else _text(asked)
    _refuse_code(asked.changes)
    recipe, faults = tunekit.check_text(text, list(asked.changes), find_functions=False)
    if recipe is None:
        what = "\n".join(f"{fault.key}: {fault.problem}" if fault.key else fault.problem for fault in faults)
        raise tunekit.TunekitError(what, hint=next((fault.hint for fault in faults if fault.hint), None))
    check_reach(site, recipe)
    return recipe


def _text_of(site: Site, origin: str) -> str:
    kind, _, name = origin.partition(":")
    if kind == "recipe":
        return frontend.recipe_text(name)
    if kind == "file":
        return _read(site.inside(name), name)
    if kind == "run":
        return _read(site.run(name).path / "recipe.yaml", name)
    raise tunekit.TunekitError(f"{origin!r} is not a recipe", hint="write recipe:NAME, file:PATH or run:NAME")


def _read(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MOST_RECIPE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise tunekit.TunekitError(f"{name}: the recipe cannot be read", hint="use a YAML file in UTF-8") from error


def _text(asked: Asked) -> str:
    """The fields of the page as a recipe."""
    if not asked.path.strip():
        raise tunekit.TunekitError("no data selected", hint="choose a file or a dataset")
    data = {"train": asked.path.strip(), "max_length": asked.max_length, "format": asked.format}
    method: dict[str, object] = {"type": asked.method}
    learns = methods()[asked.method]
    if learns.generates:
        method["max_completion_length"] = max(1, min(MOST_ANSWER_TOKENS, asked.max_length // 2))
    if learns.is_rewarded and asked.rewards.strip():
        method["rewards"] = rewards_in(asked.rewards)
    if learns.has_teacher:
        method["teacher"] = asked.model
    recipe = {"model": asked.model or "pico", "data": {**data, "columns": dict(asked.columns)}, "method": method}
    return yaml.safe_dump(recipe, allow_unicode=True, sort_keys=False)


def rewards_in(text: str) -> object:
    """Rewards as they are written in a recipe: one word, several with commas between, or a list of YAML."""
    try:
        read = yaml.safe_load(f"[{text}]" if not text.lstrip().startswith(("[", "-")) else text)
    except yaml.YAMLError as error:
        raise tunekit.TunekitError(
            f"rewards: {text!r} cannot be read", hint="separate names by commas: numeric_match, length"
        ) from error
    return read


def _refuse_code(changes: Sequence[str]) -> None:
    """Refuse changes in an address that would have code run: whoever follows a link has not read it."""
    for change in changes:
        key, _, value = change.partition("=")
        is_function = key.endswith("format") and ":" in value
        if is_function or "trust_remote_code" in change:
            raise tunekit.TunekitError(
                f"{key}: a link cannot run code",
                hint="write it into a workspace recipe and preview that",
            )


def is_remote(site: Site, path: str) -> bool:
    """Return whether a name is that of something on another machine, which is not contacted unasked."""
    if path.startswith(EXAMPLE):
        return False
    return "://" in path or not (site.root / path).exists()


def data_files(site: Site) -> list[str]:
    """The files of rows in the workspace, by their paths from its root; none that is hidden or of a run."""
    files: list[str] = []
    root = site.root.resolve()
    for path in _walk(root):
        if path.is_symlink():
            try:
                site.inside(str(path))
            except tunekit.TunekitError:
                continue
        files.append(path.relative_to(root).as_posix())
        if len(files) == MOST_FILES:
            break
    return sorted(files)


def _walk(root: Path) -> Iterator[Path]:
    num_seen = 0
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        deep = len(here.relative_to(root).parts)
        folders[:] = sorted(
            name for name in folders if not name.startswith((".", "__")) and deep < DEEPEST and (deep or name != "runs")
        )
        for name in sorted(names):
            num_seen += 1
            if num_seen > MOST_LOOKED_AT:
                return
            if not name.startswith(".") and name.lower().endswith(frontend.DATA_SUFFIXES) and (here / name).is_file():
                yield here / name


def asked_in(query: Mapping[str, str], changes: Sequence[str]) -> Asked:
    """Return the request of an address; fields that it leaves out are as on an empty page.

    Args:
        query: Its single values.
        changes: Its changes to a recipe.
    """
    length = query.get("max_length", "")
    try:
        columns = json.loads(query.get("columns", "{}"))
    except ValueError:
        columns = {}
    columns = columns if isinstance(columns, dict) else {}
    return Asked(
        path=query.get("path", ""),
        method=query.get("method", "sft") if query.get("method") in methods() else "sft",
        model=query.get("model", "pico"),
        max_length=int(length) if length.isdecimal() and len(length) < 8 else Asked.max_length,
        format=query.get("format", "auto"),
        columns=tuple((str(ours), str(theirs)) for ours, theirs in columns.items()),
        rewards=query.get("rewards", ""),
        origin=query.get("from", ""),
        changes=tuple(changes),
        key=query.get("key"),
    )


def address_of(asked: Asked) -> dict[str, str | Sequence[str] | None]:
    """The query of an address that asks for the same."""
    if asked.origin:
        return {"from_": asked.origin, "set": list(asked.changes) or None, "key": asked.key}
    usual = Asked()
    columns = json.dumps(dict(asked.columns), ensure_ascii=False) if asked.columns else None
    return {
        "path": asked.path or None,
        "method": asked.method if asked.method != usual.method else None,
        "model": asked.model if asked.model != usual.model else None,
        "max_length": str(asked.max_length) if asked.max_length != usual.max_length else None,
        "format": asked.format if asked.format != usual.format else None,
        "columns": columns,
        "rewards": asked.rewards or None,
    }
