"""From a run folder to processes that work on it, and an eye on them until they are gone.

A run of one process is done in this one. More are started by torchrun, in a session of their own: Ctrl-C reaches
this process only, which then ends all of them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tunekit import errors
from tunekit.errors import RunError, TunekitError
from tunekit.planner.plan import Plan
from tunekit.run.events import Listener, read_events
from tunekit.run.place import Place
from tunekit.run.record import Record
from tunekit.run.run import Run
from tunekit.run.worker import work

POLL_SECONDS = 0.1
"""How often the events of the other processes are looked at."""

GRACE_SECONDS = 15
"""How long processes have to end once they are asked to."""


def launch(run: Run, listener: Listener | None = None) -> None:
    """Train as a run folder says, in as many processes as its plan has, and come back when all are gone.

    Args:
        run: The run.
        listener: Called with every event.

    Raises:
        TunekitError: Something that the user can mend went wrong, in any of the processes.
    """
    plan = run.plan
    # DeepSpeed wants a process group for one process too.
    if plan.layout.num_processes == 1 and not plan.layout.strategy.startswith("zero"):
        work(run, listener)
        return
    _supervise(run, plan, listener)


def _supervise(run: Run, plan: Plan, listener: Listener | None) -> None:
    record = Record(run, Place(), listener)
    with _group(run, plan) as process:
        offset = 0
        try:
            while process.poll() is None:
                offset = _hand_on(run, offset, listener)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        except KeyboardInterrupt:
            _end(process)
            _hand_on(run, offset, listener)
            record.end("interrupted", "interrupted by the user")
            raise
    _hand_on(run, offset, listener)
    if process.returncode != 0:
        error = _first_error(run, process.returncode)
        if run.status()["phase"] != "failed":
            record.end("failed", str(error))
        raise error


@contextlib.contextmanager
def _group(run: Run, plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """The processes of a run on this machine, under one that ends when the last of them does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(plan.layout.num_processes), "-m", "tunekit.run.worker", str(run.path)]
    environment = {**os.environ, **plan.environment}
    with (
        (run.path / "launcher.log").open("ab") as log,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a group: by asking, and after a while without."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
            return


def _hand_on(run: Run, offset: int, listener: Listener | None) -> int:
    """Tell a listener what the processes wrote since."""
    events, offset = read_events(run.path / "events.jsonl", offset)
    if listener is not None:
        for event in events:
            listener(event)
    return offset


def _first_error(run: Run, code: int) -> Exception:
    """What the first process that failed had to say."""
    files = sorted((run.path / "errors").glob("rank-*.json"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        return RunError(
            f"the processes of the run ended with exit code {code}", hint=f"see {run.path / 'launcher.log'}"
        )
    words: dict[str, Any] = json.loads(files[0].read_text(encoding="utf-8"))
    if words["traceback"] is None:
        kind: type[TunekitError] = vars(errors)[words["kind"]]
        return kind(words["problem"], hint=words["hint"])
    return RuntimeError(f"rank {words['rank']}:\n{words['traceback']}")
