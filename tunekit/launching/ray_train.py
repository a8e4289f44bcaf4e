"""A run on a Ray cluster: Ray Train starts the processes, assigns their ranks, and restarts them.

Ray also makes the process group, as the plan has it; each process then works as everywhere. When one is lost, Ray kills
the others and restarts all, and they resume from the newest checkpoint.
"""

import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from tunekit.errors import DependencyError, RunError
from tunekit.launching.local import Follower, raised
from tunekit.probe.nodes import check_for_launcher
from tunekit.process.log_capture import send_nothing
from tunekit.runs.events import Listener
from tunekit.runs.record import errors_of, forget_errors
from tunekit.runs.run import Run
from tunekit.runs.small_files import Place, forget_request

if TYPE_CHECKING:
    from ray.train import Result

POLL_SECONDS = 0.2
"""Seconds between two looks at the events of the processes."""


def train_on_ray(run: Run, address: str | None = None, listener: Listener | None = None) -> None:
    """Train a run on a Ray cluster whose nodes share its folder.

    Args:
        run: The run.
        address: Address of the cluster; by default that of RAY_ADDRESS, or a local one, which is started if needed.
        listener: Called with every event.

    Raises:
        DependencyError: Ray is not installed.
        TunekitError: The run failed, more often than its maximum of restarts.
    """
    send_nothing()
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchConfig, TorchTrainer
    except ModuleNotFoundError as error:
        raise DependencyError("--ray needs Ray Train", hint="install it with: pip install 'tunekit[ray]'") from error
    from tunekit.training.engines.engine import backend_of

    check_for_launcher(run.recipe, "Ray")
    forget_request(run.path)
    run.begin()
    forget_errors(run)
    plan, folder = run.plan, run.path.resolve()
    has_accelerators = plan.device.kind != "cpu"
    trainer = TorchTrainer(
        _work,
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend=backend_of(plan), timeout_s=plan.exchange_timeout_seconds),
        scaling_config=ScalingConfig(
            num_workers=plan.layout.num_processes,
            use_gpu=has_accelerators,
            resources_per_worker={"CPU": 1 + plan.dataloader_num_workers} | ({"GPU": 1} if has_accelerators else {}),
            # As the plan counts the memory of a node: accelerators keep to it by their number, processors do not.
            placement_strategy="PACK" if has_accelerators or plan.num_nodes == 1 else "SPREAD",
        ),
        run_config=RunConfig(
            name="ray",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=plan.recipe.parallel.max_restarts),
            # They import torch before they know the run, and must find its variables by then.
            worker_runtime_env={"env_vars": dict(plan.environment)},
        ),
    )
    follower = Follower(run, listener)
    # In another thread, since Ray takes Ctrl-C to itself in this one and then ends the program. Where the driver goes,
    # Ray ends what it started.
    with ThreadPoolExecutor(1) as pool, ray.init(address, log_to_driver=False):
        if threading.current_thread() is threading.main_thread():
            # Ray has taken it, and ends the program without a word to the run.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            with follower.wishes, follower.wishes.waiting():
                _follow(pool.submit(trainer.fit), follower)
        except KeyboardInterrupt as error:
            raise follower.stopped() from error
        except TrainingFailedError as error:
            last_line = str(error).strip().splitlines()[-1]
            failure = next(map(raised, errors_of(run)), RunError(f"Ray: {last_line}", hint="see `ray status`"))
            follower.end("failed", str(failure))
            raise failure from error
    if run.status()["phase"] != "finished":
        raise follower.stopped()


def _work(config: dict[str, Any]) -> None:
    """Train in one process; called by Ray."""
    from ray.train import get_context

    from tunekit.training.worker import work

    context = get_context()
    place = Place(
        rank=context.get_world_rank(),
        local_rank=context.get_local_rank(),
        num_processes=context.get_world_size(),
        num_local=context.get_local_world_size(),
    )
    if place.num_processes == 1:
        # Accelerate would wrap a model that is alone as one of several.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    work(Run(config["folder"]), place=place, supervised=True)


def _follow(training: "Future[Result]", follower: Follower) -> None:
    """Tell a listener what the processes write, until they are done.

    Raises:
        KeyboardInterrupt: They are to end at once, or before there is anything to save.
    """
    is_last = False
    while not is_last:
        follower.mind_wishes()
        # Asked before reading, so that what was written last is read.
        is_last = bool(wait([training], POLL_SECONDS).done)
        follower.hand_on()
    training.result()
