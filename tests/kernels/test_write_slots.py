"""Numbers of slots that are written together, against plain assignments."""

from __future__ import annotations

import struct

import pytest
import torch

from radixmesh.kernels.sampling.write_slots import SlotColumns

_DTYPES = (torch.float64, torch.int64, torch.int32, torch.float32, torch.int32)
_RECORDS = {
    3: (0.1, -(1 << 63), -1, 0.30000001192092896, (1 << 31) - 1),
    0: (float("inf"), (1 << 63) - 1, -(1 << 31), -0.0, 0),
    6: (-1e-300, 1 << 40, 7, 1.5, 5),
}


@pytest.mark.parametrize("slots", [[3], [6, 0, 3]])
def test_slots_get_their_records_and_others_stay(slots: list[int], device: torch.device) -> None:
    """Twice: by the JIT's launch, and of the kernel that it found."""
    columns = [torch.full((7,), 9, dtype=dtype, device=device) for dtype in _DTYPES]
    expected = [column.clone() for column in columns]
    for slot in slots:
        for column, value in zip(expected, _RECORDS[slot], strict=True):
            column[slot] = value
    written = SlotColumns(columns)
    for _ in range(2):
        for column in columns:
            column.fill_(9)
        packed = written.packed([written.record(slot, *_RECORDS[slot]) for slot in slots])
        written.write(torch.from_numpy(packed.copy()).to(device))
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(columns, expected, strict=True)
        )


def test_what_a_column_cannot_hold_is_refused(device: torch.device) -> None:
    written = SlotColumns([torch.zeros(2, dtype=torch.int32, device=device)])
    with pytest.raises(struct.error):
        written.record(0, 1 << 31)
