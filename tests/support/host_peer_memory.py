"""Memory of the host that processes show to each other as GPUs do theirs: kernels under Triton's interpreter use it."""

from __future__ import annotations

import ctypes

from radixmesh.daemons.worker.cuda.ranks.peer_memory import PeerMemory
from radixmesh.daemons.worker.simulated.device import MappedMemory


class HostPeerMemory(MappedMemory, PeerMemory):
    """A handle is a path below /proc of the process that has the memory."""

    def clear(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0, num_bytes)
