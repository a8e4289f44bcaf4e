"""`--help` of every command is the recorded one: words, options, defaults and panels, not the frames around them."""

import re

import click
import typer.main

from tests.commands import run_command
from tests.photographs.recorded import check_recorded
from tunekit.cli.app import app

FRAME = re.compile(r"\x1b\[[\d;]*m|[╭╮╰╯─│]+")
PROGRAM = re.compile(r"python -m [\w.]+\.(?=tunekit)")
"""What click puts before the program's own name where tests were started with `python -m pytest`."""
USAGE = re.compile(r"^( *Usage: .*)\n {20,}", re.MULTILINE)
"""A usage that is wrapped, which is wider under `python -m pytest`."""
WIDTH = {"COLUMNS": "100"}


def commands(group: click.Group | None = None, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the words of every command, those with commands below them first."""
    group = group or typer.main.get_command(app)
    found = [before]
    for name, command in sorted(group.commands.items()):
        words = (*before, *name.split())
        found += commands(command, words) if hasattr(command, "commands") else [words]
    return found


def help_of(words: tuple[str, ...]) -> str:
    """Return the help of a command, framed or not, in lines without spaces at their ends."""
    answer = run_command(*words, "--help", env=WIDTH)
    assert answer.returncode == 0, answer.stderr
    lines = (PROGRAM.sub("", FRAME.sub("", line)).rstrip() for line in answer.stdout.splitlines())
    return USAGE.sub(r"\1 ", "\n".join(line for line in lines if line))


def test_the_help_of_every_command_is_the_recorded_one():
    texts = [f"$ tunekit {' '.join([*words, '--help'])}\n{help_of(words)}\n" for words in commands()]
    assert len(texts) > 25
    check_recorded("help.txt", "\n".join(texts))
