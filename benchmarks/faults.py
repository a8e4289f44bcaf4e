"""Faults of every kind, and what becomes of the runs that they happen to.

    python -m benchmarks.faults [--engine NAME ...] [--kind KIND ...] [--only WORDS] [--every N] [--list] [--save]

Kinds of cases:

- `phase`: a process or its supervisor is killed at each place that a run passes
- `save`: after each file of a save, and after whatever else is done to the folders of checkpoints
- `result`: after each file of the trained model
- `damage`: a file of the newest checkpoint is cut, changed or removed, or the manifest says what is not true
- `event`: losses that are not numbers, memory that runs out, processes that hang or end, workers that read no rows
- `disk`: a disk is full at each file, or can only be read

After each the run is gone on with as by `tunekit resume`. It has to go on from the newest checkpoint that is whole, as
it is seen here from its files, and to end with the same bits as the run that nothing happened to; or to say why it
cannot, where nothing is whole. All that was whole before is to be whole when it goes on. The program ends with 1 where
anything was otherwise. On two idle cores it takes some 20 minutes; disks are mounted, which takes root.
"""

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks.circumstances import in_words
from benchmarks.faulted import Bench, Case, Damage, Outcome
from benchmarks.injected import PLACES, Fault
from benchmarks.noticed import Happening
from benchmarks.prepared import BROKEN_SAVE, BROKEN_STEP, ENGINES, EVAL_STEPS, Engine, Prepared

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "faults.md"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "deepspeed")
GROUPS = ("phase", "save", "result", "damage", "event", "disk")
TITLE = "Faults, and what became of the runs that they happened to"
ABOUT = """\
`from step`: the step of the checkpoint that the run went on from, of that which was the newest whole one. Where it goes
on, it is to end with the bits of the run that nothing happened to: weights and losses. Nothing that was whole may be
lost, and what was damaged is to be kept aside.
"""

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
    """At every place, on every process where DDP trains the whole model, and otherwise on one of them."""
    victims = _victims(engine)
    for number, at in enumerate(PLACES if engine.adapter == "full" else PLACES[1::3]):
        step = BROKEN_STEP if at in ("data", "forward", "backward", "optimizer") else 0
        step = EVAL_STEPS if at == "evaluation" else step
        chosen = victims if engine.name == "ddp x2 full" else [victims[number % len(victims)]]
        for who, does, rank in chosen:
            yield Case("phase", engine.name, f"{who} killed: {at}", Fault(does, at, rank, step))
    who, does, rank = victims[-1]
    fault = Fault(does, "forward", rank, 1)
    yield Case("phase", engine.name, f"{who} killed: forward, no checkpoint yet", fault, begins="made")


