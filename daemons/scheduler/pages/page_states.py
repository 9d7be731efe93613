"""States of a KV page and the transitions between them, with the one function that makes each.

  FREE --take--> OWNED --cache--> CACHED --evict--> FREE        OWNED --give_back--> FREE
  FREE --adopt--> CACHED                                        records of a worker that survived its scheduler
  FREE --lease_pinned--> LEASED --end_lease--> FREE             a transfer that outlived its scheduler still uses it
  OWNED, CACHED --lease--> LEASED                               the slot is left while its KV is being sent
  FREE --load--> LOADING --end_load--> CACHED                   the page is being filled by a transfer, or from the host
                 LOADING --drop_load--> FREE                    it did not come, or the cache has it by now
  any --quarantine--> QUARANTINED                               until the next epoch

A page that is saved to the host stays as it is, and may be granted anew at once: a worker reads it before anything that
is planned later can write there. The host's own pages are FREE or cached (tiers/host_pages.py).

A page of a running slot that only shares it is CACHED: the slot locks it in the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class PageState(IntEnum):
    FREE = 0
    CACHED = 1
    OWNED = 2
    LEASED = 3
    QUARANTINED = 4
    LOADING = 5


@dataclass(frozen=True, slots=True)
class Transition:
    """A move of pages. owner: the only function of the scheduler that makes it, as Class.function; empty = none yet.

    sources and target are plain ints: looking up a member of an enum costs more than the move itself.
    """

    sources: tuple[int, ...]
    target: int
    owner: str = ""


_FREE, _CACHED, _OWNED, _LEASED, _QUARANTINED, _LOADING = (int(state) for state in PageState)

# By the name of the PagePool method that makes the move.
TRANSITIONS: dict[str, Transition] = {
    "take": Transition((_FREE,), _OWNED, "SlotPages.grant"),
    "give_back": Transition((_OWNED,), _FREE, "SlotPages.leave"),
    "cache": Transition((_OWNED,), _CACHED, "SlotPages._insert"),
    "evict": Transition((_CACHED,), _FREE, "SlotPages._evict"),
    "adopt": Transition((_FREE,), _CACHED, "SlotPages.adopt"),
    "lease": Transition((_OWNED, _CACHED), _LEASED, "SlotPages.lend"),
    "lease_pinned": Transition((_FREE,), _LEASED, "SlotPages.adopt"),
    "end_lease": Transition((_LEASED,), _FREE, "SlotPages.end_lease"),
    "load": Transition((_FREE,), _LOADING, "SlotPages.begin_load"),
    "end_load": Transition((_LOADING,), _CACHED, "SlotPages.end_load"),
    "drop_load": Transition((_LOADING,), _FREE, "SlotPages.drop_load"),
    "quarantine": Transition(tuple(int(state) for state in PageState), _QUARANTINED, "quarantine"),
}
