"""The detokenizer over real gRPC: the conversation, what breaks it, what it costs at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.running_daemon import Running, process_of, running
from support.small_tokenizers import byte_level, write_folder

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.detokenizer.config import DetokenizerSettings
from radixmesh.daemons.detokenizer.daemon import DetokenizerDaemon
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.errors import reason_name
from radixmesh.daemons.runtime.rpc.channel import check_health, open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.rpc_errors import mesh_error_from_rpc
from radixmesh.detokenizer.v1 import detokenizer_pb2 as pb
from radixmesh.detokenizer.v1 import detokenizer_pb2_grpc

TOKENIZER = byte_level()
HELLO = make_hello("r1", "router")
TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
METHOD = "/radixmesh.detokenizer.v1.DetokenizerService/Detokenize"


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def rows(*entries: tuple[int, int, Sequence[int]], finals: bytes = b"") -> pb.TokenRows:
    """(handle, first output index, ids) of each row."""
    return pb.TokenRows(
        handles=pack_ints([handle for handle, _, _ in entries]),
        first_output_indexes=pack_ints([first for _, first, _ in entries]),
        counts=pack_ints([len(ids) for _, _, ids in entries]),
        ids=pack_ints([i for _, _, ids in entries for i in ids]),
        finals=finals,
    )


def open_of(
    handle: int, *, stop: Sequence[str] = (), ids: Sequence[int] = (), emitted: int = 0, **more: object
) -> pb.Open:
    return pb.Open(
        handle=handle,
        request_id=f"request-{handle}",
        output_ids=pack_ints(ids),
        emitted_text_bytes=emitted,
        stop=common_pb2.StopParams(stop=stop),
        **more,
    )


class Conversation:
    """One stream, as a router holds it."""

    def __init__(self, address: str, hello: common_pb2.Hello | None = HELLO) -> None:
        self._channel = open_channel(address)
        self.call = detokenizer_pb2_grpc.DetokenizerServiceStub(self._channel).Detokenize()
        self._hello = hello

    async def __aenter__(self) -> Conversation:
        if self._hello is not None:
            await self.send(hello=self._hello)
            self.hello = (await self.read()).hello
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()
        await self._channel.close()

    async def send(self, **fields: object) -> None:
        await self.call.write(pb.DetokenizeRequest(**fields))

    async def read(self) -> pb.DetokenizeResponse:
        response = await asyncio.wait_for(self.call.read(), 60)
        assert response is not grpc.aio.EOF
        return response

    async def ask(self, **fields: object) -> pb.DetokenizeResponse:
        await self.send(**fields)
        return await self.read()

    async def error(self) -> tuple[str, dict[str, str]]:
        """Reason and metadata of the error that ended the stream."""
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await asyncio.wait_for(self.call.read(), 60) is not grpc.aio.EOF:
                pass
            raise grpc.aio.AioRpcError(
                await self.call.code(), await self.call.initial_metadata(), await self.call.trailing_metadata()
            )
        error = mesh_error_from_rpc(raised.value)
        return error.reason_name, dict(error.metadata)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "small", TOKENIZER)


@pytest.fixture(scope="module")
def long_outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(
        tmp_path_factory.mktemp("model") / "long", TOKENIZER, config={"max_position_embeddings": 1 << 20}
    )


@pytest.fixture
async def detokenizer(folder: Path) -> AsyncIterator[Running[DetokenizerDaemon]]:
    async with running(DetokenizerDaemon, DetokenizerSettings(model=folder)) as daemon:
        yield daemon


@asynccontextmanager
async def small(folder: Path, **limits: int) -> AsyncIterator[Running[DetokenizerDaemon]]:
    async with running(DetokenizerDaemon, DetokenizerSettings(model=folder, **limits)) as daemon:
        yield daemon


def num_entries(daemon: Running[DetokenizerDaemon]) -> int:
    return daemon.daemon.num_entries


async def until(condition: object, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_a_conversation(detokenizer: Running[DetokenizerDaemon]) -> None:
    ids = ids_of("Hello 日本 stop here")
    async with Conversation(detokenizer.address) as stream:
        assert stream.hello.daemon == "detokenizer"
        assert stream.hello.model.vocab_size == 400 + 2
        response = await stream.ask(opens=[open_of(1, stop=["stop"]), open_of(2)])
        assert not response.rows and not response.failures
        text, offset = "", 0
        for position, i in enumerate(ids):
            (row,) = (await stream.ask(tokens=rows((1, position, [i])))).rows
            assert (row.handle, row.text_offset) == (1, offset)
            text, offset = text + row.text, offset + len(row.text.encode())
            if row.is_final:
                break
            assert row.num_tokens == position + 1
        assert text == "Hello 日本 "
        assert (row.stop.stop, row.stop.num_tokens) == ("stop", row.num_tokens)
        assert TOKENIZER.decode(ids[: row.num_tokens]).endswith("stop")
        # Tokens sent before the stop was found are ignored; the other entry goes on.
        response = await stream.ask(tokens=rows((1, row.num_tokens, ids[-2:]), (2, 0, ids), finals=b"\0\1"))
        assert [(r.handle, r.text, r.is_final) for r in response.rows] == [(2, "Hello 日本 stop here", True)]
        assert num_entries(detokenizer) == 2
        await stream.send(close_handles=pack_ints([1, 2, 77]))
        await until(lambda: num_entries(detokenizer) == 0)


async def test_open_continues_where_the_client_is(detokenizer: Running[DetokenizerDaemon]) -> None:
    ids = ids_of("one two three stop")
    async with Conversation(detokenizer.address) as stream:
        response = await stream.ask(
            opens=[open_of(1, ids=ids[:3], emitted=2), open_of(2, ids=ids, emitted=4, stop=["three", "zzz"])],
            tokens=rows((1, 3, ids[3:])),
        )
        # The replay's row and the tokens' row are one delta a response.
        whole = "one two three stop"
        assert {(r.handle, r.text_offset, r.text) for r in response.rows} == {(1, 2, whole[2:]), (2, 4, "two ")}
        assert len(response.rows) == 2
        stopped = next(r for r in response.rows if r.handle == 2)
        assert stopped.is_final and stopped.stop.stop == "three"


async def test_gaps_duplicates_and_strangers(detokenizer: Running[DetokenizerDaemon]) -> None:
    ids = ids_of("abcdefghij")
    async with Conversation(detokenizer.address) as stream:
        await stream.ask(opens=[open_of(1), open_of(2), open_of(3)])
        first = await stream.ask(tokens=rows((1, 0, ids[:3]), (2, 1, ids[:1]), (9, 0, ids[:1]), (3, 0, ids[:2])))
        assert [(r.handle, r.num_tokens) for r in first.rows] == [(1, 3), (3, 2)]
        assert [(f.handle, f.is_lost) for f in first.failures] == [(2, True), (9, True)]
        assert all(f.error.message for f in first.failures)
        # Seen before, in part or whole.
        again = await stream.ask(tokens=rows((1, 1, ids[1:5]), (3, 0, ids[:2])))
        assert [(r.handle, r.text, r.num_tokens) for r in again.rows] == [(1, TOKENIZER.decode(ids[3:5]), 5)]
        assert not again.failures
        # The lost one is opened again from the journal.
        (row,) = (await stream.ask(opens=[open_of(2, ids=ids[:4])])).rows
        assert (row.handle, row.text, row.num_tokens) == (2, TOKENIZER.decode(ids[:4]), 4)


async def test_one_bad_entry_does_not_harm_the_others(detokenizer: Running[DetokenizerDaemon]) -> None:
    ids = ids_of("fine")
    async with Conversation(detokenizer.address) as stream:
        await stream.ask(opens=[open_of(handle) for handle in range(4)])
        response = await stream.ask(tokens=rows((0, 0, ids), (1, 0, [ids[0], 402]), (2, 0, [-5]), (3, 0, ids)))
        assert [(r.handle, r.text) for r in response.rows] == [(0, "fine"), (3, "fine")]
        assert [(f.handle, f.is_lost, reason_name(f.error.reason)) for f in response.failures] == [
            (1, False, "TOKEN_OUT_OF_VOCABULARY"),
            (2, False, "TOKEN_OUT_OF_VOCABULARY"),
        ]
        assert dict(response.failures[0].error.metadata) == {"position": "1", "id": "402", "vocab_size": "402"}
        assert num_entries(detokenizer) == 2


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (open_of(1, stop=["x"] * 10_000), "TOO_MANY_STOPS"),
        (open_of(1, stop=["é" * 513]), "TOO_MANY_STOPS"),
        (open_of(1, stop=["x", ""]), "INVALID_ARGUMENT"),
        (open_of(1, ids=[10**6]), "TOKEN_OUT_OF_VOCABULARY"),
        (open_of(1, prompt_tail_ids=pack_ints([-1])), "TOKEN_OUT_OF_VOCABULARY"),
        (open_of(1, ids=[1], emitted=100), "INVALID_RESUME"),
        (open_of(1, emitted=2**64 - 1), "INVALID_RESUME"),
        (open_of(1, ids=[50] * 4097), "TOO_LARGE"),
    ],
)
async def test_opens_that_are_refused(detokenizer: Running[DetokenizerDaemon], entry: pb.Open, reason: str) -> None:
    async with Conversation(detokenizer.address) as stream:
        response = await stream.ask(opens=[entry, open_of(2)], tokens=rows((2, 0, ids_of("on"))))
        (failure,) = response.failures
        assert (failure.handle, failure.is_lost, reason_name(failure.error.reason)) == (1, False, reason)
        assert [r.text for r in response.rows] == ["on"]
        assert num_entries(detokenizer) == 1


async def test_an_output_longer_than_the_model_is_refused(detokenizer: Running[DetokenizerDaemon]) -> None:
    async with Conversation(detokenizer.address) as stream:
        response = await stream.ask(opens=[open_of(1, ids=[50] * 4096)])
        assert response.rows[0].num_tokens == 4096
        (failure,) = (await stream.ask(tokens=rows((1, 4096, [50])))).failures
        assert reason_name(failure.error.reason) == "TOO_LARGE"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hello": HELLO}, "PROTOCOL_VIOLATION"),
        ({"tokens": pb.TokenRows(handles=b"123")}, "MALFORMED_MESSAGE"),
        ({"tokens": pb.TokenRows(handles=pack_ints([1]))}, "MALFORMED_MESSAGE"),
        (
            {
                "tokens": pb.TokenRows(
                    handles=pack_ints([1]),
                    first_output_indexes=pack_ints([0]),
                    counts=pack_ints([2]),
                    ids=pack_ints([1]),
                )
            },
            "MALFORMED_MESSAGE",
        ),
        (
            {
                "tokens": pb.TokenRows(
                    handles=pack_ints([1, 1]),
                    first_output_indexes=pack_ints([0, 0]),
                    counts=pack_ints([2, -2]),
                )
            },
            "MALFORMED_MESSAGE",
        ),
        ({"tokens": rows((1, -1, [1]))}, "MALFORMED_MESSAGE"),
        ({"tokens": rows((1, 0, [1]), finals=b"\0\0")}, "MALFORMED_MESSAGE"),
        ({"opens": [pb.Open(output_ids=b"12345")]}, "MALFORMED_MESSAGE"),
        ({"close_handles": b"1"}, "MALFORMED_MESSAGE"),
    ],
)
async def test_frames_that_end_the_stream(
    detokenizer: Running[DetokenizerDaemon], fields: dict[str, object], reason: str
) -> None:
    async with Conversation(detokenizer.address) as stream:
        await stream.ask(opens=[open_of(1)])
        await stream.send(**fields)
        assert (await stream.error())[0] == reason
    await until(lambda: num_entries(detokenizer) == 0)
    async with Conversation(detokenizer.address) as stream:
        assert (await stream.ask(opens=[open_of(1, ids=ids_of("well"))])).rows[0].text == "well"


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (None, "PROTOCOL_VIOLATION"),
        (common_pb2.Hello(), "MISSING_FIELD"),
        (common_pb2.Hello(instance_id="x"), "MISSING_FIELD"),
        (common_pb2.Hello(instance_id="x", min_contract_version=3, max_contract_version=2), "VERSION_MISMATCH"),
        (common_pb2.Hello(instance_id="x", min_contract_version=99, max_contract_version=99), "VERSION_MISMATCH"),
        (
            make_hello("r", "router", common_pb2.ModelIdentity(tokenizer_fingerprint="other")),
            "TOKENIZER_MISMATCH",
        ),
    ],
)
async def test_peers_that_do_not_fit(
    detokenizer: Running[DetokenizerDaemon], hello: common_pb2.Hello | None, reason: str
) -> None:
    async with Conversation(detokenizer.address, hello=None) as stream:
        await stream.send(hello=hello, opens=[open_of(1)])
        assert (await stream.error())[0] == reason
    assert num_entries(detokenizer) == 0


async def test_bytes_that_are_no_message(detokenizer: Running[DetokenizerDaemon]) -> None:
    async with open_channel(detokenizer.address) as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(pb.DetokenizeRequest(hello=HELLO).SerializeToString())
        assert await call.read()
        await call.write(b"\xff\xff\xff\xff garbage")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            while await call.read() is not grpc.aio.EOF:
                pass
            assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            raise AssertionError("read() ended without the status")
        assert mesh_error_from_rpc(raised.value).reason == ErrorReason.ERROR_REASON_MALFORMED_MESSAGE


@pytest.mark.parametrize("how", ["half_close", "cancel"])
async def test_the_end_of_the_stream_drops_its_entries(detokenizer: Running[DetokenizerDaemon], how: str) -> None:
    async with Conversation(detokenizer.address) as other:
        await other.ask(opens=[open_of(1)])
        async with Conversation(detokenizer.address) as stream:
            await stream.ask(opens=[open_of(handle) for handle in range(100)])
            assert num_entries(detokenizer) == 101
            if how == "half_close":
                await stream.call.done_writing()
                assert await stream.call.read() is grpc.aio.EOF
                assert await stream.call.code() == grpc.StatusCode.OK
        await until(lambda: num_entries(detokenizer) == 1)
        assert (await other.ask(tokens=rows((1, 0, ids_of("a"))))).rows[0].text == "a"


async def test_the_daemon_has_room_for_so_many(folder: Path) -> None:
    async with small(folder, max_entries=3) as daemon, Conversation(daemon.address) as stream:
        response = await stream.ask(opens=[open_of(handle) for handle in range(5)])
        assert [(f.handle, f.is_lost, reason_name(f.error.reason)) for f in response.failures] == [
            (3, True, "OVERLOADED"),
            (4, True, "OVERLOADED"),
        ]
        assert response.failures[0].error.metadata["retry_after_ms"]
        # Opening anew needs no further room, closing makes some.
        assert not (await stream.ask(opens=[open_of(0)])).failures
        assert not (await stream.ask(close_handles=pack_ints([1]), tokens=rows())).failures
        assert not (await stream.ask(opens=[open_of(3)])).failures
        assert num_entries(daemon) == 3


async def test_a_slow_reader_gets_bigger_deltas(long_outputs: Path) -> None:
    """It reads nothing for a while; then everything is there, in fewer responses than there were requests."""
    phrase = "word and word " * 40
    ids = ids_of(phrase)
    repeats = 600
    num_sent = 0
    async with small(long_outputs, max_pending_bytes=200_000) as daemon, Conversation(daemon.address) as stream:
        await stream.ask(opens=[open_of(handle) for handle in range(20)])

        async def write_all() -> None:
            nonlocal num_sent
            for position in range(repeats):
                frame = rows(*((handle, position * len(ids), ids) for handle in range(20)))
                await stream.send(tokens=frame)
                num_sent += 1

        writing = asyncio.create_task(write_all())
        await asyncio.sleep(1.0)
        # The other streams are served meanwhile.
        async with Conversation(daemon.address) as other:
            assert (await other.ask(opens=[open_of(1, ids=ids)])).rows[0].text == phrase
        texts = dict.fromkeys(range(20), "")
        num_responses = 0
        while any(len(text) < repeats * len(phrase) for text in texts.values()):
            response = await stream.read()
            num_responses += 1
            for row in response.rows:
                assert row.text_offset == len(texts[row.handle])
                texts[row.handle] += row.text
        await writing
        assert set(texts.values()) == {phrase * repeats}
        assert num_responses < num_sent == repeats, num_responses


async def test_a_reader_that_never_reads_costs_a_bounded_outbox(folder: Path) -> None:
    """Writes stop being taken: the router feels it, the daemon's memory does not."""
    ids = ids_of("word and word ") * 20
    async with small(folder, max_pending_bytes=100_000) as daemon:
        async with Conversation(daemon.address) as stream:
            await stream.ask(opens=[open_of(handle) for handle in range(64)])
            num_sent = 0
            for _ in range(400):
                entries = [(handle, 0, ids) for handle in range(64)]
                try:
                    # Closed and opened in one frame: always new text, 18 KB a frame of 8 KB.
                    await asyncio.wait_for(
                        stream.send(opens=[open_of(h) for h in range(64)], tokens=rows(*entries)), 0.5
                    )
                except TimeoutError:
                    break
                num_sent += 1
            assert num_sent < 400
            async with Conversation(daemon.address) as other:
                assert (await other.ask(opens=[open_of(1, ids=ids_of("on"))])).rows[0].text == "on"
        await until(lambda: num_entries(daemon) == 0)


