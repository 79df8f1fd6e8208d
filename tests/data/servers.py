"""Servers of clips for the tests: plain HTTP with the faults of the net, S3 by moto, and the little of GCS it takes."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit


class FileServer:
    """Serves a folder over HTTP; the first part of an address may name a fault.

    `/busy2/a.mp4` is refused twice (503), then served; `/torn1/...` breaks off in the middle once; `/silent/...` sends
    half the file and then nothing; `/short/...` sends half the file as if it were all; `/closed/...` is forbidden;
    `/blind/...` does not say the size. `asked` counts the downloads by path.
    """

    def __init__(self, folder: Path, port: int = 0):
        self.folder, self.asked, self.faults = folder, Counter[str](), Counter[str]()
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{path}"

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def file_server(folder: Path, port: int = 0) -> Iterator[FileServer]:
    server = FileServer(folder, port)
    try:
        yield server
    finally:
        server.close()


def _handler(server: FileServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            address = urlsplit(self.path)
            path = unquote(address.path).lstrip("/")
            if path.startswith(("storage/v1/", "download/storage/v1/")):
                return self.answer_as_gcs(path, parse_qs(address.query))
            fault, times = "", 0
            if found := re.fullmatch(r"(busy|torn|silent|short|closed|blind)(\d*)/(.*)", path):
                fault, times, path = found[1], int(found[2] or 0), found[3]
            if fault == "closed":
                return self.send_error(403)
            if fault == "busy" and body and self.happens("busy", path, times):
                return self.send_error(503)
            if fault == "busy" and not body and server.faults["busy", path] < times:
                return self.send_error(503)
            file = server.folder / path
            if not file.is_file():
                return self.send_error(404)
            content = file.read_bytes()
            if fault == "short" and body:
                content = content[: len(content) // 2]
            self.send_response(200)
            if fault != "blind":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if not body:
                return None
            server.asked[path] += 1
            if fault == "silent":
                self.wfile.write(content[: len(content) // 2])
                server.ended.wait(150)
            elif fault == "torn" and self.happens("torn", path, times):
                self.wfile.write(content[: len(content) // 2])
            else:
                self.wfile.write(content)
            return None

        def happens(self, fault: str, path: str, times: int) -> bool:
            server.faults[fault, path] += 1
            return server.faults[fault, path] <= times

        def answer_as_gcs(self, path: str, query: dict[str, list[str]]) -> None:
            name = path.partition("/o/")[2]
            file = server.folder / name
            if not file.is_file():
                return self.send_error(404)
            content = file.read_bytes()
            if query.get("alt") != ["media"]:
                facts = {"kind": "storage#object", "name": name, "bucket": "clips", "size": str(len(content))}
                content = json.dumps(facts | {"id": name, "updated": "2024-01-01T00:00:00Z"}).encode()
            else:
                server.asked[name] += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json" if query.get("alt") != ["media"] else "video/mp4")
            self.end_headers()
            self.wfile.write(content)
            return None

        def log_message(self, *_: object) -> None:
            pass

    return Handler
