"""One pending delta per output: whatever the client's pace, what it gets adds up, and nothing piles up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_requests import change, new_request

from radixmesh.client.tracker import Tracker
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.messages import resolved_to_proto
from radixmesh.daemons.router.requests.delivery import MAX_MESSAGE_BYTES, Delivery
from radixmesh.daemons.router.requests.journal import Ending, Journal, Output, OutputState, Request
from radixmesh.daemons.router.requests.logprob_track import LogprobTrack
from radixmesh.daemons.router.requests.output_flow import OutputFlow
from radixmesh.daemons.router.requests.updates import Logprobs, Update
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.router.responses import response_of
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason
from radixmesh.daemons.runtime.telemetry.metrics import Metrics
from radixmesh.router.v1 import router_pb2


def begun(n: int = 1) -> tuple[Journal, Request, Delivery]:
    journal = Journal(1 << 20)
    delivery = Delivery(journal, WakeupPacer())
    request = new_request("r", delivery, n=n)
    journal.add(request)
    delivery.begin(request)
    return journal, request, delivery


def grow(journal: Journal, output: Output, ids: list[int], text: str) -> None:
    """New ids, seen by the detokenizer, with their text."""
    output.ids.extend(ids)
    output.num_seen = len(output.ids)
    size = len(text.encode())
    output.text.append(text)
    output.text_bytes += size
    journal.charge(output.request, size)
    output.request.delivery.mark(output)


def finish(output: Output, num_output: int) -> None:
    output.ending = Ending(reason=FinishReason.LENGTH, num_output=num_output)
    output.move_to(OutputState.FINISHED)
    output.request.delivery.mark(output)


async def take(delivery: Delivery) -> router_pb2.GenerateResponse | None:
    async with asyncio.timeout(60):
        update = await delivery.take()
    return None if update is None else response_of(update)


async def test_the_resolved_request_comes_first_and_alone() -> None:
    journal, request, delivery = begun()
    grow(journal, request.outputs[0], [1], "a")
    first = await take(delivery)
    assert first is not None and first.HasField("resolved") and not first.deltas
    second = await take(delivery)
    assert second is not None and not second.HasField("resolved") and second.deltas[0].text == "a"


async def test_what_comes_while_the_client_is_busy_is_one_delta() -> None:
    journal, request, delivery = begun(n=2)
    await take(delivery)
    for i in range(500):
        for output in request.outputs:
            grow(journal, output, [i], "é")
    before = journal.num_bytes
    message = await take(delivery)
    assert message is not None and len(message.deltas) == 2
    for delta in message.deltas:
        assert unpack_ints(delta.ids, "ids").tolist() == list(range(500)) and delta.text == "é" * 500
    assert before - journal.num_bytes == 2 * 1000  # Text is not kept once it is delivered.


async def test_ids_that_no_detokenizer_has_seen_are_not_delivered() -> None:
    journal, request, delivery = begun()
    await take(delivery)
    output = request.outputs[0]
    grow(journal, output, [1, 2], "ab")
    output.ids.extend([3, 4])
    message = await take(delivery)
    assert message is not None and unpack_ints(message.deltas[0].ids, "ids").tolist() == [1, 2]


async def test_nothing_of_output_0_comes_before_its_prompt_logprobs() -> None:
    journal, request, delivery = begun(n=2)
    request.prompt_logprobs = LogprobTrack(1)
    await take(delivery)
    for output in request.outputs:
        grow(journal, output, [9], "x")
    message = await take(delivery)
    assert message is not None and [delta.index for delta in message.deltas] == [1]
    request.prompt_logprobs.append(Logprobs(token_logprobs=pack_floats([0.5, 0.5, 0.5])))
    delivery.mark(request.outputs[0])
    message = await take(delivery)
    assert message is not None and message.HasField("prompt_logprobs") and message.deltas[0].index == 0


NUM_TOP = 64


def logprobs_of(first: int, count: int) -> Logprobs:
    """Every value says which position it belongs to."""
    positions = range(first, first + count)
    return Logprobs(
        token_logprobs=pack_floats([-float(p) for p in positions]),
        num_top=NUM_TOP,
        top_ids=pack_ints([p for p in positions for _ in range(NUM_TOP)]),
        top_logprobs=pack_floats([-float(p) for p in positions for _ in range(NUM_TOP)]),
    )


def new_flow(journal: Journal) -> OutputFlow:
    """One whose outputs are on no scheduler, and have no text to make."""
    peers = SimpleNamespace(push=None)
    return OutputFlow(
        journal,
        Metrics("router"),
        make_schedulers=lambda flow: peers,  # type: ignore[arg-type,return-value]
        make_detokenizers=lambda flow: peers,  # type: ignore[arg-type,return-value]
    )


async def test_what_a_slow_reader_gets_comes_in_messages_of_bounded_size_and_the_journal_counts_it() -> None:
    """128 outputs with 64 alternatives each: 20 MiB, delivered whole, and every byte is on the journal's account."""
    journal, request, delivery = begun(n=128)
    flow = new_flow(journal)
    await take(delivery)
    empty, num_tokens = journal.num_bytes, 300
    change(request, ids_only=True)
    for output in request.outputs:
        output.logprobs = LogprobTrack(0)
        output.ids.extend(range(num_tokens))
        output.logprobs.append(logprobs_of(0, num_tokens))
        grow(journal, output, [], "é" * 9)
    flow.on_tokens(request.outputs, 128 * num_tokens)
    assert journal.num_bytes - empty == 128 * (num_tokens * (4 + 4 + 8 * NUM_TOP) + 18)
    for output in request.outputs:
        finish(output, num_tokens)
    tracker, num_messages = Tracker(), 0
    tracker.take(router_pb2.GenerateResponse(resolved=resolved_to_proto(request.resolved)))
    values: dict[int, list[float]] = {i: [] for i in range(128)}
    while (message := await take(delivery)) is not None:
        num_messages += 1
        assert message.ByteSize() < MAX_MESSAGE_BYTES + 64_000
        for chunk in tracker.take(message):
            if chunk.logprobs is not None:
                values[chunk.index] += chunk.logprobs.token_logprobs
                assert all(
                    set(row) == {int(-v)}
                    for row, v in zip(chunk.logprobs.top_ids, chunk.logprobs.token_logprobs, strict=True)
                )
    assert num_messages > 4 and tracker.is_complete
    assert all(got == [-float(p) for p in range(num_tokens)] for got in values.values())
    assert journal.num_bytes - empty == 128 * 4 * num_tokens  # Ids are kept, for the next attempt.


