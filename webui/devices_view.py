"""Devices of this machine with the runs that hold them and those that wait, read once for all browsers."""

import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import gradio as gr

import tunekit
from tunekit import frontend
from webui.run_parts import empty, table
from webui.site import Site
from webui.words import Words, told

FRESH_SECONDS = 3.0
"""Maximum age in seconds of what is shown again."""

_lock = threading.Lock()
_kept: list[tuple[float, list[frontend.DeviceState] | tunekit.TunekitError]] = []


def build(words: Words) -> gr.HTML:
    """Lay out the part of the page of all runs, and return what shows the devices."""
    with gr.Accordion(words("runs.devices"), open=False, elem_id="runs-devices"):
        return gr.HTML(elem_id="runs-devices-table")


def devices_html(site: Site, words: Words) -> str:
    """Return the devices as a table."""
    with _lock:
        if not _kept or time.monotonic() - _kept[0][0] > FRESH_SECONDS:
            try:
                devices: list[frontend.DeviceState] | tunekit.TunekitError = tunekit.devices()
            except tunekit.TunekitError as error:
                devices = error
            _kept[:] = [(time.monotonic(), devices)]
        now = _kept[0][1]
    return told(now) if isinstance(now, tunekit.TunekitError) else table_of(now, site, words)


def table_of(devices: Sequence[frontend.DeviceState], site: Site, words: Words) -> str:
    """Render devices: memory in use, runs that hold them, and those that wait in their order."""
    if not devices:
        return empty(words("plan.no_gpu"))
    rows = [
        [
            escape(device.name if device.uuid == "cpu" else f"{place}: {device.name}"),
            escape(_used(device, words)),
            _runs(device.runs, site, words),
            _runs(device.waiting, site, words),
        ]
        for place, device in enumerate(devices)
    ]
    return table([words(f"runs.device_{key}") for key in ("name", "memory", "runs", "waiting")], rows)


def _used(device: frontend.DeviceState, words: Words) -> str:
    used = device.total_bytes - device.free_bytes
    return words("runs.device_used", used=frontend.gib(used), total=frontend.gib(device.total_bytes))


def _runs(folders: Sequence[str], site: Site, words: Words) -> str:
    """Render runs as links; of those of other folders nothing is said but that they are there."""
    names = []
    for folder in map(Path, folders):
        if folder.resolve().parent == site.root.resolve() / "runs":
            link = site.link(words.language, "runs", run=folder.name)
            names.append(f"<a href='{escape(link)}'>{escape(folder.name)}</a>")
        else:
            names.append(escape(words("runs.device_other")))
    return ", ".join(names) or "–"
