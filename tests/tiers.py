"""Divide the suite: recorded durations, the shards of the full tier, and quarantined tests.

The quick tier is every test that is not marked `slow`. The full tier is all tests, whole or in shards. What a change
affects is chosen by `tests/affected.py`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from itertools import combinations
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")

UNKNOWN_SECONDS = 60.0
"""What a test file without a recorded duration is counted as."""


def file_of(nodeid: str) -> str:
    """Return the test file of a test, as a path below the repository's root."""
    return nodeid.partition("::")[0]


def read_durations(kind: str = "all") -> dict[str, float]:
    """Return seconds on one worker by test file: of `quick` tests, of `slow` ones, or of `all`."""
    recorded = json.loads(DURATIONS.read_text(encoding="utf-8"))
    if kind == "all":
        return {path: sum(parts.values()) for path, parts in recorded.items()}
    return {path: parts[kind] for path, parts in recorded.items() if kind in parts}


def record(reports: Iterable[pytest.TestReport]) -> None:
    """Write `tests/durations.json`: seconds of setup, call and teardown by test file and tier.

    Files that did not run keep what was recorded of them.
    """
    measured: dict[str, dict[str, float]] = defaultdict(lambda: {"quick": 0.0, "slow": 0.0})
    for report in reports:
        measured[file_of(report.nodeid)]["slow" if "slow" in report.keywords else "quick"] += report.duration
    recorded = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}
    known = {path: parts for path, parts in recorded.items() if (DURATIONS.parents[1] / path).exists()}
    for path, parts in measured.items():
        known[path] = known.get(path, {}) | {kind: round(seconds, 1) for kind, seconds in parts.items() if seconds}
    lines = [f"  {json.dumps(path)}: {json.dumps(known[path])}" for path in sorted(known)]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def files_of_shard(shard: str, files: Collection[str], durations: Mapping[str, float]) -> set[str]:
    """Return the test files of one of several shards of about the same recorded duration.

    Args:
        shard: `K/N`, the K-th of N, counted from 1.
        files: All test files.
        durations: Seconds by test file.

    Raises:
        pytest.UsageError: The shard is not one of those.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise pytest.UsageError(f"--shard {shard}: expected K/N with K from 1 to N, such as 3/8")
    index, num_shards = int(match[1]) - 1, int(match[2])
    shards: list[set[str]] = [set() for _ in range(num_shards)]
    loads = [0.0] * num_shards
    for path in sorted(files, key=lambda path: (-durations.get(path, UNKNOWN_SECONDS), path)):
        lightest = loads.index(min(loads))
        shards[lightest].add(path)
        loads[lightest] += durations.get(path, UNKNOWN_SECONDS)
    return shards[index]


def leave_out_of_quick(cases: Sequence[Mapping[str, int]], num_kept: int) -> set[int]:
    """Return which cases of a parametrized test are left to the full tier.

    Those that stay cover as many values of each parameter as so many cases can, then as many pairs of values.

    Args:
        cases: For each case, the index of its value by parameter.
        num_kept: How many stay.
    """
    covered: set[tuple[tuple[str, int], ...]] = set()
    kept: list[int] = []

    def gain(number: int) -> tuple[int, int]:
        values, pairs = ({*combinations(sorted(cases[number].items()), size)} - covered for size in (1, 2))
        return len(values), len(pairs)

    for _ in range(min(num_kept, len(cases))):
        best = max((number for number in range(len(cases)) if number not in kept), key=gain)
        kept.append(best)
        for size in (1, 2):
            covered |= {*combinations(sorted(cases[best].items()), size)}
    return set(range(len(cases))) - set(kept)


def mark_samples(items: Iterable[pytest.Item]) -> None:
    """Mark those cases of a test marked `sample(N)` slow that are not among its N."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        (num_kept,) = cases[0].get_closest_marker("sample").args
        for number in leave_out_of_quick([case.callspec.indices for case in cases], num_kept):
            cases[number].add_marker("slow")


def check_quarantine(nodeid: str, mark: pytest.Mark) -> None:
    """Check that a quarantined test says why and since when.

    Raises:
        pytest.UsageError: `reason` or `since`, a date, is missing.
    """
    try:
        date.fromisoformat(mark.kwargs["since"])
        complete = bool(mark.kwargs["reason"]) and mark.kwargs.keys() == {"reason", "since"} and not mark.args
    except (KeyError, ValueError, TypeError):
        complete = False
    if not complete:
        raise pytest.UsageError(f'{nodeid}: expected quarantined(reason="...", since="YYYY-MM-DD")')
