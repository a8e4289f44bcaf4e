"""A user's own files: each kind trains by a recipe of a few lines, and what was taught is what is learned."""

import csv
import json
import random

import pytest

import tunekit

RECIPES = {
    "chats.jsonl": """\
model: pico
data:
  train: chats.jsonl
  max_length: 128
train:
  max_steps: 40
  learning_rate: 2e-3
""",
    "reviews.csv": """\
model: pico
data:
  train: reviews.csv
  max_length: 128
train:
  num_epochs: 2
  learning_rate: 2e-3
""",
    "tales.txt": """\
model: pico
data:
  train: tales.txt
  max_length: 128
  packing: true
adapter: full
train:
  num_epochs: 2
  global_batch_size: 4
  learning_rate: 1e-3
""",
}

WORDS = ["river", "stone", "lamp", "garden", "window", "letter", "market", "silver", "morning", "winter"]


def write_chats(path):
    """2,000 conversations of one or two turns."""
    random.seed(1)
    with path.open("w", encoding="utf-8") as stream:
        for n in range(2000):
            word = random.choice(WORDS)
            turns = [
                {"role": "user", "content": f"Say {word} {n % 7}."},
                {"role": "assistant", "content": f"Very well: {word}."},
            ]
            if n % 5 == 0:
                turns += [
                    {"role": "user", "content": "Thank you."},
                    {"role": "assistant", "content": "Very well: gladly."},
                ]
            stream.write(json.dumps({"messages": turns}) + "\n")


def write_reviews(path):
    """Prompts and completions with commas, quotes and line breaks in them."""
    random.seed(2)
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["prompt", "completion", "stars"])
        for n in range(200):
            good = n % 2 == 0
            word = random.choice(WORDS)
            text = f'The {word}, they said,\nwas "{"lovely" if good else "awful"}".\nVerdict:'
            writer.writerow([text, " good" if good else " bad", 5 if good else 1])


def write_tales(path):
    """Documents of some sentences, two blank lines apart."""
    random.seed(3)
    tales = [
        " ".join(f"The {random.choice(WORDS)} is near the {random.choice(WORDS)}." for _ in range(4 + n % 9))
        for n in range(60)
    ]
    path.write_text("\n\n\n".join(tales) + "\n", encoding="utf-8")


WRITERS = {"chats.jsonl": write_chats, "reviews.csv": write_reviews, "tales.txt": write_tales}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_own_files_train_by_a_short_recipe(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    WRITERS[name](tmp_path / name)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPES[name], encoding="utf-8")
    assert len(RECIPES[name].splitlines()) <= 15

    run = tunekit.train("mine.yaml")

    assert run.state == "finished"
    losses = run.metrics()["loss"]
    assert losses.iloc[-5:].mean() < 0.6 * losses.iloc[:2].mean()
    rows = run.plan.data
    if name == "chats.jsonl":
        assert rows.num_train == 2000
        assert all(sample["after"].startswith("Very well") for sample in run.samples())
    if name == "reviews.csv":
        assert rows.num_train == 200
        assert rows.num_trainable_tokens < 0.2 * rows.num_train_tokens
    if name == "tales.txt":
        assert rows.num_train < 60
        assert rows.num_trainable_tokens > 0.9 * rows.num_train_tokens
