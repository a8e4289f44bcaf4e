"""The verbs that make a run and give it to a cluster: Slurm, Ray or SkyPilot."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tunekit.api.verbs import Source, make_run
from tunekit.errors import TunekitError
from tunekit.estimates.facts import Hardware
from tunekit.launching import cluster
from tunekit.launching.cluster import Wishes, nodes_of, with_all_nodes
from tunekit.recipe.load import AnyOverrides
from tunekit.runs.events import Event
from tunekit.runs.fingerprints import read_recipe
from tunekit.runs.run import Run


@dataclass(frozen=True)
class Submitted:
    """A run that somebody else starts.

    Attributes:
        run: The run.
        script: What a scheduler is given of it.
        words: What became of it.
    """

    run: Run
    script: Path
    words: str


def launch_slurm(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    wishes: Wishes | None = None,
    on: str | None = None,
    num_nodes: int | None = None,
    submit: bool = True,
    on_event: Callable[[Event], None] | None = None,
) -> Submitted:
    """Make a run and give it to Slurm, on whose nodes the folder of the run is too.

    Args:
        source: The recipe.
        overrides: Changes to it.
        wishes: What else is asked of Slurm.
        on: The nodes, named as for `plan`; by default such as this one.
        num_nodes: How many of them.
        submit: Whether the job is submitted, or only written.
        on_event: Called with the progress of reading rows, and the plan.

    Raises:
        TunekitError: The run cannot be made, or Slurm does not take it.
    """
    run, hardware = _make_run_on(source, overrides, on, num_nodes, on_event)
    with _failed_unless_given(run):
        script = cluster.write_script(run, hardware, wishes or cluster.Wishes())
        words = f"job {cluster.submit(run, script)}; `tunekit runs` shows it" if submit else "written, not submitted"
    return Submitted(run, script, words)


def launch_ray(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    address: str | None = None,
    on: str | None = None,
    num_nodes: int | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Run:
    """Train on a Ray cluster whose nodes share the run folder, and return the finished run.

    Args:
        source: The recipe.
        overrides: Changes to it.
        address: Cluster address. Default: RAY_ADDRESS, or this machine.
        on: The nodes, named as for `plan`; by default such as this one.
        num_nodes: How many of them.
        on_event: Called with every event of the run as it happens.

    Raises:
        TunekitError: Ray is not installed, or an error that the user can correct.
    """
    from tunekit.launching.ray_train import train_on_ray

    run, _ = _make_run_on(source, overrides, on, num_nodes, on_event)
    train_on_ray(run, address, on_event)
    return run


def launch_sky(
    source: Source,
    overrides: AnyOverrides = (),
    *,
    on: str,
    num_nodes: int | None = None,
    submit: bool = True,
    on_event: Callable[[Event], None] | None = None,
) -> Submitted:
    """Make a run and have SkyPilot find nodes for it in a cloud.

    Args:
        source: The recipe.
        overrides: Changes to it.
        on: The nodes, named as for `plan`.
        num_nodes: How many of them.
        submit: Whether the task is launched, or only written.
        on_event: Called with the progress of reading rows, and the plan.

    Raises:
        TunekitError: The run cannot be made, or SkyPilot does not start it.
    """
    run, _ = _make_run_on(source, overrides, on, num_nodes, on_event, shares_disk=False)
    with _failed_unless_given(run):
        task = cluster.write_task(run, on)
        words = "written, not started"
        if submit:
            words = f"started; fetch its results with: {cluster.launch_task(run, task)}"
    return Submitted(run, task, words)


def _make_run_on(
    source: Source,
    overrides: AnyOverrides,
    on: str | None,
    num_nodes: int | None,
    on_event: Callable[[Event], None] | None,
    *,
    shares_disk: bool = True,
) -> tuple[Run, Hardware]:
    """A run for the nodes of a cluster, and what these have."""
    hardware = nodes_of(on, num_nodes)
    recipe = with_all_nodes(read_recipe(source, overrides)[0], hardware)
    return make_run(recipe, hardware=hardware, shares_disk=shares_disk, on_event=on_event), hardware


@contextmanager
def _failed_unless_given(run: Run) -> Iterator[None]:
    """Raise the failure that the run recorded, where no rank reported one."""
    try:
        yield
    except TunekitError as error:
        run.update_status(phase="failed", exit_reason=str(error))
        raise
