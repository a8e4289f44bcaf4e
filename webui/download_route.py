"""Exports as zip files: `/download?path=FOLDER`, a folder of the workspace with an `export.json`.

Files are sent as they are read: nothing is written, and weights, which hardly compress, are stored as they are.
"""

import zipfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response, StreamingResponse

import tunekit
from webui.report_route import HEADERS
from webui.site import Site
from webui.words import told

PIECE_BYTES = 2**20


class _Pieces:
    """A stream whose bytes are taken away as they come."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        """Take bytes."""
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """Do nothing: bytes are there at once."""

    def take(self) -> bytes:
        """Return the bytes that came since they were taken last."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data


def zipped(folder: Path) -> Iterator[bytes]:
    """Yield a zip file of a folder, piece by piece; links are left out."""
    stream = _Pieces()
    with zipfile.ZipFile(stream, "w", allowZip64=True) as archive:  # type: ignore[call-overload]
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            info = zipfile.ZipInfo.from_file(path, Path(folder.name, path.relative_to(folder)))
            with path.open("rb") as source, archive.open(info, "w", force_zip64=True) as target:
                while piece := source.read(PIECE_BYTES):
                    target.write(piece)
                    yield stream.take()
    yield stream.take()


def add_download(app: FastAPI, site: Site) -> None:
    """Serve the exports of a workspace."""

    def download(path: str = "") -> Response:
        try:
            if site.read_only:
                raise tunekit.TunekitError("downloads are disabled", hint="start `tunekit ui` without --read-only")
            folder = site.inside(path)
            if not (folder / "export.json").is_file():
                raise tunekit.TunekitError(f"{path!r} is not an export", hint="the tab Export of a run lists them")
        except tunekit.TunekitError as error:
            words = f"<!doctype html><title>{escape(error.problem)}</title>{told(error)}"
            return HTMLResponse(words, status_code=404, headers=HEADERS)
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(folder.name, safe='')}.zip"}
        return StreamingResponse(zipped(folder), media_type="application/zip", headers=HEADERS | headers)

    app.add_api_route("/download", download, methods=["GET"], include_in_schema=False)
