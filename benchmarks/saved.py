"""Is the saved model the trained one? For every engine, adapter, tied or untied head, resumed or not, in both types.

    python -m benchmarks.saved [--only WORDS ...] [--sample N] [--save]

Each cell is trained for a few steps in real processes, resumed from its checkpoint where the cell says so, and
evaluated by its trainer after the last step. Another process then loads what was saved with Transformers, and PEFT for
an adapter, without tunekit, and computes the loss of the same rows: a mean over all trained tokens, as the trainer's.
The two losses must be the same up to rounding. A cell that the plan refuses has its reason.

Results are kept as they come (`build/saved.jsonl`), so that it can be interrupted; what was measured before a change
of tunekit is measured again.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.circumstances import in_words
from tests.processes import in_processes
from tests.tiny import save_chats, save_tiny_model
from tests.training.engines import made, worked
from tunekit.errors import TunekitError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "saved.md"
STATE = ROOT / "build" / "saved.jsonl"
PACKAGES = ("tunekit", "torch", "transformers", "trl", "peft", "accelerate", "deepspeed")

STEPS, AT = 6, 3
"""Steps of a run, and that of the checkpoint from which it is resumed."""

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest difference of the losses, as a share of the loss. In bfloat16 sums of other shapes are rounded otherwise."""

ENGINES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp", "num_processes": 2},
    "fsdp2": {"strategy": "fsdp2", "num_processes": 2},
    "zero1": {"strategy": "zero1", "num_processes": 2},
    "zero2": {"strategy": "zero2", "num_processes": 2},
    "zero3": {"strategy": "zero3", "num_processes": 2},
}

_LORA = {"type": "lora", "rank": 4, "target_modules": "all-linear"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"type": "full"},
    "last layer": {"type": "full", "last_layers": 1},
    "lora": _LORA,
    "lora, embedding": {**_LORA, "modules_to_save": ["embed_tokens"]},
    "lora, head": {**_LORA, "modules_to_save": ["lm_head"]},
    "lora, both": {**_LORA, "modules_to_save": ["embed_tokens", "lm_head"]},
    "lora, norms": {**_LORA, "modules_to_save": ["norm"]},
    "dora": {**_LORA, "use_dora": True},
    "pissa": {**_LORA, "init_lora_weights": "pissa"},
    "qlora": {"type": "qlora", "rank": 4},
    "ia3": {"type": "ia3"},
    "oft": {"type": "oft", "oft_block_size": 4},
    "miss": {"type": "miss", "rank": 4},
    "vera": {"type": "vera", "rank": 4},
    "adalora": {"type": "adalora", "init_r": 4, "target_r": 2},
    "prompt": {"type": "prompt_tuning", "num_virtual_tokens": 4},
}


@dataclass(frozen=True)
class Cell:
    """A combination of the matrix.

    Attributes:
        engine: One of `ENGINES`.
        adapter: One of `ADAPTERS`.
        tied: Whether the head has the weights of the embedding.
        resumed: Whether the run was resumed in its middle.
        dtype: Type of the products, and of frozen weights.
    """

    engine: str
    adapter: str
    tied: bool
    resumed: bool
    dtype: str

    @property
    def name(self) -> str:
        """Its place in words."""
        words = [self.engine, self.adapter, "tied" if self.tied else "untied", self.dtype]
        return ", ".join([*words, *(["resumed"] if self.resumed else [])])


def cells() -> list[Cell]:
    """Return the whole matrix."""
    return [Cell(*values) for values in product(ENGINES, ADAPTERS, (True, False), (False, True), TOLERANCES)]


def recipe_of(cell: Cell, folder: Path) -> dict[str, Any]:
    """Return the recipe of a cell, whose model and rows are in a folder."""
    return {
        "model": {"path": str(folder / ("tied" if cell.tied else "untied")), "dtype": cell.dtype},
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "held_out.jsonl"), "max_length": 64},
        "adapter": ADAPTERS[cell.adapter],
        "train": {
            "max_steps": STEPS,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "learning_rate": 2e-2 if cell.adapter not in ("full", "last layer") else 3e-3,
            "lr_scheduler_type": "constant",
            "eval_steps": STEPS,
            "save_steps": AT,
        },
        "parallel": ENGINES[cell.engine],
        "output": {"sample_prompts": [], "dir": str(folder / "run")},
    }


