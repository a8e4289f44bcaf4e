"""A configuration that was migrated to a recipe, drawn by rich."""

from rich.console import RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from tunekit.migration.report import TOOLS, Kind, Migration
from tunekit.recipe.reading.parse import to_inline_yaml

_TITLES: dict[Kind, tuple[str, str, str]] = {
    "carried": ("carried over", "the recipe says it", "green"),
    "decided": ("decided by tunekit", "left out of the recipe, with the reason", "cyan"),
    "different": ("different", "the recipe trains otherwise in this", "magenta"),
    "unsupported": ("cannot be had", "not in the recipe", "red"),
}
_MAX_VALUE = 44


def migration_parts(made: Migration) -> list[RenderableType]:
    """A migration in sections: the recipe, then what became of the keys, and what to look at."""
    count = {kind: len(made.of_kind(kind)) for kind in ("carried", "decided", "unsupported", "silent")}
    head = f"{count['carried']} keys carried over, {count['decided']} decided by tunekit, "
    head += f"{len(made.different)} different, {count['unsupported']} cannot be had, {count['silent']} ask for nothing"
    parts: list[RenderableType] = [
        Text.assemble((f"{made.path} ({TOOLS[made.tool]})", "bold"), f"  {head}"),
        "",
        Syntax(made.text, "yaml", background_color="default", word_wrap=True),
    ]
    for kind, (title, explanation, style) in _TITLES.items():
        lines = made.different if kind == "different" else made.of_kind(kind)
        if lines:
            table = _table()
            for line in lines:
                table.add_row(str(line.line or ""), f"{line.key}: {_value(line.value)}", Text(line.words))
            parts += [_heading(title, explanation, style), table, ""]
    if made.assumed:
        table = _table()
        for assumption in made.assumed:
            table.add_row("", f"{assumption.key}: {_value(assumption.value)}", Text(assumption.words))
        parts += [_heading("said besides", f"as {TOOLS[made.tool]} does so, and tunekit otherwise", "cyan"), table, ""]
    if made.suspicious:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(justify="right", style="dim", no_wrap=True)
        table.add_column()
        for suspicion in made.suspicious:
            table.add_row(str(suspicion.line or ""), Text(suspicion.words))
        parts += [_heading("suspicious in the original", "look at it once more", "yellow"), table, ""]
    silent = [line.key for line in made.of_kind("silent")]
    if silent:
        parts += [Text.assemble(("ask for nothing", "dim"), (f"  {', '.join(silent)}", "dim")), ""]
    return parts


def _table() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold", ratio=2)
    table.add_column(ratio=3)
    return table


def _heading(title: str, explanation: str, style: str) -> Text:
    return Text.assemble((title, f"bold {style}"), (f"  {explanation}", "dim"))


def _value(value: object) -> str:
    text = to_inline_yaml(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."
