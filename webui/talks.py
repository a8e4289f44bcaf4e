"""The models that browsers talk with: each in a process of its own, which ends with the browser's page.

A model belongs to the session that loaded it, and no other sees it. It ends when the page is closed, when it is
unloaded, when nobody has asked it anything for a while, and with the server.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tunekit
from tunekit import frontend
from webui.site import Site

NUM_OWN = 2
"""Models that a page may hold at once."""

NUM_ALL = 4
"""Models that all pages together may hold at once."""

IDLE_SECONDS = 600.0
"""Seconds after the last answer until a model is unloaded."""

LOOK_SECONDS = 15.0
"""Seconds between two looks for such models."""


@dataclass(frozen=True)
class Choice:
    """A model that was chosen.

    Attributes:
        run: The run, by its name, or a model: a folder of the workspace, or a name on the hub.
        checkpoint: The step of one of its checkpoints; None for what it came to.
        compare: Whether what it was before is to be there too.
    """

    run: str
    checkpoint: str | None = None
    compare: bool = False


@dataclass(frozen=True)
class Side:
    """One of the models that answer side by side.

    Attributes:
        talk: Its process.
        base: Whether what the model was before answers.
    """

    talk: frontend.Talk
    base: bool


@dataclass
class _Held:
    """Models of a session."""

    talks: list[frontend.Talk] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    used: float = field(default_factory=time.monotonic)
    busy: int = 0
    num_wanted: int = 0


class Talks:
    """The models of all sessions.

    Args:
        site: The workspace, which all runs are of.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._ended: set[str] = set()
        self._watched = False

    def load(
        self,
        session: str,
        choices: Sequence[Choice],
        *,
        device: str,
        on_loading: Callable[[str], None] | None = None,
    ) -> None:
        """Load models for a session, in the place of those that it has.

        Raises:
            TunekitError: One cannot be loaded, or there are too many. None of them is left.
        """
        self.close(session)
        self._ended.discard(session)
        mine = _Held(num_wanted=len(choices), busy=1)
        with self._lock:
            num_others = sum(session_held.num_wanted for session_held in self._held.values())
            if len(choices) > NUM_OWN or num_others + len(choices) > NUM_ALL:
                raise tunekit.TunekitError(
                    f"{num_others} models are loaded by other pages; the limit is {NUM_ALL}",
                    hint="unload one there, or retry when it has finished",
                )
            self._held[session] = mine
            self._watch()
        try:
            for choice in choices:
                if on_loading is not None:
                    on_loading(choice.run)
                run = self._site.model(choice.run)
                talk = tunekit.chat(
                    run, choice.checkpoint, compare=choice.compare, device="cpu" if device == "cpu" else "auto"
                )
                mine.talks.append(talk)
                if self._held.get(session) is not mine:
                    raise tunekit.TunekitError(
                        "the page was closed or is loading another model", hint="load the model again"
                    )
        except BaseException:
            with self._lock:
                if self._held.get(session) is mine:
                    del self._held[session]
            _end(mine)
            raise
        first, *further = mine.talks
        mine.sides = [Side(first, base=False), *(Side(talk, base=False) for talk in further)]
        if choices[0].compare:
            mine.sides.insert(1, Side(first, base=True))
        mine.busy, mine.used = 0, time.monotonic()

    def sides(self, session: str) -> list[Side]:
        """The models that answer in a session; none where nothing is loaded, or its process has ended."""
        entry = self._held.get(session)
        if entry is None or not all(talk.is_open for talk in entry.talks):
            return []
        return list(entry.sides)

    def has_ended(self, session: str) -> bool:
        """Return whether the models of a session have ended by themselves, and were not unloaded."""
        entry = self._held.get(session)
        return session in self._ended or (entry is not None and not all(talk.is_open for talk in entry.talks))

    def begin(self, session: str) -> None:
        """Say that a session's models answer, so that they are not taken for idle."""
        entry = self._held.get(session)
        if entry is not None:
            entry.busy += 1

    def end(self, session: str) -> None:
        """Say that they have answered."""
        entry = self._held.get(session)
        if entry is not None:
            entry.busy, entry.used = entry.busy - 1, time.monotonic()

    def stop(self, session: str) -> None:
        """Have what a session's models say end where it is."""
        for side in self.sides(session):
            side.talk.stop()

    def close(self, session: str) -> None:
        """End the processes of a session."""
        with self._lock:
            entry = self._held.pop(session, None)
        if entry is not None:
            _end(entry)

    def close_idle(self, now: float) -> list[str]:
        """End what nobody has asked for a while, and return the sessions that held it.

        Args:
            now: The time, by `time.monotonic`.
        """
        with self._lock:
            idle = [
                session
                for session, entry in self._held.items()
                if not entry.busy and (now - entry.used > IDLE_SECONDS or not all(talk.is_open for talk in entry.talks))
            ]
        for session in idle:
            self._ended.add(session)
            self.close(session)
        return idle

    def _watch(self) -> None:
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._look, name="talks", daemon=True).start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            self.close_idle(time.monotonic())


def _end(held: _Held) -> None:
    for talk in held.talks:
        talk.close()
