"""tunekit: fine-tune and align open-weight language models. Recipe → Plan → Run.

    import tunekit

    plan = tunekit.plan("sft/quickstart")
    run = tunekit.train(plan, on_event=tunekit.Progress())
    run.metrics()

The names load when they are first used, so that importing tunekit costs nothing.
"""

from importlib import import_module
from typing import Any

from tunekit._names import homes_of, loaded

__version__ = "0.1.0"

_HOMES = homes_of(__file__)

__all__ = sorted([*_HOMES, "frontend"])


def __getattr__(name: str) -> Any:
    return import_module("tunekit.frontend") if name == "frontend" else loaded(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
