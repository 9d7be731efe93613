"""Gets hold of the worker group, again and again.

CONNECTING --hello, ready, free--> ADOPTING --claimed, records read--> SERVING --any loss--> CONNECTING
    |  ^                              |                                   |
    |  +-- holder gone or silent --+  +-- fenced --+    +-----  fenced ---+
    +-- another holder lives --> STANDBY <---------+----+

Scheduler restart, stream loss, refusal, divergence and hang are one path: new stream, new epoch, same KV, re-admit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

import grpc

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.group.worker_stream import WorkerStream
from radixmesh.daemons.scheduler.messages import group_from_proto, model_identity_of
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

# A live holder sends something every second.
_SILENT_MS = 5_000
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 1.0
_STANDBY_POLL_S = 0.5
_CONNECT_TIMEOUT_S = 5.0
_SNAPSHOT_TIMEOUT_S = 120.0


class GroupState(IntEnum):
    """Values as in `radixmesh.scheduler.v1.GroupState`."""

    CONNECTING = 1
    ADOPTING = 2
    SERVING = 3
    STANDBY = 4


class ClaimedGroup:
    """A group that this scheduler holds: its stream, what it is, the KV it has."""

    def __init__(self, stream: WorkerStream, info: GroupInfo, snapshot: CacheSnapshot, channel: grpc.aio.Channel):
        self.stream = stream
        self.info = info
        self.snapshot = snapshot
        self._channel = channel

    async def close(self) -> None:
        self.stream.close()
        await self._channel.close()


class GroupClient:
    """Claims the worker at `address` whenever nobody else lives on it. on_state: told of every change of state."""

    def __init__(
        self, address: str, instance_id: str, on_state: Callable[[GroupState], None], tls: TlsFiles | None = None
    ) -> None:
        self._address = address
        self._instance_id = instance_id
        self._on_state = on_state
        self._tls = tls
        self.identity = common_pb2.ModelIdentity()
        """Of the model that the group serves, as last seen."""

    async def claim(self) -> ClaimedGroup:
        """Returns once the group is ours, however long that takes."""
        backoff = _FIRST_BACKOFF_S
        while True:
            try:
                channel = open_channel(self._address, self._tls)
            except MeshError as error:  # Files of TLS that are half replaced.
                log.warning("group_not_claimed", worker=self._address, error=str(error))
                await asyncio.sleep(_MAX_BACKOFF_S)
                continue
            stream = WorkerStream(channel, make_hello(daemon="scheduler", instance_id=self._instance_id))
            try:
                group = await self._try_claim(stream, channel)
                if group is not None:
                    return group
                backoff = _STANDBY_POLL_S
            except (MeshError, TimeoutError) as error:
                log.info("group_not_claimed", worker=self._address, error=str(error) or "timeout")
                if isinstance(error, MeshError) and error.reason == ErrorReason.ERROR_REASON_EPOCH_FENCED:
                    self._on_state(GroupState.STANDBY)
                else:
                    self._on_state(GroupState.CONNECTING)
            except BaseException:
                await _drop(stream, channel)
                raise
            await _drop(stream, channel)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    async def _try_claim(self, stream: WorkerStream, channel: grpc.aio.Channel) -> ClaimedGroup | None:
        """None: another scheduler holds the group."""
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            hello = await stream.hello()
            if self._is_held(hello):
                self._on_state(GroupState.STANDBY)
                return None
            caps = hello.capabilities
            if caps.state != worker_pb2.WORKER_STATE_READY:
                raise MeshError(ErrorReason.ERROR_REASON_NOT_SERVING, "the worker is loading, or failed: waiting")
            info = group_from_proto(hello)
            await stream.claim(hello.highest_epoch + 1, caps.group_generation)
        self._on_state(GroupState.ADOPTING)
        self.identity = model_identity_of(hello)
        async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
            snapshot = await stream.snapshot(info.num_pages)
        return ClaimedGroup(stream, info, snapshot, channel)

    def _is_held(self, hello: worker_pb2.WorkerHello) -> bool:
        return (
            hello.is_holder_connected
            and hello.holder_instance_id not in ("", self._instance_id)
            and hello.holder_silent_ms <= _SILENT_MS
        )


async def _drop(stream: WorkerStream, channel: grpc.aio.Channel) -> None:
    stream.close()
    with suppress(grpc.aio.AioRpcError):
        await channel.close()
