"""Diagnosis of a run as a card: the cause, in its own words, and the next steps."""

from html import escape

from tunekit import frontend
from webui.site import Site
from webui.words import Words, next_step

ADVISED = ("killed", "disk", "package", "hung")
"""Causes for which there is a word of advice that the run itself does not give."""


def card(site: Site, words: Words, name: str, found: frontend.Diagnosis) -> str:
    """The card.

    Args:
        site: The workspace.
        words: The texts.
        name: The run's name.
        found: Why it ended.
    """
    title = escape(words(f"controls.cause_{found.cause}"))
    if found.rank is not None:
        title += f" <span class='controls-rank'>{escape(words('controls.rank', rank=found.rank))}</span>"
    parts = [f"<h2>{title}</h2>", f"<p class='controls-what'>{escape(found.what)}</p>"]
    if found.hint:
        parts.append(f"<p class='controls-hint'>{escape(found.hint)}</p>")
    if found.cause in ADVISED:
        parts.append(f"<p>{escape(words(f'controls.advice_{found.cause}'))}</p>")
    if found.changes:
        parts.append("".join(f"<p><code>{escape(change)}</code></p>" for change in found.changes))
    if not site.read_only:
        key = "again" if found.changes else "again_plain"
        link = site.link(words.language, "new", from_=f"run:{name}", set=list(found.changes) or None)
        parts.append(next_step(link, words(f"controls.{key}"), kind="controls-again"))
    parts += [_details(words("controls.where"), found.trace), _details(words("controls.log"), found.log)]
    return f"<section class='controls-card' role='alert'>{''.join(parts)}</section>"


def _details(title: str, text: str | None) -> str:
    if not text or not text.strip():
        return ""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
