"""Access to the server: its own pages, from this machine's address or with the password.

Every request passes here, also for files, the queue, uploads and websockets. A page of another site can send requests
to this machine from its visitor's browser; browsers say where such a request comes from, and it is refused. A name that
somebody else lets point to this machine (DNS rebinding) is not one of the server's, and is refused too.

Wrong passwords are counted by address, and behind a proxy all visitors may have the same one: somebody who guesses
there would keep everyone out. So a browser that logged in once holds a second cookie, which opens nothing, and has a
count for itself: guesses of others lock out only browsers that are new here, and no session ever. Clients of a proxy on
this machine are counted apart anyway, since uvicorn reads their addresses from its `X-Forwarded-For`; those of other
proxies where `FORWARDED_ALLOW_IPS` names them.
"""

import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from html import escape
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import tunekit
from webui.site import LANGUAGES, prefix
from webui.words import Words

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names of this machine in addresses that only it can reach."""

COOKIE = "tunekit"
BROWSER_COOKIE = "tunekit-browser"
MAX_LOGIN_BYTES = 4096
MAX_TRIES = 10
"""Wrong passwords of one guesser in `TRIES_SECONDS`; then none is looked at, for as long."""

TRIES_SECONDS = 60.0

MAX_SESSIONS = 1000
"""Sessions that are open at once; a log-in beyond ends the one that was used least recently."""

IDLE_SECONDS = 24 * 3600
"""Seconds without a request after which a session ends; a page that stands open asks all the time."""

KNOWN_SECONDS = 365 * 24 * 3600
"""Seconds for which a browser that logged in is recognized."""

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    "frame-ancestors 'self' http://localhost:* http://127.0.0.1:* vscode-webview:"
)
"""Nothing is loaded from elsewhere; only pages of this machine, such as a notebook, may show this one inside."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, password: str | None) -> None:
    """Refuse an address that others reach, unless they must know a password.

    Raises:
        TunekitError: They do not.
    """
    if not is_loopback(host) and not password:
        raise tunekit.TunekitError(
            f"--host {host}: without a password, anyone on the network could start runs and read files here",
            hint="set TUNEKIT_UI_PASSWORD or --password-file; or remove --host, and use `ssh -L` from other machines",
        )


