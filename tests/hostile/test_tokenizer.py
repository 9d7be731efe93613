"""The largest legal calls, 32 at once, straight at a tokenizer: within its container, typed, and others are served."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from support.bystander import rss_mib
from support.running_daemon import process_of
from support.wire import raw_channel, refusal_from

from radixmesh.daemons.runtime.rpc.channel import check_health
from radixmesh.daemons.runtime.rpc.wire_bounds import MAX_TEXT_BYTES
from radixmesh.tokenizer.v1 import tokenizer_pb2 as pb

TINY = Path(__file__).parents[2] / "compose" / "models" / "tiny-llama"
SERVICE = "/radixmesh.tokenizer.v1.TokenizerService/"
# compose/local.yml.
MAX_RSS_MIB = 512
AT_ONCE = 32
# A quiet machine needs a tenth of it; the attacker and the bystander share this process's loop.
MAX_WAIT_S = 15.0
_CALL_S = 240.0
_LOAD_S = 60.0


@dataclass(slots=True)
class Seen:
    """wait_s: the longest that a bystander's call of a few bytes took."""

    rss_mib: float = 0.0
    wait_s: float = 0.0
    num_served: int = 0
    answers: Counter[str] = field(default_factory=Counter)


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[tuple[str, int]]:
    """Address and process id."""
    pid_file = tmp_path / "pid"
    argv = ["--model", str(TINY)]
    async with process_of("radixmesh.daemons.tokenizer", argv, tmp_path / "address", pid_file) as (address, _):
        async with asyncio.timeout(_LOAD_S):
            while await check_health(address) != "SERVING":
                await asyncio.sleep(0.02)
        yield address, int(pid_file.read_text())


def large_encode(max_tokens: int) -> bytes:
    """12 MiB of text; a token for every second byte."""
    text = "a b c d e f g h " * ((MAX_TEXT_BYTES // 3 - 64) // 16)
    items = [pb.EncodeItem(text=text)] * 3
    return pb.EncodeRequest(items=items, max_tokens=max_tokens).SerializeToString()


async def attack(tokenizer: tuple[str, int], verb: str, raw: bytes, seen: Seen, *, is_read: bool = True) -> None:
    """AT_ONCE calls at once; their ends are counted by reason. is_read: else nobody takes the answers for a while."""
    address, pid = tokenizer

    async def call(channel: grpc.aio.Channel) -> None:
        try:
            if is_read:
                await channel.unary_unary(SERVICE + verb)(raw, timeout=_CALL_S)
            else:
                stream = channel.stream_stream(SERVICE + verb)(timeout=_CALL_S)
                await stream.write(raw)
                await stream.done_writing()
                await asyncio.sleep(20)
                stream.cancel()
            seen.answers["OK"] += 1
        except grpc.aio.AioRpcError as error:
            seen.answers[refusal_from(error).reason] += 1

    async def weigh() -> None:
        while True:
            seen.rss_mib = max(seen.rss_mib, rss_mib(pid))
            await asyncio.sleep(0.01)

    async def bystand() -> None:
        small = pb.EncodeRequest(items=[pb.EncodeItem(text="hello")], tenant="other").SerializeToString()
        async with raw_channel(address) as other:
            while True:
                since_s = time.monotonic()
                await other.unary_unary(f"{SERVICE}Encode")(small, timeout=_CALL_S)
                seen.wait_s = max(seen.wait_s, time.monotonic() - since_s)
                seen.num_served += 1
                await asyncio.sleep(0.02)

    beside = [asyncio.ensure_future(weigh()), asyncio.ensure_future(bystand())]
    async with raw_channel(address) as channel:
        await asyncio.gather(*(call(channel) for _ in range(AT_ONCE)))
    for task in beside:
        task.cancel()
    ended = await asyncio.gather(*beside, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


def check_bystander(seen: Seen) -> None:
    assert seen.rss_mib < MAX_RSS_MIB, seen
    assert seen.wait_s < MAX_WAIT_S and seen.num_served, seen
    assert seen.answers.keys() <= {"OK", "OVERLOADED"} and seen.answers["OK"], seen


async def test_largest_texts_at_once_stay_within_the_container(tokenizer: tuple[str, int]) -> None:
    """Their items are told that they do not fit: what is left is what arriving costs. It was 1.3 GiB."""
    seen = Seen()
    await attack(tokenizer, "Encode", large_encode(max_tokens=1000), seen)
    check_bystander(seen)


async def test_largest_frames_of_streams_at_once_stay_within_the_container(tokenizer: tuple[str, int]) -> None:
    """They are read to be told that they belong into a call of their own: two of a connection at once."""
    seen = Seen()
    request = pb.EncodeRequest.FromString(large_encode(max_tokens=0))
    frame = pb.EncodeEachRequest(call_id=1, request=request).SerializeToString()
    await attack(tokenizer, "EncodeEach", frame, seen)
    check_bystander(seen)


async def test_messages_beyond_the_largest_are_not_received(tokenizer: tuple[str, int]) -> None:
    """16 MiB of empty items, 32 at once, were 698 MiB."""
    seen = Seen()
    await attack(tokenizer, "Encode", b"\x0a\x00" * (8 << 20), seen)
    assert seen.answers == {"TOO_LARGE": AT_ONCE} and seen.rss_mib < MAX_RSS_MIB / 2, seen


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_largest_calls_at_once_to_their_ends(tokenizer: tuple[str, int]) -> None:
    """Texts that are encoded whole, ids that are decoded, and answers that nobody reads."""
    seen = Seen()
    encode, decode = large_encode(max_tokens=0), pb.DecodeRequest(ids=[b"\x07\x00\x00\x00" * (1 << 20)])
    await attack(tokenizer, "Encode", encode, seen)
    await attack(tokenizer, "Decode", decode.SerializeToString(), seen)
    await attack(tokenizer, "GetVocabulary", b"", seen)
    await attack(tokenizer, "Encode", encode, seen, is_read=False)
    await attack(tokenizer, "Encode", encode, seen)
    check_bystander(seen)
