"""Run the tests of what a change touches, nearest first.

`python -m tests.affected` compares the working tree with the branch that it left and runs every test file that imports
a changed module, directly or through others, and every test file that mirrors one (`tests/training/test_save.py` for
`tunekit/training/checkpointing/save.py`). The distance of a test file is the number of imports between it and the
change. With `--minutes` the nearest files run that fit into the budget by `tests/durations.json`; what is left out is
printed.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import grimp

import tunekit
from tests.tiers import UNKNOWN_SECONDS, read_durations

ROOT = Path(__file__).parents[1]
ROOT_PACKAGES = ("tunekit", "webui", "tests", "benchmarks")

MIRROR_DISTANCE = 3
"""The distance of a test file whose folder mirrors a changed package, where no shorter chain of imports is found."""

ONE_CHANGE_HOURS = 4
"""Commits this close to the last one count as one change where no branch says what the change is."""

OUTSIDE = {
    "README.md": ("tests/test_readme.py",),
    "docs/": ("tests/docs/test_pages.py", "tests/docs/test_site.py"),
    "mkdocs.yml": ("tests/docs/test_site.py",),
    "pyproject.toml": ("tests/test_packaging.py", "tests/test_imports.py"),
    "recipes/": ("tests/recipe/test_library.py", "tests/test_shipped_plans.py", "tests/training/test_shipped.py"),
    "examples/": ("tests/examples/", "tests/data/test_examples.py"),
}
"""Test files by a path, or the beginning of a path, that no import leads to."""


@dataclass(frozen=True)
class Choice:
    """An affected test file: its path, its distance from the change and its recorded seconds on one worker."""

    path: str
    distance: int
    seconds: float


def base_of_change() -> str:
    """Return the commit that the change is compared with.

    It is where this branch left origin's main branch, or else the last commit before those of the last hours.
    """
    upstream = _git("rev-parse", "--verify", "--quiet", "origin/main", check=False)
    if upstream and upstream != _git("rev-parse", "HEAD"):
        return _git("merge-base", upstream, "HEAD")
    newest = int(_git("log", "-1", "--format=%ct"))
    before = _git("rev-list", "-1", f"--before={newest - ONE_CHANGE_HOURS * 3600}", "HEAD", check=False)
    return before or _git("rev-list", "--max-parents=0", "HEAD").splitlines()[0]


def changed_files(base: str) -> list[str]:
    """Return the paths that differ from a commit, of the working tree and of files that git does not know yet."""
    tracked = _git("diff", "--name-only", "--no-renames", base)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*tracked.splitlines(), *untracked.splitlines()})


def distances(changed: Iterable[str]) -> dict[str, int]:
    """Return the distance of each affected test file from the changed files.

    Args:
        changed: Paths below the repository's root, with slashes.
    """
    changed = list(changed)
    graph = grimp.build_graph(*ROOT_PACKAGES)
    for home in set(tunekit._HOMES.values()):  # whoever imports the root may use any of its names
        graph.add_import(importer="tunekit", imported=home)
    reached = dict.fromkeys(_modules_in(changed, graph.modules), 0)
    layer = set(reached)
    while layer:
        importers = {above for module in layer for above in graph.find_modules_that_directly_import(module)}
        layer = {module for module in importers if module not in reached}
        distance = max(reached.values()) + 1
        reached |= dict.fromkeys(layer, distance)
    files = {_test_file(module): distance for module, distance in reached.items() if _is_test(module)}
    for path, distance in _without_imports(changed):
        files[path] = min(distance, files.get(path, distance))
    return {path: distance for path, distance in files.items() if (ROOT / path).is_file()}


def choose(changed: Iterable[str], durations: dict[str, float]) -> list[Choice]:
    """Return the affected test files, nearest first, and cheapest first among those of one distance."""
    found = [
        Choice(path, distance, durations.get(path, UNKNOWN_SECONDS)) for path, distance in distances(changed).items()
    ]
    return sorted(found, key=lambda choice: (choice.distance, choice.seconds, choice.path))


def has_slow_tests(path: str) -> bool:
    """Return whether a test file marks any of its tests or cases slow."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return "mark.slow" in text or "mark.sample" in text


