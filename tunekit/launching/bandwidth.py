"""Bandwidth between the ranks of a run: an all-reduce and an all-gather, as in training, in a few sizes.

The bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md there): bytes of the whole tensor over the time of one
call, times 2(n-1)/n for an all-reduce of n ranks and (n-1)/n for an all-gather. That is what each rank sends, so it
compares with the speed of its link. Every rank sends a heartbeat with its activity each second; one that does not is
reported.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from tunekit.errors import RunError
from tunekit.estimates.facts import Hardware
from tunekit.estimates.throughput.step import Range, Transfer
from tunekit.launching.ssh_hosts import Host, Hosts, lost_error
from tunekit.process.processes import follow_supervisor, open_store
from tunekit.runs.small_files import Place, place_of

Collective = Literal["all-reduce", "all-gather"]

COLLECTIVES: tuple[Collective, ...] = ("all-reduce", "all-gather")

SIZES = {"cpu": (2**12, 2**20, 2**24), "cuda": (2**12, 2**20, 2**24, 2**28)}
"""Bytes of the whole tensor, by kind of device."""

NUM_CALLS = 10
"""Calls that are timed together, after one that is not."""

BEAT_SECONDS = 1
"""Seconds between heartbeats of a rank."""

SILENT_SECONDS = 8
"""Seconds of silence after which a rank counts as stopped."""

STUCK_SECONDS = 120
"""Seconds that a rank may spend on one step: starting, which imports torch, or one size of a collective."""


@dataclass(frozen=True)
class Measured:
    """The time of one call.

    Attributes:
        collective: Of what.
        size_bytes: Of the whole tensor.
        num_ranks: Ranks that took part.
        seconds: Until the last of them had it.
    """

    collective: Collective
    size_bytes: int
    num_ranks: int
    seconds: float

    @property
    def bus_bytes_per_second(self) -> float:
        """Bytes that each rank sent in a second, in a ring."""
        passes = 2 if self.collective == "all-reduce" else 1
        return passes * (self.num_ranks - 1) / self.num_ranks * self.size_bytes / self.seconds


@dataclass(frozen=True)
class Exchange:
    """Measurements across the ranks of some hosts.

    Attributes:
        backend: What carried it: gloo or nccl.
        hosts: Their names, interfaces and InfiniBand adapters.
        num_ranks: Ranks of all of them.
        measured: Each collective in each size.
        expected: The bus bandwidth that the slowest link lets expect, in bytes a second; None where it is not known.
    """

    backend: str
    hosts: tuple[dict[str, Any], ...]
    num_ranks: int
    measured: tuple[Measured, ...]
    expected: Range | None


def measure(names: Sequence[str | None], *, of_a_node: int | None, environment: Mapping[str, str]) -> Exchange:
    """Measure collectives across the ranks on hosts.

    Args:
        names: The hosts; None stands for this machine without ssh.
        of_a_node: Ranks per host; None for one per accelerator, or without any one per host, and two on a single host.
        environment: Variables of the ranks.

    Raises:
        RunError: There is only one rank, or a host or rank does not answer.
    """
    with Hosts(names) as hosts:
        hardware = hosts.hardware
        ranks = of_a_node or len(hardware.accelerators) or (2 if len(names) == 1 else 1)
        if ranks * len(names) == 1:
            raise RunError(
                "a single rank has no peer to communicate with", hint="set parallel.num_processes, or pass --nodes"
            )
        kind = hardware.device.kind
        hosts.start(["tunekit.launching.bandwidth", kind], num_local=ranks, environment=environment)
        measured = _Watch(hosts, ranks).until_done()
        described = tuple(hosts.describe())
    backend = "nccl" if kind == "cuda" else "gloo"
    return Exchange(backend, described, ranks * len(names), measured, expected(hardware, ranks))


def expected(hardware: Hardware, of_a_node: int) -> Range | None:
    """The bus bandwidth that the slowest link on the way lets expect, in bytes a second.

    Args:
        hardware: The nodes.
        of_a_node: Ranks on each of them.
    """
    if hardware.figures is None:
        return None
    num = of_a_node * hardware.num_nodes
    one_byte = Transfer("a byte", 1, "devices", "nothing", num_in_node=of_a_node, num_devices=num)
    seconds = one_byte.seconds(hardware.figures)
    return None if seconds is None else Range(low=1 / seconds.high, high=1 / seconds.low)


class _Watch:
    """Messages of the ranks on some hosts."""

    def __init__(self, hosts: Hosts, of_a_node: int) -> None:
        self._hosts = hosts
        self._of_a_node = of_a_node
        now = time.monotonic()
        ranks = range(of_a_node * len(hosts.all))
        self._heard: dict[int, float] = {}
        self._doing = dict.fromkeys(ranks, "starting")
        self._since = dict.fromkeys(ranks, now)
        self._measured: list[Measured] = []
        self._words: list[str] = []

    def until_done(self) -> tuple[Measured, ...]:
        """Listen until all ranks ended, and return what they measured.

        Raises:
            RunError: One of them does not answer, or failed. It is named.
        """
        while not all(host.has_ended for host in self._hosts.all):
            for host, message in self._hosts.poll():
                if message["said"] == "line":
                    self._hear(host, message["text"])
            if self._hosts.silent:
                raise lost_error(self._hosts.silent)
            if any(any(host.codes) for host in self._hosts.all):
                raise RunError("\n".join(["the ranks failed:", *self._words[-15:]]), hint="see the first error above")
            self._check()
        return tuple(self._measured)

    def _hear(self, host: Host, line: str) -> None:
        if not line.startswith('{"rank": '):
            self._words.append(f"{host.name}: {line}")
            return
        message = json.loads(line)
        rank, now = message["rank"], time.monotonic()
        self._heard[rank] = now
        if message["doing"] != self._doing[rank]:
            self._doing[rank], self._since[rank] = message["doing"], now
        if "measured" in message:
            self._measured.append(Measured(**message["measured"]))

    def _check(self) -> None:
        """Refuse to go on without a rank that is silent or stuck."""
        now = time.monotonic()
        running = [rank for rank, doing in self._doing.items() if doing != "done"]
        silent = [rank for rank in running if rank in self._heard and now - self._heard[rank] > SILENT_SECONDS]
        ranks, why = silent, f"no heartbeat for {SILENT_SECONDS} s"
        hint = "the process is suspended, or its host is overloaded"
        if not silent:
            ranks = [rank for rank in running if now - self._since[rank] > STUCK_SECONDS]
            why, hint = f"no progress for {STUCK_SECONDS} s", "check that all hosts reach each other"
        rows = [
            f"rank {rank} on {self._hosts.all[rank // self._of_a_node].name}: {why}, while {self._doing[rank]}"
            for rank in ranks
        ]
        if rows:
            raise RunError("\n".join(rows), hint=hint)


class _Voice:
    """Says what a rank is doing, once when it begins and then each second.

    Args:
        place: Which rank this is.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._doing = "starting"
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, doing: str, **fields: Any) -> None:
        """Begin something."""
        self._doing = doing
        # In one piece, since two threads write, and the ranks of a host share the pipe.
        line = json.dumps({"rank": self._place.rank, "doing": doing, **fields}) + "\n"
        os.write(sys.stdout.fileno(), line.encode())

    def _beat(self) -> None:
        while True:
            self.say(self._doing)
            time.sleep(BEAT_SECONDS)


