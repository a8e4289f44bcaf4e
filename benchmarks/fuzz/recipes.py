"""Random valid recipes with their rows, each from one integer."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz.models import WITHOUT_SYSTEM

WORDS = [
    "the", "a", "rain", "sum", "of", "two", "three", "answer", "is", "five", "what", "why", "7", "42", "x=1",
    "yes", "no.", "and,", "Hello!", "if", "(then)", "else:", "é", "ñ", "Öl", "雨", "中文", "مرحبا", "🙂",
    "👩\u200d🚀", "e\u0301", "\u200b", "tab\there", "new\nline", "", "double",
]  # fmt: skip
"""Words of rows, some of several bytes a character."""

FAMILIES = (
    ("llama", 6), ("qwen2", 4), ("qwen3", 5), ("gemma", 2), ("gemma2", 2), ("gemma3_text", 3), ("phi3", 2),
    ("mistral", 3), ("gpt2", 2), ("gpt_neox", 1), ("olmo2", 2), ("granite", 2), ("cohere", 2), ("mixtral", 2),
    ("qwen3_moe", 2), ("stablelm", 1), ("starcoder2", 2), ("smollm3", 2), ("glm4", 1), ("phi", 1), ("opt", 1),
)  # fmt: skip
"""Families of models with their weights in the draw."""

LLAMA_LIKE = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3")
"""Families whose layers have the names of Llama's."""

MOE = ("mixtral", "qwen3_moe")

PAIRS = ("dpo", "orpo", "cpo", "reward")
"""Methods on preference pairs."""

TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}


@dataclass(frozen=True)
class Case:
    """A drawn recipe.

    Attributes:
        seed: The integer that it was drawn from.
        model: Type, template, vocabulary and changes of the configuration of the model.
        recipe: Sections of the recipe, without paths.
        train_rows: Rows of each source.
        eval_rows: Rows to evaluate on; empty without.
        cuts: Steps after which the run is cut off, and resumed.
        shape: How rows stand in their files: as `jsonl`, `json`, `parquet`, or as `sharegpt` in the first.
    """

    seed: int
    model: Mapping[str, Any]
    recipe: Mapping[str, Any]
    train_rows: Sequence[Sequence[Mapping[str, Any]]]
    eval_rows: Sequence[Mapping[str, Any]]
    cuts: tuple[int, ...] = field(default=())
    shape: str = "jsonl"

    @property
    def num_processes(self) -> int:
        """Processes that it takes."""
        return int(self.recipe.get("parallel", {}).get("num_processes", 1))


class Draw(random.Random):
    """Random choices from one seed."""

    def hit(self, share: float) -> bool:
        """Return true with a probability."""
        return self.random() < share

    def weighted(self, pairs: Sequence[tuple[Any, float]]) -> Any:
        """Return one of several values by their weights."""
        values, weights = zip(*pairs, strict=True)
        return self.choices(values, weights)[0]


