"""Hold the first step of recipes that configurations of other tools become against those tools' own first step.

    python -m benchmarks.first_batch TOOL PYTHON [--save]

TOOL is llama-factory or axolotl; PYTHON is an interpreter with it, as both need other versions than tunekit. Each
configuration trains pico on the same rows there and here, by the tool's own command and by the recipe; the token ids
and labels of all rows of a step are compared, without padding, documents of a pack apart, and without the label of a
row's first token, which nothing predicts. `labels` says how many rows have other ones, and why. TRL's configurations
are held against TRL in `tests/migration/test_first_batch.py`.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml

import tunekit
from benchmarks.circumstances import circumstances
from tests.tiny import save_jsonl
from tests.training.watching import micro_batches
from tunekit.methods.run_trainer import RunTrainer
from tunekit.migration.migration import migrate
from tunekit.migration.report import TOOLS as NAMES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "first_batch.md"
PACKAGES = ("torch", "transformers", "trl")
PICO = ROOT / "tunekit" / "models" / "pico"
PAD_TOKEN, END_TOKEN = 0, 2
NUM_ROWS = 24

THEIRS = """\
import importlib.metadata, json, sys
import torch, yaml
from transformers import Trainer

batches, original = [], Trainer.training_step

def step(self, model, inputs, *args, **kwargs):
    batches.append({{name: value.tolist() for name, value in inputs.items() if torch.is_tensor(value)}})
    return original(self, model, inputs, *args, **kwargs)

Trainer.training_step = step
torch.set_num_threads(1)
if __name__ == "__main__":
    {command}
    versions = {{name: importlib.metadata.version(name) for name in ("{package}", "transformers", "trl")}}
    json.dump({{"versions": versions, "batches": batches}}, open("theirs.json", "w"))