def main() -> None:
    """Measure as one of the ranks, on the kind of device that is the only argument."""
    kind, place = sys.argv[1], place_of()
    voice = _Voice(place)
    follow_supervisor()
    import torch
    from torch import distributed

    device = torch.device(kind, place.local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = open_store()
    voice.say("joining the process group")
    distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
    for collective in COLLECTIVES:
        for size_bytes in SIZES[kind]:
            voice.say(f"in an {collective} of {size_bytes:,} bytes")
            measured = _time(collective, size_bytes, device)
            if place.is_main:
                voice.say("measuring", measured=vars(measured))
    distributed.destroy_process_group()
    del store  # It was the others' too, to the end.
    voice.say("done")


def _time(collective: Collective, size_bytes: int, device: Any) -> Measured:
    """The time of one call, by the slowest rank."""
    import torch
    from torch import distributed

    num = distributed.get_world_size()
    part = torch.ones(size_bytes // 4 // num, device=device)
    whole = torch.ones(part.numel() * num, device=device)

    reduce, gather = partial(distributed.all_reduce, whole), partial(distributed.all_gather_into_tensor, whole, part)
    call = reduce if collective == "all-reduce" else gather

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()
    wait()
    distributed.barrier()
    began = time.perf_counter()
    for _ in range(NUM_CALLS):
        call()
    wait()
    seconds = torch.tensor((time.perf_counter() - began) / NUM_CALLS, dtype=torch.float64, device=device)
    distributed.all_reduce(seconds, op=distributed.ReduceOp.MAX)
    return Measured(collective, whole.numel() * 4, num, seconds.item())


if __name__ == "__main__":
    main()
