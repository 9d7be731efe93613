"""KV handed over by one process to another: gathered, carried to the other's staging region, scattered.

    python bench/gpu/kv_transfer.py --runs 10 > transfer.json

Two processes, on two GPUs where the machine has them, otherwise on one. The receiver's region is memory of its GPU that
the sender has mapped (CUDA IPC). Ways: `direct`: the gather kernel writes to the region; `staged`: it writes to memory
of the sender, which one copy carries over; `rows`: an index operation a layer and plane, as torch has it, then one
copy; `host`: through pinned memory that both processes map, where /dev/shm has room. Times are medians, on one clock:
from when the sender begins until the receiver has compared the stamps behind its scatter; messages between the
processes (a pipe) are part of it. gb_s: bytes of KV a second, both copies included. The receiver's KV is compared with
the sender's, byte for byte. --results: file of what is known so far, after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.kept import Kept
from torch import multiprocessing

from radixmesh.kernels.kv_copy import gather_rows, scatter_rows, token_bytes_of

_STAMP_BYTES = 32
_POOL_TOKENS = 16384
_MIB = 1 << 20


class Shape(NamedTuple):
    """layers; numbers of a token's row in each plane, bfloat16."""

    layers: int
    rows: tuple[int, ...]

    def planes(self, device: torch.device, *, is_filled: bool) -> list[torch.Tensor]:
        """A pool."""
        planes = [torch.zeros(self.layers, _POOL_TOKENS, row, dtype=torch.bfloat16, device=device) for row in self.rows]
        for plane in planes if is_filled else ():
            plane.normal_()
        return planes


SHAPES = {"llama-3.1-8b": Shape(32, (1024, 1024)), "deepseek-v2-lite": Shape(27, (576,))}


class Case(NamedTuple):
    shape: str
    num_tokens: int
    page_size: int
    way: str


def indexes_of(case: Case, seed: int, device: torch.device) -> torch.Tensor:
    """int32 numbers of tokens in scattered pages."""
    pages = torch.randperm(_POOL_TOKENS // case.page_size, generator=torch.Generator().manual_seed(seed))
    tokens = pages[:, None] * case.page_size + torch.arange(case.page_size)
    return tokens.flatten()[: case.num_tokens].int().to(device)


def on_host(name: str, num_bytes: int) -> tuple[SharedMemory, torch.Tensor]:
    """Shared memory by that name, pinned."""
    memory = SharedMemory(name)
    tensor = torch.frombuffer(memory.buf, dtype=torch.uint8)[:num_bytes]
    error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0)
    assert int(error) == 0, error
    return memory, tensor


def receive(pipe: Connection, name: str, host_bytes: int, device_index: int) -> None:
    """The receiving process: prepares a region for each case, scatters what comes."""
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    memory, host = on_host(name, host_bytes)
    while (case := pipe.recv()) is not None:
        planes = SHAPES[case.shape].planes(device, is_filled=False)
        size = case.num_tokens * token_bytes_of(planes)
        region = torch.zeros(size + 2 * _STAMP_BYTES, dtype=torch.uint8, device=device)
        indexes = indexes_of(case, 2, device)
        body = region[_STAMP_BYTES:-_STAMP_BYTES]
        scatter_rows(planes, indexes, body)  # Compiled before it is timed.
        torch.cuda.synchronize()
        pipe.send(region)
        while (stamp := pipe.recv()) is not None:
            if case.way == "host":
                region.copy_(host[: len(region)], non_blocking=True)
            scatter_rows(planes, indexes, body)
            stamps = torch.cat((region[:_STAMP_BYTES], region[-_STAMP_BYTES:])).cpu().numpy().tobytes()
            now = time.monotonic_ns()
            pipe.send((now, stamps == stamp + stamp))
        sums = torch.empty(size, dtype=torch.uint8, device=device)
        gather_rows(planes, indexes, sums)
        pipe.send(sums.cpu().numpy().tobytes())
        pipe.recv()
        del planes, region, body, sums
        torch.cuda.empty_cache()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    del host
    memory.close()


