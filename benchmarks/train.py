"""How fast whole steps of training are: tunekit with its own kernels, torch's and liger-kernel's, and TRL alone.

    python -m benchmarks.train [--only WORDS ...] [--save]
    python -m benchmarks.train --dry-run            a tiny model, also on a CPU

Models of random weights in the shapes of Llama 3.2 1B and 3B and Llama 3.1 8B; full fine-tuning, LoRA and QLoRA of
rank 16; documents of random tokens and lengths, packed into rows of 2048 or 8192. Each run is a process of its own,
and ends after its last step with nothing saved. tunekit's go from recipe to plan to run as every other; TRL's
`SFTTrainer` gets the same documents, and the plan's micro-batch, accumulation and gradient checkpointing, so that only
what computes differs. Counted are the tokens that carry no padding, as both log them, after the first steps. Model
FLOP/s are by the plan's operations for a token, as a share of the bfloat16 peak that the device's sheet has. Beside
what was measured stands what the plan says of memory and speed. What does not fit or cannot be run is kept with the
reason.
"""

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.circumstances import circumstances
from benchmarks.kernels import RESULTS, versions

ROOT = Path(__file__).parents[1]
RUNNERS = ("auto", "torch", "liger", "trl")
NUM_WARM = 3
NUM_STEPS = 10
TOKENS_OF_A_STEP = 32768
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
}
"""Of Llama models, with the vocabulary and the 8 heads of keys and values that all of them have but the tiny one."""


@dataclass(frozen=True)
class Case:
    """What is trained, and by whom."""

    shape: str
    adapter: str
    max_length: int
    runner: str
    overrides: tuple[str, ...] = ()
    """Changes to the recipe."""
    method: str = "sft"

    @property
    def name(self) -> str:
        """In words."""
        what = "" if self.method == "sft" else f"{self.method} "
        return " ".join([f"{what}{self.shape} {self.adapter} {self.max_length} {self.runner}", *self.overrides])

    @property
    def rows_of_a_step(self) -> int:
        """Packed rows of one update."""
        return TOKENS_OF_A_STEP // self.max_length if self.shape != "tiny" else 4


def case_of(row: dict[str, Any]) -> Case:
    """The case that a row is of."""
    words = {field.name: row[field.name] for field in fields(Case)}
    return Case(**{**words, "overrides": tuple(words["overrides"])})


