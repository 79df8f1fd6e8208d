"""Access to the pages: this machine alone, or whoever has the token; pages load nothing from elsewhere."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import sys
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from longtake import pages
from longtake.contracts import UserError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SHORTEST = 16
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/?#@\\]*)(:[0-9]{1,5})?")  # the whole of a Host header
_MAX_NAME_BYTES = 255  # of a part of a path, in the usual file systems
_GRADIO_API = "/gradio_api/"
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'; form-action 'self'; "
    "base-uri 'self'; object-src 'none'"
)
_ASK = pages.page(
    "Longtake",
    pages.Html(
        '<form><label>Token, as `longtake ui` printed it <input name="token" type="password" autofocus></label> '
        "<button>Open</button></form>"
    ),
)


def token_for(host: str, token: str | None) -> str | None:
    """Return the token of a page on `host`: the one given, one made up where others could reach it, None on
    loopback."""
    if token is not None and len(token) < _SHORTEST:
        raise UserError(f"--token: has {len(token)} characters; give {_SHORTEST} or more, or leave it out to get one")
    return token or (None if host in LOOPBACK else secrets.token_urlsafe(24))


def cookie_name(token: str) -> str:
    """Return the name of the cookie that keeps a token: one of its own for each token, since a browser sends the
    cookies of a host to all its ports, and pages of several machines may come through `localhost`."""
    return f"longtake_{hashlib.sha256(token.encode()).hexdigest()[:16]}"


class Gate:
    """Middleware in front of every request, of files and of events too."""

    def __init__(self, app: Any, token: str | None, loopback: bool):
        self._app, self._token, self._loopback = app, token, loopback

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if problem := _malformed(headers, scope["path"]):
            return await answer(send, 400, problem)
        if refusal := self._refusal(headers):
            return await answer(send, 403, refusal)
        if self._token is not None and not self._known(headers):
            given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
            if scope["type"] == "http" and self._is_token(given):
                cookie = f"{cookie_name(given)}={quote(given, safe='')}; HttpOnly; SameSite=Strict; Path=/"
                return await answer(send, 303, "", ("location", _own_path(scope["path"])), ("set-cookie", cookie))
            return await answer(send, 401, _ASK)

        await self._forward(scope, receive, send)

    async def _forward(self, scope: Any, receive: Any, send: Any) -> None:
        """Have the page answer. Gradio's API answers 500 to arguments of other types: that is the client's error."""
        is_api, failed = scope["path"].startswith(_GRADIO_API), False

        async def with_policy(message: Any) -> None:
            nonlocal failed
            if message["type"] == "http.response.start":
                failed = is_api and message["status"] == 500
                policy = _POLICY + ("; sandbox allow-scripts" if scope["path"] == "/page" else "")
                own = {b"content-security-policy": policy.encode(), b"x-content-type-options": b"nosniff"}
                own[b"referrer-policy"] = b"no-referrer"
                message["headers"] = [*message.get("headers", ()), *own.items()]
                if failed:
                    message["status"] = 400
            await send(message)

        try:
            await self._app(scope, receive, with_policy)
        except Exception as error:
            if not failed:
                raise
            print(f"{scope['path']!r}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _refusal(self, headers: dict[str, str]) -> str | None:
        """Return a page of elsewhere that has a browser ask, by its own name (DNS rebinding) or by ours
        (cross-site)."""
        host = headers.get("host", "")
        if self._loopback and urlsplit(f"//{host}").hostname not in LOOPBACK:
            return "This page answers to 127.0.0.1 and localhost only."
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return "This page takes requests from itself only."
        return None

    def _known(self, headers: dict[str, str]) -> bool:
        assert self._token is not None, "an open page asks for none"
        own = f"{cookie_name(self._token)}="
        cookies = (cookie.strip() for cookie in headers.get("cookie", "").split(";"))  # others' may be of any form
        return any(self._is_token(unquote(one.removeprefix(own))) for one in cookies if one.startswith(own))

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _malformed(headers: dict[str, str], path: str) -> str | None:
    """Return the error of a request before anything is looked up; None where nothing is."""
    for name in ("host", "x-forwarded-host"):  # a chain of proxies writes several of the latter
        if not all(_HOST.fullmatch(host.strip()) for host in headers.get(name, "").split(",")):
            return f"{name}: expected HOST or HOST:PORT."
    try:
        urlsplit(headers.get("origin", ""))
    except ValueError:
        return "origin: expected SCHEME://HOST:PORT."
    if any(len(part.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES for part in path.split("/")):
        return f"path: a name in it is longer than {_MAX_NAME_BYTES} bytes."
    return None


def _own_path(path: str) -> str:
    """Return a path of this page for a Location header: `//host` would lead elsewhere."""
    return "/" + quote(path.lstrip("/"))


async def answer(send: Any, status: int, text: str, *headers: tuple[str, str]) -> None:
    """Send a whole response."""
    head = [("content-type", "text/html; charset=utf-8"), ("cache-control", "no-store"), *headers]
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in head]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": text.encode()})
