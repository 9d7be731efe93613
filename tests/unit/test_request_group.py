"""Several requests behind one HTTP request: whose message is being written, and whose only waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from radixmesh.daemons.router.http.answers.request_group import RequestGroup
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.updates import Update
from radixmesh.daemons.router.router import Router
from radixmesh.router.v1 import router_pb2

NUM_MESSAGES = 3


class Stream:
    """Always has something to say, NUM_MESSAGES times."""

    def __init__(self) -> None:
        self.delivery = Delivery(cast("object", None), cast("object", None))  # type: ignore[arg-type]
        self.on_broken: Callable[[], None] | None = None
        self.num_taken = 0

    async def take(self) -> Update | None:
        self.delivery.stop_writing()
        if self.num_taken == NUM_MESSAGES:
            return None
        self.num_taken += 1
        self.delivery.start_writing()
        return Update()

    def close(self) -> None:
        pass


class Streams:
    def __init__(self) -> None:
        self.opened: list[Stream] = []

    def open(self, message: router_pb2.GenerateRequest, *, while_draining: bool) -> Stream:
        assert while_draining, "the group was let in: a drain that begins refuses none of its requests"
        self.opened.append(Stream())
        return self.opened[-1]


async def test_only_what_is_being_written_can_stall() -> None:
    """A request that waits while another's message goes to a slow client is not stalled."""
    router = Streams()
    group = RequestGroup(cast("Router", router), [router_pb2.GenerateRequest()] * 4, lambda: None)
    indexes = []
    while (item := await group.next()) is not None:
        for _ in range(8):
            await asyncio.sleep(0)  # The pumps go as far as they can.
        writing = [index for index, stream in enumerate(router.opened) if stream.delivery.writing_since is not None]
        assert writing == [item[0]]
        before = router.opened[item[0]].delivery.writing_since
        group.progressed()
        after = router.opened[item[0]].delivery.writing_since
        assert before is not None and after is not None and after >= before
        indexes.append(item[0])
    assert sorted(indexes) == sorted([0, 1, 2, 3] * NUM_MESSAGES)
    assert all(stream.delivery.writing_since is None for stream in router.opened)
    group.close()
