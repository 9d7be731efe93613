"""Generated messages against a whole mesh, beside bystanders: every sized field at its bound, beyond it and far beyond.

Whatever comes, every answer is typed, no daemon dies, falls silent or outgrows its container, and bystanders stream on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import yaml
from google.protobuf.descriptor import FieldDescriptor
from hostile.bounds import BOUNDS
from hostile.fields import Place, places, rpcs
from support.bystander import Seen, watched
from support.mesh import SERVICES, Mesh, running_mesh
from support.wire import raw_channel

from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.rpc.rpc_errors import REQUEST_ID_KEY, mesh_error_from_rpc
from radixmesh.detokenizer.v1 import detokenizer_pb2
from radixmesh.router.v1 import router_pb2, router_pb2_grpc
from radixmesh.scheduler.v1 import scheduler_pb2
from radixmesh.tokenizer.v1 import tokenizer_pb2
from radixmesh.worker.v1 import worker_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
_DETAILS = "grpc-status-details-bin"
_COMPOSE = Path(__file__).parents[2] / "compose" / "local.yml"
# The router's own defaults in such a container: daemons/router/config.py.
IN_512_MIB = {
    "journal_bytes": 128 << 20,
    "http_bodies_bytes": 64 << 20,
    "view_bytes": 32 << 20,
    "grpc_message_bytes": 16 << 20,
    "grpc_receiving_bytes": 32 << 20,
}
MAX_SILENCE_S, MAX_STALL_S = 1.0, 2.0
# The daily form runs on two busy cores, with its attacker in the same process; what it is there to see takes 8 s.
DAILY_FACTOR = 4.0
# A busy machine adds to them some times what the same mesh shows while nobody attacks.
_BUSY = 5.0
_CALL_S = 60.0
_TOO_LARGE_TO_SEND = 32 << 20
_EMPTY_ELEMENTS = (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
# WriteTransfer has none: its first message is what it attacks with.
_HELLOS = {
    "Detokenize": detokenizer_pb2.DetokenizeRequest,
    "Serve": scheduler_pb2.ServeRequest,
    "Execute": worker_pb2.ExecuteRequest,
}
PLACES = [place for rpc in rpcs() for place in places(rpc)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh("simulated", worker={"simulated_base_us": 2000}, router=IN_512_MIB) as mesh:
        yield mesh
        assert not mesh.bugs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def baseline(mesh: Mesh) -> Seen:
    async with watched(mesh) as seen:
        async with asyncio.timeout(60):
            while len(seen.ttfts_s) < 10:
                await asyncio.sleep(0.1)
    return seen


def daemon_of(place: Place) -> str:
    return place.rpc.method.split(".")[1]


def sizes(place: Place) -> Iterator[int]:
    """The largest legal one, the smallest illegal one, and of elements that take two bytes each some 16 MiB."""
    bound = BOUNDS[place.field.full_name]
    for most in (bound.most, bound.most + 1):
        if most * (2 if place.field.is_repeated else 1) <= _TOO_LARGE_TO_SEND:
            yield most
    if place.field.is_repeated and place.field.type in _EMPTY_ELEMENTS and not place.rpc.is_stream:
        yield 8 << 20


async def answer_to(channel: grpc.aio.Channel, place: Place, raw: bytes) -> str | None:
    """The fault of an answer: None where it is a result, or a typed error."""
    name = place.rpc.method.rpartition("/")[2]
    try:
        async with asyncio.timeout(_CALL_S):
            if place.rpc.is_stream:
                call = channel.stream_stream(place.rpc.method)()
                try:
                    if name in _HELLOS:
                        await call.write(_HELLOS[name](hello=make_hello("hostile", "router")).SerializeToString())
                    await call.write(raw)
                    await call.done_writing()
                except (asyncio.InvalidStateError, grpc.aio.UsageError):
                    pass  # It has ended: why is read below.
                async for _ in call:
                    pass
            elif name in ("Generate", "WatchTransfer"):
                async for _ in channel.unary_stream(place.rpc.method)(raw, metadata=((REQUEST_ID_KEY, "hostile"),)):
                    pass
            else:
                await channel.unary_unary(place.rpc.method)(raw)
    except TimeoutError:
        return f"{place}: no answer within {_CALL_S:g} s"
    except grpc.aio.AioRpcError as error:
        if _is_beyond_the_largest(error):
            return None
        if not any(key == _DETAILS for key, _ in error.trailing_metadata() or ()):
            return f"{place}: {len(raw)} bytes: {error.code().name} without a reason: {error.details()}"
        if error.code() is grpc.StatusCode.INTERNAL:
            return f"{place}: {len(raw)} bytes: {error.details()}"
    return None


def _is_beyond_the_largest(error: grpc.aio.AioRpcError) -> bool:
    """grpc's own refusal of a length, before the bytes: docs/limits.md, clients of ours read it as TOO_LARGE."""
    is_length = "larger than max" in (error.details() or "")
    return is_length and mesh_error_from_rpc(error).reason_name == "TOO_LARGE"


