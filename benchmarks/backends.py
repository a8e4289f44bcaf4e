"""What each way to spread a run costs on processors: time beside one process, time to the first step, peak memory.

    python -m benchmarks.backends [--repeats N] [--steps N] [--launches N] [--hidden N] [--batch N] [--only NAME ...]
                                  [--save]

All runs are `tunekit train` of one recipe: full fine-tuning of a small Llama in float32, with the same global batch and
one thread in every process, as a user starts it. They take turns, and each is compared with the run of one process of
the same turn; the table gives medians over the turns.

- `step` is the median optimizer step by the main process's clock, the first three left out.
- `ratio` is that to the step of one process. Processes that cost nothing to keep together would come down to one part
  in as many as there are cores for them: `overhead` is what the step takes longer than that, so that 0 % is perfect and
  100 % is as slow as if the second core were not there (for two processes on two cores).
- `peak` is the resident memory of the process that took most, at its peak and with all libraries, beside the plan's
  estimate.
- `launch` is the time from the start of a command to the end of the first step, for `tunekit train` and for the same
  training in a script with TRL's SFTTrainer under `accelerate launch`, both in two processes with DDP. Both find the
  bytecode of all packages; tunekit finds its rows prepared, datasets its cache.

Figures are worth something on a machine that does nothing else.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.circumstances import circumstances
from tests.tiny import save_chats, save_tiny_model
from tunekit.runs.run import Run
from tunekit.training.timing import TRACED_STEP

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "backends.json"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate", "deepspeed")
NUM_WARM = TRACED_STEP
"""Steps at the beginning of a run that are not counted: buffers are allocated, and the last one is traced."""

BACKENDS: dict[str, dict[str, Any]] = {
    "single": {"num_processes": 1, "strategy": "single"},
    "DDP x2": {"num_processes": 2, "strategy": "ddp"},
    "FSDP2 x2": {"num_processes": 2, "strategy": "fsdp2", "reshard_after_forward": True},
    "FSDP2 x2, no reshard": {"num_processes": 2, "strategy": "fsdp2", "reshard_after_forward": False},
    "FSDP2 2x2, hybrid": {"num_processes": 4, "strategy": "fsdp2", "dp_shard_size": 2},
    "ZeRO-1 x2": {"num_processes": 2, "strategy": "zero1"},
    "ZeRO-2 x2": {"num_processes": 2, "strategy": "zero2"},
    "ZeRO-3 x2": {"num_processes": 2, "strategy": "zero3"},
}

SCRIPT = """\
import sys, time
from datasets import load_dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

model, rows, output, batch, ended = sys.argv[1:6]

