"""Rows of the shape that each method learns from, small enough for tiny models."""

import json
from pathlib import Path
from typing import Any

from tunekit.data.formats.convert import Findings
from tunekit.data.formats.row_formats import Row
from tunekit.data.sources.reader import convert_row
from tunekit.recipe.methods import METHODS
from tunekit.recipe.sections.data import Format


def check_row(value: object, format: Format) -> Row:
    """Check a row that has a shape which can be learned from, and keep the columns of its format."""
    return convert_row(value, format, Findings())


def _said(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def row_for(method: str, number: int) -> dict[str, Any]:
    """A row for a method, by its `type`."""
    asked, right, wrong = _said("user", f"double {number}"), f"{2 * number}", f"{number} no"
    formats = METHODS[method].spec.row_formats
    if "messages" in formats:
        return {"messages": asked + _said("assistant", right)}
    if "preference" in formats:
        return {"prompt": asked, "chosen": _said("assistant", right), "rejected": _said("assistant", wrong)}
    if "unpaired_preference" in formats:
        good = number % 2 == 0
        return {"prompt": asked, "completion": _said("assistant", right if good else wrong), "label": good}
    if "stepwise_supervision" in formats:
        steps = [f"{number} + {number}", right if number % 3 else wrong]
        return {"prompt": asked, "completions": steps, "labels": [True, number % 3 > 0]}
    if "classification" in formats:
        return {"prompt": asked, "label": ("low", "middle", "high")[number % 3]}
    return {"prompt": asked, "answer": 2 * number, "solution": right}


def save_rows(path: Path, method: str, num: int = 32) -> Path:
    """Write rows for a method, and return the file."""
    path.write_text("".join(json.dumps(row_for(method, number)) + "\n" for number in range(num)), encoding="utf-8")
    return path