async def test_loading_and_draining_daemons_take_nothing_new(folder: Path) -> None:
    async with running(DetokenizerDaemon, DetokenizerSettings(model=folder), load=False) as daemon:
        async with Conversation(daemon.address, hello=None) as stream:
            await stream.send(hello=HELLO)
            assert (await stream.error())[0] == "NOT_SERVING"
        await daemon.daemon.load()
        daemon.runtime.progress.loaded()
        async with Conversation(daemon.address) as stream:
            await stream.ask(opens=[open_of(1)])
            daemon.runtime.progress.drain()
            draining = asyncio.create_task(daemon.daemon.drain())
            response = await stream.ask(opens=[open_of(2)], tokens=rows((1, 0, ids_of("last"))))
            assert [r.text for r in response.rows] == ["last"]
            assert [(f.handle, f.is_lost, reason_name(f.error.reason)) for f in response.failures] == [
                (2, True, "NOT_SERVING")
            ]
            assert not draining.done()
            await stream.send(close_handles=pack_ints([1]))
            await asyncio.wait_for(draining, 60)


async def test_a_drain_does_not_wait_long_for_outputs_that_go_on(folder: Path) -> None:
    """With one replica new outputs wait meanwhile; with several the others take what is open."""
    async with small(folder) as daemon, Conversation(daemon.address) as stream:
        await stream.ask(opens=[open_of(1)])
        daemon.runtime.progress.drain()
        await asyncio.wait_for(daemon.daemon.drain(), 20)
        assert daemon.daemon.num_entries == 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(min_size=1, max_size=30), stops=st.lists(st.text(min_size=1, max_size=3), max_size=3), data=st.data()
)
def test_a_detokenizer_killed_at_any_moment_loses_nothing(
    folder: Path, text: str, stops: list[str], data: st.DataObject
) -> None:
    """Two daemons; the stream moves to the other one at random moments, by Open with what the client has."""
    ids = ids_of(text)
    full = TOKENIZER.decode(ids)
    end = next((e for e in range(1, len(full) + 1) if full[:e].endswith(tuple(stops))), None) if stops else None
    expected = full
    if end is not None:
        expected = full[: end - max(len(s) for s in stops if full[:end].endswith(s))]
    kills = data.draw(st.sets(st.integers(0, len(ids))))

    async def play() -> str:
        got, position, is_final = "", 0, False
        while not is_final:
            async with small(folder) as daemon, Conversation(daemon.address) as stream:
                response = await stream.ask(
                    opens=[open_of(1, stop=stops, ids=ids[:position], emitted=len(got.encode()))]
                )
                while True:
                    for row in response.rows:
                        assert row.text_offset == len(got.encode())
                        got, is_final = got + row.text, row.is_final
                    if is_final or position in kills:
                        kills.discard(position)
                        break
                    is_last = position == len(ids)
                    next_ids = ids[position : position + 1]
                    response = await stream.ask(tokens=rows((1, position, next_ids), finals=bytes([is_last])))
                    position += len(next_ids)
        return got

    assert asyncio.run(play()) == expected


async def test_the_process_serves_soon(tmp_path: Path) -> None:
    argv = ["--model", str(TINY), "--listen", "127.0.0.1:0", "--log-level", "warning"]
    start = time.monotonic()
    async with process_of("radixmesh.daemons.detokenizer", argv, tmp_path / "address") as (address, _):
        while await check_health(address) != "SERVING":
            await asyncio.sleep(0.02)
        # 0.7 s on an idle core; the bound leaves room for a very busy machine.
        assert time.monotonic() - start < 40
        async with Conversation(address) as stream:
            assert stream.hello.model.name == "tiny-llama"
