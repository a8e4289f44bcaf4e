"""Fingerprints of a run's inputs besides recipe and plan, as they were when it was made.

The files of the model and of its tokenizer, the rows that were prepared, and the files that they came from. A run that
goes on with others of these would be another run, which no checkpoint tells.

A file of up to 64 MiB is read wholly, so that any change of it is seen. Of a larger one its size, its beginning, where
safetensors have all names and shapes, and 32 pieces of 64 KiB evenly spread over it are: weights that were trained
since differ in each of these. Missed is a smaller change in such a file that leaves its size; and rows at a URL or in a
dataset of the hub, which are not looked at again.

Versions that a run was made with: Python, the libraries, tunekit's commit, and the machine's threads.

It is written beside the fingerprints when the folder is made, so that whoever repeats the run can say what is
otherwise. The digests of recipe and plan tell whether somebody has changed them in the folder since.
"""

import contextlib
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import ValidationError

from tunekit.data.sources.files import LocalFile
from tunekit.data.sources.find_files import find_files
from tunekit.errors import DataError, RunError
from tunekit.planner.facts import Facts
from tunekit.probe.host import num_cores
from tunekit.probe.model import TOKENIZER_FILES, fetched_folder, model_folder, with_tokenizer
from tunekit.probe.origin import origin_of
from tunekit.recipe.methods import has_teacher
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.data import CompleteSource, DataSection
from tunekit.recipe.sections.model import ModelSection
from tunekit.runs.prepared_data import FILES
from tunekit.runs.run import Run
from tunekit.runs.small_files import read_list, read_text

FINGERPRINTS = "fingerprints.json"
"""File of a run folder that holds them."""

WHOLE_BYTES = 64 * 2**20
"""Largest file that is read wholly."""

HEAD_BYTES, PIECE_BYTES, NUM_PIECES = 2**20, 2**16, 32
"""Parts of a larger one that are read: its beginning, and pieces of it."""

MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json")
"""Files of a model or an adapter that training starts from."""

