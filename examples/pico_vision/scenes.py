"""Scenes of colored shapes and numbers: drawn as pictures, asked about, answered.

    python examples/pico_vision/scenes.py FOLDER    # draw a dozen, and print what is asked about them

A scene is drawn from a random generator and nothing else, so a data set is its seed. Whether a scene is for training or
for evaluation follows from a hash of what it shows: one in five is held out, wherever and however large it is drawn.
"""

import hashlib
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

SIZE = 96
"""Width and height of a picture, in pixels."""

COLORS = {
    "red": (214, 40, 40), "green": (46, 140, 60), "blue": (40, 90, 200), "yellow": (235, 200, 30),
    "orange": (240, 130, 30), "purple": (130, 60, 170), "pink": (240, 140, 180), "black": (30, 30, 30),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")

DIGITS = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "11110 00001 00001 01110 00001 00001 11110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip
"""Rows of five dots each."""


@dataclass(frozen=True)
class Group:
    """Shapes of one kind: `count` of them, in one color."""

    count: int
    color: str
    shape: str

    def __str__(self) -> str:
        plural = "" if self.count == 1 else "es" if self.shape == "cross" else "s"
        return f"{self.count} {self.color} {self.shape}{plural}"


@dataclass(frozen=True)
class Scene:
    """Content of a picture: groups of shapes in alphabetical order, or a number."""

    groups: tuple[Group, ...] = ()
    number: str = ""

    @property
    def is_held_out(self) -> bool:
        """True for the one in five that is never trained on."""
        shown = self.number or ", ".join(map(str, self.groups))
        return hashlib.sha256(shown.encode()).digest()[0] % 5 == 0

    @property
    def count(self) -> int:
        """Number of shapes."""
        return sum(group.count for group in self.groups)

    def describe(self) -> str:
        """Return the answer to what is seen."""
        if self.number:
            return f"I see the number {self.number}."
        names = [str(group) for group in self.groups]
        return f"I see {' and '.join([', '.join(names[:-1])] * (len(names) > 1) + names[-1:])}."


def shapes(rng: random.Random) -> Scene:
    """Draw one to three groups with up to six shapes in all, each group in a color and a shape of its own."""
    num = rng.choice((1, 2, 2, 3))
    colors, kinds = rng.sample(sorted(COLORS), num), rng.sample(SHAPES, num)
    counts = [rng.randint(1, 6 // num) for _ in range(num)]
    return Scene(tuple(sorted(map(Group, counts, colors, kinds), key=lambda group: (group.color, group.shape))))


def number(rng: random.Random) -> Scene:
    """Draw a number of one to three digits."""
    return Scene(number=str(rng.randrange(10 ** rng.randint(1, 3))))


def draw(scene: Scene, rng: random.Random, places: dict[tuple[int, int], Group] | None = None) -> Image.Image:
    """Draw a scene: places, sizes and the background are the generator's choice.

    Args:
        scene: The scene.
        rng: The generator.
        places: Filled with the column and row, of three, in which a shape of a group is drawn.
    """
    background = tuple(rng.randint(225, 255) for _ in range(3))
    picture = Image.new("RGB", (SIZE, SIZE), background)
    canvas = ImageDraw.Draw(picture)
    if scene.number:
        _draw_number(canvas, scene.number, rng)
    cells = rng.sample([(x, y) for x in range(3) for y in range(3)], scene.count)
    for group in scene.groups:
        for _ in range(group.count):
            column, row = cells.pop()
            if places is not None:
                places[column, row] = group
            radius = rng.uniform(9, 14)
            room = SIZE / 6 - radius
            x, y = ((2 * cell + 1) * SIZE / 6 + rng.uniform(-room, room) for cell in (column, row))
            _draw_shape(canvas, group.shape, COLORS[group.color], background, x, y, radius)
    return picture


def _draw_shape(
    canvas: ImageDraw.ImageDraw,
    shape: str,
    color: tuple[int, ...],
    background: tuple[int, ...],
    x: float,
    y: float,
    radius: float,
) -> None:
    def points(radii: list[float]) -> list[tuple[float, float]]:
        turns = [2 * math.pi * i / len(radii) - math.pi / 2 for i in range(len(radii))]
        return [(x + r * math.cos(turn), y + r * math.sin(turn)) for r, turn in zip(radii, turns, strict=True)]

    def box(half_width: float, half_height: float) -> tuple[float, float, float, float]:
        return x - half_width, y - half_height, x + half_width, y + half_height

    if shape in ("circle", "ring"):
        canvas.ellipse(box(radius, radius), fill=color)
    if shape == "ring":
        canvas.ellipse(box(radius / 2, radius / 2), fill=background)
    if shape == "square":
        canvas.rectangle(box(radius * 0.85, radius * 0.85), fill=color)
    if shape == "triangle":
        canvas.polygon(points([radius] * 3), fill=color)
    if shape == "star":
        canvas.polygon(points([radius, radius * 0.42] * 5), fill=color)
    if shape == "cross":
        canvas.rectangle(box(radius, radius / 3), fill=color)
        canvas.rectangle(box(radius / 3, radius), fill=color)


def _draw_number(canvas: ImageDraw.ImageDraw, digits: str, rng: random.Random) -> None:
    dot = rng.randint(3, 5) if len(digits) < 3 else rng.randint(3, 4)
    color = COLORS[rng.choice(sorted(COLORS))]
    width, height = (6 * len(digits) - 1) * dot, 7 * dot
    left, top = rng.randint(2, SIZE - width - 2), rng.randint(2, SIZE - height - 2)
    for place, digit in enumerate(digits):
        for row, dots in enumerate(DIGITS[int(digit)].split()):
            for column, is_set in enumerate(dots):
                if is_set == "1":
                    x, y = left + (6 * place + column) * dot, top + row * dot
                    canvas.rectangle((x, y, x + dot - 1, y + dot - 1), fill=color)


Task = Callable[[Scene, random.Random], tuple[str, str]]
"""Returns a question about a scene, and its answer."""


def see(_: Scene, rng: random.Random) -> str:
    """Ask for all that a picture shows."""
    return rng.choice(("What do you see?", "What is in the picture?", "Describe the picture."))


def name_color(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Ask for the color of one kind of shape."""
    group = rng.choice(scene.groups)
    name = str(group).split()[-1]
    return f"What color {'are' if group.count > 1 else 'is'} the {name}?", group.color.capitalize() + "."


def name_shape(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Ask for the shape of what has one color."""
    group = rng.choice(scene.groups)
    return f"Which shape is {group.color}?", f"The {group.shape}."


def is_there(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Ask whether there is a shape of a color."""
    group = rng.choice(scene.groups)
    color, shape = group.color, group.shape
    if rng.random() < 0.6:
        color, shape = rng.choice([(rng.choice(sorted(COLORS)), shape), (color, rng.choice(SHAPES))])
    found = any((group.color, group.shape) == (color, shape) for group in scene.groups)
    return f"Is there a {color} {shape}?", "Yes." if found else "No."


def count(scene: Scene, _: random.Random) -> tuple[str, str]:
    """Ask for the number of all shapes."""
    return "How many shapes are there?", f"{scene.count}."


def read(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """Ask for the number that is written."""
    return rng.choice(("Which number is this?", "Read the number.")), f"{scene.number}."


TASKS: dict[str, Task] = {
    "see": lambda scene, rng: (see(scene, rng), scene.describe()),
    "color": name_color,
    "shape": name_shape,
    "is_there": is_there,
    "count": count,
    "read": read,
}
OF_SHAPES = ("see", "color", "shape", "is_there", "count")
OF_NUMBERS = ("see", "read")


def main() -> None:
    """Draw two pictures of each task."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    for name, task in TASKS.items():
        for i in range(2):
            scene = number(rng) if name == "read" else shapes(rng)
            question, answer = task(scene, rng)
            path = folder / f"{name}_{i}.png"
            draw(scene, rng).save(path)
            print(f"{path}: {question} {answer}")


if __name__ == "__main__":
    main()
