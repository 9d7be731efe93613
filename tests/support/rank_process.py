"""A rank as a process of its own that does what it is told: forms groups and sums.

python -m support.rank_process RANK SIZE: commands come as lines of JSON, and each is answered with one.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.member import CollectiveMember
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted

_ROOT = Path(__file__).parents[2]


def main() -> None:
    torch.set_num_threads(1)
    member = CollectiveMember(RankLayout(tp_size=int(sys.argv[2]), tp_rank=int(sys.argv[1])), "127.0.0.1")
    print(json.dumps(member.rendezvous), flush=True)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        started = time.monotonic()
        try:
            if verb == "form":
                member.form(*arguments)
            result = member.group.all_reduce(torch.tensor(arguments)).tolist() if verb == "sum" else None
            answer = {"result": result}
        except CollectiveAborted as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({**answer, "seconds": time.monotonic() - started, "is_whole": member.is_whole}), flush=True)
    # Collectives that never end keep nobody here.
    os._exit(0)


class RankProcess:
    """The other end, of one rank."""

    def __init__(self, process: asyncio.subprocess.Process, rendezvous: str) -> None:
        self.process = process
        self.rendezvous = rendezvous

    @classmethod
    async def start(cls, rank: int, size: int, module: str = "support.rank_process") -> RankProcess:
        """Returns once it is there. module: what it runs."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, str(rank), str(size)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{_ROOT / 'tests'}:{_ROOT / 'src'}"},
        )
        assert process.stdout is not None
        return cls(process, json.loads(await process.stdout.readline()))

    async def tell(self, *command: object) -> dict[str, object]:
        """The answer to a command."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        answer: dict[str, object] = json.loads(await self.process.stdout.readline())
        return answer

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
        if number == signal.SIGKILL:
            await self.process.wait()


if __name__ == "__main__":
    main()
