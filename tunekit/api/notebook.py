"""The web UI inside a notebook: a server of its own, and a frame that shows it.

The server is the `tunekit ui` of the command line, on an address that only this machine reaches. So a notebook whose
kernel runs elsewhere shows a link to what its own machine would have to be forwarded.
"""

import atexit
import html
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

from tunekit.errors import RunError

END_SECONDS = 10.0
"""Seconds for a server to exit before it is killed."""


class Page:
    """A page that is served for as long as this object is not closed, and this process lives.

    Args:
        process: The server.
        url: Its address.
        height: Of the frame, in pixels.
    """

    def __init__(self, process: "subprocess.Popen[str]", url: str, height: int) -> None:
        self._process, self.url, self._height = process, url, height
        atexit.register(self.close)

    def close(self) -> None:
        """End the server. Runs that it has started go on."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def __repr__(self) -> str:
        return f"Page({self.url!r})"

    def _repr_html_(self) -> str:
        url = html.escape(self.url)
        return (
            f'<p><a href="{url}" target="_blank" rel="noopener">{url}</a></p>'
            f'<iframe src="{url}" title="tunekit" width="100%" height="{self._height}"></iframe>'
        )


def ui(root: str | Path = ".", *, read_only: bool = False, height: int = 800) -> Page:
    """The web UI over a folder, as a frame in a notebook; elsewhere its address, to be opened in a browser.

    Args:
        root: The workspace: nothing outside of it is shown or changed.
        read_only: Whether the pages only show.
        height: Of the frame, in pixels.

    Raises:
        RunError: It does not start. The message says why.
    """
    command = [sys.executable, "-m", "tunekit", "ui", "--root", str(root), "--port", "0", "--no-open"]
    process = subprocess.Popen(
        [*command, *(["--read-only"] if read_only else [])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A notebook is interrupted by Ctrl-C, which is not meant for the server.
        start_new_session=True,
    )
    assert process.stdout is not None
    errors = []
    for line in process.stdout:
        if line.startswith("http"):
            # Nobody reads on, and a full pipe would hold the server up.
            threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
            return Page(process, line.split()[0], height)
        errors.append(line)
    process.wait()
    raise RunError(f"the web UI did not start: {''.join(errors).strip()}")


def _drain(stream: IO[str]) -> None:
    for _ in stream:
        pass
