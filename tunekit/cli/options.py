"""Arguments and options that several commands have, and what they do with them alike."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from tunekit.cli import completion
from tunekit.errors import TunekitError, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

RecipeArgument = Annotated[
    str,
    Argument(
        help="A recipe file, or the name of a shipped recipe.", metavar="RECIPE", autocompletion=completion.recipe_names
    ),
]
OverridesArgument = Annotated[
    list[str] | None, Argument(help="Overrides, such as train.max_steps=10.", metavar="KEY=VALUE")
]
AnnounceOption = Annotated[int | None, Option(hidden=True)]
"""Pipe of whoever started the process and waits to hear of its folder."""

RunArgument = Annotated[
    str,
    Argument(help="A run's name, a prefix of it, or its folder.", metavar="RUN", autocompletion=completion.run_names),
]
ModelArgument = Annotated[
    str,
    Argument(
        help="A run (name or folder) or a model (folder or Hub name).",
        metavar="RUN|MODEL",
        autocompletion=completion.model_names,
    ),
]
NodesOption = Annotated[
    str | None,
    Option(
        metavar="HOST,HOST",
        help="ssh hosts that share a filesystem with this machine, such as node1,user@node2:2222.",
    ),
]
CheckpointOption = Annotated[
    str | None, Option(metavar="STEP", help="Use the checkpoint of this step instead of the result.")
]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"],
    Option(metavar="DEVICE", help="auto, cpu or cuda; auto: a GPU if available."),
]
TemperatureOption = Annotated[float, Option(metavar="X", help="Sampling temperature; 0: greedy decoding.", min=0)]
PortOption = Annotated[int, Option(metavar="PORT", min=0, max=65535, help="0 picks a free port.")]


def passed_on(arguments: dict[str, Any], *own: str) -> dict[str, Any]:
    """Return the arguments of a command that its verb has under the same names: all but the command's own."""
    return {name: value for name, value in arguments.items() if name not in own}


def print_json(document: Any) -> None:
    """Print plain data as JSON for other programs."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def write_page(path: Path, page: str) -> None:
    """Write a page to a file that the user named."""
    with writing(path):
        path.write_text(page, encoding="utf-8")


def write_plot(path: Path, figure: "Figure", **how: Any) -> None:
    """Write a figure to a file that the user named."""
    with writing(path):
        figure.savefig(path, **how)


def facts_table(rows: Iterable[tuple[str, object]]) -> "Table":
    """A table of names and their descriptions."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(name, Text(str(value)))
    return table


def secret_in(file: Path, option: str, what: str) -> str:
    """The secret that a file holds.

    Args:
        file: The file.
        option: The option that names it.
        what: What it holds: `password`.

    Raises:
        TunekitError: It cannot be read, or holds none.
    """
    hint = f"pass a text file that contains only the {what}"
    try:
        secret = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TunekitError(f"{option} {file}: cannot be read: {error}", hint=hint) from error
    if not secret:
        raise TunekitError(f"{option} {file}: is empty", hint=hint)
    return secret
