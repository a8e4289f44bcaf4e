"""Runs of tunekit next to the same runs of TRL, LLaMA-Factory and Axolotl: start, steps, end, CPU time and memory.

    python -m benchmarks.peers [--tools trl llama-factory axolotl] [--cases full lora packed dpo] [--runs N] [--save]
    python -m benchmarks.peers --environments FOLDER    where the tools are, or are installed to: FOLDER/TOOL

All train the same tiny Llama on the same rows, by their own commands and with what they do by default, in float32 on
all cores of the CPU. The runs take turns, and each waits until the machine is quiet. Optimizer steps are timed by a
hook of torch within their processes; memory is the largest sum of resident sets of all processes, sampled. Ratios are
to the best other tool in the same row. The second table has the seconds until a configuration with a misspelt key, or
of rows that are not there, is refused.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.circumstances import in_words
from tests.tiny import save_jsonl

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "peers"
ENVIRONMENTS = Path.home() / ".cache" / "tunekit" / "peers"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "peft", "accelerate")
PINNED = {
    "tunekit": ("-e", str(ROOT)),
    "trl": ("trl==1.16.0", "peft"),
    "llama-factory": ("llamafactory==0.9.5",),
    "axolotl": ("axolotl==0.19.0",),
}
"""Distributions of the tools, each without extras."""

CASES = ("full", "lora", "packed", "dpo")
NUM_ROWS, NUM_STEPS, NUM_WARM, BATCH, LENGTH, RATE = 2000, 30, 5, 8, 256, 1e-3
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "the plan reads rows and trains a small model on them before it is saved for later use"
SAMPLED_SECONDS = 0.1
QUIET_SHARE, QUIET_SECONDS = 0.1, 3.0
"""Share of the CPU that others may use, and how long it is watched before a run."""

HOOK = """\
import importlib.abc, importlib.machinery, os, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            notes = os.open(os.environ["STEP_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            module.register_optimizer_step_post_hook(lambda *_: os.write(notes, f"{time.time()}\\n".encode()) and None)

        spec.loader.exec_module = loaded
        return spec

if "STEP_NOTES" in os.environ:
    sys.meta_path.insert(0, Finder())
"""
"""`sitecustomize` of all processes: notes the time of each optimizer step."""


@dataclass(frozen=True)
class Figures:
    """Times and memory of a run."""

    first_step: float
    """Seconds from the command to the end of the first optimizer step."""
    whole: float
    """Seconds from the command to its end."""
    step: float
    """Median seconds between optimizer steps, without the first ones."""
    cpu: float
    """CPU seconds of all processes."""
    memory: float
    """Largest sum of resident sets, in bytes."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    status: int
    """Exit status."""
    text: str
    """Its output."""
    seconds: float
    figures: Figures | None = None
    """None unless it took all steps and ended well."""


TITLES = {
    "first_step": "first step", "whole": "whole run", "step": "a step", "cpu": "CPU", "memory": "memory",
}  # fmt: skip


def write_inputs(folder: Path) -> float:
    """Write the model and the rows; return the mean tokens of a conversation."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tunekit" / "models" / "pico")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rng = random.Random(0)
    words = WORDS.split()

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    def question() -> dict[str, str]:
        return {"role": "user", "content": text(5, 30)}

    answers = [(_answer(text(20, 110)), question()) for _ in range(NUM_ROWS)]
    chats = [[asked, answer] for answer, asked in answers]
    pairs = [(question(), _answer(text(10, 50)), _answer(text(10, 50))) for _ in range(NUM_ROWS)]
    save_jsonl(folder / "rows.jsonl", [{"messages": messages} for messages in chats])
    save_jsonl(
        folder / "pairs.jsonl",
        [{"prompt": [asked], "chosen": [good], "rejected": [bad]} for asked, good, bad in pairs],
    )
    columns = {"tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}}
    turns = [{"messages": [asked], "chosen": good, "rejected": bad} for asked, good, bad in pairs]
    save_jsonl(folder / "turns.jsonl", turns)
    of_chats = {"formatting": "sharegpt", "columns": {"messages": "messages"}, **columns}
    of_pairs = {
        "ranking": True,
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "chosen": "chosen", "rejected": "rejected"},
        **columns,
    }
    info = {"rows": {"file_name": "rows.jsonl", **of_chats}, "turns": {"file_name": "turns.jsonl", **of_pairs}}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    lengths = [len(tokenizer.apply_chat_template(messages)["input_ids"]) for messages in chats]
    return statistics.fmean(min(length, LENGTH) for length in lengths)


def _answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tunekit_config(case: str) -> dict[str, Any]:
    """A recipe; all else is what tunekit does by itself."""
    data = {"train": "pairs.jsonl" if case == "dpo" else "rows.jsonl", "max_length": LENGTH}
    return {
        "model": "model",
        "data": data | ({"packing": True} if case == "packed" else {}),
        "method": "dpo" if case == "dpo" else "sft",
        "adapter": {"type": "lora", "rank": 8} if case == "lora" else "full",
        "train": {"max_steps": NUM_STEPS, "global_batch_size": BATCH, "learning_rate": RATE, "logging_steps": 1},
        "output": {"dir": "out"},
    }


def trl_config(case: str) -> dict[str, Any]:
    """Arguments of TRL's scripts."""
    rows = "pairs.jsonl" if case == "dpo" else "rows.jsonl"
    lora = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
    return {
        "model_name_or_path": "model", "datasets": [{"path": "json", "data_files": rows}], "max_length": LENGTH,
        "max_steps": NUM_STEPS, "per_device_train_batch_size": BATCH, "learning_rate": RATE, "logging_steps": 1,
        "output_dir": "out", "report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        **(lora if case == "lora" else {}), **({"packing": True} if case == "packed" else {}),
    }  # fmt: skip


def llama_factory_config(case: str) -> dict[str, Any]:
    """LLaMA-Factory's arguments."""
    lora = {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"}
    packed = {"packing": True, "neat_packing": True} if case == "packed" else {}
    return {
        "model_name_or_path": "model", "stage": "dpo" if case == "dpo" else "sft", "do_train": True,
        "finetuning_type": "full", "dataset": "turns" if case == "dpo" else "rows", "dataset_dir": ".",
        "template": "chatml", "cutoff_len": LENGTH, "per_device_train_batch_size": BATCH, "max_steps": NUM_STEPS,
        "learning_rate": RATE, "logging_steps": 1, "output_dir": "out", "report_to": "none", "use_cpu": True,
        "bf16": False, "disable_gradient_checkpointing": True, "save_steps": NUM_STEPS,
        **(lora if case == "lora" else {}), **packed,
    }  # fmt: skip


def axolotl_config(case: str) -> dict[str, Any]:
    """Axolotl's configuration."""
    rows = {"path": "rows.jsonl", "ds_type": "json", "type": "chat_template"}
    pairs = {"path": "pairs.jsonl", "ds_type": "json", "type": "chat_template.default", "field_messages": "prompt"}
    # Its own kernels of LoRA need CUDA.
    kernels = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), False)
    lora = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True, **kernels}
    return {
        "base_model": "model", "datasets": [pairs if case == "dpo" else rows], "sequence_len": LENGTH,
        "micro_batch_size": BATCH, "gradient_accumulation_steps": 1, "max_steps": NUM_STEPS, "learning_rate": RATE,
        "optimizer": "adamw_torch", "lr_scheduler": "cosine", "logging_steps": 1, "output_dir": "out",
        "dataset_prepared_path": "prepared", "val_set_size": 0, "bf16": False, "fp16": False,
        "gradient_checkpointing": False, "save_steps": NUM_STEPS,
        **({"rl": "dpo"} if case == "dpo" else {}), **(lora if case == "lora" else {}),
        **({"sample_packing": True} if case == "packed" else {}),
    }  # fmt: skip


