"""Fenced blocks of Markdown pages that must be true: the README and the documentation.

A block whose info string names a file (```yaml mine.yaml, or ```yaml title="mine.yaml") is written to that file. `bash`
blocks are run as they stand; `sh` blocks need a network, a cluster or a GPU, and are only parsed.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r'^```(\w+) ?(?:title="(\S+)"|(\S*))\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SEPARATORS = ("|", "&&", ";", ">", "<", "&")


class Block(NamedTuple):
    """A fenced block: its language, the file that it is, and its text."""

    language: str
    file: str
    text: str


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(language, title or name, body) for language, title, name, body in FENCE.findall(text)]


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the arguments of each `tunekit` command of a shell block."""
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if word not in SEPARATORS:
                command.append(word)
                continue
            if command and command[0] == "tunekit":
                yield command[1:]
            command = []


def write_files(blocks: Sequence[Block], folder: Path) -> None:
    """Write the blocks that are files."""
    for block in blocks:
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")


def run_blocks(blocks: Sequence[Block], folder: Path) -> None:
    """Run the shell and Python blocks in order, as they stand, in a folder with the files of the page.

    Raises:
        AssertionError: One fails.
    """
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": scripts + os.pathsep + os.environ["PATH"]}
    for block in blocks:
        write_files([block], folder)
        if block.language == "bash" and "pip install" not in block.text:
            command = ["bash", "-euo", "pipefail", "-c", block.text]
        elif block.language == "python" and not block.file:
            command = [sys.executable, "-c", block.text]
        else:
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"


def check_shown(shown: str, printed: str) -> None:
    """Check that lines stand in an output, in order; `...` stands for any lines.

    Raises:
        AssertionError: One does not.
    """
    lines = iter([line.rstrip() for line in printed.splitlines()])
    for line in shown.splitlines():
        assert line == "..." or line.rstrip() in lines, f"a page shows a line that is not printed or elsewhere: {line}"
