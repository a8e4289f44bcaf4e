"""The commands that start, resume and stop runs, here and on other machines."""

import os
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from tunekit.cli import completion
from tunekit.cli.options import AnnounceOption, NodesOption, OverridesArgument, RecipeArgument
from tunekit.errors import Stopped, TunekitError
from tunekit.process.garbage import collected_seldom
from tunekit.redact import outlive_readers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tunekit.api.clusters import Submitted
    from tunekit.runs.run import Run

QueueOption = Annotated[
    bool,
    Option(
        "--queue",
        help="Wait until no other run on this machine uses the devices. On a CPU only queued runs wait for each other.",
    ),
]
DevicesOption = Annotated[str | None, Option(metavar="DEVICE,DEVICE", help="Accelerators to use, by index or UUID.")]
PlanOption = Annotated[bool, Option("--plan", help="Print the whole plan first, with the reason of each decision.")]
DetachOption = Annotated[bool, Option("--detach", help="Start in the background and return.")]


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    resume: Annotated[bool, Option("--resume", help="Resume the unfinished run of this recipe, if any.")] = False,
    devices: DevicesOption = None,
    queue: QueueOption = False,
    whole_plan: PlanOption = False,
    detach: DetachOption = False,
    announce_to: AnnounceOption = None,
) -> None:
    """Plan and run training, then print a summary."""
    with collected_seldom():
        from tunekit.api import verbs
    from tunekit.runs.small_files import place_of

    words = overrides or []
    if detach:
        if resume:
            raise TunekitError("--detach and --resume exclude each other", hint="run tunekit resume RUN --detach")
        from tunekit.api.background import start

        _leave(start(recipe, words, devices=devices.split(",") if devices else None, queue=queue))
        return
    _use(devices)
    if not resume and place_of().num_processes == 1 and sys.stdin.isatty() and sys.stdout.isatty():
        existing = verbs.unfinished(recipe, words)
        if existing is not None:
            step, num_steps = existing.status()["step"], existing.status()["num_steps"]
            resume = typer.confirm(f"{existing.path} of this recipe ended after step {step} of {num_steps}; resume it?")
    go = partial(verbs.train, recipe, words, resume=resume, queue=queue)
    _watch(go, "the data and the model's files", announce_to, whole_plan=whole_plan)


def launch(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    nodes: NodesOption = None,
    slurm: Annotated[bool, Option("--slurm", help="Submit to Slurm.")] = False,
    ray: Annotated[bool, Option("--ray", help="Train on a Ray cluster.")] = False,
    sky: Annotated[bool, Option("--sky", help="Provision cloud nodes with SkyPilot.")] = False,
    on: Annotated[
        str | None, Option(metavar="MACHINE", help="Node type, if it differs from this machine, such as 8xh100.")
    ] = None,
    num_nodes: Annotated[int | None, Option(metavar="N", help="Number of nodes. Default: 1.", min=1)] = None,
    print_only: Annotated[bool, Option("--print", help="Print the job without submitting it.")] = False,
    address: Annotated[str | None, Option(help="Ray: cluster address. Default: RAY_ADDRESS, or this machine.")] = None,
    time: Annotated[str | None, Option(help="Slurm: time limit, such as 01:00:00.")] = None,
    partition: Annotated[str | None, Option(help="Slurm: partition.")] = None,
    account: Annotated[str | None, Option(help="Slurm: account.")] = None,
    sbatch_arg: Annotated[list[str] | None, Option(help="Slurm: additional sbatch option, such as --qos=high.")] = None,
) -> None:
    """Train on other machines: over ssh, or with Slurm, Ray or SkyPilot.

    Except with --sky, they share the filesystem of the run folder.
    """
    from tunekit.api import clusters, verbs

    targets = {"--nodes": nodes is not None, "--slurm": slurm, "--ray": ray, "--sky": sky}
    chosen = [name for name, is_given in targets.items() if is_given]
    if len(chosen) != 1:
        raise TunekitError("one launch target is required", hint="pass one of --nodes, --slurm, --ray and --sky")
    of_slurm = {"--time": time, "--partition": partition, "--account": account, "--sbatch-arg": sbatch_arg}
    jobs = {"--on": on, "--num-nodes": num_nodes, "--print": print_only, "--address": address}
    _refuse_unread(chosen[0], {**jobs, **of_slurm})
    words = overrides or []
    if nodes is not None:
        _watch(partial(verbs.launch, recipe, words, nodes=nodes.split(",")), "the hosts and the data")
    elif ray:
        go = partial(clusters.launch_ray, recipe, words, address=address, on=on, num_nodes=num_nodes)
        _watch(go, "the data")
    elif slurm:
        from tunekit.launching.cluster import Wishes

        wishes = Wishes(time, partition, account, tuple(sbatch_arg or ()))
        give = partial(clusters.launch_slurm, recipe, words, wishes=wishes, on=on, num_nodes=num_nodes)
        _submit(give, print_only=print_only)
    else:
        if on is None:
            raise TunekitError("--sky: no machine type", hint="pass one: --on 8xh100")
        _submit(partial(clusters.launch_sky, recipe, words, on=on, num_nodes=num_nodes), print_only=print_only)


_READ_BY: dict[str, tuple[str, ...]] = {
    "--nodes": (),
    "--ray": ("--on", "--num-nodes", "--address"),
    "--sky": ("--on", "--num-nodes", "--print"),
    "--slurm": ("--on", "--num-nodes", "--print", "--time", "--partition", "--account", "--sbatch-arg"),
}
"""Options of `tunekit launch` by the target that reads them."""


