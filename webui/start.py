"""The first page: which folder this is, and where to go from here."""

from html import escape

import gradio as gr

from webui.site import Site
from webui.words import Words


def build(page: gr.Blocks, site: Site, words: Words) -> None:
    """The page."""
    gr.Markdown(f"# {words('shell.welcome')}")
    gr.HTML(f"<p>{escape(words('shell.workspace', root=site.root))}</p>", elem_id="shell-workspace")
