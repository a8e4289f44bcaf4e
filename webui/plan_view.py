"""Plans as HTML: the choice, memory by part against the card, figures, reasons, and what was ruled out by which number.

The labels are in the page's language, and so are the names of decisions and parts. What a plan says with them, its
choices and reasons, is put together by the planner in English.
"""

from collections.abc import Iterable, Iterator
from html import escape

import tunekit
from tunekit import frontend
from webui.words import Words

FIGURES = {"GiB": "memory", "tokens/s": "speed", "time": "time", "USD": "cost", "batch": "batch", "host GiB": "host"}
"""The figures that are shown, by the name that `plan_figures` has for them."""

BRIEF = ("GiB", "time", "tokens/s", "USD")
"""Of them, those by which one decides whether to start."""


def plan_html(plan: tunekit.Plan, words: Words) -> str:
    """A plan."""
    parts = [
        f"<p class='plan-headline'>{escape(_headline(plan, words))}</p>",
        _figures(plan, words),
        _advice(plan, words),
        _bar(plan, words),
        _legend(plan, words),
        _table(
            words("plan.decisions"),
            ((words.translated(decision.topic), decision.choice, decision.why) for decision in plan.decisions),
            is_open=True,
        ),
    ]
    if plan.rejected:
        ruled_out = ((decision.layout.name, decision.why) for decision in plan.rejected)
        parts.append(_table(words("plan.rejected", number=len(plan.rejected)), ruled_out, is_open=True))
    if plan.change_first:
        change = f"<code lang='en'>{escape(plan.change_first)}</code>"
        parts.append(f"<p class='plan-first'>{escape(words('plan.change_first'))} {change}</p>")
    parts.append(
        _table(
            words("plan.given"),
            ((words.translated(decision.topic), decision.choice, decision.why) for decision in plan.given),
            is_open=False,
        )
    )
    return f"<article class='plan-view'>{''.join(parts)}</article>"


def _advice(plan: tunekit.Plan, words: Words) -> str:
    """Render the better recipes for the machine, where there are any."""
    return "".join(
        f"<p class='plan-first'>{escape(words('plan.advice'))} "
        f"<span lang='en'><code>{escape(reason.choice)}</code>: {escape(reason.why)}</span></p>"
        for reason in plan.advice
    )


def _headline(plan: tunekit.Plan, words: Words) -> str:
    """Return the choice in one sentence, in the page's language as far as it is not unusual."""
    if plan.unchecked:
        return plan.headline
    layout = ", ".join(words.translated(part) for part in plan.layout_words.split(", "))
    model, devices = plan.model_words, plan.devices_words
    return words("plan.headline", adapter=plan.recipe.adapter.type, model=model, devices=devices, layout=layout)


def brief_html(plan: tunekit.Plan | tunekit.TunekitError, where: str, words: Words, effect: str) -> str:
    """Render whether there is a plan on a machine, with its figures, in a few lines; a link leads to the whole.

    Args:
        plan: The plan, or why there is none.
        where: The machine.
        words: The page's texts.
        effect: The effect of the last edit, as HTML.
    """
    if isinstance(plan, tunekit.TunekitError):
        verdict = (
            f"<p class='plan-verdict'>✕ {escape(words('plan.fits_not', where=where))}</p>"
            f"{_lack(plan, words) or _in_english(plan.problem)}"
        )
    else:
        verdict = f"<p class='plan-verdict'>✓ {escape(words('plan.fits', where=where))}</p>{_cells(plan, words, BRIEF)}"
    link = f"<a href='#plan-title'>{escape(words('plan.whole'))}</a>"
    return f"<div class='plan-view' role='status'>{verdict}{effect}{link}</div>"


def refused_html(error: tunekit.TunekitError, words: Words) -> str:
    """Render why there is no plan: needed and available memory, and what would fit."""
    bar = ""
    lack = _lack(error, words)
    if lack and isinstance(error, tunekit.PlanError) and error.needed_bytes and error.limit_bytes:
        share = 100 * error.limit_bytes / max(error.needed_bytes, error.limit_bytes)
        bar = (
            f"<div class='plan-bar plan-short' aria-hidden='true'>"
            f"<span style='width:100%'></span><i style='left:{share:.2f}%'></i></div>{lack}"
        )
    hint = f"<p class='plan-hint' lang='en'>{escape(error.hint)}</p>" if error.hint else ""
    return (
        f"<article class='plan-view plan-refused' role='alert'><p class='plan-headline' lang='en'>"
        f"{escape(error.problem)}</p>{bar}{hint}</article>"
    )