TOKENIZER = (*TOKENIZER_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template.jinja", "chat_template.json")
"""Files of a tokenizer, and its chat template where that has a file of its own."""


class Fingerprint(Facts):
    """Fingerprint of an input when the run was made."""

    what: str
    """`model`, `tokenizer`, `rows`, or the recipe's key of a source."""
    path: str
    """The file; below the run folder for the prepared rows. A source's pattern for the names of its files, and a
    model's name on the hub for its commit."""
    digest: str


def record(run: Run) -> None:
    """Write down what a run is made of."""
    prints = [fingerprint.model_dump() for fingerprint in _found(run)]
    (run.path / FINGERPRINTS).write_text(json.dumps(prints, indent=2), encoding="utf-8")


def fingerprints_of(run: Run) -> list[Fingerprint]:
    """Return the fingerprints of a run; none for a run that has no file of them.

    Raises:
        RunError: The file is damaged.
    """
    file = run.path / FINGERPRINTS
    try:
        return [Fingerprint.model_validate(item) for item in read_list(file)]
    except FileNotFoundError:
        return []
    except (RunError, ValidationError) as error:
        raise RunError(f"{file} is damaged", hint="restore it, or delete it: then nothing is compared") from error


def changes(run: Run, recipe: Recipe) -> list[str]:
    """Return the changes since a run was made by this recipe, a line each; none for a run without fingerprints."""
    recorded = fingerprints_of(run)
    if not recorded:
        return []
    now = {
        (fingerprint.what, fingerprint.path): fingerprint.digest
        for fingerprint in (*_of_hub(recipe), *_of_listings(recipe.data))
    }
    return [words for fingerprint in recorded if (words := _change(run, fingerprint, now)) is not None]


def _change(run: Run, recorded: Fingerprint, now: dict[tuple[str, str], str]) -> str | None:
    what, path = recorded.what, recorded.path
    if recorded.digest.startswith("commit "):
        commit = now.get((what, path), recorded.digest)
        return None if commit == recorded.digest else f"{what}: {path} was {recorded.digest}, and is {commit} now"
    if recorded.digest.startswith("names "):
        names = now.get((what, path), recorded.digest)
        return None if names == recorded.digest else f"{what}: {path} names other files than it did"
    file = run.path / path
    if not file.is_file():
        # The run has its own copy of the rows, but for a stream, which says itself what it does not find.
        return None if what.startswith("data.") else f"{what}: {path} is not there any more"
    return None if digest_of(file) == recorded.digest else f"{what}: {path} has changed"


def digest_of(file: Path) -> str:
    """Return a digest that changes with the file."""
    size = file.stat().st_size
    if size <= WHOLE_BYTES:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(HEAD_BYTES))
        for piece in range(1, NUM_PIECES + 1):
            stream.seek((size - PIECE_BYTES) * piece // NUM_PIECES)
            digest.update(stream.read(PIECE_BYTES))
    return digest.hexdigest()


def _found(run: Run) -> Iterator[Fingerprint]:
    recipe = run.recipe
    yield from _of_hub(recipe)
    for what, section in _models(recipe):
        yield from _of_files(what, _files_of_model(section))
    yield from _of_files("tokenizer", _files_of_tokenizer(recipe.model))
    for name in FILES.values():
        if (run.path / "data" / name).is_file():
            path = f"data/{name}"
            yield Fingerprint(what="rows", path=path, digest=digest_of(run.path / path))
    yield from _of_listings(recipe.data)
    for source in (*recipe.data.sources, *recipe.data.eval_sources):
        yield from _of_files(source.key, _files_of_source(source))


def _of_files(what: str, files: Iterable[Path]) -> Iterator[Fingerprint]:
    for file in dict.fromkeys(files):
        yield Fingerprint(what=what, path=str(Path.cwd() / file), digest=digest_of(file))


def _models(recipe: Recipe) -> Iterator[tuple[str, ModelSection]]:
    """The models that a run loads, with what is below an adapter."""
    sections = [("model", recipe.model)]
    if has_teacher(recipe.method):
        sections.append(("teacher", recipe.method.teacher))
    for what, section in sections:
        yield what, section
        origin = origin_of(section)
        if origin is not None and origin.adapter is not None:
            yield what, origin.base


def _files_of_model(section: ModelSection) -> Iterator[Path]:
    folder = Path(model_folder(section))
    for pattern in MODEL_FILES if folder.is_dir() else ():
        yield from sorted(folder.glob(pattern))


def _files_of_tokenizer(section: ModelSection) -> Iterator[Path]:
    folder = Path(model_folder(with_tokenizer(section)))
    yield from (folder / name for name in (*TOKENIZER, *TEMPLATES) if (folder / name).is_file())
    if section.chat_template is not None:
        yield Path(section.chat_template)


def _of_hub(recipe: Recipe) -> Iterator[Fingerprint]:
    """The commits of models of the hub, by what was fetched of them."""
    for what, section in _models(recipe):
        if not Path(model_folder(section)).is_dir():
            fetched = fetched_folder(section)
            if fetched is not None:
                yield Fingerprint(what=what, path=section.path, digest=f"commit {fetched.name}")


def _files_of_source(source: CompleteSource) -> list[Path]:
    """The files of a source on this machine."""
    if "://" in source.path:
        return []
    try:
        files = find_files(source, key=source.key)
    except DataError:
        return []
    return [] if files is None else [file.path for file in files.found if isinstance(file, LocalFile)]


def _of_listings(section: DataSection) -> Iterator[Fingerprint]:
    """Yield the files that folders and patterns name."""
    for source in (*section.sources, *section.eval_sources):
        if not Path(source.path).is_dir() and not any(sign in source.path for sign in "*?["):
            continue
        names = sorted(file.name for file in _files_of_source(source))
        if names:
            digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
            yield Fingerprint(what=source.key, path=source.path, digest=f"names {digest}")


MADE_WITH = "made_with.json"
"""File of a run folder that says it."""

LIBRARIES = ("tunekit", "torch", "transformers", "trl", "accelerate", "peft", "deepspeed")
"""Libraries that train and write checkpoints."""

TEXTS = ("recipe.yaml", "plan.yaml")
"""Files that decide what happens in a run."""


class MadeWith(Facts):
    """Versions that a run was made with."""

    versions: Mapping[str, str]
    """Of Python, of tunekit and of the libraries that train."""
    commit: str | None
    """Commit of tunekit's own source where that is a checkout; with `+` behind it where files differ from it."""
    num_threads: int
    """Threads that a process computes with on the processor, where the plan says nothing else."""
    digests: Mapping[str, str]
    """SHA-256 of recipe and plan as the run was made."""

    def words(self) -> str:
        """Versions as people read them."""
        return ", ".join(f"{name} {number}" for name, number in self.versions.items())


def record_versions(run: Run) -> None:
    """Write down what a run is made with."""
    made_with_now = MadeWith(
        versions={"python": platform.python_version(), **versions()},
        commit=_commit(),
        num_threads=_num_threads(run),
        digests={name: _digest(run.path / name) for name in TEXTS},
    )
    (run.path / MADE_WITH).write_text(json.dumps(made_with_now.model_dump(mode="json"), indent=2), encoding="utf-8")


def made_with(run: Run) -> MadeWith | None:
    """Return the versions that a run was made with; None of a run of an earlier version, which did not record them.

    Raises:
        RunError: What was written down cannot be read.
    """
    file = run.path / MADE_WITH
    if not file.is_file():
        return None
    try:
        return MadeWith.model_validate_json(read_text(file))
    except (OSError, RunError, ValidationError) as error:
        raise RunError(f"{file} cannot be read", hint="it is damaged: delete it, or restore the folder") from error


def changed_texts(run: Run, known: MadeWith) -> list[str]:
    """Return which of recipe and plan have changed since the run was made."""
    return [name for name, digest in known.digests.items() if _digest(run.path / name) != digest]


def versions() -> dict[str, str]:
    """Versions of tunekit and of the libraries that train, as far as they are there."""
    known_versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            known_versions[name] = version(name)
    return known_versions


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _commit() -> str | None:
    """The commit that this code was taken from; None where it is no checkout, or there is no git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return commit + "+" * bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", "tunekit"))
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    completed = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return completed.stdout.strip()


def _num_threads(run: Run) -> int:
    planned = run.plan.environment.get("OMP_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return int(planned) if planned.isdecimal() else num_cores()
