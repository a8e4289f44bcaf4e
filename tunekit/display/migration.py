"""A configuration that was migrated to a recipe, drawn by rich."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.syntax import Syntax
from rich.table import Column
from rich.text import Text

from tunekit.display.drawing import plain_table
from tunekit.migration.report import TOOLS, Kind, Migration
from tunekit.recipe.reading.parse import to_inline_yaml

_TITLES: dict[Kind, tuple[str, str, str]] = {
    "carried": ("carried over", "in the recipe", "green"),
    "decided": ("decided by tunekit", "not in the recipe, with the reason", "cyan"),
    "different": ("different", "the recipe behaves differently here", "magenta"),
    "unsupported": ("unsupported", "not in the recipe", "red"),
}
_MAX_VALUE = 44


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
    suspicions = [(str(suspicion.line or ""), suspicion.words) for suspicion in made.suspicious]
    parts += _section("suspicious in the original", "check it again", "yellow", suspicions)
    silent = [line.key for line in made.of_kind("silent")]
    if silent:
        parts += [Text.assemble(("without effect", "dim"), (f"  {', '.join(silent)}", "dim")), ""]
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
