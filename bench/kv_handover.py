"""Hand-over of KV between two worker processes of one machine, without a GPU, by transport:
`python bench/kv_handover.py [--transports shared_memory,nixl,grpc] [--runs N] [--write FILE]`; prints JSON.

KV of an 8B shape (128 KiB a token in bfloat16) lies in scattered pages of main memory. Calls are made as a scheduler
makes them: reserve, send (gathered chunk after chunk), wait until it is written, commit (scattered, checked). What has
arrived is compared. NIXL runs over whatever UCX chooses between processes, and over TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, pack_ints
from radixmesh.daemons.worker.__main__ import WorkerDaemon
from radixmesh.daemons.worker.config import Backend, WorkerSettings
from radixmesh.daemons.worker.kv_transfer.transports.choice import TransferTransport
from radixmesh.worker.v1 import worker_pb2

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.running_daemon import running
from support.worker_client import WorkerClient

TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
CHUNK_TOKENS = 1024
PAGE_SIZE = 16


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default="shared_memory,nixl,nixl-tcp,grpc")
    parser.add_argument("--tokens", default="2048", help="of a prompt, several with commas between")
    parser.add_argument("--runs", type=int, default=5, help="of each case, medians are told")
    parser.add_argument("--write", type=Path, help="file for the results")
    flags = parser.parse_args(argv)
    cases = [
        asyncio.run(measured(name, int(num_tokens), PAGE_SIZE, flags.runs))
        for num_tokens in flags.tokens.split(",")
        for name in flags.transports.split(",")
    ]
    results = {
        "command": f"python bench/kv_handover.py --tokens {flags.tokens} --runs {flags.runs}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 1),
        "token_bytes": TOKEN_BYTES,
        "cases": cases,
    }
    text = json.dumps(results, indent=1)
    print(text)
    if flags.write is not None:
        flags.write.write_text(text + "\n")


async def measured(name: str, num_tokens: int, page_size: int, runs: int) -> dict[str, Any]:
    """Medians of the milliseconds of each stage, and GB/s over all of them."""
    context = multiprocessing.get_context("spawn")
    async with AsyncExitStack() as stack:
        pipes, clients, addresses = [], [], []
        for role in ("sender", "receiver"):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, name, num_tokens, page_size, role == "sender"))
            process.start()
            stack.callback(process.join)
            stack.callback(ours.send, ("end", None))
            pipes.append(ours)
        for role, pipe in zip(("sender", "receiver"), pipes, strict=True):
            addresses.append(await asyncio.to_thread(pipe.recv))
            clients.append(await stack.enter_async_context(WorkerClient(addresses[-1], role)))
            await clients[-1].hold(1)
        took = [
            await handed_over(clients, addresses, pipes, number, num_tokens, page_size) for number in range(runs + 1)
        ]
    # The first one connects.
    stages = {stage: round(statistics.median(run[stage] for run in took[1:]), 2) for stage in took[0]}
    return {
        "transport": name,
        "num_tokens": num_tokens,
        "page_size": page_size,
        "mib": num_tokens * TOKEN_BYTES >> 20,
        "first_ms": round(took[0]["total_ms"], 1),
        **stages,
        "gb_s": round(num_tokens * TOKEN_BYTES / stages["total_ms"] / 1e6, 2),
    }


async def handed_over(
    clients: list[WorkerClient],
    addresses: list[str],
    pipes: list[Connection],
    number: int,
    num_tokens: int,
    page_size: int,
) -> dict[str, float]:
    """Milliseconds of each stage of one transfer."""
    sender, receiver = (client.stub for client in clients)
    source_pages, generations = await asked(pipes[0], "source", number)
    target_pages, target_generations = await asked(pipes[1], "target", number)
    capabilities = (await receiver.GetCapabilities(worker_pb2.GetCapabilitiesRequest())).capabilities
    name, marks = f"t{number}", [time.perf_counter()]
    prepared = await receiver.PrepareTransfer(
        worker_pb2.PrepareTransferRequest(
            transfer_id=name,
            epoch=1,
            instance_id="receiver",
            num_tokens=num_tokens,
            lease_ms=60_000,
            kv=capabilities.transfer_kv,
        )
    )
    marks.append(time.perf_counter())
    for first in range(0, num_tokens, CHUNK_TOKENS):
        num = min(CHUNK_TOKENS, num_tokens - first)
        pages = slice(first // page_size, (first + num) // page_size)
        await sender.StartTransfer(
            worker_pb2.StartTransferRequest(
                transfer_id=name,
                epoch=1,
                instance_id="sender",
                source_pages=pack_ints(source_pages[pages]),
                source_generations=pack_ints(generations[pages]),
                num_tokens=num,
                first_token=first,
                region=prepared.region,
                address=addresses[1],
                is_last=first + num == num_tokens,
            )
        )
    marks.append(time.perf_counter())
    async for answer in receiver.WatchTransfer(worker_pb2.WatchTransferRequest(transfer_id=name)):
        state = answer.state
    assert state == worker_pb2.TRANSFER_STATE_WRITTEN, answer
    marks.append(time.perf_counter())
    commit = worker_pb2.CommitTransferRequest(
        transfer_id=name,
        epoch=1,
        instance_id="receiver",
        pages=pack_ints(target_pages),
        generations=pack_ints(target_generations),
        previous_page=-1,
        ids=pack_ints(np.full(num_tokens, 7, np.int32)),
    )
    assert (await receiver.CommitTransfer(commit)).state == worker_pb2.TRANSFER_STATE_VALIDATED
    marks.append(time.perf_counter())
    assert await asked(pipes[0], "crc", source_pages) == await asked(pipes[1], "crc", target_pages)
    stages = ("reserve_ms", "gather_ms", "write_ms", "scatter_ms")
    took = {stage: 1000 * (end - start) for stage, start, end in zip(stages, marks, marks[1:], strict=False)}
    return {**took, "total_ms": 1000 * (marks[-1] - marks[0])}


async def asked(pipe: Connection, what: str, value: object) -> Any:  # noqa: ANN401
    pipe.send((what, value))
    return await asyncio.to_thread(pipe.recv)


def serve(pipe: Connection, name: str, num_tokens: int, page_size: int, is_sender: bool) -> None:
    """A worker whose KV is as wide as a large model's."""
    transport, _, way = name.partition("-")
    if way:
        os.environ["UCX_TLS"] = way
    asyncio.run(_serve(pipe, TransferTransport(transport), num_tokens, page_size, is_sender))


