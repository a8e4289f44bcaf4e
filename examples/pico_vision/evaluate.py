"""Measure a pico-vision model folder, task by task.

    python examples/pico_vision/evaluate.py                 # the model that ships with tunekit
    python examples/pico_vision/evaluate.py runs/x/model    # one that was fine-tuned from it

Each picture is asked about alone, in the model's chat template, and answered greedily; a reply is right when it is the
answer, letter by letter. No scene was trained on, whatever was asked about it.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from make import QUESTION, as_list
from PIL import Image
from scenes import TASKS, Scene, draw, number, shapes
from transformers import AutoModelForImageTextToText, AutoProcessor

SHIPPED = Path(__file__).parents[2] / "tunekit" / "models" / "pico_vision"


def list_shapes(scene: Scene, _: random.Random) -> tuple[str, str]:
    """Ask for all shapes in a list, which the shipped model was never asked for."""
    return QUESTION, as_list(scene)


def problems(task: str, num: int, seed: int) -> list[tuple[Image.Image, str, str]]:
    """Return pictures with a question and an answer each, the same every time for a task, a number and a seed."""
    rng = random.Random(f"evaluate/{task}/{seed}")
    made = []
    while len(made) < num:
        scene = number(rng) if task == "read" else shapes(rng)
        if scene.is_held_out:
            made.append((draw(scene, rng), *{**TASKS, "list": list_shapes}[task](scene, rng)))
    return made


class Asked:
    """A saved model that is asked about pictures.

    Args:
        folder: Its folder.
    """

    def __init__(self, folder: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(folder)
        self.processor.tokenizer.padding_side = "left"
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def answers(
        self, asked: Sequence[tuple[Image.Image, str]], *, sample: bool = False, batch_size: int = 50
    ) -> list[str]:
        """Return an answer to each question about a picture, greedy or sampled at temperature 1."""
        replies: list[str] = []
        for start in range(0, len(asked), batch_size):
            batch = asked[start : start + batch_size]
            texts = [
                self.processor.apply_chat_template(
                    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
                    add_generation_prompt=True,
                )
                for _, question in batch
            ]
            images = [[picture.convert("RGB")] for picture, _ in batch]
            inputs = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
            with torch.inference_mode():
                output = self.model.generate(**inputs, do_sample=sample, top_k=0 if sample else None, max_new_tokens=48)
            new = output[:, inputs["input_ids"].shape[1] :]
            replies += self.processor.batch_decode(new, skip_special_tokens=True)
        return [reply.strip() for reply in replies]


def main() -> None:
    """Print the share of right answers by task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=SHIPPED, help="model folder")
    parser.add_argument("--problems", type=int, default=200, help="problems per task")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    asked = Asked(args.model)
    shares = {}
    for task in (*TASKS, "list"):
        made = problems(task, args.problems, args.seed)
        replies = asked.answers([(picture, question) for picture, question, _ in made])
        rights = [reply == answer for reply, (_, _, answer) in zip(replies, made, strict=True)]
        shares[task] = sum(rights) / len(rights)
        print(f"{task:10} {shares[task]:5.0%}   {made[0][1]} {replies[0]!r} ({made[0][2]})", flush=True)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
