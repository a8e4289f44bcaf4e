"""Hold the first step of recipes that LLaMA-Factory's configurations become against LLaMA-Factory's own.

    python -m benchmarks.first_batch PYTHON [--save]

PYTHON is an interpreter with LLaMA-Factory, which needs other versions than tunekit. Each configuration trains pico on
the same rows there and here; the token ids and labels of all rows of a step are compared, without padding and without
the label of the first token, which nothing predicts. `labels` says how many rows have other ones, and why. TRL's
configurations are held against TRL in `tests/migration/test_first_batch.py`.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml

import tunekit
from benchmarks.circumstances import circumstances
from tests.training.watching import micro_batches
from tunekit.methods.run_trainer import RunTrainer
from tunekit.migration.migration import migrate

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "first_batch.md"
PACKAGES = ("torch", "transformers", "trl")
PICO = ROOT / "tunekit" / "models" / "pico"
END_TOKEN = 2
NUM_ROWS = 24

THEIRS = """\
import importlib.metadata, json, sys
import torch, yaml
from transformers import Trainer

batches, original = [], Trainer.training_step

def step(self, model, inputs, *args, **kwargs):
    batches.append({name: value.tolist() for name, value in inputs.items() if torch.is_tensor(value)})
    return original(self, model, inputs, *args, **kwargs)

Trainer.training_step = step
torch.set_num_threads(1)
from llamafactory.train.tuner import run_exp

run_exp(yaml.safe_load(open("config.yaml")))
json.dump({"version": importlib.metadata.version("llamafactory"), "batches": batches}, open("theirs.json", "w"))
"""

STEP = {
    "model_name_or_path": "model", "do_train": True, "stage": "sft", "finetuning_type": "full", "template": "chatml",
    "dataset_dir": "data", "cutoff_len": 128, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2,
    "max_steps": 1, "learning_rate": 1e-3, "output_dir": "out", "report_to": "none", "save_strategy": "no",
    "use_cpu": True, "bf16": False, "disable_gradient_checkpointing": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "alpaca rows": {"dataset": "alpaca"},
    "chats": {"dataset": "chats"},
    "chats, last answer": {"dataset": "chats", "mask_history": True},
    "chats, whole": {"dataset": "chats", "train_on_prompt": True},
    "chats, truncated by turns": {"dataset": "chats", "cutoff_len": 32},
    "DPO": {"dataset": "pairs", "stage": "dpo"},
}


def write_rows(folder: Path) -> None:
    """Write the rows and `dataset_info.json`."""
    numbers = range(NUM_ROWS)

    def turn(speaker: str, text: str) -> dict[str, str]:
        return {"from": speaker, "value": text}

    good, bad = ([f"{word} " * (1 + n % 3) + str(n) for n in numbers] for word in ("good", "bad"))
    sets = {
        "alpaca": [
            {"instruction": f"What is {n}?", "input": "" if n % 3 else "Hm", "output": good[n]} for n in numbers
        ],
        "chats": [
            {
                "conversations": [
                    turn("human", f"What is {n}?"),
                    turn("gpt", f"It is {n}."),
                    turn("human", "So?"),
                    turn("gpt", good[n]),
                ]
            }
            for n in numbers
        ],
        "pairs": [
            {
                "conversations": [turn("human", f"Question {n}")],
                "chosen": turn("gpt", good[n]),
                "rejected": turn("gpt", bad[n]),
            }
            for n in numbers
        ],
    }
    columns = {"messages": "conversations"}
    info: dict[str, Any] = {name: {"file_name": f"{name}.json"} for name in sets}
    info["chats"] |= {"formatting": "sharegpt", "columns": columns}
    answers = {"chosen": "chosen", "rejected": "rejected"}
    info["pairs"] |= {"formatting": "sharegpt", "ranking": True, "columns": columns | answers}
    folder.mkdir()
    for name, rows in {**sets, "dataset_info": info}.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


Row = tuple[list[int], list[int]]


def rows_of(batches: list[dict[str, torch.Tensor]]) -> list[Row]:
    """Token ids of rows, and whether each of them but the first is trained on; sorted."""
    rows = []
    for batch in batches:
        for place, ids in enumerate(batch["input_ids"]):
            there = batch["attention_mask"][place].bool()
            learned = batch["completion_mask"] if "completion_mask" in batch else batch["labels"] != -100
            rows.append((ids[there].tolist(), learned[place][there].long().tolist()[1:]))
    return sorted(rows)


def differences(pairs: list[tuple[Row, Row]]) -> str:
    """Describe the rows of equal ids whose labels differ; an empty text where none do."""
    num = [0, 0]
    for (ids, expected), (_, learned) in pairs:
        places = [place for place, pair in enumerate(zip(expected, learned, strict=True), 1) if pair[0] != pair[1]]
        if places:
            num[all(ids[place - 1] == END_TOKEN and expected[place - 1] for place in places)] += 1
    words = [f"{num[1]} rows: the newline after an answer's end"] if num[1] else []
    return "; ".join([*words, *([f"{num[0]} rows otherwise"] if num[0] else [])])


def compare(name: str, python: str) -> tuple[str, str]:
    """Train a configuration in both tools; return LLaMA-Factory's version and a line of the table."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(PICO, "model")
        write_rows(Path("data"))
        Path("config.yaml").write_text(yaml.safe_dump({**STEP, **CONFIGS[name]}))
        Path("theirs.py").write_text(THEIRS)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run([python, "-W", "ignore", "theirs.py"], env=environment, check=True, capture_output=True)
        dumped = json.loads(Path("theirs.json").read_text())
        theirs = rows_of([{key: torch.tensor(value) for key, value in batch.items()} for batch in dumped["batches"]])
        report = migrate("config.yaml", tool="llama-factory")
        with micro_batches(RunTrainer) as batches:
            tunekit.train(report.recipe, ["output.sample_prompts=[]"])
    ours = rows_of(batches)
    same = [pair for pair in zip(theirs, ours, strict=True) if pair[0][0] == pair[1][0]]
    ids = "equal" if len(same) == len(ours) else f"{len(same)} rows equal"
    labels = differences(same) or "equal"
    named = ", ".join(line.key for line in report.different) or "-"
    return dumped["version"], f"| {name} | {len(ours)} | {ids} | {labels} | {named} |"


def main() -> None:
    """Compare all, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("python")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name in CONFIGS:
        version, line = compare(name, str(Path(arguments.python).absolute()))
        print(line, flush=True)
        lines.append(line)
    if arguments.save:
        about = circumstances(PACKAGES)
        versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        head = [
            "# First steps of LLaMA-Factory's configurations, and of the recipes that they become", "",
            f"`python -m benchmarks.first_batch PYTHON --save`: {about['date']}, commit {about['commit']}, "
            f"LLaMA-Factory {version}, here {versions}.", "",
            "| configuration | rows | token ids | labels | reported as different |", "|:--|--:|:--|:--|:--|",
        ]  # fmt: skip
        RESULTS.write_text("\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
