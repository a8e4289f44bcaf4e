"""Conversations with media, as people and programs ask them: contents are lists of parts, as OpenAI writes them.

A medium is a data URL: nothing is fetched for somebody who asks, and no file of this machine is read. Its bytes lie in
a folder of their own while the model's processor reads them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tunekit.data.formats.messages import TEXT_PARTS
from tunekit.data.formats.row_formats import BadRow, Row, counted
from tunekit.data.media.expand import MediaTokens, marks_of
from tunekit.data.media.in_rows import with_media
from tunekit.data.media.kinds import KINDS, Medium, medium_of
from tunekit.errors import RunError
from tunekit.inference.inference_model import Loaded, MediaPrompt, Trained, media_inputs
from tunekit.inference.prompts import prompt_text
from tunekit.probe.model import model_folder
from tunekit.recipe.sections.data import MediaKind

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase


_OF_AUDIO = ('"sampling_rate"', '"audio_processor')
"""Settings in the files of a processor of audio."""


def has_other_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a conversation has parts that are no text."""
    contents = (message.get("content") for message in messages if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(not isinstance(part, Mapping) or part.get("type", "text") not in TEXT_PARTS for part in parts)


def as_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation of parts of text whose contents are texts."""
    return [
        {**message, "content": "".join(part["text"] for part in content) if isinstance(content, list) else content}
        for message in messages
        for content in (message.get("content"),)
    ]


def media_read(found: Trained) -> tuple[MediaKind, ...]:
    """Return the kinds of media that a model has a processor of, by the files beside it."""
    from huggingface_hub import try_to_load_from_cache

    from tunekit.models.load import PROCESSOR_FILES

    base = model_folder(found.base)
    files = [Path(folder) / name for folder in (found.folder, base) for name in PROCESSOR_FILES]
    if not Path(base).is_dir():
        cached = (try_to_load_from_cache(base, name, revision=found.base.revision) for name in PROCESSOR_FILES)
        files += [Path(file) for file in cached if isinstance(file, str)]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    if not texts:
        return ()
    takes_audio = any(key in text for text in texts for key in _OF_AUDIO)
    takes_images = not takes_audio or any('"image_processor' in text for text in texts)
    takes_videos = any('"video_processor' in text for text in texts)
    kinds: dict[MediaKind, bool] = {"image": takes_images, "audio": takes_audio, "video": takes_videos}
    return tuple(kind for kind, takes in kinds.items() if takes)


def media_prompt(
    found: Trained,
    tokenizer: "PreTrainedTokenizerBase",
    tokens: MediaTokens,
    said: Sequence[Mapping[str, Any]],
    media: Sequence[Medium],
    place: str,
    tools: Sequence[Row] | None = None,
) -> tuple[list[int], MediaPrompt]:
    """Return the token ids of a prompt with media, and the prompt for the model's processor.

    Args:
        found: The model.
        tokenizer: Its tokenizer.
        tokens: The tokens of its media.
        said: A conversation with marks for its media.
        media: The media.
        place: Where the prompt stands, for messages.
        tools: What the model may call.

    Raises:
        RunError: The template refuses the conversation.
        DataError: The template writes other media than there are.
    """
    text = prompt_text(found, tokenizer, said, tools, in_parts=True)
    whole, _ = tokens.expand(text, (), media, place)
    ids: list[int] = tokenizer(whole, add_special_tokens=False)["input_ids"]
    return ids, MediaPrompt(text, tuple(media))


def inputs_of(
    loaded: Loaded, messages: Sequence[Mapping[str, Any]], tools: Sequence[Row] | None = None
) -> "dict[str, Tensor]":
    """Return the inputs of a model for a conversation with media, with what begins an answer.

    Args:
        loaded: The model.
        messages: The conversation.
        tools: What the model may call.

    Raises:
        RunError: The model reads text alone, a medium cannot be read, or the template refuses the conversation.
    """
    found = loaded.found
    kinds = media_read(found)
    if not kinds:
        raise RunError(f"{found.name} is a text-only model", hint="remove the images, or use a vision-language model")
    with TemporaryDirectory(prefix="tunekit-") as folder:
        try:
            marked, rows = with_media({"messages": list(messages)}, None, kinds, Path(folder))
        except BadRow as error:
            raise RunError(str(error)) from error
        media = tuple(map(medium_of, rows))
        text = prompt_text(found, loaded.tokenizer, marked["messages"], tools, in_parts=True)
        for token, kind in marks_of(loaded.processor).items():
            num = sum(medium.kind == kind for medium in media)
            if text.count(token) != num:
                problem = f"the conversation has {counted(text.count(token), 'token')} {token} for "
                problem += counted(num, KINDS[kind].noun)
                raise RunError(problem, hint="remove the token from the texts")
        return media_inputs(loaded, [MediaPrompt(text, media)])
