"""Gets hold of the worker group, again and again.

CONNECTING --all ranks fenced--> ADOPTING --claimed, records read--> SERVING --any loss--> CONNECTING
    |  ^                              |                                   |
    |  +-- holder gone or silent --+  +-- fenced --+    +-----  fenced ---+
    +-- another holder lives --> STANDBY <---------+----+

Scheduler restart, stream loss, refusal, divergence and hang are one path: new stream, new epoch, same KV, re-admit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum

from radixmesh.common.v1 import common_pb2
from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.scheduler.group.group_info import CacheSnapshot, GroupInfo
from radixmesh.daemons.scheduler.group.group_stream import GroupStream
from radixmesh.daemons.scheduler.group.rank_hellos import group_of, is_held
from radixmesh.daemons.scheduler.group.rank_transport import Connect, RankTransport
from radixmesh.daemons.scheduler.group.shared_experts import latest_placement
from radixmesh.daemons.scheduler.group.worker_stream import WorkerStream
from radixmesh.daemons.scheduler.messages import model_identity_of
from radixmesh.worker.v1 import worker_pb2

log = get_logger(__name__)

_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.05, 0.5
# A worker that loads is there: requests wait for it from the moment in which it is ready.
_LOADING_BACKOFF_S = 0.1
STANDBY_POLL_S = 0.5
_CONNECT_TIMEOUT_S = 5.0
_SNAPSHOT_TIMEOUT_S = 120.0
# Ranks meet: communicators are built.
_FORM_TIMEOUT_S = 120.0


class GroupState(IntEnum):
    """Values as in `radixmesh.scheduler.v1.GroupState`."""

    CONNECTING = 1
    ADOPTING = 2
    SERVING = 3
    STANDBY = 4


class ClaimedGroup:
    """A group that this scheduler holds: its stream, what it is, the KV it has."""

    def __init__(
        self,
        stream: GroupStream,
        info: GroupInfo,
        snapshots: Sequence[CacheSnapshot],
        transports: Sequence[RankTransport],
    ) -> None:
        self.stream = stream
        self.info = info
        self.snapshots = snapshots
        """Of each data-parallel rank."""
        self._transports = tuple(transports)

    async def close(self) -> None:
        self.stream.close()
        await _close(self._transports)


class GroupClient:
    """Claims the workers at `addresses`, by rank, whenever nobody else lives on them.

    on_state: told of every change of state. connect: a transport to each address, anew for every attempt.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        instance_id: str,
        on_state: Callable[[GroupState], None],
        connect: Connect,
    ) -> None:
        self._addresses = tuple(addresses)
        self._instance_id = instance_id
        self._on_state = on_state
        self._connect = connect
        self._last_stream: GroupStream | None = None
        self._last_error = ""
        self._random = random.Random(instance_id)
        self.identity = common_pb2.ModelIdentity()
        """Of the model that the group serves, as last seen."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the workers by rank."""
        return self._addresses

    async def claim(self) -> ClaimedGroup:
        """Returns once the group is ours, however long that takes."""
        backoff = _FIRST_BACKOFF_S
        while True:
            longest_s = _MAX_BACKOFF_S
            ranks: list[RankTransport] = []
            try:
                ranks.extend(self._connect(address) for address in self._addresses)
            except MeshError as error:  # Files of TLS that are half replaced.
                await _close(ranks)
                log.warning("group_not_claimed", workers=self._addresses, error=str(error))
                await asyncio.sleep(_MAX_BACKOFF_S)
                continue
            ours = make_hello(daemon="scheduler", instance_id=self._instance_id)
            stream = GroupStream([WorkerStream(rank, ours) for rank in ranks])
            try:
                group = await self.try_claim(stream, ranks)
                if group is not None:
                    self._last_stream, self._last_error = stream, ""
                    return group
                backoff = STANDBY_POLL_S
            except (MeshError, TimeoutError) as error:
                if str(error) != self._last_error:  # A worker that loads says the same for minutes.
                    log.info("group_not_claimed", workers=self._addresses, error=str(error) or "timeout")
                self._last_error = str(error)
                if isinstance(error, MeshError) and error.reason == ErrorReason.ERROR_REASON_NOT_SERVING:
                    longest_s = _LOADING_BACKOFF_S
                if isinstance(error, MeshError) and error.reason == ErrorReason.ERROR_REASON_EPOCH_FENCED:
                    self._on_state(GroupState.STANDBY)
                else:
                    self._on_state(GroupState.CONNECTING)
                if isinstance(error, MeshError) and error.reason == ErrorReason.ERROR_REASON_RANKS_DIVERGED:
                    stream.must_form = True
                    self._last_stream = stream
            except BaseException:
                stream.close()
                await _close(ranks)
                raise
            stream.close()
            await _close(ranks)
            # Two schedulers that fence each other's ranks at once must not go on in step. Nobody fences one that loads.
            is_loading = longest_s == _LOADING_BACKOFF_S
            jitter = self._random.random() if len(self._addresses) > 1 and not is_loading else 0.0
            await asyncio.sleep(min(backoff, longest_s) * (1.0 + jitter))
            backoff = min(2 * backoff, longest_s)

    async def try_claim(self, stream: GroupStream, ranks: Sequence[RankTransport]) -> ClaimedGroup | None:
        """None: another scheduler holds the group."""
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            hellos = await stream.hello()
            if is_held(hellos, self._instance_id):
                self._on_state(GroupState.STANDBY)
                return None
            info = group_of(hellos)
            epoch = 1 + max(hello.highest_epoch for hello in hellos)
            is_whole = await stream.fence(hellos, epoch)
        async with stream.kept_alive():
            return await self._begin(stream, ranks, hellos, info, epoch, is_whole=is_whole)

    async def _begin(
        self,
        stream: GroupStream,
        ranks: Sequence[RankTransport],
        hellos: Sequence[worker_pb2.WorkerHello],
        info: GroupInfo,
        epoch: int,
        *,
        is_whole: bool,
    ) -> ClaimedGroup:
        """The epoch on fenced ranks. is_whole: see GroupStream.fence()."""
        stream.shaped(info)
        generation = info.group_generation
        may_differ = not is_whole or (self._last_stream is not None and self._last_stream.must_form)
        if len(hellos) > 1 and (generation == 0 or may_differ):
            async with asyncio.timeout(_FORM_TIMEOUT_S):
                generation = await stream.form(hellos, epoch, latest_placement(hellos))
            self._last_stream = None
            info = replace(info, group_generation=generation)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await stream.claim(epoch, generation)
        except TimeoutError:
            # Steps that do not end: a rank may wait in a collective for one that has left it.
            stream.must_form = len(hellos) > 1
            self._last_stream = stream
            raise
        if info.experts is not None and (placement := stream.placement) is not None:
            info = replace(info, experts=info.experts.placed(placement))
        self._on_state(GroupState.ADOPTING)
        self.identity = model_identity_of(hellos[0])
        async with asyncio.timeout(_SNAPSHOT_TIMEOUT_S):
            capabilities = [hello.capabilities for hello in hellos]
            snapshots = await stream.snapshots([(caps.num_pages, caps.num_host_pages) for caps in capabilities])
        return ClaimedGroup(stream, info, snapshots, ranks)


async def _close(ranks: Sequence[RankTransport]) -> None:
    for rank in ranks:
        await rank.close()
