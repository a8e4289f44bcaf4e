"""All rows of a source in numbers: how long they are and where they are cut, what is left out and mixed.

The chart is a Vega-Lite specification, plain data that the browser draws.
"""

from collections.abc import Iterable
from html import escape
from typing import Any

from gradio.components.plot import PlotData

from tunekit import frontend
from webui import charts
from webui.chart_layers import TEXT
from webui.words import Words

KEPT, CUT = "#3b82f6", "#f59e0b"
"""Of rows up to the longest length, and of those beyond it."""


def length_chart(words: Words, source: frontend.SourceReport, max_length: int) -> PlotData:
    """Rows by length in tokens, before anything is cut, with the line at which they are."""
    bars = [
        {"range": bar.label, "rows": bar.num_rows, "kind": "cut" if bar.low > max_length else "kept"}
        for bar in source.histogram
    ]
    order = [bar["range"] for bar in bars]
    last = next((bar.label for bar in source.histogram if bar.high == max_length), None)
    beyond = last is None  # every row is shorter: the line is behind the last bar
    x: dict[str, Any] = {"field": "range", "type": "ordinal", "sort": order, "title": words("data.tokens_of_row")}
    scale = {"domain": ["kept", "cut"], "range": [KEPT, CUT]}
    colour = {"field": "kind", "type": "nominal", "legend": None, "scale": scale}
    layers: list[dict[str, Any]] = [
        {
            "data": {"values": bars},
            "mark": {"type": "bar", "tooltip": True},
            "encoding": {
                "x": {**x, "axis": {"labelAngle": -40}},
                "y": {
                    "field": "rows",
                    "type": "quantitative",
                    "title": words("data.rows"),
                    "axis": {"format": "~s"},
                },
                "color": colour,
                "tooltip": [
                    {"field": "range", "title": words("data.tokens")},
                    {"field": "rows", "title": words("data.rows"), "format": ","},
                ],
            },
        }
    ]
    line = [{"range": order[-1] if last is None else last, "said": f"max_length {max_length:,}"}]
    place = {**x, "bandPosition": 1}
    layers.append(
        {
            "data": {"values": line},
            "mark": {"type": "rule", "color": CUT, "strokeWidth": 2, "strokeDash": [6, 4] if beyond else [1, 0]},
            "encoding": {"x": place},
        }
    )
    side: dict[str, Any] = {"align": "right", "dx": -6} if beyond else {"align": "left", "dx": 6}
    text = {"type": "text", **side, "y": 6, "color": TEXT}
    layers.append({"data": {"values": line}, "mark": text, "encoding": {"x": place, "text": {"field": "said"}}})
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "description": words("data.chart", source=source.source, max_length=f"{max_length:,}"),
        "width": "container",
        "height": 240,
        "autosize": {"type": "fit", "contains": "padding"},
        "background": "transparent",
        "layer": layers,
        "config": charts.CONFIG,
        "usermeta": {"embedOptions": {"renderer": "svg", "actions": False}},
    }
    return PlotData(type="altair", plot=charts.to_text(spec))


def numbers(words: Words, report: frontend.DataReport, source: frontend.SourceReport) -> str:
    """Everything that was counted in one source, and what should be looked at."""
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in report.warnings())
    warnings = f"<ul class='data-warnings' role='status'>{warnings}</ul>" if warnings else ""
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in _cards(words, report, source)
    )
    ends = (
        f"<p class='data-soft'>{escape(words('data.end_token', said=source.end_token_words))}</p>"
        if source.packing
        else ""
    )
    return f"{warnings}<dl class='data-numbers'>{cards}</dl>{ends}"


def _cards(words: Words, report: frontend.DataReport, source: frontend.SourceReport) -> list[tuple[str, str]]:
    lengths = source.lengths
    cards = [
        (words("data.all_rows"), f"{source.num_rows:,}"),
        (words("data.dropped"), _share(source.num_dropped, source.num_rows)),
        (words("data.truncated"), _share(source.num_truncated, source.num_rows)),
        (words("data.sequences"), f"{source.num_sequences:,}"),
        (words("data.all_tokens"), f"{source.num_tokens:,}"),
        (words("data.counting"), _share(source.num_trained, source.num_tokens)),
        (words("data.lengths"), f"{lengths.min:,} · {lengths.median:,} · {lengths.p95:,} · {lengths.max:,}"),
        (words("data.duplicates"), f"{source.duplicates.num_rows:,}"),
    ]
    if source.num_split:
        cards.insert(3, (words("data.split_texts"), f"{source.num_split:,}"))
    for title, sentence in source.media_facts:
        cards.insert(6, (words(f"data.{title}"), sentence))
    if source.packing is not None:
        packing = source.packing
        cards.append((words("data.packed", length=f"{report.max_length:,}"), f"{packing.packed_share:.1%}"))
        cards.append((words("data.padded", size=packing.batch_size), f"{packing.padded_share:.1%}"))
    return cards


def _share(number: int, whole: int) -> str:
    return f"{number:,} ({number / whole:.1%})" if number and whole else f"{number:,}"


def mixture_table(words: Words, report: frontend.DataReport) -> str:
    """Render an epoch's share of each of several sources."""
    if not report.mixture:
        return ""
    keys = ("source", "weight", "available", "taken", "all_tokens", "token_share")
    rows = "".join(
        f"<tr><th scope='row'>{escape(part.source)}</th><td>{'–' if part.weight is None else f'{part.weight:g}'}</td>"
        f"<td>{part.num_available:,}</td><td>{part.num_taken:,}</td><td>{part.num_tokens:,}</td>"
        f"<td><meter min='0' max='1' value='{part.token_share:.4f}'></meter> {part.token_share:.1%}</td></tr>"
        for part in report.mixture
    )
    sentence = words("data.epoch", number=f"{report.num_train:,}")
    title = f"<h3>{escape(words('data.mixture'))}</h3><p class='data-soft'>{escape(sentence)}</p>"
    return title + table_html([words(f"data.{key}") for key in keys], rows)


def table_html(heads: Iterable[str], rows: str) -> str:
    """Render a table of numbers, whose rows are HTML, below the names of its columns."""
    row = "".join(f"<th scope='col'>{escape(head)}</th>" for head in heads)
    return (
        f"<div class='data-scroll'><table class='data-table data-right'><thead><tr>{row}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )
