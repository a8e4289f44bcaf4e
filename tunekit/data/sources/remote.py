"""Files on other machines: a URL names one, or, where the server can list its files, a pattern names several.

`http` and `https` are read here, with the client that the hub's library brings: fsspec would need one more package for
them, and tells neither a refusal nor a dead network from a file that is not there. Every other protocol (`s3`, `gs`,
`az`, `hf`, `sftp`, ...) is fsspec's, with the package that it names, which also knows how to log in.

A file is fetched once. Its copy is named after its URL and after what the server says of its version (entity tag, date
and size), so a file that changed there is another copy here. It is written beside its place and moved there whole.
Files can also be read as they come, without a copy.

A URL may hold a password, and its query a key: messages and notes leave them out.

A server may redirect, but not to where it cannot reach itself: from the network to this machine or the services of its
cloud, whose answers would become rows.
"""

import hashlib
import io
import ipaddress
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import unquote

import platformdirs

from tunekit.data.formats.row_formats import nearest
from tunekit.data.sources.files import ByteStream, suffix_of
from tunekit.data.sources.rows import WEB, clear_folder, protocol_of, shown, without_user
from tunekit.errors import DataError, DependencyError
from tunekit.files import read_table

if TYPE_CHECKING:
    import httpx2

_CONNECT_SECONDS, _READ_SECONDS = 5.0, 30.0
_ASK_SECONDS = 20.0
"""Longest wait for what a filesystem of fsspec says of its files, where it can be told; some would try for minutes."""

_BUFFER_BYTES = 1 << 20
_COMMON = ("https", "s3", "gs", "az", "hf", "sftp")
_DRAFT = ".part"

_TABLES = Path(__file__).with_name("remote.yaml")


def downloads_root() -> Path:
    """Folder of the copies: `tunekit/downloads` in the user's cache folder (XDG_CACHE_HOME on Linux)."""
    return platformdirs.user_cache_path("tunekit") / "downloads"


def list_downloads() -> list[Path]:
    """All whole copies."""
    root = downloads_root()
    return sorted(path for path in root.iterdir() if path.suffix != _DRAFT) if root.is_dir() else []


def clear_downloads() -> int:
    """Remove every copy, and what was half written; return the bytes that were freed."""
    return clear_folder(downloads_root())


@dataclass(frozen=True)
class _File:
    """A file on another machine.

    Attributes:
        url: Where it lies, with what it takes to read it; of several files of a store, the pattern that they fit and
            its path.
        name: Its name in messages.
        size_bytes: Its size, if its server says it.
        version: What tells this state of it from any other, if its server says so.
    """

    url: str = field(repr=False)
    name: str
    size_bytes: int | None
    version: str | None

    @property
    def suffix(self) -> str:
        """Suffix of its name."""
        return suffix_of(self.name)


@dataclass(frozen=True)
class WebFile(_File):
    """A file behind `http` or `https`."""

    def open(self) -> BinaryIO:
        """The file, read as it comes; from a seek on, block by block."""
        return cast(BinaryIO, io.BufferedReader(_WebReader(self), _BUFFER_BYTES))

    def save(self, path: Path) -> None:
        """Copy the file to this machine."""
        with self.open() as source, path.open("wb") as copy:
            shutil.copyfileobj(source, copy, _BUFFER_BYTES)


@dataclass(frozen=True)
class StoreFile(_File):
    """A file in a filesystem of fsspec.

    Attributes:
        filesystem: The filesystem.
        path: Its path there.
    """

    filesystem: Any = field(repr=False)
    path: str

    def open(self) -> BinaryIO:
        """The file, read as it comes."""
        with _as_os_errors(type(self.filesystem)):
            file = self.filesystem.open(self.path, "rb")
        return cast(BinaryIO, io.BufferedReader(_StoreReader(file, self.filesystem), _BUFFER_BYTES))

    def save(self, path: Path) -> None:
        """Copy the file to this machine."""
        with _as_os_errors(type(self.filesystem)):
            self.filesystem.get_file(self.path, str(path))


RemoteFile = WebFile | StoreFile