async def attack(mesh: Mesh, chosen: list[Place], *, at_once: int) -> list[str]:
    """Faults of all answers."""
    wrong: list[str] = []
    for place in chosen:
        async with raw_channel(mesh.cluster.address(daemon_of(place))) as channel:
            for size in sizes(place):
                raw = place.raw(size)
                answers = await asyncio.gather(*(answer_to(channel, place, raw) for _ in range(at_once)))
                wrong += [answer for answer in answers if answer is not None]
    return wrong


def container_mib() -> dict[str, int]:
    """Memory limit of each daemon's container in MiB, by service."""
    units = {"M": 1, "G": 1024}
    limits = {}
    for name, service in yaml.safe_load(_COMPOSE.read_text())["services"].items():
        memory = service["deploy"]["resources"]["limits"]["memory"]
        limits[name] = int(memory[:-1]) * units[memory[-1]]
    return limits


async def test_the_containers_are_as_small_as_is_said() -> None:
    assert set(SERVICES) <= container_mib().keys()
    assert {name: mib for name, mib in container_mib().items() if mib != 512} == {"worker": 2048}


def check_invariants(mesh: Mesh, pids: dict[str, int], baseline: Seen, seen: Seen, *, factor: float) -> None:
    assert mesh.cluster.pids == pids, "a daemon died"
    assert not seen.errors
    # Memory before stalls: of the two it is the one that ends a daemon.
    limits = container_mib()
    too_large = {name: mib for name, mib in seen.rss_mib.items() if mib > limits[name.rpartition("-")[0]]}
    assert not too_large, limits
    slack_s = seen.lag_s + _BUSY * max(baseline.stall_s, baseline.lag_s, *baseline.silence_s.values())
    assert seen.stall_s <= factor * MAX_STALL_S + slack_s, seen
    for name, silence_s in seen.silence_s.items():
        assert silence_s <= factor * MAX_SILENCE_S + slack_s, (name, seen)


async def test_each_field_at_its_bound_and_beyond_it(mesh: Mesh, baseline: Seen) -> None:
    """One place of each field, alone."""
    by_field = {place.field.full_name: place for place in reversed(PLACES)}
    pids = dict(mesh.cluster.pids)
    async with watched(mesh) as seen:
        wrong = await attack(mesh, list(by_field.values()), at_once=1)
    assert not wrong, "\n".join(wrong)
    check_invariants(mesh, pids, baseline, seen, factor=DAILY_FACTOR)
    assert len(by_field) == len(BOUNDS)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("daemon", ["router", "tokenizer", "detokenizer", "scheduler", "worker"])
async def test_each_place_of_each_rpc_thirty_two_at_once(mesh: Mesh, baseline: Seen, daemon: str) -> None:
    pids = dict(mesh.cluster.pids)
    async with watched(mesh) as seen:
        wrong = await attack(mesh, [place for place in PLACES if daemon_of(place) == daemon], at_once=32)
    assert not wrong, "\n".join(wrong)
    check_invariants(mesh, pids, baseline, seen, factor=1.0)


async def test_long_texts_are_told_so_and_hold_nobody_up(mesh: Mesh, baseline: Seen) -> None:
    """Six valid texts of 4 MiB that no context holds, and two calls that encode 8 MiB to the end."""
    text = "It was the best of times, it was the worst of times. " * ((4 << 20) // 54)
    whole = router_pb2.TokenizeRequest(items=[tokenizer_pb2.EncodeItem(text=text)] * 2)
    pids = dict(mesh.cluster.pids)

    async def reason(stub: router_pb2_grpc.RouterServiceAsyncStub) -> str:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.Generate(router_pb2.GenerateRequest(text=text), timeout=_CALL_S):
                pass
        return mesh_error_from_rpc(error.value).reason_name

    async with watched(mesh) as seen, open_channel(mesh.routers[0]) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        assert await asyncio.gather(*(reason(stub) for _ in range(6))) == ["PROMPT_TOO_LONG"] * 6
        tokenize = channel.unary_unary("/radixmesh.router.v1.RouterService/Tokenize")
        for answer in await asyncio.gather(*(tokenize(whole.SerializeToString(), timeout=_CALL_S) for _ in range(2))):
            items = router_pb2.TokenizeResponse.FromString(answer).items
            assert items[0].ids == items[1].ids and len(items[0].ids) > 4_000_000
    check_invariants(mesh, pids, baseline, seen, factor=DAILY_FACTOR)
