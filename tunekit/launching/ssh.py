"""A run on several hosts, from its folder, which all of them see, to the end of its processes on all of them."""

import contextlib
import itertools
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from tunekit.errors import HostLostError, PlanError, RunError
from tunekit.estimates.facts import Hardware
from tunekit.launching.local import supervise
from tunekit.launching.ssh_hosts import Hosts, lost_error, unusable
from tunekit.process.processes import LOG
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe
from tunekit.redact import redacted
from tunekit.runs.events import Listener
from tunekit.runs.record import Record
from tunekit.runs.requests import forget_request
from tunekit.runs.run import SEEN_SECONDS, Run
from tunekit.runs.small_files import Place

RETURN_SECONDS = 600
"""Seconds that a run that may restart waits for a lost host."""

RETRY_SECONDS = 2


def for_hosts(recipe: Recipe, names: Sequence[str]) -> tuple[Recipe, Hardware]:
    """A recipe with the processes that hosts give it, and what the hosts have. They are looked at.

    Args:
        recipe: The recipe. Where it names no number of processes there is one for each accelerator, and one for each
            host without any.
        names: The hosts.

    Raises:
        RunError: A host cannot be used. It is named.
        PlanError: The processes that the recipe asks for cannot be spread evenly over the hosts.
    """
    with Hosts(names) as hosts:
        hosts.meet()
        hardware = hosts.hardware
    num_processes, has = recipe.parallel.num_processes, hardware.num_accelerators
    if num_processes is not None and (num_processes != has if has else num_processes % len(names)):
        needed = str(has) if has else f"a multiple of {len(names)}"
        raise PlanError(
            f"parallel.num_processes: {num_processes} processes cannot be spread evenly over {len(names)} hosts",
            hint=f"leave it out, or ask for {needed}",
        )
    return load_recipe(recipe, [f"parallel.num_processes={num_processes or has or len(names)}"]), hardware


def launch_on(run: Run, names: Sequence[str], listener: Listener | None = None) -> None:
    """Train as a run folder says on hosts that see it, and come back when nothing runs on any of them.

    Args:
        run: The run; it goes on from its newest complete checkpoint, if it has one.
        names: The hosts, as many as its plan has nodes.
        listener: Called with every event.

    Raises:
        TunekitError: Something that the user can mend went wrong, on any of the hosts.
    """
    if run.plan.num_nodes != len(names):
        raise RunError(f"{run.path}: the plan is for {run.plan.num_nodes} nodes, not {len(names)}", hint="name as many")
    forget_request(run)
    run.begin()
    patience = itertools.chain([0], itertools.repeat(RETURN_SECONDS))
    supervise(run, lambda: _started(run, names, next(patience)), listener)


@contextlib.contextmanager
def _started(run: Run, names: Sequence[str], patience_seconds: float) -> Iterator["_Everywhere"]:
    """The processes of a run on its hosts."""
    plan = run.plan
    with _connected(names, patience_seconds) as hosts, (run.path / LOG).open("a", encoding="utf-8") as log:
        _check_folder(run, hosts)
        words = ["tunekit.training.worker", str(run.path.resolve())]
        hosts.start(words, num_local=plan.layout.num_processes // plan.num_nodes, environment=plan.environment)
        Record(run, Place()).write("hosts", hosts=hosts.describe())
        everywhere = _Everywhere(hosts, log)
        try:
            yield everywhere
        except KeyboardInterrupt:
            hosts.end()
            raise
        # What is said by a process whose peer is gone is not what went wrong, so the hosts come first.
        lost = hosts.end()
        if lost:
            raise lost_error(lost)


def _connected(names: Sequence[str], patience_seconds: float) -> Hosts:
    """The hosts, as soon as all of them answer; to be left as a context."""
    until = time.monotonic() + patience_seconds
    while True:
        try:
            return Hosts(names)
        except HostLostError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_SECONDS)


class _Everywhere:
    """The processes of a run on all its hosts.

    Args:
        hosts: The hosts, on which they were started.
        log: Where what they say is written to.
    """

    def __init__(self, hosts: Hosts, log: TextIO) -> None:
        self._hosts = hosts
        self._log = log

    def codes(self) -> dict[int, int | None]:
        """Exit code of each process by rank: minus the signal that ended it, None while it is there.

        Raises:
            HostLostError: A host is lost. It is named.
        """
        lost = self._hosts.silent
        if lost:
            raise lost_error([*lost, *(host for host in self._hosts.end() if host not in lost)])
        return dict(enumerate(code for host in self._hosts.all for code in host.codes))

    def wait(self, seconds: float) -> None:
        """Wait until all are gone or a host is lost, at most so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(host.has_ended or host.is_silent for host in self._hosts.all):
            for host, message in self._hosts.poll():
                if message["said"] == "line":
                    print(f"{host.name}: {redacted(message['text'])}", file=self._log, flush=True)


def _check_folder(run: Run, hosts: Hosts) -> None:
    """Refuse hosts that do not see the run's folder, by a file with words that cannot be guessed."""
    words = secrets.token_hex(16)
    proof = run.path.resolve() / f".seen-{words[:8]}"
    proof.write_text(words, encoding="utf-8")
    until = time.monotonic() + SEEN_SECONDS
    try:
        while True:
            answers = dict(zip(hosts.all, hosts.ask("read", file=str(proof)), strict=True))
            if all(answer["content"] == words for answer in answers.values()) or time.monotonic() > until:
                break
            time.sleep(RETRY_SECONDS)
    finally:
        proof.unlink()
    failures = {host: "it does not see" for host, answer in answers.items() if answer["content"] != words}
    failures |= {
        host: "it cannot write to"
        for host, answer in answers.items()
        if host not in failures and not answer["writable"]
    }
    if failures:
        folder = proof.parent
        raise unusable(
            {host: f"{why} {folder}" for host, why in failures.items()},
            "set output.dir to a folder on a disk that all hosts share, at the same path",
        )
