"""Sample prompts of rows with media, beside the rows in the run folder.

A recipe's own sample prompts are texts. Where it names none, those of the rows are taken when a run is made.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tunekit.data.media.in_rows import ANY_MARK
from tunekit.data.media.kinds import COLUMN, Medium, media_of
from tunekit.data.media.pictures import Picture, small_copy
from tunekit.runs.small_files import read_list, write_whole
from tunekit.runs.thumbnails import MAX_PICTURES, thumbnail_file

FILE = "data/sample_prompts.json"
"""File of the prompts in a run folder, where some have media."""


@dataclass(frozen=True)
class SamplePrompt:
    """A question of a user.

    Attributes:
        content: Its text, with marks where media stand.
        media: The media, in their order.
    """

    content: str
    media: tuple[Medium, ...] = ()

    @property
    def words(self) -> str:
        """The text with the name of each medium: `[image boat.png] What is it?`"""
        first, *pieces = re.split(ANY_MARK, self.content)
        named = (f"[{medium.kind} {medium.name or medium.digest[:8]}]" for medium in self.media)
        rest = (f"{name}{'' if piece[:1].isspace() else ' '}{piece}" for name, piece in zip(named, pieces, strict=True))
        return (first + "".join(rest)).strip()

    @property
    def pictures(self) -> list[Picture]:
        """The pictures among the media."""
        return [medium for medium in self.media if isinstance(medium, Picture)]

    @property
    def shown(self) -> list[str]:
        """Digests of the pictures that are shown."""
        return [picture.digest for picture in self.pictures[:MAX_PICTURES]]


def save(prompts: Sequence[SamplePrompt], run: Path) -> None:
    """Write prompts and thumbnails of their pictures to the folder of a run.

    Raises:
        DataError: A picture is not the one that was looked at, or cannot be decoded.
    """
    for prompt in prompts:
        for picture in prompt.pictures[:MAX_PICTURES]:
            file = thumbnail_file(run, picture.digest)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(small_copy(picture))
    rows = [{"content": prompt.content, COLUMN: [medium.to_row() for medium in prompt.media]} for prompt in prompts]
    write_whole(run / FILE, json.dumps(rows, ensure_ascii=False))


def read(run: Path) -> list[SamplePrompt]:
    """Return the prompts in the folder of a run; none where no prompt has media.

    Raises:
        RunError: The file is damaged.
    """
    if not (run / FILE).is_file():
        return []
    rows = read_list(run / FILE)
    return [SamplePrompt(row["content"], tuple(media_of(row))) for row in rows]
