"""The data page: files become rows, rows become tokens, and what a run would do with them is seen before it.

What the page shows follows from its fields, and its fields from its address: nothing of it stays with the server. All
that is read is read by processes of their own.
"""

import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

import tunekit
from tunekit import frontend
from webui import data_charts, data_view, trial_view, work
from webui.corrections import Corrections, corrected_rows
from webui.data_asked import Asked, address_of, asked_in, is_remote, methods, recipe_of
from webui.data_fields import Fields, anew, choices
from webui.failures import told_by
from webui.site import Site
from webui.upload_removal import Removal, delete_upload, upload_of
from webui.uploads import SUFFIXES, place_of_good_rows, save_uploads
from webui.words import Words, told

ROWS = 5
"""Rows on a page."""

REPLACE = "(address) => { if (address) history.replaceState(null, '', address); }"

CHOSEN = """for (const kind of ["change", "drop"]) document.addEventListener(kind, (event) => {
  if (!event.target.closest("#data-upload")) return;
  const files = [...(event.dataTransfer ?? event.target).files ?? []];
  const is_sent = (file) => file.size <= MOST && SUFFIXES.some((suffix) => file.name.toLowerCase().endsWith(suffix));
  if (files.length && files.every(is_sent)) trigger("input");
}, true);"""
"""Tells the status that a file is sent: gradio tells of it once it was, which may be minutes later."""

_measuring: dict[str, threading.Event] = {}
"""Cancellation of the measurement of a browser's page, by its session. Pages are not made from it."""


