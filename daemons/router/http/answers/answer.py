"""Whole answers: the requests run to their ends while the client waits."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from radixmesh.daemons.router.http.answers.collected import CollectedRequest, collect
from radixmesh.daemons.router.http.answers.request_group import RequestGroup
from radixmesh.daemons.router.http.context import HttpContext
from radixmesh.daemons.router.http.request_types.constraints import named_by
from radixmesh.daemons.router.http.server.client_watch import ClientWatch
from radixmesh.daemons.router.http.server.connection import connection_of
from radixmesh.router.v1 import router_pb2


async def run_whole(
    context: HttpContext,
    request: Request,
    requests: Sequence[router_pb2.GenerateRequest],
    *,
    constrained_by: str = "",
) -> list[CollectedRequest]:
    """The answers in the order of requests. Raises MeshError when one fails, ClientGone when nobody waits any more.

    constrained_by: as EventStream's.
    """
    async with ClientWatch(connection_of(request.scope)) as watch:
        group = RequestGroup(context.router, requests, watch.interrupt)
        try:
            with named_by(constrained_by):
                return await collect(group, len(requests))
        finally:
            group.close()
