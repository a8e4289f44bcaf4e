"""Files of a model's folder, which may come from anywhere.

Only regular files of a plausible size are read, and their contents are checked before anything goes by them: a FIFO
would be waited for without end, and a header of gigabytes would fill the memory. An index names files of the folder
alone. Texts lie in the folder too: a chat template that is a link to a key of yours would train the model on it, and a
tokenizer's settings are written beside the result. Weights may be links, as they are in many shared folders.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunekit.errors import ModelError
from tunekit.files import is_inside, is_name, parse_json, read_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape and type of tensors, by name."""

PICKLED = "pickled weights can run code when opened and are not loaded; convert them to safetensors"

MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as the library itself has it."""

MAX_DEPTH = 50
"""Deepest nesting of settings. What copies or prints them takes several calls a level."""

MAX_EXPANSION = 1000
"""Most characters that a normalizer may make of one. Each `▁` for a space is three bytes."""

INDEX = "model.safetensors.index.json"
"""File that names the file of each tensor, where there are several."""

SETTINGS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "preprocessor_config.json",
)
"""Small files of a model, JSON objects each."""

_TEXTS = (*SETTINGS, "chat_template.jinja", "chat_template.json", "additional_chat_templates/*")

_OBJECTS = ("text_config", "vision_config", "quantization_config", "rope_parameters", "rope_scaling", "auto_map")
"""Keys of config.json whose values are objects, where they are set."""


def read_settings(folder: Path, name: str, path: str) -> dict[str, Any]:
    """Return the JSON object of a small file of a model.

    Args:
        folder: The model's folder.
        name: The file.
        path: Name of the model, for messages.

    Raises:
        ModelError: It is no small file, or no such object.
    """
    try:
        content = parse_json(read_regular(folder / name).decode("utf-8"))
    except OSError as error:
        raise broken(path, name, error.strerror) from error
    except ValueError as error:
        raise broken(path, name, error) from error
    if not isinstance(content, dict):
        raise broken(path, name, "not a JSON object")
    if _is_deeper(content, MAX_DEPTH):
        raise broken(path, name, "nested too deep")
    return content


def read_text(file: Path, path: str) -> str:
    """Return the text of a small file of a model.

    Raises:
        ModelError: It is no small file, or no UTF-8 text.
    """
    try:
        return read_regular(file).decode("utf-8")
    except OSError as error:
        raise broken(path, file.name, error.strerror) from error
    except UnicodeDecodeError as error:
        raise broken(path, file.name, error) from error


def broken(path: str, name: str, why: object) -> ModelError:
    """Return what to raise where a small file of a model is damaged."""
    return ModelError(f"model.path: {path!r} has a broken {name}: {why}", hint="save it again")


def _is_deeper(content: object, limit: int) -> bool:
    level = [content]
    for _ in range(limit):
        level = [item for value in level for item in _items(value)]
    return bool(level)


def _items(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def check_config(config: Mapping[str, Any], path: str) -> None:
    """Refuse a config.json with values of other types than transformers takes.

    Raises:
        ModelError: It has one. Its key is named.
    """
    for part in (config, config.get("text_config")):
        if part is None:
            continue
        for key in _OBJECTS:
            if not isinstance(part.get(key, {}), dict | None):
                raise broken(path, "config.json", f"{key} is not an object")
        names = part.get("architectures", [])
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise broken(path, "config.json", "architectures is not a list of names")
        if not isinstance(part.get("model_type", ""), str):
            raise broken(path, "config.json", "model_type is not a name")


def check_settings(folder: Path, path: str) -> None:
    """Refuse a folder with small files that transformers cannot read as such; one of the hub's names is left alone.

    Raises:
        ModelError: It has one. It is named.
    """
    check_links(folder, path)
    for name in SETTINGS:
        if (folder / name).exists():
            content = read_settings(folder, name, path)
            if name == "config.json":
                check_config(content, path)
    if (folder / INDEX).is_file():
        _indexed(folder, path)


def check_links(folder: Path, path: str) -> None:
    """Refuse a folder of a model that takes its texts from elsewhere.

    Raises:
        ModelError: A file of it is a link that leads out, and not to what the hub's library keeps.
    """
    for file in (file for pattern in _TEXTS for file in sorted(folder.glob(pattern))):
        if not is_inside(file, folder) and not _is_of_hub(file.resolve()):
            raise ModelError(
                f"model.path: {file.relative_to(folder)} of {path!r} is a link out of the folder",
                hint="if it belongs to the model, copy the file there",
            )


def _is_of_hub(file: Path) -> bool:
    """Return whether a file is one that the hub's library keeps for links from the folders of commits."""
    return file.parent.name == "blobs" and file.parent.parent.name.startswith("models--")


