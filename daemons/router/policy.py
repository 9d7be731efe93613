"""Which scheduler gets a request: a seam with a registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A scheduler that can take the request. num_outstanding: outputs running or waiting there, those sent since its
    last Load included."""

    address: str
    num_outstanding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """What a policy may look at. prompt_ids: little-endian int32 bytes."""

    request_id: str
    prompt_ids: bytes
    cache_salt: str


class RoutingPolicy(ABC):
    """Chooses among candidates. Load is counted at selection: candidates already include what was sent a moment ago."""

    @abstractmethod
    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
        """Index of the chosen one of candidates, which are not empty, in the order of adding, and not modified."""


class RoundRobin(RoutingPolicy):
    """Each scheduler in turn."""

    def __init__(self) -> None:
        self._last = ""

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
        # Turns go by address, not by position: one that comes or goes must not shift the turns of the others.
        addresses = [candidate.address for candidate in candidates]
        later = [address for address in addresses if address > self._last]
        self._last = min(later or addresses)
        return addresses.index(self._last)


class LeastLoad(RoutingPolicy):
    """The scheduler with the fewest outstanding outputs; the first of equals."""

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> int:
        return min(range(len(candidates)), key=lambda i: candidates[i].num_outstanding)


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {"round_robin": RoundRobin, "least_load": LeastLoad}


def make_policy(name: str) -> RoutingPolicy:
    """The policy of that name. Raises INVALID_ARGUMENT, naming those there are."""
    creator = POLICIES.get(name)
    if creator is None:
        message = f"there is no routing policy {name!r}: choose one of {', '.join(sorted(POLICIES))}"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "policy"})
    return creator()
