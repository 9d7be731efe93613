"""Requests that follow a grammar wait until the workers have it; all others go on.

unknown --a request asks--> WANTED --the loop takes it--> PUTTING --all ranks have it--> READY
   ^                          ^                              |                             |
   |                          +--------- try again ----------+                             |
   +----------------------- a rank does not have it any more, or a new epoch --------------+
"""

from __future__ import annotations

from collections import OrderedDict

from radixmesh.daemons.scheduler.queue.grammars import Grammar
from radixmesh.daemons.scheduler.queue.queue import WaitingQueue
from radixmesh.daemons.scheduler.sequence import Sequence

# Hashes of what an epoch's workers have; one that is forgotten is put once more.
_MAX_READY = 4096


class GrammarGate:
    """Of one planner. No I/O: the loop puts what is wanted."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._ready: OrderedDict[str, None] = OrderedDict()
        self._wanted: OrderedDict[str, Grammar] = OrderedDict()
        self._waiting: dict[str, list[Sequence]] = {}

    def begin_epoch(self) -> None:
        """The workers have nothing yet; who waited is back in the queue."""
        self._ready.clear()
        self._wanted.clear()
        self._waiting.clear()

    def may_pass(self, sequence: Sequence) -> bool:
        """True for a request without a grammar, or whose grammar the workers have. Any other is parked."""
        grammar = sequence.submission.grammar
        if grammar is None:
            return True
        if grammar.hash in self._ready:
            self._ready.move_to_end(grammar.hash)
            return True
        waiting = self._waiting.get(grammar.hash)
        if waiting is None:
            waiting = self._waiting[grammar.hash] = []
            self._wanted[grammar.hash] = grammar
        if sequence not in waiting:
            waiting.append(sequence)
            self._queue.park(sequence)
        return False

    def take_wanted(self) -> list[Grammar]:
        """Grammars to be put; each is told once, until want() or a new epoch."""
        if not self._wanted:
            return []
        wanted = list(self._wanted.values())
        self._wanted.clear()
        return wanted

    def want(self, grammar: Grammar) -> None:
        """It could not be put for now."""
        if grammar.hash in self._waiting:
            self._wanted[grammar.hash] = grammar

    def ready(self, blob_hash: str) -> None:
        """All ranks have it: those that waited are unparked."""
        self._ready[blob_hash] = None
        while len(self._ready) > _MAX_READY:
            self._ready.popitem(last=False)
        for sequence in self._waiting.pop(blob_hash, ()):
            self._queue.unpark(sequence)

    def missed(self, blob_hash: str) -> None:
        """A rank does not have it any more."""
        self._ready.pop(blob_hash, None)

    def take_waiting(self, blob_hash: str) -> list[Sequence]:
        """Those that wait for a grammar that can never be put; they are back in the queue."""
        waiting = self._waiting.pop(blob_hash, [])
        for sequence in waiting:
            self._queue.unpark(sequence)
        return waiting
