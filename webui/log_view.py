"""The logs of a run: the end of a file, filtered, and followed while it grows. No file is read as a whole."""

import os
import re
from html import escape
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui.site import Site
from webui.words import Words, told

TAIL_BYTES = 256 * 1024
"""Of the end of a log that is looked at."""

MAX_LINES = 500
"""Lines that are shown, the last ones."""

MAX_LETTERS = 2000
"""Of a line that is shown."""

_SERIOUS = re.compile(r"warn|error|exception|traceback|fail|critical|fatal", re.IGNORECASE)

_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")


def logs_of(run: tunekit.Run) -> list[str]:
    """The names of a run's logs: that of the first process first."""
    names = [path.name for pattern in ("log*.txt", "*.log") for path in run.path.glob(pattern) if not path.is_symlink()]
    return sorted(names, key=lambda name: (name != "log.txt", len(name), name))


def lines_of(run: tunekit.Run, name: str, *, text: str = "", only_serious: bool = False) -> list[str]:
    """The last lines of a log in which a text stands.

    Args:
        run: The run.
        name: One of `logs_of`.
        text: What is looked for, in any case.
        only_serious: Whether only warnings and errors are.

    Raises:
        TunekitError: The run has no such log.
    """
    if name not in logs_of(run):
        raise tunekit.TunekitError(f"{run.name} has no log {name!r}", hint="choose one from the list")
    with (run.path / name).open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL_BYTES))
        tail = stream.read(TAIL_BYTES).decode("utf-8", errors="replace")
    lines = tail.split("\n")
    if size > TAIL_BYTES:
        # It begins within a line.
        lines = lines[1:]
    # What a bar of progress wrote over is gone on a terminal as well.
    cleaned = (_CONTROLS.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines)
    matching_lines = [
        line[:MAX_LETTERS]
        for line in cleaned
        if line.strip() and text.lower() in line.lower() and (not only_serious or _SERIOUS.search(line))
    ]
    return [frontend.redacted(line) for line in matching_lines[-MAX_LINES:]]


def build(site: Site, words: Words, run_name: gr.Textbox, tick: gr.Timer) -> None:
    """The panel, inside the view of a run."""
    with gr.Row():
        file = gr.Dropdown(label=words("log.file"), choices=[], elem_id="log-file", min_width=160)
        text = gr.Textbox("", label=words("log.filter"), elem_id="log-filter", min_width=160)
        serious = gr.Checkbox(label=words("log.serious"), elem_id="log-serious", min_width=160)
    page = gr.HTML(elem_id="log-lines", autoscroll=True, max_height=480)
    seen_state = gr.Textbox("", visible=False)

    def follow(name: str, chosen: str | None, wanted: str, only_serious: bool, mark: str) -> tuple[Any, Any, str]:
        if not name:
            return gr.skip(), gr.skip(), mark
        try:
            run = site.run(name)
            names = logs_of(run)
            chosen = chosen if chosen in names else names[0] if names else None
            now = repr((name, names, chosen, wanted, only_serious, _mark(run, chosen)))
            if now == mark:
                return gr.skip(), gr.skip(), mark
            lines = lines_of(run, chosen, text=wanted, only_serious=only_serious) if chosen else []
        except tunekit.TunekitError as error:
            return gr.skip(), told(error), ""
        except OSError:
            # It is being deleted.
            return gr.skip(), gr.skip(), ""
        page = _page(lines, words, is_filtered=bool(wanted or only_serious))
        return gr.Dropdown(choices=names, value=chosen), page, now

    inputs, outputs = [run_name, file, text, serious, seen_state], [file, page, seen_state]
    for listen in (run_name.change, tick.tick, file.input, text.input, serious.input):
        listen(follow, inputs, outputs, show_progress="hidden", trigger_mode="always_last")


def _mark(run: tunekit.Run, name: str | None) -> int:
    return (run.path / name).stat().st_size if name else 0


def _page(lines: list[str], words: Words, *, is_filtered: bool) -> str:
    if not lines:
        return f"<p class='runs-empty'>{escape(words('log.nothing_found' if is_filtered else 'log.empty'))}</p>"
    marked = (
        f"<span class='log-serious'>{escape(line)}</span>" if _SERIOUS.search(line) else escape(line) for line in lines
    )
    return f"<pre class='log-text'>{chr(10).join(marked)}</pre>"
