"""The command that opens the web UI."""

import importlib.util
import os
from pathlib import Path
from typing import Annotated

from typer import Option

from tunekit.cli.options import PortOption, secret_in
from tunekit.errors import DependencyError

PASSWORD_VARIABLE = "TUNEKIT_UI_PASSWORD"


def ui(
    host: Annotated[
        str, Option(help="The address to listen at. Any but this machine's own needs a password.")
    ] = "127.0.0.1",
    port: PortOption = 7860,
    root: Annotated[
        Path, Option(metavar="FOLDER", help="The workspace: nothing outside of it is shown or changed.")
    ] = Path(),
    password_file: Annotated[
        Path | None, Option(help=f"A file that holds the password; {PASSWORD_VARIABLE} may hold it too.")
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="Only show: start, change and delete nothing.")] = False,
    open_browser: Annotated[bool, Option("--open/--no-open", help="Show it in this machine's browser.")] = True,
) -> None:
    """Open the web UI over this folder: data, plans, runs, comparisons, chats."""
    if importlib.util.find_spec("gradio") is None:
        raise DependencyError("the web UI needs gradio", hint="install it with: pip install 'tunekit[webui]'")
    from webui.server import serve, workspace
    from webui.site import Site

    password = os.environ.get(PASSWORD_VARIABLE) or None
    if password_file is not None:
        password = secret_in(password_file, "--password-file", "password")
    site = Site(workspace(root), read_only=read_only)
    serve(site, host=host, port=port, password=password, open_browser=open_browser)
