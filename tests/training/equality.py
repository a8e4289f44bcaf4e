"""One recipe in one process and spread over several by every backend: do losses, weights and the saved model agree?

`python -m tests.training.equality` makes the whole table, and with names of layouts its lines for those. Packing is for
SFT alone: TRL has none for DPO and GRPO.
"""

import json
import math
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.processes import in_processes
from tests.tiny import make_tokenizer
from tests.training.answers import fixed_numbers
from tests.two_tokenizers import save_other_model

STEPS = 10
BATCH = 8
NUM_ROWS = 21
"""Two steps of 8 and one of 5 are an epoch."""

MAX_LOSS = 1e-4
MAX_WEIGHTS = 1e-3
MAX_LOGITS = 1e-3


@dataclass(frozen=True)
class Spread:
    """A layout, by what a recipe says of it."""

    name: str
    parallel: Mapping[str, Any]

    @property
    def num_processes(self) -> int:
        return self.parallel["num_processes"]


SPREADS = (
    Spread("DDP x2", {"num_processes": 2, "strategy": "ddp"}),
    Spread("DDP x4", {"num_processes": 4, "strategy": "ddp"}),
    Spread("FSDP2 x2", {"num_processes": 2, "strategy": "fsdp2", "reshard_after_forward": True}),
    Spread("FSDP2 no reshard x2", {"num_processes": 2, "strategy": "fsdp2", "reshard_after_forward": False}),
    Spread("FSDP2 hybrid 2x2", {"num_processes": 4, "strategy": "fsdp2", "dp_shard_size": 2}),
    Spread("ZeRO-1 x2", {"num_processes": 2, "strategy": "zero1"}),
    Spread("ZeRO-2 x2", {"num_processes": 2, "strategy": "zero2"}),
    Spread("ZeRO-3 x2", {"num_processes": 2, "strategy": "zero3"}),
    Spread(
        "ZeRO-3 + CPU offload x2",
        {
            "num_processes": 2,
            "strategy": "zero3",
            "offload_param_device": "cpu",
            "offload_optimizer_device": "cpu",
        },
    ),
)

OFFLOADED = Spread(
    "FSDP2 + CPU offload x2",
    {
        "num_processes": 2,
        "strategy": "fsdp2",
        "offload_param_device": "cpu",
        "offload_optimizer_device": "cpu",
    },
)
"""What cannot run here."""

CAUSE = "Cannot access accelerator device when none is available"
"""Why: torch pins the memory that weights are offloaded to, which takes an accelerator (torch 2.13)."""


@dataclass(frozen=True)
class Subject:
    """What is trained: a method, an adapter, whether rows are packed, and an architecture."""

    name: str
    method: Mapping[str, Any]
    adapter: str
    packing: bool
    model_type: str
    layouts: tuple[str, ...] = ()
    """Names of the layouts in which it is compared; all where there is none."""


