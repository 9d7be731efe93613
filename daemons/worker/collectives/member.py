"""A rank that computes with others: takes part in generations of its group, one communicator each."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from radixmesh.daemons.runtime.addresses import split_host_port
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.communicator import Communicator, Connect, Meeting
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.group_member import CollectiveAborted, RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_BACKLOG = 1024
# Threads: an attempt that nobody waits for any more goes on until a library's time limit, a minute or two.
_MOST_ATTEMPTS = 64


class CollectiveMember:
    """A rank of a tensor-parallel group. host: the address of this machine by which the other ranks reach it.

    Rank 0 holds the store in which the ranks of a generation exchange their addresses, for as long as it lives.
    """

    def __init__(self, layout: RankLayout, host: str, connect: Connect = GlooCommunicator) -> None:
        self.layout = layout
        self.group = RankGroup(layout.tp_rank, layout.tp_size)
        self.rendezvous = ""
        self._host = host
        self._connect = connect
        self._lock = threading.Lock()
        self._attempt: _Attempt | None = None
        self._num_attempts = 0
        self._store_lock = threading.Lock()
        self._store: TCPStore | None = None
        self._listener: socket.socket | None = None
        if layout.rank == 0:
            self._listener = _listen(host)
            self.rendezvous = f"{f'[{host}]' if ':' in host else host}:{self._listener.getsockname()[1]}"

    @property
    def is_whole(self) -> bool:
        communicator = self.group.communicator
        return communicator is not None and communicator.is_whole

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
        name = f"{generation}/{layout.dp_rank}/{members}"
        meeting = Meeting(address=address, name=name, host=self._host, rank=layout.tp_rank, size=layout.tp_size)
        with self._lock:
            if self._num_attempts >= _MOST_ATTEMPTS:
                raise RankLost(f"{_MOST_ATTEMPTS} attempts to meet others are not over yet: form the group in a minute")
            self._num_attempts += 1
            attempt = self._attempt = _Attempt()
        # The libraries' calls cannot be interrupted: they go on in a thread whose outcome nobody may want any more.
        threading.Thread(target=self._run, args=(attempt, meeting), name="group-meets", daemon=True).start()
        attempt.is_over.wait()
        with self._lock:
            if attempt is not self._attempt or attempt.communicator is None:
                raise attempt.error or CollectiveAborted(f"{meeting.name} was left while it formed")
            self.group.communicator = attempt.communicator

    def abort(self) -> None:
        with self._lock:
            attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abandon()

    def _run(self, attempt: _Attempt, meeting: Meeting) -> None:
        attempt.run(lambda: self._meet(meeting))
        with self._lock:
            self._num_attempts -= 1

    def _meet(self, meeting: Meeting) -> Communicator:
        # An attempt that was abandoned may still be here.
        with self._store_lock:
            if self._listener is not None and self._store is None:
                self._open_store(self._listener)
            if self._store is not None:
                self._forget_former(self._store, _generation_of(meeting.name))
        return self._connect(meeting)

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
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


class RankGroup:
    """The ranks of a tensor-parallel group as maths sees them, whatever generation they are in."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.communicator: Communicator | None = None
        self._is_alone = False

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_alone:
            return x
        # In the order of the ranks, whoever comes first, and on all ranks alike. Half precision adds in float32.
        gathered = self._gather(x)
        total = gathered[0].float() if x.is_floating_point() else gathered[0]
        for rank in range(1, self.size):
            total = total + gathered[rank]
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        assert len(widths) == self.size and x.shape[-1] == widths[self.rank], (x.shape, widths, self.rank)
        if self._is_alone:
            parts = [x if rank == self.rank else x.new_zeros(*x.shape[:-1], width) for rank, width in enumerate(widths)]
            return torch.cat(parts, dim=-1)
        widest = max(widths)
        if x.shape[-1] < widest:
            x = torch.cat((x, x.new_zeros(*x.shape[:-1], widest - x.shape[-1])), dim=-1)
        parts = [part[..., :width] for part, width in zip(self._gather(x), widths, strict=True)]
        return torch.cat(parts, dim=-1)

    @contextmanager
    def alone(self) -> Iterator[None]:
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.communicator is None:
            raise CollectiveAborted("the worker is in no group")
        return self.communicator.gather(x)


class _Attempt:
    """One try to meet the others, and what came of it."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.communicator: Communicator | None = None
        self.error: Exception | None = None
        self._lock = threading.Lock()
        self._is_abandoned = False

    def run(self, connect: Callable[[], Communicator]) -> None:
        """Blocks until the others are there, or long enough; raises nothing."""
        try:
            communicator = connect()
        except Exception as error:
            self.error = error
        else:
            with self._lock:
                if self._is_abandoned:
                    communicator.close()
                else:
                    self.communicator = communicator
        self.is_over.set()

    def abandon(self) -> None:
        """Nobody wants its outcome any more."""
        with self._lock:
            self._is_abandoned = True
            if self.communicator is not None:
                self.communicator.close()
        self.is_over.set()


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
