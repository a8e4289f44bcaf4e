"""A sweep over a draft: values to try, how combinations are chosen, and the button that starts it."""

import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

import tunekit
from webui import draft as drafts
from webui.failures import told_by
from webui.form_lock import SETTLED
from webui.launching import named
from webui.reach import check_reach
from webui.resume_form import lines_of
from webui.site import Site
from webui.words import Words, told

GRID = "grid"

SWEPT = ("int", "float", "bool", "choice")
"""Kinds of fields that are tried. Texts may be paths, which a page takes from the workspace alone."""

MAX_RUNS = 1000


def build(site: Site, words: Words, draft: gr.Component) -> None:
    """The panel, beside a draft; a server that only shows has none."""
    if site.read_only:
        return
    with gr.Accordion(words("sweep.title"), open=False, elem_id="sweep-panel"):
        values = gr.Textbox(
            label=words("sweep.values"), info=words("sweep.values_help"), lines=2, max_lines=8,
            placeholder="train.learning_rate=1e-5..1e-3\nadapter.rank=8,16,32", elem_id="sweep-values",
        )  # fmt: skip
        with gr.Row():
            search = gr.Radio(
                [(words(f"sweep.search_{key}"), key) for key in (GRID, "random", "optuna")], value=GRID,
                label=words("sweep.search"), elem_id="sweep-search", min_width=240,
            )  # fmt: skip
            number = gr.Number(
                8, precision=0, minimum=1, maximum=MAX_RUNS, label=words("sweep.number"), visible=False,
                elem_id="sweep-number", min_width=120,
            )  # fmt: skip
        start = gr.Button(words("sweep.start"), size="md", elem_id="sweep-start")
        message = gr.HTML(elem_id="sweep-said")
    search.input(lambda chosen: gr.Number(visible=chosen != GRID), search, number, show_progress="hidden")

    @told_by(lambda error: (told(error), gr.Button(interactive=True)))
    def begin(text: str, values: str, search: Any, number: Any) -> Iterator[tuple[str, Any]]:
        yield f"<p role='status'>{escape(words('sweep.starting'))}</p>", gr.Button(interactive=False)
        sweep = begun(site, text, lines_of(values), search, int(number or 0))
        link = site.link(words.language, "runs", tag=sweep.tag)
        started = words("sweep.started", name=sweep.name, num=sweep.spec.num_runs)
        yield f"<p role='status'><a href='{escape(link)}'>{escape(started)}</a></p>", gr.Button(interactive=True)

    starting = start.click(None, None, None, js=SETTLED)
    starting.then(
        begin, [draft, values, search, number], [message, start], show_progress="hidden", concurrency_limit=2,
        trigger_mode="once",
    )  # fmt: skip


def begun(site: Site, text: str, values: Sequence[str], search: Any, number: int) -> tunekit.Sweep:
    """Start a sweep of a draft, and return it when all can see it.

    Args:
        site: The workspace.
        text: The draft.
        values: What is tried, as for `tunekit sweep`.
        search: How combinations are chosen: all of them (`grid`), `random` ones, or Optuna's.
        number: How many; all of a grid.

    Raises:
        TunekitError: There is no sweep.
    """
    check_values(site, text, values)
    recipe = named(site, text, "")
    chosen = max(1, min(MAX_RUNS, number))
    with tempfile.TemporaryDirectory(prefix="tunekit-draft-") as folder:
        file = Path(folder) / f"{recipe.output.name}.yaml"
        file.write_text(text, encoding="utf-8")
        random, optuna = (chosen if search == name else None for name in ("random", "optuna"))
        return tunekit.find_sweep(str(tunekit.start_sweep(file, values, random=random, optuna=optuna)))


def check_values(site: Site, text: str, values: Sequence[str]) -> None:
    """Refuse values that a page does not try, or that lead out of the workspace.

    Raises:
        TunekitError: There are some, or none at all.
    """
    if not values:
        raise tunekit.TunekitError("no values to try", hint="write train.learning_rate=1e-5,1e-4")
    entries = {entry.key: entry for entry in drafts.entries_of(text)}
    for line in values:
        key, _, tried = line.partition("=")
        entry = entries.get(key.strip())
        if entry is None or entry.kind not in SWEPT:
            problem = f"{key.strip()}: " + ("no such field" if entry is None else "not a number or a choice")
            raise tunekit.TunekitError(problem, hint="try numbers and choices; `tunekit sweep` tries any field")
        for value in [] if ".." in tried else tried.split(","):
            recipe, _ = tunekit.check_text(text, [f"{key.strip()}={value.strip()}"], find_functions=False)
            # What else is wrong with a value, the sweep itself says.
            if recipe is not None:
                check_reach(site, recipe)