DPO = {"type": "dpo"}
GRPO = {
    "type": "grpo",
    "rewards": ["tests.training.answers:reward"],
    "num_generations": 4,
    "max_completion_length": 8,
}
DYNAMIC = {**GRPO, "rewards": ["tests.training.answers:reward_of_some"], "max_resample_times": 2}
REPLAY = {**GRPO, "rewards": ["tests.training.answers:reward_of_some"], "replay_buffer_size": 8, "beta": 0.1}
RLOO = {**GRPO, "type": "rloo"}
GMPO = {**GRPO, "type": "gmpo"}
EBFT = {"type": "ebft", "num_generations": 4, "max_completion_length": 8}
ONLINE_DPO = {**GRPO, "type": "online_dpo"}
KTO = {"type": "kto"}
UNPAIRED_APO = {"type": "kto", "loss_type": "apo_zero_unpaired"}
GKD = {
    "type": "gkd",
    "teacher": "teacher",
    "max_completion_length": 8,
    # The most likely token is the same one in every layout.
    "generation": {"top_k": 1},
}
GOLD = {**GKD, "type": "gold", "uld_use_hybrid_loss": True}
"""A distance of sorted probabilities alone has a kink wherever two are equal, and completions of equal tokens many of
them: which side rounding takes decides on the gradient, also in one process with other micro-batches."""
RANKS = {"type": "gold", "teacher": "teacher", "lmbda": 0}
DISTILLATION = {**GKD, "type": "distillation"}
SDFT = {"type": "sdft", "max_completion_length": 8, "generation": {"top_k": 1}}
FEW = ("DDP x2", "FSDP2 x2", "ZeRO-2 x2")
SEVERAL = {"type": "classification", "num_labels": 3, "problem_type": "multi_label_classification"}
IN_4_BITS = (*FEW, "FSDP2 no reshard x2", "FSDP2 hybrid 2x2")
SUBJECTS = (
    # The loss that balances experts is one of each micro-batch by itself, so it is left out of what is compared.
    Subject("SFT full", {"type": "sft", "trainer_args": {"router_aux_loss_coef": 0.0}}, "full", False, "mixtral"),
    Subject("SFT full, packed", {"type": "sft"}, "full", True, "gemma3_text"),
    Subject("SFT LoRA", {"type": "sft"}, "lora", False, "gemma3_text"),
    Subject("SFT LoRA, packed", {"type": "sft"}, "lora", True, "qwen3"),
    Subject("DPO LoRA", DPO, "lora", False, "qwen3"),
    Subject("GRPO LoRA", GRPO, "lora", False, "llama"),
    Subject("GRPO LoRA, dynamic sampling", DYNAMIC, "lora", False, "llama", FEW),
    Subject("GRPO LoRA, replay", REPLAY, "lora", False, "llama", FEW),
    Subject("RLOO LoRA", RLOO, "lora", False, "llama", FEW),
    Subject("GMPO LoRA", GMPO, "lora", False, "llama", FEW),
    Subject("EBFT full", {**EBFT, "beta": 0.1}, "full", False, "llama", (*FEW, "ZeRO-3 x2")),
    Subject("EBFT LoRA", EBFT, "lora", False, "qwen3", FEW),
    Subject("online DPO LoRA", ONLINE_DPO, "lora", False, "llama", FEW),
    Subject("online DPO full", ONLINE_DPO, "full", False, "llama", (*FEW, "ZeRO-3 x2")),
    Subject("KTO LoRA", KTO, "lora", False, "qwen3", (*FEW, "ZeRO-3 x2")),
    Subject("KTO full", KTO, "full", False, "llama", (*FEW, "DDP x4", "ZeRO-3 x2")),
    Subject("KTO LoRA, apo", UNPAIRED_APO, "lora", False, "qwen3", FEW),
    Subject("reward full", {"type": "reward"}, "full", False, "llama", FEW),
    Subject("PRM full", {"type": "prm"}, "full", False, "llama", (*FEW, "ZeRO-3 x2")),
    Subject("PRM LoRA", {"type": "prm"}, "lora", False, "qwen3", FEW),
    Subject(
        "Classification full", {"type": "classification", "num_labels": 3}, "full", False, "llama", (*FEW, "ZeRO-3 x2")
    ),
    Subject("Classification LoRA", {"type": "classification", "labels": ["a", "b", "c"]}, "lora", False, "qwen3", FEW),
    Subject("Classification of several", SEVERAL, "full", False, "qwen3", FEW),
    Subject("PRM QLoRA", {"type": "prm"}, "qlora", False, "llama", FEW),
    Subject("GKD full", GKD, "full", False, "llama", (*FEW, "ZeRO-3 x2")),
    Subject("GOLD full", GOLD, "full", False, "llama", (*FEW, "ZeRO-3 x2")),
    Subject("GOLD LoRA", GOLD, "lora", False, "qwen3", FEW),
    Subject("GOLD full, by rank on rows", RANKS, "full", False, "llama", FEW),
    Subject("distillation full", DISTILLATION, "full", False, "llama", (*FEW, "ZeRO-3 x2")),
    Subject("SDFT full", SDFT, "full", False, "llama", (*FEW, "ZeRO-3 x2")),
    Subject("SDFT LoRA", SDFT, "lora", False, "qwen3", FEW),
    Subject("GKD LoRA, packed", {"type": "gkd", "teacher": "teacher", "lmbda": 0}, "lora", True, "qwen3", FEW),
    Subject("SFT QLoRA", {"type": "sft"}, "qlora", False, "llama", IN_4_BITS),
    Subject("SFT QLoRA, packed", {"type": "sft"}, "qlora", True, "qwen3", IN_4_BITS),
    Subject("DPO QLoRA", DPO, "qlora", False, "qwen3", FEW),
    Subject("GRPO QLoRA", GRPO, "qlora", False, "llama", FEW),
)


