"""A run on several hosts, from its folder, which all of them see, to the end of its processes on all of them."""

import secrets
from collections.abc import Sequence
from typing import TextIO

from tunekit.errors import PlanError
from tunekit.planner.facts import Hardware
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe
from tunekit.run.events import Listener
from tunekit.run.hosts import Hosts, lost_error, unusable
from tunekit.run.launch import GRACE_SECONDS, first_error, hand_on
from tunekit.run.place import Place
from tunekit.run.record import Record
from tunekit.run.run import Run


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
        hardware = hosts.hardware
    asked, has = recipe.parallel.num_processes, hardware.num_accelerators
    if asked is not None and (asked != has if has else asked % len(names)):
        needed = str(has) if has else f"a multiple of {len(names)}"
        raise PlanError(
            f"parallel.num_processes: {asked} processes cannot be spread evenly over {len(names)} hosts",
            hint=f"leave it out, or ask for {needed}",
        )
    return load_recipe(recipe, [f"parallel.num_processes={asked or has or len(names)}"]), hardware


def launch_on(run: Run, names: Sequence[str], listener: Listener | None = None) -> None:
    """Train as a run folder says on hosts that see it, and come back when nothing runs on any of them.

    Args:
        run: The run.
        names: The hosts, as many as its plan has nodes.
        listener: Called with every event.

    Raises:
        TunekitError: Something that the user can mend went wrong, on any of the hosts.
    """
    record = Record(run, Place(), listener)
    try:
        with Hosts(names) as hosts:
            _work(run, hosts, record, listener)
    except KeyboardInterrupt:
        record.end("interrupted", "interrupted by the user")
        raise
    except BaseException as error:
        if run.status()["phase"] != "failed":
            record.end("failed", str(error))
        raise


def _work(run: Run, hosts: Hosts, record: Record, listener: Listener | None) -> None:
    plan = run.plan
    _check_folder(run, hosts)
    of_a_node = plan.layout.num_processes // plan.num_nodes
    folder = str(run.path.resolve())
    hosts.start("tunekit.run.worker", [folder], of_a_node=of_a_node, environment=plan.environment)
    record.write("hosts", hosts=hosts.describe())
    with (run.path / "launcher.log").open("a", encoding="utf-8") as log:
        try:
            _follow(run, hosts, listener, log)
        except KeyboardInterrupt:
            hosts.end(GRACE_SECONDS)
            raise
    codes = [host.ended for host in hosts.all]
    if any(code != 0 for code in codes):
        # What a process says of a host that is gone is not what went wrong, so the hosts come first.
        lost = hosts.end()
        if lost:
            raise lost_error(lost)
        raise first_error(run, next(code for code in codes if code))


def _follow(run: Run, hosts: Hosts, listener: Listener | None, log: TextIO) -> None:
    """Hand on what the processes say, until they end, or one of them fails, or a host is lost."""
    offset = (run.path / "events.jsonl").stat().st_size
    while any(host.ended is None for host in hosts.all) and not any(host.ended for host in hosts.all):
        if hosts.silent:
            return
        for host, message in hosts.poll():
            if message["said"] == "line":
                print(f"{host.name}: {message['text']}", file=log, flush=True)
        offset = hand_on(run, offset, listener)
    hand_on(run, offset, listener)


def _check_folder(run: Run, hosts: Hosts) -> None:
    """Refuse hosts that do not see the run's folder, by a file with words that cannot be guessed."""
    words = secrets.token_hex(16)
    proof = run.path.resolve() / f".seen-{words[:8]}"
    proof.write_text(words, encoding="utf-8")
    try:
        answers = dict(zip(hosts.all, hosts.ask("read", file=str(proof)), strict=True))
    finally:
        proof.unlink()
    failures = {host: "it does not see" for host, found in answers.items() if found["content"] != words}
    failures |= {
        host: "it cannot write to" for host, found in answers.items() if host not in failures and not found["writable"]
    }
    if failures:
        folder = proof.parent
        raise unusable(
            {host: f"{why} {folder}" for host, why in failures.items()},
            "set output.dir to a folder on a disk that all hosts share, at the same path",
        )
