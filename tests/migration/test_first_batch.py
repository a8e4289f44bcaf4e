"""The recipe of a TRL configuration trains on the tokens that TRL's own command trains on, in its first step."""

import importlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Trainer
from trl import GRPOTrainer

import tunekit
from tests.tiny import save_jsonl
from tests.training.watching import micro_batches, seeing
from tunekit.methods.run_trainer import RunTrainer
from tunekit.migration.migration import migrate

pytestmark = pytest.mark.slow

STEP = {
    "model_name_or_path": "model", "dataset_name": "rows", "output_dir": "out", "max_steps": 1, "learning_rate": 1e-3,
    "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
}  # fmt: skip
NUM_ROWS = 24


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Rows of a kind, of different lengths."""
    rows: list[dict[str, Any]] = []
    for n in range(NUM_ROWS):
        good, bad = "good " * (1 + n % 3) + str(n), "bad " * (1 + n % 4) + str(n)
        pair = {"prompt": [user(f"Question {n}")], "chosen": [assistant(good)], "rejected": [assistant(bad)]}
        rows.append(
            {
                "chats": {
                    "messages": [user(f"What is {n} + {n}?"), assistant(str(2 * n)), user("So?"), assistant(good)]
                },
                "texts": {"text": f"Once upon {n} times " * (1 + n % 6)},
                "completions": {"prompt": f"Question {n}: ", "completion": good},
                "answers": {"prompt": [user(f"Question {n}")], "completion": [assistant(good)]},
                "pairs": pair,
                "text pairs": {"prompt": f"Question {n}: ", "chosen": good, "rejected": bad},
                "whole pairs": {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")},
                "labels": {
                    "prompt": pair["prompt"],
                    "completion": pair["chosen" if n % 2 else "rejected"],
                    "label": n % 2 == 1,
                },
                "prompts": {"prompt": pair["prompt"], "solution": good},
            }[kind]
        )
    return rows


CONFIGS: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "chats": ("sft", "chats", {"max_length": 128}, ["data.loss_on=all"]),
    "chats, assistant only": ("sft", "chats", {"max_length": 128, "assistant_only_loss": True}, []),
    "chats, truncated": ("sft", "chats", {"max_length": 24}, ["data.loss_on=all"]),
    "chats, packed": ("sft", "chats", {"max_length": 96, "packing": True}, ["data.loss_on=all"]),
    "texts": ("sft", "texts", {"max_length": 128, "dataset_text_field": "text"}, []),
    "completions": ("sft", "completions", {"max_length": 64}, []),
    "completions, whole": ("sft", "completions", {"max_length": 64, "completion_only_loss": False}, []),
    "DPO": ("dpo", "pairs", {"max_length": 64}, []),
    "DPO of texts": ("dpo", "text pairs", {"max_length": 64}, []),
    "DPO of whole chats": ("dpo", "whole pairs", {"max_length": 64}, []),
    "KTO": (
        "kto",
        "labels",
        {"max_length": 64, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 1},
        [],
    ),
    "reward": ("reward", "whole pairs", {"max_length": 64}, []),
    "GRPO": (
        "grpo",
        "prompts",
        {"num_generations": 3, "max_completion_length": 8, "reward_funcs": ["accuracy_reward"]},
        [],
    ),
}
"""Command, rows and keys of configurations, and the changes of the recipe that their reports name."""


def documents(batch: dict[str, torch.Tensor]) -> list[str]:
    """The rows of a batch without padding, as text; documents of a pack apart.

    The label of a document's first token is left out: no token precedes it that could be trained to give it.
    """
    if "prompt_ids" in batch:
        return [
            str(ids[mask.bool()].tolist()) for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
    rows = []
    for place, ids in enumerate(batch["input_ids"]):
        positions = batch.get("position_ids", torch.ones_like(batch["input_ids"]))[place]
        there = batch["attention_mask"][place].bool() if "attention_mask" in batch else torch.ones_like(ids).bool()
        starts = [0, *(positions[there] == 0).nonzero()[:, 0].tolist()[1:], int(there.sum())]
        of_row = {"input_ids": ids[there]}
        of_row |= {name: batch[name][place][there] for name in ("labels", "completion_mask") if name in batch}
        for start, end in pairwise(starts):
            document = {name: value[start + (name != "input_ids") : end].tolist() for name, value in of_row.items()}
            if "label" in batch:
                unrelated = batch["KL_input_ids"][place][batch["KL_attention_mask"][place].bool()]
                document |= {"label": bool(batch["label"][place]), "unrelated": unrelated.tolist()}
            rows.append(str(document))
    return rows


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(tunekit.__file__).parent / "models" / "pico", "model")
    return tmp_path


@contextmanager
def first_step(trainer: type, command: str) -> Iterator[list[dict[str, torch.Tensor]]]:
    """The micro-batches that are trained on within it; of GRPO the scored completions."""
    if command == "grpo":
        batches: list[dict[str, torch.Tensor]] = []
        with seeing(GRPOTrainer, "_generate_and_score_completions", lambda _, scored: batches.append(scored)):
            yield batches
        return
    with micro_batches(trainer) as batches:
        yield batches


def both(
    command: str, kind: str, more: dict[str, Any], changes: Sequence[str] = ()
) -> tuple[Any, list[str], list[str]]:
    """The report of a configuration, and the rows of the first step of TRL's command and of the recipe."""
    Path("rows").mkdir()
    save_jsonl(Path("rows/train.jsonl"), rows_of(kind))
    Path("config.yaml").write_text(yaml.safe_dump({**STEP, **more}))
    script = importlib.import_module(f"trl.scripts.{command}")
    with first_step(Trainer, command) as theirs:
        script.main(*script.make_parser().parse_args_and_config(["--config", "config.yaml"]))
    report = migrate("config.yaml", tool="trl", arguments=["trl", command])
    with first_step(RunTrainer, command) as ours:
        tunekit.train(report.recipe, ["output.sample_prompts=[]", *changes])
    rows = [sorted(row for batch in batches for row in documents(batch)) for batches in (theirs, ours)]
    return report, *rows


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_step_has_the_tokens_and_labels_of_trls(folder, name):
    command, kind, more, changes = CONFIGS[name]
    report, theirs, ours = both(command, kind, more, changes)
    assert theirs == ours and len(ours) >= 6
    assert {change.partition("=")[0] for change in changes} <= {line.remedy for line in report.different}


DIFFERENT = {
    "texts that are too long": ("texts", {"max_length": 32, "dataset_text_field": "text"}, "max_length"),
    "answers with what the template writes after them": ("answers", {"max_length": 64}, "completion_only_loss"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_is_in_the_report(folder, name):
    kind, more, key = DIFFERENT[name]
    report, theirs, ours = both("sft", kind, more)
    assert theirs != ours
    assert key in {line.key for line in report.different}
