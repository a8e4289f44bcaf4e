"""A launch of torchrun's that has several attempts: how those of one attempt meet, and which run they go on with.

After one process fails torchrun ends all and starts them again. What the processes say to each other they say through
the store of its agent, and that one outlives them: what is read there may be the word of a process that is gone, such
as an address at which nobody listens any more. How many restarts there were does not tell attempts apart: each node's
agent counts those that it caused. So the processes of an attempt first find each other by names that are new, and from
then on talk through a store that the first one opens for this attempt alone. All that is left to the next attempt is
the folder of the run.
"""

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch

from tunekit.launching.local import FAULTS, raised
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.events import Listener
from tunekit.runs.rank import Place
from tunekit.runs.record import Record, errors_of
from tunekit.runs.rollback_rules import goes_back
from tunekit.runs.run import Run

ASK_SECONDS = 0.2
"""Seconds between two queries of the store by a waiting process; between them it can be interrupted."""

OF_LAUNCH = "run-of-launch"
"""Key in the agent's store of the folder of the run that its attempts work on."""


def outlives_attempts(environment: dict[str, str]) -> bool:
    """Return whether the store by which processes meet is an agent's, and may be from an earlier attempt."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_for_attempt(agents: Any, place: Place) -> Any:
    """The store of this attempt alone, which torch's processes find too from here on.

    Args:
        agents: The agent's store.
        place: Which process this is.
    """
    address = os.environ["MASTER_ADDR"]
    if place.is_main:
        store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        os.environ["MASTER_PORT"] = str(store.port)
        _tell_all(agents, place, store.port)
        return store
    name = uuid.uuid4().hex
    agents.set(f"hello-{place.rank}", name)
    answer = hear(agents, f"answer-{name}")
    port = answer["port"]
    agents.set(f"heard-{answer['attempt']}-{place.rank}", "{}")
    os.environ["MASTER_PORT"] = str(port)
    return torch.distributed.TCPStore(address, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def _tell_all(agents: Any, place: Place, port: int) -> None:
    """Tell every other process of this attempt where the store is; those of earlier ones are told too, and are gone.

    Who has heard says so under the name of this attempt: what the gone ones said in theirs still stands there.
    """
    attempt = uuid.uuid4().hex
    names: dict[int, str] = {}
    waiting = set(range(1, place.num_processes))
    while waiting:
        for rank in sorted(waiting):
            if not agents.check([f"hello-{rank}"]):
                continue
            name = agents.get(f"hello-{rank}").decode()
            if names.get(rank) != name:
                names[rank] = name
                agents.set(f"answer-{name}", json.dumps({"port": port, "attempt": attempt}))
            elif agents.check([f"heard-{attempt}-{rank}"]):
                waiting.remove(rank)
        time.sleep(ASK_SECONDS)


def hear(store: Any, key: str) -> dict[str, Any]:
    """Wait until something is said, however long that takes.

    Raises:
        SystemExit: The store is gone, and with it the process that had something to say.
    """
    try:
        while not store.check([key]):
            time.sleep(ASK_SECONDS)
        words: dict[str, Any] = json.loads(store.get(key))
    except torch.distributed.DistError:
        raise SystemExit(1) from None
    return words


def run_of_launch(agents: Any) -> Run | None:
    """The run that an earlier attempt has made."""
    return Run(json.loads(agents.get(OF_LAUNCH))["path"]) if agents.check([OF_LAUNCH]) else None


def keep_for_next(agents: Any, path: Path) -> None:
    """Have later attempts go on with a run."""
    agents.set(OF_LAUNCH, json.dumps({"path": str(path)}))


def go_on_with(run: Run, listener: Listener | None) -> Run:
    """The run of an earlier attempt, to go on with from its newest whole checkpoint; said to the user.

    Raises:
        TunekitError: What ended the attempt before is for the user to mend, so that this one would end in the same way.
    """
    reported_error, record = next(iter(errors_of(run)), None), Record(run, Place(), listener)
    if reported_error is not None and reported_error["traceback"] is None and reported_error["kind"] not in FAULTS:
        error = raised(reported_error)
        if not goes_back(run, record, error):
            raise error
        return run
    attempt = 1 + sum(event["event"] == "restart" for event in run.events())
    step = newest_complete(run.path).step
    if listener is not None:
        listener({"event": "plan", "run": run, "plan": run.plan, "notes": ["the launcher has started it again"]})
    reason = "a process was ended" if reported_error is None else reported_error["problem"]
    record.write("restart", attempt=attempt, step=step, reason=reason)
    return run
