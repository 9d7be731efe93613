"""Guards against web pages that talk to a router on their reader's machine: names by which it may be called, and types
of bodies."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from radixmesh.daemons.router.http.bodies.body import IGNORED_HEADER
from radixmesh.daemons.router.http.errors import plain_error

ANY = "*"
_JSON = "application/json"
_WITHOUT_BODY = frozenset({"/flush_cache"})


class HostCheck:
    """An ASGI application before the application: refuses requests to names that are not this router's.

    A page from evil.example can have its name resolve to 127.0.0.1 later (DNS rebinding): the browser then takes our
    answers for the page's own. The Host header still says evil.example. Accepted are IP addresses, `localhost`, names
    without a dot (containers, machines of one's own network: nobody else can have pages under them), and `names`, of
    which `*.example.com` means all below it and `*` any.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = frozenset(name.lower() for name in names)
        self._suffixes = tuple(name.lower()[1:] for name in names if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope["headers"] if scope["type"] == "http" else ():
            if name == b"host" and not self._is_ours(host := value.decode("latin-1")):
                message = (
                    f"this router is not called {host!r:.260}: use localhost or an IP address, or name the host in "
                    "--http-allowed-hosts"
                )
                await plain_error(421, "UNKNOWN_HOST", message, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host.lower()).rstrip(".")
        if "." not in name and ":" not in name:
            return True
        if ANY in self._names or name in self._names or name.endswith((".localhost", *self._suffixes)):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class JsonOnly:
    """An ASGI application before the application: refuses bodies that are not declared to be JSON.

    A page may send other types to any address without asking (CORS), and a body without a type too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and not _is_bare(scope):
            types = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"]
            if len(types) != 1 or not _is_json(types[0]):
                message = f"the body has content-type {', '.join(types)!r:.100}: send it with content-type: {_JSON}"
                await plain_error(415, "WRONG_CONTENT_TYPE", message, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins (`https://app.example.com`; `*` = any) call the application and read its answers."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=(ANY,),
        expose_headers=("x-request-id", IGNORED_HEADER, "retry-after"),
    )


def is_loopback(host: str) -> bool:
    """True if only processes of this machine reach a listener at host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_bare(scope: Scope) -> bool:
    """A POST that needs no body, by a program: browsers name the origin of a page with every POST of it."""
    names = {name for name, _ in scope["headers"]}
    return scope["path"] in _WITHOUT_BODY and not names & {b"content-type", b"origin", b"sec-fetch-site"}


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == _JSON or (kind.startswith("application/") and kind.endswith("+json"))


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