def save_small_model(folder: Path, model_type: str, **others: int) -> Path:
    """Save a model of a type with random weights, and the byte-level tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": 0.1,
    }
    own = {"mixtral": {"num_local_experts": 4}, "gemma3_text": {"sliding_window": 24}}.get(model_type, {})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**{**sizes, **own, **others})).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows_of(subject: Subject, num_rows: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows of very different lengths, so that a mean over rows is not one over tokens."""
    for n in range(seed, seed + num_rows):
        question, answer = "?" * (1 + n * 7 % 23), f"{n * n} is " + "ok " * (n * n * 5 % 19)
        match subject.method["type"]:
            case "sft" | "gkd" | "gold":
                turns = [("user", question), ("assistant", answer)]
                yield {"messages": [{"role": role, "content": content} for role, content in turns]}
            case "classification":
                one = n * n % 3
                yield {
                    "prompt": f"{question} {answer}",
                    "label": [one] * (n % 4 > 0) if "problem_type" in subject.method else one,
                }
            case "prm":
                steps = [f"{n} " * (1 + n * step * 3 % 7) for step in range(1, 2 + n % 4)]
                yield {"prompt": question, "completions": steps, "labels": [(n + i) % 3 > 0 for i in range(len(steps))]}
            case "kto":
                yield {"prompt": question, "completion": answer, "label": n % 3 > 0}
            case "dpo" | "orpo" | "cpo" | "reward":
                yield {"prompt": question, "chosen": answer, "rejected": "no " * (1 + n * 3 % 7)}
            case "grpo" | "rloo" | "gmpo" | "online_dpo" | "distillation":
                yield {"prompt": question}
            case "ebft":
                yield {"prompt": question, "ground_truth": answer}
            case "sdft":
                yield {"prompt": question, "privileged_context": answer}


def write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def recipe_of(subject: Subject, folder: Path, *, micro_batch_size: int, num_rows: int = NUM_ROWS) -> dict[str, Any]:
    """The recipe of a subject, whose files are made in a folder where they are not there yet."""
    folder.mkdir(exist_ok=True)
    model = folder / subject.model_type
    if not model.exists():
        save_small_model(model, subject.model_type)
    kind = subject.method["type"]
    data = {
        "train": write_rows(folder / f"{kind}-{num_rows}.jsonl", rows_of(subject, num_rows)),
        "packing": subject.packing,
        "max_length": 128,
    }
    if kind in ("sft", "gkd", "gold", "prm", "classification"):
        data["eval"] = write_rows(folder / f"{kind}-eval.jsonl", rows_of(subject, 7, seed=100))
    return {
        "model": str(model),
        "data": data,
        "method": {
            **subject.method,
            **({"teacher": str(_teacher(folder, kind))} if "teacher" in subject.method else {}),
        },
        "adapter": {"type": subject.adapter, **({} if subject.adapter == "full" else {"rank": 4})},
        "train": {
            "max_steps": STEPS,
            "global_batch_size": BATCH,
            "micro_batch_size": micro_batch_size,
            "learning_rate": 3e-3,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "eval_steps": STEPS // 2,
        },
        "output": {"sample_prompts": []},
    }


def _teacher(folder: Path, kind: str) -> Path:
    if kind == "gold":
        path = folder / "other"
        return path if path.exists() else save_other_model(path, hidden=64)
    path = folder / "teacher"
    return path if path.exists() else save_small_model(path, "llama", hidden_size=64, num_hidden_layers=3)


