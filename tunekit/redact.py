"""Output of a process: secrets are redacted, and its streams outlive their readers.

Redaction of secrets from texts.

A secret is the value of an environment variable whose name says so (`..._TOKEN`, `..._KEY`, `..._SECRET`), the token of
a login to the Hugging Face hub, or what looks like one wherever it comes from. It may be used, and is never written,
printed or handed on: what leaves a process goes through `redacted` or `without_secrets` first.

Standard streams that a long job survives: a pager that is quit, a terminal that is closed, a full disk.

A display never ends a run. What is shown is in the run's folder as well, so nothing is lost with a reader.
"""

import contextlib
import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, TextIO, cast
from urllib.parse import quote

REDACTED = "[redacted]"
"""Replacement of a secret."""

MIN_LENGTH, MIN_LETTERS = 8, 16
"""Characters of a value that is taken for a secret, and of one of letters alone: shorter ones may be common words."""

DRAIN_SECONDS = 5
"""Seconds to wait for the last output of processes that are gone."""

_SECRET_NAME = re.compile(r"(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_|API)KEY)S?$", re.IGNORECASE)

_LOOKS = (
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bsk-[A-Za-z0-9_-]{16,}",
    r"\bgh[oprsu]_[A-Za-z0-9]{16,}",
    r"\bgithub_pat_[A-Za-z0-9_]{16,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\bxox[abeoprs]-[A-Za-z0-9-]{8,}",
    r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
)
"""Patterns of the keys and tokens of well-known services."""

_QUERY = (
    r"[?&#;](?:[\w.-]*(?:token|secret|passw(?:or)?d|credential|signature)[\w.-]*|(?:api|access|auth)[_-]?key|apikey|"
    r"key|sig|auth)="
)
"""Text before a secret in a URL's query."""

