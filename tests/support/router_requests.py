"""Journalled requests for tests that need no mesh."""

from __future__ import annotations

from collections.abc import Sequence

from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.router.v1 import router_pb2


def new_request(
    request_id: str,
    delivery: Delivery,
    *,
    n: int = 1,
    max_tokens: int = 100,
    end_ids: Sequence[int] = (),
    resumption: int = 0,
    ids_only: bool = False,
) -> Request:
    """A request with a prompt of four tokens and n waiting outputs."""
    resolved = router_pb2.Resolved(
        request_id=request_id, model="m", prompt_ids=pack_ints([1, 2, 3, 4]), seeds=range(n), ids_only=ids_only
    )
    resolved.stop.max_tokens = max_tokens
    request = Request(
        resolved=resolved,
        resumption=resumption,
        deadline=None,
        num_prompt=4,
        end_ids=frozenset(end_ids),
        delivery=delivery,
    )
    request.outputs.extend(Output(request=request, index=index) for index in range(n))
    return request
