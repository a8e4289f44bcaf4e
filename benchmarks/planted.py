"""A copy of the repository in which one fault is planted at a time, and what its tests say of that.

The copy is what git tracks, as it stands in the working tree, with a repository of its own and a virtual environment
of its own: that has a `tunekit` command and finds the copy first, so that the processes which tests start have the
fault too. All else it takes from where this program runs.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

from tests.tiers import UNKNOWN_SECONDS

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests" / "faults.yaml"

NEAR_FILES = 8
"""Test files that count as near to a fault, at most."""

NEAR_SECONDS = 60
"""What near tests of a fault may take together, by `tests/durations.json`; the nearest file may always take more."""

LEAST_FILES = 6
"""Where fewer are, others of the same package are near too."""

COMMON = 15
"""Of so many test files that mention a name, none is near for that."""

LIMIT_SECONDS = 900
"""How long near tests may take. A fault with which they take longer makes something hang."""

OWN = ("tests/faults.yaml", "tests/test_faults_list.py")
"""Files that change with every fault, or are about faults themselves."""

LIBRARIES = ("torch", "transformers", "datasets", "trl", "peft", "accelerate", "pandas", "gradio", "xdist", "_pytest")
"""What is imported once for all runs of pytest, which are forked from there; nothing of the repository."""

_FORKING = """
import contextlib, importlib, json, os, sys
for name in sys.argv[1:]:
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
sys.argv = ["pytest"]
import pytest

