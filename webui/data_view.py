"""Rows, their columns and what is wrong with them as HTML. Whatever stands in a row is escaped, and stays text."""

from collections.abc import Iterable, Mapping
from html import escape

import tunekit
from tunekit import frontend
from webui.words import Words, next_step, told

MOST_BAD = 100
"""Bad rows that are listed."""


def preview_status(words: Words, preview: frontend.DataPreview) -> str:
    """Describe the source in a sentence, and its problems."""
    parts = []
    if preview.format is not None:
        parts.append(f"<p class='data-format'>{escape(words('data.format_is', format=preview.format))}</p>")
    for problem in (preview.problem, preview.model_problem):
        if problem is not None:
            parts.append(told(tunekit.TunekitError(problem.what, hint=problem.hint)))
    if preview.notes:
        parts.append(_listed(preview.notes, "data-notes"))
    sentence = words("data.looked_at_all" if preview.is_whole else "data.looked_at", records=f"{preview.num_records:,}")
    if preview.num_records:
        good = words("data.good_rows", rows=f"{preview.num_rows:,}", bad=f"{len(preview.bad):,}")
        parts.append(f"<p class='data-soft'>{escape(sentence)} {escape(good)}</p>")
    return "".join(parts)


def columns_table(words: Words, preview: frontend.DataPreview) -> str:
    """The columns of a source: what each is read as, and what stands there."""
    if not preview.columns:
        return ""
    heads = "".join(f"<th scope='col'>{escape(words(f'data.{key}'))}</th>" for key in ("column", "read_as", "example"))
    reads = {column: reward for reward, column in preview.reads.items()}
    rows = "".join(
        f"<tr><th scope='row'><code>{escape(column.name)}</code></th>"
        f"<td>{_read_as(words, column.read_as, reads.get(column.name))}</td>"
        f"<td class='data-example'>{escape(column.example)}</td></tr>"
        for column in preview.columns
    )
    table = f"<table class='data-table'><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
    return f"<div class='data-scroll'>{table}</div>"


def _read_as(words: Words, read_as: str | None, reward: str | None) -> str:
    if read_as is not None:
        return f"<code>{escape(read_as)}</code>"
    sentence = words("data.read_by", reward=reward) if reward is not None else words("data.not_read")
    return f"<span class='data-soft'>{escape(sentence)}</span>"


def bad_rows(words: Words, preview: frontend.DataPreview) -> str:
    """The bad rows that were found, and what a run would do about them."""
    if not preview.bad:
        return ""
    allowed = len(preview.bad) <= preview.max_bad_rows
    what = words("data.bad_allowed" if allowed else "data.bad_refused", most=preview.max_bad_rows)
    lines = "".join(f"<li><code>{escape(bad.place)}</code> {escape(bad.reason)}</li>" for bad in preview.bad[:MOST_BAD])
    more = len(preview.bad) - MOST_BAD
    lines += f"<li>{escape(words('data.more_bad', number=f'{more:,}'))}</li>" if more > 0 else ""
    title = words("data.bad_rows", number=f"{len(preview.bad):,}")
    return (
        f"<details class='data-bad' {'' if len(preview.bad) > 20 else 'open'}><summary>{escape(title)}</summary>"
        f"<p>{escape(what)}</p><ul>{lines}</ul></details>"
    )


def rows_html(words: Words, preview: frontend.DataPreview) -> str:
    """Rows as their model reads them."""
    if not preview.rows:
        return f"<p class='data-soft'>{escape(words('data.no_rows'))}</p>" if preview.num_rows else ""
    has_tokens = any(row.sequences for row in preview.rows)
    key = _key(words) if has_tokens else ""
    return key + "".join(_row(words, row) for row in preview.rows)


def _key(words: Words) -> str:
    """Render the legend of the colours."""
    kinds = ("trained", "read", "special", "cut")
    marks = "".join(
        f"<span class='data-tokens'><span class='data-{kind}'>{escape(words(f'data.key_{kind}'))}</span></span>"
        for kind in kinds
    )
    return f"<p class='data-key'>{marks}</p>"