@dataclass(frozen=True)
class Trained:
    """What is left of a run."""

    losses: list[float]
    eval_losses: list[float]
    num_tokens: float
    folder: Path


def work_in(folder: str) -> None:
    """Work as one of the processes of a run."""
    from tunekit.runs.run import Run
    from tunekit.runs.small_files import place_of
    from tunekit.training.worker import work

    with fixed_numbers():
        work(Run(folder), place=place_of())


def train(recipe: Mapping[str, Any], parallel: Mapping[str, Any], folder: Path) -> Trained:
    """Train a recipe in as many processes as are asked for, this one where it is one."""
    from tunekit.api import verbs
    from tunekit.launching.local import launch

    run = verbs.make_run({**recipe, "parallel": dict(parallel), "output": {**recipe["output"], "dir": str(folder)}})
    num_processes = run.plan.layout.num_processes
    assert num_processes == parallel.get("num_processes", 1)
    if num_processes == 1:
        with fixed_numbers():
            launch(run, None)
    else:
        in_processes(num_processes, work_in, str(run.path.resolve()))
    steps = [event for event in run.events() if event["event"] == "log"]
    evaluations = [event["eval_loss"] for event in run.events() if event["event"] == "eval"]
    return Trained([step["loss"] for step in steps], evaluations, steps[-1]["num_tokens"], run.path)


def reload(recipe: Mapping[str, Any], folder: Path) -> Any:
    """The model that a run saved, whole, as transformers and PEFT read it."""
    from peft import PeftModel

    if recipe["adapter"]["type"] == "full":
        return loaded(recipe, folder / "model").eval()
    base = loaded(recipe, recipe["model"])
    if recipe["adapter"]["type"] == "qlora":
        round_to_nf4(base)
    return PeftModel.from_pretrained(base, folder / "model").merge_and_unload().eval()


