"""Processes that another launcher started (torchrun, accelerate launch, mpirun or srun), and torchrun's restarts.

All of them run the same command. Rank 0 plans, prepares the rows and makes the run folder; the others wait for its path
or for its failure. They communicate through a store of torch.distributed: torchrun's, or one that rank 0 opens.

After a failure torchrun kills all processes and restarts them. Its agent's store outlives them: a value there may be of
a process that is gone, such as an address at which nobody listens. The number of restarts does not distinguish
attempts, since each node's agent counts its own. So the processes of an attempt first find each other by new names, and
then communicate through a store that rank 0 opens for this attempt alone. The next attempt only gets the run folder.
"""

import json
import os
import subprocess
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tunekit.errors import FAULTS, RunError, Stopped, TunekitError
from tunekit.launching.local import raised
from tunekit.process.processes import LAUNCHERS_OWN, tcp_store
from tunekit.process.watchdog import forget_beats
from tunekit.runs.checkpoints.complete import newest_complete
from tunekit.runs.events import Listener
from tunekit.runs.record import Record, disk_errors, errors_of, forget_errors, goes_back
from tunekit.runs.run import SEEN_SECONDS, Run
from tunekit.runs.small_files import Place, forget_request, wait_for
from tunekit.training.worker import work

FIRST_PORT, NUM_PORTS = 10_000, 20_000
"""Ports for the store, below the ephemeral ones."""

LINGER_SECONDS = 3
"""Seconds that the others then wait for the first one."""

LEAVE_SECONDS = 60
"""Seconds that the first process waits for the others where it made no run."""


def train_joined(place: Place, make: Callable[[], Run], listener: Listener | None) -> Run:
    """Make a run in rank 0, and train it in all processes that the launcher started.

    Args:
        place: Place of this process.
        make: Makes the folder.
        listener: Called with every event, in rank 0.

    Raises:
        TunekitError: An error that the user can fix, reported by this process.
        SystemExit: An error that another process reports.
    """
    os.environ.update(meeting_point(place, os.environ))
    # The launcher's store, or the one that the first process opens, and later the process group shares.
    opened = tcp_store(is_master=place.is_main and not _has_agent(), multi_tenant=True)
    agents = torch.distributed.PrefixStore("tunekit", opened)  # type: ignore[attr-defined]
    store = open_for_attempt(agents, place) if _has_agent() else agents

    def make_or_go_on() -> Run:
        # An agent's store may tell which run an earlier attempt has made.
        if _has_agent() and agents.check([OF_LAUNCH]):
            return go_on_with(Run(json.loads(agents.get(OF_LAUNCH))["path"]), listener)
        return make()

    run = _made(store, agents, place, make_or_go_on) if place.is_main else _learned(store, place)
    threads = run.plan.environment.get("OMP_NUM_THREADS")
    if threads is not None:
        # Too late for the variable: torch is there.
        torch.set_num_threads(int(threads))
    for name in [name for name in os.environ if name.startswith(LAUNCHERS_OWN)]:
        del os.environ[name]
    try:
        with disk_errors(run, run.name):
            work(run, listener if place.is_main else None, place)
    except BaseException as error:
        errors = errors_of(run)
        if errors and errors[0]["rank"] != place.rank:
            raise SystemExit(_code(error)) from None
        raise
    return run


def meeting_point(place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """Return torch's rendezvous variables, as far as the launcher did not set them.

    Raises:
        RunError: The node of rank 0 is unknown.
    """
    here = {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.num_processes),
        "LOCAL_WORLD_SIZE": str(place.num_local),
    }
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return here
    job = environment.get("PMIX_NAMESPACE") or "-".join(
        environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
    )
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    address = environment.get("MASTER_ADDR") or _first_node(place, environment)
    return {**here, "MASTER_ADDR": address, "MASTER_PORT": environment.get("MASTER_PORT", str(port))}


def _first_node(place: Place, environment: Mapping[str, str]) -> str:
    """Name or address of the node of the first process."""
    if place.num_local == place.num_processes:
        return "127.0.0.1"
    if "OMPI_COMM_WORLD_RANK" in environment:
        problem = "mpirun does not report the node of rank 0"
        raise RunError(problem, hint="set MASTER_ADDR to its address: mpirun -x MASTER_ADDR=...")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    listing = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return listing.stdout.split()[0]