def build(page: gr.Blocks, site: Site, words: Words) -> None:
    """The page."""
    gr.Markdown(f"# {words('data.title')}")
    fields = Fields(site, words)
    status = gr.HTML(elem_id="data-status", padding=False, js_on_load=_chosen(site))
    removal = Removal(words)
    with gr.Accordion(words("data.columns"), open=False, visible=False, elem_id="data-mapping") as mapping:
        table = gr.HTML(elem_id="data-columns", padding=False)
        fields.make_mapping()
    bad = gr.HTML(elem_id="data-bad", padding=False)
    with gr.Row(visible=False, elem_id="data-mend") as mend:
        drop = gr.Button(words("data.drop_bad"), size="sm", elem_id="data-drop-bad")
        correct = gr.Button(words("data.correct"), size="sm", elem_id="data-correct")
    editor = Corrections(words)
    rows = gr.HTML(elem_id="data-rows", padding=False)
    with gr.Row(visible=False, elem_id="data-pages") as pages:
        back = gr.Button(words("data.previous"), elem_id="data-previous", size="sm", min_width=80)
        where = gr.HTML(elem_id="data-where", padding=False)
        forth = gr.Button(words("data.next"), elem_id="data-next", size="sm", min_width=80)
    start = gr.Number(0, visible=False, precision=0)
    use = gr.HTML(elem_id="data-use", padding=False)
    address = gr.Textbox(visible=False)
    measured = _build_measuring(site, words, fields)
    tried = _build_rewards(site, words, fields)
    outputs = [status, mapping, table, bad, mend, rows, pages, back, where, forth, start, use, address]
    outputs += [*measured, *tried, editor.column, removal.row, removal.dialog, *fields.found]

    def look(start: int, *values: Any) -> list[Any]:
        return _look(site, words, fields, fields.asked(*values), int(start or 0))

    def look_at_other(*values: Any) -> list[Any]:
        return _look(site, words, fields, anew(fields.asked(*values)), 0)

    def look_as(*values: Any) -> list[Any]:
        return _look(site, words, fields, replace(fields.asked(*values), columns=()), 0)

    def look_unasked(*values: Any) -> list[Any]:
        request = fields.asked(*values)
        if not request.origin and (not request.path or is_remote(site, request.path)):
            sentence = words("data.press_look" if request.path else "data.empty")
            return _shown(words, fields, status=f"<p class='data-soft'>{sentence}</p>")
        return _look(site, words, fields, request, 0)

    def opened(request: gr.Request) -> list[Any]:
        changes = [value for key, value in request.query_params.multi_items() if key == "set"]
        return fields.fill(site, asked_in(dict(request.query_params), changes))

    looking: dict[str, Any] = {"outputs": outputs, "show_progress_on": [rows], "trigger_mode": "always_last"}
    filled = page.load(opened, None, fields.filled, show_progress="hidden")
    filled.then(None, None, status, js=f"() => location.search ? {json.dumps(_progress(words, None))} : ''")
    filled.then(look_unasked, fields.inputs, **looking).failure(None, None, status, js="() => ''")

    def attach(listen: Any, handler: Any, inputs: Any, **options: Any) -> None:
        """Have an event look at rows; the address says at which."""
        listened = listen(handler, inputs, **looking | options)
        listened.then(None, address, js=REPLACE)
        listened.failure(None, None, status, js="() => ''")

    # What was said of other rows is not said of those that are still sent or read. This comes first: the handlers of an
    # event wait for one another.
    for listen in (fields.path.input, fields.look.click, status.input):
        listen(None, None, status, js=f"() => {json.dumps(_progress(words, None))}")
    for listen in (fields.path.input, fields.method.input):
        attach(listen, look_at_other, fields.inputs)
    attach(fields.format.input, look_as, fields.inputs)
    told_again = [fields.look.click, fields.model.submit, fields.max_length.submit, fields.rewards.submit]
    for listen in (*told_again, fields.key.input, *(column.input for column in fields.columns)):
        attach(listen, partial(look, 0), fields.inputs)
    back.click(lambda start, *values: look(max(0, start - ROWS), *values), [start, *fields.inputs], **looking)
    forth.click(lambda start, *values: look(start + ROWS, *values), [start, *fields.inputs], **looking)

    if site.read_only:
        return
    removal.attach(site, fields.path)

    def delete(*values: Any) -> list[Any]:
        try:
            name = delete_upload(site, fields.asked(*values).path)
        except tunekit.TunekitError as error:
            unchanged = [gr.skip() for _ in (fields.path, *outputs)]
            unchanged[1 + outputs.index(status)] = told(error)
            unchanged[1 + outputs.index(removal.dialog)] = gr.Column(visible=False)
            return unchanged
        message = f"<p role='status'>{escape(words('data.deleted', name=name))}</p>"
        address = site.link(words.language, "data")
        return [gr.Dropdown(choices=choices(site), value=""), *_shown(words, fields, status=message, address=address)]

    def upload(files: list[str] | None, *values: Any) -> list[Any]:
        if not files:
            return [gr.skip() for _ in (fields.upload, fields.path, *outputs)]
        try:
            saved = save_uploads(site, files)
        except tunekit.TunekitError as error:
            return [None, gr.skip(), *_shown(words, fields, status=told(error))]
        return [None, *written(anew(fields.asked(*values)), saved)]

    def drop_bad(*values: Any) -> list[Any]:
        return save(fields.asked(*values), {})

    def save_corrected(text: str, numbers: str, *values: Any) -> list[Any]:
        try:
            corrected = corrected_rows(words, text, json.loads(numbers))
        except tunekit.TunekitError as error:
            # What was typed stays.
            unchanged = [gr.skip() for _ in (fields.path, *outputs)]
            unchanged[1 + outputs.index(status)] = told(error)
            return unchanged
        return save(fields.asked(*values), corrected)

    def save(source: Asked, corrected: dict[int, Any]) -> list[Any]:
        try:
            place = place_of_good_rows(site, source.path)
            work.call("save_good_rows", recipe_of(site, source), path=str(place), key=source.key, corrected=corrected)
        except tunekit.TunekitError as error:
            return [gr.skip(), *_shown(words, fields, status=told(error))]
        # Its columns are the same, and so is what they are read as.
        return written(source, place)

    def written(source: Asked, file: Path) -> list[Any]:
        """Look at a file of the workspace that was just written."""
        request = replace(source, path=file.relative_to(site.root.resolve()).as_posix())
        return [gr.Dropdown(choices=choices(site), value=request.path), *_look(site, words, fields, request, 0)]

    def offer(*values: Any) -> list[Any]:
        source = fields.asked(*values)
        try:
            return [gr.skip(), *editor.offered(work.call("invalid_rows", recipe_of(site, source), key=source.key))]
        except tunekit.TunekitError as error:
            return [told(error), gr.skip(), gr.skip(), gr.skip()]

    correct.click(offer, fields.inputs, [status, editor.column, editor.text, editor.numbers], show_progress_on=[rows])
    corrected_by = [editor.text, editor.numbers, *fields.inputs]
    attach(editor.save.click, save_corrected, corrected_by, outputs=[fields.path, *outputs])
    attach(drop.click, drop_bad, fields.inputs, outputs=[fields.path, *outputs])
    attach(removal.sure.click, delete, fields.inputs, outputs=[fields.path, *outputs])
    attach(
        fields.upload.upload, upload, [fields.upload, *fields.inputs], outputs=[fields.upload, fields.path, *outputs]
    )


