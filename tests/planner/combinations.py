"""Combinations: pairs of levers of memory and learning, for Llama 8B on two devices with room for all.

    python -m tests.planner.combinations

writes `golden/combinations.txt` anew: a line for each pair that is refused, with the reason. All others are planned.
"""

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.planner.golden import GOLDEN, ROWS, known_facts
from tunekit.errors import PlanError, RecipeError
from tunekit.estimates.facts import Hardware, ModelFacts
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.resolve import resolve
from tunekit.recipe.load import load_recipe

TABLE = GOLDEN / "combinations.txt"
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
NEW_TOKEN = "<tool>"

LEVERS: dict[str, dict[str, Any]] = {
    "full": {"adapter": {"type": "full"}},
    "last layers": {"adapter": {"type": "full", "last_layers": 4}},
    "new layers": {"adapter": {"type": "full", "new_layers": 4}},
    "unfrozen parameters": {"adapter": {"type": "full", "unfrozen_parameters": ["norm"]}},
    "qlora": {"adapter": {"type": "qlora"}},
    "int8": {"adapter": {"type": "qlora", "quant_type": "int8"}},
    "ia3": {"adapter": {"type": "ia3"}},
    "vera": {"adapter": {"type": "vera"}},
    "oft": {"adapter": {"type": "oft"}},
    "miss": {"adapter": {"type": "miss"}},
    "prompt tuning": {"adapter": {"type": "prompt_tuning"}},
    "relora": {"adapter": {"relora": {"steps": 20}}},
    "dora": {"adapter": {"use_dora": True}},
    "rslora": {"adapter": {"use_rslora": True}},
    "dropout": {"adapter": {"dropout": 0.1}},
    "pissa": {"adapter": {"init_lora_weights": "pissa_niter_4"}},
    "olora": {"adapter": {"init_lora_weights": "olora"}},
    "orthogonal": {"adapter": {"init_lora_weights": "orthogonal"}},
    "lora_bias": {"adapter": {"lora_bias": True}},
    "rank_pattern": {"adapter": {"rank_pattern": {"q_proj": 8}}},
    "chosen layers": {"adapter": {"layers_to_transform": [0, 1]}},
    "token rows": {"adapter": {"trainable_token_indices": [128002]}},
    "lora+": {"adapter": {"loraplus_lr_ratio": 16.0}},
    "modules_to_save": {"adapter": {"modules_to_save": ["embed_tokens"]}},
    "new tokens": {"model": {"add_tokens": [NEW_TOKEN]}},
    "rope_scaling": {"model": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}},
    "float32": {"model": {"dtype": "float32"}},
    "pure_bf16": {"adapter": {"type": "full"}, "train": {"pure_bf16": True}},
    "fp8": {"adapter": {"type": "full"}, "train": {"fp8": True}},
    "qat": {"adapter": {"type": "full"}, "train": {"qat": {"activation_dtype": "int8"}}},
    "neftune": {"method": {"type": "sft", "trainer_args": {"neftune_noise_alpha": 5.0}}},
    "adamw_8bit": {"train": {"optim": "adamw_8bit"}},
    "paged_adamw_8bit": {"train": {"optim": "paged_adamw_8bit"}},
    "tunekit_adamw": {"train": {"optim": "tunekit_adamw"}},
    "tunekit_adamw_8bit": {"train": {"optim": "tunekit_adamw_8bit"}},
    "tunekit_adamw_4bit": {"train": {"optim": "tunekit_adamw_4bit"}},
    "adafactor": {"train": {"optim": "adafactor"}},
    "muon": {"train": {"optim": "muon"}},
    "galore_adamw": {"adapter": {"type": "full"}, "train": {"optim": "galore_adamw"}},
    "apollo_adamw": {"adapter": {"type": "full"}, "train": {"optim": "apollo_adamw"}},
    "adam_mini": {"adapter": {"type": "full"}, "train": {"optim": "adam_mini"}},
    "schedule_free_adamw": {"train": {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}},
    "ema_decay": {"train": {"ema_decay": 0.999}},
    "learning_rates": {"train": {"learning_rates": {r"layers\.31\.": 1e-6}}},
    "layerwise_lr_decay": {"train": {"layerwise_lr_decay": 0.9}},
    "activation_offloading": {"train": {"activation_offloading": True}, "parallel": {"num_processes": 1}},
    "tiled_mlp": {"train": {"tiled_mlp": True}, "parallel": {"num_processes": 1}},
    "torch_compile": {"train": {"torch_compile": True}},
    "early stopping": {"train": {"early_stopping_patience": 3, "eval_steps": 10}},
    "packing": {"data": {"packing": True}},
    "curriculum": {"data": {"curriculum": "length", "shuffle": False}},
    "curriculum by a column": {"data": {"curriculum_column": "difficulty", "shuffle": False}},
    "streaming": {"data": {"streaming": True}, "train": {"max_steps": 100}},
    "dpo": {"method": {"type": "dpo"}},
    "grpo": {"method": {"type": "grpo", "rewards": ["numeric_match"]}},
    "reward": {"method": {"type": "reward"}},
    "ddp": {"parallel": {"strategy": "ddp"}},
    "fsdp2": {"parallel": {"strategy": "fsdp2"}},
    "fsdp2, offloaded": {"parallel": {"strategy": "fsdp2", "offload_param_device": "cpu"}},
    "zero2": {"parallel": {"strategy": "zero2"}},
    "zero3": {"parallel": {"strategy": "zero3"}},
    "tensor parallel": {"adapter": {"type": "full"}, "parallel": {"tp_size": 2}},
    "context parallel": {"parallel": {"cp_size": 2}},
    "one device": {"parallel": {"num_processes": 1}},
}
"""Sections of a recipe by the lever that they pull."""


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any] | None:
    """Return the sections of both; None where they set a field otherwise."""
    result = {name: dict(section) for name, section in one.items()}
    for name, section in other.items():
        mine = result.setdefault(name, {})
        if any(mine.get(key, value) != value for key, value in section.items()):
            return None
        mine |= section
    return result


