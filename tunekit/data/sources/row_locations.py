"""Locations, in the user's files, of the rows that are trained on, stored beside them.

What a trainer reads has lost it: rows are mixed, cut, split and packed. When something goes wrong with a few of them,
a user wants to open the file at the line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast

from tunekit.data.sources.rows import Part, Rows, place

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Places:
    """Locations of many rows.

    Attributes:
        files: The files, by name.
        units: What `number` counts in each of them: `line` or `row`.
        file: Which of the files each row is in, int32, `(rows,)`.
        number: Where it starts there, counted from 1, int32, `(rows,)`.
    """

    files: tuple[str, ...]
    units: tuple[str, ...]
    file: "np.ndarray"
    number: "np.ndarray"

    @classmethod
    def of(cls, sources: Sequence[Rows], source: "np.ndarray", index: "np.ndarray") -> Self:
        """The places of rows of some sources.

        Args:
            sources: The sources.
            source: Which of them each row is from.
            index: Its index there.
        """
        import numpy as np

        files: list[str] = []
        units: list[str] = []
        file = np.empty(len(index), dtype=np.int32)
        number = np.empty(len(index), dtype=np.int32)
        for position, rows in enumerate(sources):
            here = source == position
            parts = rows.parts or (Part(0, rows.source),)
            firsts = np.array([part.first for part in parts])
            file[here] = len(files) + np.searchsorted(firsts, index[here], side="right") - 1
            number[here] = np.asarray(rows.numbers)[index[here]]
            files += [part.name for part in parts]
            units += [rows.unit] * len(parts)
        return cls(tuple(files), tuple(units), file, number)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read locations that `save` wrote."""
        import numpy as np

        with np.load(path) as archive:
            return cls(
                tuple(archive["files"].tolist()),
                tuple(archive["units"].tolist()),
                archive["in_file"],
                archive["number"],
            )

    def save(self, path: Path) -> None:
        """Write them to an `.npz` file."""
        import numpy as np

        files, units = np.array(self.files), np.array(self.units)
        np.savez(path, files=files, units=units, in_file=self.file, number=self.number)

    def __getitem__(self, row: int) -> str:
        """Return the location of a row: `chats.jsonl:17`, or `chats.parquet row 17`."""
        file = int(self.file[row])
        return place(self.files[file], cast(Literal["line", "row"], self.units[file]), int(self.number[row]))