def within(choices: Iterable[Choice], seconds: float) -> tuple[list[Choice], list[Choice]]:
    """Split choices into those that fit into `seconds` on one worker, nearest first, and those that do not."""
    taken: list[Choice] = []
    left_out: list[Choice] = []
    for choice in choices:
        fits = sum(other.seconds for other in taken) + choice.seconds <= seconds
        (taken if fits else left_out).append(choice)
    return taken, left_out


def _modules_in(changed: Iterable[str], modules: set[str]) -> Iterator[str]:
    for path in changed:
        parts = PurePosixPath(path)
        if parts.parts[0] not in ROOT_PACKAGES:
            continue
        if parts.suffix in (".py", ".pyi"):
            names = [_module_of(parts)]
        else:
            # A data file is read by its neighbours.
            folder = ".".join(parts.parent.parts)
            names = [name for name in modules if name.rpartition(".")[0] == folder]
        yield from (name for name in names if name in modules)


def _without_imports(changed: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield test files, with their distance, that a change reaches in other ways than by imports."""
    for path in changed:
        parts = PurePosixPath(path)
        for beginning, tests in OUTSIDE.items():
            if path.startswith(beginning):
                yield from ((file, 0) for test in tests for file in _files_of(test))
        if parts.name == "conftest.py":
            yield from ((file, 1) for file in _files_of(f"{parts.parent}/"))
        if parts.suffix == ".py" and parts.parts[0] in ("tunekit", "webui"):
            # Tests lie in the folder of their room, also those of its sub-packages.
            folder = PurePosixPath("tests", *parts.parts[parts.parts[0] == "tunekit" : -1][:1])
            yield str(folder / f"test_{parts.stem}.py"), 0
            if folder != PurePosixPath("tests"):
                yield from ((file, MIRROR_DISTANCE) for file in _files_of(f"{folder}/"))


def _files_of(test: str) -> list[str]:
    if not test.endswith("/"):
        return [test]
    return [path.relative_to(ROOT).as_posix() for path in (ROOT / test).rglob("test_*.py")]


def _module_of(path: PurePosixPath) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_test(module: str) -> bool:
    return module.startswith("tests.") and module.rpartition(".")[2].startswith("test_")


def _test_file(module: str) -> str:
    return module.replace(".", "/") + ".py"


def _git(*words: str, check: bool = True) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=ROOT)
    if check and done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> int:
    """Print what is affected and what is left out, run it, and return pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.affected", description=__doc__)
    parser.add_argument("--since", metavar="REV", help="the commit to compare with (default: where this branch began)")
    parser.add_argument("--minutes", type=float, help="run the nearest files that take about this long in all")
    parser.add_argument("--workers", type=int, default=3, help="worker processes (default: %(default)s)")
    parser.add_argument("--slow", action="store_true", help="only tests marked slow: the quick ones have run")
    parser.add_argument("--list", action="store_true", help="print the affected test files and run nothing")
    options, rest = parser.parse_known_args()
    base = options.since or os.environ.get("TUNEKIT_BASE") or base_of_change()
    choices = choose(changed_files(base), read_durations("slow" if options.slow else "all"))
    if options.slow:
        choices = [choice for choice in choices if has_slow_tests(choice.path)]
    taken, left_out = within(choices, options.minutes * 60 * options.workers if options.minutes else float("inf"))
    if options.list:
        print("\n".join(choice.path for choice in taken))
        return 0
    print(f"affected since {base[:12]}: {len(taken)} test files run, {len(left_out)} left out")
    for choice in left_out:
        print(f"  left out: {choice.path} ({choice.distance} imports away, {choice.seconds:.0f} s)")
    if not taken:
        return 0
    marked = ["-m", "slow and not quarantined" if options.slow else "not quarantined"]
    command = [sys.executable, "-m", "pytest", "-q", *marked, "-n", str(options.workers), "--dist", "worksteal"]
    status = subprocess.call([*command, *rest, *(choice.path for choice in taken)], cwd=ROOT)
    return 0 if status == 5 else status


if __name__ == "__main__":
    sys.exit(main())
