"""Videos, checked by their headers before training, and decoded in it.

Size, rate and number of frames come from the file's streams, without decoding a frame. Which frames are read is decided
by the model's own video processor, from these alone; only they are decoded.
"""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tunekit.data.formats.row_formats import BadRow
from tunekit.data.media.files import own_name, read_file
from tunekit.data.media.pictures import MAX_PIXELS, thumbnail_of
from tunekit.errors import DataError, DependencyError
from tunekit.recipe.sections.data import MediaKind

if TYPE_CHECKING:
    import numpy as np

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg")
"""Suffixes of files of videos."""

MAX_FRAMES = 1_000_000
"""Frames of the longest video that is read: some nine hours."""

MAX_READ_BYTES = 4 * 2**30
"""Bytes of the frames of a video that a processor reads, before it scales them."""


@dataclass(frozen=True)
class Video:
    """A video that was looked at.

    Attributes:
        path: Its file.
        width: Its width, in pixels.
        height: Its height.
        num_frames: Its frames.
        fps: Frames a second.
        digest: SHA-256 of the file.
    """

    kind: ClassVar[MediaKind] = "video"
    path: str
    width: int
    height: int
    num_frames: int
    fps: float
    digest: str

    def to_row(self) -> dict[str, Any]:
        """Return it as a row holds it."""
        size = {"size": [self.width, self.height], "frames": self.num_frames, "fps": self.fps}
        return {"kind": self.kind, "path": self.path, **size, "digest": self.digest}

    @property
    def name(self) -> str:
        """The name of its file; empty if the video stood in the row."""
        return own_name(self.path, self.digest)

    @property
    def size(self) -> tuple[int, int, int, float]:
        """Width, height, number of frames and their rate, on which its tokens depend."""
        return self.width, self.height, self.num_frames, self.fps

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.num_frames / self.fps

    @property
    def words(self) -> str:
        """The video in a few words: `video clip.mp4 640x480 3.2 s`."""
        size = f"{self.width}x{self.height} {self.seconds:,.1f} s"
        return " ".join(filter(None, ("video", self.name, size)))

    @classmethod
    def of_row(cls, value: Mapping[str, Any]) -> "Video":
        """Return the video that a row holds."""
        width, height = value["size"]
        return cls(value["path"], width, height, value["frames"], value["fps"], value["digest"])


def look_at_video(raw: bytes, what: str, path: str) -> Video:
    """Return the video of some bytes, by its streams.

    Args:
        raw: The bytes.
        what: The video, for messages.
        path: Its file.

    Raises:
        BadRow: It is damaged, empty, too long or too large, or there is no video in it.
        DependencyError: PyAV is not installed.
    """
    av = _pyav()
    if not raw:
        raise BadRow(f"{what} is empty")
    try:
        with av.open(io.BytesIO(raw)) as file:
            if not file.streams.video:
                raise BadRow(f"{what} has no video")
            stream = file.streams.video[0]
            width, height, rate = stream.width, stream.height, stream.average_rate or stream.guessed_rate
            num_frames = sum(packet.size > 0 for packet in file.demux(stream))
            num_named = stream.frames
    except av.error.FFmpegError:
        raise BadRow(f"{what} is damaged, or not a video that can be read; convert it to MP4") from None
    if not num_frames or not width or not height:
        raise BadRow(f"{what} has no frames")
    if not rate:
        raise BadRow(f"{what} has no frame rate; convert it to MP4")
    if num_frames < num_named:
        raise BadRow(f"{what} is damaged: {num_frames:,} of its {num_named:,} frames are there")
    if num_frames > MAX_FRAMES:
        raise BadRow(f"{what} has {num_frames:,} frames, more than {MAX_FRAMES:,}; split it")
    if width * height > MAX_PIXELS:
        raise BadRow(f"{what} has {width}x{height} pixels, more than {MAX_PIXELS:,}; scale it down")
    return Video(path, width, height, num_frames, float(rate), hashlib.sha256(raw).hexdigest())