def _row(words: Words, row: frontend.RowPreview) -> str:
    label = "" if row.label is None else words("data.label_good" if row.label else "data.label_bad")
    label = f"<span class='data-label data-{'good' if row.label else 'worse'}'>{escape(label)}</span>" if label else ""
    left_out = (
        f"<p class='data-left-out'>{escape(words('data.left_out', why=row.left_out))}</p>" if row.left_out else ""
    )
    sides = "".join(_sequence(words, sequence, row.thumbnails) for sequence in row.sequences)
    several = " data-sides" if [sequence.name for sequence in row.sequences] == ["chosen", "rejected"] else ""
    more = (
        f"<p class='data-soft'>{escape(words('data.more_sequences', number=row.num_more))}</p>" if row.num_more else ""
    )
    fields = "".join(
        f"<dt><code>{escape(name)}</code></dt><dd>{escape(value)}</dd>" for name, value in row.fields.items()
    )
    fields = f"<dl class='data-fields'>{fields}</dl>" if fields else ""
    source = (
        f"<details><summary>{escape(words('data.row_itself'))}</summary>"
        f"<pre class='data-source'>{escape(row.source)}</pre></details>"
    )
    return (
        f"<article class='data-row'><header><code>{escape(row.place)}</code>{label}</header>{left_out}"
        f"<div class='data-sequences{several}'>{sides}</div>{more}{fields}{source}</article>"
    )


def _sequence(words: Words, one: frontend.ShownSequence, thumbnails: Mapping[str, str]) -> str:
    counts = words("data.sequence_counts", tokens=f"{one.num_tokens:,}", trained=f"{one.num_trained:,}")
    if one.name == "prompt":
        counts = words("data.prompt_counts", tokens=f"{one.num_tokens:,}")
    name = words(f"data.sequence_{one.name}")
    tokens = pieces(one.head, thumbnails)
    if one.num_hidden:
        tokens += f"<span class='data-gap'> … {escape(words('data.hidden', number=f'{one.num_hidden:,}'))} … </span>"
        tokens += pieces(one.tail, thumbnails)
    if one.num_cut:
        tokens += (
            f"<span class='data-gap' role='separator'>✂ {escape(words('data.cut', number=f'{one.num_cut:,}'))}</span>"
        )
        tokens += "".join(f"<span class='data-cut'>{escape(_visible(piece.text))}</span>" for piece in one.cut.pieces)
    return (
        f"<section class='data-{escape(one.name)}'><p class='data-head'><b>{escape(name)}</b> "
        f"<span class='data-soft'>{escape(counts)}</span></p><div class='data-tokens'>{tokens}</div></section>"
    )


def pieces(shown: frontend.Sample, thumbnails: Mapping[str, str]) -> str:
    """Tokens, each with its number and coloured by what it counts, and media in the place of theirs."""
    return "".join(
        _token(piece) if piece.medium is None else _medium(piece.text, thumbnails.get(piece.medium.digest))
        for piece in shown.pieces
    )


def _token(piece: frontend.Piece) -> str:
    name = f"{'data-trained' if piece.trained else 'data-read'}{' data-special' if piece.special else ''}"
    return (
        f"<span class='{name}' title='{escape(', '.join(map(str, piece.ids)))}'>{escape(_visible(piece.text))}</span>"
    )


def _medium(text: str, url: str | None) -> str:
    shown = "" if url is None else f"<img src='{escape(url)}' alt=''>"
    if url is not None and url.startswith("data:audio/"):
        shown = f"<audio controls preload='none' src='{escape(url)}'></audio>"
    return f"<span class='data-picture'>{shown}{escape(text)}</span>"


def _visible(text: str) -> str:
    """Text with a mark at every line break, and control characters as the pictures that stand for them."""
    return "".join(
        "↵\n" if letter == "\n" else chr(0x2400 + ord(letter)) if ord(letter) < 32 and letter != "\t" else letter
        for letter in text
    )


def _listed(lines: Iterable[str], name: str) -> str:
    return f"<ul class='{name}'>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def use_link(words: Words, address: str) -> str:
    """The way from here to a draft that trains on this."""
    return next_step(address, words("data.use"), kind="data-use")


def progress(said: str, done: int, total: int) -> str:
    """Render progress in words and as a bar."""
    bar = f"<progress max='{max(total, 1)}' value='{done}'></progress>"
    return f"<p class='data-soft' role='status'>{escape(said)} {bar}</p>"
