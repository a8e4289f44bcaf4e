"""Groups of real processes for tests: forked from one that has imported the libraries already, so that they start fast.

A user's processes are started by torchrun, which tests of the launch do too. What is computed is the same.
"""

import contextlib
import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOADED = [
    "torch.distributed.fsdp",
    "peft",
    "bitsandbytes",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "tunekit.run.worker",
    "tunekit.run.callback",
    "tunekit.run.boundary",
    "tunekit.run.saving",
    "tunekit.run.save",
    "tunekit.run.engine",
    "tunekit.model.fuse",
    "deepspeed",
]
"""What every process would import by itself, in seconds."""


def in_processes(num: int, function: Callable[..., Any], *args: Any, seconds: float = 300) -> list[Any]:
    """Call a function in `num` processes that find each other as torchrun's do, and return what each of them gave.

    Args:
        num: Processes.
        function: A function of a module, called with `args`.
        args: Its arguments; they are pickled.
        seconds: How long all may take together.

    Raises:
        AssertionError: One of them failed; the words are those of the first that did. The others are ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    workers, pipes = [], []
    for rank in range(num):
        here, there = context.Pipe(duplex=False)
        environment = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num,
            "LOCAL_WORLD_SIZE": num,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        worker = context.Process(target=_call, args=(there, environment, function, args), daemon=True)
        worker.start()
        there.close()
        workers.append(worker)
        pipes.append(here)
    try:
        return _answers(pipes, seconds)
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()


def _answers(pipes: list[Connection], seconds: float) -> list[Any]:
    answers: dict[Connection, Any] = {}
    while len(answers) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in answers], timeout=seconds)
        assert ready, f"{len(pipes) - len(answers)} of {len(pipes)} processes gave no answer in {seconds} s"
        for pipe in ready:
            try:
                failure, answer = pipe.recv()
            except EOFError:
                failure, answer = "it ended without a word", None
            assert failure is None, f"process {pipes.index(pipe)}:\n{failure}"
            answers[pipe] = answer
    return [answers[pipe] for pipe in pipes]


def _call(pipe: Connection, environment: dict[str, Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        answer = function(*args)
    except BaseException:  # noqa: BLE001 - whatever it is, the test that started this process is to show it
        pipe.send((traceback.format_exc(), None))
    else:
        pipe.send((None, answer))


def free_port() -> int:
    """A port of this machine that nobody listens on: below those that the system gives to whoever connects."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
