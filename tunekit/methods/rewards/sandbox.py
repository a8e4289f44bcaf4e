"""A sandbox for programs that a model has written: they compute, and can do nothing else.

Each program runs in a fresh interpreter without environment or open files, its tests in another (see `sandboxed`). The
kernel keeps both in, root or not and in a container without privileges too: Landlock lets them read the folders of the
interpreter and of the system's libraries and nothing else, and a seccomp filter lists the system calls that they may
use. Among those are none that write or create files, reach the network, start a process or a thread, send a signal,
look into another process or lift a limit. Memory, time and messages are limited; both are killed at the end of the
time. They have no folder of their own, so nothing can be left in one.

What a test compares is plain data: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict, and
values of `collections`, `datetime`, `decimal` and `fractions`, of exactly these types. Objects of the program's own
classes stay with the program, and what it answers of them never sees what a test expects. A test may call the methods
of an object, read its attributes and go through its values (10,000 of an iterator at most; `in` looks at all of them).
An operator between such an object and plain data fails the test, as does a method that Python's own data have too, of
an object that a function returned. An object of a class that derives from one of Python's data stands for its data.

Where a test makes an object itself, by calling a class, which is a name with a capital (`Stack()`), the class is what
is tested: all its methods are asked, and `len`, `bool`, `[]`, and operators with other objects of the program's or
that give another object. `in` goes through its values, and for `==` with plain data a test has to call the method:
`Money(5).__eq__(5)`. Modules that tests use by name (`math.isclose(...)`) are Python's own, and so are its built-ins;
any other name that a test neither imports nor defines is the program's to define.

What remains possible: a program can learn which files exist anywhere, though not what is in them. It sees the arguments
of its calls, can answer those that it knows, and can change lists that it is given, so that `f(x) == sorted(x)` says
little. Where a test compares two objects of the program's own with each other, the program's `==` decides. What has a
name with a capital counts as a class even if a test means a function. And what a test accepts of plain data passes: a
list of all small numbers where it looks for one with `in`.

What programs and tests have to do without: programs have Python's standard library, but no threads, processes, files
and sockets. A test cannot give a program a function or another object of its own, nor catch an exception that the
program defines, nor call a function of the program's that has the name of one of Python's own.
"""

import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from base64 import b64encode
from contextlib import suppress
from functools import cache
from pathlib import Path

from tunekit.errors import DependencyError
from tunekit.files import read_table

_SCRIPT, _TESTS, _CALLS = (Path(__file__).with_name(name) for name in ("sandboxed.py", "handles.py", "sandbox.yaml"))
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
_OPEN_FILES = 16
_MAX_PRINTED = 2**16

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_DESCRIPTOR_CALLS = ("F_DUPFD", "F_DUPFD_CLOEXEC", "F_GETFD", "F_SETFD", "F_GETFL")
_MADV_HWPOISON = 100

_HINT = "`code` needs Linux with Landlock and seccomp (kernel 5.13 or later); use another reward on this machine"


def passed_tests(program: str, tests: list[str], *, timeout_seconds: float, memory_bytes: int) -> list[bool]:
    """Return whether a program passes each of its tests; none where it raises, exits or times out before them."""
    failed = failures(program, tests, timeout_seconds=timeout_seconds, memory_bytes=memory_bytes)
    return [reason is None for reason in failed]


def failures(program: str, tests: list[str], *, timeout_seconds: float, memory_bytes: int) -> list[str | None]:
    """Return why a program fails each of its tests, or None where it passes.

    Args:
        program: Python source.
        tests: Statements, in their order. They see what the program defines, and what the tests before them did.
        timeout_seconds: For the program with all of its tests.
        memory_bytes: Address space that it may have.
    """
    deadline = time.monotonic() + timeout_seconds
    shared = _task(timeout_seconds, memory_bytes)
    requests, replies = os.pipe(), os.pipe()
    programmed = {**shared, "program": program, "requests": requests[0], "replies": replies[1]}
    tested = {**shared, "module": str(_TESTS), "tests": tests, "requests": requests[1], "replies": replies[0]}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        try:
            processes += (_started(task) for task in (programmed, tested))
        finally:
            for descriptor in (*requests, *replies):
                os.close(descriptor)
        for process, task in zip(processes, (programmed, tested), strict=True):
            _write(process, json.dumps(task).encode())
        verdicts = _read(processes[1], len(tests), deadline)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
    missing = "the program or its tests exited early, or ran out of time or memory"
    reasons = [json.loads(line) or None for line in verdicts]
    return reasons + [missing] * (len(tests) - len(reasons))