def _refuse_unread(target: str, options: dict[str, object]) -> None:
    """Refuse options that a launch target does not read.

    Raises:
        TunekitError: There is one.
    """
    for name, value in options.items():
        if value and name not in _READ_BY[target]:
            readers = " or ".join(other for other, names in _READ_BY.items() if name in names)
            raise TunekitError(f"{name} has no effect with {target}", hint=f"remove it; {readers} reads it")


def _submit(give: "Callable[..., Submitted]", *, print_only: bool) -> None:
    """Print the outcome of a submission, or the job without submitting it. The plan goes to stderr."""
    from tunekit.display.console import Progress, make_error_console

    outlive_readers()
    submitted = give(submit=not print_only, on_event=Progress(make_error_console()))
    print(submitted.script.read_text(encoding="utf-8").rstrip() if print_only else submitted.words)


def resume(
    run: Annotated[
        str, Argument(help="Name or folder of a run or sweep.", metavar="RUN", autocompletion=completion.run_names)
    ],
    overrides: Annotated[
        list[str] | None, Argument(help="Edits to its recipe, such as train.max_steps=200.", metavar="KEY=VALUE")
    ] = None,
    from_: Annotated[
        str | None,
        Option("--from", metavar="CHECKPOINT", help="Step or path, such as 200. Later checkpoints are set aside."),
    ] = None,
    weights_only: Annotated[bool, Option("--weights-only", help="Load only the weights and start over.")] = False,
    nodes: NodesOption = None,
    devices: DevicesOption = None,
    queue: QueueOption = False,
    whole_plan: PlanOption = False,
    detach: DetachOption = False,
    announce_to: AnnounceOption = None,
) -> None:
    """Resume a run or sweep, or train a finished run longer."""
    from tunekit.api import verbs
    from tunekit.sweeps.folder import known_sweep

    if known_sweep(run) is not None:
        if overrides or from_ or weights_only or nodes or devices or queue or detach:
            raise TunekitError(f"{run} is a sweep, which resumes with its own settings", hint=f"tunekit resume {run}")
        from tunekit.cli.sweep import go_on

        go_on(run)
        return
    hosts, words = nodes.split(",") if nodes else None, overrides or []
    if detach:
        if hosts:
            raise TunekitError("--detach and --nodes exclude each other", hint="remove one of them")
        from tunekit.api.background import start_resume

        named = devices.split(",") if devices else None
        _leave(start_resume(run, words, from_=from_, weights_only=weights_only, devices=named, queue=queue))
        return
    _use(devices)
    go = partial(verbs.resume, run, words, from_=from_, weights_only=weights_only, nodes=hosts, queue=queue)
    _watch(go, "the run", announce_to, whole_plan=whole_plan)


def _use(devices: str | None) -> None:
    """Have this process see some devices alone, before anything asks what there are."""
    if devices is not None:
        from tunekit.api.devices import visible_to

        os.environ.update(visible_to(devices.split(",")))


def _leave(run: "Run") -> None:
    """Print how to watch and stop a run in the background."""
    from tunekit.api.background import CONSOLE

    print(f"{run.path} ({run.state}) runs in the background")
    print(f"watch it: tunekit runs show {run.name}   or   tail -f {run.path / CONSOLE}")
    print(f"stop it:  tunekit stop {run.path}")


def _watch(
    start: "Callable[..., object]", what: str, announce_to: int | None = None, *, whole_plan: bool = False
) -> None:
    """Show a run as it goes, in the one process that does so.

    Args:
        start: Starts it, with `on_event`: what is to be told of its events.
        what: What is read first, in words.
        announce_to: The pipe of whoever started this process and waits to hear of the run.
        whole_plan: Print every decision of the plan.
    """
    from tunekit.display.console import Progress, make_console
    from tunekit.process.signals import before_a_run
    from tunekit.runs.small_files import place_of

    outlive_readers()
    progress = Progress(make_console(), whole_plan=whole_plan) if place_of().is_main else None
    announcer = None
    if announce_to is not None:
        from tunekit.api.background import Announcer

        announcer = Announcer(announce_to)
    if progress is not None:
        progress.console.print(f"reading {what}", style="dim")
    try:
        # What ends this program otherwise is to end a run as Ctrl-C does, from its first moment.
        for sign in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(sign) is signal.SIG_DFL:
                signal.signal(sign, before_a_run)
        start(on_event=progress if announcer is None or progress is None else announcer.heard_by(progress))
    except TunekitError as error:
        if announcer is not None:
            announcer.refuse(error)
        raise
    except KeyboardInterrupt as interrupt:
        stopped = interrupt if isinstance(interrupt, Stopped) else Stopped("interrupted", hint=None, exit_code=130)
        if announcer is not None:
            announcer.stopped(stopped)
        if progress is not None:
            progress.stop()
            print(stopped.reason, *filter(None, [stopped.hint]), sep="\n", file=sys.stderr)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        if progress is not None:
            progress.stop()


def stop(
    run: Annotated[
        str, Argument(help="Name or folder of a run or sweep.", metavar="RUN", autocompletion=completion.run_names)
    ],
    now: Annotated[bool, Option("--now", help="Stop at once, without another checkpoint.")] = False,
) -> None:
    """Stop a run or sweep after the current step, with a checkpoint.

    Blocks until it has exited.
    """
    from tunekit.api import verbs
    from tunekit.sweeps.conduct import stop_sweep
    from tunekit.sweeps.folder import known_sweep

    end = verbs.stop if known_sweep(run) is None else stop_sweep
    try:
        print(end(run, now=now, on_wait=lambda words: print(words, flush=True)))
    except KeyboardInterrupt:
        print("not waiting; the run will stop", file=sys.stderr)
        raise typer.Exit(130) from None
