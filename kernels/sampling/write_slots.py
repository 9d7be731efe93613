"""Numbers of slots, in columns of their own types, written by records that the host sends: one launch for all of them.

S slots, N records, C columns.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from radixmesh.kernels.prepared_kernel import PreparedKernel

_WORD = 8
# Of a column in a record: of 4 bytes the low ones of a word.
_FORMATS = {torch.float64: "d", torch.int64: "q", torch.int32: "i4x", torch.float32: "f4x"}


@triton.jit(do_not_specialize=["columns", "records"])
def _write_slots_kernel(columns, records, C: tl.constexpr, BLOCK: tl.constexpr):
    record_ptr = records.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * (C + 1)
    at = tl.arange(0, BLOCK)
    slot = tl.load(record_ptr)
    words = tl.load(record_ptr + 1 + at, mask=at < C, other=0)
    columns_ptr = columns.to(tl.pointer_type(tl.int64))
    starts = tl.load(columns_ptr + at, mask=at < C, other=0)
    sizes = tl.load(columns_ptr + C + at, mask=at < C, other=0)
    places = starts + slot * sizes
    tl.store(places.to(tl.pointer_type(tl.int64)), words, mask=sizes == 8)
    tl.store(places.to(tl.pointer_type(tl.int32)), words.to(tl.int32), mask=sizes == 4)


class SlotColumns:
    """columns: [S] each, contiguous, float64, int64, int32 or float32, of one device; they outlive this."""

    def __init__(self, columns: Sequence[torch.Tensor]) -> None:
        for column in columns:
            assert column.dim() == 1 and column.is_contiguous() and column.dtype in _FORMATS, (
                column.dtype,
                column.shape,
            )
        self._record = struct.Struct("<q" + "".join(_FORMATS[column.dtype] for column in columns))
        assert self._record.size == _WORD * (len(columns) + 1), self._record.format
        table = [column.data_ptr() for column in columns], [column.element_size() for column in columns]
        self._columns_2C = torch.tensor(table, dtype=torch.int64).to(columns[0].device)
        count = len(columns)
        self._kernel = PreparedKernel(_write_slots_kernel, num_warps=1, C=count, BLOCK=triton.next_power_of_2(count))

    def record(self, slot: int, *values: float) -> bytes:
        """A slot's numbers, by the columns' order. Raises struct.error or OverflowError for what a column
        cannot hold."""
        return self._record.pack(slot, *values)

    def packed(self, records: Sequence[bytes]) -> npt.NDArray[np.int32]:
        """Records as they are sent, int32 [N x 2 (C + 1)]."""
        return np.frombuffer(b"".join(records), np.int32)

    def write(self, records: torch.Tensor) -> None:
        """records: as packed(), on the device of the columns, N > 0, of different slots. In order with the stream."""
        num_records, rest = divmod(records.numel() * records.element_size(), self._record.size)
        assert num_records and not rest and records.is_contiguous(), records.shape
        self._kernel.launch(num_records, 1, self._columns_2C.data_ptr(), records.data_ptr())