class AsGiven:
    def __init__(self, files, only, failures):
        self.files, self.only, self.failures = files, set(only), failures

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        yield
        if self.only:
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.only])
            items[:] = [item for item in items if item.nodeid in self.only]
        items.sort(key=lambda item: next((n for n, one in enumerate(self.files) if item.nodeid.startswith(one)), 0))

    def pytest_runtest_logreport(self, report):
        self.note(report)

    def pytest_collectreport(self, report):
        self.note(report)

    def note(self, report):
        if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
            with open(self.failures, "a", encoding="utf-8") as file:
                file.write(json.dumps(report.nodeid) + "\\n")

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.setsid()
        for number, path in ((0, os.devnull), (1, asked["output"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        os.dup2(1, 2)
        status = 3
        with contextlib.suppress(SystemExit):
            status = pytest.main(asked["args"], plugins=[AsGiven(asked["files"], asked["only"], asked["failures"])])
        sys.stdout.flush()
        os._exit(status)
    os.waitpid(child, 0)
    print("done", flush=True)
"""
"""Runs pytest in a child of its own for each line of arguments, with the nearest files first.

Single tests are chosen by a plugin: a command line does not take every name of a test."""

_COMMAND = "import sys\nfrom tunekit.cli.app import main\nsys.exit(main())\n"


@dataclass(frozen=True)
class Fault:
    """A fault of the list.

    Attributes:
        id: Its name.
        file: The file that it is planted in.
        old: What stands there once.
        new: What takes its place.
        kind: Kind of fault: a guard that is gone, a sign, an argument.
        harm: What a user suffers from it.
        proved_by: The commit that had proved what it breaks; empty where none is known.
    """

    id: str
    file: str
    old: str
    new: str
    kind: str
    harm: str
    proved_by: str = ""

    @property
    def module(self) -> str:
        """Dotted path of the module."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """What totals count it under."""
        folders = self.file.split("/")[:-1]
        return "/".join(folders if folders[:2] == ["tunekit", "methods"] else folders[:3])

    @property
    def digest(self) -> str:
        """What tells it from an earlier form of itself."""
        return hashlib.sha256(f"{self.file}\0{self.old}\0{self.new}".encode()).hexdigest()[:12]


def read_faults(path: Path = FAULTS) -> list[Fault]:
    """All of the list, in its order."""
    return [Fault(**fault) for fault in yaml.safe_load(path.read_text(encoding="utf-8"))]


def tracked_files() -> list[str]:
    """Files that git tracks, or would if they were added, and that are there."""
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


def tree_digest() -> str:
    """What tells the code and its tests from those of another state: results of others are not taken for these."""
    digest = hashlib.sha256()
    for name in tracked_files():
        if name.startswith(("tunekit/", "webui/", "tests/", "recipes/", "examples/")) and name not in OWN:
            digest.update(f"{name}\0".encode() + (ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def near_tests(fault: Fault, durations: Mapping[str, float], root: Path = ROOT) -> list[str]:
    """The test files that are nearest to a fault, the nearest first.

    First the one whose path mirrors the module's; then those that import the module, name the function or class that
    the fault is in, or name others that the module has for all to use. Where these are few, others of the folder that
    mirrors its package are added, first those with words of the line that the fault changes.

    Args:
        fault: The fault.
        durations: Seconds that the quick tests of a file take, by its path.
        root: The repository.
    """
    source = (root / fault.file).read_text(encoding="utf-8")
    names, around, said = _known_by(source, source[: source.index(fault.old)].count("\n") + 1)
    path = Path(fault.file)
    folders = path.parent.parts[path.parts[0] == "tunekit" :]
    mirrors = {Path("tests", *folders[: len(folders) - up], f"test_{path.stem}.py") for up in range(len(folders) + 1)}
    package = re.escape(fault.module.rpartition(".")[0])
    imports = re.compile(rf"{re.escape(fault.module)}\b|from {package} import .*\b{path.stem}\b")
    words = set(re.findall(r"[A-Za-z_]{6,}", fault.old))
    files = _test_files(root)
    found: Counter[Path] = Counter()
    for name in names | around:
        naming = [file for file, text in files.items() if re.search(rf"\b{re.escape(name)}\b", text)]
        for file in naming if len(naming) < COMMON else ():
            found[file] += 30 if name in around else 5
    for piece in said:
        saying = [file for file, text in files.items() if piece in text]
        for file in saying if len(saying) < COMMON else ():
            found[file] += 60
    for file, text in files.items():
        found[file] += 1000 * (file in mirrors) + 100 * bool(imports.search(text))
    near = [file for file in sorted(found, key=lambda file: (-found[file], file)) if found[file]][:NEAR_FILES]
    rooms = [Path("tests", *folders[:2]), Path("tests", *folders[:1])]
    room = next((room for room in rooms if any(file.parent == room for file in files)), rooms[0])
    beside = [file for file in files if file.parent == room and file not in near]
    beside.sort(key=lambda file: (-sum(word in files[file] for word in words), len(files[file]), file))
    near += beside[: max(0, LEAST_FILES - len(near))]
    taken, seconds = [], 0.0
    for file in (file.as_posix() for file in near if file.as_posix() not in OWN):
        seconds += durations.get(file, UNKNOWN_SECONDS)
        if not taken or seconds <= NEAR_SECONDS:
            taken.append(file)
        else:
            seconds -= durations.get(file, UNKNOWN_SECONDS)
    return taken


@cache
def _test_files(root: Path) -> dict[Path, str]:
    return {file.relative_to(root): file.read_text(encoding="utf-8") for file in (root / "tests").rglob("test_*.py")}


def _known_by(source: str, line: int) -> tuple[set[str], set[str], set[str]]:
    """By what tests may know a line: the module's public names, those that the line is in, and what is said there."""
    names, around, said = set(), set(), set()
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and _tells(node.name):
            names.add(node.name)
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            around |= {node.name} if _tells(node.name) else set()
            said = set() if isinstance(node, ast.ClassDef) else set(_said_in(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            around |= {target.id for target in targets if isinstance(target, ast.Name) and _tells(target.id)}
    return names, around, said


def _tells(name: str) -> bool:
    """Whether a name is one that other modules hardly have."""
    return not name.startswith("_") and (len(name) > 8 or "_" in name)


def _said_in(function: ast.AST) -> Iterator[str]:
    """Pieces of the messages of a function, and the options and keys of recipes in them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield from re.findall(r"--[a-z]+-[a-z-]+|[a-z]+\.[a-z]+_[a-z_]+", part.value)
                    if part.value.count(" ") > 2:
                        yield part.value.strip(" :,;({'\"")


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest told.

    Attributes:
        failed: The tests that failed, in the order of pytest's summary.
        hung: Whether it was ended, as it took too long.
        words: The end of what it printed.
    """

    failed: tuple[str, ...]
    hung: bool
    words: str


class Copy:
    """A copy of the repository with an environment of its own.

    Args:
        folder: Where it is made; it does not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self._venv = folder / "venv"
        self._temporary = folder / "tmp"
        self._temporary.mkdir(parents=True)
        self._forking: subprocess.Popen[bytes] | None = None
        for name in tracked_files():
            to = self.root / name
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to)
        self._make_environment()
        self._git("init", "-q")
        self._git("add", "-A")
        who = ("-c", "user.name=planted", "-c", "user.email=planted@localhost")
        self._git(*who, "commit", "-q", "-m", "without a fault")

    @contextmanager
    def planted(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Within it, the copy has some faults, all in different files."""
        texts = {self.root / fault.file: (self.root / fault.file).read_text(encoding="utf-8") for fault in faults}
        assert len(texts) == len(faults), "two faults in one file"
        try:
            for fault in faults:
                text = texts[self.root / fault.file]
                assert text.count(fault.old) == 1, fault.id
                self._write(self.root / fault.file, text.replace(fault.old, fault.new))
            yield
        finally:
            for path, text in texts.items():
                self._write(path, text)

    def test(self, *args: str, tests: Sequence[str] = (), limit_seconds: float | None = None) -> Outcome:
        """Run pytest with some arguments on files, folders or single tests; on all of them where none is named."""
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        only = [test for test in tests if "::" in test]
        assert not only or len(only) == len(tests), "either files or single tests"
        asked = {"args": ["-q", "--tb=no", "-p", "no:cacheprovider", *args, *files], "files": files, "only": only}
        printed, hung, failed = self._run(asked, limit_seconds)
        return Outcome(tuple(dict.fromkeys(failed)), hung, printed[-2000:])

    def close(self) -> None:
        """End what runs here, and the process that it was forked from."""
        if self._forking is not None:
            self._forking.kill()
        self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        """End what was started by the copy's own Python. Some of it may be in sessions of its own."""
        own = None if self._forking is None else self._forking.pid
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or [""]
            if process.pid != own and words[0].startswith(f"{self._venv}{os.sep}"):
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def listed(self, command: Sequence[str]) -> list[str] | None:
        """The lines with tests that a Python command prints; None where it fails."""
        done = self._ask(*command)
        return None if done.returncode else [line for line in done.stdout.splitlines() if line.startswith("tests/")]

    def can_import(self, module: str) -> bool:
        """Whether a module can be imported at all."""
        return self._ask("-c", f"import tunekit, tunekit.cli.app, {module}").returncode == 0

    def _ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(self._python), *words]
        return subprocess.run(
            command, cwd=self.root, env=self._environment, capture_output=True, text=True, check=False
        )

    @property
    def _python(self) -> Path:
        return self._venv / "bin" / "python"

    def _make_environment(self) -> None:
        venv.create(self._venv, with_pip=False, symlinks=True)
        packages = next((self._venv / "lib").glob("python*/site-packages"))
        # As plain lines, so that the .pth file of an editable install beside them is not read.
        elsewhere = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (packages / "planted.pth").write_text("\n".join([str(self.root), *elsewhere]) + "\n", encoding="utf-8")
        self._script("tunekit", f"#!{self._python}\n{_COMMAND}")
        self._script("pytest", f'#!/bin/sh\nexec "{self._python}" -m pytest "$@"\n')
        for folder in map(Path, os.environ.get("PATH", "").split(os.pathsep)):
            if (folder / "python").exists() and folder.is_dir() and Path(sys.prefix) in folder.parents:
                for program in folder.iterdir():
                    if not program.name.startswith(("python", "pip", "activate", "Activate")):
                        self._script(program.name, f'#!/bin/sh\nPYTHONPATH="{self.root}" exec "{program}" "$@"\n')
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TUNEKIT_TEST_CACHE")}
        self._environment = {
            **{name: value for name, value in kept.items() if not name.startswith(("PYTEST_", "VIRTUAL_ENV"))},
            "PATH": f"{self._venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "TMPDIR": str(self._temporary),
        }

    def _script(self, name: str, text: str) -> None:
        path = self._venv / "bin" / name
        if not path.exists():
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        # Python takes a compiled file for that of a source of the same second and size.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def _git(self, *words: str) -> None:
        subprocess.run(["git", *words], cwd=self.root, check=True, capture_output=True)

    def _run(self, asked: Mapping[str, Any], limit_seconds: float | None) -> tuple[str, bool, list[str]]:
        """Return what pytest printed, whether it was ended with all it had started as it took too long, and the
        tests that failed.
        """
        if self._forking is None:
            self._forking = subprocess.Popen(
                [str(self._python), "-c", _FORKING, *LIBRARIES],
                cwd=self.root,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        forking, printed = self._forking, self._temporary / "printed.txt"
        failures = self._temporary / "failures.jsonl"
        assert forking.stdin is not None and forking.stdout is not None
        for path in (printed, failures):
            path.write_text("", encoding="utf-8")
        request = {**asked, "output": str(printed), "failures": str(failures)}
        forking.stdin.write(json.dumps(request).encode() + b"\n")
        hung = not select.select([forking.stdout], [], [], limit_seconds)[0]
        self._end_what_is_left()
        _line_of(forking.stdout)
        failed = [json.loads(line) for line in failures.read_text(encoding="utf-8").splitlines()]
        return printed.read_text(encoding="utf-8", errors="replace"), hung, failed


def _line_of(stream: IO[bytes]) -> bytes:
    line = stream.readline()
    if not line:
        raise RuntimeError("the process that runs of pytest are forked from has ended")
    return line


def is_among(test: str, chosen: Iterable[str]) -> bool:
    """Whether a test is one of those that lines name: tests, files or folders."""
    return any(test == line or test.startswith((f"{line}::", f"{line}[", f"{line.rstrip('/')}/")) for line in chosen)
