"""Entries that fail: their error reaches the reader once, and nothing of the ids that were sent is kept."""

from __future__ import annotations

import asyncio
import sys

from support.small_tokenizers import byte_level, vocabulary_of

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.detokenizer.outbox import Outbox
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, OpenEntry, TextDelta, TokenBatch
from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.frames import MAX_FRAME_ENTRIES

VOCABULARY = vocabulary_of(byte_level())


def test_a_failure_that_waits_to_be_read_holds_no_ids() -> None:
    """Frames of the error's traceback would: 32 opens of a million ids each were 1.5 GiB."""
    table = DecoderTable(family_of(VOCABULARY), VOCABULARY.vocab_size, Limits(), EntryBudget(8))
    ids = [VOCABULARY.vocab_size] * 1000
    num_references = sys.getrefcount(ids)
    failure = table.open(OpenEntry(handle=1, output_ids=ids))
    assert isinstance(failure, EntryFailure) and failure.error.reason_name == "TOKEN_OUT_OF_VOCABULARY"
    assert sys.getrefcount(ids) == num_references
    assert table.open(OpenEntry(handle=2)) is None
    batch = TokenBatch(
        handles=[2], first_indexes=[0], counts=[1000], finals=b"\x00", ids=ids, min_id=0, max_id=VOCABULARY.vocab_size
    )
    _, failures = table.push(batch)
    assert len(failures) == 1 and sys.getrefcount(ids) == num_references + 1, "the batch's own"


async def test_a_reader_that_waits_is_woken_and_waits_again() -> None:
    outbox = Outbox(1000)
    for number in range(2):
        reading = asyncio.ensure_future(outbox.take())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not reading.done(), "nothing is due"
        outbox.put([], [_failure(number)])
        async with asyncio.timeout(30):
            pending = await reading
        assert pending is not None and [failure.handle for failure in pending.failures] == [number]


async def test_failures_of_many_frames_come_after_all_deltas_each_once() -> None:
    outbox = Outbox(1 << 30)
    num = 2 * MAX_FRAME_ENTRIES + 10
    outbox.put([TextDelta(handle, 0, "x", 1, None, False) for handle in range(num)], [])
    outbox.put([], [_failure(handle) for handle in range(num)])
    outbox.close()
    deltas: list[int] = []
    failures: list[int] = []
    while (pending := await outbox.take()) is not None:
        assert 0 < len(pending.deltas) + len(pending.failures) <= MAX_FRAME_ENTRIES
        assert not pending.failures or len(deltas) + len(pending.deltas) == num
        deltas += [delta.handle for delta in pending.deltas]
        failures += [failure.handle for failure in pending.failures]
    assert deltas == failures == list(range(num))


def test_an_entry_with_a_gap_is_dropped_and_an_unknown_one_is_named() -> None:
    budget = EntryBudget(1)
    table = DecoderTable(family_of(VOCABULARY), VOCABULARY.vocab_size, Limits(), budget)
    assert table.open(OpenEntry(handle=1)) is None and budget.num_entries == 1
    rows = {"handles": [1, 9], "first_indexes": [5, 0], "counts": [1, 1], "finals": b"\0\0", "ids": [3, 3]}
    batch = TokenBatch(**rows, min_id=3, max_id=3)  # type: ignore[arg-type]
    deltas, failures = table.push(batch)
    assert not deltas and [(failure.handle, failure.is_lost, failure.error.reason_name) for failure in failures] == [
        (1, True, "PROTOCOL_VIOLATION"),
        (9, True, "UNKNOWN_REQUEST"),
    ]
    assert budget.num_entries == 0 and len(table) == 0
    assert table.open(OpenEntry(handle=2)) is None


def _failure(handle: int) -> EntryFailure:
    return EntryFailure(handle, False, MeshError(ErrorReason.ERROR_REASON_OVERLOADED, "busy", {"key": "value"}))
