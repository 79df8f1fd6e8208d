"""A Hugging Face hub on this machine: the repositories are folders, asked for as `huggingface_hub` asks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.served import Handler, served

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(repositories: Mapping[str, Path]) -> Iterator[str]:
    """The address of a hub with these repositories, `owner/name` -> folder, for HF_ENDPOINT."""

    class Answers(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/[^/]+", path):
                folder = repositories.get(found[1])
                files = () if folder is None else sorted(file for file in folder.rglob("*") if file.is_file())
                names = [str(file.relative_to(folder)) for file in files]
                if folder is None:
                    return self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
                tree = [
                    {"type": "file", "path": n, "size": f.stat().st_size, "oid": _etag(f)}
                    for n, f in zip(names, files, strict=True)
                ]
                info = {"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
                return self.send(200, json.dumps(tree if found[2] == "tree" else info).encode(), body)
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                file = repositories.get(found[1], Path("nowhere")) / found[2]
                if file.is_file():
                    return self.send(
                        200, file.read_bytes(), body, {"ETag": f'"{_etag(file)}"', "X-Repo-Commit": COMMIT}
                    )
                return self.send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            return self.send(404, b"{}", body)

        def send(self, status: int, data: bytes, body: bool, heads: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(heads or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    with served(Answers) as address:
        yield address


def _etag(file: Path) -> str:
    """SHA-256 of a large file, as the hub has it; of others a sum of Git's."""
    method = hashlib.sha256 if file.suffix == ".safetensors" else hashlib.sha1
    return method(file.read_bytes()).hexdigest()
