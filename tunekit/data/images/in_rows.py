"""Pictures of a row, in the ways that datasets hold them, brought to one.

A row's texts have a mark where each picture stands, and its column `images` has the pictures in this order. What is
read: parts of a message's content, as OpenAI, Transformers and Axolotl write them; and a column `images` or `image`
beside texts with `<image>`, as LLaVA, ShareGPT, LLaMA-Factory and ms-swift do, or beside parts `{type: image}`, as TRL
does. Where no text has a mark, the pictures stand before the first question, as TRL puts them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunekit.data.formats.messages import text as checked_text
from tunekit.data.formats.row_formats import BadRow, Row, counted, described
from tunekit.data.images.pictures import find_picture

MARK = "\ufffc"
"""Stands for a picture in a text: Unicode's OBJECT REPLACEMENT CHARACTER."""

WRITTEN = "<image>"
"""Mark of a picture in datasets that have a column of them."""

COLUMNS = ("images", "image")

BOXES = "objects"
"""Column of boxes that ms-swift writes into texts, as each model reads them."""

_TURNS = ("messages", "conversations", "prompt", "completion")
_ANSWERS = ("chosen", "rejected")
_TEXTS = ("instruction", "input")


class _Gathered:
    """Pictures of a row, in the order of its texts."""

    def __init__(self, beside: list[object] | None) -> None:
        self.beside = beside
        self.num_taken = 0
        self.holds_mark = False
        """True if a text has the character of the mark by itself."""
        self.found: list[tuple[object, str]] = []

    def mark(self, value: object | None, where: str) -> str:
        """Take a picture, the next one of the column where the text has none of its own, and return its mark."""
        if value is None:
            column = self.beside or []
            # A picture too many is told once all are counted.
            value = column[self.num_taken] if self.num_taken < len(column) else None
            where = f"images[{self.num_taken}]"
            self.num_taken += 1
        self.found.append((value, where))
        return MARK


def with_caption(row: Row, folder: Path | None, names: Mapping[str, str]) -> tuple[Row, list[dict[str, Any]]]:
    """Return a conversation of a picture, with its prompt if it has one, answered by its caption; and the picture.

    Args:
        row: A row of format `captions`.
        folder: Folder that paths of pictures start from.
        names: From our names of columns to those of the source.

    Raises:
        BadRow: The picture cannot be had, or there is no caption.
    """
    prompt = row.get("prompt") or ""
    if not isinstance(prompt, str):
        raise BadRow(f"{names.get('prompt', 'prompt')} must be a string, got {described(prompt)}")
    caption = checked_text(row["caption"], names.get("caption", "caption"))
    if MARK in prompt or MARK in caption:
        raise BadRow("the text contains U+FFFC, which marks images here; remove it")
    try:
        picture = find_picture(row["image"], names.get("image", "image"), folder)
    except BadRow as error:
        if names.get("caption") != "text":
            raise
        raise BadRow(f"{error} (data.format=text reads only the texts)") from None
    turns = [{"role": "user", "content": MARK + prompt}, {"role": "assistant", "content": caption}]
    remainder = {name: value for name, value in row.items() if name not in ("image", "caption", "prompt")}
    return {**remainder, "messages": turns}, [picture.to_row()]


def as_parts(messages: Sequence[Row]) -> list[Row]:
    """Return messages whose contents are lists of parts, as chat templates of vision models read them."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for i, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] * (i > 0)
        parts += [{"type": "text", "text": piece}] * bool(piece)
    return parts or [{"type": "text", "text": ""}]


def with_pictures(row: Row, folder: Path | None, store: Path | None = None) -> tuple[Row, list[dict[str, Any]]]:
    """Return a row with marks for its pictures, without columns of pictures, and the pictures in their order.

    Args:
        row: The row as it was read, under our names of columns.
        folder: Folder that paths of pictures start from.
        store: Folder for pictures in data URLs where a row is a conversation that somebody holds, and nothing else is
            read then; None for the cache.

    Raises:
        BadRow: A picture cannot be had, or marks and pictures do not fit together.
    """
    beside = _beside(row)
    boxes = row.get(BOXES)
    if isinstance(boxes, Mapping) and boxes.get("bbox"):
        raise BadRow(f"column {BOXES} contains boxes; write them into the texts in the model's format, and remove it")
    gathered = _Gathered(beside)
    marked = {name: _marked(name, value, gathered) for name, value in row.items() if name not in (*COLUMNS, *_ANSWERS)}
    marked |= _answers(row, gathered)
    if beside and not gathered.num_taken:
        marked = _before_first_question(marked, gathered, len(beside))
    if gathered.num_taken != len(beside or ()):
        raise BadRow(
            f"{counted(gathered.num_taken, f'{WRITTEN} mark')} in the texts, but "
            f"{counted(len(beside or ()), 'image')} in column images"
        )
    if not gathered.found:
        return row if beside is None else marked, []
    if gathered.holds_mark:
        raise BadRow("the text contains U+FFFC, which marks images here; remove it")
    return marked, [find_picture(value, where, folder, store).to_row() for value, where in gathered.found]


def _answers(row: Row, gathered: _Gathered) -> Row:
    """Texts of the columns of compared answers: each repeats the pictures of a prompt that is part of it."""
    answers: Row = {}
    num_before, num_taken, first = len(gathered.found), gathered.num_taken, None
    for name in [name for name in _ANSWERS if name in row]:
        own = _Gathered(gathered.beside)
        answers[name] = _marked(name, row[name], own)
        gathered.holds_mark |= own.holds_mark
        pictures = [value for value, _ in own.found]
        if num_before and pictures and pictures != [value for value, _ in gathered.found[:num_before]]:
            raise BadRow(f"{name} and prompt have different images")
        if first is not None and pictures != first[1]:
            raise BadRow(f"{first[0]} and {name} have different images")
        first = name, pictures
        if not num_before:
            gathered.found, gathered.num_taken = own.found, num_taken + own.num_taken
    return answers


def _beside(row: Row) -> list[object] | None:
    """The pictures of a row's own column; None without one, and where it is empty."""
    columns = [name for name in COLUMNS if row.get(name) not in (None, "", [])]
    if len(columns) > 1:
        raise BadRow("columns images and image both contain images; keep one of them")
    if not columns:
        return None
    value = row[columns[0]]
    values = value if isinstance(value, list) else [value]
    return [item for item in values if item is not None]


