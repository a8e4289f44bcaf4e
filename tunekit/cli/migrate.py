"""The command that makes recipes of other tools' configurations."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from tunekit.cli.options import print_json
from tunekit.errors import TunekitError


def migrate(
    file: Annotated[
        Path,
        Argument(
            help="A configuration of Axolotl, LLaMA-Factory, TRL, torchtune or ms-swift: YAML, JSON, or a script that "
            "calls one of them.",
            metavar="FILE",
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        Argument(
            help="Behind --: the other tool's command, with what it was given besides: -- trl dpo --beta 0.1",
            metavar="[-- ARGUMENTS]",
        ),
    ] = None,
    output: Annotated[Path | None, Option("-o", help="Write the recipe to this file, which is not there yet.")] = None,
    tool: Annotated[
        str | None,
        Option(
            "--from",
            metavar="TOOL",
            help="Whose it is: axolotl, llama-factory, trl, torchtune or ms-swift. Known by its keys where left out.",
        ),
    ] = None,
    num_devices: Annotated[
        int | None, Option(min=1, help="Devices that it was meant for: they multiply the batch of a step.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print recipe and report as JSON.")] = False,
) -> None:
    """Make a recipe of another tool's configuration, and say what became of each of its keys."""
    from tunekit.display.console import make_console
    from tunekit.display.migration import migration_parts
    from tunekit.migration.migration import migrate as make

    migration = make(file, tool=tool, num_devices=num_devices, arguments=arguments or ())
    if output is not None:
        _write_new(output, migration.text)
    if as_json:
        print_json(migration.to_dict())
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