def _chosen(site: Site) -> str:
    """Return the script that reports a file being sent; one that gradio refuses is not."""
    return CHOSEN.replace("MOST", str(site.max_upload_bytes)).replace("SUFFIXES", json.dumps(SUFFIXES))


def _look(site: Site, words: Words, fields: Fields, asked: Asked, start: int) -> list[Any]:
    """Everything that the fields show of rows."""
    try:
        recipe = recipe_of(site, asked)
        preview = work.call("preview", recipe, key=asked.key, start=start, num_rows=ROWS)
    except tunekit.TunekitError as error:
        address = site.link(words.language, "data", **address_of(asked))
        return _shown(words, fields, status=told(error), address=address, removable=_removable(site, asked))
    last = start + len(preview.rows)
    is_end = last >= preview.num_rows and (preview.is_whole or preview.problem is not None)
    total = f"{preview.num_rows:,}" + ("" if preview.is_whole else "+")
    where = words("data.rows_of", first=f"{start + 1:,}", last=f"{last:,}", total=total) if preview.rows else ""
    is_tried = bool(preview.rows) and methods()[preview.method].is_rewarded
    needs_mapping = preview.problem is not None and not asked.origin
    return _shown(
        words,
        fields,
        status=data_view.preview_status(words, preview),
        mapping=gr.Accordion(visible=bool(preview.columns), open=needs_mapping),
        table=data_view.columns_table(words, preview),
        bad=data_view.bad_rows(words, preview),
        mend=gr.Row(visible=bool(preview.bad and preview.rows) and not asked.origin and not site.read_only),
        rows=data_view.rows_html(words, preview),
        pages=gr.Row(visible=bool(preview.rows) and (start > 0 or not is_end)),
        back=gr.Button(interactive=start > 0),
        where=f"<p class='data-soft'>{where}</p>",
        forth=gr.Button(interactive=not is_end),
        start=start,
        use=data_view.use_link(words, _new_run(site, words, asked)) if preview.problem is None else "",
        address=site.link(words.language, "data", **address_of(asked)),
        measuring=gr.Column(visible=bool(preview.rows) and preview.problem is None),
        trial=gr.Column(visible=is_tried),
        pairs=gr.update(choices=[(words("data.no_pairs"), ""), *choices(site)]) if is_tried else gr.skip(),
        **({"said": gr.skip(), "chart": gr.skip(), "numbers": gr.skip(), "tried": gr.skip()} if start else {}),
        removable=_removable(site, asked),
        found=fields.update(asked, preview),
    )


def _removable(site: Site, asked: Asked) -> gr.Row:
    is_upload = not site.read_only and not asked.origin and upload_of(site, asked.path) is not None
    return gr.Row(visible=is_upload)


def _new_run(site: Site, words: Words, asked: Asked) -> str:
    """The address of a draft that trains on what is looked at."""
    origin = asked.origin or "recipe:sft/quickstart"
    return site.link(words.language, "new", from_=origin, set=asked.overrides() or None)


