"""States that a power loss may leave of a run: all that a file system allows, and what is resumed from them.

    python -m benchmarks.power_loss [--only ENGINE ...] [--states N] [--resumes N] [--save]

A run of each engine is recorded by strace: every write, rename, deletion and fsync in its folder, of all of its
processes, in their order. From the record follows what a disk may hold when the power fails after any of these calls
(as in ALICE, Pillai et al., OSDI 2014). What was synced is there. Of the rest each change of a folder may be there or
not, in any combination that keeps files and folders before what is done with them, and of each file's unsynced bytes
all, none, half, or zeros of their length. After every call of a save, and after one in ten of the others, these states
are made: all that was done; only what was synced; all changes of folders, and of unsynced bytes none, half or zeros;
all but one change, for each; and some at random.

In each state the newest whole checkpoint is looked for, as a resume does. It must have the bytes that were saved, or be
refused, and be no earlier than the last one that the run had told of (else it is `lost`). What a resume needs besides,
such as the plan and the prepared rows, must be as it was, and so must the result of a run that is said to be finished
(else `wrong`). It must be possible to resume (else `stuck`). From a sample of the states the run is resumed for real,
and has to end with the weights of the run that was not cut off, to the bit.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.circumstances import circumstances
from tests.tiny import save_chats, save_tiny_model, saved_weights
from tunekit.errors import RunError, TunekitError
from tunekit.runs.checkpoints.complete import CHECKPOINTS, take_newest
from tunekit.runs.run import Run
from tunekit.training.checkpointing.resume import decide

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "power_loss.json"
PACKAGES = ("tunekit", "torch", "transformers", "accelerate", "deepspeed", "safetensors")
ENGINES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp": {"num_processes": 2, "strategy": "ddp"},
    "fsdp2": {"num_processes": 2, "strategy": "fsdp2"},
    "zero2": {"num_processes": 2, "strategy": "zero2"},
    "zero3": {"num_processes": 2, "strategy": "zero3"},
}
"""Section `parallel` of a recipe by the name of the engine."""

CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,truncate,fallocate,copy_file_range,sendfile,"
    "rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,fsync,fdatasync,lseek"
)
KNOWN = ("write", "writev", "sendfile", "pwrite64", "ftruncate", "fsync", "fdatasync", "lseek")
OF_DESCRIPTORS = (*KNOWN, "pwritev", "pwritev2", "fallocate", "copy_file_range")
"""Calls on open files, whose other arguments are no paths, and those of them that are expected in a run's folder."""

BLOCK = 4096
"""Bytes that a disk writes whole or not at all."""

FATES = ("all", "none", "half", "zeros")
"""Fates of a file's unsynced bytes."""

NEEDED = ("recipe.yaml", "plan.yaml", "fingerprints.json", "data/*")
"""Files of a run besides its checkpoints that a resume reads."""

ELSEWHERE = 10
"""Outside of saves, one in so many calls is a point at which the power fails."""

NUM_RANDOM = 4
"""States at random for each point."""


@dataclass
class Node:
    """A file or a folder, whatever its name is.

    Attributes:
        is_folder: Whether it is one.
        writes: Changes of a file's bytes: the number of the call, the place, and the bytes; None cuts it off there.
        synced: Numbers of the calls that brought it to the disk.
    """

    is_folder: bool
    writes: list[tuple[int, int, bytes | None]] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Change:
    """A change of names.

    Attributes:
        call: The number of its call.
        node: What has the name.
        gone: The folder and the name that it had.
        new: The folder and the name that it gets.
    """

    call: int
    node: int
    gone: tuple[int, str] | None
    new: tuple[int, str] | None


