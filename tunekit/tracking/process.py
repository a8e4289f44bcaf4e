"""Process that sends a run's metrics to trackers: `python -m tunekit.tracking.process FOLDER TRACKER...`.

The training process starts it and has nothing more to do with trackers: whatever their libraries do, wait for or run
into happens here, and takes no time, random number or memory from the training. It reads the events of the run as they
are written, and passes them to transformers' own callbacks, each in a thread of its own. Failures are retried from the
same event on. It writes lines of JSON, which become events of the run, and exits at the end of its input, whose last
line is the final phase of the run.
"""

import json
import os
import sys
import threading
from typing import cast

from tunekit.process.log_capture import send_nothing_at_all
from tunekit.recipe.sections.section import Tracker
from tunekit.redact import Redacting
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run
from tunekit.runs.small_files import requested
from tunekit.tracking.trackers import environment_of, folder_of

LAST_SECONDS = 120.0
"""Seconds for trackers to take in the rest once the run is over."""


class Out:
    """Output of words for the run's events: lines of JSON, for as long as somebody reads them.

    Args:
        descriptor: The file that they are written to.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._writing = threading.Lock()

    def write(self, event: str, **fields: str) -> None:
        """Write one."""
        line = json.dumps({"event": event, **fields}) + "\n"
        try:
            with self._writing:
                os.write(self._descriptor, line.encode())
        except BrokenPipeError:
            print(line, end="", file=sys.stderr)


def main() -> None:
    """Report on the run whose folder is the first argument to the trackers that are the others."""
    run, trackers = Run(sys.argv[1]), cast(list[Tracker], sys.argv[2:])
    folder = folder_of(run)
    out = Out(os.dup(1))
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = Redacting(sys.stdout), Redacting(sys.stderr)
    send_nothing_at_all()
    for tracker in trackers:
        os.environ.update(environment_of(run, tracker))
    # It prints, and reads the environment.
    from tunekit.tracking.tracker import Pump

    pumps = [Pump(run, tracker, out.write) for tracker in trackers]
    for pump in pumps:
        pump.start()
    phase = sys.stdin.readline().strip() or _phase_of(run)
    for pump in pumps:
        pump.end(phase)
    until = threading.Timer(LAST_SECONDS, os._exit, [1])
    until.daemon = True
    until.start()
    for pump in pumps:
        pump.join()
    sys.stderr.flush()
    # Not to wait for threads of libraries.
    os._exit(0)


def _phase_of(run: Run) -> str:
    """Return the final phase of a run whose process died without an error."""
    phase = str(run.status()["phase"])
    if phase in FINAL_PHASES:
        return phase
    return "failed" if requested(run.path) is None else "interrupted"


if __name__ == "__main__":
    main()