def read_frames(video: Video, indices: Sequence[int]) -> "np.ndarray":
    """Read some frames of a video, RGB, uint8, `(frames, height, width, 3)`.

    Args:
        video: The video.
        indices: Their numbers, rising; one may come several times.

    Raises:
        DataError: It is not the one that was looked at, or cannot be decoded.
        DependencyError: PyAV is not installed.
    """
    import numpy as np

    av, frames, numbers = _pyav(), {}, set(indices)
    raw = read_file(video.path, video.digest, "video")
    try:
        with av.open(io.BytesIO(raw)) as file:
            for index, frame in enumerate(file.decode(video=0)):
                if index in numbers:
                    frames[index] = frame.to_ndarray(format="rgb24")
                if len(frames) == len(numbers):
                    break
    except av.error.FFmpegError as error:
        raise DataError(f"{video.path}: the video is damaged: {error}", hint="replace it") from error
    lost = next((index for index in indices if index not in frames), None)
    if lost is not None:
        problem = f"{video.path}: frame {lost:,} of the video's {video.num_frames:,} cannot be decoded"
        raise DataError(problem, hint="replace it, or convert it to MP4")
    return np.stack([frames[index] for index in indices])


def first_frame(video: Video) -> str:
    """Return a small copy of a video's first frame as a data URL.

    Raises:
        DataError: As for `read_frames`.
    """
    from PIL import Image

    return thumbnail_of(Image.fromarray(read_frames(video, [0])[0]))


def blank_frames(video: Video, indices: Sequence[int]) -> "np.ndarray":
    """Return frames of the size of a video's, without content."""
    import numpy as np

    # Of one value in memory.
    return np.broadcast_to(np.uint8(0), (len(indices), video.height, video.width, 3))


@contextmanager
def decoding(
    processor: Any, videos: Sequence[tuple[Video, Callable[[Sequence[int]], "np.ndarray"]]]
) -> Iterator[list[str]]:
    """Within it, a processor that is given keys of videos reads their frames in a way of ours.

    A processor of Transformers samples frames where it is given files, which it decodes by what is installed
    (transformers 5.24, `BaseVideoProcessor.fetch_videos`).

    Args:
        processor: Processor of the model.
        videos: The videos, each with what returns its frames by their numbers.

    Yields:
        A key for each video.
    """
    from transformers.video_utils import VideoMetadata

    keys = {str(number): pair for number, pair in enumerate(videos)}

    def fetch(keyed: Sequence[str], sample_indices_fn: Callable[..., Any] | None = None) -> tuple[list[Any], list[Any]]:
        frames, metadata = [], []
        for key in keyed:
            video, read = keys[key]
            about = VideoMetadata(
                total_num_frames=video.num_frames,
                fps=video.fps,
                width=video.width,
                height=video.height,
                duration=video.seconds,
            )
            sampled = range(video.num_frames) if sample_indices_fn is None else sample_indices_fn(metadata=about)
            indices = [int(index) for index in sampled]
            num_bytes = len(indices) * video.width * video.height * 3
            if num_bytes > MAX_READ_BYTES:
                raise DataError(
                    f"{video.path}: the processor reads {len(indices):,} frames of {video.width}x{video.height} "
                    f"pixels, {num_bytes / 2**30:.1f} GiB",
                    hint="set model.video_processor, such as {do_sample_frames: true, fps: 1}, or scale the video down",
                )
            about.frames_indices = indices
            frames.append(read(indices))
            metadata.append(about)
        return frames, metadata

    if not keys:
        yield []
        return
    own = processor.video_processor
    own.fetch_videos = fetch
    try:
        yield list(keys)
    finally:
        del own.fetch_videos


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise DependencyError(
            "rows have videos, which the package av reads, and it is not installed", hint="pip install 'tunekit[video]'"
        ) from error
    return av