def prepare(folder: Path) -> None:
    """Save both models and the rows."""
    from transformers import AutoModelForCausalLM

    save_tiny_model(folder / "untied", hidden=32)
    save_tiny_model(folder / "tied", hidden=32)
    model = AutoModelForCausalLM.from_pretrained(folder / "tied")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder / "tied")
    save_chats(folder / "rows.jsonl", ((f"double {n}", f"{2 * n} it is" + "!" * (n % 5)) for n in range(32)))
    save_chats(folder / "held_out.jsonl", ((f"double {n}", f"it is {2 * n}") for n in range(40, 48)))


def measured(cell: Cell, folder: Path) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Train a cell, and yield it with its losses, or why there are none; then the same for it as it is resumed.

    The loss of the resumed one is compared with that of the whole run too.

    Args:
        cell: A cell that is not resumed.
        folder: Its models and rows.
    """
    from tunekit.api.resume import resumed
    from tunekit.runs.run import Run

    shutil.rmtree(folder / "run", ignore_errors=True)
    both = (cell, replace(cell, resumed=True))
    try:
        run = Run(made(recipe_of(cell, folder)))
    except TunekitError as error:
        yield from ((one, {"verdict": "refused", "detail": str(error)}) for one in both)
        return
    whole = 0.0
    for one in both:
        try:
            # The second is back at the checkpoint in the middle of the first, in fresh processes.
            path = resumed(run, from_=str(AT)).path if one.resumed else run.path
            in_processes(run.plan.layout.num_processes, worked, path)
            trained = [event["eval_loss"] for event in run.events() if event["event"] == "eval"][-1]
            whole = whole or trained
            (saved,) = in_processes(1, loss_of_saved, str(run.model_path), list(_rows(run.path)), one)
        except (AssertionError, TunekitError) as error:
            yield one, {"verdict": "failed", "detail": str(error).strip().splitlines()[-1]}
            continue
        share = max(abs(saved - trained), abs(whole - trained)) / trained
        verdict = "same" if share <= TOLERANCES[one.dtype] else "different"
        losses = f"{whole:.5f} whole, {trained:.5f} trained, {saved:.5f} saved"
        yield one, {"verdict": verdict, "detail": f"{losses}: {share:.0e}"}


def _rows(run: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Yield token ids and labels of the held-out rows, as the trainer had them."""
    from tunekit.data.prepare import read_dataset

    (file,) = (run / "data").glob("eval*.arrow")
    for row in read_dataset(file):
        yield row["input_ids"], row["labels"]


