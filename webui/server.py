"""The process that serves the pages.

It makes a private folder for what gradio keeps while it runs, and takes it away at the end. Runs are processes of
their own: they live on when it ends.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import FrameType

import tunekit
from webui.gate import Gate, check_address
from webui.site import Site


def serve(site: Site, *, host: str, port: int, password: str | None, open_browser: bool) -> None:
    """Serve a workspace until SIGINT or SIGTERM.

    Args:
        site: The workspace.
        host: The address to listen at.
        port: The port; 0 takes a free one.
        password: What visitors must know, if anything.
        open_browser: Whether to show the first page in this machine's browser.

    Raises:
        TunekitError: The address cannot be listened at, or others reach it and there is no password.
    """
    check_address(host, password)
    listener = _listen(host, port)
    os.chdir(site.root)
    with tempfile.TemporaryDirectory(prefix="tunekit-ui-") as folder:
        # Gradio reads these where it is imported.
        os.environ["GRADIO_TEMP_DIR"] = folder
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        # For a page of figures that is not served, it would make a table of the last 10,000 answers at each answer.
        os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
        os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(10**9)
        # Where it is installed, gradio would import it at the first event, and no page draws with it.
        sys.modules.setdefault("matplotlib", None)  # type: ignore[arg-type]
        import uvicorn

        from webui.app import make_app

        class Server(uvicorn.Server):
            def handle_exit(self, sig: int, frame: FrameType | None) -> None:
                # What is cut off by the end, such as streams to open pages, is no fault to tell of.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
                super().handle_exit(sig, frame)

        app = Gate(make_app(site), password=password, read_only=site.read_only)
        server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        # It raises the signal again when it is done, and by default that would end the process before the folder is
        # taken away.
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, _end)
        url = f"http://{host}:{listener.getsockname()[1]}/"
        print(f"{url} shows {site.root}; Ctrl-C stops it; runs continue", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(url)
        server.run(sockets=[listener])


def _end(number: int, frame: FrameType | None) -> None:
    """End as asked."""
    raise SystemExit(0)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise tunekit.TunekitError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="pass another --port; 0 picks a free one"
        ) from error


def workspace(folder: Path) -> Path:
    """A folder as a workspace.

    Raises:
        TunekitError: It is none.
    """
    if not folder.is_dir():
        raise tunekit.TunekitError(f"{folder} is not a folder", hint="pass the folder with your data and runs: --root")
    return folder.resolve()
