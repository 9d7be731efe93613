"""Collectives between CPUs by gloo, through torch.distributed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.collectives.communicator import Communicator, Meeting
from radixmesh.daemons.worker.collectives.heartbeat import MISSED_ROUNDS, PERIOD_S, Heartbeat
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted, RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = get_logger(__name__)

_CONNECT_S = 60.0
# Between two looks at who has come: many ranks ask one store.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.05
# Far beyond what a scheduler takes to complete the broadcast of another that died: a last resort.
_COLLECTIVE_S = 300.0
# Time within which a waiting collective notices that it was aborted, or that a rank is lost.
_POLL = timedelta(milliseconds=100)


class GlooCommunicator(Communicator):
    """A process group of its own. A dead rank's connections are closed by its machine, which gloo reports at once; a
    rank that hangs is found out by its heartbeat."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._is_closed = False
        self._failure = ""
        # A collective that began behind close() would run when the process group goes, which waits for it.
        self._starting = threading.Lock()
        self._running: list[dist.Work] = []
        try:
            alive, store = _store(meeting), _store(meeting)
            _await_ranks(store, meeting)
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
            options._timeout = timedelta(seconds=_CONNECT_S)
            self._process_group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
                store, meeting.rank, meeting.size, options
            )
            self._process_group._set_default_timeout(timedelta(seconds=_COLLECTIVE_S))
        except RuntimeError as error:
            raise RankLost(f"the ranks of {meeting.name} did not meet: {_first_line(error)}") from error
        # All ranks are there: one that came late to the meeting has not been silent.
        self.heartbeat = Heartbeat(alive, meeting.rank, meeting.size)

    def new_store(self, name: str) -> Store:
        """A store that the ranks of this generation share under a name, by a connection of its own."""
        return dist.PrefixStore(name, _store(self._meeting))  # type: ignore[attr-defined]

    @property
    def is_whole(self) -> bool:
        return not self._is_closed and not self._failure and not self.heartbeat.lost

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.check()
        x = x.contiguous()
        gathered = torch.empty((self._meeting.size, *x.shape), dtype=x.dtype)
        flat = gathered.view(self._meeting.size, -1), x.view(1, -1)
        self._complete(lambda process_group: process_group._allgather_base(*flat))  # type: ignore[attr-defined]
        return gathered

    def all_to_all(self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> torch.Tensor:
        return self.start_all_to_all(x, to_ranks, from_ranks)()

    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        self.check()
        x = x.contiguous()
        assert len(x) == sum(to_ranks), (x.shape, to_ranks)
        came = torch.empty((sum(from_ranks), *x.shape[1:]), dtype=x.dtype)
        options = dist.AllToAllOptions()
        splits = list(from_ranks), list(to_ranks)
        work = self._start(lambda process_group: process_group.alltoall_base(came, x, *splits, options))  # type: ignore[attr-defined]

        def finish() -> torch.Tensor:
            self._finish(work)
            # Rows that are sent have to be there until then.
            assert len(x) == sum(to_ranks)
            return came

        return finish

    def _complete(self, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        """Starts a collective and waits for it."""
        self._finish(self._start(start))

    def _start(self, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> dist.Work:
        if self._process_group is None:
            raise self._lost(self._failure or "a connection failed")
        with self._starting:
            if self._is_closed:
                raise self._left()
            try:
                work = start(self._process_group)
            except RuntimeError as error:
                raise self._failed(error) from error
            self._running.append(work)
            return work

    def _finish(self, work: dist.Work) -> None:
        try:
            self._await(work)
        except RuntimeError as error:
            raise self._failed(error) from error
        self._running.remove(work)

    def _failed(self, error: RuntimeError) -> RankLost:
        # Whoever waits for this rank learns of it by the connections that close here.
        self._process_group = None
        return self._lost(f"a connection failed: {_first_line(error)}")

    def close(self) -> None:
        with self._starting:
            if self._is_closed:
                return
            self._is_closed = True
        self.heartbeat.stop()
        # A process group waits for its running collectives when it goes: none of our threads may drop it before.
        threading.Thread(target=self._outlive_work, name="group-leaves", daemon=True).start()

    def _await(self, work: dist.Work) -> None:
        rounds, polls = self.heartbeat.num_rounds, 0
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # Raises what it failed of; it may have completed since.
                    return
            self.check()
            # The heartbeat's own thread waits for the store, in rank 0, if that hangs.
            rounds, polls = self.heartbeat.num_rounds, polls + 1 if rounds == self.heartbeat.num_rounds else 0
            if polls * _POLL.total_seconds() > MISSED_ROUNDS * PERIOD_S:
                raise self._lost("the group's store at rank 0 does not answer")

    def check(self) -> None:
        if self._is_closed:
            raise self._left()
        if self._failure or self.heartbeat.lost:
            raise self._lost(self._failure or self.heartbeat.lost)

    def _left(self) -> CollectiveAborted:
        return CollectiveAborted(f"{self._meeting.name} was left")

    def _lost(self, why: str) -> RankLost:
        if not self._failure:
            self._failure = why
            _log.warning("rank_lost", group=self._meeting.name, rank=self._meeting.rank, error=why)
            self.heartbeat.stop()
        return RankLost(f"{self._meeting.name}: {why}")

    def _outlive_work(self) -> None:
        while any(not work.is_completed() for work in self._running):
            time.sleep(_POLL.total_seconds())


def _store(meeting: Meeting) -> Store:
    """A connection of its own: a call that waits holds up all others on the same one."""
    host, port = meeting.address
    timeout = timedelta(seconds=_CONNECT_S)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(meeting.name, store)  # type: ignore[attr-defined]


def _await_ranks(store: Store, meeting: Meeting) -> None:
    """Returns when all ranks have come. gloo would wait for them too, but in a call that nothing ends: a process that
    ended meanwhile would be aborted by the thread that comes back from it.

    Raises RankLost or CollectiveAborted.
    """
    store.set(f"here/{meeting.rank}", "")
    store.add("num_here", 1)
    deadline, pause_s = time.monotonic() + _CONNECT_S, _LEAST_PAUSE_S
    while store.add("num_here", 0) < meeting.size:
        if not meeting.is_wanted():
            raise CollectiveAborted(f"{meeting.name} was left while it formed")
        if time.monotonic() > deadline:
            missing = [rank for rank in range(meeting.size) if not store.check([f"here/{rank}"])]
            raise RankLost(f"{meeting.name}: ranks {missing} did not come within {_CONNECT_S:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _first_line(error: RuntimeError) -> str:
    # "[a source file] what happened. Advice."
    return re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0]).split(". ")[0][:300]
