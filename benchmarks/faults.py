"""Faults of every kind, and what becomes of the runs that they happen to.

python -m benchmarks.faults [--only WORD ...] [--sample N] [--list] [--folder FOLDER] [--save]

"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faulted import BROKEN_SAVE, BROKEN_STEP, ENGINES, EVAL_STEPS, Bench, Case, Damage, Engine, Outcome, Prepared
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
    yield from incidents_of(engine, prepared)
    yield from _full_disks(engine, prepared)


def _victims(engine: Engine) -> list[tuple[str, str, int]]:
    if engine.num_processes == 1:
        return [("the process", "kill", 0)]
    return [("rank 0", "kill", 0), ("rank 1", "kill", 1), ("the supervisor", "kill supervisor", 0)]


def _kills_in_phases(engine: Engine) -> Iterator[Case]:
    """At every place, on every process where the whole model is trained, and otherwise on one of them."""
    victims = _victims(engine)
    places = ["starting", "loading", "data", "forward", "backward", "optimizer", "evaluation", "result", "finished"]
    for number, at in enumerate(places):
        step = BROKEN_STEP if at in ("data", "forward", "backward", "optimizer") else 0
        step = EVAL_STEPS if at == "evaluation" else step
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
        happening
        for happening in prepared.happenings
        if happening.path.startswith("model") and happening.what != "begun"
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


NOT_FINITE, OUT_OF_MEMORY, TIMEOUT = "not a number", "out of memory", "parallel.timeout_seconds=8"

HUNG_SECONDS = 8 + 15 + 12
"""How long a group may take that hangs: until its time is up, until those are killed that do not end when they are
asked to, and what it takes to start and to end."""


def incidents_of(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """What else can happen to an engine, and how the run is to end."""
    last = engine.num_processes - 1
    rank = rf"rank {last}" if last else ""

    def case(words: str, does: str, at: str = "forward", **how: Any) -> Case:
        fault = Fault(does, at, last, how.pop("step", BROKEN_STEP))
        return Case("event", engine.name, words, fault, **how)

    yield case("loss is not a number: stop", NOT_FINITE, says=(f"step {BROKEN_STEP}", rank, "row"))
    for policy in ("skip", "rollback"):
        words = f"loss is not a number: {policy}"
        yield case(words, NOT_FINITE, recipe=(f"train.non_finite={policy}",), ends="finite")
    words = f"{rank or 'the process'} runs out of memory"
    yield case(words, OUT_OF_MEMORY, says=("out of memory", rank and f"step {BROKEN_STEP}"))
    yield case(f"{words}: retried", OUT_OF_MEMORY, recipe=("train.retry_out_of_memory=true",), ends="close")
    if engine.num_processes == 1:
        return
    hung = {"recipe": (TIMEOUT,), "says": (rank,), "within_seconds": HUNG_SECONDS, "leaves_stacks": True}
    yield case(f"{rank} sleeps", "sleep", **hung)
    yield case(f"{rank} is stopped by a signal", "stop", **(hung | {"leaves_stacks": False}))
    yield case(f"{rank} sleeps before the training", "sleep", "loading", step=0, **hung)
    yield case(f"{rank} exits with code 3", "exit", says=(rank, "exit code 3"), within_seconds=HUNG_SECONDS)
    worker = {"plan": (("dataloader_num_workers", 1),), "recipe": (TIMEOUT,), "within_seconds": HUNG_SECONDS}
    yield case(f"a data worker of {rank} is killed", "kill a data worker", "data", says=(rank, "data|rows"), **worker)
    yield case(f"a data worker of {rank} is stopped", "stop a data worker", "data", says=(rank, "data|rows"), **worker)
    yield case(
        f"{rank} is killed, one restart", "kill", recipe=("parallel.max_restarts=1",), ends="same",
    )  # fmt: skip


def _full_disks(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """A disk that is full when a file of a save or of the result begins, and one that can only be read."""
    is_first = engine.num_processes == 1 and engine.adapter == "full"
    full = {"says": ("disk|space", "free"), "disk": "small", "within_seconds": HUNG_SECONDS}
    yield Case(
        "disk", engine.name, f"full when step {BROKEN_SAVE} begins",
        Fault("fill the disk", "data", 0, BROKEN_SAVE), **full,
    )  # fmt: skip
    done = [happening for happening in prepared.happenings if happening.what in ("written", "begun")]
    for inner in ("checkpoints", "model"):
        begun = [happening for happening in done if happening.path.startswith(inner) and happening.what == "begun"]
        written = [happening for happening in done if happening.path.startswith(inner) and happening.what == "written"]
        chosen = [*begun[:1], *written[:-1]]
        for happening in chosen if is_first else chosen[1::4] if inner == "checkpoints" else []:
            step = BROKEN_SAVE if inner == "checkpoints" else 0
            fault = Fault("fill the disk", "file", 0, step, happening.what, happening.path)
            begins = "stopped" if step else "late"
            yield Case(
                "disk", engine.name, f"full when {happening.path} is {happening.what}", fault, begins=begins, **full
            )
    readable = {"says": ("read-only|[Rr]ead-only",), "within_seconds": HUNG_SECONDS}
    yield Case("disk", engine.name, "read-only from the beginning", disk="read-only", **readable)
    fault = Fault("make it read-only", "data", 0, BROKEN_SAVE)
    yield Case("disk", engine.name, f"read-only from step {BROKEN_SAVE}", fault, disk="turns read-only", **readable)


def line(case: Case, outcome: Outcome) -> str:
    """A row of the table."""
    found = "; ".join(outcome.problems) or outcome.not_run or outcome.words
    steps = [" -" if step is None else f"{step:2}" for step in (outcome.resumed, outcome.expected)]
    verdict = "FAILS" if outcome.problems else "ok" if not outcome.not_run else "not run"
    where = f"{case.group:7} {case.engine:14} {case.words:62} {steps[0]} {steps[1]}"
    return f"{where} {outcome.seconds:5.1f} s {verdict:5} {found}"


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
        if (
            args.only
            and any(word in ENGINES or word in name for word in args.only)
            and not all(word in name for word in args.only if any(word in other for other in ENGINES))
        ):
            continue
        for case in list(cases_of(engine, bench.prepared(name))):
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