class Gate:
    """The application behind the checks, as one more application.

    Args:
        app: What answers those that pass.
        password: What visitors must know, if anything. Who knows it may use any name of this machine.
        read_only: Whether nothing may be sent here to be kept.
    """

    def __init__(self, app: ASGIApp, *, password: str | None, read_only: bool) -> None:
        self._app, self._password, self._read_only = app, password, read_only
        self._sessions: OrderedDict[str, float] = OrderedDict()
        self._secret = secrets.token_bytes(32)
        self._wrong: dict[str, list[float]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or have it answered."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None and scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if refusal is None and self._password is not None and _page_of(scope["path"]) == "/login":
            refusal = await self._login(Request(scope, receive))
        elif refusal is None and self._password is not None and _page_of(scope["path"]) == "/logout":
            refusal = self._logout(Request(scope))
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the response that refuses a request; None if it is allowed."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._password is None and _name_of(host) not in LOOPBACK_NAMES:
            return PlainTextResponse(f"this server does not serve {host!r}; open http://127.0.0.1", 421)
        is_websocket = scope["type"] == "websocket"
        method = "websocket" if is_websocket else scope["method"]
        origin = headers.get("origin")
        if method not in SAFE_METHODS and origin is not None and urlsplit(origin).netloc != host:
            return PlainTextResponse("cross-origin requests are refused", 403)
        is_foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if is_foreign and not (method in SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"):
            return PlainTextResponse("cross-origin requests are refused", 403)
        if self._read_only and scope["path"].rstrip("/").endswith("/upload"):
            return PlainTextResponse("this server is read-only", 403)
        if self._password is None or _page_of(scope["path"]) in ("/login", "/logout") or self._is_known(scope):
            return None
        if not is_websocket and method == "GET" and "text/html" in headers.get("accept", ""):
            here = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
            return RedirectResponse(f"{prefix(_language_of(scope['path']))}/login?{urlencode({'next': here})}", 303)
        return PlainTextResponse("log in first", 401)

    def _is_known(self, scope: Scope) -> bool:
        token, now = _cookie_in(Request({**scope, "type": "http"}), COOKIE), time.monotonic()
        if now - self._sessions.pop(token, float("-inf")) >= IDLE_SECONDS:
            return False
        self._sessions[token] = now
        return True

    def _guesser(self, request: Request) -> str:
        """Return who counts as having typed a password: a browser that logged in before, or else an address."""
        browser, _, signature = _cookie_in(request, BROWSER_COOKIE).partition(".")
        if browser and hmac.compare_digest(signature.encode(), self._signature(browser).encode()):
            return browser
        return request.client.host if request.client else ""

    def _signature(self, browser: str) -> str:
        return hmac.digest(self._secret, browser.encode(), "sha256").hex()

    def _recent(self, guesser: str) -> list[float]:
        """Return when wrong passwords came from somebody; those of long ago are forgotten, whoever they came from."""
        since = time.monotonic() - TRIES_SECONDS
        self._wrong = {
            name: recent for name, times in self._wrong.items() if (recent := [t for t in times if t > since])
        }
        return self._wrong.get(guesser, [])

    def _logout(self, request: Request) -> Response:
        """End the session of a browser; only a form of these pages can."""
        if request.method != "POST":
            return PlainTextResponse("use the button in the page's header", 405)
        self._sessions.pop(_cookie_in(request, COOKIE), None)
        answer = RedirectResponse(f"{prefix(_language_of(request.url.path))}/login", 303)
        answer.delete_cookie(_cookie_of(COOKIE, request), httponly=True, samesite="strict")
        return answer

    async def _login(self, request: Request) -> Response:
        """The page that asks for the password, or what follows an answer."""
        words = Words(_language_of(request.url.path))
        onward = _own_path(request.query_params.get("next", "/"))
        if request.method != "POST":
            return _login_page(words, onward, "")
        if int(request.headers.get("content-length") or MAX_LOGIN_BYTES + 1) > MAX_LOGIN_BYTES:
            return PlainTextResponse("the form is too long for a password", 413)
        guesser = self._guesser(request)
        recent = self._recent(guesser)
        if len(recent) >= MAX_TRIES:
            return _login_page(words, onward, words("shell.too_many", seconds=round(TRIES_SECONDS)), 429)
        password = parse_qs((await request.body()).decode("utf-8", errors="replace")).get("password", [""])[0]
        if not hmac.compare_digest(password.encode(), str(self._password).encode()):
            self._wrong[guesser] = [*recent, time.monotonic()]
            return _login_page(words, onward, words("shell.wrong_password"), 401)
        self._wrong.pop(guesser, None)
        token, browser = secrets.token_urlsafe(32), secrets.token_urlsafe(16)
        self._sessions[token] = time.monotonic()
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        answer = RedirectResponse(onward, 303)
        options: dict[str, Any] = {"httponly": True, "samesite": "strict", "secure": request.url.scheme == "https"}
        answer.set_cookie(_cookie_of(COOKIE, request), token, **options)
        identity = f"{browser}.{self._signature(browser)}"
        answer.set_cookie(_cookie_of(BROWSER_COOKIE, request), identity, max_age=KNOWN_SECONDS, **options)
        return answer


def _language_of(path: str) -> str:
    """Return the language of a path."""
    return next((code for code in LANGUAGES if code != "en" and f"{path}/".startswith(f"/{code}/")), "en")


def _page_of(path: str) -> str:
    """A path without its language."""
    return path.removeprefix(prefix(_language_of(path)))


def _name_of(host: str) -> str:
    """A host without its port."""
    return urlsplit(f"//{host}").hostname or ""


def _cookie_of(name: str, request: Request) -> str:
    """The name of a cookie of a server: browsers keep cookies by hosts, on which several ports may have one."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{name}-{port}" if port.isdigit() else name


def _cookie_in(request: Request, name: str) -> str:
    """Return the value of a cookie of this server; empty if there is none."""
    return request.cookies.get(_cookie_of(name, request), "")


def _own_path(text: str) -> str:
    """Return the path to redirect to, if it is a page of this server."""
    is_own = text.startswith("/") and not text.startswith(("//", "/\\")) and not any(ord(char) < 33 for char in text)
    return text if is_own else "/"


def _login_page(words: Words, onward: str, problem: str, status: int = 200) -> HTMLResponse:
    alert = f"<p role='alert'>{escape(problem)}</p>" if problem else ""
    return HTMLResponse(
        f"<!doctype html><html lang='{words.language}'><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width'><meta name='color-scheme' content='light dark'>"
        f"<title>{escape(words('shell.name'))}</title><link rel='icon' href='data:,'>"
        "<style>body{font-family:system-ui,sans-serif;display:grid;place-items:center;min-height:90vh}"
        "form{display:grid;gap:.75rem;width:min(20rem,90vw)}"
        "input,button{font:inherit;padding:.5rem;border-radius:6px;border:1px solid #888}"
        "button{background:#c2410c;color:#fff;border-color:#c2410c;font-weight:600;cursor:pointer}"
        "[role=alert]{margin:0;padding:.4rem .7rem;border-left:4px solid #dc2626}h1{margin:0}</style>"
        f"<form method='post' action='?{urlencode({'next': onward})}'><h1>{escape(words('shell.name'))}</h1>{alert}"
        f"<label for='password'>{escape(words('shell.password'))}</label>"
        "<input id='password' name='password' type='password' autocomplete='current-password' required autofocus>"
        f"<button>{escape(words('shell.log_in'))}</button></form></html>",
        status,
    )


def _with_headers(send: Send) -> Send:
    """Add what browsers are told with every answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
