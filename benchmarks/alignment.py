"""What pico learns in the three recipes that go on from each other, pico/sft, pico/dpo and pico/grpo, by seed.

    python -m benchmarks.alignment [--seeds N ...] [--save]

A seed can be run by itself: `--save` keeps what stands in the file of the others, if the commit is the same.

Each seed has a folder of its own, in which the three are trained one after another, as `tunekit train` does it. What
they have learned is asked of the saved models by their files alone, on the held-out rows of the recipes:

- after each recipe, an answer is sampled (temperature 1) to each prompt of `pairs_eval.jsonl`: the share that begins
  friendly ("Good question!"), and the share that begins gruff ("Not again.").
- `likelier`: the share of pairs of `pairs_eval.jsonl` whose friendly answer has the higher log-probability. It is what
  `rewards/accuracies` is to be compared with: that counts pairs in which the model moved towards the friendly answer,
  of which there are none before training.
- `exact match`: the share of sums of `sums_eval.jsonl` that are right, sampled as while training, and greedily.
- `written out`: the share of sampled answers to them that write the sum down before its result.
- `steps` are the seconds of the optimizer steps alone; `processor` those that a core computed in the whole run, with
  evaluations, loading and saving.

Seconds of steps are worth something on a machine that does nothing else, those of the processor on one that does
other things too; the rest depends on the seed and the libraries.
"""

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import tunekit
from benchmarks.circumstances import circumstances
from tunekit.files import find_example
from tunekit.probe.model import PICO

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "alignment.json"
README = ROOT / "recipes" / "README.md"
BEGIN, END = "<!-- benchmarks/alignment.py writes from here -->\n", "<!-- to here -->\n"
"""Lines of the README between which the figures stand."""
PACKAGES = ("tunekit", "torch", "transformers", "trl", "accelerate")
RECIPES = ("pico/sft", "pico/dpo", "pico/grpo")
FRIENDLY, GRUFF = "Good question!", "Not again."
AT_ONCE = 64

Messages = list[dict[str, str]]


class Asked:
    """A saved model that is asked.

    Args:
        folder: Where it is.
        seed: Seed of what is sampled.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.seed = seed

    def answers(self, prompts: list[Messages], *, sample: bool) -> list[str]:
        """An answer to each prompt, sampled at temperature 1 or greedy."""
        torch.manual_seed(self.seed)
        found: list[str] = []
        for start in range(0, len(prompts), AT_ONCE):
            inputs = self.tokenizer.apply_chat_template(
                prompts[start : start + AT_ONCE],
                add_generation_prompt=True,
                padding=True,
                return_tensors="pt",
                return_dict=True,
            )
            with torch.inference_mode():
                output = self.model.generate(**inputs, do_sample=sample, top_k=0 if sample else None, max_new_tokens=48)
            found += self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return found

    def log_prob(self, prompt: Messages, answer: Messages) -> float:
        """The summed log-probability of an answer with its end token."""
        given = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        before = len(self.tokenizer.encode(given, add_special_tokens=False))
        text = given + answer[0]["content"] + self.tokenizer.eos_token
        ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        with torch.inference_mode():
            scores = self.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        return float(scores.gather(1, ids[0, 1:, None])[before - 1 :].sum())


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of an example file."""
    return [json.loads(line) for line in find_example(name).read_text(encoding="utf-8").splitlines()]


