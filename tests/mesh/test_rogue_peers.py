"""Peers that answer nonsense: the router that hears it ends their stream with a typed error, says so once, and lives.

What a sound replica can still give, clients get; where there is none they get a typed error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.fake_scheduler import FakeScheduler
from support.router_mesh import RouterMesh, oracle_ids, router_mesh

from radixmesh.client import RadixMeshError
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.peers import peer_link
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.detokenizer.v1 import detokenizer_pb2, detokenizer_pb2_grpc
from radixmesh.router.v1 import router_pb2
from radixmesh.scheduler.v1 import scheduler_pb2

PROMPT = [5, 6, 7, 8]
SEED, NUM_TOKENS = 5, 20
Mangle = Callable[[scheduler_pb2.ServeResponse], None]


class Log:
    """Stands in for the log of links."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **values: object) -> None:
        pass

    def warning(self, event: str, **values: object) -> None:
        self.lines.append((event, values))

    def exception(self, event: str, **values: object) -> None:
        self.lines.append((event, values))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(peer_link, "log", log)
    return log


def _counts(frame: scheduler_pb2.ServeResponse) -> None:
    """Their sum is right."""
    counts = unpack_ints(frame.tokens.counts, "").tolist()
    frame.tokens.counts = pack_ints([counts[0] + 5, -5, *counts[1:]])
    for name in ("handles", "attempts", "first_output_indexes"):
        values = unpack_ints(getattr(frame.tokens, name), "").tolist()
        setattr(frame.tokens, name, pack_ints([values[0], values[0] + 1, *values[1:]]))


def _tokens(**arrays: bytes) -> Mangle:
    def mangle(frame: scheduler_pb2.ServeResponse) -> None:
        for name, value in arrays.items():
            setattr(frame.tokens, name, value)

    return mangle


