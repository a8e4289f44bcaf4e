"""Export of a run's result: its weights as a folder that was checked, its report, and a chat with it."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

import tunekit
from webui import exports
from webui.history import steps_of
from webui.jobs import Progress, Tab
from webui.run_parts import empty, table
from webui.site import Site
from webui.words import Words, told

GGUF_TYPES = ("q8_0", "f16", "bf16")

RESULT = ""
"""Value of the choice that is no checkpoint."""


def build(site: Site, words: Words, run_name: gr.Textbox) -> Tab:
    """The tab of a run's page. `run_name` says of which run."""
    seen_state = gr.Textbox("", visible=False)
    links = gr.HTML(elem_id="export-links")
    if site.read_only:
        output = gr.HTML(elem_id="export-shown")
        gr.HTML(empty(words("export.read_only")), elem_id="export-read-only")
        return Tab(lambda name, seen: look(site, words, name, seen)[:3], [seen_state, links, output])
    with gr.Row(elem_id="export-choices"):
        checkpoint = gr.Dropdown([], label=words("export.checkpoint"), elem_id="export-checkpoint", min_width=180)
        kind = gr.Radio(
            [(words("export.merged"), "merged"), (words("export.adapter"), "adapter")],
            value="merged", label=words("export.kind"), elem_id="export-kind", min_width=240,
        )  # fmt: skip
        dtype = gr.Dropdown(
            [(words("export.dtype_auto"), "auto"), *((name, name) for name in ("bfloat16", "float16", "float32"))],
            value="auto", label=words("export.dtype"), elem_id="export-dtype", min_width=180,
        )  # fmt: skip
    with gr.Row():
        gguf = gr.Dropdown(
            [(words("export.gguf_none"), ""), *((name, name) for name in GGUF_TYPES)], value="", label="GGUF",
            info=words("export.gguf_help"), elem_id="export-gguf", min_width=200,
        )  # fmt: skip
        push = gr.Textbox(
            label=words("export.push"), info=words("export.push_help"), placeholder="owner/name", max_lines=1,
            elem_id="export-push", min_width=240,
        )  # fmt: skip
        private = gr.Checkbox(True, label=words("export.private"), elem_id="export-private", min_width=160)
    dest = gr.Textbox(label=words("export.dest"), info=words("export.dest_help"), max_lines=1, elem_id="export-dest")
    start = gr.Button(
        words("export.start"), variant="primary", interactive=False, size="md", elem_id="export-start"
    )  # fmt: skip
    status = gr.HTML(elem_id="export-status")
    output = gr.HTML(elem_id="export-shown")
    outputs = [seen_state, links, output, checkpoint, kind, start, status]

    def refresh(name: str, seen: str) -> list[Any]:
        return look(site, words, name, seen)

    def export(
        name: str, checkpoint: str, kind: str, dtype: str, dest: str, gguf: str, push: str, private: bool
    ) -> Any:
        repository = push.strip() or None
        return begin(
            site, words, name, checkpoint=checkpoint, kind=kind, dtype=dtype, dest=dest, gguf=gguf or None,
            push=repository, private=private and repository is not None,
        )  # fmt: skip

    update: dict[str, Any] = {
        "fn": refresh,
        "inputs": [run_name, seen_state],
        "outputs": outputs,
        "show_progress": "hidden",
    }
    begun = start.click(
        export, [run_name, checkpoint, kind, dtype, dest, gguf, push, private], status, show_progress="hidden"
    )
    begun.then(**update)
    # An adapter stays in the type that it was trained in.
    kind.change(
        lambda kind: gr.Dropdown(value="auto", interactive=kind != "adapter"), kind, dtype, show_progress="hidden"
    )
    return Tab(refresh, outputs)


def begin(
    site: Site,
    words: Words,
    name: str,
    *,
    checkpoint: str,
    kind: str,
    dtype: str,
    dest: str,
    gguf: str | None = None,
    push: str | None = None,
    private: bool = False,
) -> Any:
    """Begin an export, or say why not."""
    try:
        run = site.run(name)
        to = site.inside(dest) if dest and dest.strip() else None
        exports.begin(
            run, to, kind=kind, dtype=dtype, checkpoint=checkpoint or None, gguf=gguf, push=push, private=private
        )
    except tunekit.TunekitError as error:
        return told(error)
    return _busy("waiting", words)


