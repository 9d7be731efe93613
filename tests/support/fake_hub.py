"""A server with the part of the Hugging Face hub's API that a download of a snapshot uses, over files of a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def fake_hub(models: dict[str, Path]) -> Iterator[str]:
    """Serves repositories (`organisation/name` -> folder) on loopback; yields the endpoint for HF_ENDPOINT."""

    class Handler(_HubHandler):
        repositories = models

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    repositories: dict[str, Path]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        for name, folder in self.repositories.items():
            if path.startswith(f"api/models/{name}"):
                files = sorted(file.name for file in folder.iterdir() if file.is_file())
                if "/tree/" in path:
                    entries = [
                        {"type": "file", "path": file, "size": (folder / file).stat().st_size, "oid": "0"}
                        for file in files
                    ]
                    return self._send(200, json.dumps(entries).encode(), with_body)
                whole = {"id": name, "sha": _COMMIT, "siblings": [{"rfilename": file} for file in files]}
                return self._send(200, json.dumps(whole).encode(), with_body)
            if path.startswith(f"{name}/resolve/"):
                file = folder / path.rpartition("/")[2]
                if file.is_file():
                    return self._send(200, file.read_bytes(), with_body)
        self._send(404, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: bytes, with_body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", _COMMIT)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)
