"""How long tunekit takes to answer, beside `trl --help`, `import torch` and Python alone.

    python -m benchmarks.startup [--runs N] [--save]

Every command runs in a new process. The commands take turns, so that a busy moment of the machine falls on all of
them. The table gives the median and the fastest of N runs, after one that is not counted and that leaves bytecode
behind, as the first use of an installed package does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks.circumstances import circumstances

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "startup.json"
BROKEN = """\
model: pico
data:
  trian: my.jsonl
adapter: {type: lora, rnak: 8}
train: {learning_rate: -1}
"""


PACKAGES = ("tunekit", "torch", "transformers", "trl", "pydantic", "typer")


def commands(broken: Path) -> dict[str, list[str]]:
    """The measured command lines, by the name under which they are shown."""
    scripts = Path(sysconfig.get_path("scripts"))
    tunekit, trl = str(scripts / "tunekit"), str(scripts / "trl")
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "tunekit --help": [tunekit, "--help"],
        "tunekit check sft/quickstart": [tunekit, "check", "sft/quickstart"],
        "tunekit check BROKEN": [tunekit, "check", str(broken)],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
        "trl --help": [trl, "--help"],
    }


def measure(num_runs: int) -> dict[str, list[float]]:
    """Seconds of each run of each command; the first round is dropped."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "broken.yaml"
        broken.write_text(BROKEN)
        timed = commands(broken)
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(num_runs + 1):
            for name, command in timed.items():
                start = time.perf_counter()
                done = subprocess.run(command, capture_output=True, check=False, cwd=folder, env=environment)
                seconds[name].append(time.perf_counter() - start)
                expected = 2 if name.endswith("BROKEN") else 0
                if done.returncode != expected:
                    raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stderr.decode()}")
    return {name: runs[1:] for name, runs in seconds.items()}


def main() -> None:
    """Measure, print the table, and with `--save` keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="counted runs of each command (10)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()

    seconds = measure(args.runs)
    where = circumstances(PACKAGES)
    print(f"commit {where['commit']}, {where['date']}, Python {where['python']}, {os.cpu_count()} cores\n")
    print(f"{'command':32} {'median':>9} {'fastest':>9}")
    for name, runs in seconds.items():
        print(f"{name:32} {statistics.median(runs):7.3f} s {min(runs):7.3f} s")
    if args.save:
        table = {
            name: {
                "median_seconds": round(statistics.median(runs), 4),
                "fastest_seconds": round(min(runs), 4),
            }
            for name, runs in seconds.items()
        }
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps({**where, "num_runs": args.runs, "commands": table}, indent=2) + "\n")


if __name__ == "__main__":
    main()