def drawn(seed: int) -> Case:
    """Return the case of a seed."""
    draw = Draw(seed)
    method = _method(draw)
    model = _model(draw, method["type"])
    num_processes = 2 if draw.hit(0.08) else 1
    adapter = _adapter(draw, method["type"], model, num_processes)
    data, format = _data(draw, method["type"], model)
    train = _train(draw, method, adapter, data, model, num_processes)
    all_counts = data.get("loss_on", "assistant") != "assistant"
    num_sources = 2 if method["type"] == "sft" and draw.hit(0.1) else 1

    def row() -> dict[str, Any]:
        return _row(draw, format, model, all_counts=all_counts)

    rows = [[row() for _ in range(draw.randint(5, 22 // num_sources))] for _ in range(num_sources)]
    if format == "unpaired_preference":
        rows[0][0]["label"], rows[0][1]["label"] = True, False
    evaluated = [row() for _ in range(draw.randint(1, 6))] if draw.hit(0.5) else []
    if format == "unpaired_preference" and evaluated:
        evaluated[0]["label"] = True
    if model["type"] in MOE and method["type"] in ("sft", "dpo", "kto"):
        # The loss that balances experts is one of each micro-batch by itself.
        method["trainer_args"] = {"router_aux_loss_coef": 0.0}
    recipe: dict[str, Any] = {"data": data, "method": method, "adapter": adapter, "train": train}
    recipe["model"] = _model_section(draw, data, model)
    if num_processes > 1:
        recipe["parallel"] = {"num_processes": 2, "strategy": draw.choice(["ddp", "fsdp2"])}
    if _may_continue(adapter) and method["type"] != "reward" and draw.hit(0.25):
        model["continues"] = draw.randint(0, 9)
    cuts: tuple[int, ...] = ()
    if draw.hit(0.2) and train.get("max_steps", 0) >= 3:
        cuts = (draw.randint(1, train["max_steps"] - 1),)
        train["save_steps"] = draw.randint(1, cuts[0])
    else:
        train["save_steps"] = 1000
    shapes = [("jsonl", 8.0), ("json", 1.0), ("parquet", 1.0)]
    weighed = any("weight" in message for part in rows for row in part for message in row.get("messages", ()))
    if format == "messages" and not weighed:
        shapes.append(("sharegpt", 2.0))
    return Case(seed, model, recipe, rows, evaluated, cuts, draw.weighted(shapes))


def _method(draw: Draw) -> dict[str, Any]:
    kind = draw.weighted([("sft", 56), ("dpo", 13), ("kto", 8), ("orpo", 6), ("cpo", 9), ("reward", 8)])
    method: dict[str, Any] = {"type": kind}
    if kind in ("dpo", "kto", "orpo", "cpo") and draw.hit(0.5):
        method["beta"] = draw.choice([0.05, 0.3, 1.0])
    if kind == "dpo":
        if draw.hit(0.4):
            method["loss_type"] = [draw.choice(["hinge", "ipo", "sigmoid_norm", "apo_zero", "apo_down"])]
        if draw.hit(0.25):
            method["precompute_ref_log_probs"] = True
    if kind == "kto":
        method["loss_type"] = draw.choice(["kto", "apo_zero_unpaired"])
        if draw.hit(0.5):
            method["desirable_weight"], method["undesirable_weight"] = draw.choice([(1.5, 1.0), (1.0, 0.5)])
        if draw.hit(0.25):
            method["precompute_ref_log_probs"] = True
    if kind == "cpo":
        method["loss_type"] = draw.choice(["sigmoid", "hinge", "ipo", "simpo", "simpo"])
        if method["loss_type"] == "simpo" and draw.hit(0.5):
            method["simpo_gamma"] = draw.choice([0.0, 1.2])
        if draw.hit(0.3):
            method["cpo_alpha"] = draw.choice([0.0, 0.5])
        if method["loss_type"] in ("sigmoid", "simpo") and draw.hit(0.3):
            method["label_smoothing"] = 0.1
    if kind == "reward" and draw.hit(0.4):
        method["center_rewards_coefficient"] = 0.05
    return method


def _model(draw: Draw, kind: str) -> dict[str, Any]:
    family = draw.weighted(FAMILIES)
    if kind == "reward":
        family = draw.choice(["llama", "qwen2", "qwen3", "mistral", "gemma"])
    changes = draw.choice([TIED, UNTIED, UNTIED]) if family in ("llama", "qwen2", "qwen3", "mistral", "mixtral") else {}
    return {
        "type": family,
        "changes": dict(changes),
        "template": draw.choice(["chatml", "unmarked", "unmarked", "llama3", "gemma", "mistral"]),
        "bpe": draw.hit(0.5),
        "pads_with_end": draw.hit(0.2),
        "num_unused": draw.choice([0, 0, 0, 5, 13]),
        "seed": draw.randint(0, 3),
    }


def _adapter(draw: Draw, kind: str, model: Mapping[str, Any], num_processes: int) -> dict[str, Any]:
    choices = [("full", 44), ("lora", 44), ("qlora", 5), ("ia3", 3), ("oft", 2), ("vera", 2)]
    if kind == "reward" or model["type"] in MOE:
        choices = choices[:2]
    adapter: dict[str, Any] = {"type": draw.weighted(choices)}
    if adapter["type"] == "full":
        if kind != "reward" and draw.hit(0.3):
            name = draw.choice(["last_layers", "unfrozen_parameters"])
            adapter[name] = 1 if name == "last_layers" else draw.choice([["mlp"], ["attn"], ["norm|ln_"]])
        return adapter
    if adapter["type"] == "oft":
        adapter["oft_block_size"] = 8
    if adapter["type"] == "vera":
        adapter["rank"] = 6
    if adapter["type"] in ("ia3", "oft", "vera"):
        return adapter
    adapter["rank"] = draw.choice([1, 2, 4, 8, 40])
    adapter["alpha"] = draw.choice([1.0, 4.0, 16.0, 24.0])
    for name, share in (("use_rslora", 0.25), ("use_dora", 0.2)):
        if draw.hit(share):
            adapter[name] = True
    if model["type"] in MOE:
        adapter["target_modules"] = ["q_proj", "v_proj"]
    elif draw.hit(0.2):
        adapter["target_modules"] = r".*\.(0|1)\..*(q_proj|qkv_proj|down_proj|c_attn|dense|fc1)"
    elif draw.hit(0.1):
        adapter["layers_to_transform"] = [1]
    if kind != "reward" and draw.hit(0.12):
        modules = [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]]
        adapter["modules_to_save"] = draw.choice(modules if model["changes"] == UNTIED else modules[:1])
    if "use_dora" not in adapter and draw.hit(0.08):
        adapter["lora_bias"] = True
    if draw.hit(0.1):
        adapter["loraplus_lr_ratio"] = 4.0
    plain = not adapter.keys() & {"modules_to_save", "lora_bias", "use_dora"}
    if draw.hit(0.25):
        kinds = ["gaussian", "pissa", "olora"] if plain and adapter["type"] == "lora" else ["gaussian"]
        adapter["init_lora_weights"] = draw.choice(kinds)
    if draw.hit(0.1) and model["type"] in LLAMA_LIKE and "target_modules" not in adapter:
        adapter["rank_pattern"], adapter["alpha_pattern"] = {"down_proj": 3, r"layers\.1\..*": 5}, {"q_proj": 7.0}
    return adapter


def _may_continue(adapter: Mapping[str, Any]) -> bool:
    """Return whether another adapter of the same kind may be trained further in its place."""
    plain = {"type", "rank", "alpha", "use_rslora", "loraplus_lr_ratio"}
    return adapter["type"] == "lora" and not adapter.keys() - plain


def _data(draw: Draw, kind: str, model: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    data: dict[str, Any] = {"max_length": draw.choice([32, 48, 64, 96, 128, 200, 250])}
    if kind in ("kto", *PAIRS):
        data["max_length"] = draw.choice([64, 96, 128, 160, 200, 250])
    if kind == "kto":
        return data, "unpaired_preference"
    if kind in PAIRS:
        if draw.hit(0.15):
            data["shuffle"] = False
        return data, "preference"
    format = draw.weighted(FORMATS)
    if format not in ("text", "tokens") and draw.hit(0.3):
        data["loss_on"] = draw.choice(["all", "last"])
    match draw.weighted([("", 5), ("packing", 3), ("padding_free", 1), ("padded", 1), ("order", 1), ("length", 1)]):
        case "packing":
            data["packing"] = True
        case "padding_free":
            data["padding_free"] = True
        case "padded":
            data["padding_free"] = False
        case "order":
            data["shuffle"] = False
        case "length":
            data["shuffle"], data["curriculum"] = False, "length"
    return data, format


FORMATS = (("messages", 5), ("prompt_completion", 2), ("completion_messages", 1), ("text", 2), ("tokens", 1))
SCHEDULES = (
    "linear",
    "cosine",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
)
OPTIMS: dict[str, tuple[float, ...]] = {
    "adamw_torch": (1e-3, 3e-3),
    "adamw_torch_fused": (1e-3, 3e-3),
    "tunekit_adamw": (1e-3, 3e-3),
    "sgd": (0.1, 0.5),
    "adagrad": (1e-2,),
    "rmsprop": (3e-4,),
    "adafactor": (1e-3,),
    "schedule_free_adamw": (1e-3, 3e-3),
}
"""Learning rates by optimizer."""


def _train(
    draw: Draw,
    method: Mapping[str, Any],
    adapter: Mapping[str, Any],
    data: Mapping[str, Any],
    model: Mapping[str, Any],
    num_processes: int,
) -> dict[str, Any]:
    micro = draw.choice([1, 2, 2, 3, 4])
    batch = micro * draw.choice([1, 1, 2, 3]) * num_processes
    if method.get("loss_type") == "kto" and method["type"] == "kto":
        batch = max(2, batch)  # It compares the rows of a step.
    train: dict[str, Any] = {
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "seed": draw.randint(0, 10**6),
    }
    others = [(name, 0.7) for name in OPTIMS if name not in ("adamw_torch", "sgd")]
    optim = draw.weighted([("adamw_torch", 8), ("", 4), ("sgd", 4), *others])
    if optim:
        train["optim"] = optim
    train["learning_rate"] = draw.choice(OPTIMS[optim or "adamw_torch"])
    if draw.hit(0.2):
        train["num_epochs"] = draw.choice([0.4, 1.0, 1.3])
    else:
        train["max_steps"] = draw.choice([1, 2, 3, 4, 4, 5, 6, 7])
    train["lr_scheduler_type"] = draw.choice(SCHEDULES)
    if draw.hit(0.7):
        train["warmup_steps"] = draw.choice([0, 1, 2, 0.3])
    options = {
        "weight_decay": (0.3, (0.01, 0.1, 0.5)),
        "max_grad_norm": (0.3, (0.05, 0.5, 1e6)),
        "gradient_checkpointing": (0.3, (True, False)),
        "ema_decay": (0.08, (0.5, 0.9)),
        "layerwise_lr_decay": (0.08, (0.5, 0.9)),
        "logging_steps": (0.1, (2, 3)),
        "eval_steps": (0.5, (1, 2, 3)),
    }
    for name, (share, values) in options.items():
        if draw.hit(share):
            train[name] = draw.choice(values)
    if optim == "schedule_free_adamw":
        train["lr_scheduler_type"] = "constant"
        train.pop("ema_decay", None)
    if draw.hit(0.08):
        train["learning_rates"] = {draw.choice(["layers.0", "q_proj|attn|query|qkv"]): train["learning_rate"] / 4}
    if (
        method["type"] == "sft"
        and num_processes == 1
        and model["type"] in LLAMA_LIKE
        and "use_dora" not in adapter
        and draw.hit(0.1)
    ):
        train["tiled_mlp"] = True
    return train


def _model_section(draw: Draw, data: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {"dtype": "bfloat16" if draw.hit(0.06) else "float32"}
    if draw.hit(0.4):
        section["kernels"] = draw.choice(["tunekit", "torch"])
    if draw.hit(0.06) and model["type"] in ("llama", "qwen2", "qwen3", "mistral"):
        section["rope_scaling"] = {"rope_type": draw.choice(["linear", "yarn"]), "factor": 2.0}
    if not (data.get("packing") or data.get("padding_free")) and draw.hit(0.3):
        section["attn_implementation"] = "eager" if model["type"] == "gemma2" else draw.choice(["eager", "sdpa"])
    return section


def _text(draw: Draw, most: int = 12) -> str:
    num = draw.choice([0, 1, 2, 3, 5, 8, most]) if draw.hit(0.5) else draw.randint(1, most)
    return " ".join(draw.choice(WORDS) for _ in range(num))


def _said(draw: Draw, most: int = 12) -> str:
    """Text that is not blank, as answers and questions are."""
    return _text(draw, most).strip() or "ok"


def _chat(draw: Draw, model: Mapping[str, Any], *, num_exchanges: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if model["template"] not in WITHOUT_SYSTEM and draw.hit(0.3):
        messages.append({"role": "system", "content": "" if draw.hit(0.2) else _said(draw)})
    for _ in range(num_exchanges):
        messages.append({"role": "user", "content": _said(draw)})
        messages.append({"role": "assistant", "content": _said(draw)})
    return messages


def _row(draw: Draw, format: str, model: Mapping[str, Any], *, all_counts: bool = False) -> dict[str, Any]:
    match format:
        case "messages":
            messages = _chat(draw, model, num_exchanges=draw.choice([1, 1, 1, 2, 3, 4]))
            if draw.hit(0.05):
                messages.append({"role": "user", "content": _said(draw)})
            if not all_counts and draw.hit(0.06) and sum(m["role"] == "assistant" for m in messages) > 1:
                next(m for m in messages if m["role"] == "assistant")["weight"] = 0
            return {"messages": messages}
        case "completion_messages":
            messages = _chat(draw, model, num_exchanges=draw.choice([1, 2]))
            return {"prompt": messages[:-1], "completion": messages[-1:]}
        case "prompt_completion":
            return {"prompt": _said(draw) + draw.choice(["", " ", "\n"]), "completion": _said(draw)}
        case "text":
            return {"text": _said(draw, 40)}
        case "tokens":
            ids = [draw.randrange(250) for _ in range(draw.randint(3, 90))]
            return {"input_ids": ids, "labels": [token if draw.hit(0.6) else -100 for token in ids]}
        case "unpaired_preference":
            messages = _chat(draw, model, num_exchanges=1)
            return {"prompt": messages[:-1], "completion": messages[-1:], "label": draw.hit(0.5)}
    messages = _chat(draw, model, num_exchanges=draw.choice([1, 1, 2]))
    rejected = {"role": "assistant", "content": _said(draw)}
    if rejected["content"].split() == messages[-1]["content"].split():
        rejected["content"] += " not"
    return {"prompt": messages[:-1], "chosen": messages[-1:], "rejected": [rejected]}
