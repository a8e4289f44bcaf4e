"""Zip files of pictures with their rows, unpacked into the workspace.

Whoever can open the page can send one, so nothing in it is believed: names lead nowhere but into a new folder, sizes
are counted while they are written, links and passwords are refused, and of what fails nothing is left.
"""

import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import tunekit
from tunekit import frontend

MAX_FILES = 65_534
"""Files of an archive; more need ZIP64, whose list of files may be of any size."""

MAX_LIST_BYTES = 32 * 2**20
"""Bytes of the list of files at the end of an archive, which is read whole."""

_END_BYTES = 22 + 65_535
"""The record that ends an archive, with the longest comment."""

_END, _LOCATOR = b"PK\x05\x06", b"PK\x06\x07"
_CHUNK_BYTES = 2**20


def unpack(archive: Path, folder: Path, *, max_bytes: int) -> list[Path]:
    """Unpack the pictures and the rows of an archive, and return their files; others are left out.

    Args:
        archive: The zip file.
        folder: Folder to make, with all in it.
        max_bytes: Bytes of all files together, at most.

    Raises:
        TunekitError: It is damaged, too large, or has names that lead elsewhere; nothing is left of it.
    """
    name = archive.name
    draft = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder.parent))
    try:
        _check_list(archive)
        with zipfile.ZipFile(archive) as opened:
            members = [member for member in opened.infolist() if _is_wanted(member)]
            _check(members, name)
            _write(opened, members, draft, name, max_bytes)
        draft.rename(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise tunekit.TunekitError(f"{name}: damaged or unsupported archive: {error}", hint="zip it again") from error
    except OSError as error:
        raise tunekit.TunekitError(
            f"{name}: cannot be unpacked: {error.strerror or error}", hint="shorten its names, or free some space"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    folder.chmod(0o755)
    return [folder / member.filename for member in members]


def rows_among(files: Sequence[Path], name: str) -> Path:
    """Return the file of rows among files that were sent together: `metadata`, or the only one.

    Args:
        files: The files.
        name: What was sent, for messages.

    Raises:
        TunekitError: There is none, or more than one.
    """
    rows = sorted(file for file in files if file.name.lower().endswith(frontend.DATA_SUFFIXES))
    metadata = [file for file in rows if file.name.lower().startswith("metadata.")]
    # A README.txt beside rows is none.
    structured = [file for file in rows if not file.name.lower().endswith(".txt")]
    candidates = metadata or structured or rows
    if not candidates:
        raise tunekit.TunekitError(
            f"{name}: images without a file of rows",
            hint="add a metadata.csv with the columns file_name and text: the name and the caption of each image",
        )
    if len(candidates) > 1:
        listed = ", ".join(file.name for file in candidates[:5])
        raise tunekit.TunekitError(f"{name}: {len(candidates)} files of rows: {listed}", hint="upload one at a time")
    return candidates[0]


def _check_list(archive: Path) -> None:
    """Refuse a list of files that would take too much memory, before it is read."""
    with archive.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _END_BYTES - 20))
        tail = file.read()
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        raise zipfile.BadZipFile("it has no list of files")
    num_files = int.from_bytes(tail[at + 10 : at + 12], "little")
    num_bytes = int.from_bytes(tail[at + 12 : at + 16], "little")
    if tail[max(0, at - 20) : at].startswith(_LOCATOR) or num_files > MAX_FILES or num_bytes > MAX_LIST_BYTES:
        raise tunekit.TunekitError(
            f"{archive.name}: more than {MAX_FILES:,} files, or in ZIP64", hint="split it, or copy the folder yourself"
        )


def _is_wanted(member: zipfile.ZipInfo) -> bool:
    """Return whether a member is a picture or rows, and neither hidden nor what macOS adds."""
    parts = PurePosixPath(member.filename.replace("\\", "/")).parts
    if member.is_dir() or any(part == "__MACOSX" or (part.startswith(".") and part != "..") for part in parts):
        return False
    return member.filename.lower().endswith((*frontend.PICTURE_SUFFIXES, *frontend.DATA_SUFFIXES))


def _check(members: Sequence[zipfile.ZipInfo], name: str) -> None:
    unpacked: set[str] = set()
    for member in members:
        path, what = PurePosixPath(member.filename), f"{name}: {member.filename[:200]!r}"
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in path.parts[0]:
            raise tunekit.TunekitError(f"{what} points outside the archive", hint="zip the folder with relative names")
        if any(ord(char) < 32 for char in member.filename):
            raise tunekit.TunekitError(f"{what} has control characters in its name", hint="rename the file")
        if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
            raise tunekit.TunekitError(
                f"{what} is a link or not a regular file", hint="replace it with the file itself"
            )
        if member.flag_bits & 1:
            raise tunekit.TunekitError(f"{what} needs a password", hint="zip it without one")
        if str(path) in unpacked:
            raise tunekit.TunekitError(f"{what} occurs twice", hint="rename one of them")
        unpacked.add(str(path))


def _write(
    opened: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo], folder: Path, name: str, max_bytes: int
) -> None:
    """Write members, counting what comes out: sizes in an archive may be wrong."""
    num_left = max_bytes
    for member in members:
        target = folder / member.filename
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened.open(member) as source, target.open("xb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                num_left -= len(chunk)
                if num_left < 0:
                    raise tunekit.TunekitError(
                        f"{name}: unpacked it exceeds the upload limit of {frontend.gib(max_bytes)}",
                        hint="shrink the images, or split the archive",
                    )
                file.write(chunk)
