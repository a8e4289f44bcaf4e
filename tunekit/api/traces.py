"""Traces for plans: made in a process that does nothing else, and stored by all that they depend on."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from tunekit.data.sources.rows import cache_folder
from tunekit.errors import DataError, PlanError
from tunekit.estimates.facts import Hardware, ModelFacts
from tunekit.estimates.memory.activations import is_traced
from tunekit.estimates.memory.memory import with_trace
from tunekit.estimates.traces import StepTrace, TraceRequest
from tunekit.planner.decisions.backends import families
from tunekit.planner.decisions.checks import choose_dtype
from tunekit.probe.model import stored_config
from tunekit.recipe.schema import Recipe
from tunekit.recipe.sections.adapters import FullAdapter, PromptTuningAdapter
from tunekit.runs.events import Event
from tunekit.runs.small_files import write_whole

Tracing = Literal["stored", "unknown", "all"]
"""Models of which a trace is made: none, so that stored traces alone are used; those of types that the formulas do not
know, for accelerators; or all."""

LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes")
"""Packages whose version can change what a step allocates."""

MAX_SECONDS = 300
"""Seconds after which a trace is given up: models whose code loops over tokens take minutes."""


def trace_model(
    model: ModelFacts,
    recipe: Recipe,
    hardware: Hardware,
    tracing: Tracing,
    on_event: Callable[[Event], None] | None = None,
) -> ModelFacts:
    """Return a model whose estimates are corrected by a trace of the recipe's step, where there is one.

    Args:
        model: The model.
        recipe: The recipe to plan.
        hardware: The machine.
        tracing: Models of which a trace is made.
        on_event: Called before one is made.

    Raises:
        PlanError: All models are to be traced, and this one cannot be.
        DataError: The trace cannot be stored.
    """
    is_outside = hardware.device.kind == "cuda" and not is_traced(model)
    if tracing != "all" and not is_outside:
        return model
    traced, problem = _traced(model, recipe, hardware, tracing, on_event)
    if traced is not None:
        return traced
    if tracing == "all":
        raise PlanError(f"model.path: cannot trace a step of {model.path!r}: {problem}", hint="plan without a trace")
    return model.model_copy(update={"why_untraced": problem})


def _traced(
    model: ModelFacts,
    recipe: Recipe,
    hardware: Hardware,
    tracing: Tracing,
    on_event: Callable[[Event], None] | None,
) -> tuple[ModelFacts | None, str]:
    """Return a model that was traced, or why it was not."""
    request = _request(model, recipe, hardware)
    if isinstance(request, str):
        return None, request
    requests = [request]
    if hardware.num_accelerators > 1 and request.trained_dtype != request.dtype:
        # Layouts that shard hand layers other weights than those on one device.
        requests.append(request.model_copy(update={"casts_weights": False}))
    paths = [cache_folder() / "traces" / f"{_key(request)}.json" for request in requests]
    if not all(path.is_file() for path in paths):
        if tracing == "stored":
            return None, "not yet; `tunekit plan --trace` traces a step"
        if on_event is not None:
            on_event({"event": "trace", "model": model.path})
    for request, path in zip(requests, paths, strict=True):
        if not path.is_file():
            trace, problem = _make(request)
            if problem is not None:
                return None, problem
            _store(path, trace)
        stored = json.loads(path.read_text(encoding="utf-8"))
        if "problem" in stored:
            return None, stored["problem"]
        model = with_trace(model, request, StepTrace.model_validate(stored))
    return model, ""


def _request(model: ModelFacts, recipe: Recipe, hardware: Hardware) -> TraceRequest | str:
    """Return the step to trace, or why there is none."""
    if model.is_multimodal:
        return "models of several modalities are not traced"
    if recipe.model.trust_remote_code:
        return "models with remote code are not traced"
    if isinstance(recipe.adapter, PromptTuningAdapter):
        return "virtual tokens are not traced"
    if model.packed is not None or (isinstance(recipe.adapter, FullAdapter) and recipe.adapter.new_layers):
        return "quantized checkpoints and models with new layers are not traced"
    config = stored_config(recipe.model if model.origin is None else model.origin.base)
    if config is None:
        return "its config.json is not at hand"
    return TraceRequest(
        config=config,
        adapter=recipe.adapter,
        dtype=choose_dtype(recipe, hardware.device)[0],
        trained_dtype=recipe.train.trained_dtype,
        length=recipe.num_positions,
        attention="eager" if model.model_type in families()["without_sdpa"] else "sdpa",
    )


def _store(path: Path, trace: str) -> None:
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, trace)
    except OSError as error:
        raise DataError(f"cannot write to {path.parent}: {error.strerror}", hint="set XDG_CACHE_HOME") from error


def _key(request: TraceRequest) -> str:
    """Return the name of a trace: a digest of the request, the libraries, and the code that makes it."""
    whole = [request.model_dump(mode="json"), _code()]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:40]


@cache
def _code() -> list[str]:
    """Return the versions of the libraries and the code of tunekit's models, read once for any number of plans."""
    files = sorted((Path(__file__).parents[1] / "models").glob("*.py"))
    return [*map(version, LIBRARIES), *(path.read_text("utf-8") for path in files)]


def _make(request: TraceRequest) -> tuple[str, str | None]:
    """Return a trace of a step as JSON, or in its place why the process made none."""
    try:
        process = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tunekit.models.step_trace"],
            input=request.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            # No device is taken.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"the trace took longer than {MAX_SECONDS} s"
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        return "", f"the trace failed: {lines[-1]}"
    return process.stdout.strip().splitlines()[-1], None
