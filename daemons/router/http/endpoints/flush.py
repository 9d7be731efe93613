"""/flush_cache: empties the prefix caches."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from radixmesh.daemons.router.http.bodies.field_decoders import invalid
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError

_DEFAULT_S = 10.0
_MAX_S = 600.0


class FlushEndpoint:
    """POST: {flushed_pages} of all schedulers, once nothing runs there; ?timeout=SECONDS waits that long, 10 otherwise.

    Raises DEADLINE_EXCEEDED where something still runs then, OVERLOADED while another caller's is under way: what waits
    for a flush holds up the requests that come after it.
    """

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._is_busy = False

    async def __call__(self, request: Request) -> Response:
        timeout_s = _timeout_of(request.query_params.get("timeout"))
        links = [link for link in self._context.router.schedulers.links if link.is_connected]
        if not links:
            message = "no scheduler is connected: come again"
            raise MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "scheduler"})
        if self._is_busy:
            raise MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "a flush is under way: come again when it is done")
        self._is_busy = True
        try:
            flushed = await asyncio.gather(*(self._context.flush_cache(link.address, timeout_s) for link in links))
        finally:
            self._is_busy = False
        return JSONResponse({"flushed_pages": sum(flushed), "num_schedulers": len(links)})


def _timeout_of(text: str | None) -> float:
    if text is None:
        return _DEFAULT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_S:
        raise invalid("timeout", f"timeout is {text[:32]!r}: choose seconds above 0, {_MAX_S:g} at most")
    return seconds
