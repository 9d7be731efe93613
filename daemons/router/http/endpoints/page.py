"""The page at /: files of the package, read once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "page"
# Only files of this router run, load and are asked; nobody frames the page.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Asked for again each time, answered with 304 as long as it is the same.
    "cache-control": "no-cache",
}


class PageEndpoint:
    """GET: one file of the page. file: its name, for a path that holds none."""

    def __init__(self, file: str = "") -> None:
        self._file = file
        self._files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in _TYPES}
        self._tags = {name: f'"{hashlib.sha256(body).hexdigest()[:32]}"' for name, body in self._files.items()}

    async def __call__(self, request: Request) -> Response:
        name = self._file or request.path_params["file"]
        body = self._files.get(name)
        if body is None:
            raise HTTPException(404)
        headers = {**_HEADERS, "etag": self._tags[name]}
        if self._tags[name] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=_TYPES[Path(name).suffix], headers=headers)
