"""Deletion of uploads: only what browsers sent, only where it is meant, and nothing that a run still reads."""

import shutil
from html import escape
from pathlib import Path

import gradio as gr

import tunekit
from tunekit import frontend
from webui.listing import Line, listing_of
from webui.reach import paths_of
from webui.site import Site
from webui.uploads import FOLDER
from webui.words import Words


class Removal:
    """The button that deletes the upload that is looked at, and the question before it.

    Args:
        words: The texts.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        with gr.Row(visible=False, elem_id="data-removal") as self.row:
            self.ask = gr.Button(words("data.delete"), size="sm", min_width=160, scale=0, elem_id="data-delete")
        with gr.Column(visible=False, elem_id="data-delete-ask") as self.dialog:
            self.question = gr.HTML(padding=True)
            with gr.Row():
                self.sure = gr.Button(
                    words("data.delete_sure"), variant="stop", size="md", elem_id="data-delete-sure"
                )  # fmt: skip
                self.no = gr.Button(words("data.delete_not"), size="md", elem_id="data-delete-not")

    def attach(self, site: Site, path: gr.Dropdown) -> None:
        """Have the button ask, and the answer that nothing is deleted take the question away."""

        def asked(path: str | None) -> tuple[object, str]:
            upload = upload_of(site, path or "")
            name = "" if upload is None else f"{FOLDER}/{upload.name}"
            return gr.Column(visible=bool(name)), f"<p>{escape(self._words('data.delete_ask', name=name))}</p>"

        self.ask.click(asked, path, [self.dialog, self.question], show_progress="hidden")
        self.no.click(lambda: gr.Column(visible=False), None, self.dialog, show_progress="hidden")


def upload_of(site: Site, path: str) -> Path | None:
    """Return the upload that a path is or lies in: a file, or the folder of an archive; None if it is no upload."""
    folder = site.inside(FOLDER)
    try:
        file = site.inside(path)
    except tunekit.TunekitError:
        return None
    if folder not in file.parents or not file.exists():
        return None
    return folder / file.relative_to(folder).parts[0]


def delete_upload(site: Site, path: str) -> str:
    """Delete the upload that a path is or lies in, and return its name.

    Raises:
        TunekitError: It is none, a run reads it that is not over, or the pages only show.
    """
    upload = upload_of(site, path)
    if site.read_only or upload is None:
        raise tunekit.TunekitError(f"{path!r} is not an upload", hint=f"only files in {FOLDER} can be deleted here")
    readers = [line.name for line in listing_of(site.root).lines() if not line.is_over and _reads(site, line, upload)]
    name = f"{FOLDER}/{upload.name}"
    if readers:
        problem = f"{name} is in use by {', '.join(readers)}"
        raise tunekit.TunekitError(problem, hint="delete it when the run is over, or stop the run first")
    try:
        if upload.is_dir():
            shutil.rmtree(upload)
        else:
            upload.unlink()
    except OSError as error:
        raise tunekit.TunekitError(f"{name} cannot be deleted: {error.strerror}") from error
    return name


def _reads(site: Site, line: Line, upload: Path) -> bool:
    """Return whether a run's recipe names an upload, a file in it, or a folder that it is in."""
    texts = [] if line.recipe is None else [text for _, text in frontend.named_paths(line.recipe)]
    paths = [path.resolve() for text in texts for path in paths_of(site, text)]
    return any(path.is_relative_to(upload) or upload.is_relative_to(path) for path in paths)
