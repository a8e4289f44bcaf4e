"""The README's tables of what was measured on accelerators, made of `benchmarks/results/`.

    python -m benchmarks.tables [--save]

With `--save` they take the place of what stands in the README between the two comments. Without a result nothing is
claimed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: python -m benchmarks.tables --save -->\n", "<!-- /measured -->\n"


def block(results: Path = RESULTS) -> str:
    """The tables of all devices in a folder of results."""
    texts = []
    for kind, table in (("kernels", kernels_table), ("train", train_table)):
        for file in sorted(results.glob(f"{kind}-*.json")):
            report = json.loads(file.read_text(encoding="utf-8"))
            where = f"{report['device']}, commit {report['commit']}, {report['date']}"
            texts.append(f"`python -m benchmarks.{kind}`: {where}\n\n{table(report['rows'])}")
    if not texts:
        return "Nothing was measured on an accelerator yet: `python -m benchmarks.kernels --save`.\n"
    return "\n".join(texts)


def by_seed(rows: Sequence[dict[str, Any]], form: str) -> str:
    """Return what recipes learned, before and after, a line for each measure.

    Args:
        rows: `seed`, `recipe`, `minutes`, and `before` and `after` with measures by name.
        form: Format of a measure, such as `.0%`.
    """
    lines = ["| seed | recipe | held out | before | after | minutes |", "|:--|:--|:--|--:|--:|--:|"]
    for row in rows:
        for place, (name, after) in enumerate(row["after"].items()):
            head = f"| {row['seed']} | {row['recipe']} |" if place == 0 else "|  |  |"
            minutes = f"{row['minutes']:.1f}" if place == 0 else ""
            lines.append(f"{head} {name} | {row['before'][name]:{form}} | {after:{form}} | {minutes} |")
    return "\n".join(lines)


def kernels_table(rows: Sequence[dict[str, Any]]) -> str:
    """Time of forward and backward pass, and the share of the device's copies or products."""
    last = {(row["case"], row["form"]): row for row in rows if row["pass"] == "both"}
    last = {(row["case"], row["form"]): row for row in rows} | last
    cells = {key: f"{row['milliseconds']:.2f} ms ({row['share_of_ceiling']:.0%})" for key, row in last.items()}
    return _table("operation", cells)


def train_table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens a second, share of the device's peak, and memory."""
    cells = {}
    for row in rows:
        name = f"{row['shape']} {row['adapter']} {row['max_length']}"
        cells[name, row["runner"]] = "-" if "left_out" in row else _speed(row)
    return _table("model", cells)


def _speed(row: dict[str, Any]) -> str:
    mfu = "" if row["mfu"] is None else f"{row['mfu']:.0%}, "
    return f"{row['tokens_per_second']:,.0f} ({mfu}{row['peak_bytes'] / 2**30:.0f} GiB)"


def _table(title: str, cells: dict[tuple[str, str], str]) -> str:
    """Cells by row and column, in the order in which they came."""
    rows, columns = (list(dict.fromkeys(key[place] for key in cells)) for place in range(2))
    lines = [[title, *columns], ["---"] * (1 + len(columns))]
    lines += [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    """Print the tables, and with `--save` put them into the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="put them into the README")
    if parser.parse_args().save:
        head, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
        README.write_text(head + BEGIN + block() + END + rest.partition(END)[2], encoding="utf-8")
    print(block(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
