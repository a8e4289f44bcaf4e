"""Conversations with pictures, as people and programs ask them: contents are lists of parts, as OpenAI writes them.

A picture is a data URL: nothing is fetched for somebody who asks, and no file of this machine is read. Its bytes lie in
a folder of their own while the model's processor reads them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.row_formats import BadRow, Row, counted
from tunekit.data.images.expand import ImageTokens
from tunekit.data.images.in_rows import with_pictures
from tunekit.data.images.pictures import Picture
from tunekit.errors import RunError
from tunekit.inference.inference_model import Loaded, Pictured, Trained, picture_inputs
from tunekit.inference.prompts import prompt_text
from tunekit.probe.model import model_folder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


_TEXTS = ("text", "input_text", "output_text")
"""Types of parts that are texts."""


def has_other_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has parts that are no text."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(not isinstance(part, Mapping) or part.get("type", "text") not in _TEXTS for part in parts)


def as_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation of parts of text whose contents are texts."""
    return [
        {**message, "content": "".join(part["text"] for part in content) if isinstance(content, list) else content}
        for message in messages
        for content in (message.get("content"),)
    ]


def reads_pictures(found: Trained) -> bool:
    """Return whether a model has a processor of pictures, by the files beside it."""
    from huggingface_hub import try_to_load_from_cache

    from tunekit.models.load import PROCESSOR_FILES

    base = model_folder(found.base)
    if any((Path(folder) / name).is_file() for folder in (found.folder, base) for name in PROCESSOR_FILES):
        return True
    if Path(base).is_dir():
        return False
    cached = (try_to_load_from_cache(base, name, revision=found.base.revision) for name in PROCESSOR_FILES)
    return any(isinstance(file, str) for file in cached)


def pictured_prompt(
    found: Trained,
    tokenizer: "PreTrainedTokenizerBase",
    images: ImageTokens,
    said: Sequence[Mapping[str, Any]],
    pictures: Sequence[Picture],
    place: str,
    tools: Sequence[Row] | None = None,
) -> tuple[list[int], Pictured]:
    """Return the token ids of a prompt with pictures, and the prompt for the model's processor.

    Args:
        found: The model.
        tokenizer: Its tokenizer.
        images: The tokens of its pictures.
        said: A conversation with marks for its pictures.
        pictures: The pictures.
        place: Where the prompt stands, for messages.
        tools: What the model may call.

    Raises:
        RunError: The template refuses the conversation.
        DataError: The template writes more or fewer pictures than there are.
    """
    text = prompt_text(found, tokenizer, said, tools, in_parts=True)
    whole, _, _ = images.expand(text, (), pictures, place)
    ids: list[int] = tokenizer(whole, add_special_tokens=False)["input_ids"]
    return ids, Pictured(text, tuple(pictures))


def inputs_of(
    loaded: Loaded, messages: Sequence[Mapping[str, Any]], tools: Sequence[Row] | None = None
) -> "dict[str, Tensor]":
    """Return the inputs of a model for a conversation with pictures, with what begins an answer.

    Args:
        loaded: The model.
        messages: The conversation.
        tools: What the model may call.

    Raises:
        RunError: The model reads text alone, a picture cannot be read, or the template refuses the conversation.
    """
    found = loaded.found
    if not reads_pictures(found):
        raise RunError(f"{found.name} is a text-only model", hint="remove the images, or use a vision-language model")
    processor: Any = loaded.processor
    with TemporaryDirectory(prefix="tunekit-") as folder:
        try:
            marked, rows = with_pictures({"messages": list(messages)}, None, Path(folder))
        except BadRow as error:
            raise RunError(str(error)) from error
        pictures = tuple(map(Picture.of_row, rows))
        text = prompt_text(found, loaded.tokenizer, marked["messages"], tools, in_parts=True)
        if text.count(processor.image_token) != len(pictures):
            num = counted(text.count(processor.image_token), "token")
            raise RunError(
                f"the conversation has {num} {processor.image_token} for {counted(len(pictures), 'image')}",
                hint="remove the token from the texts",
            )
        return picture_inputs(loaded, [Pictured(text, pictures)])
