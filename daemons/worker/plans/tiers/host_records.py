"""Page records of host memory, and what of them is committed in a segment that outlives the worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.page_records import PageRecordTable

_log = get_logger(__name__)

# Weights that were loaded when the worker started; the segment's identity says which.
_FIRST_WEIGHTS = 1


class HostRecords(PageRecordTable):
    """segment: of the same pages, opened; None: they die with the worker. What is committed there is taken over."""

    def __init__(self, limits: Limits, segment: HostSegment | None = None) -> None:
        super().__init__(limits)
        self._segment = segment
        if segment is not None:
            self._take_over(segment)

    def grant(
        self,
        pages: IntArray,
        counts: npt.NDArray[np.int_],
        *,
        previous_pages: IntArray,
        namespaces: Sequence[str],
        weights_version: int,
    ) -> None:
        if self._segment is not None:
            self._segment.uncommit(pages)
        super().grant(
            pages, counts, previous_pages=previous_pages, namespaces=namespaces, weights_version=weights_version
        )

    def flush(self) -> None:
        if self._segment is not None:
            self._segment.clear()
        super().flush()

    def reset(self) -> None:
        """A segment's pages stay, as in a new process: they are this rank's share whichever group it is in."""
        if self._segment is None:
            super().reset()
        else:
            self._take_over(self._segment)

    def commit(self, pages: IntArray, generations: IntArray) -> None:
        """The bytes of these pages are complete, as far as they still have these generations."""
        if self._segment is None:
            return
        pages = pages[(self.generations[pages] == generations) & (self.weights_versions[pages] == _FIRST_WEIGHTS)]
        self._segment.commit(
            pages,
            ids=self.ids[pages],
            generations=self.generations[pages],
            previous_pages=self.previous_pages[pages],
            previous_generations=self.previous_generations[pages],
            name_indexes=self.namespace_indexes[pages],
            names=self.namespaces,
        )

    def _take_over(self, segment: HostSegment) -> None:
        """Records of what is committed; generations count from 0 again, so that ranks of a group agree in them."""
        found = segment.committed()
        super().reset()  # Clears the segment too: its generations are others from now on.
        pages = found.pages
        self._intern(set(found.names))
        self.ids[pages], self.filled[pages] = found.ids, self._page_size
        self.previous_pages[pages] = found.previous_pages
        indexes = as_ints([self._namespaces[name] for name in found.names])
        self.namespace_indexes[pages] = indexes[found.name_indexes] if len(pages) else 0
        self.weights_versions[pages] = _FIRST_WEIGHTS
        self.commit(pages, self.generations[pages])
        _log.info("host_kv_adopted", pages=len(pages), dropped=segment.num_dropped)
