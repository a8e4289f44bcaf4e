"""Everything that is to be measured on an accelerator, in the order of worth, within a time.

    python -m benchmarks.gpu [--minutes 25] [--results FOLDER] [--only PART ...]
    python -m benchmarks.gpu --cpu-dry-run                 every part once, tiny, also on a CPU

The parts: `device`, what it is and its ceilings; `tests`, those marked `gpu`; `train`, whole steps of tunekit and of
others (`benchmarks.train`), with what the plan says of each; `kernels`, one operation at a time (`benchmarks.kernels`).
Each runs in processes of its own with a limit. What is measured is written at once to `gpu-DEVICE.json`,
`train-DEVICE.json` and `kernels-DEVICE.json`, and is not measured again by a later call with the same results: a
kernel that does not compile, is wrong or stops the device is written down with its error, and the rest goes on.

It needs nothing beside the repository and the packages of pyproject.toml; `benchmarks/gpu_wheels.sh` collects those for
a machine without a network.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import train
from benchmarks.circumstances import circumstances
from benchmarks.kernels import RESULTS, versions
from benchmarks.train import ROOT, Case

PARTS = ("device", "tests", "train", "kernels")
BF16 = ("train.pure_bf16=true",)
CHECKPOINTED = ("train.gradient_checkpointing=true",)
WHOLE = ("train.gradient_checkpointing=false",)
SMALL = ("train.micro_batch_size=1",)
CASES = (
    Case("1b", "lora", 2048, "auto"),
    Case("1b", "full", 2048, "auto"),
    Case("1b", "lora", 2048, "torch"),
    Case("1b", "full", 2048, "liger"),
    Case("1b", "lora", 2048, "auto", SMALL),
    Case("1b", "lora", 2048, "torch", SMALL),
    Case("1b", "lora", 2048, "trl", ("train.micro_batch_size=4",)),
    Case("1b", "lora", 1024, "auto", SMALL, "dpo"),
    Case("1b", "lora", 8192, "auto", WHOLE + SMALL),
    Case("1b", "full", 2048, "auto", (*BF16, *SMALL)),
    Case("1b", "lora", 512, "auto", (), "grpo"),
    Case("1b", "full", 2048, "torch"),
    Case("1b", "full", 1024, "auto", CHECKPOINTED + SMALL, "dpo"),
    Case("1b", "full", 8192, "auto", CHECKPOINTED + SMALL),
    Case("1b", "qlora", 2048, "auto"),
    Case("1b", "full", 2048, "trl", ("train.micro_batch_size=4",)),
    Case("8b", "lora", 2048, "auto"),
    Case("8b", "qlora", 2048, "auto"),
    Case("8b", "lora", 2048, "liger"),
    Case("8b", "full", 2048, "auto", (*BF16, "train.optim=tunekit_adamw_8bit")),
    Case("8b", "lora", 2048, "trl", ("train.micro_batch_size=2",)),
    Case("8b", "qlora", 2048, "trl", ("train.micro_batch_size=2",)),
    Case("8b", "lora", 8192, "auto"),
    Case("3b", "lora", 2048, "auto", WHOLE + SMALL),
    Case("3b", "qlora", 2048, "auto", CHECKPOINTED + SMALL),
    Case("3b", "full", 2048, "auto", CHECKPOINTED),
    Case("3b", "full", 2048, "auto", ("train.optim=adamw_8bit", *SMALL)),
)
NUM_STEPS, NUM_WARM = 6, 2
CASE_SECONDS = 90.0
DRY_CASES = (
    Case("tiny", "lora", 64, "auto"),
    Case("tiny", "full", 64, "trl"),
    Case("tiny", "lora", 64, "auto", SMALL, "dpo"),
    Case("tiny", "lora", 64, "auto", SMALL, "grpo"),
)


class Report:
    """A file of what was measured, written after each piece of it."""

    def __init__(self, folder: Path, kind: str, device: str) -> None:
        self.path = folder / f"{kind}-{device.lower().replace(' ', '-')}.json"
        self.content: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        self.content = {**circumstances(()), "device": device, "versions": versions(), "rows": [], **self.content}

    def add(self, rows: Sequence[dict[str, Any]] = (), **values: Any) -> None:
        """Keep rows and other values."""
        self.content["rows"] += rows
        self.content |= values
        self.path.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")


def measure_device(report: Report, dry: bool) -> None:
    """The device's best, in a process of its own: memory that it takes is not there for others."""
    code = "import json; from benchmarks.kernels import ceilings; print(json.dumps(ceilings()))"
    if dry:
        code = "print('{}')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    ceilings = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr[-2000:]}
    report.add(ceilings=ceilings)
    print("ceilings:", *(f"{value:.3g} {unit}/s" for unit, value in ceilings.items()), flush=True)


