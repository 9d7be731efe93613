"""Keys of a step's sequences as kernels want them that read compressed lists of pages.

Such kernels (FlashInfer's; Ye et al. 2025, arXiv:2501.01005) take the pages of row i from page_list[starts[i] :], and
its length from where the next row starts:

    length(i) = (starts[i + 1] - starts[i] - 1) * page_size + last_lens[i]        in 32-bit modular arithmetic

Here the list is the page table of all slots as it lies on the device, [slots + 1, max_pages], row after row: nothing is
gathered, and pages that the table gains after planning are seen. starts[i] = slot * max_pages; since the next row does
not begin where this one ends, last_lens[i] makes up the difference, negative or not. The last entry of `starts` is the
end of the table, up to which a kernel may read page numbers (not pages). Rows of one slot after another would have
length 0: padding rows, all of the dummy slot, start at different pages of its part of the table, which holds the dummy
page everywhere.

Lengths are exact: kernels compute a row's number of splits from its length again, and it must be what was planned.
"""

from __future__ import annotations

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.step.inputs.pinned_ring import PinnedRing

_INT32_LIMIT = 2**31


class PagedRows:
    """Rows of one step, on the host and on the device, at addresses that depend on their number alone.

    page_tables: int32 [slots + 1, max_pages] on the device; the last slot is the dummy. Attributes (int32; all but the
    last three on the host): `query_starts` [rows + 1], the rows' own queries; `page_counts` [rows + 1], a running sum
    of pages; `starts_host` [rows + 1]; `lengths` [rows]; `num_queries`; `query_starts_device`, `starts`, `last_lens`.
    """

    def __init__(self, page_tables: torch.Tensor, page_size: int, max_rows: int) -> None:
        num_slots, max_pages = page_tables.shape
        if num_slots * max_pages * page_size >= _INT32_LIMIT:
            raise ValueError(
                f"{num_slots} slots x {max_pages} pages of {page_size} tokens pass 2^31 positions: "
                "run fewer slots or shorter contexts"
            )
        self.page_list = page_tables.view(-1)
        self._page_size = page_size
        self._table_shape = (num_slots, max_pages)
        self._device_ints = torch.zeros(3 * max_rows + 2, dtype=torch.int32, device=page_tables.device)
        self._pinned = PinnedRing(4 * (3 * max_rows + 2))
        self._max_rows = max_rows

    def place(
        self, slots: IntArray, query_lens: IntArray, lengths: IntArray, skipped_pages: IntArray | None = None
    ) -> None:
        """Takes the rows of a step; the copy to the device goes to the current stream.

        slots, query_lens, lengths [rows]: a row's last `query_lens` of `lengths` tokens are its queries.
        skipped_pages [rows]: pages of each slot that its row does not see; `lengths` counts from after them.
        """
        rows = len(slots)
        assert 0 < rows <= self._max_rows, (rows, self._max_rows)
        starts, last_lens = row_positions(slots, lengths, self._table_shape, self._page_size, skipped_pages)
        query_starts = _running_sum(query_lens)
        packed = self._pinned.take()[: 4 * (3 * rows + 2)].view(torch.int32)
        ints = packed.numpy()
        ints[: rows + 1] = starts
        ints[rows + 1 : 2 * rows + 1] = last_lens
        ints[2 * rows + 1 :] = query_starts
        on_device = self._device_ints[: 3 * rows + 2]
        on_device.copy_(packed, non_blocking=True)
        self._pinned.fence()
        self.num_queries = int(query_starts[rows])
        self.query_starts = torch.from_numpy(query_starts)
        self.page_counts = torch.from_numpy(_running_sum(-(-lengths // self._page_size)))
        self.starts_host = torch.from_numpy(starts)
        self.lengths = torch.from_numpy(np.ascontiguousarray(lengths, np.int32))
        self.starts = on_device[: rows + 1]
        self.last_lens = on_device[rows + 1 : 2 * rows + 1]
        self.query_starts_device = on_device[2 * rows + 1 :]

    def __len__(self) -> int:
        return len(self.lengths)


def row_positions(
    slots: IntArray,
    lengths: IntArray,
    table_shape: tuple[int, int],
    page_size: int,
    skipped_pages: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """`starts` [rows + 1] and `last_lens` [rows], int32, as the module says. table_shape: (slots + 1, max_pages)."""
    num_slots, max_pages = table_shape
    rows = len(slots)
    starts = np.empty(rows + 1, np.int32)
    np.multiply(slots, max_pages, out=starts[:rows])
    if skipped_pages is not None:
        starts[:rows] += skipped_pages
    starts[rows] = num_slots * max_pages
    is_padding = slots == num_slots - 1
    if is_padding.any():
        starts[:rows] += np.where(is_padding, np.arange(rows) % max_pages, 0).astype(np.int32)
    last_lens: IntArray = lengths - (np.diff(starts) - 1) * page_size
    return starts, last_lens


def _running_sum(counts: IntArray) -> IntArray:
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
