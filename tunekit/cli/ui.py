"""The command that opens the web UI."""

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from tunekit.errors import DependencyError, TunekitError

PASSWORD_VARIABLE = "TUNEKIT_UI_PASSWORD"


def ui(
    host: Annotated[
        str, typer.Option("--host", help="The address to listen at. Any but this machine's own needs a password.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port; 0 takes a free one.")] = 7860,
    root: Annotated[
        Path, typer.Option("--root", metavar="FOLDER", help="The workspace: nothing outside of it is shown or changed.")
    ] = Path(),
    password_file: Annotated[
        Path | None,
        typer.Option("--password-file", help=f"A file that holds the password; {PASSWORD_VARIABLE} may hold it too."),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Only show: start, change and delete nothing.")
    ] = False,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Show it in this machine's browser.")] = True,
) -> None:
    """Open the web UI over this folder: data, plans, runs, comparisons, chats."""
    if importlib.util.find_spec("gradio") is None:
        raise DependencyError("the web UI needs gradio", hint="install it with: pip install 'tunekit[webui]'")
    from webui.server import serve, workspace
    from webui.site import Site

    password = os.environ.get(PASSWORD_VARIABLE) or None
    if password_file is not None:
        password = _password_in(password_file)
    site = Site(workspace(root), read_only=read_only)
    serve(site, host=host, port=port, password=password, open_browser=open_browser)


def _password_in(file: Path) -> str:
    """The password that a file holds.

    Raises:
        TunekitError: It cannot be read, or holds none.
    """
    hint = "name a text file that holds nothing but the password"
    try:
        password = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TunekitError(f"--password-file {file}: it cannot be read: {error}", hint=hint) from error
    if not password:
        raise TunekitError(f"--password-file {file}: there is nothing in it", hint=hint)
    return password
