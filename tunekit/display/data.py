"""Training data before a run, and the entries of the cache, drawn by rich.

Tokens that count in the loss are green and the others dim; where there is no color they stand between ⟦ and ⟧.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from tunekit.data.formats.row_formats import counted
from tunekit.data.prepare import Entry, Kind
from tunekit.data.reports.report import DataReport, Piece, Sample, SourceReport, visible
from tunekit.display.drawing import numbers, plain_table
from tunekit.planner.plan import gib

HOLDS: dict[Kind, str] = {
    "tokens": "tokens of a source",
    "sequences": "training sequences",
    "log-probabilities": "reference log-probabilities",
}
"""Description of each kind of cache entry."""

BAR_WIDTH = 40
"""Columns of a histogram's longest bar."""

HEAD_PIECES, TAIL_PIECES = 400, 200
"""So many tokens of a long sample are shown, from its beginning and its end."""

_BLOCKS = " ▏▎▍▌▋▊▉█"


def data_report_parts(report: DataReport, console: Console) -> list[RenderableType]:
    """A report in sections: what to look at, then each source with its numbers, lengths, special tokens and samples."""
    in_colour = console.color_system is not None and not console.no_color
    parts: list[RenderableType] = [Text(f"note: {note}", style="dim") for note in report.notes]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in report.warnings()]
    if report.mixture:
        parts += ["", _heading("mixture", report.mixture_words), _mixture_table(report)]
    for source in report.sources:
        parts += ["", _heading(source.title), _facts_table(source, report)]
        parts += ["", _heading(f"{source.title}: row lengths", "tokens, before truncation")]
        parts.append(_histogram_table(source, report.max_length))
        if source.special_tokens:
            parts += ["", _heading(f"{source.title}: special tokens"), _special_tokens_table(source)]
        if source.samples:
            key = "green tokens are in the loss" if in_colour else "tokens between ⟦ and ⟧ are in the loss"
            parts += ["", _heading(f"{source.title}: samples", key)]
        for number, sample in enumerate(source.samples, start=1):
            head = f"{number}: {sample.num_tokens:,} tokens, {sample.num_trained:,} in the loss"
            parts += ["", Text(head, style="dim"), sample_text(sample, in_colour=in_colour)]
    return parts


def sample_text(sample: Sample, *, in_colour: bool) -> Text:
    """A sample as running text in which one sees what counts in the loss; its middle is left out if it is long."""
    text = Text()
    pieces = sample.pieces
    is_long = len(pieces) > HEAD_PIECES + TAIL_PIECES
    _append(text, pieces[:HEAD_PIECES] if is_long else pieces, in_colour=in_colour)
    if is_long:
        middle = pieces[HEAD_PIECES:-TAIL_PIECES]
        counting = sum(piece.trained for piece in middle)
        text.append(f"\n[{len(middle):,} more, {counting:,} in the loss]\n", style="italic")
        _append(text, pieces[-TAIL_PIECES:], in_colour=in_colour)
    text.rstrip()
    return text


def _append(text: Text, pieces: Iterable[Piece], *, in_colour: bool) -> None:
    trained = False
    for piece in pieces:
        if piece.trained != trained and not in_colour:
            text.append("⟦" if piece.trained else "⟧")
        trained = piece.trained
        style = "green" if trained else "dim"
        text.append(visible(piece.text), style=f"bold {style}" if piece.special else style)
    if trained and not in_colour:
        text.append("⟧")


def cache_table(entries: Sequence[Entry], downloads: Sequence[Path], rows: Sequence[Path]) -> RenderableType:
    """Prepared rows, the largest first, files fetched from other machines, rows passed in Python, and the space of all.

    Args:
        entries: Sets of prepared rows.
        downloads: Copies of files.
        rows: Files of rows that callers held in memory.
    """
    table = plain_table("source", "contents", *numbers("sequences", "tokens", "size", "age"))
    for entry in entries:
        counts = (f"{entry.account[name]:,}" for name in ("num_sequences", "num_tokens"))
        holds = HOLDS[entry.kind]
        table.add_row(Text(entry.source), holds, *counts, gib(entry.size_bytes), _age(entry.path))
    num_bytes = sum(entry.size_bytes for entry in entries)
    for noun, files in (("downloaded file", downloads), ("dataset file", rows)):
        if files:
            newest = max(files, key=lambda file: file.stat().st_mtime)
            size = sum(file.stat().st_size for file in files)
            table.add_row(counted(len(files), noun), "", "", "", gib(size), _age(newest))
            num_bytes += size
    table.add_row("total", "", "", "", gib(num_bytes), "", style="bold")
    return table


def _age(path: Path) -> str:
    """Return the age of a file in words: `3 days`."""
    seconds = max(0.0, time.time() - path.stat().st_mtime)
    for noun, unit_seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= unit_seconds:
            return counted(int(seconds // unit_seconds), noun)
    return "now"


def _heading(title: str, explanation: str = "") -> Text:
    return Text.assemble((title, "bold"), (f"  {explanation}", "dim"))


def _mixture_table(report: DataReport) -> Table:
    columns = numbers("weight", "sequences", "used", "tokens", "share")
    table = plain_table("source", *columns, header_style="dim")
    for part in report.mixture:
        counts = (f"{number:,}" for number in (part.num_available, part.num_taken, part.num_tokens))
        weight = "–" if part.weight is None else f"{part.weight:g}"
        table.add_row(Text(part.source), weight, *counts, f"{part.token_share:.1%}")
    return table


def _facts_table(source: SourceReport, report: DataReport) -> Table:
    table = plain_table(Column(style="cyan", no_wrap=True), Column(), gap=2, shows_header=False)
    for name, words in source.facts(report.max_length, is_packed=report.is_packed):
        table.add_row(name, Text(words))
    return table


def _histogram_table(source: SourceReport, max_length: int) -> Table:
    columns = *numbers("", no_wrap=True), Column(width=BAR_WIDTH, no_wrap=True), *numbers("")
    table = plain_table(*columns, gap=2, shows_header=False)
    most = max(bar.num_rows for bar in source.histogram)
    last = source.histogram[-1].high
    for bar in source.histogram:
        table.add_row(bar.label, Text(_bar(bar.num_rows / most), style="cyan"), f"{bar.num_rows:,}")
        if bar.high == max_length or bar.high == last < max_length:
            table.add_row(Text("max_length", style="red"), Text("╌" * BAR_WIDTH, style="red"), f"{max_length:,}")
    return table


def _bar(share: float) -> str:
    eighths = max(round(share * BAR_WIDTH * 8), 1 if share else 0)
    return "█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def _special_tokens_table(source: SourceReport) -> Table:
    table = plain_table("token", "used as", *numbers("id", "count", "trained"), header_style="dim")
    for token in source.special_tokens:
        counts = (f"{number:,}" for number in (token.num_tokens, token.num_trained))
        table.add_row(Text(visible(token.text)), ", ".join(token.roles), str(token.id), *counts)
    return table
