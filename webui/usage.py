"""Cores, memory and GPUs that a run uses now, read once for all browsers.

Types are named in quotes: what measures is imported with the first reading, and not when the server starts.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import tunekit
from tunekit import frontend
from webui.words import Words

FRESH_SECONDS = 1.5
"""Maximum age in seconds of a reading that is shown again."""

MAX_METERS = 24
"""Runs that are measured, those that were looked at last."""

GIB = 2**30


@dataclass
class _Meter:
    meter: "tunekit.frontend.UsageMeter"
    usage: "tunekit.frontend.Usage | None" = None
    time: float = float("-inf")
    lock: threading.Lock = field(default_factory=threading.Lock)


_meters: OrderedDict[Path, _Meter] = OrderedDict()
_lock = threading.Lock()


def usage_of(run: tunekit.Run) -> "tunekit.frontend.Usage | None":
    """Return what a run uses on this host; None where nothing of it is here."""
    with _lock:
        cached = _meters.setdefault(run.path, _Meter(frontend.UsageMeter(run)))
        _meters.move_to_end(run.path)
        while len(_meters) > MAX_METERS:
            _meters.popitem(last=False)
    with cached.lock:
        if time.monotonic() - cached.time > FRESH_SECONDS:
            cached.usage, cached.time = cached.meter.read(), time.monotonic()
        return cached.usage


def bars(usage: "tunekit.frontend.Usage | None", words: Words) -> str:
    """Render the use of a host, a bar for each resource."""
    if usage is None:
        return ""
    parts = []
    if usage.cores is not None:
        text = words("runs.use_cores", cores=f"{usage.cores:.1f}", num=usage.num_cores)
        parts.append(_bar(usage.cores / usage.num_cores, text))
    parts.append(
        _bar(
            usage.used_bytes / usage.total_bytes, _memory(usage.used_bytes, usage.total_bytes, words, "runs.use_memory")
        )
    )
    for place, device in enumerate(usage.devices):
        name = f"GPU {place}, {device.name}"
        if device.busy is not None:
            parts.append(_bar(device.busy, words("runs.use_gpu", name=name, percent=f"{100 * device.busy:.0f}")))
        text = _memory(device.used_bytes, device.total_bytes, words, "runs.use_gpu_memory", name=name)
        parts.append(_bar(device.used_bytes / device.total_bytes, text))
    return f"<ul class='runs-usage' aria-label='{escape(words('runs.use'))}'>{''.join(parts)}</ul>"


def _memory(used_bytes: int, total_bytes: int, words: Words, key: str, **values: str) -> str:
    return words(key, used=f"{used_bytes / GIB:.1f}", total=f"{total_bytes / GIB:.1f}", **values)


def _bar(share: float, text: str) -> str:
    return f"<li><meter max='1' value='{min(1.0, share):.2f}' aria-hidden='true'></meter> {escape(text)}</li>"