class Record:
    """Calls below a folder, as strace told them.

    Args:
        log: Its lines.
        root: The folder, which was empty.

    Raises:
        ValueError: A call is none that is known here.
    """

    def __init__(self, log: str, root: Path) -> None:
        self.root = str(root)
        self.nodes = [Node(is_folder=True)]
        self.changes: list[Change] = []
        self.in_save: list[bool] = []
        """Of each call, whether it concerns a checkpoint."""
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._positions: dict[int, int] = {}
        self._appended: set[int] = set()
        self._contents: tuple[int, dict[tuple[int, str], bytes]] = 0, {}
        """Contents of files after a number of calls, by file and fate."""
        for name, arguments, result in whole_lines(log):
            self._note(name, arguments, result)
        self._by_node: dict[int, list[Change]] = {}
        for change in self.changes:
            self._by_node.setdefault(change.node, []).append(change)

    @property
    def num_calls(self) -> int:
        """Number of the calls."""
        return len(self.in_save)

    def _parts(self, path: str) -> list[str] | None:
        """Return the names of a path below the root; None where it is elsewhere, or deleted."""
        if not path.startswith(f"{self.root}/") or path.endswith("(deleted)"):
            return [] if path == self.root else None
        return path[len(self.root) + 1 :].split("/")

    def _find(self, parts: Sequence[str]) -> int | None:
        node: int | None = 0
        for part in parts:
            node = None if node is None else self._names.get(node, {}).get(part)
        return node

    def _note(self, name: str, arguments: str, result: str) -> None:
        paths, texts = paths_of(arguments)
        if name in OF_DESCRIPTORS:
            node = None if not paths or (parts := self._parts(paths[0])) is None else self._find(parts)
            if node is not None:
                self._of_file(name, node, arguments, texts, result, paths)
            return
        named = [self._parts(path) for path in absolute(paths, texts)]
        inside = [parts for parts in named if parts]
        if not inside:
            return
        if name in ("openat", "open", "creat"):
            self._open(inside[0], arguments)
        elif name in ("mkdir", "mkdirat"):
            self._create(inside[0], is_folder=True)
        elif name in ("unlink", "unlinkat", "rmdir"):
            self._change(self._find(inside[0]), inside[0], None)
        elif name in ("link", "linkat") and len(inside) == 2:
            self._change(self._find(inside[0]), None, inside[1])
        elif name in ("rename", "renameat", "renameat2") and len(inside) == 2:
            self._change(self._find(inside[0]), inside[0], inside[1])
        else:
            raise ValueError(f"{name} is not known here: {arguments[:200]}")

    def _of_file(self, name: str, node: int, arguments: str, texts: list[bytes], result: str, paths: list[str]) -> None:
        file, call = self.nodes[node], len(self.in_save)
        if name not in KNOWN:
            raise ValueError(f"{name} is not known here: {paths[0]}")
        if name == "lseek":
            self._positions[node] = int(result)
            return
        if name in ("fsync", "fdatasync"):
            file.synced.append(call)
        elif name == "ftruncate":
            file.writes.append((call, int(arguments.rpartition(",")[2]), None))
        else:
            at = len(content_of(file, call)) if node in self._appended else self._positions.get(node, 0)
            data = b"".join(texts)
            if name == "pwrite64":
                at = int(arguments.rpartition(",")[2])
            elif name == "sendfile":
                source, begin = self._find(self._parts(paths[1]) or []), re.search(r"\[(\d+)\]", arguments)
                if source is None or begin is None:
                    raise ValueError(f"{name} copies from elsewhere: {paths}")
                data = content_of(self.nodes[source], call)[int(begin[1]) :]
            file.writes.append((call, at, data[: int(result)]))
            if name != "pwrite64":
                self._positions[node] = at + int(result)
        self._called(paths[0])

    def _open(self, parts: list[str], arguments: str) -> None:
        node = self._find(parts)
        if node is None and "O_CREAT" in arguments:
            node = self._create(parts, is_folder=False)
        elif node is not None and "O_TRUNC" in arguments and content_of(self.nodes[node], len(self.in_save)):
            self.nodes[node].writes.append((len(self.in_save), 0, None))
            self._called("/".join(parts))
        if node is not None and not re.search(r"O_RDONLY", arguments):
            self._positions[node] = 0
            (self._appended.add if "O_APPEND" in arguments else self._appended.discard)(node)

    def _create(self, parts: list[str], *, is_folder: bool) -> int:
        self.nodes.append(Node(is_folder))
        node = len(self.nodes) - 1
        if is_folder:
            self._names[node] = {}
        self._change(node, None, parts)
        return node

    def _change(self, node: int | None, gone: list[str] | None, new: list[str] | None) -> None:
        assert node is not None, (gone, new)
        places: list[tuple[int, str] | None] = []
        for parts in (gone, new):
            folder = None if parts is None else self._find(parts[:-1])
            places.append(None if parts is None or folder is None else (folder, parts[-1]))
        self.changes.append(Change(len(self.in_save), node, *places))
        apply(self._names, self.changes[-1])
        self._called("/".join((gone or []) + (new or [])))

    def _called(self, path: str) -> None:
        self.in_save.append(f"{CHECKPOINTS}/" in path)

    def durable(self, change: Change, at: int) -> bool:
        """Return whether a change was synced by the calls before a point, or a later one of the same file was.

        It was where a folder that it is one of was synced.
        """
        later = [one for one in self._by_node[change.node] if change.call <= one.call < at]
        places = [(one.call, place[0]) for one in later for place in (one.gone, one.new) if place is not None]
        return any(call < synced < at for call, folder in places for synced in self.nodes[folder].synced)

    def pending(self, at: int) -> tuple[list[Change], list[int]]:
        """Return the changes, and the files with bytes, that are not synced at a point."""
        changes = [change for change in self.changes if change.call < at and not self.durable(change, at)]
        files = [
            number
            for number, node in enumerate(self.nodes)
            if any(call < at and call > last_sync(node, at) for call, _, _ in node.writes)
        ]
        return changes, files

    def state(self, at: int, lost: frozenset[int], fates: dict[int, str]) -> dict[str, bytes | None]:
        """Return the files of a state by their paths, and folders with None.

        Args:
            at: The number of calls that were made.
            lost: Numbers of the calls whose change is not there.
            fates: One of FATES by file; those that are not named have all their bytes.
        """
        names: dict[int, dict[str, int]] = {number: {} for number, node in enumerate(self.nodes) if node.is_folder}
        for change in self.changes:
            if change.call < at and change.call not in lost:
                apply(names, change)
        found: dict[str, bytes | None] = {}
        waiting = [(0, "")]
        while waiting:
            folder, path = waiting.pop()
            for name, number in names[folder].items():
                node, inner = self.nodes[number], f"{path}{name}"
                if node.is_folder:
                    found[inner] = None
                    waiting.append((number, f"{inner}/"))
                else:
                    found[inner] = self._content(number, at, fates.get(number, "all"))
        return found

    def _content(self, number: int, at: int, fate: str) -> bytes:
        if self._contents[0] != at:
            self._contents = at, {}
        contents = self._contents[1]
        if (number, fate) not in contents:
            contents[number, fate] = content_of(self.nodes[number], at, fate)
        return contents[number, fate]

    def states(self, at: int, draws: random.Random) -> Iterator[dict[str, bytes | None]]:
        """Yield what a disk may hold after a number of calls."""
        changes, files = self.pending(at)
        calls = frozenset(change.call for change in changes)

        def without(lost: Iterable[int]) -> frozenset[int]:
            """Return the calls of lost changes, and of the later ones of the same files and folders."""
            first: dict[int, int] = {}
            for change in changes:
                if change.call in lost:
                    first.setdefault(change.node, change.call)
            return frozenset(change.call for change in changes if change.call >= first.get(change.node, at))

        yield self.state(at, calls, dict.fromkeys(files, "none"))
        for fate in FATES:
            yield self.state(at, frozenset(), dict.fromkeys(files, fate))
        for call in sorted(calls):
            yield self.state(at, without({call}), {})
            yield self.state(at, without(calls - {call}), dict.fromkeys(files, "none"))
        for _ in range(NUM_RANDOM):
            lost = {call for call in sorted(calls) if draws.random() < 0.5}
            yield self.state(at, without(lost), {number: draws.choice(FATES) for number in files})


