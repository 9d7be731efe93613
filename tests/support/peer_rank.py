"""A rank as a process of its own whose kernels read the memory of others: on the GPU, all ranks on one, or interpreted.

python -m support.peer_rank RANK SIZE: commands come as lines of JSON, and each is answered with one.

    form GENERATION RENDEZVOUS MEMBERS    sum SHAPE DTYPE SEED    gather ROWS VOCAB DTYPE    time SHAPE DTYPE CALLS
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import support.triton_interpreter  # noqa: F401
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.member import CollectiveMember
from radixmesh.daemons.worker.cuda.device import CudaDevice, HostDevice
from radixmesh.daemons.worker.cuda.ranks.peer_group import PeerGroup
from radixmesh.daemons.worker.cuda.ranks.peer_memory import CudaPeerMemory
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted
from support.host_peer_memory import HostPeerMemory


def part_of(rank: int, shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The part of a sum that a rank brings; the residual is that of rank -1."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * seed + rank + 1)).to(dtype)


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.member = CollectiveMember(RankLayout(tp_size=size, tp_rank=rank), "127.0.0.1")
        is_gpu = torch.cuda.is_available()
        self.device = CudaDevice() if is_gpu else HostDevice()
        with self.device.in_order():
            memory = CudaPeerMemory() if is_gpu else HostPeerMemory()
            self.group = PeerGroup(self.member.group, self.device, memory)

    def form(self, generation: int, rendezvous: str, members: list[str]) -> None:
        self.member.form(generation, rendezvous, members)
        self.group.form()

    def sum(self, shape: list[int], dtype: str, seed: int) -> bool:
        """True if it has the bits of the sum in the order of the ranks, in float32."""
        kind, where = getattr(torch, dtype), self.device.torch_device
        residual = part_of(-1, shape, kind, seed).to(where)
        self.group.add_reduced(part_of(self.group.rank, shape, kind, seed).to(where), residual)
        self._settle()
        total = sum(part_of(rank, shape, kind, seed).float() for rank in range(self.group.size))
        return torch.equal(residual.cpu(), (total + part_of(-1, shape, kind, seed).float()).to(kind))

    def gather(self, rows: int, vocab: int, dtype: str) -> bool:
        whole = torch.arange(rows * vocab).view(rows, vocab).to(getattr(torch, dtype))
        starts = [vocab * rank // self.group.size for rank in range(self.group.size + 1)]
        own = whole[:, starts[self.group.rank] : starts[self.group.rank + 1]].to(self.device.torch_device)
        widths = [stop - start for start, stop in itertools.pairwise(starts)]
        got = self.group.all_gather(own, widths)
        self._settle()
        return torch.equal(got.cpu(), whole)

    def time(self, shape: list[int], dtype: str, calls: int) -> float:
        """Microseconds a call, in a graph of `calls` on the GPU."""
        x = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device.torch_device)

        def work() -> torch.Tensor:
            for _ in range(calls):
                self.group.add_reduced(x, x)
            return x

        work()
        run = self.device.capture(work) if self.device.can_capture else work
        run()
        self._settle()
        started = time.monotonic()
        run()
        self._settle()
        return (time.monotonic() - started) / calls * 1e6

    def _settle(self) -> None:
        self.device.record_event().wait()
        self.group.check()


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps(rank.member.rendezvous), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        started = time.monotonic()
        try:
            with rank.device.in_order():
                answer = {"result": getattr(rank, verb)(*arguments)}
        except CollectiveAborted as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - started}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
