"""A run on several hosts that share its folder, over ssh: checked before the start, watched, and stopped together.

Each host runs `tunekit.launching.ssh_node`, with the same interpreter and working directory as here, which starts the
host's processes. Both sides send heartbeats every `BEAT_SECONDS`. A host that is silent for `LOST_SECONDS` ends the run
on the others, and stops its own processes: `BOUND_SECONDS` after it was cut off, nothing runs anywhere. Routes and keys
are up to OpenSSH's configuration.
"""

import contextlib
import itertools
import json
import os
import queue
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from tunekit.errors import HostLostError, PlanError, RunError
from tunekit.estimates.facts import Hardware
from tunekit.launching.local import supervise
from tunekit.launching.ssh_node import BEAT_SECONDS, LOST_SECONDS, POLL_SECONDS, Message
from tunekit.probe.nodes import check_starts_no_server
from tunekit.process.processes import LOG, name_interface
from tunekit.recipe.load import load_recipe
from tunekit.recipe.schema import Recipe
from tunekit.redact import is_secret, redacted
from tunekit.runs.events import Listener
from tunekit.runs.record import Record
from tunekit.runs.run import SEEN_SECONDS, Run
from tunekit.runs.small_files import Place, forget_request

CONNECT_SECONDS = 10
"""Seconds for ssh to reach a host."""

ANSWER_SECONDS = 60
"""Seconds for a host that is reached to answer: the first time it imports, perhaps from a shared disk."""

BOUND_SECONDS = LOST_SECONDS + 5
"""After which time a cut is reported: the silence, the time to end what runs on the others, and some for slow hosts."""

NAME = re.compile(r"(?:[\w.][\w.+-]*@)?(?:\[[0-9A-Fa-f:.%]+\]|[\w.][\w.-]*)(?P<port>:\d+)?")
"""A host as it may be named: what ssh knows it by, with a user before it and a port behind it."""

FORWARDED = ("GLOO_", "HF_", "NCCL_", "OMP_", "TORCH", "TRANSFORMERS_", "XDG_CACHE_HOME")
"""Beginnings of the variables that processes on other hosts get from here. ssh passes none on by itself."""

HUB_TOKEN = "HF_TOKEN"
"""The one secret among them: models that ask for a login. It goes over the connection, which is encrypted."""