def _made(store: Any, agents: Any, place: Place, make: Callable[[], Run]) -> Run:
    """Make the run, publish its folder to the others and later attempts, and check that all see it."""
    try:
        run = make()
        forget_request(run.path)
        run.begin()
        forget_errors(run)
        forget_beats(run)
        path = Path.cwd() / run.path
        mark = path / f".seen-{uuid.uuid4().hex}"
        mark.touch()
        _say(store, "run", {"path": str(path), "mark": str(mark)})
        _see_that_all_see(store, place, path)
        mark.unlink()
    except BaseException as error:
        for key in ("run", "go"):
            _say(store, key, {"code": _code(error)})
        # The others may be asking this process's store: stay until they have heard that there is no run.
        wait_for(lambda: store.add("left", 0) >= place.num_processes - 1, LEAVE_SECONDS)
        raise
    _say(agents, OF_LAUNCH, {"path": str(path)})
    _say(store, "go", {})
    return run


def _see_that_all_see(store: Any, place: Place, path: Path) -> None:
    """Check that all nodes see the run folder.

    Raises:
        RunError: A node does not.
    """
    answers = [hear(store, f"seen-{rank}") for rank in range(place.num_local, place.num_processes, place.num_local)]
    blind = [answer["node"] for answer in answers if not answer["seen"]]
    if blind:
        problem = f"{path} is not visible on {', '.join(blind)}: every node reads and writes the run folder"
        raise RunError(problem, hint="set output.dir to a folder that all nodes share")


def _learned(store: Any, place: Place) -> Run:
    """Wait for the first process to make the run."""
    message = hear(store, "run")
    if "code" not in message:
        if place.local_rank == 0:
            is_there = wait_for(Path(message["mark"]).exists, SEEN_SECONDS)
            _say(store, f"seen-{place.rank}", {"seen": is_there, "node": os.uname().nodename})
        message |= hear(store, "go")
    if "code" in message:
        store.add("left", 1)
        # The first process says what is wrong, which a launcher would stop it from as soon as another has ended.
        time.sleep(LINGER_SECONDS)
        raise SystemExit(message["code"])
    return Run(message["path"])


def _say(store: Any, key: str, words: Mapping[str, Any]) -> None:
    store.set(key, json.dumps(words))


def _code(error: BaseException) -> int:
    """Exit code of a process that ends with an error, as the command line has it."""
    if isinstance(error, Stopped):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, TunekitError) else 1


ASK_SECONDS = 0.2
"""Seconds between two queries of the store by a waiting process; between them it can be interrupted."""

OF_LAUNCH = "run-of-launch"
"""Key in the agent's store of the folder of the run that its attempts work on."""


def _has_agent() -> bool:
    """Return whether the store by which processes meet is an agent's, and may be from an earlier attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_for_attempt(agents: Any, place: Place) -> Any:
    """Open the store of this attempt alone, which torch uses from here on.

    Args:
        agents: The agent's store.
        place: Place of this process.
    """
    if place.is_main:
        store = tcp_store(0, is_master=True)
        os.environ["MASTER_PORT"] = str(store.port)
        _tell_all(agents, place, store.port)
        return store
    name = uuid.uuid4().hex
    agents.set(f"hello-{place.rank}", name)
    answer = hear(agents, f"answer-{name}")
    _say(agents, f"heard-{answer['attempt']}-{place.rank}", {})
    os.environ["MASTER_PORT"] = str(answer["port"])
    return tcp_store(is_master=False)


def _tell_all(agents: Any, place: Place, port: int) -> None:
    """Send the port of the store to every other process, until all of this attempt have confirmed it.

    Confirmations carry the name of the attempt, as those of earlier attempts are still in the agent's store.
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
                _say(agents, f"answer-{name}", {"port": port, "attempt": attempt})
            elif agents.check([f"heard-{attempt}-{rank}"]):
                waiting.remove(rank)
        time.sleep(ASK_SECONDS)


def hear(store: Any, key: str) -> dict[str, Any]:
    """Wait for the value of a key, without a limit.

    Raises:
        SystemExit: The store is gone, and with it the process that should set it.
    """
    try:
        while not store.check([key]):
            time.sleep(ASK_SECONDS)
        words: dict[str, Any] = json.loads(store.get(key))
    except torch.distributed.DistError:
        raise SystemExit(1) from None
    return words


def go_on_with(run: Run, listener: Listener | None) -> Run:
    """Return the run of an earlier attempt, to resume from its newest complete checkpoint, and report that.

    Raises:
        TunekitError: The attempt before failed by an error that the user has to fix first.
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
        listener({"event": "plan", "run": run, "plan": run.plan, "notes": ["restarted by the launcher"]})
    reason = "a process was killed" if reported_error is None else reported_error["problem"]
    record.write("restart", attempt=attempt, step=step, reason=reason)
    return run
