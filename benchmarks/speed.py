"""Count the published speeds of training runs that lie in the ranges that the planner predicts for them.

    python -m benchmarks.speed [--save]

The runs are those of `tests/estimates/published_speed.yaml`, each with its source; most are of other tools. The
constants of `tunekit/estimates/throughput/` are fitted to the development half. `held out` are the other half by a rule
that was fixed before, `fresh` runs of the same sources that were added when all constants were set. `published /
middle` is over the geometric middle of the range. A recorded run of one's own tells more: how much is estimated below
the table by pairs of runs of one source.
"""

import argparse
from pathlib import Path

from benchmarks.circumstances import in_words
from tests.estimates.published_speed import outcomes, recorded_words, table

RESULTS = Path(__file__).parent / "results" / "speed.md"

INTRODUCTION = """# Predicted speeds against published ones

Published speeds of training runs, most of other tools, against the range that a plan predicts by the sheet of the
device. Constants are fitted to the development half of the runs. The held-out half was divided from it by a rule that
was fixed before; fresh runs of the same sources came when all constants were set. `published / middle` is over the
geometric middle of the range. Runs and sources: `tests/estimates/published_speed.yaml`.

The model was changed once after a look at the held-out half, of which 74 of 94 were in the range then: by the
development half alone, attention is counted by the speed of memory, and the rows of LLM Foundry, whose MPT has neither
rotary embeddings nor a gate, count as fused. Fresh runs came after that.
"""


def report() -> str:
    """The table, and every run that is outside its range, with the reason as far as it is known."""
    titles, lines = table()
    rule = "|".join([":--", *("--:" for _ in titles[1:])])
    missed = [
        f"- {one.offset:.2f}: {one.row.words}, {one.row.name} ({one.row.part}). {(one.row.missed or '').strip()}"
        for one in sorted(outcomes(), key=lambda one: one.offset)
        if not one.is_inside
    ]
    return "\n".join(
        [
            f"| {' | '.join(titles)} |",
            f"|{rule}|",
            *(f"| {' | '.join(line)} |" for line in lines),
            "",
            *recorded_words(),
            "",
            "Outside the range, with the published speed over its middle:",
            "",
            *missed,
            "",
        ]
    )


def main() -> None:
    """Print the report and, where asked, save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    text = report()
    print(text)
    if arguments.save:
        where = f"`python -m benchmarks.speed --save`: {in_words(['tunekit'])}."
        RESULTS.write_text(f"{INTRODUCTION}\n{where}\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