def find_remote(url: str, *, key: str) -> list[RemoteFile]:
    """The file that a URL names, or the files that fit it.

    Args:
        url: The URL as the recipe gives it.
        key: The recipe's key of the source, for messages.

    Raises:
        DataError: There is no such file, it may not be read, or its server cannot be reached.
        DependencyError: The package that speaks this protocol is not installed.
    """
    return [_find_on_the_web(url, key)] if protocol_of(url) in WEB else _find_in_store(url, key)


def fetch(file: RemoteFile, *, key: str) -> Path:
    """A copy of a file on this machine: the one fetched earlier where the server says that nothing has changed.

    Args:
        file: The file.
        key: The recipe's key of the source, for messages.

    Raises:
        DataError: The file cannot be fetched whole.
    """
    root = downloads_root()
    copy = root / f"{_digest(file.url)}-{_digest(file.version or '')}{file.suffix}"
    if file.version is not None and copy.is_file():
        return copy
    draft = root / f"{uuid.uuid4().hex}{_DRAFT}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        file.save(draft)
        num_bytes = draft.stat().st_size
        if file.size_bytes is not None and num_bytes != file.size_bytes:
            raise OSError(f"{num_bytes:,} of {file.size_bytes:,} bytes received")
        draft.replace(copy)
    except OSError as error:
        raise DataError(f"{key}.path: cannot download '{file.name}' to {root}: {_said(error)}") from error
    finally:
        draft.unlink(missing_ok=True)
    return copy


def _find_on_the_web(url: str, key: str) -> WebFile:
    import httpx2

    name = shown(url)
    if "*" in name:
        problem = f"{key}.path: '{name}': patterns are unsupported with {protocol_of(url)}://, which cannot list files"
        raise DataError(problem, hint="use the URL of one file; write a * in its name as %2A")
    try:
        with _client(url) as client, client.stream("GET", without_user(url)) as answer:
            return _web_file(answer, url, key)
    except _NearerError as error:
        problem = f"{key}.path: '{name}' redirects to {error}, which its server cannot reach itself"
        raise DataError(problem, hint="set the URL that it leads to, if that is what you want") from error
    except httpx2.InvalidURL:
        # Neither the URL nor what is said of it is shown: what makes it invalid may well be a password.
        problem = f"{key}.path: invalid URL"
        raise DataError(problem, hint="in a user name or password, write : / @ as %3A %2F %40") from None
    except (httpx2.HTTPError, OSError) as error:
        raise _unreachable(url, error, key) from error


def _web_file(answer: "httpx2.Response", url: str, key: str) -> WebFile:
    """A file as the head of an answer tells of it."""
    name, status = shown(url), answer.status_code
    if status in (404, 410):
        raise DataError(f"{key}.path: '{name}' not found (HTTP {status})", hint="check the URL")
    if status in (401, 403):
        raise DataError(f"{key}.path: access to '{name}' denied (HTTP {status})", hint=_login(url))
    if status != 200:
        raise DataError(f"{key}.path: HTTP {status} for '{name}'", hint="retry later")
    if answer.headers.get("content-type", "").startswith("text/html"):
        raise DataError(
            f"{key}.path: '{name}' is a web page, not a file of rows",
            hint="use the URL of the file: on GitHub its raw URL, on the Hub with resolve instead of blob",
        )
    length = answer.headers.get("content-length", "")
    size_bytes = int(length) if length.isdecimal() and "content-encoding" not in answer.headers else None
    if size_bytes == 0:
        raise DataError(f"{key}.path: '{name}' is empty")
    return WebFile(url, name, size_bytes, _version(answer.headers))


def _version(headers: Mapping[str, str]) -> str | None:
    """Return the version of a file from its response headers; a range has the version of the whole."""
    marks = [headers[name] for name in ("etag", "last-modified") if name in headers]
    length = headers.get("content-range", "").rpartition("/")[2] or headers.get("content-length", "")
    return " ".join([*marks, length]) if marks else None


