"""Clients of a router for `pd_load.py`: outputs one after the other, or prompts at a pace, and when their tokens came.

They are processes of their own that read and take apart every message, so that the time of a token is the router's.
Times are of the monotonic clock, which processes of one host share.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import numpy as np

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_ints
from radixmesh.daemons.runtime.rpc.channel import open_channel
from radixmesh.router.v1 import router_pb2

_GENERATE = "/radixmesh.router.v1.RouterService/Generate"
_LEAST_ID = 5
_CHANNELS = 4
ANY_NUMBER = 1 << 30


@dataclass(slots=True, kw_only=True)
class Clients:
    """The clients of one process.

    streams: that ask for one output after the other, until `stop`. rate: prompts a second instead, at an even pace,
    each asked for at its time whatever became of those before; 0: none. start, stop: seconds of the monotonic clock.
    """

    router: str
    seed: int
    vocab_size: int
    prompt: int
    out: int
    start: float
    stop: float
    streams: int = 0
    rate: float = 0.0
    most: int = ANY_NUMBER
    """Outputs of one stream."""


@dataclass(slots=True)
class Answer:
    """One output: when it was asked for, and when each message with tokens came, with how many."""

    asked: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    is_done: bool = False
    """False: it was cut off by the end of the load."""

    @property
    def first_s(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.asked

    @property
    def gaps(self) -> np.ndarray:
        """Seconds between messages, float64."""
        return np.diff(np.array(self.times))


async def run(clients: list[Clients]) -> list[list[Answer]]:
    """Runs each of them in a process; what they were answered. Raises RuntimeError for one that failed."""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, __file__, json.dumps(asdict(client)), stdout=asyncio.subprocess.PIPE, limit=1 << 28
        )
        for client in clients
    ]
    try:
        outputs = await asyncio.gather(*(process.communicate() for process in processes))
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"clients ended with {[process.returncode for process in processes]}")
    return [[Answer(**row) for row in json.loads(output)] for output, _ in outputs]


async def _run(clients: Clients) -> list[Answer]:
    channels = [open_channel(clients.router) for _ in range(_CHANNELS)]
    rng = np.random.default_rng(clients.seed)
    answers: list[Answer] = []

    async def ask(asked: float, channel: grpc.aio.Channel) -> None:
        ids = rng.integers(_LEAST_ID, clients.vocab_size, clients.prompt)
        request = router_pb2.GenerateRequest(
            prompt_ids=pack_ints(ids.tolist()),
            sampling=common_pb2.SamplingParams(temperature=1.0),
            stop=common_pb2.StopParams(max_tokens=clients.out, ignore_eos=True),
        )
        answers.append(answer := Answer(asked))
        async for data in channel.unary_stream(_GENERATE)(request.SerializeToString()):
            message = router_pb2.GenerateResponse.FromString(data)
            num = sum(len(delta.ids) for delta in message.deltas) // 4
            if num:
                answer.times.append(time.monotonic())
                answer.counts.append(num)
        assert sum(answer.counts) == clients.out, f"{sum(answer.counts)} tokens, not {clients.out}"
        answer.is_done = True

    async def stream(number: int) -> None:
        for _ in range(clients.most):
            if (now := time.monotonic()) < clients.stop:
                await ask(now, channels[number % _CHANNELS])

    async def paced(number: int) -> None:
        at = clients.start + number / clients.rate
        await asyncio.sleep(at - time.monotonic())
        await ask(at, channels[number % _CHANNELS])

    await asyncio.sleep(clients.start - time.monotonic())
    work: list[Coroutine[None, None, None]] = [stream(number) for number in range(clients.streams)]
    work += [paced(number) for number in range(int(clients.rate * (clients.stop - clients.start)))]
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return answers
    # Prompts at a pace are waited for; streams are cut off.
    patience_s = 60.0 if clients.rate else 0.0
    if clients.most == ANY_NUMBER:
        done, late = await asyncio.wait(tasks, timeout=clients.stop + patience_s - time.monotonic())
    else:
        done, late = await asyncio.wait(tasks)
    for task in late:
        task.cancel()
    await asyncio.wait(tasks)
    for task in done:
        task.result()
    return answers


if __name__ == "__main__":
    assert Path(__file__).is_file()
    print(json.dumps([asdict(answer) for answer in asyncio.run(_run(Clients(**json.loads(sys.argv[1]))))]))
