"""The schedulers that sources name, kept in step with them while requests run.

A source that fails, or names nobody, keeps its last list: requests are worth more than tidiness. An address that no
source names any more gets nothing new; what runs there moves or ends, and then it is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from radixmesh.daemons.router.discovery.retirement import Retirement
from radixmesh.daemons.router.discovery.source import AddressSource, SourceError
from radixmesh.daemons.runtime.addresses import parse_address
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger

log = get_logger(__name__)

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 10.0
_MAX_ERROR_CHARS = 300


@dataclass(slots=True)
class SourceState:
    """addresses: of the last list that are in use. num_named: in that list. error: of the latest look, "" = none."""

    addresses: set[str] = field(default_factory=set)
    num_named: int = 0
    error: str = ""

    @property
    def num_ignored(self) -> int:
        """Named and not in use: no address, or too many."""
        return self.num_named - len(self.addresses)


class Discovery:
    """Follows sources by name. max_schedulers: that all of them together may bring."""

    def __init__(self, sources: Mapping[str, AddressSource], members: Retirement, *, max_schedulers: int) -> None:
        self.states: dict[str, SourceState] = {name: SourceState() for name in sources}
        self._sources = sources
        self._members = members
        self._max_schedulers = max_schedulers
        self._brought: set[str] = set()

    async def run(self) -> None:
        """Follows all sources for ever. Each has a task of its own: one that hangs holds up no other."""
        await asyncio.gather(*(self._follow(name, source) for name, source in self._sources.items()))

    def take(self, name: str, found: frozenset[str]) -> None:
        """A source's whole list."""
        state = self.states[name]
        if not found:
            # As a rule somebody is in the middle of writing it, or the only replica restarts.
            self._failed(state, name, "it names no address: the last list holds")
            return
        num_ignored = state.num_ignored
        state.error, state.num_named = "", len(found)
        others: set[str] = set().union(*(other.addresses for other in self.states.values() if other is not state))
        usable = {address for address in found if _is_address(address)}
        # Those that are in use stay: which of too many are served must not change from look to look.
        room = self._max_schedulers - len(others)
        kept = sorted(usable & state.addresses) + sorted(usable - state.addresses)
        own = [address for address in kept if address not in others][: max(0, room)]
        before, state.addresses = state.addresses, (usable & others) | set(own)
        for address in sorted(state.addresses - before - others):
            log.info("replica_found", source=name, address=address)
            if self._members.add(address):
                self._brought.add(address)
        # Those that were configured, or added by an operator, are not this one's to remove.
        for address in sorted((before - state.addresses - others) & self._brought):
            log.info("replica_gone", source=name, address=address)
            self._brought.discard(address)
            self._members.retire(address, moves_outputs=True)
        if state.num_ignored not in (0, num_ignored):
            log.warning("replicas_ignored", source=name, count=state.num_ignored, max=self._max_schedulers)

    async def _follow(self, name: str, source: AddressSource) -> None:
        pause_s = _MIN_PAUSE_S
        while True:
            try:
                async for found in source.watch():
                    self.take(name, found)
                    pause_s = _MIN_PAUSE_S
            except (OSError, SourceError) as error:
                self._failed(self.states[name], name, str(error) or type(error).__name__)
            except Exception as error:
                # Whatever a source stumbles over (a token with a line break, a name that is none): the router runs on.
                self._failed(self.states[name], name, f"{type(error).__name__}: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _failed(self, state: SourceState, name: str, error: str) -> None:
        error = error[:_MAX_ERROR_CHARS]
        if error != state.error:
            log.warning("discovery_failed", source=name, error=error, kept=len(state.addresses))
        state.error = error


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except (MeshError, ValueError):
        return False
    return True
