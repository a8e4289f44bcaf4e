"""Pages, in the order of their links.

A page is a module with `build(page, site, words)`, which is called inside the page's own context: it makes its
components and attaches its events. What a page shows is asked of it by the query of its URL (`request.query_params`).
"""

from collections.abc import Callable

import gradio as gr

from webui import chat, compare, data_page, new_run, runs_page
from webui.site import Site
from webui.words import Words

PAGES: dict[str, Callable[[gr.Blocks, Site, Words], None]] = {
    "runs": runs_page.build,
    "new": new_run.build,
    "data": data_page.build,
    "compare": compare.build,
    "chat": chat.build,
}
"""Builder of each page, by its name in URLs; `shell.page_NAME` is its link's text."""
