"""Journalled requests for tests that need no mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.intake.resolved import ResolvedRequest
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.router.served_identity import ServedIdentity
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.sampling import Sampling, Stop


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
    resolved = ResolvedRequest(
        request_id=request_id,
        model="m",
        model_identity=ServedIdentity(),
        prompt_ids=pack_ints([1, 2, 3, 4]),
        seeds=tuple(range(n)),
        sampling=Sampling(),
        stop=Stop(max_tokens=max_tokens),
        ids_only=ids_only,
    )
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


def change(request: Request, **fields: object) -> None:
    """Gives a request's resolved form other values; those of `sampling` and `stop` are fields of these."""
    options = {
        name: replace(getattr(request.resolved, name), **fields.pop(name))
        for name in ("sampling", "stop")
        if name in fields
    }  # type: ignore[arg-type]
    request.resolved = replace(request.resolved, **options, **fields)  # type: ignore[arg-type]
