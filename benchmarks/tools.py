"""Measure what pico learns in tools/sums and tools/guess, with an environment, and without tools.

    python -m benchmarks.tools [--seeds N ...] [--only sums guess plain] [--save]  # saves after each recipe

Each has a folder of its own, in which tools/sums-sft is trained and tools/sums from it (`sums`), or tools/guess-sft
and tools/guess from it (`guess`), as `tunekit train` does it, or tools/sums from pico itself without its environment,
for as many steps (`plain`). A row that is saved takes the place of the one with its recipe and seed. What they have
learned is asked of the saved models by their files alone: a loop here renders the turns, samples at temperature 1,
reads the calls, and answers them by the environments' classes, on 256 held-out problems and as many games.

- `right`: the share of problems whose last number is the right one; `sums` and `products` of those.
- `calls, sums` and `calls, products`: uses of the calculator per problem.
- `reward`: right answers less 0.2 for each use, or that of the games.
- `found`: the share of games in which the number was found. Guesses at random find 19 of 27, those among the numbers
  that the hints leave all.
- `ruled out`: the share of guesses after the first that the hints had ruled out.
- `guesses`: guesses of those games that found it.
- `minutes` of the whole run, worth something on a machine that does nothing else.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tunekit
from benchmarks.circumstances import circumstances
from benchmarks.tables import by_seed
from tunekit.files import find_example
from tunekit.methods.environments.guess_number import GuessNumber
from tunekit.methods.environments.priced_sums import PricedSums

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tools.json"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
MAX_TURNS, TURN_TOKENS = 5, 112
HIGHEST, NUM_GUESSES = 3, 3
PICO = ROOT / "tunekit" / "models" / "pico"
SUBJECTS = ("sums", "guess", "plain")
WITHOUT = ("method.environment=null", "method.max_tool_calling_iterations=8")
"""Changes that leave tools out of a recipe."""


class Player:
    """A saved model that answers in turns."""

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def turn(self, conversations: list[list[dict[str, Any]]], tools: list[Callable[..., Any]] | None) -> list[str]:
        """Return the next turn of each conversation."""
        texts = [
            self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            for messages in conversations
        ]
        inputs = self.tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            output = self.model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=TURN_TOKENS)
        answers = output[:, inputs["input_ids"].shape[1] :]
        return [text.partition("<|im_end|>")[0] for text in self.tokenizer.batch_decode(answers)]

    def play(
        self, prompts: list[dict[str, Any]], tools: list[Callable[..., Any]] | None, call: Callable[[int, str], str]
    ) -> list[str]:
        """Play all turns, and return all that the model wrote in each conversation.

        Args:
            prompts: The first message of each.
            tools: Functions whose signatures the model is shown.
            call: Carries out a call in a conversation, by its number and the call's JSON.
        """
        conversations, written = [[prompt] for prompt in prompts], [""] * len(prompts)
        going = list(range(len(prompts)))
        for _ in range(MAX_TURNS):
            turns = self.turn([conversations[one] for one in going], tools)
            still = []
            for one, text in zip(going, turns, strict=True):
                written[one] += text
                if tools is not None and (found := CALL.search(text)) is not None:
                    content = text[: found.start()]
                    try:
                        function = json.loads(found[1])
                        result, name = call(one, found[1]), function["name"]
                    except (ValueError, TypeError, KeyError, AttributeError):
                        continue
                    conversations[one] += [
                        {"role": "assistant", "content": content, "tool_calls": [{"function": function}]},
                        {"role": "tool", "name": name, "content": result},
                    ]
                    still.append(one)
            going = still
            if not going:
                break
        return written


def solve(player: Player, *, with_tools: bool) -> dict[str, float]:
    """Have a model solve the held-out problems."""
    rows = [json.loads(line) for line in find_example("priced_eval.jsonl").read_text(encoding="utf-8").splitlines()]
    boards = [PricedSums() for _ in rows]
    uses = [0] * len(rows)

    def call(one: int, text: str) -> str:
        uses[one] += 1
        return boards[one].calculator(**json.loads(text)["arguments"])

    tools = [PricedSums.calculator] if with_tools else None
    written = player.play([row["prompt"][0] for row in rows], tools, call)
    last = [(re.findall(r"\d+", text) or [""])[-1] for text in written]
    right = [number == str(row["answer"]) for row, number in zip(rows, last, strict=True)]
    products = ["*" in row["prompt"][0]["content"] for row in rows]

    def share(values: list[Any], kind: bool) -> float:
        chosen = [float(value) for value, is_product in zip(values, products, strict=True) if is_product == kind]
        return sum(chosen) / len(chosen)

    measures = {"right": sum(right) / len(right), "sums": share(right, False), "products": share(right, True)}
    if with_tools:
        measures |= {"calls, sums": share(uses, False), "calls, products": share(uses, True)}
        measures["reward"] = measures["right"] - 0.2 * sum(uses) / len(uses)
    return measures


def guess(player: Player, num: int = 256) -> dict[str, float]:
    """Have a model play games that no run has played."""
    games = [GuessNumber(HIGHEST, NUM_GUESSES) for _ in range(num)]
    for number, game in enumerate(games):
        game.reset(seed=10**6 + number)

    left, guesses, ruled_out, found = [(1, HIGHEST)] * num, [0] * num, 0, [False] * num

    def call(one: int, text: str) -> str:
        nonlocal ruled_out
        number = json.loads(text)["arguments"]["number"]
        hint = games[one].guess(number)
        if hint == "the game is over":
            return hint
        guesses[one] += 1
        ruled_out += not left[one][0] <= number <= left[one][1]
        found[one] = hint == "right"
        if " to " in hint:
            low, high = hint.partition(", ")[2].split(" to ")
            left[one] = int(low), int(high)
        return hint

    prompt = json.loads(find_example("games_eval.jsonl").read_text(encoding="utf-8").splitlines()[0])["prompt"][0]
    player.play([prompt] * num, [GuessNumber.guess], call)
    later = sum(guesses) - sum(number > 0 for number in guesses)
    return {
        "found": sum(found) / num,
        "ruled out": ruled_out / max(1, later),
        "reward": sum(game.get_reward() for game in games) / num,
        "guesses": sum(number for number, is_found in zip(guesses, found, strict=True) if is_found)
        / max(1, sum(found)),
    }


def train(name: str, seed: int, *changes: str) -> tuple[Path, float]:
    """Train a recipe, and return the folder of its model and the minutes that it took."""
    began = time.perf_counter()
    run = tunekit.train(name, [f"train.seed={seed}", "output.sample_prompts=[]", *changes])
    return run.model_path, (time.perf_counter() - began) / 60


def measured(subject: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train the recipes of a subject in a folder of their own, and measure them."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if subject == "plain":
            pico = solve(Player(PICO), with_tools=False)
            path, minutes = train("tools/sums", seed, "model=pico", *WITHOUT, "output.name=plain")
            after = solve(Player(path), with_tools=False)
            yield {
                "seed": seed,
                "recipe": "tools/sums without tools",
                "before": pico,
                "after": after,
                "minutes": minutes,
            }
        else:
            name = f"tools/{subject}"
            measure = partial(solve, with_tools=True) if subject == "sums" else guess
            begun, of_sft = train(f"{name}-sft", seed)
            before = measure(Player(begun))
            path, minutes = train(name, seed)
            after = measure(Player(path))
            yield {"seed": seed, "recipe": f"{name}-sft", "before": {}, "after": {}, "minutes": of_sft}
            yield {"seed": seed, "recipe": name, "before": before, "after": after, "minutes": minutes}
        os.chdir(ROOT)


def main() -> None:
    """Train, measure, and print or save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=SUBJECTS, nargs="+", default=SUBJECTS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/tools.json and .md")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        for subject in args.only:
            for row in measured(subject, seed):
                rows.append({**row, **circumstances(PACKAGES)})
                print(json.dumps(rows[-1]), flush=True)
            if args.save:
                save(rows)
    print(by_seed(rows, ".2f"))


def save(rows: list[dict[str, Any]]) -> None:
    """Write rows in place of those of their recipes and seeds, and the table of all."""
    saved = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    by_name = {(row["recipe"], row["seed"]): row for row in (*saved, *rows)}
    merged = [by_name[name] for name in sorted(by_name)]
    RESULTS.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    title = "# What pico learns with tools, by seed\n\n`python -m benchmarks.tools --save`\n"
    RESULTS.with_suffix(".md").write_text(f"{title}\n{by_seed(merged, '.2f')}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