def _kills_in_saves(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """After each file of a save and whatever else is done to folders, each on one of the processes."""
    victims = _victims(engine)
    done = [happening for happening in prepared.happenings if _is_of_checkpoint(happening)]
    deleted = [happening for happening in done if happening.what == "deleted"]
    few = (deleted[0], deleted[len(deleted) // 2], deleted[-1])
    begun = [happening for happening in done if happening.what == "begun" and happening.apart]
    chosen = [
        happening
        for happening in done
        if happening.what in ("written", "renamed")
        or happening in few
        or (happening in begun and (engine.num_processes == 1 or happening is begun[0]))
    ]
    for number, happening in enumerate(chosen if engine.adapter == "full" else chosen[1::4]):
        who, does, rank = victims[number % len(victims)]
        fault = Fault(does, "file", rank, BROKEN_SAVE, happening.what, happening.path)
        yield Case("save", engine.name, f"{who} killed: {happening.path.partition('/')[2]} {happening.what}", fault)


def _is_of_checkpoint(happening: Happening) -> bool:
    """Whether something belongs to a checkpoint, and not to the result."""
    return happening.path.startswith("checkpoints")


def _kills_in_result(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """After each file of the result."""
    victims = _victims(engine)
    done = [
        happening for happening in prepared.happenings if not _is_of_checkpoint(happening) and happening.what != "begun"
    ]
    for number, happening in enumerate(done if engine.num_processes == 1 and engine.adapter == "full" else done[:1]):
        who, does, rank = victims[number % len(victims)]
        fault = Fault(does, "file", rank, 0, happening.what, happening.path)
        yield Case("result", engine.name, f"{who} killed: {happening.path} {happening.what}", fault, begins="late")


def _damages(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """All damages to each file, where the whole model is trained in one process; otherwise one to every third."""
    files = sorted(prepared.files)
    every = engine.num_processes == 1 and engine.adapter == "full"
    for number, file in enumerate(files):
        for how in DAMAGES if every else [DAMAGES[number % len(DAMAGES)]][: number % 3 == 0]:
            yield Case("damage", engine.name, f"{file} {how}", damage=Damage(how, file), begins="late")
    for how in ("removed", "cut in half")[: 2 if every else 1]:
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


NOT_FINITE, OUT_OF_MEMORY = "not a number", "out of memory"

HUNG_SECONDS = 100
"""How long a group may take that hangs: 30 s to start and come to where it hangs, 20 until its time is up, 20 until all
have said what they see, 15 until those are killed that do not end when they are asked to, and 15 for good measure."""


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
    # The first step has more time, as loading has.
    hung: dict[str, Any] = {"recipe": ("parallel.timeout_seconds=8",), "step": BROKEN_STEP + 1}
    hung |= {"says": (rank,), "within_seconds": HUNG_SECONDS}
    yield case(f"{rank} sleeps", "sleep", leaves_stacks=True, **hung)
    yield case(f"{rank} sleeps in a backward pass", "sleep", "backward", leaves_stacks=True, **hung)
    yield case(f"{rank} is stopped by a signal", "stop", **hung)
    early = {"step": 0, "plan": (("patience_seconds", 20),)}
    yield case(f"{rank} sleeps before the training", "sleep", "loading", leaves_stacks=True, **(hung | early))
    yield case(f"{rank} exits with code 3", "exit", says=(rank, "exit code 3"), within_seconds=HUNG_SECONDS)
    # These are processes that are started anew, with each epoch too, which takes longer.
    worker = hung | {"says": (rank, "rows|micro-batches"), "plan": (("dataloader_num_workers", 1),)}
    worker |= {"recipe": ("parallel.timeout_seconds=40",), "within_seconds": 2 * HUNG_SECONDS}
    yield case(f"a data worker of {rank} is killed", "kill a data worker", "workers", **worker)
    yield case(f"a data worker of {rank} is stopped", "stop a data worker", "workers", **worker)
    # From the beginning: one that is stopped to be copied would be restarted too.
    restarted: dict[str, Any] = {"recipe": ("parallel.max_restarts=1",), "begins": "made"}
    yield case(f"{rank} is killed, one restart", "kill", ends="same", **restarted)


def _full_disks(engine: Engine, prepared: Prepared) -> Iterator[Case]:
    """A disk that is full when a file of a save or of the result begins, and one that can only be read."""
    is_first = engine.num_processes == 1 and engine.adapter == "full"
    full = {"says": ("disk|space", "free"), "disk": "small", "within_seconds": HUNG_SECONDS}
    yield Case(
        "disk", engine.name, f"full when step {BROKEN_SAVE} begins",
        Fault("fill the disk", "data", 0, BROKEN_SAVE), **full,
    )  # fmt: skip
    done = [happening for happening in prepared.happenings if happening.what in ("written", "begun")]
    for step in (BROKEN_SAVE, 0):
        files = [happening for happening in done if _is_of_checkpoint(happening) == bool(step)]
        begun = [happening for happening in files if happening.what == "begun"]
        # When one is written the next one begins.
        chosen = [*begun[:1], *(happening for happening in files if happening.what == "written")][:-1]
        for happening in chosen if is_first else chosen[1::4] if step else []:
            fault = Fault("fill the disk", "file", 0, step, happening.what, happening.path)
            words = f"full when {happening.path.partition('/')[2] or happening.path} is {happening.what}"
            yield Case("disk", engine.name, words, fault, begins="stopped" if step else "late", **full)
    readable = {"says": ("read-only|[Rr]ead-only",), "within_seconds": HUNG_SECONDS}
    yield Case("disk", engine.name, "read-only from the beginning", disk="read-only", **readable)
    fault = Fault("make it read-only", "data", 0, BROKEN_SAVE)
    yield Case("disk", engine.name, f"read-only from step {BROKEN_SAVE}", fault, disk="turns read-only", **readable)


class Named(Protocol):
    """A case as the table names it."""

    @property
    def group(self) -> str:
        """Kind of case."""

    @property
    def engine(self) -> str:
        """Method and layout that train."""

    @property
    def words(self) -> str:
        """The fault."""


def line(case: Named, outcome: Outcome) -> str:
    """A row of the table as it is printed."""
    engine, what, steps, seconds, found = row(case, outcome)
    return f"{case.group:7} {engine:14} {what:64} {steps:>7} {seconds:>8} {verdict(outcome):7} {found}"


def row(case: Named, outcome: Outcome) -> tuple[str, str, str, str, str]:
    """Engine, what happened, the step it went on from and the one it was to, seconds, and what was said or is wrong."""
    found = "; ".join(outcome.problems) or outcome.not_run or outcome.words
    resumed, expected = ("-" if step is None else step for step in (outcome.resumed, outcome.expected))
    return case.engine, case.words, f"{resumed} of {expected}", f"{outcome.seconds:.1f} s", found


def verdict(outcome: Outcome) -> str:
    """Whether all was as it should be."""
    return "not run" if outcome.not_run else "FAILS" if outcome.problems else "ok"


def summary(outcomes: Sequence[tuple[Named, Outcome]]) -> list[str]:
    """How many of each kind there were, and how many went wrong."""
    counts = Counter((case.group, verdict(outcome)) for case, outcome in outcomes)
    groups = dict.fromkeys(case.group for case, _ in outcomes)
    kinds = {group: {word: counts[group, word] for word in ("ok", "FAILS", "not run")} for group in groups}
    words = [
        f"{group}: {', '.join(f'{number} {word}' for word, number in kind.items() if number)}"
        for group, kind in kinds.items()
        if any(kind.values())
    ]
    failed = sum(bool(outcome.problems) for _, outcome in outcomes)
    return [*words, f"{len(outcomes)} cases, {failed} of which fail"]


def document(
    outcomes: Sequence[tuple[Named, Outcome]],
    title: str = TITLE,
    about: str = ABOUT,
    command: str = "benchmarks.faults",
) -> str:
    """The table as it is kept."""
    rows = []
    for case, outcome in outcomes:
        cells = (case.group, *row(case, outcome)[:4], verdict(outcome), row(case, outcome)[4])
        rows.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ")[:200] for cell in cells) + " |")
    return "\n".join([f"# {title}\n\n{about}",
        f"`python -m {command} --save`: {in_words(PACKAGES)}.\n",
        *(f"- {words}" for words in summary(outcomes)), "",
        "| kind | engine | what happens | from step | seconds | | what was said, or how it ended |",
        "|---|---|---|---|---|---|---|", *rows, "",
    ])  # fmt: skip


def main() -> None:
    """Let all happen, print the table, and with `--save` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="these (all)")
    parser.add_argument("--kind", nargs="+", choices=GROUPS, default=list(GROUPS), help="these (all)")
    parser.add_argument("--only", default="", help="cases in whose words this occurs")
    parser.add_argument("--every", type=int, default=1, help="every so many of them (all)")
    parser.add_argument("--list", action="store_true", help="say what there is, and let nothing happen")
    parser.add_argument("--folder", type=Path, help="a new folder for the runs; those that fail stay there")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()

    folder = args.folder or Path(tempfile.mkdtemp(prefix="tunekit-faults-"))
    bench = Bench(folder.resolve())
    outcomes: list[tuple[Case, Outcome]] = []
    for name in args.engine:
        cases = [case for case in cases_of(ENGINES[name], bench.prepared(name)) if case.group in args.kind]
        for case in [case for case in cases if args.only in case.words][:: args.every]:
            if args.list:
                print(f"{case.group:7} {case.engine:14} {case.words}")
                continue
            outcomes.append((case, bench.run(case)))
            print(line(*outcomes[-1]), flush=True)
    conclude(outcomes, folder, is_temporary=args.folder is None)
    if args.save:
        RESULTS.write_text(document(outcomes), encoding="utf-8")
    sys.exit(exit_code(outcomes))


def conclude(outcomes: Sequence[tuple[Named, Outcome]], folder: Path, *, is_temporary: bool) -> None:
    """Print the summary, and delete a temporary folder unless a case failed, whose runs are in it."""
    failed = exit_code(outcomes)
    print(*summary(outcomes), *([f"those that fail lie in {folder}"] if failed else []), sep="\n")
    if not failed and is_temporary:
        shutil.rmtree(folder)


def exit_code(outcomes: Sequence[tuple[Named, Outcome]]) -> int:
    """1 if a case failed, else 0."""
    return int(any(outcome.problems for _, outcome in outcomes))


if __name__ == "__main__":
    main()