async def test_one_output_larger_than_a_message_comes_in_parts_ids_before_their_text() -> None:
    journal, request, delivery = begun()
    await take(delivery)
    num_ids, text = 1_500_000, "aé🗼" * 700_000
    grow(journal, request.outputs[0], list(range(num_ids)), text)
    finish(request.outputs[0], num_ids)
    tracker, got, num_ids_seen = Tracker(), "", 0
    tracker.take(router_pb2.GenerateResponse(resolved=resolved_to_proto(request.resolved)))
    while (message := await take(delivery)) is not None:
        assert message.ByteSize() < MAX_MESSAGE_BYTES + 64_000
        (chunk,) = tracker.take(message)
        num_ids_seen += len(chunk.ids)
        got += chunk.text
        assert not got or num_ids_seen == num_ids
    assert got == text and tracker.is_complete


async def test_long_prompt_logprobs_come_in_parts_before_output_0_and_once() -> None:
    journal, request, delivery = begun(n=2)
    flow = new_flow(journal)
    await take(delivery)
    base, request.num_prompt = journal.num_bytes, 20_000
    request.prompt_logprobs = LogprobTrack(1)
    for first in range(1, request.num_prompt, 5_000):
        request.prompt_logprobs.append(logprobs_of(first, min(5_000, request.num_prompt - first)))
        flow.on_prompt_logprobs(request.outputs[0])
    assert journal.num_bytes - base == 19_999 * (4 + 8 * NUM_TOP)
    for output in request.outputs:
        grow(journal, output, [9], "x")
        finish(output, 1)
    tracker, known = Tracker(), 0
    tracker.take(router_pb2.GenerateResponse(resolved=resolved_to_proto(request.resolved)))
    while (message := await take(delivery)) is not None:
        assert message.ByteSize() < MAX_MESSAGE_BYTES + 64_000
        if any(delta.index == 0 for delta in message.deltas):
            assert known + len(message.prompt_logprobs.token_logprobs) // 4 == 19_999
        tracker.take(message)
        assert tracker.prompt_logprobs is not None
        known = len(tracker.prompt_logprobs.token_logprobs)
    assert tracker.is_complete and tracker.prompt_logprobs is not None
    assert tracker.prompt_logprobs.token_logprobs == [-float(p) for p in range(1, 20_000)]
    assert journal.num_bytes == base