def printed(program: str, *, timeout_seconds: float, memory_bytes: int) -> str:
    """Return what a program prints, and behind it the error that ends it, if any.

    Args:
        program: Python source.
        timeout_seconds: Time limit. What it printed until then is returned.
        memory_bytes: Address space that it may have.
    """
    deadline = time.monotonic() + timeout_seconds
    task = {**_task(timeout_seconds, memory_bytes), "printing": program}
    process = _started(task)
    try:
        _write(process, json.dumps(task).encode())
        assert process.stdout is not None, "it is a pipe"
        output, is_open = b"", True
        while is_open and len(output) < _MAX_PRINTED:
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(process.stdout.fileno(), 2**16) if ready else b""
            output, is_open = output + part, bool(part)
    finally:
        process.kill()
        process.communicate()
    text = output[:_MAX_PRINTED].decode("utf-8", "replace").rstrip()
    if is_open:
        return f"{text}\n[more output was cut]"
    return text if time.monotonic() < deadline else f"{text}\nTimeoutError: ended after {timeout_seconds:g} s".lstrip()


def _task(timeout_seconds: float, memory_bytes: int) -> dict[str, object]:
    """Return what a process of the sandbox is told: its limits, and who started it."""
    limits = {"AS": memory_bytes, "CPU": int(timeout_seconds) + 1, "FSIZE": 0, "CORE": 0, "NOFILE": _OPEN_FILES}
    kernel = {"readable": _readable(), "filter": b64encode(_filter()).decode()}
    return {"limits": limits, **kernel, "parent": os.getpid()}


def check_sandbox() -> None:
    """Try whether the sandbox works here: a program that computes passes, and none that reaches out does.

    Raises:
        DependencyError: It does not, or what it needs is not installed.
    """
    _filter()
    inside = "def double(number): return 2 * number"
    outside = f"open({str(_SCRIPT.parents[2] / 'errors.py')!r})"
    network = "import socket; socket.socket()"
    for program, expected in ((inside, True), (outside, False), (network, False)):
        tests = ["assert double(2) == 4"] if program == inside else ["pass"]
        if passed_tests(program, tests, timeout_seconds=20, memory_bytes=2**29) != [expected]:
            what = "does not run programs" if expected else "does not confine programs"
            raise DependencyError(f"method.rewards: code: the sandbox {what} on this machine", hint=_HINT)


def _started(task: dict[str, object]) -> subprocess.Popen[bytes]:
    descriptors = [task.get("requests"), task.get("replies")]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[descriptor for descriptor in descriptors if isinstance(descriptor, int)],
        env={},
        cwd="/",
        start_new_session=True,
    )


def _write(process: subprocess.Popen[bytes], task: bytes) -> None:
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(task)
    process.stdin = None


def _read(process: subprocess.Popen[bytes], num_tests: int, deadline: float) -> list[bytes]:
    """The verdicts that are there at the deadline, or once all are."""
    assert process.stdout is not None, "it is a pipe"
    verdicts = b""
    while verdicts.count(b"\n") < num_tests:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(process.stdout.fileno(), 2**16) if ready else b""
        if not part:
            break
        verdicts += part
    return verdicts.split(b"\n")[:-1]


@cache
def _readable() -> list[str]:
    """Folders with the standard library and with what it links."""
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["platstdlib"], *_LIBRARIES]
    libraries = Path(sys.base_prefix) / "lib"
    folders += [str(libraries)] if sys.base_prefix != "/usr" else []
    return [folder for folder in dict.fromkeys(folders) if Path(folder).is_dir()]


@cache
def _filter() -> bytes:
    """The filter of system calls, as the kernel takes it.

    Raises:
        DependencyError: libseccomp is not installed.
    """
    if sys.platform != "linux":
        raise DependencyError(f"method.rewards: code: no sandbox for {sys.platform}", hint=_HINT)
    try:
        import pyseccomp
    except ImportError as error:
        raise DependencyError("method.rewards: code needs pyseccomp", hint="pip install 'tunekit[rewards]'") from error
    except RuntimeError as error:
        problem = "method.rewards: code needs libseccomp"
        raise DependencyError(problem, hint="apt install libseccomp2, or dnf install libseccomp") from error
    import errno
    import fcntl

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    for name in read_table(_CALLS)["allowed"]:
        with suppress(OSError):  # this machine has no such call
            rules.add_rule(pyseccomp.ALLOW, name)
    for name, flags in (("open", 1), ("openat", 2)):
        with suppress(OSError):
            rules.add_rule(pyseccomp.ALLOW, name, pyseccomp.Arg(flags, pyseccomp.MASKED_EQ, _WRITES, 0))
    for call in _DESCRIPTOR_CALLS:
        rules.add_rule(pyseccomp.ALLOW, "fcntl", pyseccomp.Arg(1, pyseccomp.EQ, vars(fcntl)[call]))
    rules.add_rule(pyseccomp.ALLOW, "prlimit64", pyseccomp.Arg(2, pyseccomp.EQ, 0))
    rules.add_rule(pyseccomp.ALLOW, "madvise", pyseccomp.Arg(2, pyseccomp.LT, _MADV_HWPOISON))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
