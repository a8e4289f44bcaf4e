"""tunekit: fine-tune and align open-weight language models. Recipe → Plan → Run.

    import tunekit

    plan = tunekit.plan("sft/quickstart")
    run = tunekit.train(plan, on_event=tunekit.Progress())
    run.metrics()

The names load when they are first used, so that importing tunekit costs nothing.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: home for home, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
"""Modules of the public names, which `__init__.pyi` lists."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tunekit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
