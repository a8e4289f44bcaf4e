"""Rows of videos for tiny models whose processors take them."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.vision import tiny_vision_model

MARKS = {
    "qwen2_vl": "<|vision_start|><|video_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|video_pad|><|vision_end|>",
    "qwen2_5_omni": "<|vision_bos|><|VIDEO|><|vision_eos|>",
    "qwen3_vl": "<|vision_start|><|video_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|video_pad|><|vision_end|>",
    "internvl": "<video>",
    "glm4v": "<|begin_of_video|><|video|><|end_of_video|>",
}
"""The text that stands for a video, by family."""

FAMILIES = sorted(MARKS) if find_spec("torchvision") is not None else []
"""Families whose processors take videos; transformers needs torchvision for all of these (5.24)."""

SIZES = ((64, 48, 6, 2), (48, 64, 9, 4), (64, 64, 5, 2))
"""Width, height, frames and frames a second of the videos."""


def save_tiny_video_model(folder: Path, family: str) -> Path:
    """Save a tiny model of a family, whose chat template writes videos too, and return its folder."""
    model, processor = tiny_vision_model(family)
    template = processor.chat_template
    if MARKS[family] not in template:
        with_videos = "{% if part['type'] == 'video' %}" + MARKS[family] + "{% elif part['type'] != 'text' %}"
        template = template.replace("{% if part['type'] != 'text' %}", with_videos)
        assert template != processor.chat_template
    processor.chat_template = processor.tokenizer.chat_template = template
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_video(file: Path, width: int, height: int, num_frames: int, fps: int, *, seed: int = 0) -> Path:
    """Write a video whose frames are smooth and all unlike each other."""
    import av
    import numpy as np

    draw = np.random.default_rng(seed)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for _ in range(num_frames):
            small = draw.integers(0, 255, (4, 4, 3), dtype=np.uint8)
            pixels = np.kron(small, np.ones((height // 4, width // 4, 1), dtype=np.uint8))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file


def save_video_rows(folder: Path, num: int = 8, *, without: int | None = 3, mixed: bool = True) -> Path:
    """Write videos of several sizes and rows that ask about them, one of them without, one with a picture before it
    if they are mixed; return the file.
    """
    from PIL import Image

    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(num):
        asked: Any = "say hi"
        if number != without:
            save_video(folder / f"{number}.mp4", *SIZES[number % len(SIZES)], seed=number)
            asked = [{"type": "video", "video": f"{number}.mp4"}, {"type": "text", "text": "what happens?"}]
            if number % 4 == 1:
                asked.insert(0, {"type": "text", "text": "look: "})
            if number == 6 and mixed:
                Image.effect_noise((30, 41), 60).convert("RGB").save(folder / "6.png")
                asked.insert(0, {"type": "image", "image": "6.png"})
        answer = {"role": "assistant", "content": "nothing " * (number % 3) + "much"}
        lines.append(json.dumps({"messages": [{"role": "user", "content": asked}, answer]}) + "\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    return file
