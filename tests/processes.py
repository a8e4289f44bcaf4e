"""Groups of real processes for tests: forked from one that has imported the libraries already, so that they start fast.

A user's processes are started by torchrun, which tests of the launch do too. What is computed is the same.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.waiting import LIMIT_SECONDS

PRELOADED = [
    "torch.distributed.fsdp",
    "peft",
    "bitsandbytes",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "tunekit.training.worker",
    "tunekit.training.callbacks",
    "tunekit.training.train",
    "tunekit.training.checkpointing.save",
    "tunekit.training.engines.engine",
    "tunekit.models.fusion.fuse",
    "deepspeed",
]
"""What every process would import by itself, in seconds."""


def in_processes(num: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function in `num` processes that find each other as torchrun's do, and return what each of them gave.

    Args:
        num: Processes.
        function: A function of a module, called with `args`.
        args: Its arguments; they are pickled.

    Raises:
        AssertionError: One of them failed; the words are those of the first that did. The others are ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = own_port()
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
        return _answers(pipes)
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()


def _answers(pipes: list[Connection]) -> list[Any]:
    answers: dict[Connection, Any] = {}
    while len(answers) < len(pipes):
        ready = wait([pipe for pipe in pipes if pipe not in answers], timeout=LIMIT_SECONDS)
        assert ready, f"{len(pipes) - len(answers)} of {len(pipes)} processes gave no answer"
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


_held: list[socket.socket] = []
"""Sockets that keep a port for a test until these tests end."""


def own_port() -> int:
    """A port of this machine for one test alone: nobody else is given it, whoever listens there and stops again.

    A socket is bound to it that never listens. Linux lets a server listen beside that where both allow the address to
    be used again, as servers do, and gives the port to nobody who asks for any. Elsewhere the port is only looked for.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    holder = socket.socket(family)
    if family == socket.AF_INET6:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port = int(holder.getsockname()[1])
    if sys.platform == "linux":
        _held.append(holder)
    else:
        holder.close()
    return port
