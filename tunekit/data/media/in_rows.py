"""Media of a row, in the ways that datasets hold them, brought to one.

A row's texts have a mark where each medium stands, and its column `__media__` has the media in this order. What is
read: parts of a message's content, as OpenAI, Transformers and Axolotl write them; and columns such as `images` or
`image` beside texts with `<image>`, as LLaVA, ShareGPT, LLaMA-Factory and ms-swift do, or beside parts `{type: image}`,
as TRL does. Where no text has a mark, the media of a column stand before the first question, as TRL puts them.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunekit.data.formats.messages import TEXT_PARTS
from tunekit.data.formats.messages import text as checked_text
from tunekit.data.formats.row_formats import BadRow, Row, counted, described
from tunekit.data.media.files import a
from tunekit.data.media.kinds import KINDS, MARKS, find_medium, nouns_of
from tunekit.recipe.sections.data import MediaKind

BOXES = "objects"
"""Column of boxes that ms-swift writes into texts, as each model reads them."""

_TURNS = ("messages", "conversations", "prompt", "completion")
_ANSWERS = ("chosen", "rejected")
_TEXTS = ("instruction", "input")

ANY_MARK = f"[{''.join(MARKS)}]"
"""Pattern of the mark of a medium."""


class _Gathered:
    """Media of a row, in the order of its texts."""

    def __init__(self, beside: Mapping[MediaKind, list[object]]) -> None:
        self.beside = beside
        """Media of the row's columns, of each kind that may stand in it."""
        self.num_taken = dict.fromkeys(beside, 0)
        self.held_mark: str | None = None
        """Character of a mark that a text has by itself."""
        self.found: list[tuple[MediaKind, object, str]] = []

    def mark(self, kind: MediaKind, value: object | None, where: str) -> str:
        """Take a medium, the next one of the column where the text has none of its own, and return its mark."""
        if value is None:
            column, num_before = self.beside[kind], self.num_taken[kind]
            # A medium too many is told once all are counted.
            value = column[num_before] if num_before < len(column) else None
            where = f"{KINDS[kind].columns[0]}[{num_before}]"
            self.num_taken[kind] += 1
        self.found.append((kind, value, where))
        return KINDS[kind].mark

    def note_mark(self, text: str) -> None:
        """Note a character of a mark in a text of a row."""
        self.held_mark = next((mark for mark in MARKS if mark in text), self.held_mark)


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
    _refuse_mark(next((mark for mark in MARKS if mark in prompt + caption), None))
    try:
        picture = find_medium("image", row["image"], names.get("image", "image"), folder)
    except BadRow as error:
        if names.get("caption") != "text":
            raise
        raise BadRow(f"{error} (data.format=text reads only the texts)") from None
    turns = [{"role": "user", "content": KINDS["image"].mark + prompt}, {"role": "assistant", "content": caption}]
    remainder = {name: value for name, value in row.items() if name not in ("image", "caption", "prompt")}
    return {**remainder, "messages": turns}, [picture.to_row()]


def as_parts(messages: Sequence[Row]) -> list[Row]:
    """Return messages whose contents are lists of parts, as chat templates of vision models read them."""
    return [{**message, "content": _parts(message["content"])} for message in messages]


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for piece in re.split(f"({ANY_MARK})", text):
        if piece in MARKS:
            parts.append({"type": MARKS[piece]})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]


def with_media(
    row: Row, folder: Path | None, kinds: Collection[MediaKind], store: Path | None = None
) -> tuple[Row, list[dict[str, Any]]]:
    """Return a row with marks for its media, without columns of media, and the media in their order.

    Args:
        row: The row as it was read, under our names of columns.
        folder: Folder that paths of media start from.
        kinds: Kinds of media that may stand in the row; columns of others are left as they are.
        store: Folder for media in data URLs where a row is a conversation that somebody holds, and nothing else is
            read then; None for the cache.

    Raises:
        BadRow: A medium cannot be had, or marks and media do not fit together.
    """
    beside = {kind: _beside(row, kind) for kind in kinds}
    boxes = row.get(BOXES)
    if isinstance(boxes, Mapping) and boxes.get("bbox"):
        raise BadRow(f"column {BOXES} contains boxes; write them into the texts in the model's format, and remove it")
    gathered = _Gathered({kind: column or [] for kind, column in beside.items()})
    columns = [column for kind in kinds for column in KINDS[kind].columns]
    marked = {name: _marked(name, value, gathered) for name, value in row.items() if name not in (*columns, *_ANSWERS)}
    marked |= _answers(row, gathered)
    for kind, column in gathered.beside.items():
        if column and not gathered.num_taken[kind]:
            marked = _before_first_question(marked, gathered, kind, len(column))
        if gathered.num_taken[kind] != len(column):
            of = KINDS[kind]
            raise BadRow(
                f"{counted(gathered.num_taken[kind], f'{of.written} mark')} in the texts, but "
                f"{counted(len(column), of.noun)} in column {of.columns[0]}"
            )
    if not gathered.found:
        return row if all(column is None for column in beside.values()) else marked, []
    _refuse_mark(gathered.held_mark)
    return marked, [find_medium(*medium, folder, store).to_row() for medium in gathered.found]


def _refuse_mark(mark: str | None) -> None:
    if mark is not None:
        noun = KINDS[MARKS[mark]].noun
        raise BadRow(f"the text contains U+{ord(mark):04X}, which marks {noun}s here; remove it")


