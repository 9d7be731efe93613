"""Output that waits for a slow reader: merged, bounded, and never from an entry that was opened anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from support.small_tokenizers import byte_level, vocabulary_of

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.detokenizer import outbox as outbox_module
from radixmesh.daemons.detokenizer.outbox import Outbox
from radixmesh.daemons.detokenizer.service import DetokenizerService
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.detokenize.decoder_table import DecoderTable, EntryBudget, Limits
from radixmesh.daemons.runtime.detokenize.frames import write_response
from radixmesh.daemons.runtime.detokenize.messages import EntryFailure, TextDelta
from radixmesh.daemons.runtime.detokenize.output_decoder import StopHit
from radixmesh.daemons.runtime.detokenize.text_decoder import family_of
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.health.progress import Progress
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.detokenizer.v1 import detokenizer_pb2 as pb

VOCABULARY = vocabulary_of(byte_level())


def delta(handle: int, offset: int, text: str, num_tokens: int, **more: object) -> TextDelta:
    whole = {"stop": None, "is_final": False, **more}
    return TextDelta(handle, offset, text, num_tokens, **whole)  # type: ignore[arg-type]


async def test_deltas_of_one_entry_become_one() -> None:
    outbox = Outbox(1000)
    stop = StopHit("d", 3)
    outbox.put([delta(1, 0, "ab", 1), delta(2, 7, "x", 9)], [])
    outbox.put([delta(1, 2, "é", 2)], [])
    outbox.put([delta(1, 4, "c", 3, stop=stop, is_final=True)], [])
    pending = await outbox.take()
    assert pending is not None
    assert pending.deltas == [delta(1, 0, "abéc", 3, stop=stop, is_final=True), delta(2, 7, "x", 9)]
    outbox.close()
    assert await outbox.take() is None


async def test_each_request_is_answered_even_with_nothing() -> None:
    outbox = Outbox(1000)
    outbox.put([], [])
    outbox.close()
    assert await outbox.take() == ([], [])
    assert await outbox.take() is None


async def test_a_full_outbox_makes_its_producer_wait() -> None:
    outbox = Outbox(1000)
    outbox.put([delta(1, 0, "x" * 1000, 1)], [])
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await outbox.take()
    await asyncio.wait_for(waiting, 60)


async def test_strangers_fill_it_too() -> None:
    outbox = Outbox(10_000)
    error = MeshError(ErrorReason.ERROR_REASON_UNKNOWN_REQUEST, "no such entry")
    num_put = 0
    while outbox.has_room:
        outbox.put([], [EntryFailure(num_put, True, error)])
        num_put += 1
    assert num_put < 200


async def test_more_than_a_message_holds_goes_out_in_several() -> None:
    limit = outbox_module.MAX_FRAME_BYTES
    outbox = Outbox(1 << 40)
    outbox.put([delta(handle, 0, "x" * (limit // 2), 1) for handle in range(9)], [])
    outbox.close()
    handles = []
    while (pending := await outbox.take()) is not None:
        assert sum(len(d.text) for d in pending.deltas) <= limit
        handles += [d.handle for d in pending.deltas]
    assert handles == list(range(9))
    assert outbox.has_room


async def test_a_text_larger_than_a_message_comes_in_parts_and_its_end_with_the_last() -> None:
    text, outbox = "aé🗼" * 600_000, Outbox(1 << 40)
    stop = StopHit("d", 9)
    outbox.put([delta(1, 5, text, 9, stop=stop, is_final=True), delta(2, 0, "x", 3)], [])
    outbox.close()
    rows = []
    while (pending := await outbox.take()) is not None:
        assert write_response(pending).ByteSize() <= outbox_module.MAX_FRAME_BYTES + 1024
        rows += pending.deltas
    parts = [row for row in rows if row.handle == 1]
    assert len(parts) > 1 and "".join(part.text for part in parts) == text
    offset = 5
    for part in parts:
        assert part.text_offset == offset
        offset += len(part.text.encode())
    assert [(part.num_tokens, part.stop, part.is_final) for part in parts[:-1]] == [(0, None, False)] * (len(parts) - 1)
    assert (parts[-1].num_tokens, parts[-1].stop, parts[-1].is_final) == (9, stop, True)
    assert [row.text for row in rows if row.handle == 2] == ["x"]


async def test_a_response_is_bounded_in_entries() -> None:
    outbox = Outbox(1 << 40)
    outbox.put([delta(handle, 0, "x", 1) for handle in range(10_000)], [])
    error = MeshError(ErrorReason.ERROR_REASON_UNKNOWN_REQUEST, "no such entry")
    outbox.put([], [EntryFailure(handle, True, error) for handle in range(10_000, 12_000)])
    outbox.close()
    handles: list[int] = []
    while (pending := await outbox.take()) is not None:
        assert len(pending.deltas) + len(pending.failures) <= outbox_module.MAX_FRAME_ENTRIES
        handles += [delta.handle for delta in pending.deltas] + [failure.handle for failure in pending.failures]
    assert handles == list(range(12_000))


async def test_an_entry_opened_anew_says_nothing_of_its_former_life() -> None:
    """The reader is busy while the router opens the entry again: old text behind it would come twice."""
    ids = VOCABULARY.tokenizer.encode("Hello", add_special_tokens=False).ids
    requests: asyncio.Queue[pb.DetokenizeRequest | None] = asyncio.Queue()

    async def frames() -> AsyncIterator[pb.DetokenizeRequest]:
        while (request := await requests.get()) is not None:
            yield request

    progress = Progress()
    progress.loaded()
    responses = DetokenizerService(_Maker(), progress, 1 << 20).Detokenize(frames(), None)  # type: ignore[arg-type]
    tokens = pb.TokenRows(
        handles=pack_ints([1]), first_output_indexes=pack_ints([0]), counts=pack_ints([len(ids)]), ids=pack_ints(ids)
    )
    requests.put_nowait(pb.DetokenizeRequest(hello=make_hello("r", "router")))
    assert (await anext(responses)).hello.daemon == "detokenizer"
    requests.put_nowait(pb.DetokenizeRequest(opens=[pb.Open(handle=1)], tokens=tokens))
    requests.put_nowait(
        pb.DetokenizeRequest(opens=[pb.Open(handle=1, output_ids=pack_ints(ids), emitted_text_bytes=2)])
    )
    requests.put_nowait(None)
    # Both frames are applied while nobody reads.
    for _ in range(10):
        await asyncio.sleep(0)
    (row,) = (await anext(responses)).rows
    assert (row.text_offset, row.text, row.num_tokens) == (2, "llo", len(ids))
    assert await anext(responses, None) is None


class _Maker:
    def new_table(self) -> DecoderTable:
        return DecoderTable(family_of(VOCABULARY), VOCABULARY.vocab_size, Limits(), EntryBudget(8))

    def hello(self) -> common_pb2.Hello:
        return make_hello("d", "detokenizer")
