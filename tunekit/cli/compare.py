"""The commands that hold runs against each other: side by side, and a run against its own repetition."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tunekit.errors import writing
from tunekit.streams import outlive_readers


def compare(
    runs: Annotated[list[str], typer.Argument(help="Names or folders of runs.", metavar="RUN")],
    html: Annotated[Path | None, typer.Option("--html", help="Write one page that needs nothing else.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write the curves as a PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print recipes' differences and figures as JSON.")] = False,
) -> None:
    """Show runs side by side: in what they differ, what came of them, and their curves."""
    from tunekit.display.comparison import comparison_parts
    from tunekit.display.console import make_console
    from tunekit.redact import without_secrets
    from tunekit.reporting import comparison

    result = comparison.compare(runs)
    if html is not None:
        page = result.to_html()
        with writing(html):
            html.write_text(page, encoding="utf-8")
    if plot is not None:
        figure = result.plot()
        with writing(plot):
            figure.savefig(plot, dpi=150, format="png")
    if as_json:
        print(json.dumps(without_secrets(result.to_dict()), indent=2, ensure_ascii=False))
        return
    if html is not None or plot is not None:
        print(*filter(None, (html, plot)), sep="\n")
        return
    console = make_console()
    console.print(*comparison_parts(result, console.width), sep="\n")


def rerun(
    run: Annotated[str, typer.Argument(help="A run's name, the beginning of it, or its folder.", metavar="RUN")],
    name: Annotated[str | None, typer.Option("--name", help="Name of the new folder in runs/.")] = None,
) -> None:
    """Repeat a finished run from its folder, and say whether its losses come out again: exit code 3 where not."""
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
