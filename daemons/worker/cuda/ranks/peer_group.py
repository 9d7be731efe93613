"""Ranks on one host whose kernels read each other's memory (`kernels/peer_collectives.py`), inside CUDA graphs.

Addresses of the others are in a table on the device, which is written when the group is formed: graphs outlive a
generation, and a rank that has lost another one serves again without capturing anything. A thread looks whether the
group is whole, and has waiting kernels leave when it is not.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.cuda.ranks.peer_memory import HANDLE_BYTES, PeerMemory
from radixmesh.kernels.peer_collectives import (
    ABORT_ADDRESS,
    FIRST_RANK,
    IS_FORMED,
    MAX_RANKS,
    PEER_BYTES,
    TAG,
    PeerTable,
    gather_of_ranks,
    sum_of_ranks,
)

_log = get_logger(__name__)

_POLL_S = 0.02
_TOKEN_BYTES = 16
_HOST_BYTES = 64
# Rounds of a channel in one generation: flags of a later one are higher than any of an earlier one.
_ROUND_BITS = 44


class PeerGroup(DeviceGroup):
    def __init__(self, ranks: RankGroup, device: Device, memory: PeerMemory) -> None:
        """Raises MeshError INVALID_ARGUMENT for more ranks than the kernels are for."""
        super().__init__(ranks)
        if ranks.size > MAX_RANKS:
            raise MeshError(
                ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
                f"tp_size is {ranks.size}: {MAX_RANKS} ranks at most read each other's memory; choose "
                "--tp-collectives nccl",
                {"field": "tp_size"},
            )
        self._device, self._memory = device, memory
        self._own = memory.allocate(PEER_BYTES)
        # Distinguishes this process from any other that may have had its handle, or has the same one.
        self._token = os.urandom(_TOKEN_BYTES)
        self._table = PeerTable.alone(ranks.rank, ranks.size, device.torch_device)
        self._opened: dict[bytes, int] = {}
        self._num_formed = 0
        self._watch: _Watch | None = None

    def form(self) -> None:
        # Kernels of the generation before have left: their group is not whole.
        self._device.record_event().wait()
        table, memory = self._table, self._memory
        table.entries.zero_()
        self._device.record_event().wait()
        memory.clear(self._own, PEER_BYTES)
        described = self._token + _host().ljust(_HOST_BYTES)[:_HOST_BYTES] + memory.handle(self._own)
        told = self.ranks.stack(torch.frombuffer(bytearray(described), dtype=torch.uint8))
        addresses = self._open([bytes(each) for each in told.numpy()])
        # The generation that all of them are in; one that was restarted has formed fewer.
        numbers = self.ranks.stack(torch.tensor([self._num_formed]))
        self._num_formed = int(numbers.max()) + 1
        abort_word = self._device.host_ints(1)
        entries = torch.zeros(len(table.entries), dtype=torch.int64)
        entries[IS_FORMED] = 1
        entries[ABORT_ADDRESS] = abort_word.data_ptr()
        entries[TAG] = self._num_formed << _ROUND_BITS
        entries[FIRST_RANK:] = torch.tensor(addresses)
        table.counts.zero_()
        table.aborted.zero_()
        # Ahead of the first kernel that may wait.
        self._watch = _Watch(self.ranks, abort_word)
        # All have cleared their flags before anybody sets one.
        self.ranks.stack(torch.zeros(1))
        table.entries.copy_(entries)
        self._device.record_event().wait()

    def _open(self, described: Sequence[bytes]) -> list[int]:
        """Addresses by rank. Raises MeshError UNSUPPORTED."""
        former, self._opened = self._opened, {}
        addresses = []
        for each in described:
            token, host, handle = each[:_TOKEN_BYTES], each[_TOKEN_BYTES:-HANDLE_BYTES], each[-HANDLE_BYTES:]
            if token == self._token:
                addresses.append(self._own)
                continue
            if host.rstrip() != _host():
                raise MeshError(
                    ErrorReason.ERROR_REASON_UNSUPPORTED,
                    "the ranks are on several hosts, where they cannot read each other's memory: choose "
                    "--tp-collectives nccl",
                    {"feature": "tp_collectives"},
                )
            name = token + handle
            self._opened[name] = former.pop(name) if name in former else self._memory.open(handle)
            addresses.append(self._opened[name])
        for address in former.values():
            self._memory.close(address)
        return addresses

    def add_reduced(self, x_TN: torch.Tensor, residual_TN: torch.Tensor) -> None:
        sum_of_ranks(x_TN.contiguous(), self._table, residual_TN, out=residual_TN)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_of_ranks(x.contiguous(), self._table)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return gather_of_ranks(x.contiguous(), self._table, sum(widths))


class _Watch:
    """Sets the word that kernels look at as soon as the group of one generation is not whole any more."""

    def __init__(self, ranks: RankGroup, abort_word: torch.Tensor) -> None:
        communicator = ranks.communicator
        assert communicator is not None
        self._communicator = communicator
        # The tensor owns the memory that the table on the device names.
        self._tensor, self._word = abort_word, abort_word.numpy()
        threading.Thread(target=self._run, name="peer-watch", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while self._communicator.is_whole:
            pause.wait(_POLL_S)
        self._word[0] = 1
        _log.info("peer_kernels_told_to_leave")


def _host() -> bytes:
    """A name of this machine, since it started, that other machines do not have."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text(encoding="ascii").strip() if boot.is_file() else socket.gethostname()
    return name.encode()
