"""Policies of placement: a seam with a registry. A policy looks at columns, a row for each replica."""

from __future__ import annotations

import bisect
import hashlib
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from radixmesh.daemons.router.placement.replicas import FloatColumn, IntColumn
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.placement_cost import placement_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Replicas that can take an output, in any order; every column has as many entries.

    rows: their numbers in `names`, the addresses of all replicas. matched_tokens: of the prompt, that the replica has
    cached as far as the router knows. load_tokens, slowness: see placement_costs(). Others: see Replicas.
    """

    names: Sequence[str]
    rows: IntColumn
    matched_tokens: IntColumn
    num_outputs: IntColumn
    queued_tokens: IntColumn
    free_tokens: IntColumn
    cached_tokens: IntColumn
    load_tokens: FloatColumn | None = None
    slowness: FloatColumn | None = None

    @property
    def addresses(self) -> list[str]:
        """Made anew by each call: most policies need none of them."""
        names = self.names
        return [names[row] for row in self.rows.tolist()]


class PlacementPolicy(ABC):
    """Chooses among candidates. Load is counted at selection: columns already include what was sent a moment ago."""

    needs_matches = False
    """True if the policy looks at matched_tokens, which are zero otherwise."""

    @abstractmethod
    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        """Index of the chosen one of the candidates, which are not empty, and not modified.

        num_tokens: of the prompt. first_key: equal for prompts with an equal first block. session: equal for requests
        of one conversation, 0 = of none.
        """


class RoundRobin(PlacementPolicy):
    """Each replica in turn."""

    def __init__(self) -> None:
        self._last = ""

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        # Turns go by address, not by position: one that comes or goes must not shift the turns of the others.
        addresses = candidates.addresses
        later = [address for address in addresses if address > self._last]
        self._last = min(later or addresses)
        return addresses.index(self._last)


class LeastLoad(PlacementPolicy):
    """The replica with the fewest outputs; the first of equals."""

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        return int(candidates.num_outputs.argmin())


class Random(PlacementPolicy):
    """Any replica."""

    def __init__(self) -> None:
        self._random = random.Random()

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        return self._random.randrange(len(candidates.rows))


class PowerOfTwo(Random):
    """The one with fewer outputs of two random ones (M. Mitzenmacher, "The power of two choices", 2001)."""

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        if len(candidates.rows) == 1:
            return 0
        one, other = self._random.sample(range(len(candidates.rows)), 2)
        return min(one, other, key=lambda index: int(candidates.num_outputs[index]))


class PrefixHash(PlacementPolicy):
    """Prompts with an equal first block go to one replica, unless it has much more than its share of the outputs.

    Consistent hashing with bounded loads (V. Mirrokni, M. Thorup and M. Zadimoghaddam, 2018): a replica takes at most
    1.25 times the mean; what is beyond goes to the next one on the ring.
    """

    _POINTS = 64
    _MOST_OF_MEAN = 1.25

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ring: list[tuple[int, int]] = []

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        names = tuple(candidates.addresses)
        if names != self._names:
            self._names, self._ring = (
                names,
                sorted(
                    (_point(f"{name}/{number}"), index)
                    for index, name in enumerate(names)
                    for number in range(self._POINTS)
                ),
            )
        loads = candidates.num_outputs
        most = self._MOST_OF_MEAN * (int(loads.sum()) + 1) / len(names)
        first = bisect.bisect_left(self._ring, (first_key, 0))
        for step in range(len(self._ring)):
            index = self._ring[(first + step) % len(self._ring)][1]
            if loads[index] + 1 <= most:
                return index
        return int(loads.argmin())


class CacheThreshold(PlacementPolicy):
    """SGLang's gateway: the longest match if it is more than half the prompt and loads are even, else the least loaded
    replica, or the one with the smallest cache where nobody knows the prompt.

    Source: the "cache-aware" policy of sgl-model-gateway; its defaults.
    """

    needs_matches = True
    _CACHE_SHARE = 0.5
    _BALANCE_OUTPUTS = 32
    _BALANCE_RATIO = 1.1

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        loads = candidates.num_outputs
        most, least = int(loads.max()), int(loads.min())
        if most - least > self._BALANCE_OUTPUTS and most > self._BALANCE_RATIO * least:
            return int(loads.argmin())
        near: FloatColumn | IntColumn = candidates.matched_tokens
        if candidates.load_tokens is not None:
            near = near - candidates.load_tokens
        # Replicas that share a store have equal matches there.
        longest = np.flatnonzero(near == near.max())
        best = int(longest[loads[longest].argmin()])
        if candidates.matched_tokens[best] > self._CACHE_SHARE * num_tokens:
            return best
        # The gateway counts a prompt when it is sent; here cached_tokens are of the last load.
        return int((candidates.cached_tokens + candidates.queued_tokens).argmin())


class CacheAware(PlacementPolicy):
    """The replica where the output costs least time, its own and that of others: see placement_cost.py."""

    needs_matches = True

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        costs = placement_costs(
            num_tokens,
            matched_tokens=candidates.matched_tokens,
            queued_tokens=candidates.queued_tokens,
            free_tokens=candidates.free_tokens,
            num_outputs=candidates.num_outputs,
            load_tokens=candidates.load_tokens,
            slowness=candidates.slowness,
        )
        return int(costs.argmin())


class Session(CacheAware):
    """Requests of one session go to one replica. The first one, any without a session, and those whose replica is gone
    or full go where cache_aware places them, and the session follows.

    Several routers need no talk: one that meets a session for the first time finds its prefix where the others left it.
    The sessions that were least recently seen are forgotten beyond MAX_SESSIONS.
    """

    MAX_SESSIONS = 65_536

    def __init__(self) -> None:
        self._homes: OrderedDict[int, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def pick(self, num_tokens: int, first_key: int, candidates: Candidates, session: int = 0) -> int:
        home, names = self._homes.get(session), candidates.names
        if home is not None:
            found = next((index for index, row in enumerate(candidates.rows.tolist()) if names[row] == home), None)
            if found is not None:
                self._homes.move_to_end(session)
                return found
        index = super().pick(num_tokens, first_key, candidates)
        if session:
            self._homes[session] = names[int(candidates.rows[index])]
            self._homes.move_to_end(session)
            if len(self._homes) > self.MAX_SESSIONS:
                self._homes.popitem(last=False)
        return index


POLICIES: Mapping[str, Callable[[], PlacementPolicy]] = {
    "cache_aware": CacheAware,
    "cache_threshold": CacheThreshold,
    "least_load": LeastLoad,
    "power_of_two": PowerOfTwo,
    "prefix_hash": PrefixHash,
    "random": Random,
    "round_robin": RoundRobin,
    "session": Session,
}


def make_policy(name: str) -> PlacementPolicy:
    """The policy of that name. Raises INVALID_ARGUMENT, naming those there are."""
    creator = POLICIES.get(name)
    if creator is None:
        message = f"there is no routing policy {name!r}: choose one of {', '.join(sorted(POLICIES))}"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": "policy"})
    return creator()


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