def is_right(answer: str, expected: int) -> bool:
    """Whether the last number of an answer is the expected one."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and int(numbers[-1]) == expected


def look(folder: Path, seed: int) -> dict[str, float]:
    """What a saved model does on the held-out rows, as shares from 0 to 1."""
    asked = Asked(folder, seed)
    pairs, sums = rows("pairs_eval.jsonl"), rows("sums_eval.jsonl")
    said = asked.answers([pair["prompt"] for pair in pairs], sample=True)
    likelier = [
        asked.log_prob(pair["prompt"], pair["chosen"]) > asked.log_prob(pair["prompt"], pair["rejected"])
        for pair in pairs
    ]
    prompts, expected = [row["prompt"] for row in sums], [row["answer"] for row in sums]
    sampled, greedy = (asked.answers(prompts, sample=sample) for sample in (True, False))
    return {
        "friendly": _share(answer.startswith(FRIENDLY) for answer in said),
        "gruff": _share(answer.startswith(GRUFF) for answer in said),
        "likelier": _share(likelier),
        "exact_match_sampled": _share(map(is_right, sampled, expected)),
        "exact_match_greedy": _share(map(is_right, greedy, expected)),
        "written_out": _share("=" in answer for answer in sampled),
    }


def _share(verdicts: Any) -> float:
    found = [bool(verdict) for verdict in verdicts]
    return sum(found) / len(found)


def chain(seed: int) -> dict[str, Any]:
    """Train the three recipes in the working directory, and look at the model before and after each."""
    found: dict[str, Any] = {"pico": {"after": look(PICO, seed)}}
    for name in RECIPES:
        began = time.process_time()
        run = tunekit.train(name, [f"train.seed={seed}"])
        processor_seconds = time.process_time() - began
        result = run.result()
        evaluations = [event for event in run.events() if event["event"] == "eval"]
        first, last = evaluations[0], evaluations[-1]
        measured = {key: [first[key], last[key]] for key in first if key.startswith("eval_")}
        found[name] = {
            "steps_seconds": result["step_seconds"],
            "processor_seconds": processor_seconds,
            "evaluations": measured,
            "after": look(run.model_path, seed),
        }
        print(f"seed {seed}, {name}: {processor_seconds:.0f} s, {found[name]['after']}", flush=True)
    return found


def as_table(found: dict[str, Any]) -> str:
    """The figures as Markdown, a row for each seed."""
    heads = ("seed", "recipe", "held out", "before", "after", "steps", "processor")
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join([':--'] * 3 + ['--:'] * 4)}|"]
    for seed, runs in found["seeds"].items():
        measures = _measures(runs)
        for name in RECIPES:
            run = runs[name]
            first = [seed, name]
            last = [f"{run[key]:.0f} s" for key in ("steps_seconds", "processor_seconds")]
            for measure in measures[name]:
                lines.append(f"| {' | '.join([*first, *measure, *last])} |")
                first, last = ["", ""], ["", ""]
    machine = found["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    where = f"{machine['device']}, {machine['num_cores']} cores, of which the training used {found['num_threads']}"
    how = f"`python -m benchmarks.alignment --save`, commit {found['commit']}, {found['date']}, {where}; {versions}."
    return "\n".join([*lines, "", how, ""])


def save(found: dict[str, Any]) -> None:
    """Keep the figures, and put them into the README of the recipes."""
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    table = as_table(found)
    RESULTS.with_suffix(".md").write_text(f"# What pico learns from its recipes\n\n{table}", encoding="utf-8")
    before, _, behind = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{behind.partition(END)[2]}", encoding="utf-8")


def _measures(runs: dict[str, Any]) -> dict[str, list[tuple[str, str, str]]]:
    """What each recipe has moved, with its value before and after."""
    before = {name: runs[above]["after"] for above, name in zip(("pico", *RECIPES), RECIPES, strict=False)}

    def moved(name: str, what: str, key: str) -> tuple[str, str, str]:
        return what, f"{before[name][key]:.0%}", f"{runs[name]['after'][key]:.0%}"

    def logged(name: str, what: str, key: str, form: str) -> tuple[str, str, str]:
        first, last = runs[name]["evaluations"][key]
        return what, format(first, form), format(last, form)

    return {
        "pico/sft": [
            logged("pico/sft", "loss", "eval_loss", ".2f"),
            moved("pico/sft", "answers in the friendly manner", "friendly"),
            moved("pico/sft", "answers in the gruff manner", "gruff"),
        ],
        "pico/dpo": [
            logged("pico/dpo", "rewards/accuracies", "eval_rewards/accuracies", ".2f"),
            moved("pico/dpo", "friendly answer likelier", "likelier"),
            moved("pico/dpo", "answers in the friendly manner", "friendly"),
        ],
        "pico/grpo": [
            moved("pico/grpo", "exact match, sampled", "exact_match_sampled"),
            moved("pico/grpo", "exact match, greedy", "exact_match_greedy"),
            moved("pico/grpo", "sums written out", "written_out"),
            moved("pico/grpo", "answers in the friendly manner", "friendly"),
        ],
    }


def main() -> None:
    """Train the chain for each seed, print the table, and with `--save` keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="seeds (1 2 3)")
    parser.add_argument(
        "--save", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}, its table, and the README"
    )
    args = parser.parse_args()

    found: dict[str, Any] = {**circumstances(PACKAGES), "seeds": {}}
    if args.save and RESULTS.exists():
        earlier = json.loads(RESULTS.read_text(encoding="utf-8"))
        if earlier["commit"] == found["commit"]:
            found["seeds"] = earlier["seeds"]
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            here = Path.cwd()
            os.chdir(folder)
            try:
                found["seeds"][str(seed)] = chain(seed)
            finally:
                os.chdir(here)
    found["seeds"] = dict(sorted(found["seeds"].items()))
    print(as_table(found))
    if args.save:
        save(found)


if __name__ == "__main__":
    main()