def loss_of_saved(folder: str, rows: Sequence[tuple[list[int], list[int]]], cell: Cell) -> float:
    """Return the mean loss of all trained tokens by what was saved, loaded without tunekit."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    products, is_adapter = getattr(torch, cell.dtype), ADAPTERS[cell.adapter]["type"] != "full"
    cls = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    # A frozen base is in the type of the products, trained weights are float32.
    model = cls.from_pretrained(folder, dtype=products if is_adapter else torch.float32, **_quantization(cell)).eval()
    _read_by_blocks(model)
    total, count = 0.0, 0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=products == torch.bfloat16):
        for ids, labels in rows:
            # Those of virtual tokens come first.
            logits = model(input_ids=torch.tensor([ids])).logits[0, -len(ids) : -1].float()
            targets = torch.tensor(labels[1:])
            total += float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum"))
            count += int((targets != -100).sum())
    return total / count


def _read_by_blocks(model: Any) -> None:
    """Have 4-bit layers multiply by their values as floats, read as rows of a block each.

    With AVX-512, bitsandbytes misreads rows that end within a block, and repacks weights for inference.
    """
    from copy import copy
    from functools import partial

    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from torch.nn.functional import linear

    for layer in [module for module in model.modules() if isinstance(module, Linear4bit)]:
        shape, state = layer.weight.quant_state.shape, copy(layer.weight.quant_state)
        state.shape = (shape.numel() // state.blocksize, state.blocksize)
        values = dequantize_4bit(layer.weight.data, state).view(shape)
        layer.forward = partial(linear, weight=values.to(layer.compute_dtype), bias=layer.bias)


def _quantization(cell: Cell) -> dict[str, Any]:
    """Return how the base of an adapter is loaded: in 4 bits for QLoRA."""
    if cell.adapter != "qlora":
        return {}
    import torch
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, cell.dtype),
    )
    return {"quantization_config": config}


@cache
def source() -> str:
    """Return the last commit that changed what a result depends on."""
    git = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", "tunekit", "tests/training/engines.py", __file__]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def known() -> dict[Cell, dict[str, Any]]:
    """Return what was measured of this source."""
    lines = STATE.read_text(encoding="utf-8").splitlines() if STATE.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {Cell(**row["cell"]): row["result"] for row in rows if row["source"] == source()}


def page(results: dict[Cell, dict[str, Any]]) -> str:
    """Return the results as Markdown: a table for each type, and the reasons of what was refused."""
    counts = Counter(result["verdict"] for result in results.values())
    lines = ["# Saved models against trained ones", "", __doc__.split("\n\n", 2)[2].rpartition("\n\nResults")[0], ""]
    lines += [f"`python -m benchmarks.saved --save`: {in_words(PACKAGES)}.", ""]
    lines += [f"{len(results)} cells: {', '.join(f'{num} {verdict}' for verdict, num in counts.most_common())}.", ""]
    marks = {"same": "=", "refused": "refused", "different": "**different**", "failed": "**failed**"}
    for dtype, tied, was_resumed in product(TOLERANCES, (True, False), (False, True)):
        title = f"{dtype}, {'tied' if tied else 'untied'}{', resumed' if was_resumed else ''}"
        lines += [f"## {title}", "", f"| adapter | {' | '.join(ENGINES)} |", f"|:--{'|:-:' * len(ENGINES)}|"]
        for adapter in ADAPTERS:
            row = [results.get(Cell(engine, adapter, tied, was_resumed, dtype)) for engine in ENGINES]
            lines.append(f"| {adapter} | {' | '.join('' if one is None else marks[one['verdict']] for one in row)} |")
        lines.append("")
    for verdict in ("different", "failed"):
        wrong = {cell: result for cell, result in results.items() if result["verdict"] == verdict}
        lines += [f"- {verdict}: {cell.name}: {result['detail']}" for cell, result in wrong.items()]
    reasons = Counter(result["detail"] for result in results.values() if result["verdict"] == "refused")
    lines += ["", "Refused in the plan:", "", *(f"- {num}: {reason}" for reason, num in reasons.most_common())]
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not known yet, and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saved", description="Compare saved and trained models.")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORDS", help="cells with all of these in their names")
    parser.add_argument("--sample", type=int, help="so many cells, drawn evenly")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args(argv)
    chosen = [cell for cell in cells() if all(words in cell.name.split(", ") for words in args.only)]
    if args.sample is not None:
        chosen = random.Random(0).sample(chosen, min(args.sample, len(chosen)))
    results = known()
    with tempfile.TemporaryDirectory(prefix="saved-") as scratch:
        folder = Path(scratch)
        prepare(folder)
        for cell in chosen:
            if cell not in results:
                for one, result in measured(replace(cell, resumed=False), folder):
                    results[one] = result
                    STATE.parent.mkdir(parents=True, exist_ok=True)
                    with STATE.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"source": source(), "cell": asdict(one), "result": result}) + "\n")
            print(f"{results[cell]['verdict']:10} {cell.name}: {results[cell]['detail']}", flush=True)
    if args.save:
        RESULTS.write_text(page(results), encoding="utf-8")
    print(dict(Counter(results[cell]["verdict"] for cell in chosen)))
    return int(any(results[cell]["verdict"] not in ("same", "refused") for cell in chosen))


if __name__ == "__main__":
    sys.exit(main())
