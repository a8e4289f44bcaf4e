"""A configuration that was migrated to a recipe, drawn by rich."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.syntax import Syntax
from rich.table import Column
from rich.text import Text

from tunekit.display.drawing import numbers, plain_table
from tunekit.migration.folder import FolderMigration, Outcome
from tunekit.migration.report import TOOLS, Kind, Migration
from tunekit.recipe.reading.parse import to_inline_yaml

_TITLES: dict[Kind, tuple[str, str, str]] = {
    "carried": ("carried over", "in the recipe", "green"),
    "decided": ("decided by tunekit", "not in the recipe, with the reason", "cyan"),
    "different": ("different", "the recipe behaves differently here", "magenta"),
    "unsupported": ("unsupported", "not in the recipe", "red"),
}
_MAX_VALUE = 44

_OUTCOMES: dict[Outcome, str] = {"same": "green", "different": "magenta", "partly": "yellow", "not at all": "red"}
"""Outcomes of configurations, with the styles of their words."""

_MAX_REASONS = 30


def migration_parts(made: Migration) -> list[RenderableType]:
    """A migration in sections: the recipe, then what became of the keys, and what to look at."""
    count = {kind: len(made.of_kind(kind)) for kind in ("carried", "decided", "unsupported", "silent")}
    head = f"{count['carried']} keys carried over, {count['decided']} decided by tunekit, "
    head += f"{len(made.different)} different, {count['unsupported']} unsupported, {count['silent']} without effect"
    parts: list[RenderableType] = [
        Text.assemble((f"{made.path} ({TOOLS[made.tool]})", "bold"), f"  {head}"),
        "",
        Syntax(made.text, "yaml", background_color="default", word_wrap=True),
    ]
    for kind, (title, explanation, style) in _TITLES.items():
        lines = made.different if kind == "different" else made.of_kind(kind)
        rows = [(str(line.line or ""), f"{line.key}: {_value(line.value)}", line.words) for line in lines]
        parts += _section(title, explanation, style, rows)
    rows = [("", f"{assumption.key}: {_value(assumption.value)}", assumption.words) for assumption in made.assumed]
    parts += _section("added", f"to match {TOOLS[made.tool]}, where tunekit's default differs", "cyan", rows)
    files = [("", name, f"{len(text.splitlines())} lines") for name, text in made.files.items()]
    parts += _section("files", "functions that the recipe needs next to it; -o writes them too", "green", files)
    suspicions = [(str(suspicion.line or ""), suspicion.words) for suspicion in made.suspicious]
    parts += _section("suspicious in the original", "check it again", "yellow", suspicions)
    silent = [line.key for line in made.of_kind("silent")]
    if silent:
        parts += [Text.assemble(("without effect", "dim"), (f"  {', '.join(silent)}", "dim")), ""]
    return parts


def folder_parts(made: FolderMigration) -> list[RenderableType]:
    """The configurations of a folder: what became of each, counts by tool, and the keys that most of them lack."""
    files = plain_table("file", "tool", "recipe", Column("keys, or why there is none", overflow="fold"), gap=2)
    for result in made.configurations:
        style = _OUTCOMES[result.outcome]
        files.add_row(
            str(result.path),
            TOOLS.get(result.tool, ""),
            Text(result.outcome, style),
            Text(result.problem or ", ".join(result.reasons)),
        )
    counts = plain_table("tool", *numbers("files", "same", "different", "partly", "not at all"))
    for tool, of_tool in made.counts.items():
        cells = (str(of_tool.get(outcome, 0)) for outcome in _OUTCOMES)
        counts.add_row(TOOLS.get(tool, "(no recipe)"), str(sum(of_tool.values())), *cells)
    parts: list[RenderableType] = [files, "", counts, ""]
    if made.reasons:
        keys = plain_table(*numbers("files"), "tool", "key that is unsupported or different")
        for tool, key, number in made.reasons[:_MAX_REASONS]:
            keys.add_row(str(number), TOOLS[tool], Text(key))
        parts += [keys, ""]
    aside = len(made.results) - len(made.configurations)
    if aside:
        parts.append(Text(f"{aside} other {'file' if aside == 1 else 'files'} ignored", "dim"))
    return parts


def _section(title: str, explanation: str, style: str, rows: Sequence[tuple[str, ...]]) -> list[RenderableType]:
    """A heading with a table below it of lines, keys and words, or of lines and words; nothing without rows."""
    if not rows:
        return []
    columns = [Column(overflow="fold", ratio=2), Column(ratio=3)] if len(rows[0]) == 3 else [Column()]
    table = plain_table(Column(justify="right", style="dim", no_wrap=True), *columns, gap=2, shows_header=False)
    for *cells, words in rows:
        table.add_row(*cells, Text(words))
    return [Text.assemble((title, f"bold {style}"), (f"  {explanation}", "dim")), table, ""]


def _value(value: object) -> str:
    text = to_inline_yaml(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
