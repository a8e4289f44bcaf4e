"""Process that reads a long history for the server. It imports little, so that it starts at once."""

import contextlib
from multiprocessing.connection import Connection

from tunekit import frontend

PART_BYTES = 2**24
"""After how much of a file it is told how far it is."""


def read_parts(connection: Connection, reader: frontend.EventReader) -> None:
    """Read a file to its end, and send what was read after each part."""
    # Where the server has ended, nobody wants it any more.
    with contextlib.suppress(BrokenPipeError):
        while reader.is_behind:
            reader.read(PART_BYTES)
            connection.send(reader)