def _answers(row: Row, gathered: _Gathered) -> Row:
    """Texts of the columns of compared answers: each repeats the media of a prompt that is part of it."""
    answers: Row = {}
    num_before, num_taken, first = len(gathered.found), dict(gathered.num_taken), None
    for name in [name for name in _ANSWERS if name in row]:
        own = _Gathered(gathered.beside)
        answers[name] = _marked(name, row[name], own)
        gathered.held_mark = gathered.held_mark or own.held_mark
        media = [value for _, value, _ in own.found]
        if num_before and media and media != [value for _, value, _ in gathered.found[:num_before]]:
            raise BadRow(f"{name} and prompt have different {nouns_of(gathered.beside)}")
        if first is not None and media != first[1]:
            raise BadRow(f"{first[0]} and {name} have different {nouns_of(gathered.beside)}")
        first = name, media
        if not num_before:
            gathered.found = own.found
            gathered.num_taken = {kind: num_taken[kind] + num for kind, num in own.num_taken.items()}
    return answers


def _beside(row: Row, kind: MediaKind) -> list[object] | None:
    """The media of a row's own column; None without one, and where it is empty."""
    of = KINDS[kind]
    columns = [name for name in of.columns if row.get(name) not in (None, "", [])]
    if len(columns) > 1:
        raise BadRow(f"columns {' and '.join(columns)} both contain {of.noun}s; keep one of them")
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
    if name in (*_TURNS, *_TEXTS) and isinstance(value, str):
        written = next((kind for kind in _columned(gathered) if KINDS[kind].written in value), None)
        if written is not None and name in _TURNS:
            noun = KINDS[written].noun
            raise BadRow(f"{name} is a plain text, but {noun}s need messages; make it a list of messages")
        return value if written is None else _text(value, gathered)
    return value


def _columned(gathered: _Gathered) -> list[MediaKind]:
    """The kinds of which the row has a column, whose marks are read in its texts."""
    return [kind for kind, column in gathered.beside.items() if column]


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
        noun = KINDS[gathered.found[num_before][0]].noun
        raise BadRow(f"{where} is an assistant message with {a(noun)}; models answer in text")
    return {**turn, key: text}


def _text(text: str, gathered: _Gathered) -> str:
    gathered.note_mark(text)
    written: dict[str, MediaKind] = {KINDS[kind].written: kind for kind in _columned(gathered)}
    if not written:
        return text
    pieces = re.split(f"({'|'.join(map(re.escape, written))})", text)
    return "".join(gathered.mark(written[piece], None, "") if piece in written else piece for piece in pieces)


def _part(part: object, where: str, gathered: _Gathered) -> str:
    """A part of a content as text: words, or the mark of a medium."""
    if isinstance(part, str):
        return _text(part, gathered)
    if not isinstance(part, Mapping):
        raise BadRow(f"{where} must be an object {{type}}, got {described(part)}")
    # Parquet and `datasets` give every part the keys of all parts, as nulls.
    fields = {key: value for key, value in part.items() if value is not None}
    types: dict[str, MediaKind] = {name: kind for kind in gathered.beside for name in KINDS[kind].parts}
    type_ = fields.get("type") or next((key for key in ("text", *types) if key in fields), None)
    if type_ in TEXT_PARTS:
        text = fields.get("text", "")
        if not isinstance(text, str):
            raise BadRow(f"{where}.text must be a string, got {described(text)}")
        gathered.note_mark(text)
        return text
    if type_ not in types:
        *most, last = ("text", *(f"{KINDS[kind].noun}s" for kind in gathered.beside))
        raise BadRow(f"{where} is of type {type_}, but only {', '.join(most)} and {last} are supported")
    kind = types[type_]
    return gathered.mark(kind, next(_values(fields, kind), None), where)


def _values(part: Mapping[str, Any], kind: MediaKind) -> Iterator[object]:
    for key in (*KINDS[kind].values, "path", "url", "bytes", "base64"):
        value = part.get(key)
        if key == "base64" and isinstance(value, str):
            value = f"data:;base64,{value}"
        if key.endswith("_url") and isinstance(value, Mapping):
            value = value.get("url")
        if key == "input_audio" and isinstance(value, Mapping) and isinstance(value.get("data"), str):
            value = f"data:;base64,{value['data']}"
        if value is not None:
            yield value


def _before_first_question(row: Row, gathered: _Gathered, kind: MediaKind, num: int) -> Row:
    """Put all media of a column before the first message of the user."""
    for name in _TURNS:
        for i, turn in enumerate(row.get(name) or () if isinstance(row.get(name), list) else ()):
            key = "content" if "content" in turn else "value"
            if turn.get("role", turn.get("from")) in ("user", "human") and isinstance(turn.get(key), str):
                marks = "".join(gathered.mark(kind, None, "") for _ in range(num))
                turns = [*row[name][:i], {**turn, key: marks + turn[key]}, *row[name][i + 1 :]]
                return {**row, name: turns}
    if isinstance(row.get("instruction"), str):
        marks = "".join(gathered.mark(kind, None, "") for _ in range(num))
        return {**row, "instruction": marks + row["instruction"]}
    of = KINDS[kind]
    raise BadRow(f"column {of.columns[0]} contains {of.noun}s, but the row has no user message for them")