def apply(names: dict[int, dict[str, int]], change: Change) -> None:
    """Make a change of names, unless what it is one of is not there."""
    if change.gone is not None:
        folder, name = change.gone
        if names[folder].get(name) != change.node:
            return
        del names[folder][name]
    if change.new is not None:
        folder, name = change.new
        names[folder][name] = change.node


def last_sync(node: Node, at: int) -> int:
    """Return the number of the last call before a point that synced a file; -1 where there is none."""
    return max((call for call in node.synced if call < at), default=-1)


def content_of(node: Node, at: int, fate: str = "all") -> bytes:
    """Return the bytes of a file after a number of calls, by what becomes of those that are not synced."""
    synced, content, durable = last_sync(node, at), bytearray(), b""
    for call, place, data in node.writes:
        if call >= at:
            break
        if call > synced and not durable:
            durable = bytes(content)
        if data is None:
            content[place:] = bytes(max(0, place - len(content)))
        else:
            content[len(content) :] = bytes(max(0, place - len(content)))
            content[place : place + len(data)] = data
    if not any(synced < call < at for call, _, _ in node.writes) or fate == "all":
        return bytes(content)
    if fate == "none":
        return durable
    if fate == "half":
        return bytes(content[: max(len(durable), (len(durable) + len(content)) // 2 // BLOCK * BLOCK)])
    return durable + bytes(max(0, len(content) - len(durable)))


def whole_lines(log: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, arguments and result of the calls that succeeded, in the order in which they were done."""
    begun: dict[str, str] = {}
    for line in log.splitlines():
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>")
            continue
        if match := re.match(r"<\.\.\. \w+ resumed>", call):
            call = begun.pop(thread) + call[match.end() :]
        if match := re.fullmatch(r"(\w+)\((.*)\)\s+= (\d+)(<.*>)?", call):
            yield match[1], match[2], match[3]


def decoded(text: str) -> bytes:
    """Return the bytes that strace wrote in hexadecimal."""
    return bytes.fromhex(text.replace("\\x", ""))


def paths_of(arguments: str) -> tuple[list[str], list[bytes]]:
    """Return the paths of descriptors, and the strings, among the arguments of a call."""
    paths = [decoded(found).decode() for found in re.findall(r"<((?:\\x[0-9a-f]{2})+)>", arguments)]
    return paths, [decoded(found) for found in re.findall(r'"((?:\\x[0-9a-f]{2})*)"', arguments)]


def absolute(folders: list[str], texts: list[bytes]) -> list[str]:
    """Return the paths that a call names, those that are relative by the folder of their descriptor."""
    names = [text.decode() for text in texts]
    return [
        path if path.startswith("/") else f"{folders[number] if number < len(folders) else Path.cwd()}/{path}"
        for number, path in enumerate(names)
    ]


def write_state(state: dict[str, bytes | None], folder: Path) -> None:
    """Make a folder hold a state and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, content in sorted(state.items()):
        if content is None:
            (folder / path).mkdir(parents=True, exist_ok=True)
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


def recipe_of(folder: Path, engine: str) -> dict[str, Any]:
    """Return the recipe of a run with three saves, the second of which replaces nothing and the third the first."""
    return {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 64},
        "adapter": {"type": "lora" if engine == "ddp" else "full"},
        "train": {"max_steps": 8, "global_batch_size": 4, "learning_rate": 1e-3, "save_steps": 2},
        "parallel": ENGINES[engine],
        "output": {"sample_prompts": [], "dir": str(folder / "disk" / "run")},
    }


def record_of(folder: Path, engine: str) -> Record:
    """Train a run of an engine under strace, and return what it did in its folder.

    Raises:
        RuntimeError: It failed, or the record does not lead to what lies on the disk.
    """
    save_tiny_model(folder / "model")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(20)))
    disk, recipe, log = folder / "disk", folder / "recipe.yaml", folder / "strace.log"
    disk.mkdir()
    recipe.write_text(yaml.safe_dump(recipe_of(folder, engine)), encoding="utf-8")
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", str(2**24), "-e", f"trace={CALLS}", "-o", str(log)]
    command = [*strace, sys.executable, "-W", "ignore", "-m", "tunekit", "train", str(recipe)]
    # Prepared rows are hard links to those in the cache.
    environment = {**os.environ, "XDG_CACHE_HOME": str(disk / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"the run of {engine} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    record = Record(log.read_text(encoding="utf-8", errors="replace"), disk)
    actual = {path.relative_to(disk).as_posix(): path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    told = {
        path: content
        for path, content in record.state(record.num_calls, frozenset(), {}).items()
        if content is not None
    }
    if told != actual:
        differing = sorted(name for name in told.keys() | actual.keys() if told.get(name) != actual.get(name))
        raise RuntimeError(f"the record of {engine} leads to other files than there are: {differing[:5]}")
    return record


@dataclass
class Reference:
    """Contents that a run saved, by path: of the checkpoints as they were when they became visible."""

    checkpoints: dict[str, dict[str, bytes]]
    needed: dict[str, bytes]
    result: dict[str, bytes]
    told: list[tuple[int, int]]
    """The call after which an event told of a checkpoint, and its step."""


def reference_of(record: Record) -> Reference:
    """Return what a run saved, by its record."""
    checkpoints: dict[str, dict[str, bytes]] = {}
    for change in record.changes:
        if change.new is not None and re.fullmatch(r"checkpoint-\d+", change.new[1]) and change.gone is not None:
            name = change.new[1]
            prefix = f"run/{CHECKPOINTS}/{name}/"
            state = record.state(change.call + 1, frozenset(), {})
            if any(path.startswith(prefix) for path in state):
                checkpoints[name] = {
                    path.removeprefix(prefix): content
                    for path, content in state.items()
                    if path.startswith(prefix) and content is not None
                }
    final = record.state(record.num_calls, frozenset(), {})
    needed = {path: content for path, content in final.items() if content is not None and is_needed(path)}
    result = {path: content for path, content in final.items() if content is not None and path.startswith("run/model/")}
    told = []
    for node in record.nodes:
        for call, _, data in node.writes:
            for line in (data or b"").splitlines():
                if line.startswith(b"{") and b'"event": "checkpoint"' in line:
                    told.append((call, int(json.loads(line)["step"])))
    return Reference(checkpoints, needed, result, told)


def is_needed(path: str) -> bool:
    """Return whether a resume reads a file, by its path below the disk."""
    return any(Path(path).match(f"run/{pattern}") for pattern in NEEDED)


@dataclass
class Counts:
    """Counts of what was found in the states of a run."""

    calls: int = 0
    points: int = 0
    states: int = 0
    whole: int = 0
    refused: int = 0
    without: int = 0
    stuck: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    resumed: int = 0
    other_weights: list[str] = field(default_factory=list)


def judge(state: dict[str, bytes | None], at: int, reference: Reference, folder: Path, counts: Counts) -> int:
    """Look for the newest checkpoint of a state, count what is found, and return its step; 0 where there is none."""
    write_state(state, folder)
    run, step = folder / "run", max((step for call, step in reference.told if call < at), default=0)
    where = f"after call {at}"
    try:
        newest = take_newest(run)
    except RunError as error:
        counts.refused += 1
        if step:
            counts.lost.append(f"{where}: {error.problem}")
        return 0
    if newest.path is None:
        counts.without += 1
        if step:
            counts.lost.append(f"{where}: no checkpoint, although the one of step {step} was told")
        return 0
    counts.whole += 1
    if b'"phase": "finished"' in (state.get("run/status.json") or b""):
        for path, content in reference.result.items():
            if state.get(path) != content:
                counts.wrong.append(f"{where}: {path} is not what was trained, although the run is finished")
    found = {
        file.relative_to(newest.path).as_posix(): file.read_bytes() for file in newest.path.rglob("*") if file.is_file()
    }
    if found != reference.checkpoints[newest.path.name]:
        counts.wrong.append(f"{where}: {newest.path.name} has other bytes than were saved")
    if newest.step < step:
        counts.lost.append(f"{where}: step {newest.step}, although that of step {step} was told")
    for path, content in reference.needed.items():
        if state.get(path) != content:
            counts.wrong.append(f"{where}: {path} is not what step {newest.step} was trained with")
    if b'"phase": "finished"' not in (state.get("run/status.json") or b""):
        try:
            decide(Run(run), make_plan=lambda _, earlier: earlier, is_here=lambda _: True)
        except TunekitError as error:
            counts.stuck.append(f"{where}: {error}")
            return 0
    return newest.step


def resume_and_compare(folder: Path, expected: dict[str, Any]) -> str | None:
    """Resume the run of a state, and return how it ends otherwise than the one that was not cut off, if it does."""
    command = [sys.executable, "-W", "ignore", "-m", "tunekit", "resume", str(folder / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    weights = saved_weights(folder / "run" / "model")
    same = weights.keys() == expected.keys() and all(bool((weights[name] == expected[name]).all()) for name in expected)
    return None if same else "other weights"


def measure(engine: str, num_states: int | None, num_resumes: int, console: Console) -> dict[str, Any]:
    """Record a run of an engine, and judge the states that a power loss may leave."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        record = record_of(folder, engine)
        reference, counts, draws = reference_of(record), Counts(calls=record.num_calls), random.Random(0)
        expected = saved_weights(folder / "disk" / "run" / "model")
        moved = folder / "finished"
        (folder / "disk").rename(moved)
        seen: set[int] = set()
        by_step: dict[int, list[dict[str, bytes | None]]] = {}
        points = [at for at in range(1, record.num_calls + 1) if record.in_save[at - 1] or at % ELSEWHERE == 0]
        for at in points if num_states is None else draws.sample(points, min(num_states, len(points))):
            counts.points += 1
            for state in record.states(at, draws):
                told = any(call < at for call, _ in reference.told)
                digest = hash((tuple(sorted(state.items(), key=lambda one: one[0])), told))
                if digest in seen:
                    continue
                seen.add(digest)
                counts.states += 1
                step = judge(state, at, reference, folder / "disk", counts)
                if step:
                    by_step.setdefault(step, []).append(state)
        for number in range(num_resumes):
            steps = sorted(by_step)
            state = draws.choice(by_step[steps[number % len(steps)]])
            write_state(state, folder / "disk")
            counts.resumed += 1
            if (problem := resume_and_compare(folder / "disk", expected)) is not None:
                counts.other_weights.append(f"from step {steps[number % len(steps)]}: {problem}")
        console.print(f"{engine}: {counts.states:,} states, {len(counts.wrong)} wrong, {len(counts.lost)} lost")
        return {**vars(counts), "saves": len(reference.checkpoints)}


def table_of(found: dict[str, dict[str, Any]]) -> Table:
    """Return the results as a table."""
    table = Table()
    columns = ("saves", "calls", "points", "states", "whole", "refused", "without", "stuck", "wrong", "lost", "resumed")
    for title in ("engine", *columns, "other weights"):
        table.add_column(title, justify="left" if title == "engine" else "right")
    for engine, counts in found.items():
        values = [counts[name] for name in (*columns, "other_weights")]
        table.add_row(engine, *(f"{len(value) if isinstance(value, list) else value:,}" for value in values))
    return table


def main() -> int:
    """Measure, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--states", type=int, help="points at which the power fails, at random; default: all")
    parser.add_argument("--resumes", type=int, default=4, help="states of each engine that are resumed for real")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    console = Console(width=150)
    found = {engine: measure(engine, options.states, options.resumes, console) for engine in options.only}
    console.print(table_of(found))
    for engine, counts in found.items():
        for kind in ("stuck", "wrong", "lost", "other_weights"):
            for line in dict.fromkeys(re.sub(r"(after call )?\d+", "N", line) for line in counts[kind]):
                console.print(f"{engine}, {kind}: {line}")
    if options.save:
        RESULTS.write_text(json.dumps({**circumstances(PACKAGES), "engines": found}, indent=2), encoding="utf-8")
    return int(any(counts[kind] for counts in found.values() for kind in ("stuck", "wrong", "lost", "other_weights")))


if __name__ == "__main__":
    sys.exit(main())
