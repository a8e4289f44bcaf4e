"""A model behind an address that OpenAI's clients talk with, until it is ended.

It listens before it loads, so that a taken port is told of at once. Only this machine reaches it, unless others must
know a key.
"""

import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Literal

from tunekit.errors import DependencyError, RunError
from tunekit.inference.inference_model import Device, Loaded, Trained, find_trained, load, refuse_judges
from tunekit.inference.vllm import Backend, run_server, serve_command, takes_vllm
from tunekit.process.log_capture import library_words_to, send_nothing_at_all
from tunekit.runs.events import Event
from tunekit.runs.run import Run

KEY_VARIABLE = "TUNEKIT_API_KEY"
"""Environment variable with the key of `tunekit serve`."""

END_SECONDS = 10
"""Seconds for running answers to stop, a token each, before the server exits without them."""

PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
"""Packages that transformers' server needs."""


def serve(
    run: Run | str | Path,
    *,
    checkpoint: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    device: Device = "auto",
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    backend: Backend = "transformers",
    on_event: Callable[[Event], None] | None = None,
) -> None:
    """Serve the result of a run, or a model, until SIGINT or SIGTERM.

    Args:
        run: A run, its folder or its name; or a model's folder or name.
        checkpoint: Checkpoint step of a run, instead of the result.
        host: Address to listen on.
        port: Port; 0 picks a free one.
        api_key: API key that clients must send, if any.
        device: Device of the model; `auto`: an accelerator if available.
        dtype: Data type of the weights; `auto`: as trained, or as stored.
        backend: Server: transformers' with this model only, or vLLM's, which also serves the base model of an
            adapter; `auto`: vLLM's if it is installed and supports the model.
        on_event: Called with events `serve` with `phase`: `loading` and `ready`, which has `url`, `name`, `device` and
            `path`, the route that a first request may try.

    Raises:
        TunekitError: There is no such model, it does not answer or cannot be loaded, or the address cannot be used.
    """
    tell = on_event or (lambda event: None)
    check_address(host, api_key)
    trained = find_trained(run, checkpoint)
    refuse_judges(trained)
    if takes_vllm(backend, trained, device):
        with listen(host, port) as listener:
            port = listener.getsockname()[1]
        tell({"event": "serve", "phase": "loading", "name": trained.name})
        run_server(serve_command(trained, served_name(trained), host=host, port=port, dtype=dtype), api_key)
        return
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        problem = f"serving needs {', '.join(missing)}"
        raise DependencyError(problem, hint="install it with: pip install 'tunekit[serve]'")
    send_nothing_at_all()
    with listen(host, port) as listener:
        tell({"event": "serve", "phase": "loading", "name": trained.name})
        with library_words_to(StringIO()):
            loaded = load(trained, device=device, dtype=dtype)
        _answer(loaded, listener, host, api_key, tell)


def served_name(found: Trained) -> str:
    """Return the name of a model in requests."""
    if found.run is not None:
        return found.run.name if found.step is None else f"{found.run.name}/checkpoint-{found.step}"
    return Path(found.name).resolve().name if Path(found.name).is_dir() else found.name


def check_address(host: str, api_key: str | None) -> None:
    """Refuse an address that others reach, unless they must know a key.

    Raises:
        RunError: They need none.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback and not api_key:
        hint = f"set {KEY_VARIABLE} or --api-key-file; or remove --host, and use `ssh -L` from other machines"
        raise RunError(f"--host {host}: anyone on the network could use this model without an API key", hint=hint)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        RunError: The address is not available.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror}"
        raise RunError(problem, hint="pass another --port; 0 picks a free one") from error


def _answer(
    loaded: Loaded, listener: socket.socket, host: str, api_key: str | None, tell: Callable[[Event], None]
) -> None:
    """Answer requests until this is to end."""
    import uvicorn

    from tunekit.inference.endpoint import Gate, make_app, talks

    name = served_name(loaded.found)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    path = "/v1/chat/completions" if talks(loaded) else "/v1/completions"

    ended = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            tell({"event": "serve", "phase": "ready", "url": url, "name": name, "device": loaded.device, "path": path})

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # Answers that are cut off by the end are no fault to tell of.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            ended.set()
            super().handle_exit(sig, frame)

    app = Gate(make_app(loaded, name, ended), api_key)
    server = Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=END_SECONDS))
    # When it is done it raises the signal again, which by default would end the process within it.
    before = {number: signal.signal(number, _ended) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(_Ended):
            server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ended(BaseException):
    """The end was asked for."""


def _ended(number: int, frame: FrameType | None) -> None:
    raise _Ended