def _client(url: str) -> "httpx2.Client":
    """Build the HTTP client, logged in as the user that the URL names."""
    import httpx2

    user, _, password = url.partition("://")[2].partition("/")[0].rpartition("@")[0].partition(":")
    return httpx2.Client(
        auth=(unquote(user), unquote(password)) if user else None,
        headers={"Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS),
        follow_redirects=True,
        event_hooks={"response": [_check_redirect]},
    )


class _NearerError(OSError):
    """A redirect leads to an address nearer to this machine than its server's."""


def _check_redirect(answer: "httpx2.Response") -> None:
    """Refuse a redirect from the network to this machine, or from other hosts to addresses of a link.

    Raises:
        _NearerError: It is one.
    """
    if answer.has_redirect_location:
        url = answer.request.url
        target = url.join(answer.headers["location"])
        if max(_nearness(target.host), default=_FAR) > min(_nearness(url.host), default=_FAR):
            raise _NearerError(target.host)


_FAR = 0
"""Nearness of an address of the internet."""


def _nearness(host: str) -> list[int]:
    """Return how near the addresses of a host are; none where this machine does not know them."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        return []
    return [_nearness_of(ipaddress.ip_address(address.partition("%")[0])) for address in addresses]


def _nearness_of(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_link_local:
        return 3
    if address.is_loopback or address.is_unspecified:
        return 2
    return _FAR if address.is_global else 1


class _WebReader(ByteStream):
    """The bytes of a file as they come from its server: in one answer, or from the first seek on in blocks."""

    def __init__(self, file: WebFile) -> None:
        self._file = file
        self._client = _client(file.url)
        self._position = 0
        self._reads_blocks = False
        self._answer = ExitStack()
        self._chunks: Iterator[bytes] | None = None
        self._rest = b""

    def seekable(self) -> bool:
        return self._file.size_bytes is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._file.size_bytes is None:
            raise io.UnsupportedOperation("the server does not report the size of the file")
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        if position != self._position:
            self._answer.close()
            self._reads_blocks = True
            self._position, self._rest = position, b""
        return position

    def part(self, num_bytes: int) -> bytes:
        import httpx2

        try:
            if not self._rest and self._position != self._file.size_bytes:
                self._rest = self._block() if self._reads_blocks else self._more()
        except httpx2.HTTPError as error:
            raise OSError(_said(error)) from error
        part, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        self._position += len(part)
        return part

    def close(self) -> None:
        self._answer.close()
        self._client.close()
        super().close()

    def _more(self) -> bytes:
        """Read the next bytes; empty at the end."""
        if self._chunks is None:
            answer = self._answer.enter_context(self._client.stream("GET", without_user(self._file.url)))
            self._check(answer, 200)
            # Some servers name the compression of a .gz file as that of the answer; its bytes are wanted as they are.
            is_compressed = self._file.suffix.endswith((".gz", ".zst"))
            self._chunks = answer.iter_raw() if is_compressed else answer.iter_bytes()
        return next((chunk for chunk in self._chunks if chunk), b"")

    def _block(self) -> bytes:
        """The block of the file that begins here."""
        headers = {"Range": f"bytes={self._position}-{self._position + _BUFFER_BYTES - 1}"}
        with self._client.stream("GET", without_user(self._file.url), headers=headers) as answer:
            self._check(answer, 206)
            return answer.read()

    def _check(self, answer: "httpx2.Response", status: int) -> None:
        if answer.status_code == 200 != status:
            raise OSError("the server does not support range requests")
        if answer.status_code != status:
            raise OSError(f"HTTP {answer.status_code}")
        if _version(answer.headers) != self._file.version:
            raise OSError("the file changed during reading")


def _find_in_store(url: str, key: str) -> list[RemoteFile]:
    name = shown(url)
    kind = _filesystem_class(url, key)
    try:
        with _as_os_errors(kind):
            files = _look_into_store(url, key)
    except FileNotFoundError as error:
        raise DataError(f"{key}.path: '{name}' not found", hint="check the URL") from error
    except PermissionError as error:
        raise DataError(f"{key}.path: access to '{name}' denied", hint=_login(url)) from error
    except (OSError, ValueError) as error:
        raise _unreachable(url, error, key) from error
    if not files:
        raise DataError(f"{key}.path: no file matches '{name}'")
    empty = next((file for file in files if file.size_bytes == 0), None)
    if empty is not None:
        raise DataError(f"{key}.path: '{empty.name}' is empty")
    return files


def _look_into_store(url: str, key: str) -> list[RemoteFile]:
    import fsspec
    from fsspec.asyn import AsyncFileSystem

    filesystem, path = fsspec.url_to_fs(url)
    limit = {"timeout": _ASK_SECONDS} if isinstance(filesystem, AsyncFileSystem) else {}
    # A process has one filesystem of a kind, which remembers what it saw of the files.
    filesystem.invalidate_cache()
    if any(sign in path for sign in "*?["):
        matches = sorted(filesystem.glob(path, detail=True, **limit).items())
        sizes = {place: info["size"] for place, info in matches if info["type"] == "file"}
        names = {place: shown(filesystem.unstrip_protocol(place)) for place in sizes}
        return [
            StoreFile(f"{url} {place}", names[place], size, filesystem.ukey(place), filesystem, place)
            for place, size in sizes.items()
        ]
    info = filesystem.info(path, **limit)
    if info["type"] == "directory":
        name = shown(url).rstrip("/")
        raise DataError(f"{key}.path: '{name}' is a folder", hint=f"match its files with a pattern: '{name}/*.jsonl'")
    return [StoreFile(url, shown(url), info["size"], filesystem.ukey(path), filesystem, path)]


def _filesystem_class(url: str, key: str) -> type:
    """The class that speaks the protocol of a URL, from the package that it is in."""
    from fsspec.registry import available_protocols, get_filesystem_class

    protocol = protocol_of(url)
    try:
        filesystem_class: type = get_filesystem_class(protocol)
    except ImportError as error:
        missing = error.__cause__.name if isinstance(error.__cause__, ModuleNotFoundError) else None
        hint = f"pip install {missing}" if missing else str(error)
        problem = f"{key}.path: {protocol}:// requires {missing or 'another package'}"
        raise DependencyError(problem, hint=hint) from error
    except ValueError as error:
        near = nearest(protocol, available_protocols())
        hint = f"did you mean {near}://?" if near else f"supported: {', '.join(_COMMON)} and other protocols of fsspec"
        raise DataError(f"{key}.path: '{shown(url)}': unknown protocol {protocol}://", hint=hint) from error
    return filesystem_class


class _StoreReader(ByteStream):
    """The bytes of a file of fsspec; all that goes wrong on the way is an OSError."""

    def __init__(self, file: Any, filesystem: Any) -> None:
        self._file = file
        self._kind = type(filesystem)

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def part(self, num_bytes: int) -> bytes:
        with _as_os_errors(self._kind):
            return bytes(self._file.read(num_bytes))

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@contextmanager
def _as_os_errors(kind: type) -> Iterator[None]:
    """Convert a filesystem's own errors to OSError; they share no common base class."""
    errors = read_table(_TABLES)["foreign_errors"].items()
    names = [name for module, names in errors if kind.__module__.startswith(module) for name in names]
    foreign = tuple(vars(import_module(module))[name] for module, _, name in (name.rpartition(".") for name in names))
    try:
        yield
    except OSError:
        raise
    except foreign as error:
        raise OSError(_said(error)) from error


def _unreachable(url: str, error: BaseException, key: str) -> DataError:
    """The server gave no answer; where an earlier copy is here, the hint names it."""
    copies = list(downloads_root().glob(f"{_digest(url)}-*"))
    log_in = _login(url) if protocol_of(url) not in WEB else None
    hint = f"check the URL and the network, or {log_in}" if log_in else "check the URL and the network"
    if copies:
        newest = max(copies, key=lambda copy: copy.stat().st_mtime)
        hint += f"; to use the copy of {datetime.fromtimestamp(newest.stat().st_mtime):%Y-%m-%d}, set {key}={newest}"
    return DataError(f"{key}.path: '{shown(url)}' is unreachable ({_said(error)})", hint=hint)


def _login(url: str) -> str | None:
    """Return the way to log in to the server of a URL, if known."""
    protocol, tables = protocol_of(url), read_table(_TABLES)
    log_in: str | None = tables["log_in"].get(tables["aliases"].get(protocol, protocol))
    return log_in


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _said(error: BaseException) -> str:
    """Return an error's message in one line, or its class if it has none."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