def save_model(shape: str, folder: Path) -> None:
    """Save a Llama of random weights in bfloat16, with a tokenizer of bytes."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        **SHAPES[shape],
        num_key_value_heads=2 if shape == "tiny" else 8,
        vocab_size=len(tokenizer) if shape == "tiny" else 128256,
        tie_word_embeddings=shape in ("1b", "3b"),
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_documents(file: Path, num_tokens: int, case: Case) -> None:
    """Write documents of random tokens: most of them short, some as long as a row. Of other methods, random letters."""
    chance = random.Random(0)

    def letters(share: float) -> str:
        return "".join(chance.choices(string.ascii_lowercase, k=int(share * case.max_length)))

    with file.open("w", encoding="utf-8") as lines:
        while num_tokens > 0:
            length = min(case.max_length, int(chance.lognormvariate(6.0, 1.0)) + 16)
            row: dict[str, Any]
            if case.method == "sft":
                row = {"input_ids": [chance.randrange(256) for _ in range(length)]}
            elif case.method == "dpo":
                row = {"prompt": letters(0.4), "chosen": letters(0.5), "rejected": letters(0.5)}
            else:
                row = {"prompt": letters(0.4)}
            lines.write(json.dumps(row) + "\n")
            num_tokens -= length if case.method == "sft" else case.max_length


def recipe_of(case: Case, folder: Path, num_steps: int) -> dict[str, Any]:
    """The recipe of a case; of TRL's, the one whose plan it follows."""
    kernels = "torch" if case.runner == "trl" else case.runner
    data: dict[str, Any] = {"train": str(folder / "rows.jsonl"), "max_length": case.max_length}
    method: dict[str, Any] = {"type": case.method}
    if case.method == "sft":
        data |= {"packing": True, "loss_on": "all"}
    elif case.method == "grpo":
        method |= {"rewards": [{"type": "regex", "pattern": "[aeiou]"}], "num_generations": 4}
        method |= {"max_completion_length": case.max_length // 2}
    return {
        "model": {"path": str(folder / "model"), "kernels": kernels},
        "data": data,
        "method": method,
        "adapter": {"type": case.adapter},
        "train": {
            # It ends before the last one, which would be followed by a checkpoint.
            "max_steps": num_steps + 1,
            "save_steps": num_steps + 1,
            "global_batch_size": case.rows_of_a_step,
            "learning_rate": 1e-5,
        },
        "output": {"dir": str(folder / "run"), "sample_prompts": []},
    }


def end(folder: Path, found: dict[str, Any]) -> NoReturn:
    """Write what was found, and end this process without what a run does after its steps."""
    import torch

    if torch.cuda.is_available():
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    (folder / "found.json").write_text(json.dumps({"peak_bytes": None, **found}), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def by_tunekit(case: Case, folder: Path, num_steps: int, of_plan: dict[str, Any]) -> None:
    """Train by tunekit; its events have the tokens and the times."""
    import tunekit

    logs: list[tuple[float, int]] = []
    fused: dict[str, Any] = {}

    def on_event(event: Any) -> None:
        if event["event"] == "fused":
            fused["fused"] = event["message"]
        if event["event"] == "log":
            logs.append((event["time"], event["num_tokens"]))
            if len(logs) == num_steps:
                end(folder, {**of_plan, **fused, "logs": logs})

    tunekit.train(recipe_of(case, folder, num_steps), case.overrides, on_event=on_event)


def by_trl(case: Case, folder: Path, num_steps: int, of_plan: dict[str, Any], plan: Any) -> None:
    """Train by TRL's SFTTrainer as it comes, in the batches of a plan."""
    import time

    import torch
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, BitsAndBytesConfig, TrainerCallback
    from transformers.utils import is_flash_attn_2_available
    from trl import SFTConfig, SFTTrainer

    seen = []
    init: dict[str, Any] = {}

    class Clock(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            seen.append((time.time(), logs["num_tokens"]))
            if len(seen) == num_steps:
                end(folder, {**of_plan, "logs": seen, "kernels": "trl", **init})

    on_cuda = torch.cuda.is_available()
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    # Weights that are trained are kept in float32, as tunekit keeps them.
    init["dtype"] = "float32" if case.adapter == "full" else plan.dtype
    # What keeps packed documents apart without a mask of all pairs has to be installed beside TRL.
    init["attn_implementation"] = "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=plan.schedule.num_steps,
        per_device_train_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.gradient_accumulation_steps,
        gradient_checkpointing=plan.gradient_checkpointing,
        bf16=plan.autocast,
        use_cpu=not on_cuda,
        packing=True,
        max_length=case.max_length,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        model_init_kwargs=init | ({"quantization_config": quantised} if case.adapter == "qlora" else {}),
        disable_tqdm=True,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(
        model=str(folder / "model"),
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "rows.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        peft_config=None if case.adapter == "full" else lora,
        callbacks=[Clock()],
    )
    trainer.train()


def play(case: Case, folder: Path, num_steps: int) -> None:
    """Plan a case and run it in this process, once there is a line to read: libraries are imported before."""
    import trl.trainer.sft_trainer  # noqa: F401

    import tunekit
    import tunekit.training.train
    from tunekit.api import verbs

    # Nothing is saved, so that no room is needed.
    verbs.check_disk = lambda *_: None
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        plan = tunekit.plan(recipe_of(case, folder, num_steps), case.overrides)
        speed, memory = plan.speed, plan.memory
        of_plan = {
            "planned": {
                "total_bytes": memory.total_bytes,
                "tensor_bytes": memory.tensor_bytes,
                "parts": dict(memory.parts),
                "phase": memory.phase,
                "tokens_per_second": speed and speed.tokens_per_second and speed.tokens_per_second.model_dump(),
            },
            "flops_per_token": speed and speed.model_flops_per_token,
            "peak_flops_per_second": speed and speed.peak_flops_per_second,
            "micro_batch_size": plan.micro_batch_size,
            "gradient_checkpointing": plan.gradient_checkpointing,
            "attn_implementation": plan.attn_implementation,
            "optim": plan.recipe.train.optimizer,
            "kernels": plan.kernels,
            "torch_compile": plan.torch_compile,
        }
        if case.runner == "trl":
            by_trl(case, folder, num_steps, of_plan, plan)
        else:
            by_tunekit(case, folder, num_steps, of_plan)
    except tunekit.TunekitError as error:
        end(folder, {"left_out": str(error)})


def measured(
    case: Case,
    model: Path,
    num_steps: int,
    num_warm: int,
    turn: AbstractContextManager[Any] | None = None,
    seconds: float | None = None,
) -> dict[str, Any]:
    """Return a case's row, as a process of its own measured it.

    Args:
        case: The case.
        model: Its model.
        num_steps: Steps to make.
        num_warm: How many of them are not counted.
        turn: Held while the device is used; before, the libraries are imported.
        seconds: How long it may take, once it is its turn.
    """
    with tempfile.TemporaryDirectory(dir=model.parent) as name, (Path(name) / "log").open("w+b") as log:
        folder = Path(name)
        (folder / "model").symlink_to(model)
        tokens = case.rows_of_a_step * case.max_length
        save_documents(folder / "rows.jsonl", int(1.3 * tokens * (num_steps + 1)), case)
        command = [sys.executable, "-m", "benchmarks.train", "--play", json.dumps(asdict(case)), name, str(num_steps)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=log)
        with process, turn or nullcontext():
            assert process.stdout is not None
            process.stdout.readline()
            try:
                process.communicate(b"go\n", timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                return {**asdict(case), "left_out": f"not at its end after {seconds:.0f} s"}
        file = folder / "found.json"
        if not file.exists():
            log.seek(0)
            error = log.read().decode(errors="replace")[-3000:]
            return {**asdict(case), "left_out": f"exit status {process.returncode}: {error}"}
        found = json.loads(file.read_text(encoding="utf-8"))
    if "left_out" in found:
        return {**asdict(case), "left_out": found["left_out"]}
    logs = found.pop("logs")
    (began, tokens_before), (ended, tokens_after) = logs[num_warm - 1], logs[-1]
    rate = (tokens_after - tokens_before) / (ended - began)
    flops, peak = found.pop("flops_per_token"), found.pop("peak_flops_per_second")
    return {
        **asdict(case),
        **found,
        "tokens_per_second": rate,
        "step_seconds": (ended - began) / (len(logs) - num_warm),
        "mfu": rate * flops / peak if flops and peak else None,
    }


def shown(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    name = f"{row['method']:4} {row['shape']:5} {row['adapter']:6} {row['max_length']:5} {row['runner']:6}"
    name = " ".join([name, *row["overrides"]])
    if "left_out" in row:
        return f"{name} left out: {row['left_out'].strip().splitlines()[-1]}"
    planned = row["planned"]["tensor_bytes"] / 2**30
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:7.1f} GiB ({planned:.1f} planned)"
    mfu = "" if row["mfu"] is None else f"{row['mfu']:6.1%} MFU"
    return f"{name} {row['tokens_per_second']:10.0f} tokens/s {mfu} {peak}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and with `--save` keep it; 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="cases that have all of these words: 8b lora 2048 auto")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/train-DEVICE.json")
    parser.add_argument("--dry-run", action="store_true", help="train a tiny model for three steps")
    parser.add_argument("--play", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.play:
        case, folder, num_steps = case_of(json.loads(args.play[0])), Path(args.play[1]), int(args.play[2])
        play(case, folder, num_steps)
        return 1
    import torch

    shapes, lengths = (("tiny",), (64,)) if args.dry_run else (("1b", "3b", "8b"), (2048, 8192))
    every = [
        Case(shape, adapter, length, runner)
        for shape in shapes
        for adapter in ("full", "lora", "qlora")
        for length in lengths
        for runner in RUNNERS
    ]
    wanted = [case for case in every if set(args.only) <= set(case.name.split())]
    if not torch.cuda.is_available() and not args.dry_run:
        print("There is no accelerator here. On one, this would be measured:")
        print(*(f"  {case.name}" for case in wanted), sep="\n")
        return 2
    steps, warm = (3, 1) if args.dry_run else (NUM_STEPS, NUM_WARM)
    rows = []
    for shape in dict.fromkeys(case.shape for case in wanted):
        with tempfile.TemporaryDirectory(prefix="tunekit-train-") as folder:
            save_model(shape, Path(folder) / "model")
            for case in wanted:
                if case.shape == shape:
                    rows.append(measured(case, Path(folder) / "model", steps, warm))
                    print(shown(rows[-1]), flush=True)
    if args.save and not args.dry_run:
        device = torch.cuda.get_device_name()
        report = {**circumstances(()), "device": device, "versions": versions(), "rows": rows}
        path = RESULTS / f"train-{device.lower().replace(' ', '-')}.json"
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