async def _serve(pipe: Connection, kind: TransferTransport, num_tokens: int, page_size: int, is_sender: bool) -> None:
    settings = WorkerSettings(
        backend=Backend.SIMULATED,
        num_pages=2 * num_tokens // page_size,
        page_size=page_size,
        num_slots=1,
        max_total_len=2 * num_tokens,
        transfer_staging_bytes=num_tokens * TOKEN_BYTES + (1 << 20),
        transfer_transport=kind,
    )
    async with running(WorkerDaemon, settings, instance_id="sender" if is_sender else "receiver") as worker:
        executor = worker.daemon.core.executor
        assert executor is not None
        wide = WideKv(2 * num_tokens)
        runner: Any = executor.runner
        runner.kv_token_bytes, runner.kv_token_layout = TOKEN_BYTES, "wide"
        runner.read_kv, runner.write_kv = wide.read, wide.write
        pipe.send(worker.address)
        records, rng = executor.records, np.random.default_rng(0)
        while True:
            what, value = await asyncio.to_thread(pipe.recv)
            if what == "end":
                return
            if what == "crc":
                tokens = (value[:, None] * page_size + np.arange(page_size)).reshape(-1)
                pipe.send(zlib.crc32(wide.rows[tokens].tobytes()))
                continue
            pages: IntArray = rng.permutation(2 * num_tokens // page_size)[: num_tokens // page_size].astype(np.int32)
            if what == "source":
                first = np.array([len(pages)])
                records.grant(pages, first, previous_pages=np.array([-1], np.int32), namespaces=[""], weights_version=1)
                at = np.arange(num_tokens, dtype=np.int32)
                records.extend(pages[at // page_size], at % np.int32(page_size), np.full(num_tokens, 7, np.int32))
                wide.rows[:, 0] = rng.integers(0, 256, len(wide.rows), np.uint8)
            pipe.send((pages, records.generations[pages] + (what == "target")))


class WideKv:
    """Rows of tokens in main memory."""

    def __init__(self, num_tokens: int) -> None:
        self.rows = np.random.default_rng(1).integers(0, 256, (num_tokens, TOKEN_BYTES), np.uint8)

    def read(self, indexes: IntArray, part: object = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.rows[indexes].reshape(-1)

    def write(self, indexes: IntArray, data: np.ndarray[Any, np.dtype[np.uint8]], part: object = None) -> None:
        self.rows[indexes] = data.reshape(len(indexes), TOKEN_BYTES)


if __name__ == "__main__":
    main()