def _lack(error: tunekit.TunekitError, words: Words) -> str:
    """Render needed and available memory; empty where that is not the reason."""
    if not isinstance(error, tunekit.PlanError) or not error.needed_bytes or not error.limit_bytes:
        return ""
    needed, limit = frontend.gib(error.needed_bytes), frontend.gib(error.limit_bytes)
    return f"<p>{escape(words('plan.short', needed=needed, limit=limit))}</p>"


def _in_english(text: str) -> str:
    return f"<p lang='en'>{escape(text)}</p>"


def side_by_side(views: Iterable[tuple[str, str]]) -> str:
    """Several plans, each below the name of its machine."""
    columns = "".join(f"<section><h3>{escape(name)}</h3>{view}</section>" for name, view in views)
    return f"<div class='plan-columns'>{columns}</div>"


def _figures(plan: tunekit.Plan, words: Words) -> str:
    """Render memory, speed, time and cost; and the basis of these figures."""
    basis = f"<p class='plan-basis' lang='en'>{escape(plan.speed_basis)}</p>" if plan.speed_basis else ""
    return _cells(plan, words, FIGURES) + basis


def _cells(plan: tunekit.Plan, words: Words, names: Iterable[str]) -> str:
    """Figures of a plan by their names, each in a box."""
    figures = frontend.plan_figures(plan)
    units = {"GiB": " GiB", "host GiB": " GiB", "USD": " USD", "tokens/s": ""}
    cells = "".join(
        f"<div><dt>{escape(words(f'plan.{FIGURES[name]}'))}</dt>"
        f"<dd>{escape(_of(figures[name], words) + units.get(name, ''))}</dd></div>"
        for name in names
        if name in figures
    )
    return f"<dl class='plan-figures'>{cells}</dl>"


def _of(figure: str, words: Words) -> str:
    """A figure, such as `1.3 of 16`, in the page's language."""
    used, of, total = figure.partition(" of ")
    return words("plan.used", used=used, total=total) if of else figure


def _bar(plan: tunekit.Plan, words: Words) -> str:
    """Memory of one device: parts one behind the other, the limit, and what other programs hold."""
    total = plan.device.memory_total_bytes
    scale = max(total, plan.memory.total_bytes)
    named = [
        (f"{words.translated(part)} {frontend.gib(size)}", size, colour) for part, size, colour in plan.drawn_parts()
    ]
    parts = "".join(
        f"<span title='{escape(name)}' style='width:{100 * size / scale:.3f}%;background:{colour}'></span>"
        for name, size, colour in named
    )
    occupied = total - plan.device.memory_free_bytes
    occupied_bar = ""
    if occupied > 0:
        label = words("plan.others", size=frontend.gib(occupied))
        occupied_bar = f"<b title='{escape(label)}' style='width:{100 * occupied / scale:.3f}%'></b>"
    limit = f"<i style='left:{min(100.0, 100 * plan.memory_limit_bytes / scale):.3f}%'></i>"
    label = words(
        "plan.bar",
        parts=", ".join(name for name, _, _ in named),
        total=frontend.gib(plan.memory.total_bytes),
        limit=frontend.gib(plan.memory_limit_bytes),
    )
    return f"<div class='plan-bar' role='img' aria-label='{escape(label)}'>{parts}{occupied_bar}{limit}</div>"


def _legend(plan: tunekit.Plan, words: Words) -> str:
    """Render the legend of the parts, and the usable memory of each device."""
    items = "".join(
        f"<li><span style='background:{colour}'></span>{escape(words.translated(part))} {frontend.gib(size)}</li>"
        for part, size, colour in plan.drawn_parts()
    )
    label = words(
        "plan.room",
        limit=frontend.gib(plan.memory_limit_bytes),
        device=plan.device.name,
        total=frontend.gib(plan.device.memory_total_bytes),
        free=frontend.gib(plan.device.memory_free_bytes),
    )
    elsewhere = "".join(f"<p class='plan-basis' lang='en'>{escape(line)}</p>" for line in plan.elsewhere_lines())
    return f"<ul class='plan-legend'>{items}</ul><p class='plan-basis'>{escape(label)}</p>{elsewhere}"


def _table(title: str, rows: Iterable[tuple[str, ...]], *, is_open: bool) -> str:
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>"
        f"<table>{''.join(_rows(rows))}</table></details>"
    )


def _rows(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    for name, *cells in rows:
        texts = "".join(f"<td lang='en'>{escape(cell)}</td>" for cell in cells)
        yield f"<tr><th scope='row'>{escape(name)}</th>{texts}</tr>"
