"""Supervisor on each host of a run that is started from elsewhere, while the connection lasts.

`python -m tunekit.launching.ssh_node` is started over ssh. It reports the host's facts, starts the host's share of the
processes, and kills them on request, when its standard input ends, or after `LOST_SECONDS` of silence: a host that is
cut off stops computing. Both sides send lines of JSON, and a heartbeat every `BEAT_SECONDS`.
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tunekit.errors import PlanError
from tunekit.probe.hardware import probe_node
from tunekit.process.processes import Group, Share, infiniband, way_to

BEAT_SECONDS = 2
"""Seconds between heartbeats of each side."""

LOST_SECONDS = 10
"""Seconds of silence after which a side counts as lost."""

POLL_SECONDS = 0.1

REACH_SECONDS = 5
"""Seconds to connect to another host."""

SAME = ("tunekit", "torch", "transformers", "accelerate", "peft", "trl")
"""Packages of which all hosts must have the same version."""

Message = dict[str, Any]


class Node:
    """This host's side of the talk with whoever started it."""

    def __init__(self) -> None:
        self._inbox: queue.Queue[Message | None] = queue.Queue()
        self._outbox: queue.Queue[Message] = queue.Queue()
        self._group: Group | None = None
        self._codes: list[int | None] = []
        self._door: socket.socket | None = None
        self._heard = time.monotonic()
        self._answers: dict[str, Callable[..., Message]] = {
            "read": self._read,
            "way": self._way,
            "open": self._open,
            "reach": self._reach,
        }

    def serve(self) -> None:
        """Answer until there is nobody to answer to, and end what was started."""
        # A line that cannot be written, on a connection that is cut, must not hold up the end.
        for loop in (self._listen, self._speak, self._beat):
            threading.Thread(target=loop, daemon=True).start()
        self._say("hello", **what_is_here())
        try:
            while self._turn():
                pass
        finally:
            self._end()

    def _turn(self) -> bool:
        """Wait for a message, or a moment; whether there is still somebody there."""
        if self._group is not None:
            self._tell_codes(self._group)
        try:
            message = self._inbox.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return time.monotonic() - self._heard < LOST_SECONDS
        if message is None:
            return False
        self._heard = time.monotonic()
        question = message.pop("ask")
        if question == "start":
            self._start(**message)
        elif question == "end":
            self._end()
        elif question in self._answers:
            self._say("answer", **self._answers[question](**message))
        return True

    def _read(self, file: str) -> Message:
        """Return the contents of a file in the run's folder, and whether the folder is writable."""
        path = Path(file)
        content = path.read_text(encoding="utf-8") if path.is_file() else None
        return {"content": content, "writable": os.access(path.parent, os.W_OK)}

    def _way(self, towards: str) -> Message:
        """The way from here to another host."""
        try:
            way = way_to(towards)
        except OSError as error:
            return {"problem": str(error.strerror or error)}
        return {"problem": None, "address": way.address, "interface": way.interface}

    def _open(self, address: str) -> Message:
        """Listen on a port that nobody uses, until the processes are started that will."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._door = socket.create_server((address, 0), family=family)
        return {"port": self._door.getsockname()[1]}

    def _reach(self, address: str, port: int) -> Message:
        """Return whether a port of another host can be reached."""
        try:
            socket.create_connection((address, port), timeout=REACH_SECONDS).close()
        except OSError as error:
            return {"problem": str(error.strerror or error)}
        return {"problem": None}

    def _start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        num: int,
        num_local: int,
        node: int,
        store: tuple[str, int],
    ) -> None:
        """Start the processes of this host."""
        # As in an activated environment: what torch compiles with is looked up by name.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
        share = Share(num, num_local, node, (store[0], store[1]), self._door)
        read, write = os.pipe()
        with os.fdopen(write, "wb") as output:
            self._group = Group(words, {"PATH": path, **environment}, output, share=share).__enter__()
        if self._door is not None:
            self._door.close()
        threading.Thread(target=self._pass_on, args=(read,), daemon=True).start()

    def _pass_on(self, pipe: int) -> None:
        with os.fdopen(pipe, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                self._say("line", text=line.rstrip("\n"))

    def _end(self) -> None:
        """End the processes of this host."""
        if self._group is not None:
            self._group.end()
            self._tell_codes(self._group)

    def _tell_codes(self, group: Group) -> None:
        """Say which processes ended, and how, where that is news."""
        codes = list(group.codes().values())
        if codes != self._codes:
            self._codes = codes
            self._say("codes", codes=codes)

    def _say(self, said: str, **fields: Any) -> None:
        self._outbox.put({"said": said, **fields})

    def _listen(self) -> None:
        for line in sys.stdin:
            self._inbox.put(json.loads(line))
        self._inbox.put(None)

    def _speak(self) -> None:
        while True:
            print(json.dumps(self._outbox.get()), flush=True)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._say("beat")


def what_is_here() -> Message:
    """Versions, devices and network adapters of this host; or why its devices cannot be looked at."""
    versions = {}
    for name in SAME:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    facts: Message = {"versions": versions, "infiniband": infiniband()}
    try:
        return {**facts, "hardware": probe_node().model_dump(mode="json"), "problem": None}
    except PlanError as error:
        return {**facts, "hardware": None, "problem": str(error)}


def main() -> None:
    """Serve until there is nobody to serve."""

    def leave(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    for sign in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, leave)
    try:
        Node().serve()
    finally:
        # Threads may stand in writing to a connection that nobody reads.
        os._exit(0)


if __name__ == "__main__":
    main()
