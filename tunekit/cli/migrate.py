"""The command that makes recipes of other tools' configurations."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tunekit.errors import TunekitError


def migrate(
    file: Annotated[
        Path,
        typer.Argument(
            help="A configuration of Axolotl, LLaMA-Factory, TRL, torchtune or ms-swift: YAML, JSON, or a script that "
            "calls one of them.",
            metavar="FILE",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Behind --: the other tool's command, with what it was given besides: -- trl dpo --beta 0.1",
            metavar="[-- ARGUMENTS]",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the recipe to this file, which is not there yet.")
    ] = None,
    tool: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="TOOL",
            help="Whose it is: axolotl, llama-factory, trl, torchtune or ms-swift. Known by its keys where left out.",
        ),
    ] = None,
    num_devices: Annotated[
        int | None,
        typer.Option("--num-devices", min=1, help="Devices that it was meant for: they multiply the batch of a step."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print recipe and report as JSON.")] = False,
) -> None:
    """Make a recipe of another tool's configuration, and say what became of each of its keys."""
    from tunekit.display.console import make_console
    from tunekit.display.migration import migration_parts
    from tunekit.migration.migration import migrate as make

    migration = make(file, tool=tool, num_devices=num_devices, arguments=arguments or ())
    if output is not None:
        _write_new(output, migration.text)
    if as_json:
        print(json.dumps(migration.to_dict(), indent=2, ensure_ascii=False))
        return
    console = make_console()
    console.print(*migration_parts(migration), sep="\n")
    if output is not None:
        print(f"{output}: written; `tunekit plan {output}` says how it would run")


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise TunekitError(f"'{path}' is there already", hint="name a new file, or remove it") from error
    except OSError as error:
        problem = f"cannot write '{path}': {error.strerror}"
        raise TunekitError(problem, hint="name a file in a folder that exists") from error
