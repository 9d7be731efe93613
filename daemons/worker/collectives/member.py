"""A rank that computes with others: takes part in generations of its group, one communicator each."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from radixmesh.daemons.runtime.addresses import split_host_port
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.communicator import Communicator, Connect, Meeting
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.experts.expert_dispatch import ExpertDispatch
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted, RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_BACKLOG = 1024
# Threads: an attempt that nobody waits for any more goes on until a library's time limit, a minute or two.
MOST_ATTEMPTS = 64


class CollectiveMember:
    """A rank that computes with those of its batch (tensor parallelism), with those that share its experts, or with
    both. host: the address of this machine by which the other ranks reach it. redundant_experts: see AllToAllDispatch.

    Rank 0 holds the store in which the ranks of a generation exchange their addresses, for as long as it lives.
    """

    def __init__(
        self, layout: RankLayout, host: str, connect: Connect = GlooCommunicator, *, redundant_experts: int = 0
    ) -> None:
        self.layout = layout
        self._redundant_experts = redundant_experts
        self.group = RankGroup(layout.tp_rank, layout.tp_size)
        self.expert_group = RankGroup(layout.ep_rank, layout.ep_size)
        self.rendezvous = ""
        self._host = host
        self.connect = connect
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._num_attempts = 0
        self._store_lock = threading.Lock()
        self.store: TCPStore | None = None
        self._listener: socket.socket | None = None
        if layout.rank == 0:
            self._listener = _listen(host)
            self.rendezvous = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    @property
    def experts(self) -> ExpertDispatch | None:
        if self.expert_group.size == 1:
            return None
        return AllToAllDispatch(self.expert_group, self._redundant_experts)

    @property
    def is_whole(self) -> bool:
        communicators = [group.communicator for group in self._groups]
        return all(communicator is not None and communicator.is_whole for communicator in communicators)

    @property
    def _groups(self) -> list[RankGroup]:
        """Those that have other ranks, in the order in which they meet: the same on all ranks."""
        return [group for group in (self.group, self.expert_group) if group.size > 1]

    def form(self, generation: int, rendezvous: str, member_instance_ids: Sequence[str]) -> None:
        layout = self.layout
        if len(member_instance_ids) != layout.world_size:
            raise RankLost(f"{len(member_instance_ids)} members for a group of {layout.world_size} ranks")
        try:
            address = split_host_port(rendezvous)
        except MeshError as error:
            raise RankLost(f"rank 0 names no place to meet: {error}") from error
        self.abort()
        # Named by its members too: a worker that restarts must not meet those of a former life.
        members = ",".join(member_instance_ids)
        names = {
            self.group: f"{generation}/{layout.dp_rank}/{members}",
            self.expert_group: f"{generation}/experts-{layout.rank // layout.ep_size}/{members}",
        }
        attempt = _Attempt()
        meetings = [
            Meeting(
                address=address,
                name=names[group],
                host=self._host,
                rank=group.rank,
                size=group.size,
                is_wanted=attempt.is_wanted,
            )
            for group in self._groups
        ]
        with self._lock:
            if self._num_attempts >= MOST_ATTEMPTS:
                raise RankLost(f"{MOST_ATTEMPTS} attempts to meet others are not over yet: form the group in a minute")
            self._num_attempts += 1
            self._attempt = attempt
        # Calls of a library cannot be interrupted: they go on in a thread whose outcome nobody may want any more.
        arguments = (attempt, generation, meetings)
        threading.Thread(target=self._run, args=arguments, name="group-meets", daemon=True).start()
        attempt.is_over.wait()
        with self._lock:
            if attempt is not self._attempt or not attempt.communicators:
                raise attempt.error or CollectiveAborted(f"generation {generation} was left while it formed")
            for group, communicator in zip(self._groups, attempt.communicators, strict=True):
                group.communicator = communicator

    def abort(self) -> None:
        with self._lock:
            attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abandon()

    def _run(self, attempt: _Attempt, generation: int, meetings: Sequence[Meeting]) -> None:
        attempt.run(lambda: self._meet(generation, meetings), self._ended)

    def _ended(self) -> None:
        with self._lock:
            self._num_attempts -= 1

    def _meet(self, generation: int, meetings: Sequence[Meeting]) -> list[Communicator]:
        # An attempt that was abandoned may still be here.
        with self._store_lock:
            if self._listener is not None and self.store is None:
                self._open_store(self._listener)
            if self.store is not None:
                self._forget_former(self.store, generation)
        communicators: list[Communicator] = []
        try:
            communicators.extend(self.connect(meeting) for meeting in meetings)
        except Exception:
            _close(communicators)
            raise
        return communicators

    def _forget_former(self, store: TCPStore, generation: int) -> None:
        """Deletes all that former generations wrote: groups may be formed as often as ranks die."""
        if not hasattr(store, "list_keys"):  # Older versions of torch; a few KiB a generation stay.
            return
        for key in store.list_keys():
            # Ranks may have come for a later one already, if this attempt was abandoned.
            if _generation_of(key) < generation:
                store.delete_key(key)

    def _open_store(self, listener: socket.socket) -> None:
        """Rank 0's, on the socket that it has listened on from the start."""
        import torch.distributed as dist

        host, port = listener.getsockname()[:2]
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


class _Attempt:
    """One try to meet the others, and what came of it."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.communicators: list[Communicator] = []
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._is_abandoned = False

    def run(self, connect: Callable[[], list[Communicator]], on_end: Callable[[], None]) -> None:
        """Blocks until the others are there, or long enough; raises nothing. on_end: called before the caller hears."""
        try:
            communicators = connect()
        except Exception as error:
            self.error = error
        else:
            with self._lock:
                if self._is_abandoned:
                    _close(communicators)
                else:
                    self.communicators = communicators
        on_end()
        self.is_over.set()

    def is_wanted(self) -> bool:
        return not self._is_abandoned

    def abandon(self) -> None:
        """Nobody wants its outcome any more."""
        with self._lock:
            self._is_abandoned = True
            _close(self.communicators)
        self.is_over.set()


def _close(communicators: Sequence[Communicator]) -> None:
    for communicator in communicators:
        communicator.close()


def _generation_of(key: str) -> int:
    """Of a meeting's name, or a key that begins with it; -1: of none."""
    generation = key.partition("/")[0]
    return int(generation) if generation.isdecimal() else -1


def _listen(host: str) -> socket.socket:
    family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.bind(address)
    listener.listen(_BACKLOG)
    return listener