class Host:
    """A connection to a host, and what it said of itself.

    Args:
        name: What ssh knows it by; None for this machine without ssh.
        inbox: Where what it says is put, with the host.
    """

    def __init__(self, name: str | None, inbox: "queue.Queue[tuple[Host, Message]]") -> None:
        self.name = name or "this machine"
        self.facts: Message = {}
        """Facts about the host; empty until it answers."""
        self.environment: dict[str, str] = {}
        """Variables that its processes were given."""
        self.codes: list[int | None] = []
        """Exit codes of its processes, minus the signal that ended one, None while it is there; empty before."""
        self._heard = time.monotonic()
        self._is_gone = False
        self._inbox = inbox
        self._lock = threading.Lock()
        # What ssh and the host's shell have to say.
        self._words: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            _command(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            errors="replace",
            # Ctrl-C is for this process, which then tells the hosts.
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """True if the connection ended, or was silent for so long that it must be cut off, or down."""
        return self._is_gone or (bool(self.facts) and time.monotonic() - self._heard > LOST_SECONDS)

    @property
    def has_ended(self) -> bool:
        """True if it reported that all its processes ended."""
        return bool(self.codes) and None not in self.codes

    def say(self, ask: str, **fields: Any) -> None:
        """Send a message. Nobody may be there any more: that is noticed where one listens."""
        assert self._process.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(json.dumps({"ask": ask, **fields}) + "\n")
            self._process.stdin.flush()

    def note(self, message: Message) -> None:
        """Remember what a message says of the host."""
        if message["said"] == "hello":
            self.facts = message
        elif message["said"] == "gone":
            self._is_gone = True
        elif message["said"] == "codes":
            self.codes = message["codes"]

    def why_silent(self) -> str:
        """Return why a host is silent, in the last words of ssh or of the host's shell if there are any."""
        if not self._is_gone:
            return f"no heartbeat for {LOST_SECONDS} s"
        self._words.seek(0)
        lines = [line.strip() for line in self._words if line.strip()]
        return lines[-1] if lines else f"connection closed with exit code {self._process.wait()}"

    def close(self) -> None:
        """End the connection, whereupon the host ends what it runs."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(timeout=0 if self.is_silent else BEAT_SECONDS)
        self._process.kill()
        self._process.wait()
        self._words.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard = time.monotonic()
            # A login shell may greet first.
            if line.startswith('{"said": '):
                self._inbox.put((self, json.loads(line)))
        self._process.wait()
        self._inbox.put((self, {"said": "gone"}))


class Hosts(contextlib.AbstractContextManager["Hosts"]):
    """All hosts of a run, connected from when this is made until it is left as a context.

    Args:
        names: What ssh knows them by; the others meet at the first. None stands for this machine without ssh.

    Raises:
        RunError: A name is none, or is there twice; or a host cannot be used. It is named.
        HostLostError: A host does not answer. It is named.
    """

    def __init__(self, names: Sequence[str | None]) -> None:
        for name in names:
            if name is not None and not NAME.fullmatch(name):
                raise RunError(f"invalid host {name!r}", hint="use host, user@host, host:port or an address")
            if names.count(name) > 1:
                raise RunError(f"duplicate host {name}", hint="list each host once")
        self._inbox: queue.Queue[tuple[Host, Message]] = queue.Queue()
        self._done = threading.Event()
        self.all: list[Host] = []
        try:
            self.all += (Host(name, self._inbox) for name in names)
            threading.Thread(target=self._beat, daemon=True).start()
            self._wait_for_all()
            self._check_alike()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections, whereupon the hosts end what they run."""
        self._done.set()
        for host in self.all:
            host.close()

    @property
    def hardware(self) -> Hardware:
        """Facts about each host, by the one with the least free memory."""
        machines = [Hardware.model_validate(host.facts["hardware"]) for host in self.all]
        least = min(machines, key=lambda hardware: hardware.device.memory_free_bytes)
        cores = min((hardware.num_cores for hardware in machines if hardware.num_cores), default=None)
        note = "; ".join(filter(None, (least.note, "on " + ", ".join(host.name for host in self.all))))
        return least.model_copy(update={"num_nodes": len(machines), "num_cores": cores, "note": note})

    @property
    def silent(self) -> list[Host]:
        """The hosts of which nothing is heard, and whose processes had not ended before."""
        return [host for host in self.all if not host.has_ended and host.is_silent]

    def poll(self) -> list[tuple[Host, Message]]:
        """Return the messages of the hosts since the last call, after a short wait."""
        heard: list[tuple[Host, Message]] = []
        with contextlib.suppress(queue.Empty):
            heard.append(self._inbox.get(timeout=POLL_SECONDS))
            while True:
                heard.append(self._inbox.get_nowait())
        for host, message in heard:
            host.note(message)
        return heard

    def ask(self, what: str, hosts: Sequence[Host] | None = None, **fields: Any) -> list[Message]:
        """Send a request to all hosts or some, at once, and return their answers.

        Raises:
            RunError: One of them does not answer.
        """
        targets = self.all if hosts is None else hosts
        for host in targets:
            host.say(what, **fields)
        answers: dict[Host, Message] = {}
        until = time.monotonic() + ANSWER_SECONDS
        while len(answers) < len(targets):
            answers |= {host: message for host, message in self.poll() if message["said"] == "answer"}
            if self.silent:
                raise lost_error(self.silent)
            if time.monotonic() > until:
                missing = {host: f"no answer for {ANSWER_SECONDS} s" for host in targets if host not in answers}
                refuse(missing, "check its load")
        return [answers[host] for host in targets]

    def meet(self) -> tuple[str, int, list[str | None]]:
        """An address and a port of the first host that all others reach, and the interface of each on that way.

        Raises:
            RunError: A host does not reach the first one. It is named.
        """
        first, others = self.all[0], self.all[1:]
        if not others:
            return "127.0.0.1", self.ask("open", address="127.0.0.1")[0]["port"], [None]
        name = ssh_address(first.name)
        ways = dict(zip(others, self.ask("way", others, towards=name), strict=True))
        lost = {host: f"no route to {name}: {way['problem']}" for host, way in ways.items() if way["problem"]}
        refuse(lost, f"{first.name} must have that name on all hosts")
        # By its own name a host often finds its loopback, so the first is asked for its way to another one.
        (ways[first],) = self.ask("way", [first], towards=ways[others[0]]["address"])
        address = ways[first]["address"]
        same = [host for host in others if ways[host]["address"] == address]
        why = f"same machine as {first.name}"
        refuse(dict.fromkeys(same, why), "list each host once, the first by a name that the others can reach")
        port = self.ask("open", [first], address=address)[0]["port"]
        reached = zip(others, self.ask("reach", others, address=address, port=port), strict=True)
        why = f"cannot reach {first.name} at {address}, port {port}"
        failures = {host: f"{why}: {answer['problem']}" for host, answer in reached if answer["problem"]}
        refuse(failures, "open all ports between the hosts")
        return address, port, [ways[host]["interface"] for host in self.all]

    def start(self, words: Sequence[str], *, num_local: int, environment: Mapping[str, str]) -> None:
        """Start processes on all hosts, which find each other.

        Args:
            words: A module's dotted name, and arguments for it.
            num_local: Processes on each host.
            environment: Variables that each finds.

        Raises:
            RunError: A host does not reach the first one. It is named.
        """
        address, port, interfaces = self.meet()
        forwarded = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(FORWARDED) and (name == HUB_TOKEN or not is_secret(name))
        }
        adapters = [bool(host.facts["infiniband"]) for host in self.all]
        # NCCL takes InfiniBand where it finds some, and then expects it everywhere.
        mixed = {"NCCL_IB_DISABLE": "1"} if any(adapters) and not all(adapters) else {}
        for node, (host, interface) in enumerate(zip(self.all, interfaces, strict=True)):
            host.environment = {**mixed, **forwarded, **environment}
            if interface is not None:
                name_interface(host.environment, interface)
            host.codes = [None] * num_local
            host.say(
                "start",
                words=words,
                environment=host.environment,
                num=num_local * len(self.all),
                num_local=num_local,
                node=node,
                store=(address, port),
            )

    def end(self) -> list[Host]:
        """End the processes on all hosts, and return the hosts that did not say that they did."""
        for host in self.all:
            host.say("end")
        until = time.monotonic() + LOST_SECONDS
        while time.monotonic() < until and any(not host.has_ended and not host.is_silent for host in self.all):
            self.poll()
        return [host for host in self.all if not host.has_ended]

    def describe(self) -> list[Message]:
        """The hosts with the interface that each uses, and its InfiniBand adapters, for people."""
        return [
            {
                "name": host.name,
                "interface": host.environment.get("GLOO_SOCKET_IFNAME"),
                "infiniband": [] if host.environment.get("NCCL_IB_DISABLE") == "1" else host.facts["infiniband"],
            }
            for host in self.all
        ]

    def _beat(self) -> None:
        while not self._done.wait(BEAT_SECONDS):
            for host in self.all:
                host.say("beat")

    def _wait_for_all(self) -> None:
        """Wait until every host said what it has, or did not."""
        until = time.monotonic() + CONNECT_SECONDS + ANSWER_SECONDS
        while any(not host.facts and not host.is_silent for host in self.all) and time.monotonic() < until:
            self.poll()
        absent = {host: host.why_silent() for host in self.all if host.is_silent}
        absent |= {host: "no answer" for host in self.all if not host.facts and not host.is_silent}
        if absent:
            hint = f"`ssh HOST` must work without prompts, and {sys.executable} and {Path.cwd()} must exist there"
            raise HostLostError(_each(absent), hint=hint)

    def _check_alike(self) -> None:
        """Refuse the hosts that are not as the first is."""
        faulty = {host: host.facts["problem"] for host in self.all if host.facts["problem"]}
        refuse(faulty, "run `tunekit doctor` there")
        first, failures = self.all[0], {}
        for host in self.all:
            ours, theirs = first.facts["versions"], host.facts["versions"]
            differing = [f"{name} {theirs[name]}" for name in ours if theirs[name] != ours[name]]
            if differing:
                there = ", ".join(f"{name} {ours[name]}" for name in ours if theirs[name] != ours[name])
                failures[host] = f"has {', '.join(differing)}, but {first.name} has {there}"
            elif _devices(host) != _devices(first):
                failures[host] = f"has {_devices(host)}, but {first.name} has {_devices(first)}"
        refuse(failures, "all hosts of a run need the same versions and accelerators")