"""


def _turn(speaker: str, text: str) -> dict[str, str]:
    return {"from": speaker, "value": text}


def _chats() -> dict[str, list[dict[str, Any]]]:
    """Rows of instructions and of chats, by name; answers have different lengths."""
    good = _answers("good")
    return {
        "alpaca": [
            {"instruction": f"What is {n}?", "input": "" if n % 3 else "Hm", "output": good[n]} for n in range(NUM_ROWS)
        ],
        "chats": [
            {
                "conversations": [
                    _turn("human", f"What is {n}?"),
                    _turn("gpt", f"It is {n}."),
                    _turn("human", "So?"),
                    _turn("gpt", good[n]),
                ]
            }
            for n in range(NUM_ROWS)
        ],
    }


def _answers(word: str) -> list[str]:
    return [f"{word} " * (1 + n % 3) + str(n) for n in range(NUM_ROWS)]


def _write_for_llama_factory(folder: Path) -> None:
    """Write the rows and `dataset_info.json`."""
    good, bad = _answers("good"), _answers("bad")
    sets = {
        **_chats(),
        "pairs": [
            {
                "conversations": [_turn("human", f"Question {n}")],
                "chosen": _turn("gpt", good[n]),
                "rejected": _turn("gpt", bad[n]),
            }
            for n in range(NUM_ROWS)
        ],
    }
    columns = {"messages": "conversations"}
    info: dict[str, Any] = {name: {"file_name": f"{name}.json"} for name in sets}
    info["chats"] |= {"formatting": "sharegpt", "columns": columns}
    answers = {"chosen": "chosen", "rejected": "rejected"}
    info["pairs"] |= {"formatting": "sharegpt", "ranking": True, "columns": columns | answers}
    for name, rows in {**sets, "dataset_info": info}.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


def _write_for_axolotl(folder: Path) -> None:
    """Write the rows, a file for each kind."""

    def said(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    good, bad = _answers("good"), _answers("bad")
    roles = {"human": "user", "gpt": "assistant"}
    chats = _chats()
    messages = [[said(roles[turn["from"]], turn["value"]) for turn in row["conversations"]] for row in chats["chats"]]
    sets = {
        **chats,
        "messages": [{"dialog": [said("system", "Be brief."), *chat]} for chat in messages],
        "marked": [
            {"messages": [{**turn, "train": place == 3} for place, turn in enumerate(chat)]} for chat in messages
        ],
        "texts": [{"text": f"Once upon {n} times " * (1 + n % 6)} for n in range(NUM_ROWS)],
        "pairs": [
            {
                "conversation": [said("user", f"Question {n}")],
                "chosen": said("assistant", good[n]),
                "rejected": said("assistant", bad[n]),
            }
            for n in range(NUM_ROWS)
        ],
    }
    for name, rows in sets.items():
        save_jsonl(folder / f"{name}.jsonl", rows)


@dataclass(frozen=True)
class Tool:
    """Another tool: its command, the rows that it trains on, and its configurations.

    Args:
        package: Its distribution.
        command: Statements that train `config.yaml`.
        write_rows: Writes the rows into the folder `data`.
        step: Keys of all configurations.
        configs: Further keys of each.
        reasons: Explanations of differences, for the page of results.
    """

    package: str
    command: str
    write_rows: Callable[[Path], None]
    step: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Any]]
    reasons: tuple[str, ...]


LLAMA_FACTORY = Tool(
    "llamafactory",
    'from llamafactory.train.tuner import run_exp; run_exp(yaml.safe_load(open("config.yaml")))',
    _write_for_llama_factory,
    {
        "model_name_or_path": "model", "do_train": True, "stage": "sft", "finetuning_type": "full",
        "template": "chatml", "dataset_dir": "data", "cutoff_len": 128, "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2, "max_steps": 1, "learning_rate": 1e-3, "output_dir": "out",
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False,
        "disable_gradient_checkpointing": True,
    },
    {
        "alpaca rows": {"dataset": "alpaca"},
        "chats": {"dataset": "chats"},
        "chats, last answer": {"dataset": "chats", "mask_history": True},
        "chats, whole": {"dataset": "chats", "train_on_prompt": True},
        "chats, truncated by turns": {"dataset": "chats", "cutoff_len": 32},
        "DPO": {"dataset": "pairs", "stage": "dpo"},
    },
    (),
)  # fmt: skip


def _rows(name: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"datasets": [{"path": f"data/{name}.jsonl", "ds_type": "json", "type": kind, **more}]}


SHAREGPT = _rows(
    "chats",
    "chat_template",
    field_messages="conversations",
    message_property_mappings={"role": "from", "content": "value"},
)
MESSAGES = _rows("messages", "chat_template", field_messages="dialog")
PAIRS = _rows("pairs", "chat_template.default", field_messages="conversation")

AXOLOTL = Tool(
    "axolotl",
    "from axolotl.cli.train import do_cli; do_cli('config.yaml')",
    _write_for_axolotl,
    {
        "base_model": "model", "sequence_len": 128, "micro_batch_size": 6, "gradient_accumulation_steps": 4,
        "max_steps": 1, "learning_rate": 1e-3, "optimizer": "adamw_torch", "lr_scheduler": "cosine",
        "output_dir": "out", "dataset_prepared_path": "prepared", "val_set_size": 0, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "save_strategy": "no", "dataset_num_proc": 1,
    },
    {
        "chats of ShareGPT, chatml": {**SHAREGPT, "chat_template": "chatml"},
        "chats, the model's template": MESSAGES,
        "chats, packed": {**MESSAGES, "sample_packing": True},
        "chats, train_on_inputs": {**MESSAGES, "train_on_inputs": True},
        "chats, every end token": _rows("messages", "chat_template", field_messages="dialog", train_on_eos="all"),
        "chats, marked turns": _rows("marked", "chat_template", message_field_training="train"),
        "chats, too long": {**MESSAGES, "sequence_len": 48},
        "chats, truncated": {**MESSAGES, "sequence_len": 48, "excess_length_strategy": "truncate"},
        "alpaca rows": _rows("alpaca", "alpaca"),
        "alpaca rows, train_on_inputs": {**_rows("alpaca", "alpaca"), "train_on_inputs": True},
        "alpaca rows, packed": {**_rows("alpaca", "alpaca"), "sample_packing": True},
        "texts": {**_rows("texts", "completion"), "sequence_len": 32, "gradient_accumulation_steps": 6},
        "DPO": {**PAIRS, "rl": "dpo"},
    },
    (
        "train_on_inputs: of chats Axolotl trains on the contents and end tokens of all turns, the recipe "
        "(`data.loss_on: all`) also on their headers and line breaks; `data.loss_on` has no value between.",
        "train_on_eos: `all` also trains on the end tokens of turns whose contents are not trained on; the recipe "
        "trains on those of answers only.",
        "texts: of a text that is too long, 12 further sequences begin with the next token in Axolotl; in tunekit they "
        "begin with the last token again, so that each token is predicted once.",
        "DPO: Axolotl strips the line break that ChatML writes after the end token of an answer; the recipe "
        "keeps it, as TRL does.",
    ),
)  # fmt: skip

TOOLS = {"llama-factory": LLAMA_FACTORY, "axolotl": AXOLOTL}

Row = tuple[int, ...]


def documents(batches: list[dict[str, torch.Tensor]]) -> dict[Row, list[Row]]:
    """Labels of documents by their token ids: whether each token is trained on, but for the first one of a row."""
    found: dict[Row, list[Row]] = defaultdict(list)
    for batch in batches:
        learned = batch["completion_mask"].bool() if "completion_mask" in batch else batch["labels"] != -100
        for place, ids in enumerate(batch["input_ids"]):
            there = batch["attention_mask"][place].bool() if "attention_mask" in batch else ids != PAD_TOKEN
            positions = batch["position_ids"][place][there] if "position_ids" in batch else torch.ones(int(there.sum()))
            starts = [0, *(positions == 0).nonzero()[:, 0].tolist(), int(there.sum())]
            for start, end in pairwise(sorted(set(starts))):
                labels = learned[place][there][start:end].long().tolist()
                found[tuple(ids[there][start:end].tolist())].append((0 if start == 0 else labels[0], *labels[1:]))
    return found


def _kind(ids: Row, expected: Row, learned: Row, places: list[int]) -> str:
    """Name the tokens at places of a row that are trained on there and not here, or the other way round."""
    if all(place and ids[place - 1] == END_TOKEN and expected[place] for place in places):
        return "the newline after an answer's end"
    if all(ids[place] == END_TOKEN and expected[place] for place in places):
        return "end tokens of turns that are not trained"
    if places == [0]:
        return "the first token of a packed document"
    return "tokens that only the recipe trains on" if all(learned[place] for place in places) else "otherwise"


def differences(pairs: list[tuple[Row, Row, Row]]) -> str:
    """Describe the rows of equal ids whose labels differ; an empty text where none do."""
    num: dict[str, int] = defaultdict(int)
    for ids, expected, learned in pairs:
        places = [place for place, pair in enumerate(zip(expected, learned, strict=True)) if pair[0] != pair[1]]
        if places:
            num[_kind(ids, expected, learned, places)] += 1
    return "; ".join(f"{count} rows: {words}" for words, count in num.items())


def compare(tool: str, name: str, python: str) -> tuple[dict[str, str], str]:
    """Train a configuration in both tools; return the versions of the other and a line of the table."""
    rival = TOOLS[tool]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        shutil.copytree(PICO, "model")
        Path("data").mkdir()
        rival.write_rows(Path("data"))
        Path("config.yaml").write_text(yaml.safe_dump({**rival.step, **rival.configs[name]}))
        Path("theirs.py").write_text(THEIRS.format(command=rival.command, package=rival.package))
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        command = [python, "-W", "ignore", "theirs.py"]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {NAMES[tool]} failed\n{done.stderr[-3000:]}")
        dumped = json.loads(Path("theirs.json").read_text())
        theirs = documents([{key: torch.tensor(value) for key, value in b.items()} for b in dumped["batches"]])
        report = migrate("config.yaml", tool=tool)
        with micro_batches(RunTrainer) as batches:
            tunekit.train(report.recipe, ["output.sample_prompts=[]"])
    ours = documents(batches)
    num_theirs, num_ours = (sum(map(len, rows.values())) for rows in (theirs, ours))
    same = [
        (row, expected, learned)
        for row, labels in theirs.items()
        for expected, learned in zip(sorted(labels), sorted(ours.get(row, [])), strict=False)
    ]
    ids = "equal" if len(same) == num_ours == num_theirs else f"{len(same)} rows equal"
    longer = {row[:-1]: labels for row, labels in ours.items() if row[-2:-1] == (END_TOKEN,)}
    close = [
        (row, expected, learned[:-1])
        for row, labels in theirs.items()
        for expected, learned in zip(sorted(labels), sorted(longer.get(row, [])), strict=False)
        if row not in ours
    ]
    ids += f", {len(close)} with a line break more here" if close else ""
    ids += f", {num_ours} rows here" if num_ours != num_theirs else ""
    named = ", ".join(dict.fromkeys(line.key for line in report.different)) or "-"
    labels = differences([*same, *close]) or "equal"
    return dumped["versions"], f"| {name} | {num_theirs} | {ids} | {labels} | {named} |"


HEAD = "# First steps of other tools' configurations, and of the recipes that they become\n"


def save(tool: str, theirs: dict[str, str], lines: list[str]) -> None:
    """Replace a tool's section of the page of results; the others remain."""
    about = circumstances(PACKAGES)
    first, *others = theirs.values()
    there = ", ".join(f"{name} {number}" for name, number in zip(PACKAGES[1:], others, strict=True))
    here = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    section = [
        NAMES[tool], "",
        f"`python -m benchmarks.first_batch {tool} PYTHON --save`: {about['date']}, commit {about['commit']}, "
        f"{NAMES[tool]} {first} with {there}; here {here}.", "",
        "| configuration | rows | token ids | labels | reported as different |", "|:--|--:|:--|:--|:--|", *lines,
    ]  # fmt: skip
    reasons = [f"- {reason}" for reason in TOOLS[tool].reasons]
    sections = {part.partition("\n")[0]: part for part in re.split(r"^## ", RESULTS.read_text(), flags=re.M)[1:]}
    sections[NAMES[tool]] = "\n".join([*section, *(["", *reasons] if reasons else [])]) + "\n"
    parts = [sections[NAMES[name]].rstrip("\n") + "\n" for name in TOOLS if NAMES[name] in sections]
    RESULTS.write_text("\n## ".join([HEAD, *parts]))


def main() -> None:
    """Compare all, print, and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tool", choices=list(TOOLS))
    parser.add_argument("python")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--only", nargs="*", help="configurations")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name in arguments.only or TOOLS[arguments.tool].configs:
        versions, line = compare(arguments.tool, name, str(Path(arguments.python).absolute()))
        print(line, flush=True)
        lines.append(line)
    if arguments.save:
        save(arguments.tool, versions, lines)


if __name__ == "__main__":
    main()