def measure(case: Case, pipe: Connection, host: torch.Tensor, runs: int) -> dict[str, object]:
    """One case, from the sender's side."""
    device = torch.device("cuda", 0)
    planes = SHAPES[case.shape].planes(device, is_filled=True)
    size = case.num_tokens * token_bytes_of(planes)
    indexes = indexes_of(case, 1, device)
    own = torch.zeros(size + 2 * _STAMP_BYTES, dtype=torch.uint8, device=device)
    pipe.send(case)
    region = pipe.recv()
    # A copy lets this GPU reach the other one's memory; a kernel alone may not.
    region[:1].copy_(own[:1])
    send = _way(case, planes, indexes, own, region, host)
    times, gathers, copies = [], [], []
    for run in range(runs + 2):
        stamp = os.urandom(_STAMP_BYTES)
        on_device = torch.frombuffer(bytearray(stamp), dtype=torch.uint8).to(device)
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        began = time.monotonic_ns()
        send(on_device, events)
        torch.cuda.synchronize()
        pipe.send(stamp)
        ended, is_sound = pipe.recv()
        assert is_sound, (case, run)
        if run >= 2:
            times.append((ended - began) / 1e9)
            gathers.append(events[0].elapsed_time(events[1]) / 1e3)
            copies.append(events[1].elapsed_time(events[2]) / 1e3)
    pipe.send(None)
    received = torch.frombuffer(bytearray(pipe.recv()), dtype=torch.uint8)
    expected = torch.empty(size, dtype=torch.uint8, device=device)
    gather_rows(planes, indexes, expected)
    assert torch.equal(received, expected.cpu()), case
    del region, send
    torch.cuda.ipc_collect()
    pipe.send(None)
    median = statistics.median(times)
    return {
        **case._asdict(),
        "mib": round(size / _MIB, 1),
        "ms": round(1e3 * median, 3),
        "ms_max": round(1e3 * max(times), 3),
        "gb_s": round(size / median / 1e9, 1),
        "gather_ms": round(1e3 * statistics.median(gathers), 3),
        "copy_ms": round(1e3 * statistics.median(copies), 3),
    }


def _way(
    case: Case,
    planes: list[torch.Tensor],
    indexes: torch.Tensor,
    own: torch.Tensor,
    region: torch.Tensor,
    host: torch.Tensor,
) -> Callable[[torch.Tensor, list[torch.cuda.Event]], None]:
    target = region if case.way == "direct" else own

    def stamp_all(stamp: torch.Tensor) -> None:
        target[:_STAMP_BYTES] = stamp
        target[-_STAMP_BYTES:] = stamp

    def send(stamp: torch.Tensor, events: list[torch.cuda.Event]) -> None:
        events[0].record()
        body = target[_STAMP_BYTES:-_STAMP_BYTES]
        if case.way == "rows":
            chunks = indexes.long().split(256)
            parts = [
                plane[layer][chunk].flatten() for chunk in chunks for plane in planes for layer in range(len(plane))
            ]
            body.copy_(torch.cat(parts).view(torch.uint8))
        else:
            gather_rows(planes, indexes, body)
        stamp_all(stamp)
        events[1].record()
        if case.way == "host":
            host[: len(own)].copy_(own, non_blocking=True)
        elif case.way != "direct":
            region.copy_(own, non_blocking=True)
        events[2].record()

    return send


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    with Kept(args.results) as kept:
        run(args.runs, kept)


def run(runs: int, kept: Kept) -> None:
    num_gpus = torch.cuda.device_count()
    cases = [
        *(Case("llama-3.1-8b", 2048, page_size, way) for page_size in (1, 16) for way in ("direct", "staged")),
        *(Case("llama-3.1-8b", 8192, 1, way) for way in ("direct", "staged")),
        *(Case(shape, 4096, 1, way) for shape in SHAPES for way in ("direct", "staged", "rows", "host")),
    ]
    host_bytes = 600 * _MIB
    if shutil.disk_usage("/dev/shm").free < 2 * host_bytes:
        host_bytes = _MIB
        cases = [case for case in cases if case.way != "host"]
    shared = SharedMemory(create=True, size=host_bytes)
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    receiver = context.Process(target=receive, args=(other, shared.name, host_bytes, min(1, num_gpus - 1)))
    receiver.start()
    # Without an end here, what waits for a receiver that has failed is told so.
    other.close()
    memory, host = on_host(shared.name, host_bytes)
    kept.note(
        command=f"python bench/gpu/kv_transfer.py --runs {runs}",
        machine=f"{torch.cuda.get_device_name()} x {num_gpus}, {os.cpu_count()} cores",
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
        gpus=num_gpus,
    )
    found: list[dict[str, object]] = []
    try:
        for case in cases:
            found.append(measure(case, pipe, host, runs))
            kept.note(cases=found)
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        pipe.send(None)
        receiver.join(30)
    finally:
        receiver.kill()
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
        del host
        # After a failure its frames still have it.
        with suppress(BufferError):
            memory.close()
        shared.unlink()


if __name__ == "__main__":
    main()
