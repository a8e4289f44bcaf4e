"""The vLLM server of a run, on devices that the run does not train on. It lives as long as the processes that train.

It is vLLM's own (`vllm serve`), with what TRL's client needs of it: its development endpoints, an engine that takes
weights over NCCL, and the probabilities that tokens were sampled with (trl 1.16, `VLLMClient`). While it loads the
model, so do the processes; TRL waits for it.
"""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunekit.errors import RunError
from tunekit.probe.model import model_folder
from tunekit.process.processes import VLLM_SERVE, Group, follow_supervisor
from tunekit.recipe.methods import generates
from tunekit.recipe.methods.on_policy import VLLM_GROUP_PORT, VLLM_URL
from tunekit.redact import redacting_pipe
from tunekit.runs.run import Run

LOG = "vllm.log"
"""File of a run folder with the server's output."""

STOP_SECONDS = 10
"""Seconds for the server to exit by itself, before it is killed."""

SIGNALED = 128
"""Added to the number of a signal that ended the server, in the exit code."""


class _EndedError(Exception):
    """The server has exited."""


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        process: Its process.
        variables: Environment variables for the processes that train.
    """

    process: Group
    variables: Mapping[str, str]


@dataclass(frozen=True)
class WithServer:
    """The processes of a run, which end if its server does."""

    server: Server
    group: Group

    def codes(self) -> dict[int, int | None]:
        """Return exit codes by rank; the end of the server ends the block of `serving` with an error."""
        if self.server.process.codes()[0] is not None:
            raise _EndedError
        return self.group.codes()

    def wait(self, seconds: float) -> None:
        """Wait until all have exited or a time is up."""
        self.group.wait(seconds)


@contextlib.contextmanager
def serving(run: Run) -> Iterator[Server]:
    """Start the server of a run, and stop it at the end of the block.

    Args:
        run: The run; its recipe asks for a server of its own.

    Raises:
        RunError: It has exited before.
    """
    port, group_port = _free_ports(2)
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    plan, log = run.plan, run.path / LOG
    if plan.vllm is not None and plan.vllm.devices:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(plan.vllm.devices)
    words = ["tunekit.launching.vllm_server", *serve_command(run, port)]
    # Earlier attempts of the run have written there, too.
    start = log.stat().st_size if log.exists() else 0
    try:
        with log.open("ab") as file, redacting_pipe(file) as output, Group(words, variables, output) as process:
            url = {VLLM_URL: f"http://127.0.0.1:{port}", VLLM_GROUP_PORT: str(group_port)}
            try:
                yield Server(process, url)
            finally:
                code = process.codes()[0]
                process.terminate()
                process.wait(STOP_SECONDS)
    except _EndedError:
        # All that it wrote is in the log by now.
        assert code is not None
        lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:300]}" if lines else ""
        problem = f"method.generation.vllm_mode: the run's vLLM server {_ended(code)}{last}"
        raise RunError(problem, hint=f"see {log}") from None


def _ended(code: int) -> str:
    # Negative where the process that started the server was killed, too.
    killed_by = {int(each): each.name for each in signal.Signals}.get(-code if code < 0 else code - SIGNALED)
    return f"exited with code {code}" if killed_by is None else f"was killed by {killed_by}"


def serve_command(run: Run, port: int) -> list[str]:
    """Return the arguments of Python that start the server of a run."""
    recipe, plan = run.recipe, run.plan
    method = recipe.method
    assert generates(method) and plan.vllm is not None
    model, generation = plan.base, method.generation
    words = [*VLLM_SERVE, model_folder(model), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", plan.dtype, "--max-model-len", str(recipe.data.max_length)]
    words += ["--gpu-memory-utilization", str(plan.vllm.gpu_memory_utilization)]
    words += ["--tensor-parallel-size", str(generation.vllm_tensor_parallel_size or 1)]
    words += ["--data-parallel-size", str(generation.vllm_data_parallel_size or 1), "--api-server-count", "1"]
    words += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
    words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    words += ["--seed", str(recipe.train.seed)]
    if model.revision is not None:
        words += ["--revision", model.revision]
    if model.trust_remote_code:
        words.append("--trust-remote-code")
    return words


def _free_ports(num: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [each.getsockname()[1] for each in sockets]


def main() -> None:
    """Run Python with the arguments of this process until it ends, or the supervisor is gone."""
    with subprocess.Popen([sys.executable, *sys.argv[1:]]) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        follow_supervisor()
        code = server.wait()
    sys.exit(code if code >= 0 else SIGNALED - code)


if __name__ == "__main__":
    main()
