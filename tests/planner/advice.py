"""Situations in which a plan is legal but poor, or refused, with the advice that it gives: kept in golden/advice.txt.

    python -m tests.planner.golden

writes them anew. Read them as an engineer who has trained such models: advice that such a one would contest is a bug.
"""

from textwrap import fill
from typing import Any

from tests.planner.golden import known_facts, plan_of, recipe
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine

LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
FULL: dict[str, Any] = {"adapter": "full"}
LONG: dict[str, Any] = {"data": {"max_length": 8192}}

SITUATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "70B LoRA on two cards of 24 GB": (LLAMA_70B, "2xrtx4090", {}),
    "8B, all weights, one card of 24 GB": (LLAMA_8B, "rtx4090", FULL),
    "8B, all weights, one card of 24 GB, nothing offloaded": (
        LLAMA_8B,
        "rtx4090",
        FULL | {"parallel": {"strategy": "single"}},
    ),
    "8B, all weights, one H100": (LLAMA_8B, "h100", FULL),
    "70B, all weights, 8 x H200": (LLAMA_70B, "8xh200", FULL | LONG),
    "70B, all weights, 8 x H100": (LLAMA_70B, "8xh100", FULL | LONG),
    "14B, all weights, 4 x A100 of 40 GB": ("Qwen/Qwen2.5-14B", "4xa100-40", FULL),
    "8B DPO, all weights, one H100": (LLAMA_8B, "h100", FULL | {"method": "dpo"}),
    "70B DPO, all weights, 32 x H100": (LLAMA_70B, "4x8xh100", FULL | {"method": "dpo"}),
    "30B-A3B LoRA on one H100": ("Qwen/Qwen3-30B-A3B", "h100", {}),
    "405B LoRA on 8 x H200": ("meta-llama/Llama-3.1-405B", "8xh200", {}),
    "7B LoRA on a T4": ("Qwen/Qwen2.5-7B", "t4", {}),
    "32B QLoRA on one card of 24 GB": ("Qwen/Qwen2.5-32B", "rtx4090", {"adapter": "qlora"}),
    "8B LoRA on one H100 with a forced micro-batch": (
        LLAMA_8B,
        "h100",
        {"train": {"micro_batch_size": 1, "gradient_checkpointing": True}},
    ),
    "8B LoRA on one H100, nothing to contest": (LLAMA_8B, "h100", {}),
}
"""Model, machine, and what the recipe says."""


def text() -> str:
    """All situations with their plans in two lines, and their advice."""
    return "\n".join(f"{name}\n{_told(*situation)}\n" for name, situation in SITUATIONS.items())


def _told(model: str, machine: str, sections: dict[str, Any]) -> str:
    plan = plan_of(recipe(**sections), find_machine(machine).hardware(), known_facts(model))
    if isinstance(plan, PlanError):
        return _lines("refused", f"{plan.problem}; {str(plan.hint).partition(chr(10))[0]}")
    lines = [_lines("plan", plan.layout_words), _lines("", plan.figures)]
    lines += [_lines("", line) for line in plan.elsewhere_lines()]
    return "\n".join([*lines, *(_lines("advice", f"{reason.choice}: {reason.why}") for reason in plan.advice)])


def _lines(name: str, words: str) -> str:
    return fill(f"{name:9}{words}", 110, initial_indent="  ", subsequent_indent=" " * 11, break_on_hyphens=False)
