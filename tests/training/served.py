"""Runs beside a server with a real model, in processes of their own."""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import save_jsonl, save_tiny_model
from tests.waiting import LIMIT_SECONDS, until
from tunekit.runs.run import Run

ROOT = Path(__file__).parents[2]

STEPS, PROMPTS, COMPLETIONS, SEED = 5, 2, 8, 3
REWARDS = """\
from pathlib import Path

from benchmarks.served_run import send_by_file

# Every process of a run reads this module before it makes its client.
send_by_file(Path(__file__).parent)


def long(completions, **_):
    return [len(c) for c in completions]
"""


class Served:
    """A run beside a server in a process of its own.

    Args:
        folder: A new folder.
        staleness: `method.max_staleness`.
        waits: What the server's completions to a step wait for, `step:update|step:number`.
        num_processes: Processes that train.
        save_steps: Steps between checkpoints, which wait for all completions.
        own: Whether the run starts the server itself.
    """

    def __init__(
        self,
        folder: Path,
        staleness: int,
        *waits: str,
        num_processes: int = 1,
        save_steps: int = 1,
        own: bool = False,
    ) -> None:
        self.folder = folder
        save_tiny_model(folder / "model")
        prompts = [f"{number} is" for number in range(7)]
        save_jsonl(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
        (folder / "served_rewards.py").write_text(REWARDS)
        size = {"num_generations": COMPLETIONS // PROMPTS, "max_completion_length": 6}
        train = {"max_steps": STEPS, "global_batch_size": COMPLETIONS, "learning_rate": 3e-3, "warmup_steps": 0}
        recipe = {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "prompts.jsonl"), "max_length": 64},
            "method": {"type": "grpo", "rewards": ["served_rewards:long"], **size},
            "adapter": "full",
            "train": {**train, "seed": SEED, "save_steps": save_steps, "save_total_limit": STEPS + 1},
            "parallel": {"num_processes": num_processes},
            "output": {"dir": str(folder / "run"), "sample_prompts": []},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(SEED)).tolist()
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        policy = []
        for wait in waits:
            step, _, what = wait.partition(":")
            ids = tokenizer(prompts[order[PROMPTS * int(step)]])["input_ids"]
            policy.append(f"{','.join(map(str, ids))}:{what}")
        fault = {"does": "nothing", "policy": policy, "own": own, "method": {"max_staleness": staleness}}
        (folder / "fault.json").write_text(json.dumps(fault))

    def go(self, does: str = "train") -> "Served":
        """Train or resume it."""
        with self.process(does) as process:
            assert process.wait(LIMIT_SECONDS) == 0, self.output[-4000:]
        return self

    def go_until(self, step: int) -> "Served":
        """Train it, and stop it after a step."""
        with self.process("train") as process:
            self.wait_for(step)
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM
        return self

    def wait_for(self, step: int) -> None:
        """Wait until a step is logged."""
        until(lambda: (self.folder / "run" / "events.jsonl").exists() and step in self.logs)

    @property
    def output(self) -> str:
        """Standard output and error of the run's commands."""
        return (self.folder / "output.txt").read_text()

    @contextmanager
    def process(self, does: str) -> Iterator[subprocess.Popen]:
        """Train or resume it in a process, which is killed at the end."""
        path = os.pathsep.join([str(self.folder), str(ROOT)])
        words = [sys.executable, "-m", "benchmarks.served_run", does, str(self.folder)]
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        with (self.folder / "output.txt").open("a") as output:
            process = subprocess.Popen(words, env=environment, cwd=self.folder, stdout=output, stderr=output)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    @property
    def logs(self) -> dict[int, dict]:
        """Logged metrics, by step."""
        events = Run(self.folder / "run").events()
        return {event["step"]: event for event in events if event["event"] == "log"}

    @property
    def asked(self) -> list[dict]:
        """The server's log."""
        return [json.loads(line) for line in (self.folder / "server.jsonl").read_text().splitlines()]

    def model_of(self, step: int) -> torch.nn.Module:
        """The model after a step, as plain Transformers loads it; that of the beginning after none."""
        run = Run(self.folder / "run")
        folder = run.path / "checkpoints" / f"checkpoint-{step}" if step else self.folder / "model"
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def completions(self) -> dict[int, list[dict]]:
        """The server's completions, by the number of the request."""
        of_request = defaultdict(list)
        for line in self.asked:
            if "request" in line:
                of_request[line["request"]].append(line)
        return of_request