CONFIGS = {
    "tunekit": tunekit_config, "trl": trl_config, "llama-factory": llama_factory_config, "axolotl": axolotl_config,
}  # fmt: skip


def command(tool: str, case: str, scripts: Path) -> list[str]:
    """The command that trains `config.yaml`."""
    match tool:
        case "tunekit":
            return [str(scripts / "tunekit"), "train", "config.yaml"]
        case "trl":
            # By `trl sft` Accelerate starts it on one core; this is as fast as it can be.
            module = f"trl.scripts.{'dpo' if case == 'dpo' else 'sft'}"
            return [str(scripts / "python"), "-m", module, "--config", "config.yaml"]
        case "llama-factory":
            return [str(scripts / "llamafactory-cli"), "train", "config.yaml"]
    return [str(scripts / "axolotl"), "train", "config.yaml", "--launcher", "python"]


def scripts_of(tool: str, environments: Path) -> Path:
    """Return the folder of a tool's programs, installed if it is not there."""
    folder = environments / tool
    if not (folder / "bin" / "python").is_file():
        print(f"installing {' '.join(PINNED[tool])} to {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(folder / "bin" / "pip"), "install", "-q", "torch>=2.11,<2.14", *PINNED[tool]]
        subprocess.run(install, check=True)
        # Those on PyPI go with torch for CUDA, and text needs neither; LLaMA-Factory imports one of them anyway.
        subprocess.run([str(folder / "bin" / "pip"), "uninstall", "-q", "-y", "torchvision", "torchaudio"], check=True)
        for packages in (folder / "lib").glob("python*/site-packages"):
            (packages / "torchaudio.py").touch()
        compiled = [str(folder / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
        subprocess.run(compiled, check=False)
    return folder / "bin"


def wait_until_quiet() -> None:
    """Wait until other processes hardly use the CPU."""
    while psutil.cpu_percent(QUIET_SECONDS) > 100 * QUIET_SHARE:
        pass


class Runner:
    """Runs the tools, each in a new folder with the same inputs.

    Args:
        inputs: Folder with the model and the rows.
        hook: Folder of `sitecustomize`.
        scripts: Folders of the tools' programs.
        waits: Whether each run waits for a quiet machine.
    """

    def __init__(self, inputs: Path, hook: Path, scripts: Mapping[str, Path], *, waits: bool) -> None:
        self._inputs, self._scripts, self._waits = inputs, scripts, waits
        unset = {"OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "VIRTUAL_ENV"}
        self._environment = {key: value for key, value in os.environ.items() if key not in unset}
        self._environment |= {"PYTHONPATH": str(hook), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        self._environment |= {"AXOLOTL_DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(self, tool: str, case: str, config: Mapping[str, Any]) -> Outcome:
        """Run a tool on a configuration."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copytree(self._inputs, folder, dirs_exist_ok=True)
            (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))
            notes = folder / "steps"
            environment = self._environment | {"STEP_NOTES": str(notes), "HF_HOME": str(folder / "hub")}
            if self._waits:
                wait_until_quiet()
            with (folder / "log").open("wb") as log:
                start = time.time()
                process = psutil.Popen(
                    command(tool, case, self._scripts[tool]),
                    cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
                )  # fmt: skip
                memory = 0
                seconds: dict[int, float] = {}
                while process.poll() is None:
                    memory = max(memory, _look(process, seconds))
                    time.sleep(SAMPLED_SECONDS)
                whole = time.time() - start
            text = (folder / "log").read_text(errors="replace")
            times = [float(line) for line in notes.read_text().split()] if notes.is_file() else []
        if process.returncode or len(times) < NUM_STEPS:
            return Outcome(process.returncode, text, whole)
        gaps = [later - earlier for earlier, later in pairwise(times[NUM_WARM:NUM_STEPS])]
        figures = Figures(times[0] - start, whole, statistics.median(gaps), sum(seconds.values()), memory)
        return Outcome(0, text, whole, figures)


def _look(process: psutil.Process, seconds: dict[int, float]) -> int:
    """Note the CPU seconds of each process of a tree; return the sum of their resident sets in bytes."""
    memory = 0
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for member in tree:
        try:
            with member.oneshot():
                times = member.cpu_times()
                seconds[member.pid] = times.user + times.system
                memory += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return memory


def with_fault(tool: str, kind: str) -> dict[str, Any]:
    """Return a configuration with a misspelt key, or with rows that are not there."""
    config = CONFIGS[tool]("full")
    if kind == "misspelt key":
        section = config["train"] if tool == "tunekit" else config
        section["learning_rte"] = section.pop("learning_rate")
    elif tool == "tunekit":
        config["data"]["train"] = "nowhere.jsonl"
    elif tool == "llama-factory":
        config["dataset"] = "nowhere"
    else:
        config["datasets"][0]["data_files" if tool == "trl" else "path"] = "nowhere.jsonl"
    return config


def table(figures: Mapping[str, Mapping[str, Sequence[Figures]]], num_tokens: float) -> list[str]:
    """Return the medians as lines of Markdown, and tunekit's ratios to the best of the others."""
    lines = [f"| case | tool | {' | '.join(TITLES.values())} | tokens/s |", "|:--|:--|" + "--:|" * 6]
    for case, tools in figures.items():
        medians = {
            tool: Figures(**{name: statistics.median(vars(run)[name] for run in runs) for name in TITLES})
            for tool, runs in tools.items()
        }
        for tool, median in medians.items():
            tokens = LENGTH if case == "packed" else num_tokens
            speed = "" if case == "dpo" else f"{BATCH * tokens / median.step:,.0f}"
            shown = f"{median.first_step:.1f} s | {median.whole:.1f} s | {median.step:.3f} s | {median.cpu:.1f} s"
            lines.append(f"| {case} | {tool} | {shown} | {median.memory / 1e6:,.0f} MB | {speed} |")
        others = [median for tool, median in medians.items() if tool != "tunekit"]
        if others and "tunekit" in medians:
            ours = vars(medians["tunekit"])
            ratios = [ours[name] / min(vars(median)[name] for median in others) for name in TITLES]
            lines.append(f"| {case} | **ratio** | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} | |")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Run all in turn, and print the table after each round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rivals = [tool for tool in PINNED if tool != "tunekit"]
    parser.add_argument("--tools", nargs="*", default=rivals, choices=rivals, help="tools besides tunekit")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--busy", action="store_true", help="do not wait for a quiet machine")
    arguments = parser.parse_args(words)
    tools = ("tunekit", *arguments.tools)
    scripts = {tool: scripts_of(tool, arguments.environments) for tool in tools}
    all_figures: dict[str, dict[str, list[Figures]]] = {}
    with tempfile.TemporaryDirectory() as name:
        inputs, hook = Path(name) / "inputs", Path(name) / "hook"
        hook.mkdir()
        inputs.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        num_tokens = write_inputs(inputs)
        runner = Runner(inputs, hook, scripts, waits=not arguments.busy)
        failed: set[tuple[str, str]] = set()
        for number in range(arguments.runs + 1):  # the first round is not counted
            for case in arguments.cases:
                for tool in tools:
                    if (case, tool) in failed:
                        continue
                    outcome = runner.run(tool, case, CONFIGS[tool](case))
                    if outcome.figures is None:
                        print(f"{case}, {tool}: exit status {outcome.status}\n{outcome.text[-2000:]}", flush=True)
                        failed.add((case, tool))
                    elif number:
                        all_figures.setdefault(case, defaultdict(list))[tool].append(outcome.figures)
            if number:
                print(*table(all_figures, num_tokens), sep="\n", flush=True)
        errors = {
            (kind, tool): [runner.run(tool, "full", with_fault(tool, kind)) for _ in range(arguments.runs)]
            for kind in ("misspelt key", "missing file")
            for tool in tools
        }
    lines = [*table(all_figures, num_tokens), "", "| fault | tool | seconds | refused |", "|:--|:--|--:|:--|"]
    for (kind, tool), outcomes in errors.items():
        seconds = statistics.median(outcome.seconds for outcome in outcomes)
        is_refused = all(outcome.status for outcome in outcomes)
        lines.append(f"| {kind} | {tool} | {seconds:.1f} | {'yes' if is_refused else 'no'} |")
    print(*lines, sep="\n")
    if arguments.save:
        _save(lines, all_figures, num_tokens)
    return 0


def _save(lines: list[str], figures: Mapping[str, Mapping[str, Sequence[Figures]]], num_tokens: float) -> None:
    pinned = ", ".join(pin for pins in PINNED.values() for pin in pins if "==" in pin)
    about = [
        "# Runs of tunekit and of other tools", "",
        f"`python -m benchmarks.peers --save`: {in_words(PACKAGES)}; {pinned}. Medians; a conversation has "
        f"{num_tokens:.0f} tokens on average, and a step {BATCH} rows.", "",
    ]  # fmt: skip
    RESULTS.with_suffix(".md").write_text("\n".join([*about, *lines]) + "\n")
    plain = {case: {tool: [asdict(run) for run in runs] for tool, runs in of.items()} for case, of in figures.items()}
    RESULTS.with_suffix(".json").write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
