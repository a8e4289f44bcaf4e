"""The commands for runs that are there: listed, shown, tagged, annotated and deleted.

The commands that hold runs against each other: side by side, and a run against its own repetition.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tunekit.cli import completion
from tunekit.cli.options import RunArgument, print_json, write_page, write_plot
from tunekit.errors import TunekitError
from tunekit.redact import outlive_readers, without_secrets

runs_app = typer.Typer(
    help="List the runs of this folder; show, tag, annotate or delete one.", invoke_without_command=True
)


@runs_app.callback()
def _runs(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from tunekit.display.console import make_console, runs_table
        from tunekit.runs.run import damaged_runs, list_runs

        runs, damaged = list_runs(), damaged_runs()
        if runs:
            make_console().print(runs_table(runs))
        elif not damaged:
            print("no runs here; `tunekit train sft/quickstart` starts one")
        for run in damaged:
            print(f"note: {run.path / 'status.json'} is damaged; restore it from a copy, or delete the folder")


@runs_app.command("show")
def show_run(
    run: RunArgument, plot: Annotated[Path | None, Option(help="Write the loss curve as a PNG file.")] = None
) -> None:
    """Show a run with its loss curve."""
    from tunekit.display.console import make_console, run_report
    from tunekit.runs.run import find_run

    existing = find_run(run)
    if plot is not None:
        write_plot(plot, existing.plot(), dpi=150)
        print(plot)
        return
    console = make_console()
    console.print(*run_report(existing, console.width), sep="\n")


@runs_app.command("tag")
def tag_run(
    run: Annotated[
        str, Argument(help="A run's name, or its folder.", metavar="RUN", autocompletion=completion.run_names)
    ],
    tags: Annotated[list[str] | None, Argument(help="New tags, replacing the old ones.", metavar="TAG")] = None,
    clear: Annotated[bool, Option("--clear", help="Remove all tags.")] = False,
) -> None:
    """Set the tags of a run; without arguments, show them."""
    from tunekit.runs.run import find_run, set_tags

    existing = find_run(run, exact=True)
    if tags and clear:
        raise TunekitError("tags and --clear exclude each other", hint="pass one of them")
    if tags or clear:
        set_tags(existing, tags or ())
    print(f"{existing.name}: {', '.join(existing.tags) or 'no tags'}")


@runs_app.command("note")
def note_run(
    run: Annotated[
        str, Argument(help="A run's name, or its folder.", metavar="RUN", autocompletion=completion.run_names)
    ],
    note: Annotated[str | None, Argument(help="New note, replacing the old one.", metavar="TEXT")] = None,
    clear: Annotated[bool, Option("--clear", help="Remove the note.")] = False,
) -> None:
    """Set the note on a run; without arguments, show it."""
    from tunekit.runs.run import find_run, set_note

    existing = find_run(run, exact=True)
    if note is not None and clear:
        raise TunekitError("TEXT and --clear exclude each other", hint="pass one of them")
    if note is not None or clear:
        set_note(existing, note or "")
    print(f"{existing.name}: {existing.note or 'no note'}")


@runs_app.command("delete")
def delete(
    run: Annotated[
        str, Argument(help="A run's full name, or its folder.", metavar="RUN", autocompletion=completion.run_names)
    ],
    yes: Annotated[bool, Option("--yes", "-y", help="Skip the confirmation.")] = False,
) -> None:
    """Delete a run that has ended, with its checkpoints and its model."""
    from tunekit.launching.stop import delete_run
    from tunekit.runs.run import find_run

    existing = find_run(run, exact=True)
    if existing.name != run and existing.path != Path(run):
        raise TunekitError(f"no run named {run!r}", hint=f"pass the full name, such as {existing.name}")
    if not yes:
        if not sys.stdin.isatty():
            raise TunekitError(f"deleting {existing.path} needs confirmation", hint="add --yes")
        typer.confirm(f"Delete {existing.path} and all its contents?", abort=True)
    delete_run(existing)
    print(f"{existing.path} deleted")


def compare(
    runs: Annotated[
        list[str], Argument(help="Names or folders of runs.", metavar="RUN", autocompletion=completion.run_names)
    ],
    html: Annotated[Path | None, Option(help="Write a self-contained HTML page.")] = None,
    plot: Annotated[Path | None, Option(help="Write the curves as a PNG file.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print recipe differences and metrics as JSON.")] = False,
) -> None:
    """Compare runs: recipe differences, results and curves."""
    from tunekit.display.comparison import comparison_parts
    from tunekit.display.console import make_console
    from tunekit.reporting import comparison

    result = comparison.compare(runs)
    if html is not None:
        write_page(html, result.to_html())
    if plot is not None:
        write_plot(plot, result.plot(), dpi=150, format="png")
    if as_json:
        print_json(without_secrets(result.to_dict()))
        return
    if html is not None or plot is not None:
        print(*filter(None, (html, plot)), sep="\n")
        return
    console = make_console()
    console.print(*comparison_parts(result, console.width), sep="\n")


def rerun(
    run: RunArgument, name: Annotated[str | None, Option(help="Name of the new folder in runs/.")] = None
) -> None:
    """Repeat a finished run and compare the losses: exit code 3 if they differ."""
    from tunekit.api import rerun as repetition
    from tunekit.display.console import Progress

    outlive_readers()
    progress = Progress()
    try:
        agreement = repetition.rerun(run, name=name, on_event=progress)
    finally:
        progress.stop()
    print(*agreement.lines(), sep="\n")
    if not agreement.agrees:
        raise typer.Exit(3)
