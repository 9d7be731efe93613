"""Heartbeats of the ranks of a group: tells a rank that hangs from one that has nothing to do yet.

A rank may wait long in a collective for one that has not got its plan: a scheduler that died between two writes is
replaced first. So no time limit of a collective can tell that a rank hangs. Each rank counts up a number of its own in
the group's store, and reads those of the others.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PERIOD_S = 0.5
# Counted in rounds of this process, not in seconds: where the whole machine stands still, nobody has missed any.
MISSED_ROUNDS = 7


class Heartbeat:
    """The counts of all ranks, in a thread. `store`: a connection of its own, for the meeting alone."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._is_over = threading.Event()
        self.num_rounds = 0
        """Rounds that were completed here; stands still while the store does not answer."""
        self.lost = ""
        """The rank that is lost and why, in words; empty: none."""
        # No daemon thread: an interpreter that ended around a call of the store would be aborted. It ends with the main
        # thread.
        threading.Thread(target=self._run, name="group-heartbeat", daemon=False).start()

    def stop(self) -> None:
        """Ends the thread, soon."""
        self._is_over.set()

    def _run(self) -> None:
        try:
            self._beat()
        except RuntimeError as error:
            # Errors of a store are those of its connection, or of a rank that never wrote.
            if not self._is_over.is_set():
                self.lost = f"the group's store at rank 0 is gone: {str(error).splitlines()[0][:200]}"

    def _beat(self) -> None:
        keys = [f"alive/{other}" for other in self._others]
        seen: list[bytes] = [b""] * len(keys)
        missed = [0] * len(keys)
        self._store.set_timeout(timedelta(seconds=PERIOD_S * MISSED_ROUNDS))
        while not self._is_over.is_set() and threading.main_thread().is_alive():
            self._store.set(f"alive/{self._rank}", str(self.num_rounds))
            counts = self._store.multi_get(keys)
            for index, count in enumerate(counts):
                missed[index] = missed[index] + 1 if count == seen[index] else 0
                if missed[index] >= MISSED_ROUNDS:
                    self.lost = f"rank {self._others[index]} has been silent for {PERIOD_S * MISSED_ROUNDS:g} s"
                    return
            seen = counts
            self.num_rounds += 1
            self._is_over.wait(PERIOD_S)
