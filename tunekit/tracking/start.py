"""Start of the process that reports to trackers, by the main process of a run, and its release.

See `tunekit.tracking.process`. That process outlives this one for as long as it needs to hand on the last figures, and
sees by its pipe when this one is gone, whatever has ended it.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tunekit.errors import Stopped
from tunekit.process.processes import LAUNCHERS_OWN
from tunekit.recipe.sections.output import Tracker
from tunekit.runs.record import Record
from tunekit.tracking.trackers import TITLES, folder_of

WAIT_SECONDS = {"finished": 60.0, "failed": 5.0, "interrupted": 5.0}
"""Seconds to wait for the last figures, where others may end what is left once this process is gone."""

PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_")
"""Beginnings of variables that tell a process of its place among those that train, which the reporter is none of."""


class Reporting:
    """Reports on a run to trackers, from the beginning of a `with` block on; nothing where there are none.

    Args:
        record: The run, and where the words of trackers go.
        trackers: Which.
    """

    def __init__(self, record: Record, trackers: Sequence[Tracker]) -> None:
        self._record = record
        self._trackers = list(dict.fromkeys(trackers)) if record.place.is_main else []
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._hand_on, name="trackers", daemon=True)
        self._is_over = False

    def __enter__(self) -> Self:
        if self._trackers:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        phase = "failed"
        if error is None or isinstance(error, Stopped):
            phase = "finished" if self._record.run.status()["phase"] == "finished" else "interrupted"
        self._end(self._process, phase)

    def _start(self) -> None:
        run = self._record.run
        folder_of(run).mkdir(exist_ok=True)
        mine = (*LAUNCHERS_OWN, *PLACES)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tunekit.tracking.process", str(run.path), *self._trackers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            # It holds no memory of a device.
            env={**inherited, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        self._reader.start()

    def _say(self, words: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        # It may be gone; the run does without.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(words)
            self._process.stdin.flush()

    def _hand_on(self) -> None:
        """Write what the reporter says into the events of the run."""
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self._record.write(**json.loads(line))
        if not self._is_over:
            log = folder_of(self._record.run) / "log.txt"
            self._record.write("warning", message=f"trackers get no more figures, training goes on: see {log}")

    def _end(self, process: "subprocess.Popen[str]", phase: str) -> None:
        self._is_over = True
        self._say(f"{phase}\n")
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(WAIT_SECONDS[phase])
        except subprocess.TimeoutExpired:
            names = ", ".join(TITLES[tracker] for tracker in self._trackers)
            self._record.write("warning", message=f"{names}: the last figures are still on their way")
        self._reader.join(1)
