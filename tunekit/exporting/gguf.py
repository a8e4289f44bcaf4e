"""Whole weights as one GGUF file, by the converter that comes with llama.cpp.

The converter is a program of its own: `convert_hf_to_gguf.py` in a copy of llama.cpp. It knows models by their
architecture and tokenizers by what they make of a certain text, and refuses others; so it is asked for the vocabulary
alone first, which needs no weights.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from tunekit.errors import DependencyError, ModelError
from tunekit.inference.inference_model import Trained, config_of, tokenizer_of
from tunekit.redact import redacted

GgufType = Literal["f16", "bf16", "q8_0"]

CONVERTER = "convert_hf_to_gguf.py"

PLACE = "LLAMA_CPP"
"""Environment variable that names the folder of llama.cpp, or the converter in it."""

BYTES_PER_PARAM = {"f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Of a weight: q8_0 has a 16-bit scale for every 32 of them."""

_HEADER = struct.Struct("<4sIQQ")
"""Magic, version, number of tensors and of metadata (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""


def find_converter() -> list[str]:
    """The command that converts.

    Raises:
        DependencyError: There is none.
    """
    hint = f"git clone https://github.com/ggml-org/llama.cpp, pip install sentencepiece, then {PLACE}=llama.cpp"
    place = os.environ.get(PLACE)
    if place:
        script = Path(place) / CONVERTER if Path(place).is_dir() else Path(place)
        if not script.is_file():
            raise DependencyError(f"--gguf: {PLACE} is {place!r}, which has no {CONVERTER}", hint=hint)
        return [sys.executable, str(script.resolve())]
    program = shutil.which(CONVERTER)
    if program is None:
        raise DependencyError(f"--gguf needs llama.cpp's {CONVERTER}, which is not on the PATH", hint=hint)
    return [program]


def check_convertible(converter: list[str], found: Trained) -> None:
    """See that the converter knows the architecture and the tokenizer of a model. Reads no weights.

    Raises:
        ModelError: It does not.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config_of(found).save_pretrained(folder)
        tokenizer_of(found).save_pretrained(folder)
        _run([*converter, str(folder), "--vocab-only", "--outfile", str(folder / "vocabulary.gguf")], found.name)


def write_gguf(converter: list[str], folder: Path, kind: GgufType, name: str) -> str:
    """Write whole weights as a GGUF file beside them, and return its name.

    Args:
        converter: The command that converts.
        folder: Where the weights are.
        kind: Type of most weights in the file.
        name: What the model is called.

    Raises:
        ModelError: The converter fails, or what it wrote is no GGUF file with tensors.
    """
    to = folder / f"model-{kind}.gguf"
    _run([*converter, str(folder), "--outfile", str(to), "--outtype", kind], name)
    head = b""
    if to.is_file():
        with to.open("rb") as file:
            head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:4] != b"GGUF" or _HEADER.unpack(head)[2] == 0:
        problem = f"--gguf {kind}: {CONVERTER} wrote no GGUF file with tensors"
        raise ModelError(problem, hint="try another version of llama.cpp")
    return to.name


def _run(command: list[str], name: str) -> None:
    try:
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        problem = f"--gguf: {command[0]} cannot be run: {error.strerror}"
        raise DependencyError(problem, hint="check the file and its permissions") from error
    if completed.returncode:
        last = (completed.stderr.strip().splitlines() or [f"it exited with code {completed.returncode}"])[-1]
        if missing := re.fullmatch(r"ModuleNotFoundError: No module named '([\w.-]+)'", last):
            raise DependencyError(f"--gguf: {CONVERTER} needs {missing[1]}", hint=f"pip install {missing[1]}")
        problem = f"--gguf: llama.cpp's {CONVERTER} cannot convert {name}: {redacted(last)}"
        raise ModelError(problem, hint="remove --gguf, or try a newer llama.cpp")
