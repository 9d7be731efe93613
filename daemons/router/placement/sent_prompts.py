"""Prompts that this router sent to a replica, where its cache is not reported, or not yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from radixmesh.daemons.router.placement.prefix_index import PrefixIndex


class SentPrompts:
    """The latest prefixes sent, least recently used first out: a guess at what the replica has cached."""

    def __init__(self, replica: int, index: PrefixIndex, *, max_keys: int) -> None:
        self._replica = replica
        self._index = index
        self._max_keys = max_keys
        self._sent: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, keys: Sequence[int], now: float) -> None:
        """A prompt with these prefixes, in ascending length, goes to the replica at that moment (monotonic seconds)."""
        keys = keys[: self._max_keys]
        new = [key for key in keys if key not in self._sent]
        # The shortest last: prefixes leave before those that they continue.
        for key in reversed(keys):
            self._sent[key] = now
            self._sent.move_to_end(key)
        self._index.add(self._replica, new)
        self._drop(len(self._sent) - self._max_keys)

    def forget_before(self, moment: float) -> None:
        """Prefixes last sent before that moment are forgotten."""
        count = 0
        for sent in self._sent.values():
            if sent >= moment:
                break
            count += 1
        self._drop(count)

    def resize(self, max_keys: int) -> None:
        """At most so many prefixes are kept from now on."""
        self._max_keys = max_keys
        self._drop(len(self._sent) - max_keys)

    def clear(self) -> None:
        """All are forgotten."""
        self._drop(len(self._sent))

    def _drop(self, count: int) -> None:
        if count > 0:
            self._index.remove(self._replica, [self._sent.popitem(last=False)[0] for _ in range(count)])
