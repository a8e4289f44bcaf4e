"""The table of runs as HTML: which runs and columns it has, in which order, and what an empty workspace offers.

Besides its own columns it has those of recipe fields in which the runs differ. Which are shown is kept by the browser.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from tunekit import frontend
from webui.listing import Line
from webui.run_parts import duration, empty, moment, state_words
from webui.site import Site
from webui.words import Words

STORAGE_KEY = "tunekit-columns"

COLUMNS = (
    *("state", "method", "model", "step", "measure", "held_out", "tokens_per_second", "left", "started"),
    *("elapsed", "note"),
)
"""Columns besides the name, in their order."""

DEFAULT_COLUMNS = COLUMNS[:-2]

ORDERS = ("started", "name", "measure", "held_out", "tokens_per_second", "elapsed")
"""Columns that the table is sorted by, besides recipe fields."""


PAGE_RUNS = 50
"""Runs that the table shows at first, and that it shows more at each request."""


def kept_columns() -> gr.BrowserState:
    """Return the browser's choice of columns."""
    # Fixed, so that it outlives a restart of the server; it hides nothing from the browser that holds it.
    return gr.BrowserState(list(DEFAULT_COLUMNS), storage_key=STORAGE_KEY, secret="tunekit")


def columns_in(kept: Any) -> list[str]:
    """Return the columns that a browser stored, in the order of the table; those of recipe fields last."""
    chosen = [key for key in kept if isinstance(key, str)] if isinstance(kept, list) else list(DEFAULT_COLUMNS)
    return [key for key in COLUMNS if key in chosen] + [key for key in dict.fromkeys(chosen) if "." in key]


def column_title(key: str, words: Words) -> str:
    """Return the title of a column; that of a recipe field is its key."""
    return key if "." in key else words(f"runs.{key}")


def ordered(lines: Sequence[Line], by: Any, fields: dict[str, dict[str, str]] | None = None) -> list[Line]:
    """Return runs in the order of a column, the best first; those without a value last, and otherwise the newest first.

    Args:
        lines: The runs, the newest first.
        by: One of `ORDERS`, or a recipe field; anything else: the newest first.
        fields: Values of the recipe fields, by run and key.
    """
    if by == "name":
        return sorted(lines, key=lambda line: line.name)
    if isinstance(by, str) and "." in by:
        return sorted(lines, key=lambda line: _field_order((fields or {}).get(line.name, {}).get(by)))
    if by not in ("measure", "held_out", "tokens_per_second", "elapsed"):
        return list(lines)

    def place(line: Line) -> tuple[bool, str, float]:
        values = {"measure": line.value, "held_out": line.held_out, "elapsed": line.seconds}
        value = values.get(by, line.tokens_per_second)
        if value is None:
            return True, "", 0.0
        if by in ("tokens_per_second", "elapsed"):
            return False, "", value if by == "elapsed" else -value
        # Losses and rewards are not compared with each other.
        return False, line.measure, value if frontend.direction_of(line.measure, ()) == "less" else -value

    return sorted(lines, key=place)


def _field_order(text: str | None) -> tuple[int, float, str]:
    """Sort numbers by value, before words, and missing fields last."""
    if text is None:
        return 2, 0.0, ""
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text


def found(lines: Sequence[Line], search: str, states: Sequence[str], tags: Sequence[str]) -> list[Line]:
    """The runs that have every word that is looked for, one of the states, and all tags."""
    words_searched = search.lower().split()
    return [
        line
        for line in lines
        if all(
            any(word in text.lower() for text in (line.name, line.method, line.model, line.note, *line.tags))
            for word in words_searched
        )
        and (not states or line.state in states)
        and set(tags) <= set(line.tags)
    ]


def table_of(
    lines: Sequence[Line],
    site: Site,
    words: Words,
    *,
    search: str = "",
    states: Sequence[str] = (),
    tags: Sequence[str] = (),
    columns: Sequence[str] = DEFAULT_COLUMNS,
    fields: dict[str, dict[str, str]] | None = None,
    limit: int = PAGE_RUNS,
) -> str:
    """The table as HTML: a form that leads to the comparison of the runs that are ticked.

    Args:
        lines: The runs.
        site: The workspace.
        words: The texts.
        search: Words to find.
        states: States to show; empty: all.
        tags: Tags that a run must have.
        columns: The columns besides the name.
        fields: Values of the recipe fields, by run and key.
        limit: Runs to show at most; a button shows more.
    """
    if not lines:
        return first_steps(site, words)
    some = found(lines, search, states, tags)
    if not some:
        return empty(words("runs.none_found", num=len(lines)))
    keys = ("compare", "name", *columns)
    heads = "".join(f"<th scope='col' class='{_class(key)}'>{escape(column_title(key, words))}</th>" for key in keys)
    rows = "".join(_row(line, site, words, keys, (fields or {}).get(line.name, {})) for line in some[:limit])
    more = (
        f"<p class='runs-more-line'>{escape(words('runs.shown', num=limit, of=len(some)))} "
        f"<button type='button' class='shell-button runs-more'>{escape(words('runs.more'))}</button></p>"
        if len(some) > limit
        else ""
    )
    return (
        f"<form action='{escape(site.link(words.language, 'compare'))}' method='get'><div class='runs-wide'>"
        f"<table class='runs-table runs-all'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{more}"
        f"<p class='runs-compare-line'><button class='shell-button' disabled>{escape(words('runs.compare_chosen'))}"
        f"</button> <span id='runs-why'>{escape(words('runs.choose_two'))}</span></p></form>"
    )


