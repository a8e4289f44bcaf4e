"""Keeps the terminal for what tunekit has to say: the libraries' own words go to the run's log."""

import contextlib
import logging
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