def pytest_runtest_logreport(report: Any) -> None:
    """As a plugin of pytest, write down each test when it is over: a device that hangs leaves no summary."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or report.failed):
        return
    with Path(os.environ["TUNEKIT_GPU_TESTS"]).open("a", encoding="utf-8") as file:
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.failed:
            row["error"] = report.longreprtext[-3000:]
        file.write(json.dumps(row) + "\n")


def run_tests(report: Report, dry: bool, seconds: float) -> None:
    """Run the tests that need an accelerator, several at a time."""
    marked = [
        file for file in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.gpu" in file.read_text(encoding="utf-8")
    ]
    files = [str(file.relative_to(ROOT)) for file in marked]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "benchmarks.gpu"]
    command += ["tests/kernels/test_gpu.py"] if dry else ["-n", "12", "--dist", "worksteal", *files]
    file = report.path.parent / "gpu-tests.jsonl"
    file.unlink(missing_ok=True)
    environment = {**os.environ, "TUNEKIT_GPU_TESTS": str(file)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        ended = f"exit status {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        ended = f"not at the end after {seconds:.0f} s"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    tests = [json.loads(line) for line in lines]
    report.add(tests=tests, tests_ended=ended)
    outcomes = Counter(test["outcome"] for test in tests)
    print("tests:", dict(outcomes), ended, flush=True)
    print(*(f"  {test['test']}: {test['error'].splitlines()[-1]}" for test in tests if "error" in test), sep="\n")


def run_cases(report: Report, dry: bool, left: Callable[[], float]) -> None:
    """Train the cases one after the other; while one runs, the next imports its libraries."""
    done = {train.case_of(row).name for row in report.content["rows"]}
    todo = [case for case in (DRY_CASES if dry else CASES) if case.name not in done]
    steps, warm = (3, 1) if dry else (NUM_STEPS, NUM_WARM)
    device, writing = threading.Lock(), threading.Lock()
    with tempfile.TemporaryDirectory(prefix="tunekit-gpu-") as name:

        def model(shape: str) -> Path:
            folder = Path(name) / shape
            with writing:
                if not folder.exists():
                    code = f"from benchmarks.train import *; save_model({shape!r}, Path({str(folder)!r}))"
                    with device:
                        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
            return folder

        def play(case: Case) -> None:
            if left() < 20:
                return
            row = train.measured(case, model(case.shape), steps, warm, device, min(CASE_SECONDS, left()))
            report.add([row])
            print(train.shown(row), flush=True)

        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(play, case) for case in todo]:
                future.result()


def run_kernels(report: Report, dry: bool, left: Callable[[], float]) -> None:
    """Measure the kernels; a process whose device no longer answers is followed by another."""
    command = [sys.executable, "-m", "benchmarks.kernels"]
    if dry:
        command += ["--dry-run", "--only", "nf4"]
    else:
        command += ["--save", "--goes-on", "--without", "torch.compile", "--results", str(report.path.parent)]
    code = 3
    while code == 3 and left() > 20:
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=left(), check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
    report.add(kernels_exit_status=code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that there is time for, and print their tables; 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25.0, help="for all parts together")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results (benchmarks/results)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (all)")
    parser.add_argument("--cpu-dry-run", action="store_true", help="run every part tiny")
    args = parser.parse_args(arguments)
    import torch

    dry, until = args.cpu_dry_run, time.monotonic() + 60 * args.minutes
    if not torch.cuda.is_available() and not dry:
        print("There is no accelerator here. On one, this would be measured:", *PARTS, sep="\n  ")
        print(*(f"    {case.name}" for case in CASES), sep="\n")
        return 2

    def left() -> float:
        return until - time.monotonic()

    name = "dry run" if dry else torch.cuda.get_device_name()
    args.results.mkdir(parents=True, exist_ok=True)
    report = Report(args.results, "gpu", name)
    if "device" in args.only and "ceilings" not in report.content:
        measure_device(report, dry)
    if "tests" in args.only and "tests" not in report.content:
        run_tests(report, dry, max(20.0, 0.55 * left()))
    if "train" in args.only:
        run_cases(Report(args.results, "train", name), dry, left)
    if "kernels" in args.only:
        run_kernels(report, dry, left)
    print(f"{60 * args.minutes - left():.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
