"""The report of a run at an address of its own: `/report?run=NAME`, and with `&download=1` as a file.

It is text that a run has said, so the browser is told to take it for a page that may do nothing: it is kept apart from
the other pages, runs nothing and loads nothing, whatever is in it.
"""

from html import escape
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

import tunekit
from webui import work
from webui.site import Site
from webui.words import told

HEADERS = {
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def add_report(app: FastAPI, site: Site) -> None:
    """Serve the reports of a workspace's runs."""

    def report(run: str = "", download: bool = False) -> Response:
        try:
            run_found = site.run(run)
            page: str = work.call("report", str(run_found.path))
        except tunekit.TunekitError as error:
            words = f"<!doctype html><title>{escape(error.problem)}</title>{told(error)}"
            return HTMLResponse(words, status_code=404, headers=HEADERS)
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(run_found.name, safe='')}.html"}
        return HTMLResponse(page, headers=HEADERS | (headers if download else {}))

    app.add_api_route("/report", report, methods=["GET"], include_in_schema=False)