def _shown(words: Words, fields: Fields, *, found: list[Any] | None = None, **given: Any) -> list[Any]:
    """Return the values of all outputs of the preview; those not given are empty."""
    empty: dict[str, Any] = {
        "status": "",
        "mapping": gr.Accordion(visible=False),
        "table": "",
        "bad": "",
        "mend": gr.Row(visible=False),
        "rows": "",
        "pages": gr.Row(visible=False),
        "back": gr.Button(interactive=False),
        "where": "",
        "forth": gr.Button(interactive=False),
        "start": 0,
        "use": "",
        "address": "",
        "measuring": gr.Column(visible=False),
        "said": f"<p class='data-soft'>{escape(words('data.measure_help'))}</p>",
        "chart": gr.update(visible=False),
        "numbers": "",
        "trial": gr.Column(visible=False),
        "pairs": gr.skip(),
        "tried": "",
        "corrections": gr.Column(visible=False),
        "removable": gr.Row(visible=False),
        "removal": gr.Column(visible=False),
    }
    return [*(empty | given).values(), *(found or [gr.skip()] * len(fields.found))]


def _build_measuring(site: Site, words: Words, fields: Fields) -> list[Any]:
    """All rows measured, on demand; what looking at other rows takes away."""
    with gr.Column(visible=False, elem_id="data-all") as measuring:
        gr.Markdown(f"## {words('data.measure_title')}")
        if site.read_only:
            # It reads every row, which many visitors of a wall screen could ask for at once.
            gr.HTML(
                f"<p class='data-soft'>{escape(words('data.measure_read_only'))}</p>", elem_id="data-measure-read-only"
            )
            return [measuring, *(gr.HTML(visible=False) for _ in range(3))]
        with gr.Row(elem_id="data-measuring"):
            measure = gr.Button(words("data.measure"), elem_id="data-measure", min_width=160)
            cancel = gr.Button(words("data.cancel"), elem_id="data-cancel", interactive=False, min_width=100)
        message = gr.HTML(elem_id="data-progress", padding=False)
        chart = gr.Plot(visible=False, show_label=False, container=False, elem_id="data-chart")
        numbers = gr.HTML(elem_id="data-numbers", padding=False)

    @told_by(lambda error: [*_idle(), told(error), gr.Plot(visible=False), ""])
    def run(request: gr.Request, *values: Any) -> Iterator[list[Any]]:
        asked_request = fields.asked(*values)
        yield [
            gr.Button(interactive=False),
            gr.Button(interactive=True),
            _progress(words, None),
            gr.Plot(visible=False),
            "",
        ]
        try:
            recipe = recipe_of(site, asked_request)
            report: frontend.DataReport | None = None
            for event in events_of(str(request.session_hash), "data_report", recipe, num_samples=0):
                if isinstance(event, dict):
                    yield [gr.skip(), gr.skip(), _progress(words, event), gr.skip(), gr.skip()]
                else:
                    report = event
        except work.Cancelled:
            yield [*_idle(), f"<p class='data-soft'>{words('data.cancelled')}</p>", gr.Plot(visible=False), ""]
            return
        assert report is not None
        source = report.sources[_position(recipe, asked_request)]
        text = data_charts.numbers(words, report, source) + data_charts.mixture_table(words, report)
        yield [*_idle(), "", gr.Plot(data_charts.length_chart(words, source, report.max_length), visible=True), text]

    outputs = [measure, cancel, message, chart, numbers]
    measure.click(run, fields.inputs, outputs, show_progress="hidden", concurrency_limit=2)
    cancel.click(_cancel, None, None, show_progress="hidden", concurrency_limit=None)
    return [measuring, message, chart, numbers]


def _idle() -> list[gr.Button]:
    """The buttons of work that may begin and of work that may be cancelled; where a page is built they would stand."""
    return [gr.Button(interactive=True), gr.Button(interactive=False)]


def _position(recipe: tunekit.Recipe, asked: Asked) -> int:
    keys = [source.key for source in (*recipe.data.sources, *recipe.data.eval_sources)]
    return keys.index(asked.key) if asked.key in keys else 0


def _cancel(request: gr.Request) -> None:
    cancel(str(request.session_hash))


def cancel(session: str) -> None:
    """End what is under way for a page of a browser."""
    event = _measuring.get(session)
    if event is not None:
        event.set()


