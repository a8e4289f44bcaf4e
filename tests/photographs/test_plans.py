"""What is planned for each method with all weights and with LoRA, on a GPU and on a laptop, is what was recorded.

A field that all methods share is a line; else each of its values stands before the methods that have it. Figures that a
calibration may change (bytes, speed, prices) are left out: `tests/planner/golden` has them.
"""

import re
from typing import Any

import yaml

from tests.estimates.shapes import LAPTOP
from tests.photographs.recorded import check_recorded
from tests.planner.golden import known_facts, plan_of, recipe
from tests.smoke.methods import METHODS
from tunekit.errors import PlanError
from tunekit.estimates.hardware.machines import find_machine
from tunekit.planner.plan import Plan

MODEL = "google/gemma-3-270m-it"
MACHINES = {"rtx4090": find_machine("rtx4090").hardware(), "laptop": LAPTOP}
FIGURES = {"memory", "memory_limit_bytes", "speed", "data", "device", "reasons", "rejected", "change_first"}
"""What a plan has besides decisions; of the reasons, the choices are kept."""
AMOUNT = re.compile(r"\d[\d,.]*(?= (?:[KMG]iB|tokens/s|s|min|h|USD)\b)")
MEASURED = {"speed", "disk space"}
"""Topics whose choices are figures."""


def decided(plan: Plan | PlanError) -> dict[str, Any]:
    """Return what was decided, by dotted keys."""
    if isinstance(plan, PlanError):
        return {"refused": AMOUNT.sub("N", str(plan))}
    whole = plan.model_dump(mode="json", exclude=FIGURES)
    flat = {
        f"{key}.{name}" if name else key: value
        for key, below in whole.items()
        for name, value in (below.items() if isinstance(below, dict) else [("", below)])
        if not name.endswith("_bytes")
    }
    reasons = {f"reason: {one.topic}": AMOUNT.sub("N", one.choice) for one in plan.reasons if one.topic not in MEASURED}
    rejected = [one.layout.strategy for one in plan.rejected]
    return {**flat, **reasons, "rejected": rejected}


def shared(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return each field once: its value, or the methods that have each of its values."""
    table: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in found.values() for key in one):
        by_value: dict[str, list[str]] = {}
        for method, one in found.items():
            by_value.setdefault(str(one.get(key, "-")), []).append(method)
        if len(by_value) == 1:
            (table[key],) = by_value
        else:
            table[key] = {value: ", ".join(methods) for value, methods in by_value.items()}
    return table


def test_what_is_planned_for_each_method_is_what_was_recorded():
    facts, photograph = known_facts(MODEL), {}
    for machine, hardware in MACHINES.items():
        for adapter in ("full", "lora"):
            found = {}
            for method, options in METHODS.items():
                wanted = {"type": method, **options, **({"teacher": MODEL} if "teacher" in options else {})}
                asked = recipe(method=wanted, adapter=adapter, data={"max_length": 512})
                found[method] = decided(plan_of(asked, hardware, facts))
            photograph[f"{adapter} on {machine}"] = shared(found)
    check_recorded("plans.yaml", yaml.safe_dump(photograph, sort_keys=False, width=1000))