async def test_the_end_comes_after_the_last_finish() -> None:
    journal, request, delivery = begun(n=2)
    await take(delivery)
    for output in request.outputs:
        grow(journal, output, [1], "a")
    finish(request.outputs[1], 1)
    message = await take(delivery)
    assert message is not None and [f.index for f in message.finished] == [1]
    finish(request.outputs[0], 1)
    message = await take(delivery)
    assert message is not None and [f.index for f in message.finished] == [0]
    assert await take(delivery) is None


async def test_a_failure_replaces_what_is_untold() -> None:
    _, _, delivery = begun()
    waiting = asyncio.create_task(delivery.take())
    await waiting
    waiting = asyncio.create_task(delivery.take())
    await asyncio.sleep(0)
    delivery.fail(MeshError(ErrorReason.ERROR_REASON_SUPERSEDED, "elsewhere"))
    with pytest.raises(MeshError, match="elsewhere"):
        await waiting


async def test_time_spent_by_the_consumer_is_the_clients_stall() -> None:
    journal, request, delivery = begun()
    assert delivery.writing_since is None
    await take(delivery)
    assert delivery.writing_since is not None
    grow(journal, request.outputs[0], [1], "a")
    assert delivery.news_since is not None
    waiting = asyncio.create_task(delivery.take())
    await waiting
    assert delivery.news_since is None


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), max_size=4), st.text(max_size=5), st.booleans()),
        max_size=40,
    )
)
def test_deltas_add_up_whatever_the_clients_pace(steps: list[tuple[int, list[int], str, bool]]) -> None:
    async def run() -> None:
        journal, request, delivery = begun(n=3)
        tracker = Tracker()  # Raises for a gap or a repetition.
        got: dict[int, tuple[list[int], str]] = {i: ([], "") for i in range(3)}
        expected: dict[int, tuple[list[int], str]] = {i: ([], "") for i in range(3)}

        async def read() -> None:
            message = await take(delivery)
            assert message is not None
            for chunk in tracker.take(message):
                got[chunk.index] = (got[chunk.index][0] + chunk.ids, got[chunk.index][1] + chunk.text)

        await read()
        for index, ids, text, is_read in steps:
            grow(journal, request.outputs[index], ids, text)
            expected[index] = (expected[index][0] + ids, expected[index][1] + text)
            if is_read and (ids or text):
                await read()
        for output in request.outputs:
            finish(output, len(output.ids))
        await read()
        assert got == expected and tracker.is_complete and await take(delivery) is None
        base = journal.num_bytes
        journal.drop(request)
        assert journal.num_bytes == 0 and base == request.num_bytes

    asyncio.run(run())


