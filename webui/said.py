"""Messages of a chat, as the browser shows it, as it comes back from there, and as a model is asked it.

Texts are escaped, since the browser takes them for HTML. Pictures are files that gradio keeps while the server runs; it
takes no others back from a browser.
"""

from collections.abc import Sequence
from html import escape, unescape
from typing import Any

import tunekit

Messages = list[dict[str, Any]]
"""Messages with `role`, `content` as text, and `pictures` where the message has some, as paths."""


def shown(said: Messages) -> Messages:
    """A conversation as the browser is given it, which takes it for HTML and loads pictures that stand in it."""
    return [
        {
            "role": message["role"],
            "content": [*({"path": path} for path in message["pictures"]), escape(message["content"])]
            if message.get("pictures")
            else escape(message["content"]),
        }
        for message in said
    ]


def with_turn(history: Messages | None, prompt: str, pictures: Sequence[str] = ()) -> Messages:
    """Return the history as texts and pictures, with another turn of the user."""
    return [*_turns(history), _turn("user", prompt, pictures)]


def before_answer(history: Messages | None) -> Messages:
    """Return the history as texts and pictures, up to the last turn of the user."""
    turns = _turns(history)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return turns


def text_of(message: dict[str, Any]) -> str:
    """The text of a message that was shown, however the browser hands it over."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    return unescape(content)


def pictures_of(message: dict[str, Any]) -> list[str]:
    """The pictures of a message that was shown."""
    content = message["content"]
    files = [part["file"] for part in content if part.get("type") == "file"] if isinstance(content, list) else []
    return [str(file["path"]) for file in files if isinstance(file, dict)]


def asked_of(said: Messages, system: str) -> Messages:
    """Return the prompt of a model: the conversation without missing answers, behind the system prompt.

    Raises:
        TunekitError: A picture cannot be read.
    """
    turns: Messages = [_turn("system", system)] if system and system.strip() else []
    for message in said:
        if message["role"] == "assistant" and not message["content"]:
            turns.pop()
        else:
            turns.append(_with_parts(message))
    return turns


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("pictures"):
        return message
    parts: list[dict[str, str]] = [tunekit.picture_part(path) for path in message["pictures"]]
    return {"role": message["role"], "content": [*parts, {"type": "text", "text": message["content"]}]}


def _turns(history: Messages | None) -> Messages:
    return [_turn(message["role"], text_of(message), pictures_of(message)) for message in history or ()]


def _turn(role: str, content: str, pictures: Sequence[str] = ()) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": role, "content": content}
    return {**turn, "pictures": list(pictures)} if pictures else turn
