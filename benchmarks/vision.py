"""Measure what pico-vision learns in vision/quickstart, vision/dpo and vision/grpo, which go on from each other.

    python -m benchmarks.vision [--seeds N ...] [--save]

Each seed has a folder of its own, in which the three are trained one after another, as `tunekit train` does it. What
they have learned is asked of the saved models by their files alone, on 200 scenes that neither pico-vision nor any
recipe has trained on:

- `list, greedy` and `list, sampled`: the share of answers that are the right list letter by letter, greedily and at
  temperature 1.
- `either, greedy`: the share that is the right list or the right sentence, as the rows of vision/quickstart have both.
- `likelier`: the share of the pairs of `shapes_pairs_eval.jsonl` of which the right answer has the higher
  log-probability.
- `minutes` of the whole run, worth something on a machine that does nothing else.
"""

import argparse
import base64
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import tunekit
from benchmarks.circumstances import circumstances
from benchmarks.tables import by_seed
from tunekit.files import find_example

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "vision.json"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate")
RECIPES = ("vision/quickstart", "vision/dpo", "vision/grpo")
NUM_SCENES = 200

sys.path.insert(0, str(ROOT / "examples" / "pico_vision"))
from evaluate import SHIPPED, Asked, problems  # noqa: E402


def measure(folder: Path, seed: int) -> dict[str, float]:
    """Ask a saved model about the held-out scenes and pairs."""
    model, scenes = Asked(folder), problems("list", NUM_SCENES, 0)
    questions = [(picture, question) for picture, question, _ in scenes]
    lists = [answer for _, _, answer in scenes]
    torch.manual_seed(seed)
    greedy, sampled = model.answers(questions), model.answers(questions, sample=True)
    return {
        "list, greedy": share(a == b for a, b in zip(greedy, lists, strict=True)),
        "list, sampled": share(a == b for a, b in zip(sampled, lists, strict=True)),
        "either, greedy": share(a in (b, sentence(b)) for a, b in zip(greedy, lists, strict=True)),
        "likelier": share(is_likelier(model, row) for row in pairs()),
    }


def sentence(listed: str) -> str:
    """Return the sentence that says what a list does."""
    *first, last = listed.split(", ")
    return f"I see {', '.join(first)} and {last}." if first else f"I see {last}."


def share(values: Any) -> float:
    """Return the share of values that are true."""
    listed = list(values)
    return sum(listed) / len(listed)


def pairs() -> list[dict[str, Any]]:
    """Return the held-out pairs."""
    path = find_example("shapes_pairs_eval.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_likelier(asked: Asked, row: dict[str, Any]) -> bool:
    """Return whether the right answer has the higher log-probability."""
    picture, text = row["prompt"][0]["content"]
    url = picture["image_url"]["url"]
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
    messages = [{"role": "user", "content": [{"type": "image"}, text]}]
    prompt = asked.processor.apply_chat_template(messages, add_generation_prompt=True)
    scores = []
    for column in ("chosen", "rejected"):
        whole = prompt + row[column][0]["content"] + "<|im_end|>"
        inputs = asked.processor(text=[whole], images=[[image]], return_tensors="pt")
        start = asked.processor(text=[prompt], images=[[image]], return_tensors="pt")["input_ids"].shape[1]
        with torch.inference_mode():
            logits = asked.model(**inputs).logits[0, start - 1 : -1].log_softmax(-1)
        scores.append(float(logits.gather(1, inputs["input_ids"][0, start:, None]).sum()))
    return scores[0] > scores[1]


def chain(seed: int) -> list[dict[str, Any]]:
    """Train the three recipes in a folder of their own, and measure each."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        before = measure(SHIPPED, seed)
        for name in RECIPES:
            began = time.perf_counter()
            run = tunekit.train(name, [f"train.seed={seed}", "output.sample_prompts=[]"])
            minutes = (time.perf_counter() - began) / 60
            after = measure(run.model_path, seed)
            rows.append({"seed": seed, "recipe": name, "before": before, "after": after, "minutes": minutes})
            print(json.dumps(rows[-1]), flush=True)
            before = after
        os.chdir(ROOT)
    return rows


def main() -> None:
    """Train, measure, and print or save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/vision.json and .md")
    args = parser.parse_args()
    rows = [row for seed in args.seeds for row in chain(seed)]
    print(by_seed(rows, ".0%"))
    if args.save:
        conditions = circumstances(PACKAGES)
        RESULTS.write_text(json.dumps({**conditions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        text = f"# What pico-vision learns, by seed\n\n`python -m benchmarks.vision --save`\n\n{by_seed(rows, '.0%')}\n"
        RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
