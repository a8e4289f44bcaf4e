"""The pages as one application, built once for each language."""

import json
import warnings
from html import escape
from pathlib import Path

import gradio as gr
from fastapi import FastAPI
from fastapi.responses import RedirectResponse, Response
from starlette.requests import Request

from webui.download_route import add_download
from webui.failures import Pages
from webui.pages import PAGES
from webui.report_route import add_report
from webui.site import LANGUAGES, Site, prefix
from webui.words import Words

STYLES, SCRIPTS = (Path(__file__).parent / folder for folder in ("styles", "scripts"))

FONTS = {
    ("tunekit sans", 400): "SourceSansPro/SourceSansPro-Regular",
    ("tunekit sans", 700): "SourceSansPro/SourceSansPro-Bold",
    ("tunekit mono", 400): "IBMPlexMono/IBMPlexMono-Regular",
    ("tunekit mono", 700): "IBMPlexMono/IBMPlexMono-Bold",
}
"""Gradio's own files of fonts, by family and weight. Those it takes for bold have no Latin letters but A and B."""

HEAD = """
<link rel="icon" href="data:,">
<style>
FACES
/* What stays at the bottom of a phone's screen covers neither the end of the page nor a field that is scrolled to.
   Gradio applies the rules of @media in other styles to what is in its container only. */
@media (max-width: 767px) {
  html:has(#plan-bar) { scroll-padding-bottom: 9rem; }
  .gradio-container:has(#plan-bar) { padding-bottom: 9rem; }
}
</style>
<script>
// The other language shows the same: its link takes the query along.
for (const kind of ["click", "auxclick"])
  document.addEventListener(kind, (event) => {
    const link = event.target.closest && event.target.closest("#shell-language");
    if (link) link.search = location.search;
  }, true);
// Tabs and the history tell pages apart, and readers learn the language. Gradio gives all pages one title, in English.
document.documentElement.lang = "LANGUAGE";
const titled = () => {
  const page = TITLES[location.pathname.split("/").pop()];
  const run = new URLSearchParams(location.search).get("run");
  const title = [run, page, "NAME"].filter(Boolean).join(" · ");
  if (document.title !== title) document.title = title;
};
new MutationObserver(titled).observe(document.head, { childList: true, subtree: true, characterData: true });
titled();
</script>
<script>
SCRIPTS
</script>
""".replace(
    "FACES",
    "\n".join(
        f'@font-face {{ font-family: "{family}"; font-weight: {weight}; '
        f'src: url("static/fonts/{file}.woff2") format("woff2"); }}'
        for (family, weight), file in FONTS.items()
    ),
)


def make_app(site: Site) -> FastAPI:
    """The application: every page in every language."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    add_report(app, site)
    add_download(app, site)
    for language in sorted(LANGUAGES, key=prefix, reverse=True):
        _add_home(app, language)
        _mount(app, site, Words(language))
    return app


def _add_home(app: FastAPI, language: str) -> None:
    """A language's own address leads to its first page."""

    async def home(request: Request) -> Response:
        return RedirectResponse(f"{prefix(language)}/{next(iter(PAGES))}")

    for path in {prefix(language), f"{prefix(language)}/"} - {""}:
        app.add_api_route(path, home, methods=["GET"], include_in_schema=False)


def _mount(app: FastAPI, site: Site, words: Words) -> None:
    pages = build_pages(site, words)
    with warnings.catch_warnings():
        # It says that pages are not rendered on the server, which nobody asked for.
        warnings.filterwarnings("ignore", message="SSR mode")
        gr.mount_gradio_app(
            app,
            pages,
            prefix(words.language) or "/",
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            show_error=False,
            enable_monitoring=False,
            pwa=False,
            mcp_server=False,
            max_file_size=site.max_upload_bytes,
            css="\n".join(path.read_text(encoding="utf-8") for path in sorted(STYLES.glob("*.css"))),
            head=_head(words),
        )
    # Only where pages count as launched does gradio check that a file which a request names was uploaded; else it would
    # take any file of this machine.
    pages.has_launched = True


def _head(words: Words) -> str:
    """Fonts, and what all pages of a language run."""
    titles = json.dumps({name: words(f"shell.page_{name}") for name in PAGES}, ensure_ascii=False)
    name = json.dumps(words("shell.name"), ensure_ascii=False)
    chart_words = {key: words(f"charts.{key}") for key in ("menu", "table", "png", "csv", "close", "curve")}
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in sorted(SCRIPTS.glob("*.js")))
    scripts = scripts.replace("CHART_WORDS", json.dumps(chart_words, ensure_ascii=False))
    head = HEAD.replace("LANGUAGE", words.language).replace("TITLES", titles).replace('"NAME"', name)
    return head.replace("SCRIPTS", scripts)


def build_pages(site: Site, words: Words) -> gr.Blocks:
    """All pages in one language."""
    pages = Pages(analytics_enabled=False, title=words("shell.name"), fill_width=True)
    with pages:
        for name, build in PAGES.items():
            pages.begin_page(name, words(f"shell.page_{name}"))
            gr.HTML(_header(site, words, name), elem_id="shell-header")
            build(pages, site, words)
    return pages


def _header(site: Site, words: Words, current: str) -> str:
    """Name, links to the pages, and the other language."""
    links = "".join(
        f"<a href='{site.link(words.language, name)}'{' aria-current=page' if name == current else ''}>"
        f"{escape(words(f'shell.page_{name}'))}</a>"
        for name in PAGES
    )
    (other,) = set(LANGUAGES) - {words.language}
    button = f"<button>{escape(words('shell.log_out'))}</button>"
    log_out = f"<form method='post' action='{prefix(words.language)}/logout'>{button}</form>"
    return (
        f"<header><a class='shell-name' href='{prefix(words.language)}/' "
        f"title='{escape(words('shell.workspace', root=site.root))}'>{escape(words('shell.name'))}</a>"
        f"<nav aria-label='{escape(words('shell.pages'))}'>{links}</nav>"
        f"<a id='shell-language' lang='{other}' hreflang='{other}' href='{site.link(other, current)}'>"
        f"{escape(LANGUAGES[other])}</a>{log_out if site.has_password else ''}</header>"
    )