def lost_error(lost: Sequence[Host]) -> HostLostError:
    """Return the error for hosts that are lost."""
    problem = _each({host: host.why_silent() for host in lost})
    return HostLostError(problem, hint="the host is down or unreachable, or its processes were killed")


def ssh_address(name: str) -> str:
    """The address or name that ssh connects to for a host, by its configuration."""
    command = ["ssh", "-G", *_destination(name)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return next(line.split()[1] for line in output.splitlines() if line.startswith("hostname "))


def _destination(name: str) -> list[str]:
    match = NAME.fullmatch(name)
    assert match is not None, name
    return ["--", f"ssh://{name}" if match["port"] else name.strip("[]")]


def _command(name: str | None) -> list[str]:
    """Return the command that starts `tunekit.launching.ssh_node` on a host."""
    node = [sys.executable, "-m", "tunekit.launching.ssh_node"]
    if name is None:
        return node
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    there = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *path, *node])}"
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", f"ServerAliveInterval={BEAT_SECONDS}"]
    options += [f"ServerAliveCountMax={LOST_SECONDS // BEAT_SECONDS}", "ForwardX11=no"]
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), *_destination(name), there]


def _devices(host: Host) -> str:
    """The accelerators of a host, in words."""
    accelerators = Hardware.model_validate(host.facts["hardware"]).accelerators
    return f"{len(accelerators)} x {accelerators[0].name}" if accelerators else "no accelerator"


