"""The schedulers that can run an output: of its model, and large enough for all of it."""

from __future__ import annotations

from collections.abc import Sequence

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.peers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.errors import MeshError


def fitting(links: Sequence[SchedulerLink], request: Request) -> list[SchedulerLink]:
    """Those that hold prompt and whole output, those included that are away at the moment."""
    return [link for link in _same_model(links, request) if link.max_request_len >= request.max_total_len]


def candidates(links: Sequence[SchedulerLink], request: Request) -> list[SchedulerLink]:
    """As fitting(); where no KV memory is large enough all with the context: their refusal says how much there is.

    A shorter context is never a choice: it would end the output too early, as if that had been asked for.
    """
    return fitting(links, request) or [
        link for link in _same_model(links, request) if link.max_total_len >= request.max_total_len
    ]


def able(links: Sequence[SchedulerLink], output: Output, now: float) -> list[SchedulerLink]:
    """Candidates that take submits now; those whose group serves, if there are any; none that has just refused it."""
    open_links = [link for link in candidates(links, output.request) if link.takes_submits]
    serving = [link for link in open_links if link.is_group_serving]
    return [link for link in serving or open_links if output.backoff_until.get(link.address, 0.0) <= now]


def nobody(links: Sequence[SchedulerLink], output: Output, wait_s: float) -> MeshError:
    """The error of an output that has waited for wait_s."""
    request = output.request
    wanted = f"model {request.resolved.model!r}"
    if not candidates(links, request):
        wanted += f" and {request.max_total_len} tokens"
    message = f"no scheduler could take {wanted} for {wait_s:g} s: retry, with resume to continue"
    return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "scheduler"})


def _same_model(links: Sequence[SchedulerLink], request: Request) -> list[SchedulerLink]:
    model, identity = request.resolved.model, request.resolved.model_identity
    return [link for link in links if link.serves(model, identity)]
