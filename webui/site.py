"""The workspace that the pages stand on: one folder that nothing leaves, and what may be done in it.

Names and paths come from browsers, so each goes through `Site.inside` or `Site.run` before anything is opened.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import tunekit
from tunekit import frontend

LANGUAGES = {"en": "English", "zh": "中文"}
"""The languages, each by its own name. English is at `/`, any other at its code, such as `/zh`."""


MODELS = frontend.SHIPPED_MODEL_NAMES
"""Models that ship with tunekit, by their names."""

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def prefix(language: str) -> str:
    """Return the prefix of a language's paths."""
    return "" if language == "en" else f"/{language}"


@dataclass(frozen=True)
class Site:
    """One workspace, as a server shows it.

    Attributes:
        root: The workspace. It is the server's working directory too, so that a relative path means the same in a
            recipe, on the command line and in the pages.
        read_only: Whether the pages only show.
        has_password: Whether visitors log in, so that they can log out.
        max_upload_bytes: How large a file may be that a browser sends.
        tick_seconds: How often a page looks for what is new.
    """

    root: Path
    read_only: bool = False
    has_password: bool = False
    max_upload_bytes: int = 2 * 2**30
    tick_seconds: float = 2.0

    def inside(self, text: str) -> Path:
        """A path of the workspace that a user typed or chose, resolved.

        Raises:
            TunekitError: It leads out of the workspace, through a link too, or is no path.
        """
        if not text.strip() or any(ord(char) < 32 for char in text):
            raise tunekit.TunekitError(f"{text!r} is not a path", hint="use a file or folder of the workspace")
        root = self.root.resolve()
        try:
            path = (root / text).resolve()
        except (OSError, RuntimeError) as error:
            raise tunekit.TunekitError(
                f"{text!r} cannot be resolved: {error}", hint="use the file itself, not a link"
            ) from error
        if not path.is_relative_to(root):
            raise tunekit.TunekitError(f"{text!r} is outside the workspace", hint=f"only files in {root} are shown")
        return path

    def run(self, name: str) -> tunekit.Run:
        """A run of the workspace by its exact name.

        Raises:
            TunekitError: There is none, or it is only linked to from there.
        """
        path = self.inside(f"runs/{name}")
        if path.name != name or path.parent != self.root.resolve() / "runs" or not (path / "status.json").is_file():
            raise tunekit.TunekitError(f"no run {name!r} in runs", hint="the table of runs lists them")
        return tunekit.Run(path)

    def model(self, name: str) -> tunekit.Run | str:
        """A run of the workspace by its name, or else a model: a folder of the workspace, or a name on the hub.

        Raises:
            TunekitError: There is no such run, or the path leads out of the workspace.
        """
        if name in MODELS and not (self.root / "runs" / name).exists():
            return name
        if "/" not in name:
            return self.run(name)
        folder = self.inside(name)
        if not folder.is_dir() and not HUB_NAME.fullmatch(name):
            raise tunekit.TunekitError(
                f"{name!r} is no folder of the workspace and no name on the hub", hint="such a name is OWNER/MODEL"
            )
        return str(folder) if folder.is_dir() else name

    def link(self, language: str, page: str, **query: str | Sequence[str] | None) -> str:
        """The address of a page, with what it is asked to show.

        Args:
            language: The page's language.
            page: Its name, such as `runs`.
            query: What it is asked. A list repeats its key; `None` leaves it out; `from_` is written `from`.
        """
        parameters = {key.rstrip("_"): value for key, value in query.items() if value is not None}
        return f"{prefix(language)}/{page}" + (f"?{urlencode(parameters, doseq=True)}" if parameters else "")
