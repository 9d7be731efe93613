"""/mesh: what the page's live view shows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from radixmesh.daemons.router.http.answers.mesh_summary import limited_summary, mesh_summary
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.server.key_check import is_anonymous
from radixmesh.daemons.runtime.rpc.caller import current_caller

_MAX_AGE_S = 0.5
_MAX_KEPT = 32
_HEADERS = {"cache-control": "no-store"}


class MeshEndpoint:
    """GET: the mesh at this moment, made at most twice a second however many readers there are.

    Without a key, where one is asked for: status and version. clock: monotonic seconds.
    """

    def __init__(self, context: HttpContext, clock: Callable[[], float] = time.monotonic) -> None:
        self._context = context
        self._clock = clock
        self.kept: dict[str | None, tuple[float, bytes]] = {}

    async def __call__(self, request: Request) -> Response:
        if is_anonymous(request.scope):
            body = json.dumps(limited_summary(self._context)).encode()
        else:
            body = self.body_for(current_caller().tenant)
        return Response(body, media_type="application/json", headers=_HEADERS)

    def body_for(self, tenant: str | None) -> bytes:
        """The answer for callers of that tenant; the one of 0.5 s ago if there is one."""
        now = self._clock()
        made, body = self.kept.get(tenant, (0.0, b""))
        if body and now - made < _MAX_AGE_S:
            return body
        self.kept = {key: entry for key, entry in self.kept.items() if now - entry[0] < _MAX_AGE_S}
        if len(self.kept) >= _MAX_KEPT:
            self.kept.pop(next(iter(self.kept)))
        body = json.dumps(mesh_summary(self._context, tenant=tenant), separators=(",", ":")).encode()
        self.kept[tenant] = (now, body)
        return body
