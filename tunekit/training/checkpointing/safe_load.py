"""The states of a checkpoint are opened only as data.

Optimizers, schedulers and random numbers are saved as pickles, and opening a pickle can run whatever it names. So
before any library reads a checkpoint, all of it is opened here in ways that make tensors, numbers and a few named
classes, and nothing else: torch's `weights_only`, and for the tables of a distributed checkpoint, which torch itself
opens without (torch 2.13, `FileSystemReader.read_metadata`), an unpickler that knows the classes of these tables alone.
"""

import io
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.serialization import safe_globals
from transformers.trainer_pt_utils import safe_globals as arrays

from tunekit.errors import RunError
from tunekit.files import is_inside

STATES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
"""Suffixes of files that hold pickles."""

NEVER_READ = "training_args.bin"
"""File of a checkpoint that holds a pickle of a trainer's arguments, which the recipe has."""

TABLE, PARTS = ".metadata", ".distcp"
"""Suffixes of the files of torch's distributed checkpoints."""

_TABLE_CLASSES = {
    "collections": "OrderedDict",
    "pathlib": "Path PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
}
"""Classes in the table of a distributed checkpoint, by module, besides torch's types of numbers."""


def check_states(checkpoint: Path) -> None:
    """Check that every state of a checkpoint can be loaded without running code.

    Raises:
        RunError: One cannot.
    """
    if checkpoint.is_symlink():
        raise _refused(checkpoint, "is a link out of the run")
    for file in sorted(file for file in checkpoint.rglob("*") if file.is_file() and file.name != NEVER_READ):
        if file.name.endswith(TABLE):
            _check_table(file)
        elif file.suffix in STATES:
            with file.open("rb") as stream:
                if not zipfile.is_zipfile(stream):
                    raise _refused(file, "is a bare pickle, not a torch file")
            _load(file, file)
    latest = checkpoint / "latest"
    # DeepSpeed reads there in which folder its states are.
    if latest.is_file() and not re.fullmatch(r"\w[\w-]*", latest.read_text(encoding="utf-8", errors="replace").strip()):
        raise _refused(latest, "names a folder outside the checkpoint")


def load_states(path: str, map_location: Any = None) -> Any:
    """Load a file of DeepSpeed's, in place of its own `TorchCheckpointEngine.load`.

    Raises:
        RunError: It holds something else than states of training.
    """
    with _known_classes(deepspeed=True), _naming(Path(path)):
        return torch.load(path, map_location=map_location, weights_only=True)


def _load(file: Path, source: Path | BinaryIO) -> None:
    """Open a file of torch's, or a part of one, without reading the tensors of a whole one."""
    is_deepspeed = file.name.endswith("_states.pt")
    with _known_classes(deepspeed=is_deepspeed), _naming(file):
        torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path) or None)


@contextmanager
def _known_classes(*, deepspeed: bool) -> Iterator[None]:
    """Within it torch opens what the states of trainers hold besides tensors and numbers."""
    classes: list[Any] = []
    if deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with arrays(), safe_globals([*classes, (_member, "builtins.getattr")]):
        yield


def _member(kind: object, name: object) -> Enum:
    """Return a member of an enum, which Python 3.11.2 writes as `getattr(enum, name)`; nothing else is looked up.

    Raises:
        pickle.UnpicklingError: It is asked of something else, or for something else.
    """
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("GLOBAL builtins.getattr")


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Say which file it was that could not be opened."""
    try:
        yield
    except pickle.UnpicklingError as error:
        # The rest of torch's words tells how to open it nevertheless.
        match = re.search(r"GLOBAL (\S+)", str(error))
        raise _refused(file, f"holds {match[1].rstrip('.,`')}" if match else "is not a training state") from None
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RunError(f"{file} cannot be read: {lines[0]}", hint="resume from another checkpoint") from error


class _TableUnpickler(pickle.Unpickler):
    """Opens the table of a distributed checkpoint, and makes nothing else than what such a table has."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that a pickle may name."""
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or name in _TABLE_CLASSES.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def _check_table(file: Path) -> None:
    """See that a table of a distributed checkpoint is one, and what it says of parts that torch opens as pickles."""
    with _naming(file), file.open("rb") as stream:
        table: Metadata = _TableUnpickler(stream).load()
    if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
        raise _refused(file, "is not a checkpoint table")
    folder = file.parent
    for index, stored in table.storage_data.items():
        part = folder / stored.relative_path
        if not is_inside(part, folder) or part.suffix != PARTS or stored.transform_descriptors:
            raise _refused(file, f"lists {stored.relative_path!r} as a part of the checkpoint")
        # Tensors are opened by torch as weights alone; what else there is, is not.
        if isinstance(table.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            with part.open("rb") as bytes_of_part:
                bytes_of_part.seek(stored.offset)
                _load(part, io.BytesIO(bytes_of_part.read(stored.length)))


def _refused(file: Path, why: str) -> RunError:
    hint = "tunekit did not write it; resume from another checkpoint, or start over"
    return RunError(f"{file} {why}: loading it could run code, so it is not loaded", hint=hint)
