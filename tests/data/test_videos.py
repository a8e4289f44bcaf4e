"""Videos of rows: every way to write them, and every way in which they are broken. Tokens are in `test_video`."""

import base64
import json

import av
import numpy as np
import pytest

from tests.video import save_video
from tunekit.data.formats.row_formats import learner_of
from tunekit.data.media import videos
from tunekit.data.media.kinds import KINDS
from tunekit.data.media.videos import Video, read_frames
from tunekit.data.sources.load import load_data
from tunekit.errors import DataError
from tunekit.recipe.sections.data import DataSection

MARK = KINDS["video"].mark
ANSWER = {"role": "assistant", "content": "a cat jumps"}
TEXT = {"type": "text", "text": "what?"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    save_video(tmp_path / "data" / "a.mp4", 64, 48, 6, 2)
    save_video(tmp_path / "outside.mp4", 64, 48, 6, 2)
    return tmp_path / "data"


def load(folder, *rows, method="sft", **section):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_data(DataSection(train=str(file), **section), learner_of(method)).train[0]


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def video(value):
    return {"type": "video", "video": value}


WAYS = {
    "a part with a path": asked(video("a.mp4"), TEXT),
    "a part with a path of its own name": asked({"type": "video", "path": "a.mp4"}, TEXT),
    "Qwen's video_url": asked({"type": "video_url", "video_url": {"url": "a.mp4"}}, TEXT),
    "a data URL": lambda data: asked(video(f"data:video/mp4;base64,{base64.b64encode(data).decode()}"), TEXT),
    "LLaMA-Factory": {"videos": ["a.mp4"], "instruction": "<video>what?", "output": "a cat jumps"},
    "ms-swift": {"videos": ["a.mp4"], "messages": [{"role": "user", "content": "<video>what?"}, ANSWER]},
    "without a mark": {"video": "a.mp4", "messages": [{"role": "user", "content": "what?"}, ANSWER]},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_a_video_is_read_alike(way, folder):
    row = WAYS[way]
    rows = load(folder, row((folder / "a.mp4").read_bytes()) if callable(row) else row)
    (read,) = rows.rows
    assert rows.media == ("video",)
    assert read["messages"] == [{"role": "user", "content": f"{MARK}what?"}, ANSWER]
    (found,) = map(Video.of_row, read["__media__"])
    assert found.size == (64, 48, 6, 2.0)
    assert "; 1 video" in rows.notes[0]


@pytest.mark.parametrize(
    ("suffix", "codec"), [("mp4", "mpeg4"), ("mkv", "mpeg4"), ("avi", "mpeg4"), ("mov", "mjpeg"), ("webm", "libvpx")]
)
def test_the_frames_in_a_file_are_those_that_are_read(suffix, codec, folder):
    """The number is known without decoding, also where the container does not name it."""
    with av.open(str(folder / f"b.{suffix}"), "w") as container:
        stream = container.add_stream(codec, rate=5)
        stream.width, stream.height = 64, 32
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(7):
            pixels = np.full((32, 64, 3), 30 * number, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    (row,) = load(folder, asked(video(f"b.{suffix}"), TEXT)).rows
    found = Video.of_row(row["__media__"][0])
    assert found.size == (64, 32, 7, 5.0)
    frames = read_frames(found, [0, 3, 3, 6])
    assert frames.shape == (4, 32, 64, 3)
    assert np.abs(frames.mean((1, 2, 3)) - [0, 90, 90, 180]).max() < 5


def audio_only(file):
    with av.open(str(file), "w") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


AT = "messages[0].content[0]"
BROKEN = {
    "missing": (asked(video("no.mp4")), f"{AT}: no video 'no.mp4' in"),
    "a number": (asked(video(5)), f"{AT} must be a path, a data URL or a video, got the number 5"),
    "frames": (asked(video(["1.png", "2.png"])), f"{AT} must be a path, a data URL or a video, got a list"),
    "outside": (asked(video("../outside.mp4")), f"{AT}: '../outside.mp4' is outside of"),
    "a URL": (asked(video("https://example.com/a.mp4")), "is a URL; download the video and name its file"),
    "empty": (asked(video("empty.mp4")), f"{AT}: 'empty.mp4' is empty"),
    "text": (asked(video("text.mp4")), f"{AT}: 'text.mp4' is damaged, or not a video that can be read"),
    "cut": (asked(video("cut.mp4")), f"{AT}: 'cut.mp4' is damaged"),
    "cut, with its index": (asked(video("cut.avi")), f"{AT}: 'cut.avi' is damaged: 12 of its 30 frames are there"),
    "no video in it": (asked(video("audio.mp4")), f"{AT}: 'audio.mp4' has no video"),
    "too many frames": (asked(video("long.mp4")), f"{AT}: 'long.mp4' has 9 frames, more than 8; split it"),
    "too large": (asked(video("wide.mp4")), f"{AT}: 'wide.mp4' has 256x64 pixels, more than 10,000; scale it down"),
    "a mark too many": (
        {"videos": ["a.mp4"], "messages": [{"role": "user", "content": "<video><video>"}, ANSWER]},
        "2 <video> marks in the texts, but 1 video in column videos",
    ),
    "an answer with a video": (
        {"messages": [{"role": "user", "content": "film"}, {"role": "assistant", "content": [video("a.mp4")]}]},
        "messages[1] is an assistant message with a video; models answer in text",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_told_with_its_line_and_its_video(kind, folder, monkeypatch):
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("not a video")
    (folder / "cut.mp4").write_bytes((folder / "a.mp4").read_bytes()[:1500])
    whole = save_video(folder / "cut.avi", 64, 48, 30, 4).read_bytes()
    (folder / "cut.avi").write_bytes(whole[: len(whole) * 7 // 10])
    save_video(folder / "long.mp4", 64, 48, 9, 4)
    save_video(folder / "wide.mp4", 256, 64, 2, 4)
    audio_only(folder / "audio.mp4")
    monkeypatch.setattr(videos, "MAX_FRAMES", 8 if kind == "too many frames" else 100)
    monkeypatch.setattr(videos, "MAX_PIXELS", 10_000 if kind == "too large" else 10**6)
    row, message = BROKEN[kind]
    with pytest.raises(DataError) as caught:
        load(folder, asked(video("a.mp4"), TEXT), row)
    assert str(caught.value).startswith(f"{folder / 'rows.jsonl'}:2: ")
    assert message in str(caught.value)
    assert len(load(folder, asked(video("a.mp4"), TEXT), row, max_bad_rows=1)) == 1


def test_other_methods_refuse_videos(folder):
    row = {"prompt": asked(video("a.mp4"))["messages"][:1], "chosen": [ANSWER], "rejected": [ANSWER]}
    with pytest.raises(DataError, match=r"is of type video, but only text and images are supported"):
        load(folder, row, method="dpo")


def test_a_video_that_changed_is_told(folder):
    looked_at = Video.of_row(load(folder, asked(video("a.mp4"), TEXT)).rows[0]["__media__"][0])
    save_video(folder / "a.mp4", 64, 48, 5, 2)
    with pytest.raises(DataError, match="the video changed since the rows were prepared"):
        read_frames(looked_at, [0])