class SlowClient:
    """Takes so many updates, then none until it is resumed."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.tracker = Tracker()  # Raises for a gap or a repetition.
        self.texts: list[str] = []

    def __call__(self, update: Update) -> bool:
        self.texts += [chunk.text for chunk in self.tracker.take(response_of(update)) if chunk.text]
        self.room -= 1
        return self.room > 0


async def pushed(delivery: Delivery, client: SlowClient) -> asyncio.Task[None]:
    """The first update is taken, all else is pushed."""
    first = await take(delivery)
    assert first is not None
    client.tracker.take(first)
    task = asyncio.create_task(delivery.push(client))
    await asyncio.sleep(0)
    return task


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0)


async def test_news_are_pushed_in_the_pacers_turn_and_the_push_ends_with_the_last() -> None:
    journal, request, delivery = begun(n=2)
    client = SlowClient()
    task = await pushed(delivery, client)
    for i in range(5):
        grow(journal, request.outputs[i % 2], [i], str(i))
        await until(lambda i=i: len(client.texts) == i + 1)  # type: ignore[misc]
    finish(request.outputs[0], 3)
    finish(request.outputs[1], 2)
    async with asyncio.timeout(60):
        await task
    assert client.texts == list("01234") and client.tracker.is_complete and await take(delivery) is None


async def test_a_client_that_takes_no_more_is_pushed_one_merged_update_once_it_does() -> None:
    journal, request, delivery = begun()
    client = SlowClient(room=1)
    task = await pushed(delivery, client)
    grow(journal, request.outputs[0], [0], "0")
    await until(lambda: bool(client.texts))
    assert delivery.writing_since is not None  # From here on it is the client's stall.
    for i in range(1, 9):
        grow(journal, request.outputs[0], [i], str(i))
        await asyncio.sleep(0.002)
    assert client.texts == ["0"]
    client.room = 1 << 30
    delivery.resume()
    assert client.texts == ["0", "12345678"] and delivery.writing_since is None
    finish(request.outputs[0], 9)
    async with asyncio.timeout(60):
        await task
    assert client.tracker.is_complete


async def test_a_failure_ends_a_push_even_of_a_client_that_takes_no_more() -> None:
    journal, request, delivery = begun()
    task = await pushed(delivery, SlowClient(room=1))
    grow(journal, request.outputs[0], [0], "0")
    await until(lambda: delivery.writing_since is not None)
    delivery.fail(MeshError(ErrorReason.ERROR_REASON_SUPERSEDED, "elsewhere"))
    async with asyncio.timeout(60):
        with pytest.raises(MeshError, match="elsewhere"):
            await task


async def test_what_a_writer_raises_ends_its_own_push_alone() -> None:
    journal, pacer = Journal(1 << 20), WakeupPacer()
    deliveries = [Delivery(journal, pacer) for _ in range(2)]
    requests = [new_request(f"r{i}", delivery) for i, delivery in enumerate(deliveries)]
    for request, delivery in zip(requests, deliveries, strict=True):
        journal.add(request)
        delivery.begin(request)
    await take(deliveries[0])

    def broken(update: Update) -> bool:
        raise ValueError("no writer")

    failing = asyncio.create_task(deliveries[0].push(broken))
    client = SlowClient()
    going_on = await pushed(deliveries[1], client)
    for request in requests:
        grow(journal, request.outputs[0], [1], "a")
    async with asyncio.timeout(60):
        with pytest.raises(ValueError, match="no writer"):
            await failing
    finish(requests[1].outputs[0], 1)
    async with asyncio.timeout(60):
        await going_on
    assert client.texts == ["a"]


async def test_a_push_of_a_large_output_stops_where_its_client_does() -> None:
    journal, request, delivery = begun()
    client = SlowClient(room=2)
    task = await pushed(delivery, client)
    grow(journal, request.outputs[0], list(range(3_000_000)), "")
    await until(lambda: client.room == 0)
    await asyncio.sleep(0.01)
    assert request.outputs[0].num_delivered < 3_000_000, "two messages' worth, and no more"
    client.room = 1 << 30
    delivery.resume()
    finish(request.outputs[0], 3_000_000)
    async with asyncio.timeout(60):
        await task
    assert client.tracker.is_complete
