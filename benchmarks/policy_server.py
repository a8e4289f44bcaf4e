"""Stand-in for a vLLM server that generates with a real model, and takes its weights from files.

    python -m benchmarks.policy_server PORT MODEL LOG [REQUEST:update|step:NUMBER ...]

`serve_as_vllm` takes the arguments of `vllm serve` that a run gives to its own server.

It samples at temperature 1, from the prompt, the number of the completion and the model alone. What it is asked for
comes into the log, a line of JSON each, in the order in which it was done: completions with the log-probability of
each token and the number of updates of the weights that it was drawn with. The completions of a request, which is named
by the tokens of its first prompt (`17,4`), wait behind their first token: for an update of the weights, or until the
run beside the log has logged a step.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.vllm_server import Handler, serve

LOG = "POLICY_SERVER_LOG"
"""Variable with the log of a server that a run starts."""

FAILS = "fails.txt"
"""File beside the log with the error that it ends with at once."""


class PolicyHandler(Handler):
    """Answers requests with a model."""

    model: PreTrainedModel
    log: Path
    waits: dict[str, tuple[str, int]]
    """Events that requests wait for, by the tokens of their first prompt."""
    num_requests = 0
    num_updates = 0
    one = threading.Lock()
    """Held by whoever uses the model."""
    runs = threading.Event()

    def choices(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the completions of a request."""
        with self.one:
            PolicyHandler.num_requests += 1
            number = self.num_requests
        choices, waits_for = [], self.waits.get(",".join(map(str, request["prompt"][0])))
        for prompt in request["prompt"]:
            for place in range(request["n"]):
                choices.append(self._sampled(prompt, place, request["max_tokens"], waits_for))
        lines = [{"request": number, **choice.pop("drawn")} for choice in choices]
        self.write(*lines)
        return choices

    def take(self, path: str, request: dict[str, Any]) -> None:
        """Do what a request without completions asks for."""
        if path == "/pause":
            self.runs.clear()
            with self.one:
                pass
        if path == "/resume":
            self.runs.set()
        if path == "/update_weights":
            with self.one:
                self.model.load_state_dict(load_file(request["update_info"]["file"]), strict=False)
                PolicyHandler.num_updates += 1
        if path in ("/pause", "/resume", "/update_weights"):
            self.write({"asked": path})

    def write(self, *lines: dict[str, Any]) -> None:
        """Add lines to the log."""
        with self.one, self.log.open("a") as log:
            log.writelines(json.dumps(line) + "\n" for line in lines)

    def _is_reached(self, what: str, number: int) -> bool:
        if what == "update":
            return self.num_updates >= number
        events = (self.log.parent / "run" / "events.jsonl").read_text().splitlines()
        logged = [event for event in map(json.loads, events) if event["event"] == "log"]
        return any(event["step"] >= number for event in logged)

    def _sampled(
        self, prompt: list[int], place: int, num_tokens: int, waits_for: tuple[str, int] | None
    ) -> dict[str, Any]:
        seed = hashlib.sha256(f"{prompt}/{place}".encode()).digest()[:4]
        generator = torch.Generator().manual_seed(int.from_bytes(seed))
        ids: list[int] = []
        log_probs, updates = [], []
        ends = self.model.generation_config.eos_token_id
        while len(ids) < num_tokens and ends not in ids[-1:]:
            while ids and waits_for is not None and not self._is_reached(*waits_for):
                time.sleep(0.02)
            self.runs.wait()
            with self.one, torch.no_grad():
                scores = self.model(torch.tensor([prompt + ids])).logits[0, -1].float().log_softmax(-1)
                updates.append(self.num_updates)
            token = int(torch.multinomial(scores.exp(), 1, generator=generator))
            ids.append(token)
            log_probs.append(float(scores[token]))
        tokens = [f"token_id:{token}" for token in ids]
        scored = {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": [None] * len(ids)}
        drawn = {"prompt": prompt, "ids": ids, "log_probs": log_probs, "updates": updates}
        return {"token_ids": ids, "prompt_token_ids": prompt, "logprobs": scored, "drawn": drawn}


def main() -> None:
    """Serve until killed; print a line once it listens."""
    port, model, log, *waits = sys.argv[1:]
    _serve(int(port), model, Path(log), waits)


def serve_as_vllm() -> None:
    """Serve until killed, with the command line of vLLM's own, of which all that is not known is an error."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for name in ("host", "dtype", "weight-transfer-config", "logprobs-mode"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "max-model-len", "tensor-parallel-size", "data-parallel-size", "api-server-count"):
        parser.add_argument(f"--{name}", required=True, type=int)
    for name in ("max-logprobs", "seed"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--gpu-memory-utilization", required=True, type=float)
    arguments = parser.parse_args()
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    log = Path(os.environ[LOG])
    with log.open("a") as lines:
        lines.write(json.dumps({"pid": os.getpid(), "arguments": vars(arguments)}) + "\n")
    if (log.parent / FAILS).exists():
        raise SystemExit((log.parent / FAILS).read_text())
    _serve(arguments.port, arguments.model, log, [])


def _serve(port: int, model: str, log: Path, waits: list[str]) -> None:
    torch.set_num_threads(1)
    PolicyHandler.model = AutoModelForCausalLM.from_pretrained(model).eval()
    PolicyHandler.log = log
    named = (each.split(":") for each in waits)
    PolicyHandler.waits = {request: (what, int(reached)) for request, what, reached in named}
    PolicyHandler.runs.set()
    serve(port, PolicyHandler)


if __name__ == "__main__":
    main()
