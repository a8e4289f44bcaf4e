"""How good a pico model folder is, task by task.

    python examples/pico/evaluate.py                 # the model that ships with tunekit
    python examples/pico/evaluate.py runs/x/model    # one that was fine-tuned from it

Each problem is put to the model alone in its chat template and answered greedily. A reply is right when it ends
with the right answer, whatever stands before it, so a model that was taught another tone is judged by the same rule.
Problems come from the held-out side of the split in `tasks.py`: training never saw them. The tasks marked
"taught" are the exception: they ask for what is learned by heart, and show how much of it was kept.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from pathlib import Path

import torch
from tasks import ARITHMETIC, TASKS, Exchange
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SHIPPED = Path(__file__).parents[2] / "tunekit" / "models" / "pico"
#: Tasks without a held-out side.
TAUGHT = frozenset(["facts", "spell"])


def is_right(exchange: Exchange, reply: str) -> bool:
    """Whether the reply ends with the answer, as a whole number, word or list.

    Without the look-behinds "168" would pass for "68", "forty-two" for "two", "one hundred and ten" for "ten",
    and "1, 2, 3" for "2, 3". A task whose reply is nothing but the answer must be answered with nothing else.
    """
    reply = reply.strip().rstrip(".!")
    answer = exchange.answer or ""
    if exchange.reply.rstrip(".") == answer:
        return reply == answer
    return re.search(rf"(?<![\w-])(?<!hundred and )(?<!, ){re.escape(answer)}$", reply) is not None


def problems(task: str, num_problems: int, seed: int) -> list[Exchange]:
    """The same problems every time for a task, a number and a seed."""
    rng = random.Random(f"evaluate/{task}/{seed}")
    return [TASKS[task][1](rng, True) for _ in range(num_problems)]


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str], batch_size: int = 100
) -> list[str]:
    """The greedy replies to questions that are each asked alone."""
    tokenizer.padding_side = "left"
    replies: list[str] = []
    for start in range(0, len(questions), batch_size):
        chats = [[{"role": "user", "content": question}] for question in questions[start : start + batch_size]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=48)
        replies += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


def evaluate(folder: Path, num_problems: int, seed: int, show: int = 0) -> dict[str, float]:
    """The accuracy of each task between 0 and 1, and the mean of the large sums and differences as "arithmetic"."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # float32: the padding of a batch then does not change which token is likeliest.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    accuracy: dict[str, float] = {}
    for task in TASKS:
        exchanges = problems(task, num_problems, seed)
        if exchanges[0].answer is None:  # small talk
            continue
        replies = answer(model, tokenizer, [exchange.question for exchange in exchanges])
        verdicts = [is_right(exchange, reply) for exchange, reply in zip(exchanges, replies, strict=True)]
        accuracy[task] = sum(verdicts) / len(verdicts)
        for exchange, reply, verdict in list(zip(exchanges, replies, verdicts, strict=True))[:show]:
            print(f"{'right' if verdict else 'WRONG'}  {exchange.question!r} -> {reply!r}")
    accuracy["arithmetic"] = sum(accuracy[task] for task in ARITHMETIC) / len(ARITHMETIC)
    return accuracy


def main() -> None:
    """Evaluate a model folder and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model", type=Path, nargs="?", default=SHIPPED, help="a model folder (default: the shipped one)"
    )
    parser.add_argument("--problems", type=int, default=200, help="problems per task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="print this many replies per task")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()

    accuracy = evaluate(args.model, args.problems, args.seed, 0 if args.json else args.show)
    if args.json:
        print(json.dumps(accuracy, indent=2))
        return
    print(f"| {'task':<14} | problems | right |")
    print(f"|:{'-' * 14}-|:---------|------:|")
    for task, share in accuracy.items():
        kind = "taught" if task in TAUGHT else "held out"
        print(f"| {task:<14} | {kind:<8} | {share:>4.0%} |")


if __name__ == "__main__":
    main()
