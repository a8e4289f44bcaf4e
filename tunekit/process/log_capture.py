"""Capture of library output: prints, warnings and logs go to the run's log, the terminal stays for tunekit.

Telemetry is off: TRL reports every trainer, Ray every cluster and vLLM every engine, unless they are told not to.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import TextIO

from tunekit.redact import Redacting


@contextlib.contextmanager
def library_words_to(stream: TextIO) -> Iterator[None]:
    """Redirect prints, warnings and logs to a stream, with secrets redacted, and restore everything afterwards."""
    safe = Redacting(stream)
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    handler = logging.StreamHandler(safe)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
    with warnings.catch_warnings():
        root.handlers = [handler]
        root.setLevel(logging.INFO)
        warnings.simplefilter("default")
        logging.captureWarnings(True)
        try:
            with contextlib.redirect_stdout(safe), contextlib.redirect_stderr(safe):
                yield
        finally:
            logging.captureWarnings(False)
            root.handlers = handlers
            root.setLevel(level)


SILENT = {
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_ERROR_REPORTING": "false",
}
"""Variables that turn telemetry off, whatever they were before."""


def send_nothing() -> None:
    """Turn telemetry off in this process and its children. Call it before the libraries are imported."""
    os.environ.update(SILENT)


def send_nothing_at_all() -> None:
    """Turn telemetry off where libraries may have been imported before, as in a notebook."""
    send_nothing()
    from huggingface_hub import constants

    # The variable is read once, when this is imported.
    assert "HF_HUB_DISABLE_TELEMETRY" in vars(constants)
    constants.HF_HUB_DISABLE_TELEMETRY = True
