"""Sample prompts of rows with pictures, beside the rows in the run folder.

A recipe's own sample prompts are texts. Where it names none, those of the rows are taken when a run is made.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunekit.data.images.in_rows import MARK
from tunekit.data.images.pictures import Picture, small_copy
from tunekit.runs.small_files import read_list, write_whole
from tunekit.runs.thumbnails import MAX_PICTURES, thumbnail_file

FILE = "data/sample_prompts.json"
"""File of the prompts in a run folder, where some have pictures."""


@dataclass(frozen=True)
class PicturePrompt:
    """A question of a user.

    Attributes:
        content: Its text, with marks where pictures stand.
        pictures: The pictures, in their order.
    """

    content: str
    pictures: tuple[Picture, ...] = ()

    @property
    def words(self) -> str:
        """The text with the name of each picture: `[image boat.png] What is it?`"""
        first, *pieces = self.content.split(MARK)
        named = (f"[image {picture.name or picture.digest[:8]}]" for picture in self.pictures)
        rest = (f"{name}{'' if piece[:1].isspace() else ' '}{piece}" for name, piece in zip(named, pieces, strict=True))
        return (first + "".join(rest)).strip()

    @property
    def shown(self) -> list[str]:
        """Digests of the pictures that are shown."""
        return [picture.digest for picture in self.pictures[:MAX_PICTURES]]


def save(prompts: Sequence[PicturePrompt], run: Path) -> None:
    """Write prompts and thumbnails of their pictures to the folder of a run.

    Raises:
        DataError: A picture is not the one that was looked at, or cannot be decoded.
    """
    for prompt in prompts:
        for picture in prompt.pictures[:MAX_PICTURES]:
            file = thumbnail_file(run, picture.digest)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(small_copy(picture))
    rows = [
        {"content": prompt.content, "images": [picture.to_row() for picture in prompt.pictures]} for prompt in prompts
    ]
    write_whole(run / FILE, json.dumps(rows, ensure_ascii=False))


def read(run: Path) -> list[PicturePrompt]:
    """Return the prompts in the folder of a run; none where no prompt has pictures.

    Raises:
        RunError: The file is damaged.
    """
    if not (run / FILE).is_file():
        return []
    rows = read_list(run / FILE)
    return [PicturePrompt(row["content"], tuple(map(Picture.of_row, row["images"]))) for row in rows]