def events_of(session: str, function: str, *args: Any, **options: Any) -> Iterator[Any]:
    """The events of a call as they come, and its result.

    Raises:
        TunekitError: The call did.
        Cancelled: It was to end.
    """
    told_of: queue.Queue[tuple[str, Any]] = queue.Queue()
    until = threading.Event()

    def work_on() -> None:
        try:
            result = work.call(
                function, *args, on_event=lambda event: told_of.put(("event", event)), until=until, **options
            )
            told_of.put(("result", result))
        except Exception as error:  # noqa: BLE001  (whoever waits for its end is told of any)
            told_of.put(("error", error))

    earlier = _measuring.get(session)
    if earlier is not None:
        earlier.set()
    _measuring[session] = until
    threading.Thread(target=work_on, daemon=True).start()
    try:
        while True:
            kind, value = told_of.get()
            while kind == "event" and not told_of.empty():  # only the newest is worth drawing
                kind, value = told_of.get()
            if kind == "error":
                raise value
            yield value
            if kind == "result":
                return
    finally:
        until.set()
        if _measuring.get(session) is until:
            del _measuring[session]


def _progress(words: Words, event: dict[str, Any] | None) -> str:
    """Render the progress of the rows as a bar."""
    if event is None:
        return f"<p class='data-soft' role='status'>{words('data.reading')} <progress></progress></p>"
    sentence = words("data.progress", source=event["source"], done=f"{event['done']:,}", total=f"{event['total']:,}")
    return data_view.progress(sentence, event["done"], event["total"])


def _build_rewards(site: Site, words: Words, fields: Fields) -> list[Any]:
    """Rewards tried on the first rows, for methods that learn from them; what looking at other rows takes away."""
    with gr.Column(visible=False, elem_id="data-trial") as trial:
        gr.Markdown(f"## {words('data.try_title')}\n{words('data.try_help')}")
        if site.read_only:
            gr.HTML(f"<p class='data-soft'>{words('data.try_read_only')}</p>", elem_id="data-trial-read-only")
            return [trial, gr.Dropdown(visible=False), gr.HTML(visible=False)]
        number = gr.Slider(1, 20, value=4, step=1, label=words("data.num_prompts"), elem_id="data-prompts")
        pairs = gr.Dropdown(
            [(words("data.no_pairs"), "")],
            value="",
            label=words("data.pairs"),
            info=words("data.pairs_help"),
            allow_custom_value=True,
            elem_id="data-pairs",
        )
        with gr.Row():
            attempt = gr.Button(words("data.try"), elem_id="data-try", variant="primary", min_width=160)
            cancel = gr.Button(words("data.cancel"), elem_id="data-stop-trial", interactive=False, min_width=100)
        message = gr.HTML(elem_id="data-trial-result", padding=False)

    @told_by(lambda error: [*_idle(), told(error)])
    def run(number: int, pairs_file: str | None, request: gr.Request, *values: Any) -> Iterator[list[Any]]:
        asked_request = fields.asked(*values)
        yield [gr.Button(interactive=False), gr.Button(interactive=True), _progress(words, None)]
        try:
            recipe = recipe_of(site, asked_request)
            trial: str
            options: dict[str, Any]
            trial, options = "try_rewards", {"num_prompts": int(number)}
            if pairs_file:
                recipe_of(site, Asked(path=pairs_file, method="dpo"))  # refuses a file outside the workspace
                trial, options = "rank_pairs", {"pairs": pairs_file}
            for event in events_of(str(request.session_hash), trial, recipe, **options):
                if isinstance(event, dict):
                    yield [gr.skip(), gr.skip(), _progress(words, event)]
                else:
                    yield [*_idle(), trial_view.trial_html(words, event)]
        except work.Cancelled:
            yield [*_idle(), f"<p class='data-soft'>{words('data.cancelled')}</p>"]

    attempt.click(
        run, [number, pairs, *fields.inputs], [attempt, cancel, message], show_progress="hidden", concurrency_limit=2
    )
    cancel.click(_cancel, None, None, show_progress="hidden", concurrency_limit=None)
    return [trial, pairs, message]