def round_to_nf4(model: Any) -> None:
    """Give the linear layers of a model but for the head the values that they have in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from torch.nn import Linear

    score = dict(model.named_children()).get("score")
    for module in model.modules():
        if isinstance(module, Linear) and module not in (model.get_output_embeddings(), score):
            # As rows of a block each: on some CPUs bitsandbytes misreads rows that end within one.
            blocks = module.weight.data.view(-1, 64)
            packed, state = quantize_4bit(blocks, blocksize=64, compress_statistics=True, quant_type="nf4")
            module.weight.data = dequantize_4bit(packed, state).view(module.weight.shape)


def loaded(recipe: Mapping[str, Any], path: Path | str) -> Any:
    """A model in float32, with a score for a head where that is what is trained."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    if recipe["method"]["type"] == "reward":
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    if recipe["method"]["type"] == "classification":
        return AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, dtype=torch.float32)
    if recipe["method"]["type"] == "prm":
        return AutoModelForTokenClassification.from_pretrained(path, num_labels=2, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logits_of(model: Any) -> Any:
    """Logits of a few lines of text."""
    import torch

    ids = torch.arange(3 * 40).view(3, 40) % 200
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def eval_loss_of(model: Any, run_folder: Path) -> float:
    """Mean loss over the tokens of the evaluation rows, document by document, without any of the code under test."""
    import torch
    from datasets import Dataset

    nats, num_tokens = 0.0, 0
    for row in Dataset.from_file(str(run_folder / "data" / "eval.arrow")):
        start = 0
        for length in row.get("seq_lengths") or [len(row["input_ids"])]:
            ids, labels = (torch.tensor(row[name][start : start + length]) for name in ("input_ids", "labels"))
            start += length
            with torch.no_grad():
                logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            nats += float(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
            num_tokens += int((labels[1:] != -100).sum())
    return nats / num_tokens


@dataclass(frozen=True)
class Difference:
    """How far a run is from the one in one process.

    Attributes:
        loss: Largest difference of a step's loss, in nats.
        eval_loss: Largest difference of an evaluation's.
        weights: Distance of the saved weights from each other, as a share of how far training moved them.
        logits: Largest difference of a logit of the saved models.
        reloaded: Difference of the last evaluation from that of the saved model, reloaded; 0 without evaluation.
    """

    loss: float
    eval_loss: float
    weights: float
    logits: float
    reloaded: float

    @property
    def is_small(self) -> bool:
        return (
            max(self.loss, self.eval_loss, self.reloaded) <= MAX_LOSS
            and self.weights <= MAX_WEIGHTS
            and self.logits <= MAX_LOGITS
        )

    def __str__(self) -> str:
        figures = (self.loss, self.eval_loss, self.weights, self.logits, self.reloaded)
        return " | ".join(f"{figure:.1e}" for figure in figures)


def difference(recipe: Mapping[str, Any], alone: Trained, spread: Trained) -> Difference:
    """Compare a run with the one in one process."""
    assert len(spread.losses) == len(alone.losses) == STEPS
    assert all(map(math.isfinite, spread.losses))
    models = [reload(recipe, run.folder) for run in (alone, spread)]
    # A score is new, so how far it moved is not known.
    before = {
        name: weight
        for name, weight in loaded(recipe, recipe["model"]).state_dict().items()
        if not name.startswith("score.")
    }
    weights = [model.state_dict() for model in models]
    apart = sum(float((weights[0][name] - weights[1][name]).square().sum()) for name in before)
    moved = sum(float((weights[0][name] - before[name]).square().sum()) for name in before)
    assert moved > 0
    # Of other methods the evaluation is no likelihood of tokens.
    is_sft = recipe["method"]["type"] == "sft" and bool(spread.eval_losses)
    return Difference(
        loss=_largest(spread.losses, alone.losses),
        eval_loss=_largest(spread.eval_losses, alone.eval_losses),
        weights=math.sqrt(apart / moved),
        logits=float((logits_of(models[0]) - logits_of(models[1])).abs().max()),
        reloaded=abs(eval_loss_of(models[1], spread.folder) - spread.eval_losses[-1]) if is_sft else 0.0,
    )


def _largest(these: list[float], those: list[float]) -> float:
    return max((abs(one - other) for one, other in zip(these, those, strict=True)), default=0.0)


HEADER = """| trained | on | layout | losses | evaluations | weights | logits | reloaded | equal |
|---|---|---|---|---|---|---|---|---|
"""


def line_of(subject: Subject, spread: Spread, found: Difference) -> str:
    """A line of the table."""
    equal = "yes" if found.is_small else "NO"
    return f"| {subject.name} | {subject.model_type} | {spread.name} | {found} | {equal} |\n"


def cells(subject: Subject, folder: Path, spreads: tuple[Spread, ...]) -> Iterator[tuple[Spread, Difference]]:
    """Train a subject in one process and in every layout."""
    alone = train(recipe_of(subject, folder, micro_batch_size=BATCH // 2), {}, folder / f"{subject.name}-alone")
    for spread in spreads:
        recipe = recipe_of(subject, folder, micro_batch_size=BATCH // 2 // spread.num_processes)
        run = train(recipe, spread.parallel, folder / f"{subject.name}-{spread.name}")
        yield spread, difference(recipe, alone, run)


def table_of(subject: Subject, folder: Path, names: Collection[str] = ()) -> Iterator[tuple[str, bool]]:
    """The lines of a subject, and whether each is as it should be.

    Args:
        subject: What is trained.
        folder: For its files.
        names: Layouts to train in; all of the subject's where there is none.
    """
    chosen = names or subject.layouts
    for spread, found in cells(subject, folder, tuple(one for one in SPREADS if not chosen or one.name in chosen)):
        yield line_of(subject, spread, found), found.is_small
    blanks = " | ".join(["-"] * 5)
    yield f"| {subject.name} | {subject.model_type} | {OFFLOADED.name} | {blanks} | not on a CPU: {CAUSE} |\n", True


def main() -> None:
    """Print the table, or its lines for the layouts that are named."""
    print(HEADER, end="")
    with TemporaryDirectory() as folder:
        for subject in SUBJECTS:
            for line, _ in table_of(subject, Path(folder), sys.argv[1:]):
                print(line, end="", flush=True)


if __name__ == "__main__":
    main()