class First(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.is_world_process_zero and state.global_step == 1:
            open(ended, "w").write(repr(time.time()))

config = SFTConfig(
    output_dir=output, max_steps=4, per_device_train_batch_size=int(batch) // 2, learning_rate=1e-4, max_length=256,
    logging_steps=1, save_strategy="steps", save_steps=4, report_to="none", disable_tqdm=True, use_cpu=True, bf16=False,
    gradient_checkpointing=False, dataloader_pin_memory=False, ddp_find_unused_parameters=False,
    assistant_only_loss=True, model_init_kwargs={"dtype": "float32"},
)
trainer = SFTTrainer(
    model=model, args=config, train_dataset=load_dataset("json", data_files=rows, split="train"), callbacks=[First()]
)
trainer.train()
trainer.save_model(output + "/model")
"""
"""The same training as tunekit's, as a user of TRL writes it."""


@dataclass(frozen=True)
class Measured:
    """A finished run.

    Attributes:
        step_seconds: Its median step.
        tokens_per_second: Of all processes, over all steps.
        peak_bytes: Of the process that took most.
        planned_bytes: What the plan said of each.
        launch_seconds: From the start of the command to the end of the first step.
    """

    step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    planned_bytes: int
    launch_seconds: float


class Bench:
    """A folder with a model and rows, and what is run on them.

    Args:
        folder: Where.
        hidden: Width of the model.
        batch: Rows of a step.
        num_steps: Steps of a run.
    """

    def __init__(self, folder: Path, *, hidden: int, batch: int, num_steps: int) -> None:
        self.folder = folder
        self.batch = batch
        self.num_steps = num_steps
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._num_runs = 0
        save_tiny_model(folder / "model", hidden=hidden, layers=4)
        # Rows of one length, so that no step and no process has more to do than another.
        save_chats(folder / "rows.jsonl", ((f"{n:04} " + "say it " * 10, f"{n:04} " + "said " * 24) for n in range(64)))

    def tunekit(self, parallel: dict[str, Any], num_steps: int) -> Measured:
        """Train by tunekit."""
        self._num_runs += 1
        output = self.folder / f"run-{self._num_runs}"
        recipe = {
            "model": str(self.folder / "model"),
            "data": {"train": str(self.folder / "rows.jsonl"), "max_length": 256},
            "adapter": "full",
            "train": {"max_steps": num_steps, "global_batch_size": self.batch, "learning_rate": 1e-4},
            "parallel": parallel,
            "output": {"dir": str(output), "sample_prompts": []},
        }
        recipe["train"] |= {"logging_steps": 1, "gradient_checkpointing": False}
        file = self.folder / "recipe.yaml"
        file.write_text(json.dumps(recipe), encoding="utf-8")
        began = time.time()
        self._call([_script("tunekit"), "train", str(file)])
        run = Run(output)
        result = run.result()
        logs = [event for event in run.events() if event["event"] == "log"]
        return Measured(
            step_seconds=statistics.median(event["step_seconds"] for event in logs[NUM_WARM:]),
            tokens_per_second=result["tokens_per_second"],
            peak_bytes=result["peak_memory_bytes"],
            planned_bytes=result["planned_memory_bytes"],
            launch_seconds=logs[0]["time"] - began,
        )

    def accelerate_launch(self) -> float:
        """Seconds to the first step of the same training, by a script under `accelerate launch`."""
        self._num_runs += 1
        output, ended = self.folder / f"trl-{self._num_runs}", self.folder / "ended"
        script = self.folder / "script.py"
        script.write_text(SCRIPT, encoding="utf-8")
        ended.unlink(missing_ok=True)
        command = [_script("accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(_free_port())]
        command += [str(script), str(self.folder / "model"), str(self.folder / "rows.jsonl"), str(output)]
        began = time.time()
        self._call([*command, str(self.batch), str(ended)])
        return float(ended.read_text()) - began

    def _call(self, command: list[str]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.folder, env=self.environment, timeout=1800
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")


def _script(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def overhead_table(turns: dict[str, list[Measured]], num_cores: int) -> dict[str, dict[str, float]]:
    """The figures of each backend, medians over the turns."""
    table = {}
    for name, runs in turns.items():
        ratio = statistics.median(
            run.step_seconds / alone.step_seconds for run, alone in zip(runs, turns["single"], strict=True)
        )
        side_by_side = min(BACKENDS[name]["num_processes"], num_cores)
        table[name] = {
            "step_seconds": statistics.median(run.step_seconds for run in runs),
            "ratio": ratio,
            "overhead": ratio * side_by_side - 1,
            "tokens_per_second": statistics.median(run.tokens_per_second for run in runs),
            "peak_bytes": max(run.peak_bytes for run in runs),
            "planned_bytes": runs[0].planned_bytes,
        }
    return table


def launch_table(launches: dict[str, list[float]]) -> dict[str, float]:
    """Seconds to the first step, medians over the turns, and how they compare."""
    ratio = statistics.median(ours / theirs for ours, theirs in zip(*launches.values(), strict=True))
    medians = {name: statistics.median(values) for name, values in launches.items()}
    return {**{f"{name}, seconds to the first step": value for name, value in medians.items()}, "ratio": ratio}


def show(overheads: dict[str, dict[str, float]], launch: dict[str, float]) -> None:
    """Print both tables."""
    console = Console()
    table = Table("backend")
    for column in ("step", "ratio", "overhead", "tokens/s", "peak of a process", "planned"):
        table.add_column(column, justify="right")
    for name, row in overheads.items():
        table.add_row(
            name,
            f"{row['step_seconds']:.3f} s",
            f"{row['ratio']:.2f}",
            "" if name == "single" else f"{row['overhead']:+.0%}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['peak_bytes'] / 2**20:,.0f} MiB",
            f"{row['planned_bytes'] / 2**20:,.0f} MiB",
        )
    console.print(table)
    for name, value in launch.items():
        console.print(f"launch, {name}: {value:.2f}")


def main() -> None:
    """Measure, print the tables, and with `--save` keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="turns of all backends (2)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a run, four or more (10)")
    parser.add_argument("--launches", type=int, default=2, help="turns of both ways to launch, or 0 (2)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model (256)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step (8)")
    parser.add_argument("--only", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="these, and single")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    if args.steps <= NUM_WARM:
        parser.error(f"--steps: the first {NUM_WARM} are not counted")

    names = ["single", *(name for name in args.only if name != "single")]
    turns: dict[str, list[Measured]] = {name: [] for name in names}
    launches: dict[str, list[float]] = {"tunekit train": [], "accelerate launch": []}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), hidden=args.hidden, batch=args.batch, num_steps=args.steps)
        # The first ones leave bytecode and prepared rows behind, and are not counted.
        for turn in range(args.launches + 1 if args.launches else 0):
            seconds = {
                "tunekit train": bench.tunekit(BACKENDS["DDP x2"], NUM_WARM + 1).launch_seconds,
                "accelerate launch": bench.accelerate_launch(),
            }
            print(f"launches {turn} of {args.launches}: {seconds}", file=sys.stderr, flush=True)
            for name, value in seconds.items() if turn else ():
                launches[name].append(value)
        for turn in range(args.repeats):
            for name in names:
                turns[name].append(bench.tunekit(BACKENDS[name], args.steps))
                done = f"{name}: {turns[name][-1].step_seconds:.3f} s a step"
                print(f"turn {turn + 1} of {args.repeats}, {done}", file=sys.stderr, flush=True)

    where = circumstances(PACKAGES)
    overheads = overhead_table(turns, where["machine"]["num_cores"])
    launch = launch_table(launches) if args.launches else {}
    print(f"commit {where['commit']}, {where['date']}, {where['machine']}")
    show(overheads, launch)
    if args.save:
        settings = {key: value for key, value in vars(args).items() if key not in ("only", "save")}
        found = {**where, "settings": settings, "backends": overheads, "launch": launch}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
