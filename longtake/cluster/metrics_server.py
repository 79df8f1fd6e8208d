"""HTTP server for Prometheus: a thread per connection, each of which ends within a total time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, socket

from longtake.contracts import UserError

_CLIENT_SECONDS = 20.0  # to send a request, wait for the figures (up to 8 s for nodes) and read them
_MAX_CONNECTIONS = 64


class Exporter(ThreadingHTTPServer):
    """Closes each connection `client_seconds` after it was accepted, and the oldest of more than 64 at once."""

    client_seconds = _CLIENT_SECONDS
    request_queue_size = _MAX_CONNECTIONS  # the default of 5 has further clients wait for a second

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._accepted: dict[socket, float] = {}  # in the order of arrival
        super().__init__(address, handler)

    def process_request(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        while len(self._accepted) >= _MAX_CONNECTIONS:
            self._cut(next(iter(self._accepted)))
        self._accepted[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called by `serve_forever` after each request and at least every half second."""
        oldest = time.monotonic() - self.client_seconds
        for request, accepted in list(self._accepted.items()):
            if accepted < oldest:
                self._cut(request)

    def _cut(self, request: socket) -> None:
        """End a connection: whatever its thread reads or writes next fails, and the thread closes it."""
        self._accepted.pop(request, None)
        with suppress(OSError):
            request.shutdown(SHUT_RDWR)

    def shutdown_request(self, request: socket) -> None:  # type: ignore[override]
        self._accepted.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print a traceback for our errors only: a client that leaves is not an error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _SharedText:
    """`make()` by one thread at a time; requests that came before it began share its result."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._began, self._text = -1.0, ""

    def __call__(self) -> str:
        asked = time.monotonic()
        with self._lock:
            if self._began < asked:
                began = time.monotonic()
                self._text = self._make()
                self._began = began
            return self._text


def exporter(listen: str, text: Callable[[], str]) -> Exporter:
    """Return a server at `host:port` that answers `/metrics` with `text()`. Raises `UserError` where it
    cannot listen."""
    shared = _SharedText(text)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404, "see /metrics")
                return
            try:
                content = shared().encode()
            except (OSError, UserError) as error:  # such as a folder that is away for a while
                print(f"not read: {error}", file=sys.stderr, flush=True)
                self.send_error(503, "not read", "see what longtake health printed")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """A request every few seconds is no news."""

    host, _, port = listen.rpartition(":")
    try:
        return Exporter((host, int(port)), Handler)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"--listen {listen}: {error}; write HOST:PORT of this machine, with a port that is free"
        ) from error
