"""Deadlines of requests: for all of a request, and for the first token of each output."""

from __future__ import annotations

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.errors import MeshError


class Deadlines:
    """Of all journalled requests. Wherever an output is when its time is over, it ends there."""

    def __init__(self) -> None:
        self._whole: dict[Request, float] = {}
        self._first_token: dict[Request, float] = {}

    def add(self, request: Request) -> None:
        """A request begins."""
        if request.deadline is not None:
            self._whole[request] = request.deadline
        if request.ttft_deadline is not None:
            self._first_token[request] = request.ttft_deadline

    def drop(self, request: Request) -> None:
        """The request is over. Idempotent."""
        self._whole.pop(request, None)
        self._first_token.pop(request, None)

    def passed(self, now: float) -> list[tuple[Output, MeshError]]:
        """Outputs whose time has passed since the last call, with the errors to end them with."""
        late: list[tuple[Output, MeshError]] = []
        for request in [request for request, deadline in self._whole.items() if now >= deadline]:
            del self._whole[request]
            late += _ended(request.outputs, "the request's deadline_ms passed: what there was has been delivered")
        for request in [request for request, deadline in self._first_token.items() if now >= deadline]:
            del self._first_token[request]
            waiting = [output for output in request.outputs if not output.ids]
            late += _ended(waiting, "no token came before the request's ttft_deadline_ms passed: retry later")
        return late


def _ended(outputs: list[Output], message: str) -> list[tuple[Output, MeshError]]:
    return [(output, MeshError(ErrorReason.ERROR_REASON_DEADLINE_EXCEEDED, message)) for output in outputs]
