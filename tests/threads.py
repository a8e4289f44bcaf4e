"""Groups of threads of one process that exchange tensors as processes do: what is divided, without the start of others.

They are torch's own, by which it tests DTensor and FSDP2 (torch 2.13). What a process has for itself, such as its
environment and its random numbers, they share: functions draw from generators of their own.
"""

import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore, destroy_process_group, init_process_group, is_initialized
from torch.testing._internal.distributed import multi_threaded_pg


def in_threads(num: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function in `num` threads, each of which is a rank of a group, and return what each of them gave.

    Args:
        num: Threads.
        function: The function, called with `args`.
        args: Its arguments.

    Raises:
        BaseException: What the first of them raised.
    """
    store, results, errors = HashStore(), dict[int, Any](), list[BaseException]()

    def work(rank: int) -> None:
        init_process_group("threaded", rank=rank, world_size=num, store=store)
        try:
            results[rank] = function(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread of the test
            errors.append(error)
            # The others wait for it.
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            if is_initialized():
                destroy_process_group()

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        with mock.patch.dict(os.environ, WORLD_SIZE=str(num)):
            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg.ProcessLocalGroup.reset()
        multi_threaded_pg._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num)]
