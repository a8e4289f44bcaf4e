"""Faults planted in a copy of the repository, one at a time, and which tier of the tests catches each, by which test.

    python -m benchmarks.planted_faults [--tier quick|affected|full] [--near] [--only ID ...] [--every N] [--offset K]
                                        [--jobs N] [--save]

`tests/faults.yaml` lists them. To run every tier for every fault would take days on two cores, so it goes by stages:

1. For each fault, the *near* tests of the quick tier, until the first fails: the test that caught it by the saved
   results, those of the test file that mirrors the module, and of others that name the module or what is in it.
2. What these let through is planted together in groups of faults in different files, which hardly mask each other, and
   the whole quick tier is run once a group. Every test that fails is run again with each fault of the group alone.
3. What is left goes the same way through the affected tier, of each fault the tests that its change affects, and then
   through the slow tests, which the full tier has besides the quick ones.

A test counts for nothing that fails without a fault as well. A fault that a test of the quick tier catches is caught by
the affected tier if that test is among the affected ones, and by the full tier in any case. With `--near` it ends
behind the first stage, and with `--every N` it takes a sample: each N-th fault of the list, from the K-th on. What is
known is kept in a state file, so that it can be interrupted and goes on where it was; of a tree with other code or
other tests nothing is taken over.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from benchmarks.circumstances import circumstances, in_words
from benchmarks.planted import LIMIT_SECONDS, OWN, Copy, Fault, is_among, near_tests, read_faults, tree_digest
from tests.tiers import read_durations

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "planted_faults"
STATE = ROOT / "build" / "planted_faults.jsonl"
PACKAGES = ("pytest", "pytest-xdist", "torch", "transformers", "trl", "gradio")

TIERS: dict[str, tuple[str, ...]] = {
    "quick": ("-m", "not slow and not quarantined"),
    "affected": ("-m", "not quarantined"),
    "full": ("-m", "slow and not quarantined"),
}
"""Arguments of pytest for what each tier has to say of a fault: the full one, what it has besides the quick one."""

AFFECTED = ("-m", "tests.affected", "--since", "HEAD", "--list")
"""What prints the test files that a change affects, a line each; its change is the planted fault."""

GROUP = 12
"""Most faults that are planted together."""


@dataclass(frozen=True)
class Verdict:
    """What is known of a fault in a stage.

    Attributes:
        fault: Its name; a test's where it was run without a fault.
        digest: What it was then.
        stage: `near`, `quick`, `affected` or `full`; `none` without a fault.
        test: The first test that caught it, or that fails; None where there is none.
        tree: The code and the tests that this was seen of.
        seconds: How long it took, where it was run alone.
    """

    fault: str
    digest: str
    stage: str
    test: str | None
    tree: str
    seconds: float | None = None


class Known:
    """All verdicts so far, on the disk as lines of JSON.

    Args:
        path: The file.
        tree: The code and the tests of now.
    """

    def __init__(self, path: Path, tree: str) -> None:
        self._path, self._tree = path, tree
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        found = [Verdict(**json.loads(line)) for line in lines]
        self._verdicts = {(one.fault, one.digest, one.stage): one for one in found if one.tree == tree}

    def get(self, fault: Fault, stage: str) -> Verdict | None:
        """What is known of a fault in a stage."""
        return self._verdicts.get((fault.id, fault.digest, stage))

    def add(self, fault: Fault, stage: str, test: str | None, seconds: float | None = None) -> None:
        """Keep it, and say it."""
        made = Verdict(fault.id, fault.digest, stage, test, self._tree, seconds)
        self._keep(made)
        took = "" if seconds is None else f" ({seconds:.0f} s)"
        print(f"{stage:9}{fault.id:32}{test or 'not caught'}{took}", flush=True)

    def innocent(self, test: str) -> bool | None:
        """Whether a test fails without a fault too; None where that is not known."""
        found = self._verdicts.get((test, "", "none"))
        return None if found is None else found.test is not None

    @property
    def innocents(self) -> list[str]:
        """Tests that fail without a fault too."""
        return [one.test for one in self._verdicts.values() if one.stage == "none" and one.test is not None]

    def add_innocent(self, test: str, *, fails: bool) -> None:
        """Keep whether a test fails without a fault."""
        self._keep(Verdict(test, "", "none", test if fails else None, self._tree))

    def _keep(self, made: Verdict) -> None:
        self._verdicts[made.fault, made.digest, made.stage] = made
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(made)) + "\n")

    def caught_by(self, fault: Fault, *stages: str) -> str | None:
        """The first test that caught a fault in some stages."""
        found = (self.get(fault, stage) for stage in stages)
        return next((one.test for one in found if one is not None and one.test is not None), None)


class Bench:
    """The copies, and what is done with them.

    Args:
        folder: Where the copies are made.
        jobs: How many there are, and processes of the whole tiers.
        known: What is known.
        durations: Seconds of the quick tests by file.
    """

    def __init__(self, folder: Path, jobs: int, known: Known, durations: Mapping[str, float]) -> None:
        self.jobs, self.known = jobs, known
        self._copies = [Copy(folder / str(number)) for number in range(jobs)]
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for copy in self._copies:
            self._free.put(copy)
        self._durations = durations
        results = RESULTS.with_suffix(".json")
        saved = json.loads(results.read_text(encoding="utf-8"))["faults"] if results.is_file() else []
        self._caught_before = {row["id"]: row["near"] for row in saved if row["near"] is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for copy in self._copies:
            copy.close()

    def for_each(self, faults: Sequence[Fault], work: Callable[[Copy, Fault], None]) -> None:
        """Do something with each fault, in as many copies at once as there are."""

        def with_copy(fault: Fault) -> None:
            copy = self._free.get()
            try:
                work(copy, fault)
            finally:
                self._free.put(copy)

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                list(pool.map(with_copy, faults))
            except BaseException:
                # They would be waited for.
                pool.shutdown(wait=False, cancel_futures=True)
                for copy in self._copies:
                    copy.close()
                raise

    def near(self, faults: Sequence[Fault]) -> None:
        """The first stage."""
        while left := [fault for fault in faults if self._is_open(fault)]:
            self.for_each(left, self._look)
            caught = (self.known.get(fault, "near") for fault in left)
            self._try_without([one.test for one in caught if one is not None and one.test is not None])

    def _is_open(self, fault: Fault) -> bool:
        """Whether the near tests of a fault are still to be run, or what failed of them fails without it too."""
        found = self.known.get(fault, "near")
        return found is None or (found.test is not None and self.known.innocent(found.test) is True)

    def _look(self, copy: Copy, fault: Fault) -> None:
        began, files = time.monotonic(), near_tests(fault, self._durations, copy.root)
        how = ("-x", *TIERS["quick"], *self._left_out())
        with copy.planted([fault]):
            for tests in ([before], files) if (before := self._caught_before.get(fault.id)) is not None else (files,):
                outcome = copy.test(*how, tests=tests, limit_seconds=LIMIT_SECONDS)
                if outcome.hung or outcome.failed:
                    break
            if any("::" not in test for test in outcome.failed) and not copy.can_import(fault.module):
                sys.exit(f"{fault.id}: with it {fault.module} cannot be imported")
        test = tests[0] if outcome.hung else next(iter(outcome.failed), None)
        self.known.add(fault, "near", test, time.monotonic() - began)

    def _try_without(self, tests: Sequence[str]) -> None:
        """Learn which of some tests fail without a fault."""
        unknown = [test for test in dict.fromkeys(tests) if self.known.innocent(test) is None]
        if unknown:
            copy = self._free.get()
            failed = copy.test(tests=unknown, limit_seconds=LIMIT_SECONDS * 4).failed
            self._free.put(copy)
            for test in unknown:
                self.known.add_innocent(test, fails=test in failed)

    def _left_out(self) -> list[str]:
        return [f"--deselect={test}" for test in (*OWN, *self.known.innocents)]

    def whole(self, stage: str, faults: Sequence[Fault], chosen: Mapping[str, Sequence[str]] | None = None) -> None:
        """A tier run once for groups of faults, and what failed once more with each of them.

        Args:
            stage: The tier.
            faults: The faults, none of which is known to be caught by it.
            chosen: Tests of each fault by its name; all tests where left out.
        """
        workers = ("-n", str(self.jobs), "--dist", "loadfile") if self.jobs > 1 else ()
        for group in groups_of([fault for fault in faults if self.known.get(fault, stage) is None]):
            files = sorted({file for fault in group for file in chosen[fault.id]}) if chosen is not None else []
            failed: tuple[str, ...] = ()
            if files or chosen is None:
                copy = self._free.get()
                with copy.planted(group):
                    failed = copy.test(*TIERS[stage], *workers, *self._left_out(), tests=files).failed
                self._free.put(copy)
            self._try_without(failed)
            again = [test for test in failed if not self.known.innocent(test)]
            self.for_each(group, partial(self._alone, stage, again, chosen))

    def _alone(
        self, stage: str, tests: Sequence[str], chosen: Mapping[str, Sequence[str]] | None, copy: Copy, fault: Fault
    ) -> None:
        """Run tests that failed with a group of faults with one of them."""
        own = [test for test in tests if chosen is None or is_among(test, chosen[fault.id])]
        failed: tuple[str, ...] = ()
        if own:
            with copy.planted([fault]):
                failed = copy.test(tests=own).failed
        self.known.add(fault, stage, next((test for test in own if test in failed), None))

    def affected(self, faults: Sequence[Fault]) -> None:
        """The affected tier: by what is known already, and then by running what it has."""
        lists: dict[str, list[str]] = {}

        def choose(copy: Copy, fault: Fault) -> None:
            with copy.planted([fault]):
                listed = copy.listed(AFFECTED)
            if listed is None:
                sys.exit(f"python {' '.join(AFFECTED)} fails: the affected tier is not there")
            lists[fault.id] = listed
            test = self.known.caught_by(fault, "near", "quick")
            if test is not None and is_among(test, listed):
                self.known.add(fault, "affected", test)

        self.for_each([fault for fault in faults if self.known.get(fault, "affected") is None], choose)
        self.whole("affected", [fault for fault in faults if fault.id in lists], lists)


def groups_of(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Faults in groups in which no two are in one file, and few in one package."""
    groups: list[list[Fault]] = [[] for _ in range(-(-len(faults) // GROUP))]
    for fault in faults:
        fitting = [one for one in groups if len(one) < GROUP and fault.file not in {other.file for other in one}]
        if not fitting:
            groups.append([])
            fitting = groups[-1:]
        min(fitting, key=lambda one: (sum(other.package == fault.package for other in one), len(one))).append(fault)
    return [group for group in groups if group]


def rows_of(faults: Sequence[Fault], known: Known) -> list[dict[str, Any]]:
    """What is known of each fault: by tier the test that caught it, None where none did, and nothing if not run."""
    rows = []
    for fault in faults:
        tiers: dict[str, str | None] = {}
        quick = known.caught_by(fault, "near", "quick")
        if quick is not None or known.get(fault, "quick") is not None:
            tiers["quick"] = quick
        if (affected := known.get(fault, "affected")) is not None:
            tiers["affected"] = affected.test
        caught = known.caught_by(fault, "near", "quick", "affected", "full")
        if caught is not None or known.get(fault, "full") is not None:
            tiers["full"] = caught
        near = known.get(fault, "near")
        row = {"id": fault.id, "file": fault.file, "package": fault.package, "kind": fault.kind, "harm": fault.harm}
        rows.append({**row, "proved_by": fault.proved_by, "near": near.test if near else None, "tiers": tiers})
    return rows


def totals_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many faults each tier was run for, and how many of them it caught."""
    return {
        tier: {
            "run": sum(tier in row["tiers"] for row in rows),
            "caught": sum(row["tiers"].get(tier) is not None for row in rows),
        }
        for tier in TIERS
    }


def page(rows: Sequence[dict[str, Any]], sample: str) -> str:
    """Return the results as Markdown.

    Args:
        rows: What is known of each fault.
        sample: Arguments that choose the faults.
    """
    lines = [
        "# Planted faults, and the tests that catch them",
        "",
        __doc__.partition("\n\n")[2].partition("\n\n")[2],
        "",
    ]
    lines += [f"`python -m benchmarks.planted_faults {sample} --save`: {in_words(PACKAGES)}.", ""]
    num_proved = sum(bool(row["proved_by"]) for row in rows)
    lines += [f"- {len(rows)} of the list's {len(read_faults())} faults; {num_proved} undo what a change had proved"]
    lines += [f"- near tests alone catch {sum(row['near'] is not None for row in rows)}"]
    for tier, of in totals_of(rows).items():
        lines.append(f"- {tier}: {of['caught']} caught, of {of['run']} that it is known of")
    packages = Counter(row["package"] for row in rows)
    caught = Counter(row["package"] for row in rows if row["tiers"].get("quick") is not None)
    lines += ["", "| package | faults | caught by the quick tier |", "|---|---|---|"]
    lines += [f"| {name} | {number} | {caught[name]} |" for name, number in packages.items()]
    lines += ["", "| fault | file | kind | undoes | quick | affected | full |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [_cell(row["tiers"], tier) for tier in TIERS]
        lines.append(f"| {row['id']} | {row['file']} | {row['kind']} | {row['proved_by']} | {' | '.join(cells)} |")
    missed = [row for row in rows if "quick" in row["tiers"] and row["tiers"]["quick"] is None]
    if missed:
        lines += ["", "What the quick tier lets through:", "", *(f"- {row['id']}: {row['harm']}" for row in missed)]
    return "\n".join(lines) + "\n"


def _cell(tiers: dict[str, str | None], tier: str) -> str:
    return "not run" if tier not in tiers else tiers[tier] or "**not caught**"


def main(argv: Sequence[str] | None = None) -> int:
    """Go through the stages, and say what is known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted_faults", description="Plant faults, and test.")
    parser.add_argument("--tier", choices=list(TIERS), default="full", help="The last tier to run.")
    parser.add_argument("--near", action="store_true", help="End behind the near tests.")
    parser.add_argument("--only", metavar="ID", nargs="+", help="Only these faults.")
    parser.add_argument("--every", metavar="N", type=int, default=1, help="Only each N-th fault of the list.")
    parser.add_argument("--offset", metavar="K", type=int, default=0, help="Faults of the list to pass over first.")
    parser.add_argument("--jobs", type=int, default=1, help="Copies, and processes of whole tiers.")
    parser.add_argument("--state", type=Path, default=STATE, help="Where it is kept what is known.")
    parser.add_argument("--report", action="store_true", help="Run nothing, and say what is known.")
    parser.add_argument("--save", action="store_true", help="Write the table to benchmarks/results.")
    asked = parser.parse_args(argv)
    faults = [
        fault for fault in read_faults()[asked.offset :: asked.every] if asked.only is None or fault.id in asked.only
    ]
    if asked.only is not None and len(faults) < len(set(asked.only)):
        parser.error(f"there are no faults {', '.join(sorted(set(asked.only) - {fault.id for fault in faults}))}")
    known = Known(asked.state, tree_digest())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not asked.report:
        with tempfile.TemporaryDirectory(prefix="planted-", ignore_cleanup_errors=True) as folder:
            durations = read_durations("quick")
            with Bench(Path(folder), asked.jobs, known, durations) as bench:
                _go_through(bench, faults, asked)
    rows, sample = rows_of(faults, known), f"--every {asked.every} --offset {asked.offset} --tier {asked.tier}"
    if asked.save:
        kept = {"circumstances": circumstances(PACKAGES), "totals": totals_of(rows), "faults": rows}
        RESULTS.with_suffix(".json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        RESULTS.with_suffix(".md").write_text(page(rows, sample), encoding="utf-8")
    print(page(rows, sample) if not asked.save else json.dumps(totals_of(rows)))
    return 0


def _go_through(bench: Bench, faults: Sequence[Fault], asked: argparse.Namespace) -> None:
    known = bench.known
    bench.near(faults)
    if asked.near:
        return
    bench.whole("quick", [fault for fault in faults if known.caught_by(fault, "near") is None])
    if asked.tier in ("affected", "full"):
        bench.affected(faults)
    if asked.tier == "full":
        bench.whole("full", [fault for fault in faults if known.caught_by(fault, "near", "quick", "affected") is None])


if __name__ == "__main__":
    sys.exit(main())
