"""The commands for runs that are there: listed, shown, tagged and deleted."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tunekit.errors import TunekitError, writing

RunArgument = Annotated[str, typer.Argument(help="A run's name, the beginning of it, or its folder.", metavar="RUN")]

runs_app = typer.Typer(help="List the runs of this folder; show, tag or delete one.", invoke_without_command=True)


@runs_app.callback()
def _runs(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from tunekit.display.console import make_console, runs_table
        from tunekit.runs.run import damaged_runs, list_runs

        runs, damaged = list_runs(), damaged_runs()
        if runs:
            make_console().print(runs_table(runs))
        elif not damaged:
            print("no runs here; `tunekit train sft/quickstart` makes one")
        for run in damaged:
            print(f"note: {run.path / 'status.json'} is damaged; put it back from a copy, or delete the folder")


@runs_app.command("show")
def show_run(
    run: RunArgument,
    plot: Annotated[Path | None, typer.Option(help="Write the loss curve as a PNG file.")] = None,
) -> None:
    """Show a run with its loss curve."""
    from tunekit.display.console import make_console, run_report
    from tunekit.runs.run import find_run

    existing = find_run(run)
    if plot is not None:
        figure = existing.plot()
        with writing(plot):
            figure.savefig(plot, dpi=150)
        print(plot)
        return
    console = make_console()
    console.print(*run_report(existing, console.width), sep="\n")


@runs_app.command("tag")
def tag_run(
    run: Annotated[str, typer.Argument(help="A run's name, or its folder.", metavar="RUN")],
    tags: Annotated[list[str] | None, typer.Argument(help="Its tags from now on.", metavar="TAG")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take all tags away.")] = False,
) -> None:
    """Give a run tags in the place of those that it has; without any, say which it has."""
    from tunekit.runs.run import find_run, set_tags

    existing = find_run(run, exact=True)
    if tags and clear:
        raise TunekitError("tags and --clear are both given", hint="give one of them")
    if tags or clear:
        set_tags(existing, tags or ())
    print(f"{existing.name}: {', '.join(existing.tags) or 'no tags'}")


@runs_app.command("delete")
def delete(
    run: Annotated[str, typer.Argument(help="A run's whole name, or its folder.", metavar="RUN")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a run that is over, with its checkpoints and its model."""
    from tunekit.launching.delete import delete_run
    from tunekit.runs.run import find_run

    existing = find_run(run, exact=True)
    if existing.name != run and existing.path != Path(run):
        raise TunekitError(f"no run is called {run!r}", hint=f"name the run wholly, such as {existing.name}")
    if not yes:
        if not sys.stdin.isatty():
            raise TunekitError(f"{existing.path} is not deleted without a word", hint="add --yes")
        typer.confirm(f"Delete {existing.path} with all that is in it?", abort=True)
    delete_run(existing)
    print(f"{existing.path} is deleted")