def refuse(failures: Mapping[Host, str], hint: str) -> None:
    """Refuse hosts that cannot be used, each with the reason.

    Raises:
        RunError: There are some.
    """
    if failures:
        raise RunError(_each(failures), hint=hint)


def _each(failures: Mapping[Host, str]) -> str:
    return "\n".join(f"{host.name}: {why}" for host, why in failures.items())


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
        PlanError: The processes that the recipe asks for cannot be spread evenly over the hosts, or it asks for a vLLM
            server.
    """
    check_starts_no_server(recipe, "on hosts")
    with Hosts(names) as hosts:
        hosts.meet()
        hardware = hosts.hardware
    num_processes, has = recipe.parallel.num_processes, hardware.num_accelerators
    if num_processes is not None and (num_processes != has if has else num_processes % len(names)):
        needed = str(has) if has else f"a multiple of {len(names)}"
        problem = f"parallel.num_processes: {num_processes} processes cannot be spread evenly over {len(names)} hosts"
        raise PlanError(problem, hint=f"unset it, or set it to {needed}")
    return load_recipe(recipe, [f"parallel.num_processes={num_processes or has or len(names)}"]), hardware


def launch_on(run: Run, names: Sequence[str], listener: Listener | None = None) -> None:
    """Train a run on hosts that share its folder, and return when nothing runs on any of them.

    Args:
        run: The run; it resumes from its newest complete checkpoint, if there is one.
        names: The hosts, as many as its plan has nodes.
        listener: Called with every event.

    Raises:
        TunekitError: An error that the user can fix, on any of the hosts.
    """
    if run.plan.num_nodes != len(names):
        raise RunError(f"{run.path}: the plan is for {run.plan.num_nodes} nodes, not {len(names)}", hint="pass as many")
    check_starts_no_server(run.recipe, "on hosts")
    forget_request(run.path)
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
    folder = proof.parent
    blind = [host for host, answer in answers.items() if answer["content"] != words]
    closed = [host for host, answer in answers.items() if host not in blind and not answer["writable"]]
    failures = dict.fromkeys(blind, f"does not see {folder}") | dict.fromkeys(closed, f"cannot write to {folder}")
    refuse(failures, "set output.dir to a folder on shared storage, at the same path on all hosts")
