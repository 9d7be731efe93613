"""A request's stream as its connection holds it: begun once, ended once, however it ends; and the table of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from radixmesh.daemons.router.requests.request_stream import RequestStream, StreamTable
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.router.v1 import router_pb2

ABORTED = MeshError(ErrorReason.ERROR_REASON_ABORTED, "the request was aborted")


class Owner:
    """Notes what streams ask of it. is_slow: requests are resolved once `go` is set."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.calls: list[str] = []
        self.go = asyncio.Event()
        if not is_slow:
            self.go.set()

    async def start(self, stream: RequestStream) -> Any:
        self.calls.append("start")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.calls.append("cancelled")
            raise
        return f"request of {stream.request_id}"

    def begin(self, stream: RequestStream, request: Any) -> None:
        self.calls.append("begin")

    def release(self, stream: RequestStream) -> None:
        self.calls.append("release")


class Client:
    """A delivery with three updates. writing_since: as of a message that is being written."""

    def __init__(self, *, is_writing: bool = False) -> None:
        self.writing_since = 1.0 if is_writing else None
        self.updates = [1, 2, 3]
        self.error: MeshError | None = None

    async def take(self) -> int | None:
        return self.updates.pop(0) if self.updates else None

    def fail(self, error: MeshError) -> None:
        self.error = error


def stream_of(owner: Owner, client: Client | None = None, *, request_id: str = "r", tenant: str = "") -> RequestStream:
    message = router_pb2.GenerateRequest(tenant=tenant)
    return RequestStream(owner, message, request_id, client or Client())  # type: ignore[arg-type]


async def test_a_stream_begins_its_request_once_and_releases_it_once() -> None:
    owner = Owner()
    stream = stream_of(owner)
    assert owner.calls == [], "nothing runs before the first take"
    assert [await stream.take() for _ in range(4)] == [1, 2, 3, None]
    assert owner.calls == ["start", "begin"] and stream.request == "request of r"
    stream.close()
    stream.close()
    assert owner.calls == ["start", "begin", "release"]


async def test_frames_to_peers_leave_ahead_of_the_first_message_to_the_client() -> None:
    owner = Owner()
    owner.begin = lambda stream, request: asyncio.get_running_loop().call_soon(owner.calls.append, "sent")  # type: ignore[method-assign, assignment]
    assert await stream_of(owner).take() == 1
    assert owner.calls == ["start", "sent"]


async def test_a_stream_that_fails_while_its_request_is_resolved_raises_that_error_and_begins_nothing() -> None:
    owner, client = Owner(is_slow=True), Client()
    stream = stream_of(owner, client)
    taking = asyncio.ensure_future(stream.take())
    while not owner.calls:
        await asyncio.sleep(0)
    stream.fail(ABORTED)
    stream.fail(MeshError(ErrorReason.ERROR_REASON_INTERNAL, "too late"))
    with pytest.raises(MeshError) as raised:
        await taking
    assert raised.value is ABORTED is client.error is stream.error
    assert owner.calls == ["start", "cancelled"]


async def test_a_client_that_leaves_while_its_request_is_resolved_cancels_that() -> None:
    owner = Owner(is_slow=True)
    taking = asyncio.ensure_future(stream_of(owner).take())
    while not owner.calls:
        await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    while "cancelled" not in owner.calls:
        await asyncio.sleep(0)
    assert "begin" not in owner.calls


@pytest.mark.parametrize("is_writing", [False, True])
async def test_only_a_consumer_that_writes_is_told_to_stop_that(is_writing: bool) -> None:
    told: list[str] = []
    stream = stream_of(Owner(), Client(is_writing=is_writing))
    await stream.take()
    stream.on_broken = lambda: told.append("broken")
    stream.fail(ABORTED)
    stream.fail(ABORTED)
    assert told == ["broken"] * is_writing


async def test_a_closed_stream_fails_no_more() -> None:
    client = Client()
    stream = stream_of(Owner(), client)
    stream.close()
    stream.fail(ABORTED)
    assert stream.error is client.error is None


def test_a_resumed_request_has_the_tenant_and_the_count_of_its_resume() -> None:
    resume = router_pb2.Resume(resolved=router_pb2.Resolved(tenant="t"), resumption=3)
    message = router_pb2.GenerateRequest(resume=resume, tenant="other")
    stream = RequestStream(SimpleNamespace(), message, "r", Client())  # type: ignore[arg-type]
    assert (stream.tenant, stream.resumption) == ("t", 3)


async def test_an_id_is_a_name_within_its_tenant() -> None:
    table, owner = StreamTable(), Owner()
    one, other, elsewhere = (
        stream_of(owner, request_id=name, tenant=tenant) for name, tenant in (("r", "a"), ("r", "b"), ("s", "a"))
    )
    for stream in (one, other, elsewhere):
        table.add(stream)
    assert len(table) == 3 and set(table) == {one, other, elsewhere}
    assert table.get("r", "a") is one and table.get("r", "b") is other and table.get("s", "b") is None
    assert table.of_id("r", None) == [one, other] and table.of_id("r", "b") == [other] and table.of_id("t", None) == []
    with pytest.raises(AssertionError):
        table.add(stream_of(owner, request_id="r", tenant="a"))
    table.remove(one)
    table.remove(one)
    assert len(table) == 2 and table.get("r", "a") is None and table.get("r", "b") is other
    successor = stream_of(owner, request_id="r", tenant="a")
    table.add(successor)
    table.remove(one)
    assert table.get("r", "a") is successor, "a stream removes itself alone"
    for stream in (successor, other, elsewhere):
        table.remove(stream)
    assert len(table) == 0 and list(table) == [] and table.of_id("r", None) == []
