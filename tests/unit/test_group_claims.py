"""Claims of a group whose worker is not there yet."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.scheduler.group import group_client
from radixmesh.daemons.scheduler.group.group_client import GroupClient


async def test_a_worker_that_loads_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may load for minutes, and is asked several times a second."""
    errors = ["no connection", *["loading"] * 20, "failed", "over"]
    told: list[str] = []
    over = asyncio.Event()

    async def refused(self: GroupClient, *args: object) -> None:
        text = errors.pop(0)
        if not errors:
            over.set()
            await asyncio.sleep(60.0)
        raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, text)

    monkeypatch.setattr(GroupClient, "try_claim", refused)
    log = SimpleNamespace(info=lambda event, **fields: told.append(str(fields["error"])))
    monkeypatch.setattr(group_client, "log", log)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(group_client, "asyncio", SimpleNamespace(sleep=sleep))
    client = GroupClient([], "name", lambda state: None, lambda address: None)
    claiming = asyncio.ensure_future(client.claim())
    await asyncio.wait_for(over.wait(), 30.0)
    claiming.cancel()
    await asyncio.wait((claiming,))
    assert pauses[0] < 0.1 and max(pauses) <= 0.2, "a request would wait for the next try"
    assert [text.split(": ")[-1] for text in told] == ["no connection", "loading", "failed"]
