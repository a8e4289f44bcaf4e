"""Audio clips, checked by their headers before training, and decoded and resampled in it.

A clip's length comes from its header. Only samples that are floats are read whole before training: they alone can be
no numbers. A processor takes one channel at a sample rate of its own: channels become their mean.
"""

import base64
import hashlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tunekit.data.formats.row_formats import BadRow
from tunekit.data.media.files import own_name, read_file
from tunekit.errors import DataError, DependencyError
from tunekit.recipe.sections.data import MediaKind

if TYPE_CHECKING:
    import numpy as np

MAX_SECONDS = 3600
"""Length of the longest clip that is read; most processors take far less."""

CLIP_SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64")
"""Suffixes of files of audio."""

EXCERPT_SECONDS, EXCERPT_RATE = 10, 16_000
"""Length and sample rate of what a preview plays of a clip."""

_FLOATS = ("FLOAT", "DOUBLE")
_NOT_RECOGNISED = 1
"""libsndfile's code for a file of no format that it knows."""
_BLOCK_FRAMES = 2**18


@dataclass(frozen=True)
class Clip:
    """An audio clip that was looked at.

    Attributes:
        path: Its file.
        num_frames: Its samples, of all channels at once.
        sample_rate: Samples a second.
        digest: SHA-256 of the file.
    """

    kind: ClassVar[MediaKind] = "audio"
    path: str
    num_frames: int
    sample_rate: int
    digest: str

    def to_row(self) -> dict[str, Any]:
        """Return it as a row holds it."""
        length = {"frames": self.num_frames, "sample_rate": self.sample_rate}
        return {"kind": self.kind, "path": self.path, **length, "digest": self.digest}

    @property
    def name(self) -> str:
        """The name of its file; empty if the clip stood in the row."""
        return own_name(self.path, self.digest)

    @property
    def size(self) -> tuple[int, int]:
        """Number of frames and sample rate, on which its tokens depend."""
        return self.num_frames, self.sample_rate

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.num_frames / self.sample_rate

    @property
    def words(self) -> str:
        """The clip in a few words: `audio clip.wav 3.2 s`."""
        return " ".join(filter(None, ("audio", self.name, f"{self.seconds:,.1f} s")))

    @classmethod
    def of_row(cls, value: Mapping[str, Any]) -> "Clip":
        """Return the clip that a row holds."""
        return cls(value["path"], value["frames"], value["sample_rate"], value["digest"])

    def num_samples(self, sample_rate: int) -> int:
        """Return the number of its samples at another rate, rounded; one at the least."""
        return max(1, (2 * self.num_frames * sample_rate + self.sample_rate) // (2 * self.sample_rate))


def look_at_clip(raw: bytes, what: str, path: str) -> Clip:
    """Return the clip of some bytes, by its header; what follows is checked as far as that costs no decoding.

    Args:
        raw: The bytes.
        what: The clip, for messages.
        path: Its file.

    Raises:
        BadRow: It is damaged, empty or too long, or has samples that are no numbers.
        DependencyError: The packages that read audio are not installed.
    """
    soundfile = _soundfile()
    if not raw:
        raise BadRow(f"{what} is empty")
    try:
        with soundfile.SoundFile(io.BytesIO(raw)) as file:
            num_frames, sample_rate = file.frames, file.samplerate
            if num_frames < 1:
                raise BadRow(f"{what} has no samples")
            if num_frames > MAX_SECONDS * sample_rate:
                seconds = f"{num_frames / sample_rate:,.0f} s"
                raise BadRow(f"{what} has {seconds} of audio, more than {MAX_SECONDS:,} s; split it")
            if file.subtype in _FLOATS and not _is_finite(file):
                raise BadRow(f"{what} has samples that are NaN or infinite")
            file.seek(num_frames - 1)
            is_cut = len(file.read(1)) < 1 or _is_cut(raw)
    except soundfile.LibsndfileError as error:
        if error.code == _NOT_RECOGNISED:
            raise BadRow(
                f"{what} is not audio that can be read (WAV, FLAC, MP3, Ogg, AIFF); convert it to one of these"
            ) from None
        raise BadRow(f"{what} is damaged: the file cannot be decoded") from None
    if is_cut:
        raise BadRow(f"{what} is damaged: the file ends within the audio")
    return Clip(path, num_frames, sample_rate, hashlib.sha256(raw).hexdigest())


def read_clip(clip: Clip, sample_rate: int) -> "np.ndarray":
    """Read the samples of a clip: the mean of its channels at a sample rate, float32, `(samples,)`.

    Raises:
        DataError: It is not the one that was looked at, or cannot be decoded.
        DependencyError: The packages that read audio are not installed.
    """
    import numpy as np

    soundfile = _soundfile()
    raw = read_file(clip.path, clip.digest, "audio clip")
    try:
        samples, own_rate = soundfile.read(io.BytesIO(raw), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        problem = f"{clip.path}: the audio clip is damaged: the file cannot be decoded"
        raise DataError(problem, hint="replace it") from error
    if (len(samples), own_rate) != clip.size:
        problem = f"{clip.path}: the audio clip has {len(samples):,} samples, but its header says {clip.num_frames:,}"
        raise DataError(problem, hint="replace it, or convert it to WAV or FLAC")
    mono = samples.mean(axis=1)
    if own_rate != sample_rate:
        mono = _soxr().resample(mono, own_rate, sample_rate)
    num_samples = clip.num_samples(sample_rate)
    # A resampler rounds the number in its own way.
    return np.pad(mono[:num_samples], (0, max(0, num_samples - len(mono)))).astype(np.float32)


def excerpt(clip: Clip) -> str:
    """Return the beginning of a clip as a data URL that browsers play: WAV of one channel.

    Raises:
        DataError: As for `read_clip`.
    """
    file = io.BytesIO()
    samples = read_clip(clip, EXCERPT_RATE)[: EXCERPT_SECONDS * EXCERPT_RATE]
    _soundfile().write(file, samples, EXCERPT_RATE, format="WAV", subtype="PCM_16")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


def _is_finite(file: Any) -> bool:
    import numpy as np

    return all(np.isfinite(block).all() for block in file.blocks(_BLOCK_FRAMES, dtype="float32"))


def _is_cut(raw: bytes) -> bool:
    """Return whether the end of a file of WAV or Ogg is missing, which libsndfile reads as a shorter one."""
    if raw.startswith(b"RIFF"):
        size = int.from_bytes(raw[4:8], "little")
        # Written by what did not know the size yet.
        return size != 0xFFFFFFFF and size + 8 > len(raw) + size % 2
    last_page = raw.rfind(b"OggS")
    # The flag of the last page of a stream.
    return raw.startswith(b"OggS") and not raw[last_page + 5] & 4


def _soundfile() -> Any:
    try:
        import soundfile
    except ImportError as error:
        raise _missing("soundfile") from error
    return soundfile


def _soxr() -> Any:
    try:
        import soxr
    except ImportError as error:
        raise _missing("soxr") from error
    return soxr


def _missing(package: str) -> DependencyError:
    return DependencyError(
        f"rows have audio, which the package {package} reads, and it is not installed",
        hint="pip install 'tunekit[audio]'",
    )
