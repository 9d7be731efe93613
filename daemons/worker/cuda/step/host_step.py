"""A step's lengths on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, empty_ints
from radixmesh.daemons.worker.cuda.attention.backend import HostStep
from radixmesh.daemons.worker.runner import DecodeRows, Segment

_NOTHING = empty_ints()


def host_step(rows: DecodeRows, segments: Sequence[Segment], num_rows: int, admissions: int = 0) -> HostStep:
    """Lengths of a step. `num_rows`: decode rows with padding."""
    if not segments:
        return HostStep(
            num_rows=num_rows,
            page_tables=rows.page_tables,
            admissions=admissions,
            decode_slots=rows.slots,
            decode_kv_lens=rows.positions + 1,
            chunk_slots=_NOTHING,
            chunk_lens=_NOTHING,
            chunk_kv_lens=_NOTHING,
        )
    return HostStep(
        num_rows=num_rows,
        page_tables=rows.page_tables,
        admissions=admissions,
        decode_slots=rows.slots,
        decode_kv_lens=rows.positions + 1,
        chunk_slots=_ints(segment.slot for segment in segments),
        chunk_lens=_ints(len(segment.ids) for segment in segments),
        chunk_kv_lens=_ints(segment.start + len(segment.ids) for segment in segments),
        chunk_pages=[segment.pages for segment in segments],
    )


def _ints(values: object) -> IntArray:
    return np.fromiter(values, np.int32)  # type: ignore[call-overload, no-any-return]
