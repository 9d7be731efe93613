"""The schedulers that can run an output: of its model, and large enough for all of it."""

from __future__ import annotations

from collections.abc import Sequence

from radixmesh.daemons.router.peers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.requests.journal import Output, Request
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError


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
    """Candidates that take submits now; those whose group serves, if there are any; none that has just refused it.

    Those in trouble, or in a slow start with their share already, are passed over while there are others.
    """
    open_links = [link for link in candidates(links, output.request) if link.takes_submits]
    serving = [link for link in open_links if link.is_group_serving]
    return _trusted([link for link in serving or open_links if output.backoff_until.get(link.address, 0.0) <= now])


def nobody(links: Sequence[SchedulerLink], output: Output, wait_s: float) -> MeshError:
    """The error of an output that has waited for wait_s."""
    request = output.request
    wanted = f"model {request.resolved.model!r}"
    if not candidates(links, request):
        wanted += f" and {request.max_total_len} tokens"
    message = f"no scheduler could take {wanted} for {wait_s:g} s: retry, with resume to continue"
    return MeshError(ErrorReason.ERROR_REASON_NO_REPLICA, message, {"daemon": "scheduler"})


def _trusted(links: list[SchedulerLink]) -> list[SchedulerLink]:
    if len(links) < 2:
        return links
    sound = [link for link in links if not link.health.is_passed_over]
    shares = [link.health.share for link in sound]
    if any(share < 1.0 for share in shares):
        mean = sum(link.num_running for link in sound) / len(sound)
        sound = [
            link
            for link, share in zip(sound, shares, strict=True)
            if share >= 1.0 or link.num_running < 1 + share * mean
        ]
    return sound or links


def _same_model(links: Sequence[SchedulerLink], request: Request) -> list[SchedulerLink]:
    model, identity = request.resolved.model, request.resolved.model_identity
    return [link for link in links if link.serves(model, identity)]
