"""The commands for many runs of one recipe: `tunekit sweep`, and `tunekit sweep show` for their status.

`tunekit stop` and `tunekit resume` take a sweep as they take a run. Exit codes are a run's; where a run of the sweep
failed or was stopped by itself it is 2, when all others are done.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from tunekit.cli import completion
from tunekit.cli.options import AnnounceOption, print_json, write_plot
from tunekit.errors import Stopped, TunekitError
from tunekit.redact import outlive_readers

if TYPE_CHECKING:
    from tunekit.sweeps.folder import Sweep

JsonOption = Annotated[bool, Option("--json", help="Print the status of all runs as JSON.")]


def sweep(
    recipe: Annotated[
        str | None,
        Argument(
            help="A recipe file, or the name of a shipped recipe.",
            metavar="RECIPE",
            autocompletion=completion.recipe_names,
        ),
    ] = None,
    words: Annotated[
        list[str] | None,
        Argument(
            help="Values to try, such as train.learning_rate=1e-5,1e-4 or =1e-5..1e-3; a single value applies to all "
            "runs.",
            metavar="KEY=VALUE,VALUE",
        ),
    ] = None,
    random: Annotated[int | None, Option(metavar="N", help="Sample N random combinations.", min=1)] = None,
    optuna: Annotated[int | None, Option(metavar="N", help="Let Optuna choose N combinations.", min=1)] = None,
    seed: Annotated[int, Option(metavar="N", help="Random seed.", min=0)] = 0,
    by: Annotated[
        str | None, Option(metavar="METRIC", help="Metric to rank by, such as eval_loss. Default: the loss or reward.")
    ] = None,
    parallel: Annotated[
        int | None, Option(metavar="N", help="Concurrent runs. Default: one, or one per accelerator.", min=1)
    ] = None,
    resume: Annotated[str | None, Option(metavar="SWEEP", help="Resume a sweep by name or folder.")] = None,
    as_json: JsonOption = False,
    announce_to: AnnounceOption = None,
) -> None:
    """Train with combinations of values and rank the results.

    Ranges are sampled, on a log scale if their ends are a factor of 10 or more apart.

    Prefix linear: or log: to choose, such as train.learning_rate=linear:1e-5..1e-3
    """
    if resume is not None:
        if recipe is not None:
            problem = "--resume and a recipe exclude each other"
            raise TunekitError(problem, hint="remove the recipe: a sweep resumes with its own recipe")
        go_on(resume, as_json=as_json)
        return
    if recipe is None:
        raise TunekitError("no recipe", hint="tunekit sweep RECIPE train.learning_rate=1e-5,1e-4")
    from tunekit.sweeps.begin import sweep as begin
    from tunekit.sweeps.values import read_words

    axes, overrides = read_words(words or [])
    start = partial(begin, recipe, axes, overrides, random=random, optuna=optuna, seed=seed, by=by, parallel=parallel)
    _conduct(start, "the data, planning all combinations", as_json=as_json, announce_to=announce_to)


def show_sweep(
    sweep: Annotated[str, Argument(help="A sweep's name, a prefix of it, or its folder.", metavar="SWEEP")],
    plot: Annotated[Path | None, Option(help="Write the plot to this PNG file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the status of a sweep's runs."""
    from tunekit.sweeps.folder import find_sweep

    existing = find_sweep(sweep)
    if plot is not None:
        from tunekit.sweeps.page import plot as draw

        write_plot(plot, draw(existing), dpi=130)
        print(plot)
        return
    _show(existing, as_json=as_json)


def go_on(name: str, *, as_json: bool = False) -> None:
    """Resume a sweep, and show its status at the end."""
    from tunekit.sweeps.conduct import resume_sweep

    _conduct(partial(resume_sweep, name), "the sweep", as_json=as_json)


def _conduct(start: "Callable[..., Sweep]", what: str, *, as_json: bool, announce_to: int | None = None) -> None:
    """Show a sweep as it goes, and its table. What is told on the way goes to stderr where the table is JSON.

    Args:
        start: Conducts it, with `on_event`: what is to be told of its runs.
        what: What is read first, in words.
        as_json: Whether the table is JSON.
        announce_to: The pipe of whoever started this process and waits to hear of the sweep.
    """
    from tunekit.api.background import Announcer
    from tunekit.display.console import make_console, make_error_console
    from tunekit.display.sweep import SweepProgress
    from tunekit.sweeps.folder import FINISHED, PRUNED
    from tunekit.sweeps.page import can_plot, save_page, save_plot

    outlive_readers()
    console = make_error_console() if as_json else make_console()
    console.print(f"reading {what}", style="dim")
    progress = SweepProgress(console)
    announcer = None if announce_to is None else Announcer(announce_to)
    try:
        finished = start(on_event=progress if announcer is None else announcer.heard_by(progress))
    except TunekitError as error:
        if announcer is not None:
            announcer.refuse(error)
        raise
    except Stopped as stopped:
        if announcer is not None:
            announcer.stopped(stopped)
        print(stopped.reason, *filter(None, [stopped.hint]), sep="\n", file=sys.stderr)
        raise typer.Exit(stopped.exit_code) from None
    console.print()
    _show(finished, as_json=as_json)
    written = [save_page(finished), save_plot(finished)]
    console.print("written:", *(str(path) for path in written if path is not None))
    if not can_plot():
        console.print("note: sweep.png needs matplotlib: pip install 'tunekit[notebook]'")
    unfinished = [outcome for outcome in finished.outcomes() if outcome.state not in (FINISHED, PRUNED)]
    if unfinished:
        numbers = ", ".join(f"{outcome.trial.number} {outcome.state}" for outcome in unfinished)
        hint = f"see tunekit sweep show {finished.path}"
        raise TunekitError(f"{len(unfinished)} of {finished.spec.num_runs} runs did not finish: {numbers}", hint=hint)


def _show(found: "Sweep", *, as_json: bool) -> None:
    from tunekit.display.console import make_console
    from tunekit.display.sweep import sweep_table

    if as_json:
        print_json(found.to_dict())
        return
    make_console().print(sweep_table(found, found.outcomes()))