def _endless(frame: scheduler_pb2.ServeResponse) -> None:
    counts = unpack_ints(frame.tokens.counts, "").tolist()
    frame.tokens.counts = pack_ints([count + 1_000_000 for count in counts])
    frame.tokens.ids = frame.tokens.ids[:4] * (len(frame.tokens.ids) // 4 + 1_000_000 * len(counts))


def _finished(**fields: object) -> Mangle:
    def mangle(frame: scheduler_pb2.ServeResponse) -> None:
        handle = unpack_ints(frame.tokens.handles, "")[0]
        attempt = unpack_ints(frame.tokens.attempts, "")[0]
        frame.finished.add(handle=handle, attempt=attempt, **fields)  # type: ignore[arg-type]

    return mangle


def _vector(size: int) -> Mangle:
    def mangle(frame: scheduler_pb2.ServeResponse) -> None:
        frame.vectors.add(handle=unpack_ints(frame.tokens.handles, "")[0], values=bytes(size))

    return mangle


def _wide(frame: scheduler_pb2.ServeResponse) -> None:
    frame.tokens.logprobs[0].logprobs.CopyFrom(
        common_pb2.Logprobs(
            token_logprobs=pack_floats([-1.0]), num_top=100_000, top_ids=bytes(400_000), top_logprobs=bytes(400_000)
        )
    )


def _many(frame: scheduler_pb2.ServeResponse) -> None:
    frame.abort_results.extend([scheduler_pb2.AbortResult()] * 1_000_000)


ROGUE_FRAMES: dict[str, Mangle] = {
    "counts that are negative": _counts,
    "a count of 0": _tokens(counts=pack_ints([0]), ids=b""),
    "three bytes of handles": _tokens(handles=b"123"),
    "fewer ids than counted": _tokens(ids=b""),
    "ids that are negative": _tokens(ids=pack_ints([-1])),
    "ids outside the vocabulary": _tokens(ids=pack_ints([2**31 - 1])),
    "a first index that is negative": _tokens(first_output_indexes=pack_ints([-1])),
    "more tokens than were asked for": _endless,
    "logprobs of 100,000 alternatives": _wide,
    "reason 99": _finished(reason=99),
    "no reason": _finished(reason=0),
    "finished after more tokens than came": _finished(reason=common_pb2.FINISH_REASON_LENGTH, num_output=2**32 - 1),
    "a vector nobody asked for": _vector(400),
    "half a number": _vector(7),
    "a million answers": _many,
}


def _mangled_by(fake: FakeScheduler, rogue: Mangle) -> list[int]:
    """From the third token on every frame is; how many were."""
    frames: list[int] = []

    def mangle(frame: scheduler_pb2.ServeResponse) -> None:
        if frame.tokens.handles and unpack_ints(frame.tokens.first_output_indexes, "")[0] >= 3:
            rogue(frame)
            frames.append(1)

    fake.mangle = mangle
    return frames


async def _answer(mesh: RouterMesh) -> None:
    async with mesh.client() as client, asyncio.timeout(60):
        done = await client.complete(PROMPT, seed=SEED, max_tokens=NUM_TOKENS, logprobs=1)
        assert done.outputs[0].ids == oracle_ids(PROMPT, SEED, NUM_TOKENS)
        expected = [-(i + token / 1000) for i, token in enumerate(done.outputs[0].ids)]
        assert done.outputs[0].logprobs is not None
        assert done.outputs[0].logprobs.token_logprobs == np.float32(expected).tolist()


@pytest.mark.parametrize("name", ROGUE_FRAMES)
async def test_a_scheduler_that_answers_nonsense_loses_its_stream_and_nobody_else_anything(name: str, log: Log) -> None:
    async with router_mesh(schedulers=2) as mesh:
        frames = _mangled_by(mesh.fakes[0], ROGUE_FRAMES[name])
        for _ in range(2):  # Turns are taken: one of the two begins at the rogue.
            await _answer(mesh)
        assert frames, "the rogue said nothing"
        events = [event for event, _ in log.lines]
        assert "link_failed" not in events, log.lines
        assert events.count("peer_lost") == 1, log.lines
        told = str(log.lines[events.index("peer_lost")][1]["error"])
        assert told.startswith(("PROTOCOL_VIOLATION", "MALFORMED_MESSAGE", "TOO_LARGE")), told
        await mesh.settle()


@pytest.mark.parametrize("name", ["a count of 0", "ids outside the vocabulary"])
async def test_where_the_only_scheduler_answers_nonsense_clients_get_an_error_and_the_log_one_line(
    name: str, log: Log
) -> None:
    async with router_mesh(scheduler_wait_s=2.0) as mesh, mesh.client(resume_timeout_s=0) as client:
        # From the first token on: what comes before would be progress.
        mesh.fakes[0].mangle = lambda frame: ROGUE_FRAMES[name](frame) if frame.tokens.handles else None
        async with asyncio.timeout(60):
            with pytest.raises(RadixMeshError, match="no scheduler could take"):
                await client.complete(PROMPT, seed=SEED, max_tokens=NUM_TOKENS)
        assert mesh.fakes[0].num_streams < 20, "it is dialled later each time"
        assert [event for event, _ in log.lines].count("peer_lost") == 1, log.lines
        mesh.fakes[0].mangle = None
        await _answer(mesh)
        await mesh.settle()


@pytest.mark.parametrize("reason", [common_pb2.FINISH_REASON_ERROR, common_pb2.FINISH_REASON_ABORT])
async def test_an_end_without_an_error_gets_one_and_a_long_one_is_cut(reason: common_pb2.FinishReason) -> None:
    async with router_mesh() as mesh:
        for error in (common_pb2.Error(), common_pb2.Error(reason=999, message="x" * 3_000_000)):  # type: ignore[arg-type]
            rogue = _finished(reason=reason, error=error if error.message else None)
            mesh.fakes[0].mangle = lambda frame, rogue=rogue: rogue(frame) if frame.tokens.handles else None  # type: ignore[misc]
            async with mesh.stub() as stub:
                request = router_pb2.GenerateRequest(
                    prompt_ids=pack_ints(PROMPT),
                    sampling=common_pb2.SamplingParams(seed=SEED),  # One whose output has no early end of its own.
                    stop=common_pb2.StopParams(max_tokens=NUM_TOKENS),
                )
                ends = [end async for message in stub.Generate(request, timeout=60) for end in message.finished]
            (end,) = ends
            assert end.reason == reason and end.error.reason and 0 < len(end.error.message) <= 1000
        await mesh.settle()


class RogueDetokenizer(detokenizer_pb2_grpc.DetokenizerServiceServicer):
    """Answers every frame of tokens with what it is told to."""

    def __init__(self, answer: Callable[[int, int], detokenizer_pb2.DetokenizeResponse]) -> None:
        self.answer = answer
        self.num_answers = 0

    async def Detokenize(
        self, request_iterator: AsyncIterator[detokenizer_pb2.DetokenizeRequest], context: object
    ) -> AsyncIterator[detokenizer_pb2.DetokenizeResponse]:
        await anext(request_iterator)
        yield detokenizer_pb2.DetokenizeResponse(hello=make_hello("rogue", "detokenizer"))
        async for request in request_iterator:
            if request.tokens.handles:
                self.num_answers += 1
                handle = int(unpack_ints(request.tokens.handles, "")[0])
                yield self.answer(handle, sum(unpack_ints(request.tokens.counts, "").tolist()))


Row = detokenizer_pb2.TextRow
_STOP = detokenizer_pb2.StopMatch(stop="never asked for", num_tokens=1)
ROGUE_TEXTS: dict[str, Callable[[int, int], list[Row]]] = {
    "more tokens than it got": lambda handle, num: [Row(handle=handle, text="x", num_tokens=num + 7)],
    "a stop nobody asked for": lambda handle, num: [Row(handle=handle, num_tokens=1, stop=_STOP, is_final=True)],
    "an end that no token makes": lambda handle, num: [Row(handle=handle, num_tokens=num, is_final=True)],
    "a text of 8 MiB": lambda handle, num: [Row(handle=handle, text="x" * (8 << 20), num_tokens=num)],
    "a million rows": lambda handle, num: [Row()] * 1_000_000,
}


@pytest.mark.parametrize("name", ROGUE_TEXTS)
async def test_a_detokenizer_that_answers_nonsense_loses_its_stream_and_no_text_is_wrong(
    name: str, log: Log, tmp_path: Path
) -> None:
    rogue = RogueDetokenizer(
        lambda handle, num: detokenizer_pb2.DetokenizeResponse(rows=ROGUE_TEXTS[name](handle, num))
    )
    server = grpc.aio.server()
    detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(rogue, server)
    address = f"unix:{tmp_path}/rogue"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with router_mesh() as mesh:
            async with mesh.client() as client, asyncio.timeout(60):
                right = await client.complete(PROMPT, seed=SEED, max_tokens=NUM_TOKENS)
                pool = mesh.router().detokenizers
                pool.add(address)
                while not all(link.is_connected for link in pool.links):
                    await asyncio.sleep(0.01)
                mesh.fakes[0].step_s = 0.005
                for _ in range(20):
                    done = await asyncio.gather(
                        *(client.complete(PROMPT, seed=SEED, max_tokens=NUM_TOKENS) for _ in range(4))
                    )
                    assert all(
                        (one.outputs[0].ids, one.outputs[0].text) == (right.outputs[0].ids, right.outputs[0].text)
                        for one in done
                    )
                    if rogue.num_answers:
                        break
            assert rogue.num_answers
            events = [event for event, _ in log.lines]
            assert "link_failed" not in events, log.lines
            assert events.count("peer_lost") == 1, log.lines
            await mesh.settle()
    finally:
        await server.stop(0)
