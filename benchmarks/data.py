"""From a file of chats to packed arrays that are ready to train on: tunekit beside TRL's SFTTrainer.

    python benchmarks/data.py [--rows N] [--length TOKENS] [--save]

Both read the same generated JSONL, mask all but the assistant's turns and pack to the same length, with pico's
tokenizer and chat template, each in a process of its own with an empty cache. TRL runs twice: as it comes, with one
process, and with `dataset_num_proc` set to the cores. Imports and TRL's building of the trainer around the model are
not counted: the clock starts before the file is read and stops when the packed rows are there. Peak memory is the
resident memory of the process and its children, looked at every 50 ms, less what it was when the clock started.
"""

import argparse
import json
import random
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

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "data.json"
PICO = ROOT / "tunekit" / "model" / "pico"
WORDS = (ROOT / "examples" / "data" / "tales.txt").read_text(encoding="utf-8").split()


class PeakMemory:
    """Most resident bytes of this process and its children while the block runs, above those at its start."""

    def __enter__(self) -> "PeakMemory":
        self._process = psutil.Process()
        self._start = self.peak_bytes = self._resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak_bytes = max(self.peak_bytes, self._resident()) - self._start

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, self._resident())

    def _resident(self) -> int:
        total = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total


def write_chats(path: Path, num_rows: int) -> None:
    """Conversations of one to four exchanges, 10 to 80 words a turn."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as stream:
        for _ in range(num_rows):
            turns: list[dict[str, str]] = []
            for _ in range(rng.randint(1, 4)):
                for role in ("user", "assistant"):
                    turns.append({"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(10, 80)))})
            stream.write(json.dumps({"messages": turns}) + "\n")


def prepare_with_tunekit(path: Path, length: int) -> Any:
    """Packed rows, through the functions that a run calls, without the cache."""
    from tunekit.data.load import load_rows
    from tunekit.data.pack import pack
    from tunekit.data.tokenize import tokenize
    from tunekit.model.load import load_tokenizer
    from tunekit.recipe.schema import DataSource, ModelSection

    tokenizer = load_tokenizer(ModelSection(path="pico"))
    import datasets  # noqa: F401
    import trl

    assert trl.pack_dataset
    with PeakMemory() as memory:
        start = time.perf_counter()
        rows = load_rows(DataSource(path=str(path)), key="data.train", format="auto", default_split="train")
        packed = pack(tokenize(rows, tokenizer, max_length=length, loss_on="assistant").dataset, length)
        seconds = time.perf_counter() - start
    return packed, seconds, memory.peak_bytes


def prepare_with_trl(path: Path, length: int, num_proc: int | None) -> Any:
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
        return packed, seconds, memory.peak_bytes


def measure_here(tool: str, path: Path, length: int) -> None:
    """Prepare in this process and print the figures as JSON."""
    if tool == "tunekit":
        packed, seconds, peak = prepare_with_tunekit(path, length)
    else:
        packed, seconds, peak = prepare_with_trl(path, length, psutil.cpu_count() if tool == "trl, all cores" else None)
    ids = packed.with_format("arrow")[:]
    counts = {
        "num_tokens": len(ids["input_ids"].combine_chunks().flatten()),
        "num_trainable": sum(label != -100 for label in ids["labels"].combine_chunks().flatten().to_numpy()),
        "num_sequences": len(packed),
    }
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, **{k: int(v) for k, v in counts.items()}}))


def main() -> None:
    """Measure both tools, print the table, and with `--save` keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="chats in the corpus (100,000)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a packed sequence (1024)")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--measure", nargs=2, metavar=("TOOL", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure_here(args.measure[0], Path(args.measure[1]), args.length)
        return
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        write_chats(path, args.rows)
        for tool in ("tunekit", "trl", "trl, all cores"):
            command = [sys.executable, __file__, "--length", str(args.length), "--measure", tool, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{tool}:\n{done.stderr}")
            figures[tool] = json.loads(done.stdout.splitlines()[-1])
        size = path.stat().st_size
    table = Table("", "seconds", "tokens/s", "peak memory", "tokens", "trained", "sequences", "times tunekit")
    for tool, found in figures.items():
        table.add_row(
            tool,
            f"{found['seconds']:.1f}",
            f"{found['num_tokens'] / found['seconds']:,.0f}",
            f"{found['peak_bytes'] / 2**20:,.0f} MiB",
            f"{found['num_tokens']:,}",
            f"{found['num_trainable']:,}",
            f"{found['num_sequences']:,}",
            f"{found['seconds'] / figures['tunekit']['seconds']:.2f}",
        )
    Console(width=130).print(f"{args.rows:,} chats, {size / 2**20:.0f} MiB", table)
    if args.save:
        from startup import circumstances

        RESULTS.write_text(json.dumps({**circumstances(), "num_rows": args.rows, "figures": figures}, indent=2) + "\n")
        print(RESULTS.relative_to(ROOT))


if __name__ == "__main__":
    main()
