"""Well-known models by their hub names, so that a plan for them needs no network: `models.yaml`, beside this file.

It holds what their config.json says of shapes. The tensors are made from that, and their number is compared with the
published one of each entry by a test.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLE = Path(__file__).parent / "models.yaml"
"""The table as it ships with the package."""


@dataclass(frozen=True)
class KnownModel:
    """Row of the table for one hub name."""

    config: Mapping[str, Any]
    """Its config.json as far as shapes go."""
    num_params: int
    """The published number of parameters."""
    source: str
    """Publication of that number."""
    has_chat_template: bool


@cache
def known_models() -> dict[str, KnownModel]:
    """The table by hub name."""
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return {
        name: KnownModel(entry["config"], entry["num_params"], table["sources"][entry["source"]], kind == "chat")
        for entry in table["models"]
        for kind in ("base", "chat")
        for name in entry.get(kind, ())
    }
