"""Keeps the terminal for what tunekit has to say: the libraries' own words go to the run's log.

Nothing is sent anywhere: the libraries' reports of what they are used for are switched off.

TRL reports every trainer that is made, Ray every cluster and vLLM every engine, unless they are told not to.
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
    """Send what the libraries print, warn and log to a stream, without secrets, and put everything back afterwards."""
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
"""Variables by which the libraries are told, whatever they were before."""


def send_nothing() -> None:
    """Switch the reports off, in this process and those that it starts. Call it before the libraries are imported."""
    os.environ.update(SILENT)


def send_nothing_at_all() -> None:
    """The same where the libraries may have been imported before: a notebook's own cells do that."""
    send_nothing()
    from huggingface_hub import constants

    # The variable is read once, when this is imported.
    assert "HF_HUB_DISABLE_TELEMETRY" in vars(constants)
    constants.HF_HUB_DISABLE_TELEMETRY = True
