"""Stand-in for a vLLM server: the requests of TRL's `VLLMClient` (trl 1.16), in a process that can be killed.

    python -m benchmarks.vllm_server PORT VOCABULARY [MARK ANSWER kill|hang]

Answers follow from prompts alone, so that a run that is resumed gets those of one that was not. With a file MARK that
is not there yet, it makes it in the answer of that number, and kills itself or hangs when half of that is sent. What
cannot be had without a device, the weights over NCCL, is left out by `benchmarks.served_run`.
"""

import hashlib
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tunekit.methods.environments.host import end_with


class Handler(BaseHTTPRequestHandler):
    """Answers requests."""

    protocol_version = "HTTP/1.1"
    vocabulary = 0
    mark: Path | None = None
    fatal_answer = 0
    is_killed = False
    num_answers = 0

    def do_GET(self) -> None:
        """Answer what is asked about the server."""
        config = {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": {}}
        self._answer({"data": [{"id": "model"}], "world_size": 1, "vllm_config": config})

    def do_POST(self) -> None:
        """Generate, or take note of weights."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        path = self.path.partition("?")[0]
        if path != "/v1/completions":
            self.take(path, request)
            self._answer({"success": True})
            return
        Handler.num_answers += 1
        self._answer({"choices": self.choices(request)}, is_last=self.num_answers == self.fatal_answer)

    def choices(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the completions of a request."""
        return [
            self._choice(ids, number, request["max_tokens"])
            for ids in request["prompt"]
            for number in range(request["n"])
        ]

    def take(self, path: str, request: dict[str, Any]) -> None:
        """Do what a request without completions asks for: nothing."""

    def _choice(self, prompt: list[int], number: int, num_tokens: int) -> dict[str, Any]:
        digest = hashlib.sha256(f"{prompt}/{number}".encode()).digest()[:num_tokens]
        ids = [3 + byte % (self.vocabulary - 3) for byte in digest]
        tokens = [f"token_id:{each}" for each in ids]
        scores = {"tokens": tokens, "token_logprobs": [-3.0] * len(ids), "top_logprobs": [None] * len(ids)}
        return {"token_ids": ids, "prompt_token_ids": prompt, "logprobs": scores}

    def _answer(self, value: Any, *, is_last: bool = False) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if is_last and self.mark is not None and not self.mark.exists():
            self.mark.touch()
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def main() -> None:
    """Serve until killed; print a line once it listens."""
    port, vocabulary, *fault = sys.argv[1:]
    Handler.vocabulary = int(vocabulary)
    if fault:
        Handler.mark, Handler.fatal_answer, Handler.is_killed = Path(fault[0]), int(fault[1]), fault[2] == "kill"
    serve(int(port), Handler)


def serve(port: int, handler: type[Handler]) -> None:
    """Serve until killed; print the port once it listens."""
    end_with(os.getppid())
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