def _marked(name: str, value: object, gathered: _Gathered) -> object:
    if name in _ANSWERS and isinstance(value, Mapping):
        return _turn(value, name, gathered)
    if name in (*_TURNS, *_ANSWERS) and isinstance(value, list):
        return [_turn(turn, f"{name}[{i}]", gathered) for i, turn in enumerate(value)]
    if name in (*_TURNS, *_TEXTS) and isinstance(value, str) and gathered.beside and WRITTEN in value:
        if name in _TURNS:
            raise BadRow(f"{name} is a plain text, but images need messages; make it a list of messages")
        return _text(value, gathered)
    return value


def _turn(turn: object, where: str, gathered: _Gathered) -> object:
    if not isinstance(turn, Mapping):
        return turn
    key = "content" if "content" in turn else "value"
    content, num_before = turn.get(key), len(gathered.found)
    if isinstance(content, str):
        text = _text(content, gathered)
    elif isinstance(content, list):
        text = "".join(_part(part, f"{where}.{key}[{i}]", gathered) for i, part in enumerate(content))
    else:
        return turn
    speaker = turn.get("role", turn.get("from"))
    if len(gathered.found) > num_before and speaker in ("assistant", "gpt"):
        raise BadRow(f"{where} is an assistant message with an image; models answer in text")
    return {**turn, key: text}


def _text(text: str, gathered: _Gathered) -> str:
    gathered.holds_mark |= MARK in text
    if not gathered.beside:
        return text
    pieces = text.split(WRITTEN)
    return pieces[0] + "".join(gathered.mark(None, "") + piece for piece in pieces[1:])


def _part(part: object, where: str, gathered: _Gathered) -> str:
    """A part of a content as text: words, or the mark of a picture."""
    if isinstance(part, str):
        return _text(part, gathered)
    if not isinstance(part, Mapping):
        raise BadRow(f"{where} must be an object {{type}}, got {described(part)}")
    # Parquet and `datasets` give every part the keys of all parts, as nulls.
    fields = {key: value for key, value in part.items() if value is not None}
    kind = fields.get("type") or next((key for key in ("text", "image", "image_url") if key in fields), None)
    if kind == "text":
        text = fields.get("text", "")
        if not isinstance(text, str):
            raise BadRow(f"{where}.text must be a string, got {described(text)}")
        gathered.holds_mark |= MARK in text
        return text
    if kind not in ("image", "image_url"):
        raise BadRow(f"{where} is of type {kind}, but only text and images are supported")
    value = next(_values(fields), None)
    return gathered.mark(value, where)


def _values(part: Mapping[str, Any]) -> Iterator[object]:
    for key in ("image", "image_url", "path", "url", "bytes", "base64"):
        value = part.get(key)
        if key == "base64" and isinstance(value, str):
            value = f"data:;base64,{value}"
        if key == "image_url" and isinstance(value, Mapping):
            value = value.get("url")
        if value is not None:
            yield value


def _before_first_question(row: Row, gathered: _Gathered, num: int) -> Row:
    """Put all pictures of the column before the first message of the user."""
    for name in _TURNS:
        for i, turn in enumerate(row.get(name) or () if isinstance(row.get(name), list) else ()):
            key = "content" if "content" in turn else "value"
            if turn.get("role", turn.get("from")) in ("user", "human") and isinstance(turn.get(key), str):
                marks = "".join(gathered.mark(None, "") for _ in range(num))
                turns = [*row[name][:i], {**turn, key: marks + turn[key]}, *row[name][i + 1 :]]
                return {**row, name: turns}
    if isinstance(row.get("instruction"), str):
        return {**row, "instruction": "".join(gathered.mark(None, "") for _ in range(num)) + row["instruction"]}
    raise BadRow("column images contains images, but the row has no user message for them")