def pairs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all pairs of levers that a recipe can state, and each lever alone."""
    for name, sections in LEVERS.items():
        yield name, sections
    for (name, one), (other_name, other) in itertools.combinations(LEVERS.items(), 2):
        both = merged(one, other)
        if both is not None:
            yield f"{name} x {other_name}", both


def facts(sections: dict[str, Any]) -> ModelFacts:
    """Return the facts of the model, with the tokens that the recipe adds."""
    known = known_facts(MODEL)
    if "add_tokens" in sections.get("model", {}):
        return known.with_new_tokens((known.vocab_size,), ())
    return known


@cache
def machine() -> Hardware:
    """Return two H100s of five times the memory."""
    hardware = find_machine("2xh100").hardware()
    size = 5 * hardware.accelerators[0].memory_total_bytes
    roomy = {"memory_total_bytes": size, "memory_free_bytes": size}
    return hardware.model_copy(
        update={"accelerators": tuple(one.model_copy(update=roomy) for one in hardware.accelerators)}
    )


def refusal(sections: dict[str, Any]) -> str | None:
    """Return why a recipe with these sections is refused; None where it is planned.

    Raises:
        AssertionError: It is refused without a remedy.
    """
    data = {"train": "chats.jsonl", "eval": "held_out.jsonl", **sections.get("data", {})}
    model = {"path": MODEL, **sections.get("model", {})}
    adapter = {"type": "lora", **sections.get("adapter", {})}
    try:
        asked = load_recipe({**sections, "model": model, "data": data, "adapter": adapter})
        resolve(asked, machine(), facts(sections), ROWS)
    except (PlanError, RecipeError) as error:
        assert error.hint or "; " in str(error), error
        return str(error).replace("\n", " | ")
    return None


def table() -> str:
    """Return the table of refusals."""
    lines = [f"{name}: {why}" for name, sections in pairs() if (why := refusal(sections)) is not None]
    return "".join(line + "\n" for line in lines)


if __name__ == "__main__":
    Path(TABLE).write_text(table(), encoding="utf-8")
