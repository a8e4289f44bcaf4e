"""Prompts as they stand in a file: rows of any shape that the data layer knows, each asking something.

A row to train on is a row to ask as well: its answer is left out. What is broken is told all at once, with its places,
before any model is loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.convert import asked_in
from tunekit.data.formats.messages import plain, with_system
from tunekit.data.formats.row_formats import BadRow, Row, counted
from tunekit.data.media.in_rows import as_parts, with_media
from tunekit.data.media.kinds import KINDS, Medium, medium_of
from tunekit.data.sources.files import OPENERS, Fault, LocalFile
from tunekit.data.sources.in_memory import as_row
from tunekit.data.sources.load import find_files
from tunekit.data.sources.rows import RowStore, place
from tunekit.errors import DataError, RunError
from tunekit.probe.chat_template import template_in_time
from tunekit.recipe.sections.data import DataSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tunekit.inference.inference_model import Trained

FAULTS_SHOWN = 5


@dataclass(frozen=True)
class Prompt:
    """A prompt to answer.

    Attributes:
        place: Where it stands; empty where that is nowhere.
        said: A conversation, or a text.
        tools: What the model may call, as JSON schemas.
        media: Its media, whose places in the conversation have marks.
    """

    place: str
    said: str | Sequence[Mapping[str, object]]
    tools: Sequence[Row] | None = None
    media: tuple[Medium, ...] = ()


def read_prompts(
    path: str | Path, *, system: str | None = None, taken: Sequence[str] = ()
) -> tuple[list[Prompt], RowStore]:
    """Read the prompts of a file, and the rows that they stand in.

    Args:
        path: A file of rows of any kind that can be trained on.
        system: System prompt for conversations without one.
        taken: Columns that no row may have: that of the answers, and those beside it.

    Raises:
        DataError: It cannot be read, or rows of it ask nothing; the first of them are named.
    """
    hint = "pass a file, such as prompts.jsonl, or a list of texts"
    try:
        files = find_files(DataSource(path=str(path)), key="prompts")
    except DataError as error:
        raise DataError(error.problem, hint=error.hint or hint) from error
    if files is None:
        raise DataError(f"'{path}' is not a file of prompts", hint=hint)
    prompts: list[Prompt] = []
    rows, faults = RowStore(), []
    for file in files.found:
        table = OPENERS[files.kind](file)
        for record in table.read(table.columns or ()):
            where = place(file.name, table.unit, record.number)
            try:
                if isinstance(record.value, Fault):
                    where += f":{record.value.column}" if record.value.column else ""
                    raise BadRow(record.value.what)
                folder = file.path.parent if isinstance(file, LocalFile) else None
                prompts.append(_prompt(record.value, where, system, taken, folder))
                assert isinstance(record.value, dict)
                rows.append(record.value)
            except (BadRow, RecursionError) as error:
                faults.append(f"{where}: {error if isinstance(error, BadRow) else 'nested too deeply'}")
    if faults:
        raise DataError(told(faults, "bad row"))
    if not prompts:
        raise DataError(f"{path}: no rows")
    return prompts, rows


Asked = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A prompt that a caller holds: a text, the messages of a conversation, or a row of any format."""


def held_prompts(
    items: Iterable[Asked], *, system: str | None = None, taken: Sequence[str] = ()
) -> tuple[list[Prompt], RowStore]:
    """Take the prompts that a caller holds, and the rows that they stand for.

    Args:
        items: The prompts.
        system: System prompt for conversations without one.
        taken: Columns that no row may have.

    Raises:
        DataError: There are none, or some ask nothing; the first of them are named.
    """
    prompts: list[Prompt] = []
    rows, faults = RowStore(), []
    for number, item in enumerate(items):
        where, row = f"prompts[{number}]", item
        if isinstance(item, str):
            row = {"prompt": item}
        elif isinstance(item, list | tuple):
            row = {"messages": list(item)}
        try:
            plain_row = as_row(row, where)
            prompts.append(_prompt(plain_row, where, system, taken, Path.cwd()))
            rows.append(plain_row)
        except BadRow as error:
            faults.append(f"{where}: {error}")
    if faults:
        raise DataError(told(faults, "bad prompt"))
    if not prompts:
        raise DataError("prompts: empty", hint="pass at least one prompt, or a file of prompts")
    return prompts, rows


def told(faults: Sequence[str], noun: str) -> str:
    """The first of several faults, a line each, and how many there are."""
    num_more = len(faults) - FAULTS_SHOWN
    return "\n".join([*faults[:FAULTS_SHOWN], *([f"and {counted(num_more, f'more {noun}')}"] if num_more > 0 else [])])


def _prompt(value: object, where: str, system: str | None, taken: Sequence[str], folder: Path | None) -> Prompt:
    marked, media = with_media(value, folder, tuple(KINDS)) if isinstance(value, dict) else (value, [])
    question = asked_in(marked)
    assert isinstance(value, dict)
    for column, content in value.items():
        plain(content, column)
        if column in taken:
            remedy = "pass another --column for the answers" if column == taken[0] else "rename it"
            raise BadRow(f"the column {column} already exists; {remedy}")
    text = question["prompt"]
    if system is not None and isinstance(text, list) and text[0]["role"] != "system":
        text = with_system(text, system)
    elif system is not None and isinstance(text, str):
        text = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    return Prompt(where, text, question.get("tools"), tuple(map(medium_of, media)))


def prompt_ids(
    found: "Trained",
    tokenizer: "PreTrainedTokenizerBase",
    said: str | Sequence[Mapping[str, object]],
    tools: Sequence[Row] | None = None,
) -> list[int]:
    """Token ids of a prompt, as a model is to read it.

    A conversation is written by the chat template. A text is one as well, said by the user, to a model that talks; to
    one that was trained on texts it is the beginning of a text.

    Raises:
        RunError: There is no template, or it refuses the conversation.
    """
    if isinstance(said, str):
        if tokenizer.chat_template is None or not found.is_chat:
            plain_ids: list[int] = tokenizer(said)["input_ids"]
            return plain_ids
        said = [{"role": "user", "content": said}]
    ids: list[int] = tokenizer(prompt_text(found, tokenizer, said, tools), add_special_tokens=False)["input_ids"]
    return ids


def prompt_text(
    found: "Trained",
    tokenizer: "PreTrainedTokenizerBase",
    said: Sequence[Mapping[str, object]],
    tools: Sequence[Row] | None = None,
    *,
    in_parts: bool = False,
) -> str:
    """A conversation as its model's chat template writes it, with what begins an answer.

    Args:
        found: The model.
        tokenizer: Its tokenizer.
        said: The conversation.
        tools: What the model may call.
        in_parts: Whether contents have marks of media, and go to the template as parts.

    Raises:
        RunError: There is no template, or it refuses the conversation.
    """
    from jinja2 import TemplateError

    messages: list[Row] = [dict(message) for message in said]
    if tokenizer.chat_template is None:
        raise RunError(f"{found.name} has no chat template for a conversation", hint="write prompts as plain text")
    try:
        with template_in_time("a conversation"):
            text = tokenizer.apply_chat_template(
                as_parts(messages) if in_parts else messages,
                tools=None if tools is None else list(tools),
                add_generation_prompt=True,
                tokenize=False,
            )
    except TemplateError as error:
        problem = f"the chat template of {found.name} rejects this conversation: {error}"
        raise RunError(problem, hint="remove the system prompt, and alternate user and assistant") from error
    return str(text)
