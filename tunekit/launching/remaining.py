"""The processes of a run that are alive: on this host by their identities, on other hosts by their heartbeats."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tunekit.process.processes import SUPERVISOR
from tunekit.runs import small_files
from tunekit.runs.events import FINAL_PHASES
from tunekit.runs.run import Run

SILENT_SECONDS = 20
"""Seconds of silence of another host after which its processes count as gone."""


class Remaining:
    """Remaining processes of a run.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen: dict[int, str] = {}
        """Identity of each process of this host that was ever seen, by its number."""
        self._signs: dict[str, tuple[float, float]] = {}
        """Of each process of another host, the last sign of life by the disk's clock, and when it was new by ours."""
        self._elsewhere: list[dict[str, Any]] = []

    def look(self) -> bool:
        """Look again; whether anything is left."""
        status, beats = self._run.status(), small_files.beats_in(self._run.path)
        here, is_over = os.uname().nodename, status["phase"] in FINAL_PHASES
        if status["host"] == here:
            if not is_over:
                self._see(status["pid"], status["identity"], _supervised_by)
            elif not any(beat["pid"] == status["pid"] for beat in beats) and not _is_tunekit(status["pid"]):
                # A program that goes on with something else, such as a notebook.
                self._seen.pop(status["pid"], None)
        for beat in beats:
            if beat["host"] == here:
                # A program that has the run in itself may have started others before.
                since = status["started"] if beat["pid"] == status["pid"] else 0.0
                self._see(beat["pid"], beat["identity"], partial(_started_by, since=since))
        self._seen = {pid: identity for pid, identity in self._seen.items() if small_files.is_alive(pid, identity)}
        self._elsewhere = [beat for beat in beats if beat["host"] != here and self._gives_signs(beat)]
        waits_for_word = status["host"] != here and not is_over and self._run.state != small_files.DIED
        return bool(self._seen or self._elsewhere or waits_for_word)

    @property
    def pids(self) -> list[int]:
        """Those of this host, as of the last look."""
        return list(self._seen)

    def kill(self) -> None:
        """End what is left on this host."""
        for pid, identity in self._seen.items():
            small_files.kill(pid, identity)

    def words(self) -> str:
        """Describe the remaining processes: what each one does, and since when."""
        status = self._run.status()
        beats = sorted(small_files.beats_in(self._run.path), key=lambda beat: int(beat["rank"]))
        descriptions = []
        for beat in beats:
            where = f" on {beat['host']}" if beat in self._elsewhere else ""
            if where or beat["pid"] in self._seen:
                words = f"rank {beat['rank']}{where} in {beat['at']} of step {beat['step']}"
                descriptions.append(f"{words} for {max(0.0, beat['time'] - beat['since']):.0f} s")
        ranks = {beat["pid"] for beat in beats}
        unranked = [str(pid) for pid in self._seen if pid not in ranks]
        if unranked:
            descriptions.append(f"process{'es' * (len(unranked) > 1)} {', '.join(unranked)}")
        return "; ".join(descriptions) or f"a status from process {status['pid']} on {status['host']}"

    def _see(self, pid: int, identity: str, others_of: Callable[[int], Iterator[psutil.Process]]) -> None:
        """Remember a process with those that it started for the run: they are nobody's when it is gone."""
        if not small_files.is_alive(pid, identity):
            return
        self._seen[pid] = identity
        for other in others_of(pid):
            child_identity = small_files.identity_of(other.pid)
            if child_identity is not None:
                self._seen.setdefault(other.pid, child_identity)

    def _gives_signs(self, beat: dict[str, Any]) -> bool:
        name = f"rank-{beat['rank']}.json"
        with contextlib.suppress(FileNotFoundError):
            written = (self._run.path / small_files.RANKS / name).stat().st_mtime
            before, since = self._signs.get(name, (0.0, 0.0))
            if written != before:
                since = time.monotonic()
            self._signs[name] = written, since
            return time.monotonic() - since < SILENT_SECONDS
        return False


def _started_by(pid: int, since: float) -> Iterator[psutil.Process]:
    """All processes that one has started since then, and these have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from (child for child in psutil.Process(pid).children(recursive=True) if child.create_time() >= since - 1)


def _is_tunekit(pid: int) -> bool:
    """Return whether a process runs nothing but tunekit."""
    with contextlib.suppress(psutil.Error):
        words = psutil.Process(pid).cmdline()[1:4]
        return any(Path(word).name == "tunekit" or word.startswith("tunekit.") for word in words)
    return False


def _supervised_by(pid: int) -> Iterator[psutil.Process]:
    """The processes of runs that one supervises. It may have started others besides."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            if child.environ().get(SUPERVISOR) == str(pid):
                yield child