def _class(key: str) -> str:
    return "runs-field" if "." in key else f"runs-{key}"


def _row(line: Line, site: Site, words: Words, keys: Sequence[str], fields: dict[str, str]) -> str:
    name = escape(line.name)
    link = escape(site.link(words.language, "runs", run=line.name))
    tags = "".join(
        f" <button type='button' class='runs-tag' data-tag='{escape(tag)}' "
        f"title='{escape(words('runs.only_tag', tag=tag))}'>{escape(tag)}</button>"
        for tag in line.tags
    )
    pick = (
        f"<input type='checkbox' name='run' value='{name}' id='pick-{name}' "
        f"aria-label='{escape(words('runs.pick', name=line.name))}'>"
    )
    steps = f"{line.step:,}" if line.num_steps is None else f"{line.step:,} / {line.num_steps:,}"
    cells = {
        "compare": pick,
        "name": f"<a id='run-{name}' href='{link}'>{name}</a>{tags}",
        "state": state_words(line.state, words),
        "method": escape(line.method),
        "model": escape(line.model),
        "step": steps,
        "measure": _measure(line, words),
        "held_out": "–" if line.held_out is None else f"{line.held_out:.4g}",
        "tokens_per_second": "–" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}",
        "left": _duration(line.seconds_left, words),
        "started": moment(line.started) if line.started else "–",
        "elapsed": _duration(line.seconds, words),
        "note": escape(line.note.partition("\n")[0]) or "–",
    }
    texts = {key: cells[key] if key in cells else escape(fields.get(key, "–")) for key in keys}
    return "<tr>" + "".join(
        f"<td class='{_class(key)}{' runs-unknown' if text == '–' else ''}' "
        f"data-label='{escape(column_title(key, words))}'>{text}</td>"
        for key, text in texts.items()
    ) + "</tr>"  # fmt: skip


def _duration(seconds: float | None, words: Words) -> str:
    return "–" if seconds is None else escape(duration(seconds, words))


def _measure(line: Line, words: Words) -> str:
    """Return the metric that best tells whether a run learns."""
    if line.value is None:
        return "–"
    kind = {"reward": "reward", "rewards/margins": "margins", "margin": "margins"}.get(line.measure, "loss")
    return f"{escape(words(f'charts.{kind}'))} {line.value:.4g}"


def first_steps(site: Site, words: Words) -> str:
    """Return the cards of a workspace without runs: a first run, one's own data, and runs of other folders."""
    cards = {
        "try": site.link(words.language, "new", from_="recipe:sft/quickstart"),
        "data": site.link(words.language, "data"),
        "see": None,
    }
    commands = {
        "try": "tunekit train sft/quickstart",
        "data": "tunekit data sft/quickstart data.train=rows.jsonl",
        "see": "tunekit ui --root FOLDER",
    }
    # A server that only shows starts nothing.
    keys = ("see",) if site.read_only else tuple(cards)
    sections = [_card(key, cards[key], commands[key], words) for key in keys]
    return f"<p class='runs-empty'>{escape(words('runs.none'))}</p><div class='runs-cards'>{''.join(sections)}</div>"


def _card(key: str, link: str | None, command: str, words: Words) -> str:
    button = (
        f"<p><a class='shell-button' href='{escape(link)}'>{escape(words(f'runs.card_{key}_go'))}</a></p>"
        if link is not None
        else ""
    )
    return (
        f"<section class='runs-card'><h2>{escape(words(f'runs.card_{key}'))}</h2>"
        f"<p>{escape(words(f'runs.card_{key}_help'))}</p>{button}"
        f"<p class='runs-card-command'>{escape(words('runs.in_terminal'))} <code>{escape(command)}</code></p></section>"
    )
