"""The ranks of one generation of a group as NCCL connects them; NVLink multicast is off.

A graph holds the communicator that it was captured with, so that graphs are of one generation: they are dropped before
the communicator is, and captured anew. Aborting a communicator frees the device at once, and returns when the last of
its graphs is gone: a thread of its own waits for that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.ranks.group_member import RankLost

_log = get_logger(__name__)

_POLL_S = 0.02
_CONNECT_S = 60.0


class NcclRanks:
    """name: of these ranks' store, unlike that of any other ranks of the group. instead: flags for where there is no
    NCCL."""

    def __init__(self, ranks: RankGroup, device: Device, name: str, instead: str) -> None:
        """Raises MeshError UNSUPPORTED where this torch has no NCCL."""
        if not dist.is_nccl_available():
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"this torch brings no NCCL: choose {instead}",
                {"feature": "nccl"},
            )
        # Multicast resets whole machines where its service is not set up.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        self._ranks, self._device, self._name = ranks, device, name
        self._process_group: dist.ProcessGroupNCCL | None = None

    @property
    def is_formed(self) -> bool:
        return self._process_group is not None

    def form(self) -> None:
        """Connects; blocks until the others do. Raises RankLost."""
        ranks, communicator = self._ranks, self._ranks.communicator
        assert isinstance(communicator, GlooCommunicator), "NCCL meets where the ranks have met on their hosts"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_CONNECT_S)
        try:
            store = communicator.new_store(self._name)
            self._process_group = group = dist.ProcessGroupNCCL(store, ranks.rank, ranks.size, options)
            # Connects: within a capture it could not.
            self.sum(torch.zeros(1, device=self._device.torch_device))
            self._device.record_event().wait()
        except RuntimeError as error:
            raise RankLost(f"the ranks did not meet through NCCL: {str(error).splitlines()[0][:300]}") from error
        threading.Thread(target=_watch, args=(communicator, group), name="nccl-watch", daemon=True).start()

    def leave(self) -> None:
        self._process_group = None

    def sum(self, x: torch.Tensor) -> None:
        """Adds the others' x to x in place."""
        with _aborts_told(self._ranks):
            self._group.allreduce([x]).wait()  # type: ignore[attr-defined]

    def start_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """[ranks, *x.shape]: every rank's x. It travels beside what the current stream is given next; the stream waits
        for it when the result is called for, which is to be done once."""
        x = x.contiguous()
        gathered = x.new_empty(self._ranks.size, *x.shape)
        with _aborts_told(self._ranks):
            work = self._group._allgather_base(gathered.view(-1), x.view(-1))  # type: ignore[attr-defined]
        return _waited(self._ranks, work, gathered, x)

    def start_all_to_all(
        self, x: torch.Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """As Communicator.start_all_to_all; see start_gather()."""
        x = x.contiguous()
        came = x.new_empty(sum(from_ranks), *x.shape[1:])
        options = dist.AllToAllOptions()
        with _aborts_told(self._ranks):
            work = self._group.alltoall_base(came, x, list(from_ranks), list(to_ranks), options)  # type: ignore[attr-defined]
        return _waited(self._ranks, work, came, x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.start_gather(x)()

    @property
    def _group(self) -> dist.ProcessGroupNCCL:
        assert self._process_group is not None, "the ranks have not met"
        return self._process_group


@contextmanager
def _aborts_told(ranks: RankGroup) -> Iterator[None]:
    """Raises CollectiveAborted for what the library says of a communicator that was aborted since the last check: the
    step left because another rank was lost, and nothing died here."""
    try:
        yield
    except RuntimeError:
        ranks.check()
        raise


def _waited(ranks: RankGroup, work: dist.Work, result: torch.Tensor, sent: torch.Tensor) -> Callable[[], torch.Tensor]:
    # The input has to stay until then: the stream of the collective does not keep its memory.
    kept = [sent]

    def wait() -> torch.Tensor:
        with _aborts_told(ranks):
            work.wait()
        kept.clear()
        return result

    return wait


def _watch(communicator: GlooCommunicator, group: dist.ProcessGroupNCCL) -> None:
    """Ends collectives that wait for a lost rank."""
    pause = threading.Event()
    while communicator.is_whole:
        pause.wait(_POLL_S)
    _log.info("nccl_aborted")
    try:
        group.abort()
    except RuntimeError as error:
        _log.warning("nccl_abort_failed", error=str(error).splitlines()[0][:300])
