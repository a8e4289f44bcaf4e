"""Commands of tunekit in this process: arguments, output and exit status as a shell has them, without its start.

What a process alone shows (signals, terminals, what libraries write to its file descriptors, what is imported) is
tested in a process.
"""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock


def run_command(
    *arguments: object, cwd: Path | str | None = None, env: Mapping[str, str] | None = None
) -> "CompletedProcess[str]":
    """Run a command of tunekit, and return its exit status, output and errors.

    Args:
        arguments: What stands behind `tunekit`.
        cwd: The working directory; this one by default.
        env: Environment variables to set besides.
    """
    from tunekit.cli.app import main

    out, errors = io.StringIO(), io.StringIO()
    words = [str(argument) for argument in arguments]
    status: object = 0
    with (
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.dict(os.environ, env or {}),
        mock.patch.object(sys, "argv", ["tunekit", *words]),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            main()
        except SystemExit as end:
            status = end.code
        except Exception:  # noqa: BLE001 - the interpreter would print it and end with 1
            traceback.print_exc()
            status = 1
    returncode = status if isinstance(status, int) else 0 if status is None else 1
    return CompletedProcess(words, returncode, out.getvalue(), errors.getvalue())
