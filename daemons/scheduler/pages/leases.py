"""Pages that transfers of former schedulers use, by transfer id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from radixmesh.daemons.runtime.arrays import IntArray, as_ints, empty_ints


class Leases:
    """held: pages by transfer id; two transfers may hold one page."""

    def __init__(self, held: Mapping[str, Iterable[int]]) -> None:
        self._held = {name: set(pages) for name, pages in held.items()}

    def __len__(self) -> int:
        return len(self._held)

    def end(self, transfer_ids: Iterable[str]) -> IntArray:
        """Pages, int32, that no transfer holds once these are over. Unknown ids are fine."""
        freed: set[int] = set()
        for name in transfer_ids:
            freed |= self._held.pop(name, set())
        if not freed:
            return empty_ints()
        return as_ints(sorted(freed.difference(*self._held.values())))
