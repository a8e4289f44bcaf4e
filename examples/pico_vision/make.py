"""Makes the small datasets of pictures that ship with tunekit, each from the same seed every time.

    python examples/pico_vision/make.py [FOLDER]

All ask for a list of the shapes of a picture, such as `2 red circles, 1 blue star`. Pictures are PNG files within the
rows, as data URLs, so that a data set is one file. No scene of the evaluation rows is among those that pico-vision
or the recipes train on.

- `shapes.jsonl`, `shapes_eval.jsonl`: conversations (`messages`); half of the answers are lists, half are sentences,
  such as `I see 2 red circles and 1 blue star.`
- `shapes_pairs.jsonl`, `shapes_pairs_eval.jsonl`: preference pairs; the better answer is the list, the worse one a
  sentence, or a list with a wrong count, color or shape.
- `shapes_prompts.jsonl`, `shapes_prompts_eval.jsonl`: prompts alone, with a column `answer` for rewards.
"""

import base64
import io
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from scenes import COLORS, SHAPES, Scene, draw, shapes

SEED = 2911
QUESTION = "List the shapes."
SIZES = {"shapes": (1200, 100), "shapes_pairs": (600, 100), "shapes_prompts": (800, 100)}
"""Rows for training, and for evaluation."""


def as_list(scene: Scene) -> str:
    """Return the groups of a scene as the recipes have them written."""
    return ", ".join(map(str, scene.groups))


def data_url(picture: Image.Image) -> str:
    """Return a picture as a PNG file in a URL."""
    file = io.BytesIO()
    picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=16).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def spoiled(scene: Scene, rng: random.Random) -> Scene:
    """Return a scene with one thing wrong in one of its groups."""
    groups = list(scene.groups)
    place = rng.randrange(len(groups))
    group = groups[place]
    others = {
        "count": [count for count in range(1, 7) if count != group.count],
        "color": [color for color in sorted(COLORS) if color not in {other.color for other in groups}],
        "shape": [shape for shape in SHAPES if shape not in {other.shape for other in groups}],
    }
    what = rng.choice(sorted(others))
    groups[place] = replace(group, **{what: rng.choice(others[what])})
    return Scene(tuple(sorted(groups, key=lambda group: (group.color, group.shape))))


def scenes(name: str, num: int, *, held_out: bool) -> Iterator[tuple[Scene, random.Random]]:
    """Yield scenes of one side, each with its generator."""
    drawn = 0
    for number in range(100 * num):
        rng = random.Random(f"{SEED}/{name}/{held_out}/{number}")
        scene = shapes(rng)
        if scene.is_held_out == held_out:
            yield scene, rng
            drawn += 1
        if drawn == num:
            return


def rows(name: str, num: int, *, held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set."""
    for scene, rng in scenes(name, num, held_out=held_out):
        content = [
            {"type": "image_url", "image_url": {"url": data_url(draw(scene, rng))}},
            {"type": "text", "text": QUESTION},
        ]
        prompt = [{"role": "user", "content": content}]
        answer = [{"role": "assistant", "content": as_list(scene)}]
        in_words = rng.random() < 0.5
        if name == "shapes":
            said = scene.describe() if in_words else as_list(scene)
            yield {"messages": [*prompt, {"role": "assistant", "content": said}]}
        elif name == "shapes_pairs":
            worse = scene.describe() if in_words else as_list(spoiled(scene, rng))
            yield {"prompt": prompt, "chosen": answer, "rejected": [{"role": "assistant", "content": worse}]}
        else:
            yield {"prompt": prompt, "answer": as_list(scene)}


def main() -> None:
    """Write the files."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "data"
    for name, (num_train, num_eval) in SIZES.items():
        for suffix, num, held_out in (("", num_train, False), ("_eval", num_eval, True)):
            lines = [json.dumps(row) + "\n" for row in rows(name, num, held_out=held_out)]
            (folder / f"{name}{suffix}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
