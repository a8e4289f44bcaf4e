"""From a file of chats to packed arrays that are ready to train on: tunekit beside TRL's SFTTrainer.

    python -m benchmarks.data [--rows N] [--length TOKENS] [--large BYTES] [--save]

Both read the same generated JSONL, mask all but the assistant's turns and pack to the same length, with pico's
tokenizer and chat template, each in a process of its own with an empty cache. TRL runs twice: as it comes, with one
process, and with `dataset_num_proc` set to the cores. Imports and TRL's building of the trainer around the model are
not counted: the clock starts before the file is read and stops when the packed rows are there. Every tool is measured
`--repeats` times in turn, and the medians are shown. Peak memory is that of the process and its children, pages that
they share counted once, looked at every 50 ms, less what it was when the clock started.

With `--large 2e9` tunekit also prepares a file of so many bytes; there, the peak is all that its processes take.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.circumstances import circumstances
from tunekit.data.sources.rows import cache_folder

ROOT = Path(__file__).parents[1]
PACKAGES = ("tunekit", "torch", "transformers", "trl", "datasets")

RESULTS = ROOT / "benchmarks" / "results" / "data.json"
PICO = ROOT / "tunekit" / "models" / "pico"
WORDS = (ROOT / "examples" / "data" / "tales.txt").read_text(encoding="utf-8").split()


TOOLS = ("tunekit", "trl", "trl, all cores")


class PeakMemory:
    """Most bytes of this process and its children while the block runs, in all and above those at its start."""

    def __enter__(self) -> "PeakMemory":
        self._process = psutil.Process()
        self._start = self.peak_bytes = self._taken()
        self.rise_bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, self._taken())
        self.rise_bytes = self.peak_bytes - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._taken())

    def _taken(self) -> int:
        total = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        return total


def write_chats(path: Path, num_rows: int, num_bytes: float = math.inf) -> None:
    """Conversations of one to four exchanges, 10 to 80 words a turn: so many, or so many bytes."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(num_rows):
            if stream.tell() > num_bytes:
                break
            turns: list[dict[str, str]] = []
            for _ in range(rng.randint(1, 4)):
                for role in ("user", "assistant"):
                    turns.append({"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(10, 80)))})
            stream.write(json.dumps({"messages": turns}) + "\n")


def prepare_with_tunekit(path: Path, length: int) -> tuple[Any, float, PeakMemory]:
    """Packed rows, through the functions that a run calls."""
    from tunekit.data.packing.sequences import Mixing
    from tunekit.data.prepare import prepare_rows, tokens_of
    from tunekit.data.sources.load import load_rows
    from tunekit.models.load import load_tokenizer
    from tunekit.recipe.sections.data import DataSection
    from tunekit.recipe.sections.model import ModelSection

    tokenizer = load_tokenizer(ModelSection(path="pico"))
    import datasets
    import pyarrow  # noqa: F401

    assert datasets.Dataset
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        with PeakMemory() as memory:
            start = time.perf_counter()
            rows = load_rows(DataSection(train=str(path)).sources[0], default_split="train")
            tokens = tokens_of(rows, tokenizer, max_length=length)
            packed = prepare_rows([tokens], Mixing(), max_length=length, packing=True).dataset()
            seconds = time.perf_counter() - start
        return packed, seconds, memory


def prepare_with_trl(path: Path, length: int, num_proc: int | None) -> tuple[Any, float, PeakMemory]:
    """Packed rows, as SFTTrainer makes them before it trains."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(PICO)
    model = AutoModelForCausalLM.from_pretrained(PICO)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
        config = SFTConfig(
            output_dir=folder,
            max_length=length,
            packing=True,
            assistant_only_loss=True,
            dataset_num_proc=num_proc,
            **settings,
        )
        small = load_dataset("json", data_files=str(path), split="train[:2]", cache_dir=f"{folder}/small")
        trainer = SFTTrainer(model=model, args=config, train_dataset=small, processing_class=tokenizer)
        with PeakMemory() as memory:
            start = time.perf_counter()
            rows = load_dataset("json", data_files=str(path), split="train", cache_dir=f"{folder}/cache")
            packed = trainer._prepare_dataset(rows, tokenizer, config, True, None, "train")
            seconds = time.perf_counter() - start
        return packed, seconds, memory


def measure_here(tool: str, path: Path, length: int) -> None:
    """Prepare in this process and print the figures as JSON."""
    if tool == "tunekit":
        packed, seconds, memory = prepare_with_tunekit(path, length)
    else:
        num_proc = psutil.cpu_count() if tool == "trl, all cores" else None
        packed, seconds, memory = prepare_with_trl(path, length, num_proc)
    num_tokens = num_trainable = 0
    for start in range(0, len(packed), 1000):
        part = packed.with_format("arrow")[start : start + 1000]
        num_tokens += len(part["input_ids"].combine_chunks().flatten())
        num_trainable += int((part["labels"].combine_chunks().flatten().to_numpy() != -100).sum())
    figures = {
        "seconds": seconds,
        "rise_bytes": memory.rise_bytes,
        "peak_bytes": memory.peak_bytes,
        "num_tokens": num_tokens,
        "num_trainable": num_trainable,
        "num_sequences": len(packed),
    }
    print(json.dumps(figures))


def measure(tool: str, path: Path, length: int) -> dict[str, float]:
    """Prepare in a process of its own."""
    command = [sys.executable, __file__, "--length", str(length), "--measure", tool, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tool}:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(path: Path, length: int, repeats: int) -> dict[str, dict[str, float]]:
    """The medians of each tool, measured in turn."""
    found: dict[str, list[dict[str, float]]] = {tool: [] for tool in TOOLS}
    for _ in range(repeats):
        for tool, runs in found.items():
            runs.append(measure(tool, path, length))
    return {
        tool: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for tool, runs in found.items()
    }


def main() -> None:
    """Measure both tools, print the table, and with `--save` keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="chats in the corpus (100,000)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a packed sequence (1024)")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each tool (1)")
    parser.add_argument("--large", type=float, help="also prepare a file of so many bytes, with tunekit only")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--measure", nargs=2, metavar=("TOOL", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure_here(args.measure[0], Path(args.measure[1]), args.length)
        return
    kept: dict[str, Any] = {}
    console = Console(width=130)
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        path = Path(folder) / "chats.jsonl"
        if args.rows:
            write_chats(path, args.rows)
            figures = kept["figures"] = compare(path, args.length, args.repeats)
            kept |= {"num_rows": args.rows, "size_bytes": path.stat().st_size, "repeats": args.repeats}
            console.print(f"{args.rows:,} chats, {path.stat().st_size / 2**20:,.0f} MiB", table_of(figures))
        if args.large:
            write_chats(path, sys.maxsize, args.large)
            large = measure("tunekit", path, args.length)
            kept["large"] = {"size_bytes": path.stat().st_size, **large}
            console.print(
                f"{path.stat().st_size / 1e9:.2f} GB: {large['seconds']:.0f} s, "
                f"{large['num_tokens'] / large['seconds']:,.0f} tokens/s, {large['num_tokens']:,.0f} tokens, "
                f"peak {large['peak_bytes'] / 2**20:,.0f} MiB in all"
            )
    if args.save:
        RESULTS.write_text(json.dumps({**circumstances(PACKAGES), **kept}, indent=2) + "\n")
        print(RESULTS.relative_to(ROOT))


def table_of(figures: dict[str, dict[str, float]]) -> Table:
    """The figures of all tools, and how they compare with tunekit's."""
    table = Table("", "seconds", "tokens/s", "peak memory", "tokens", "trained", "sequences", "times tunekit")
    for tool, found in figures.items():
        table.add_row(
            tool,
            f"{found['seconds']:.1f}",
            f"{found['num_tokens'] / found['seconds']:,.0f}",
            f"{found['rise_bytes'] / 2**20:,.0f} MiB",
            f"{found['num_tokens']:,.0f}",
            f"{found['num_trainable']:,.0f}",
            f"{found['num_sequences']:,.0f}",
            f"{found['seconds'] / figures['tunekit']['seconds']:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
