"""Faults of every kind, and what becomes of the runs that they happen to.

    python -m benchmarks.faults [--only WORD ...] [--sample N] [--list] [--folder FOLDER] [--save]

"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faulted import BROKEN_SAVE, BROKEN_STEP, ENGINES, Bench, Case, Damage, Engine, Outcome, Prepared
from benchmarks.injected import Fault

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.md"
DAMAGES = ("emptied", "cut in half", "a byte short", "a byte changed", "removed")


def cases_of(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """The cases of an engine. What files a save writes is learned from a run of it."""
    yield from _kills_in_phases(engine)
    yield from _kills_in_saves(engine, prepared)
    yield from _kills_in_result(engine, prepared)
    yield from _damages(engine, prepared)


def _victims(engine: Engine) -> list[tuple[str, str, int]]:
    if engine.num_processes == 1:
        return [("the process", "kill", 0)]
    return [("rank 0", "kill", 0), ("rank 1", "kill", 1), ("the supervisor", "kill supervisor", 0)]


def _kills_in_phases(engine: Engine) -> Iterator[Case]:
    """At every place, on every process where the whole model is trained, and otherwise on one of them."""
    victims = _victims(engine)
    places = ["starting", "loading", "data", "forward", "backward", "optimizer", "evaluation", "result", "finished"]
    for number, at in enumerate(places):
        step = BROKEN_STEP if at in ("data", "forward", "backward", "optimizer", "evaluation") else 0
        chosen = victims if engine.adapter == "full" else [victims[number % len(victims)]]
        for who, does, rank in chosen:
            yield Case("phase", engine.name, f"{who} killed: {at}", Fault(does, at, rank, step))
    yield Case(
        "phase", engine.name, f"{victims[-1][0]} killed: forward, no checkpoint yet",
        Fault(victims[-1][1], "forward", victims[-1][2], 1), begins="made",
    )  # fmt: skip


def _kills_in_saves(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """After all that is done to files with a save, each on one of the processes."""
    victims = _victims(engine)
    done = [happening for happening in prepared.happenings if not happening.path.startswith("model")]
    deleted = [happening for happening in done if happening.what == "deleted"]
    chosen = [
        happening
        for happening in done
        if (happening.what != "begun" or happening.apart)
        and (happening.what != "deleted" or happening in (deleted[0], deleted[len(deleted) // 2], deleted[-1]))
    ]
    if engine.adapter != "full":
        chosen = chosen[::3]
    for number, happening in enumerate(chosen):
        who, does, rank = victims[number % len(victims)]
        fault = Fault(does, "file", rank, BROKEN_SAVE, happening.what, happening.path)
        yield Case("save", engine.name, f"{who} killed: {happening.path.partition('/')[2]} {happening.what}", fault)


def _kills_in_result(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """After each file of the result."""
    victims = _victims(engine)
    done = [
        happening for happening in prepared.happenings if happening.path.startswith("model") and happening.what != "begun"
    ]
    for number, happening in enumerate(done if engine.num_processes == 1 and engine.adapter == "full" else done[:1]):
        who, does, rank = victims[number % len(victims)]
        fault = Fault(does, "file", rank, 0, happening.what, happening.path)
        yield Case("result", engine.name, f"{who} killed: {happening.path} {happening.what}", fault, begins="late")


def _damages(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """All damages to each file, where the whole model is trained in one process; otherwise one to each."""
    files = sorted(prepared.files)
    every = engine.num_processes == 1 and engine.adapter == "full"
    for number, file in enumerate(files):
        for how in DAMAGES if every else [DAMAGES[number % len(DAMAGES)]]:
            yield Case("damage", engine.name, f"{file} {how}", damage=Damage(how, file), begins="late")
    for how in ("removed", "cut in half"):
        yield Case("damage", engine.name, f"both: {files[0]} {how}", damage=Damage(how, files[0], True), begins="late")
    if every:
        for how in ("lists a file outside", "is no object", "lacks its files", "of another step"):
            damage = Damage(how, "manifest.json")
            yield Case("damage", engine.name, f"manifest.json {how}", damage=damage, begins="late")
        yield Case("damage", engine.name, "all files removed", damage=Damage("all files removed", ""), begins="late")
        for how, name in (
            ("a foreign file in it", "mine.txt"),
            ("a foreign file beside it", "checkpoint-99"),
            ("a foreign file beside it", "mine.txt"),
            ("a foreign folder beside it", "checkpoint-99"),
            ("a foreign folder beside it", "checkpoint-best"),
        ):
            yield Case("damage", engine.name, f"{how}: {name}", damage=Damage(how, name), begins="late")


def line(case: Case, outcome: Outcome) -> str:
    """A row of the table."""
    found = "; ".join(outcome.problems) or outcome.words
    steps = [" -" if step is None else f"{step:2}" for step in (outcome.resumed, outcome.expected)]
    verdict = "FAILS" if outcome.problems else "ok"
    return f"{case.group:7} {case.engine:14} {case.words:62} {steps[0]} {steps[1]} {outcome.seconds:5.1f} s {verdict:5} {found}"


def main() -> None:
    """Let all happen, print the table, and with `--save` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="cases whose group, engine and words have all of these")
    parser.add_argument("--sample", type=int, default=1, help="every so many of them (all)")
    parser.add_argument("--list", action="store_true", help="say what there is, and let nothing happen")
    parser.add_argument("--folder", type=Path, help="a new folder for the runs; those that fail stay there")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()

    folder = args.folder or Path(tempfile.mkdtemp(prefix="tunekit-faults-"))
    bench = Bench(folder)
    outcomes: list[tuple[Case, Outcome]] = []
    for name, engine in ENGINES.items():
        if args.only and any(word in ENGINES or word in name for word in args.only) and not all(
            word in name for word in args.only if any(word in other for other in ENGINES)
        ):
            continue
        for case in list(cases_of(engine, bench.prepared[name])):
            words = f"{case.group} {case.engine} {case.words}"
            if not all(word in words for word in args.only):
                continue
            if args.list:
                print(f"{case.group:7} {case.engine:14} {case.words}")
                continue
            outcomes.append((case, bench.run(case)))
            print(line(*outcomes[-1]), flush=True)
    failed = [case for case, outcome in outcomes if outcome.problems]
    print(Counter(case.group for case, _ in outcomes), f"{len(outcomes)} cases, {len(failed)} fail; see {folder}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
