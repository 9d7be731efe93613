"""Page records: what each KV page holds, kept in step order with the KV writes, so that a new scheduler can adopt it.

A grant empties a page's record and bumps its generation; completed steps extend it; a flush empties all. A chain of
pages counts only while each page's `previous_generation` is still the generation of its `previous_page`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.runtime.steps.step import PageRecords
from radixmesh.daemons.worker.limits import Limits

# Tokens in one range of a snapshot: a few megabytes a message.
_RANGE_TOKENS = 262_144
_MIN_NAMESPACES = 1024


class PageRecordTable:
    """Records of all pages, int32 [num_pages]; `ids` int32 [num_pages, page_size], the first `filled` count."""

    def __init__(self, limits: Limits) -> None:
        num = limits.num_pages
        self._page_size = limits.page_size
        self.generations = np.zeros(num, np.int32)
        self.filled = np.zeros(num, np.int32)
        self.previous_pages = np.full(num, -1, np.int32)
        self.previous_generations = np.zeros(num, np.int32)
        self.namespace_indexes = np.zeros(num, np.int32)
        self.weights_versions = np.zeros(num, np.int32)
        self.ids = np.zeros((num, limits.page_size), np.int32)
        self._namespaces: dict[str, int] = {"": 0}
        self._compact_at = _MIN_NAMESPACES

    @property
    def namespaces(self) -> tuple[str, ...]:
        """All namespaces, by index."""
        return tuple(self._namespaces)

    def namespace_index(self, namespace: str) -> int:
        """Index of a namespace, -1 if no page ever was in it."""
        return self._namespaces.get(namespace, -1)

    def grant(
        self,
        pages: IntArray,
        counts: npt.NDArray[np.int_],
        *,
        previous_pages: IntArray,
        namespaces: Sequence[str],
        weights_version: int,
    ) -> None:
        """Empties the records of `pages` (each once) and chains them, grant after grant of `counts` pages.

        Per grant: `previous_pages`, what its first page is chained to (-1: a sequence starts), and `namespaces`.
        """
        firsts = np.cumsum(counts) - counts
        previous = np.empty_like(pages)
        previous[1:] = pages[:-1]
        previous[firsts] = previous_pages
        self.filled[pages] = 0
        self.generations[pages] += 1
        self.previous_pages[pages] = previous
        self.previous_generations[pages] = np.where(previous >= 0, self.generations[previous], 0)
        self.weights_versions[pages] = weights_version
        # The pages are empty before their namespaces are interned: making room may renumber those of all pages.
        self.namespace_indexes[pages] = 0
        self._intern(set(namespaces))
        self.namespace_indexes[pages] = np.repeat([self._namespaces[namespace] for namespace in namespaces], counts)

    def extend(self, pages: IntArray, offsets: IntArray, ids: IntArray) -> None:
        """Tokens `ids` were written at `offsets` of `pages` (arrays of one length, offsets of a page ascending)."""
        self.ids[pages, offsets] = ids
        # With repeated pages the last assignment stays: the highest offset.
        self.filled[pages] = offsets + 1

    def extend_page(self, page: int, offset: int, ids: IntArray) -> None:
        """Tokens `ids` were written from `offset` on."""
        end = offset + len(ids)
        self.ids[page, offset:end] = ids
        self.filled[page] = end

    def extend_if(self, pages: IntArray, generations: IntArray, offsets: IntArray, ids: IntArray) -> None:
        """As extend(), for those pages that still have the generation that the writing step saw."""
        is_same = self.generations[pages] == generations
        if is_same.all():
            self.extend(pages, offsets, ids)
        else:
            self.extend(pages[is_same], offsets[is_same], ids[is_same])

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """The first `num_tokens` of `source` were copied to `target`."""
        self.ids[target, :num_tokens] = self.ids[source, :num_tokens]
        self.filled[target] = num_tokens

    def reset(self) -> None:
        """As in a new process: every rank of a new group starts from equal records."""
        self.flush()
        self.generations[:] = 0
        self._namespaces = {"": 0}

    def flush(self) -> None:
        """Empties every record and bumps its generation."""
        self.filled[:] = 0
        self.generations += 1
        self.previous_pages[:] = -1
        self.previous_generations[:] = 0
        self.namespace_indexes[:] = 0
        self._namespaces = {"": 0}
        self._compact_at = _MIN_NAMESPACES

    def snapshot(self) -> Iterator[PageRecords]:
        """All records in ascending ranges: copies, not views."""
        num_pages = len(self.generations)
        step = max(1, _RANGE_TOKENS // self._page_size)
        for first in range(0, num_pages, step):
            yield self._range(first, min(num_pages, first + step))

    def _range(self, first: int, end: int) -> PageRecords:
        part = slice(first, end)
        filled = self.filled[part].copy()
        is_filled = np.arange(self._page_size, dtype=np.int32) < filled[:, None]
        return PageRecords(
            first_page=first,
            generations=self.generations[part].copy(),
            filled=filled,
            previous_pages=self.previous_pages[part].copy(),
            previous_generations=self.previous_generations[part].copy(),
            namespace_indexes=self.namespace_indexes[part].copy(),
            weights_versions=self.weights_versions[part].copy(),
            ids=self.ids[part][is_filled],
        )

    def _intern(self, namespaces: Set[str]) -> None:
        """Gives each an index."""
        if namespaces <= self._namespaces.keys():
            return
        if len(self._namespaces) >= self._compact_at:
            self._compact()
        for namespace in namespaces - self._namespaces.keys():
            self._namespaces[namespace] = len(self._namespaces)

    def _compact(self) -> None:
        """Forgets namespaces that no page is in: salts come from users and would grow without end."""
        names = list(self._namespaces)
        used = np.union1d(self.namespace_indexes, [0])
        renumbered = np.zeros(len(names), np.int32)
        renumbered[used] = np.arange(len(used), dtype=np.int32)
        self.namespace_indexes = renumbered[self.namespace_indexes]
        self._namespaces = {names[int(old)]: new for new, old in enumerate(used)}
        self._compact_at = max(_MIN_NAMESPACES, 2 * len(used))