_KEY = re.compile("|".join(f"(?:{one})" for one in _LOOKS))
_IN_URL = re.compile(rf"(?<=://)[^\s/@'\"\\]*:(?P<password>[^\s/@'\"\\]+)(?=@)|{_QUERY}(?P<query>[^\s&#'\"\\]+)", re.I)
_BEARER = re.compile(r"\b(?P<kept>Bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.I)
_REFERENCES = re.compile(r"(?:\$\{[A-Za-z_]\w*\})+\Z")

_named: set[str] = set()
"""Variables whose values are secret though their names do not say so."""


def keep_secret(name: str) -> None:
    """Take the value of a variable for a secret, whatever it is called."""
    _named.add(name)


def is_secret(name: str) -> bool:
    """Return whether an environment variable holds a secret, by its name."""
    return name in _named or _SECRET_NAME.search(name) is not None


def secret_in(text: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Describe the secret that a text holds, without disclosing it; None where it holds none.

    A password or a key in a URL that is only `${NAME}` is none.
    """
    for name, value in _values(environment).items():
        if value in text:
            return f"the value of the environment variable {name}"
    if _KEY.search(text):
        return "a likely key or token"
    for match in _IN_URL.finditer(text):
        if not _REFERENCES.match(match["password"] or match["query"]):
            return "a password in a URL" if match["password"] else "a key in a URL's query"
    return None


def redacted(text: str) -> str:
    """A text in which every secret is replaced."""
    values = _pattern(tuple(_values(os.environ).values()), _login())
    text = values.sub(REDACTED, text) if values is not None else text
    text = _BEARER.sub(lambda found: found["kept"] + REDACTED, _KEY.sub(REDACTED, text))
    return _IN_URL.sub(_without_value, text)


def with_references(text: str) -> str:
    """A text in which values of the environment, secret or not, are the `${NAME}` that they came from."""
    values = {name: value for name, value in os.environ.items() if value in text and _is_told_by_itself(value)}
    for name in sorted(values, key=lambda name: len(values[name]), reverse=True):
        text = text.replace(values[name], f"${{{name}}}")
    return text


def without_secrets(value: Any) -> Any:
    """Plain data in whose texts every secret is replaced; its keys stay."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {name: without_secrets(item) for name, item in value.items()}
    return [without_secrets(item) for item in value] if isinstance(value, list | tuple) else value


def _without_value(found: re.Match[str]) -> str:
    start, end = found.span("password" if found["password"] else "query")
    return found[0][: start - found.start()] + REDACTED + found[0][end - found.start() :]


def _values(environment: Mapping[str, str]) -> dict[str, str]:
    """The secrets of the environment by the names of their variables."""
    return {name: value for name, value in environment.items() if is_secret(name) and _is_told_by_itself(value)}


def _is_told_by_itself(value: str) -> bool:
    """Return whether a value is no common word, and no path to where the secret lies."""
    needed = MIN_LETTERS if value.isalpha() else MIN_LENGTH
    return len(value) >= needed and not os.path.exists(value)  # noqa: PTH110 - a Path of some values raises


@lru_cache(maxsize=8)
def _pattern(values: tuple[str, ...], login: str | None) -> re.Pattern[str] | None:
    """Return the pattern of these values: verbatim, as a URL or JSON encodes them, and the lines of those that have
    several.
    """
    forms: set[str] = set()
    for value in filter(None, (*values, login)):
        forms |= {value, quote(value, safe=""), json.dumps(value)[1:-1], repr(value)[1:-1]}
        forms |= {line for line in value.splitlines() if len(line) >= MIN_LETTERS}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


@lru_cache(maxsize=1)
def _login() -> str | None:
    """The token of the login to the hub. huggingface_hub, which keeps it, takes long to import."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH", f"{home}/token"))
    try:
        token = path.expanduser().read_text(encoding="utf-8").strip()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return None
    return token if len(token) >= MIN_LENGTH else None


class _Wrapping(io.TextIOBase):
    """A stream of text that writes to another one.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def writable(self) -> bool:
        """Always."""
        return True

    def isatty(self) -> bool:
        """Return whether the other stream is a terminal."""
        return not self._stream.closed and self._stream.isatty()

    def flush(self) -> None:
        """Write what was kept back."""
        if not self._stream.closed:
            self._stream.flush()

    def fileno(self) -> int:
        """The file of the other stream."""
        return self._stream.fileno()

    @property
    def buffer(self) -> Any:
        """The bytes below the other stream, which nothing is kept out of."""
        return self._stream.buffer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the other stream."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """Error handler with which the other stream writes characters that it cannot encode."""
        return self._stream.errors


class Redacting(_Wrapping):
    """A stream of text that writes to another one, without secrets."""

    def write(self, text: str) -> int:
        """Write a text without its secrets."""
        self._stream.write(redacted(text))
        return len(text)


@contextlib.contextmanager
def redacting_pipe(log: IO[bytes]) -> Iterator[IO[bytes]]:
    """A file for processes to write to, of which every line comes to a log without secrets.

    Args:
        log: Where to. All lines are there when the context is left and the processes are gone.
    """
    read, write = os.pipe()

    def pass_on() -> None:
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                log.write(redacted(line.decode(errors="surrogateescape")).encode(errors="surrogateescape"))
                log.flush()

    thread = threading.Thread(target=pass_on, name="redact", daemon=True)
    thread.start()
    try:
        with os.fdopen(write, "wb") as stream:
            yield stream
    finally:
        thread.join(DRAIN_SECONDS)


class _Lasting(_Wrapping):
    """A stream of text that writes to another one for as long as that can be written, and to nowhere afterwards."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_lost = False

    def write(self, text: str) -> int:
        """Write a text, if it can be."""
        if not self._is_lost:
            try:
                self._stream.write(text)
            except OSError:
                self._is_lost = True
            except ValueError:
                self._is_lost = self._stream.closed
                if not self._is_lost:
                    raise
        return len(text)

    def flush(self) -> None:
        """Write what was kept back, if it can be."""
        if self._is_lost or self._stream.closed:
            return
        try:
            self._stream.flush()
        except OSError:
            self._is_lost = True


def lasting(stream: TextIO) -> TextIO:
    """Return a stream that writes to another one for as long as that can be written, and to nowhere afterwards."""
    return cast(TextIO, _Lasting(stream))


class _Trimming(_Wrapping):
    """A stream of text that writes to another one without the blanks at the ends of lines."""

    def write(self, text: str) -> int:
        """Write a text; a line is trimmed where its end is within the text."""
        self._stream.write(re.sub(r" +(?=\n)", "", text))
        return len(text)


def trimming(stream: TextIO) -> TextIO:
    """Return a stream that writes to another one without the blanks with which tables pad their lines."""
    return cast(TextIO, _Trimming(stream))


def open_standard_streams() -> None:
    """Have the standard streams lead nowhere that were closed before the program began (`command >&-`).

    Else the first file that is opened would be standard output, for every library that writes there.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _fill(descriptor)
            stream = os.fdopen(descriptor, "r" if descriptor == 0 else "w", encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _fill(descriptor: int) -> None:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != descriptor:
        os.dup2(opened, descriptor)
        os.close(opened)
    os.set_inheritable(descriptor, True)


def outlive_readers() -> None:
    """Have this program go on when nobody reads its standard output and error any more."""
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