def read_tensors(folder: Path, path: str) -> Tensors:
    """Return the shape and type of every tensor in a folder's safetensors files.

    Raises:
        ModelError: A file is missing or damaged, or is not of the folder.
    """
    names = ["model.safetensors"]
    if (folder / INDEX).is_file():
        names = _indexed(folder, path)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        if pickled:
            raise ModelError(f"model.path: {path!r} has no safetensors weights, only {pickled[0]}", hint=PICKLED)
        raise ModelError(f"model.path: {path!r} lacks {', '.join(missing)}", hint="the folder is incomplete")
    tensors: Tensors = {}
    for name in names:
        tensors |= _read_header(folder / name, path)
    return tensors


def _indexed(folder: Path, path: str) -> list[str]:
    """The files that the index of a folder names."""
    files = read_settings(folder, INDEX, path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise broken(path, INDEX, "weight_map does not name a file for each tensor")
    for name in files.values():
        if not is_name(name) or Path(name).is_absolute() or ".." in Path(name).parts:
            raise broken(path, INDEX, f"{name!r} is no file of the folder")
    return sorted(set(files.values()))


def _read_header(file: Path, path: str) -> Tensors:
    """Names, shapes and types from the header of a safetensors file: 8 bytes of length, then JSON."""
    damaged = ModelError(f"model.path: {path!r}: {file.name} is damaged", hint="copy or download it again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise damaged
        (length,) = struct.unpack("<Q", prefix)
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise damaged
        try:
            header = parse_json(stream.read(length).decode("utf-8"))
        except ValueError as error:
            raise damaged from error
    if not isinstance(header, dict):
        raise damaged
    header.pop("__metadata__", None)
    if not header or not all(_is_entry(entry) for entry in header.values()):
        raise damaged
    if max(entry["data_offsets"][1] for entry in header.values()) != size - 8 - length:
        raise damaged
    return {name: (tuple(entry["shape"]), dtype_name(entry["dtype"])) for name, entry in header.items()}


def _is_entry(entry: object) -> bool:
    """Return whether this is what a header says of a tensor."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    sizes = [shape, offsets]
    if not all(isinstance(item, list) and all(isinstance(n, int) and n >= 0 for n in item) for item in sizes):
        return False
    return isinstance(offsets, list) and len(offsets) == 2


def dtype_name(stored: str) -> str:
    """Return torch's name of a type of safetensors."""
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}.get(stored, stored.lower())


def check_normalizer(tokenizer: "PreTrainedTokenizerBase", path: str) -> None:
    """Refuse a tokenizer whose normalizer makes very long texts of short ones: tokenizers ends the process then.

    Raises:
        ModelError: It does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is None:
        return
    expansion = _expansion(json.loads(backend.normalizer.__getstate__()))
    if expansion > MAX_EXPANSION:
        raise ModelError(
            f"model.path: the tokenizer of {path!r} replaces one character by up to {expansion:.3g}",
            hint="fix the normalizer in its tokenizer.json",
        )


def _expansion(normalizer: Mapping[str, Any]) -> float:
    """Return how many characters a normalizer makes of one at most, by its replacements."""
    factor = 1.0
    for step in normalizer.get("normalizers", ()):
        factor *= _expansion(step)
    if normalizer.get("type") == "Replace":
        replaced = len(normalizer["pattern"].get("String", "")) or 1
        factor *= max(1.0, len(normalizer["content"]) / replaced)
    return factor