def look(site: Site, words: Words, name: str, seen: str) -> list[Any]:
    """Return the changes since a browser's last request: seen state, links, exports, choices, button, and status."""
    if not name:
        return [gr.skip()] * 7
    try:
        run = site.run(name)
        state, progress = run.state, exports.progress_of(run)
        folders = sorted(path.name for path in (run.path / "checkpoints").glob("checkpoint-*"))
        newest = None if progress is None or progress.result is None else progress.result.folder
        exported = exports.exports_in(run, newest)
        mark = repr((name, state, folders, progress, [path for path, _ in exported]))
        if mark == seen:
            return [gr.skip()] * 7
        can_talk = state == "finished" or bool(folders)
        head = [mark, _links(site, words, name, can_talk=can_talk), _shown(site, words, exported)]
        return head + _choices(
            run, words, state, progress, is_new=not seen.startswith(repr((name, state, folders))[:-1])
        )
    except tunekit.TunekitError as error:
        return ["", "", told(error), *[gr.skip()] * 4]


def models_of(run: tunekit.Run, state: str, words: Words) -> list[tuple[str, str]]:
    """Return the models of a run as choices: its result, and its checkpoints by their steps."""
    of_steps = [(words("export.step", step=step), str(step)) for step in steps_of(run)]
    return [(words("export.result"), RESULT), *of_steps] if state == "finished" else of_steps


def _choices(run: tunekit.Run, words: Words, state: str, progress: Progress | None, *, is_new: bool) -> list[Any]:
    """Checkpoint, kind, button and status."""
    choices = models_of(run, state, words)
    is_full = run.recipe.adapter.type == "full"
    is_busy = progress is not None and not progress.is_over
    status: Any = gr.skip()
    if progress is not None:
        status = told(progress.error) if progress.error is not None else _busy(progress.phase, words)
    elif not choices:
        status = empty(words("export.nothing"))
    else:
        status = ""
    first = choices[0][1] if choices else None
    kinds = ["merged", "quantized" if run.recipe.train.qat is not None else "adapter"]
    is_only = is_full and kinds[1] == "adapter"
    return [
        gr.Dropdown(choices=choices, value=first) if is_new else gr.Dropdown(choices=choices),
        gr.Radio(
            [(words(f"export.{kind}"), kind) for kind in kinds],
            value="merged",
            interactive=not is_only,
            info=words("export.full") if is_only else "",
        )
        if is_new
        else gr.skip(),
        gr.Button(interactive=bool(choices) and not is_busy),
        status,
    ]


def _busy(phase: str, words: Words) -> str:
    return f"<p class='export-busy' role='status'>{escape(words(f'export.phase_{phase}'))}</p>"


def _links(site: Site, words: Words, name: str, *, can_talk: bool) -> str:
    """Ways to the report and to a talk."""
    ways = [
        (site.link("en", "report", run=name), words("export.report"), " target='_blank' rel='noopener'"),
        (site.link("en", "report", run=name, download="1"), words("export.report_download"), " download"),
    ]
    if can_talk and not site.read_only:
        ways.append((site.link(words.language, "chat", run=name), words("export.chat"), ""))
    return "<p class='export-ways'>" + " · ".join(
        f"<a href='{escape(url)}'{how}>{escape(text)}</a>" for url, text, how in ways
    ) + "</p>"  # fmt: skip


def _shown(site: Site, words: Words, made: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """The exports that there are, with what their checks told."""
    if not made:
        return empty(words("export.none"))
    head = [words(f"export.{key}") for key in ("folder", "what", "size", "check")]
    rows = [
        [
            f"<code>{escape(_place(site, folder))}</code>{_download(site, words, folder)}",
            escape(f"{export['kind']}, {export['dtype']}"),
            f"{export['total_bytes'] / 2**20:,.1f} MiB",
            _check(words, export),
        ]
        for folder, export in made
    ]
    return table(head, rows, kind="export-made")


def _download(site: Site, words: Words, folder: Path) -> str:
    if site.read_only or not folder.resolve().is_relative_to(site.root.resolve()):
        return ""
    address = site.link("en", "download", path=_place(site, folder))
    return f" <a href='{escape(address)}' download>{escape(words('export.download'))}</a>"


def _place(site: Site, folder: Path) -> str:
    root = site.root.resolve()
    target = folder.resolve()
    return str(target.relative_to(root)) if target.is_relative_to(root) else str(target)


def _check(words: Words, one: dict[str, Any]) -> str:
    """Render the result of an export's verification as HTML."""
    check = one["check"]
    lines = [
        words("export.logits", error=f"{check['logit_error']:.2%}", tolerance=f"{check['tolerance']:.2%}"),
        words("export.template", num=check["num_conversations"]),
    ]
    if check["num_tokens"]:
        lines.insert(1, words("export.tokens", same=check["num_same_tokens"], num=check["num_tokens"]))
    if check["adapter_change"] is not None:
        lines.insert(1, words("export.change", change=f"{check['adapter_change']:.2%}"))
    return "<ul class='export-check'>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
