"""Train random recipes with tunekit and with a plain torch loop, and compare.

    python -m benchmarks.fuzz [--minutes N] [--seed S] [--count N] [--save]
    python -m benchmarks.fuzz --seed 1234 --count 1
    python -m benchmarks.fuzz --read FILE [--save]

Each recipe follows from one integer; seeds count up from `--seed`, by default from a number that the clock gives.
Results go to `--out` as JSON lines. Verdicts: `same`, `different`, `refused` (in the plan, with its message), `crash`
(an error after the plan), `timeout`, and `died`. A summary is printed at the end; `--save` writes it to
`benchmarks/results/fuzz.md` and `fuzz.json`, beside what earlier runs of other seeds found.

Cases are trained one after the other in a process that is renewed, so that a crash or a hang costs one case alone.
"""

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.circumstances import circumstances, in_words
from benchmarks.fuzz.processes import results_of

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")


def main() -> None:
    """Fuzz for a time or a number of cases, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long to go on")
    parser.add_argument("--seed", type=int, help="the first seed")
    parser.add_argument("--count", type=int, help="number of recipes")
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds alone")
    parser.add_argument("--out", type=Path, help="file of results, as JSON lines; appended to")
    parser.add_argument("--jobs", type=int, choices=[1], default=1, help="cases at a time: one, so that none waits")
    parser.add_argument("--read", type=Path, help="summarize the results of such a file, and train nothing")
    parser.add_argument("--save", action="store_true", help="write fuzz.md and fuzz.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if args.read is not None:
        results = [json.loads(line) for line in args.read.read_text(encoding="utf-8").splitlines()]
    else:
        results = list(_played(args))
    print("\n".join(summary(results)))
    if args.save:
        save(results)
    sys.exit(any(result["verdict"] not in ("same", "refused") for result in results))


def _played(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Play what is asked for, and print and keep what comes of each."""
    first = int(time.time()) if args.seed is None else args.seed
    seeds: Iterator[int] = iter(args.seeds) if args.seeds else count(first)
    number = args.count or (1 if args.minutes is None and not args.seeds else None)
    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    for result in results_of(seeds, number, until):
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result, ensure_ascii=False) + "\n")
        detail = result["detail"].strip().splitlines()[-1:] if result["verdict"] == "crash" else [result["detail"]]
        words = [str(result["seed"]), result["verdict"], f"{result['seconds']:.1f} s", _kind(result), *detail]
        print(" ".join(words).strip(), flush=True)
        yield result


def _kind(result: Mapping[str, Any]) -> str:
    recipe = result["recipe"]
    words = [recipe["method"]["type"], recipe["adapter"]["type"], recipe["model"]["type"]] if recipe else []
    return " ".join([*words, recipe.get("parallel", {}).get("strategy", "")]).strip()


def summary(results: Sequence[Mapping[str, Any]], largest: Mapping[str, float] | None = None) -> list[str]:
    """Return tables of verdicts, of largest differences, and of refusals, in Markdown.

    Args:
        results: Results, whole or as they are saved.
        largest: Largest differences by what they are of; those of the results where left out.
    """
    lines = [f"{len(results)} recipes: {_counted(result['verdict'] for result in results)}", ""]
    num_amplified = sum(result["verdict"] == "same" and bool(result["detail"]) for result in results)
    if num_amplified:
        lines += [
            f"{num_amplified} of those that are the same amplify rounding: the reference moves as far by itself.",
            "",
        ]
    lines += ["| recipes | same | different | crash | refused | other |", "|---|---|---|---|---|---|"]
    groups: dict[str, list[str]] = {}
    for result in results:
        for key in keys_of(result):
            groups.setdefault(key, []).append(result["verdict"])
    for key, verdicts in sorted(groups.items()):
        counts = Counter(verdicts)
        cells = [counts.pop(name, 0) for name in ("same", "different", "crash", "refused")]
        lines.append(f"| {key} | {' | '.join(map(str, cells))} | {sum(counts.values())} |")
    lines += [
        "",
        "Largest differences of those that are the same, in float32, without amplified ones:",
        "",
        "| of | largest |",
        "|---|---|",
    ]
    lines += [f"| {name} | {value:.1e} |" for name, value in (largest or largest_of(results)).items()]
    refusals = Counter(
        result["detail"].partition("\n")[0][:200] for result in results if result["verdict"] == "refused"
    )
    lines += ["", "Refused in the plan:", ""] + [f"- {number}: {words}" for words, number in refusals.most_common()]
    return lines


def keys_of(result: Mapping[str, Any]) -> list[str]:
    """Return the groups that a recipe is counted in."""
    if "keys" in result:
        return list(result["keys"])
    recipe = result["recipe"]
    keys = [f"method {recipe['method']['type']}", f"adapter {recipe['adapter']['type']}"]
    keys += [f"model {recipe['model']['type']}", f"layout {recipe.get('parallel', {}).get('strategy', 'single')}"]
    keys += ["packed"] * bool(recipe["data"].get("packing")) + ["resumed"] * bool(recipe["cuts"])
    return keys + ["bfloat16"] * (recipe["model"]["dtype"] == "bfloat16")


def largest_of(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the largest differences of results that are the same in float32 and amplify no rounding."""
    same = [
        result
        for result in results
        if result["verdict"] == "same" and not result["detail"] and "bfloat16" not in keys_of(result)
    ]
    names = dict.fromkeys(name for result in same for name in result["figures"])
    return {name: max(result["figures"].get(name, 0.0) for result in same) for name in names}


def _counted(verdicts: Iterator[str]) -> str:
    return ", ".join(f"{number} {verdict}" for verdict, number in Counter(verdicts).most_common())


def save(results: Sequence[Mapping[str, Any]]) -> None:
    """Write the results beside those of other seeds that are there. A recipe follows from its seed."""
    path = RESULTS / "fuzz.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"largest": {}, "cases": []}
    new = [
        {**{key: result[key] for key in ("seed", "verdict", "detail")}, "keys": keys_of(result)} for result in results
    ]
    cases = {case["seed"]: case for case in [*saved["cases"], *new]}
    largest = dict(saved["largest"])
    for name, value in largest_of(results).items():
        largest[name] = max(float(f"{value:.1e}"), largest.get(name, 0.0))
    lines = [json.dumps(cases[seed], ensure_ascii=False) for seed in sorted(cases)]
    head = f'"of": {json.dumps(circumstances(PACKAGES), ensure_ascii=False)}, "largest": {json.dumps(largest)}'
    path.write_text(f'{{{head}, "cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    text = f"# Random recipes against plain torch\n\n`python -m benchmarks.fuzz --save`: {in_words(PACKAGES)}\n\n"
    text += "\n".join(summary([*cases.values()], largest)) + "\n"
    (RESULTS / "fuzz.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
