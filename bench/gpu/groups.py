"""Tensor parallelism on the GPUs of one host: sums of ranks by size, and dense models against one GPU.

    python bench/gpu/groups.py sums --ranks 2 > bench/results/h200x2-sums.json
    python bench/gpu/groups.py models --ranks 2 --shapes llama-3.1-8b llama-3.1-70b > bench/results/h200x2-groups.json

sums: microseconds of an all-reduce that adds to a residual, in CUDA graphs, by `peer` (this project's kernels) and by
`nccl`, with a process and a GPU for each rank. With fewer GPUs than ranks, `peer` alone, on streams of one process that
run beside each other on one GPU: the kernel's own time, without a wire. models: mesh.py with one rank and with all, and
what the ranks gain; a shape that one GPU does not hold is measured with all ranks alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.mesh import gpu_name

from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.member import CollectiveMember
from radixmesh.daemons.worker.cuda.device import CudaDevice
from radixmesh.daemons.worker.cuda.ranks.choice import create_device_group
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.cuda.ranks.peer_group import PeerGroup
from radixmesh.daemons.worker.cuda.ranks.peer_memory import CudaPeerMemory
from radixmesh.kernels.peer_collectives import (
    ABORT_ADDRESS,
    FIRST_RANK,
    IS_FORMED,
    PEER_BYTES,
    PeerTable,
    sum_of_ranks,
)

_MESH = Path(__file__).with_name("mesh.py")
_HIDDEN = 4096
_ROWS = (1, 4, 16, 64, 128, 192, 256, 320, 512, 1024, 8192)
# As many as a step of a model of 32 layers has.
_CALLS = 64
_REPLAYS = 5
_WATCHDOG_S = 20.0
_WORKLOADS = ("single-stream", "decode-256")
# In bf16 these have no room on one GPU, or none for KV beside them.
_TOO_LARGE = ("llama-3.1-70b",)


def sums_of_streams(num_ranks: int) -> dict[str, float]:
    """Microseconds by rows, of ranks that are streams of this process on one GPU."""
    device = torch.device("cuda")
    memory, abort_word = CudaPeerMemory(), torch.zeros(1, dtype=torch.int32).pin_memory()
    torch.zeros(1, device=device)
    addresses = [memory.allocate(PEER_BYTES) for _ in range(num_ranks)]
    tables = [PeerTable.alone(rank, num_ranks, device) for rank in range(num_ranks)]
    streams = [torch.cuda.Stream() for _ in tables]
    found: dict[str, float] = {}
    for rows in _ROWS:
        graphs = []
        for table, stream in zip(tables, streams, strict=True):
            x, residual = (torch.zeros(rows, _HIDDEN, dtype=torch.bfloat16, device=device) for _ in "xr")
            # Alone: compiling and capturing wait for nobody.
            table.entries.zero_()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                sum_of_ranks(x, table, residual, out=residual)
                with torch.cuda.graph(graph, stream=stream):
                    for _ in range(_CALLS):
                        sum_of_ranks(x, table, residual, out=residual)
                # The first launch of a graph may wait for the device, which then would wait for the other graph.
                graph.replay()
            torch.cuda.synchronize()
            graphs.append(graph)
        torch.cuda.synchronize()
        for rank, table in enumerate(tables):
            entries = torch.zeros(len(table.entries), dtype=torch.int64)
            entries[IS_FORMED], entries[ABORT_ADDRESS] = 1, abort_word.data_ptr()
            entries[FIRST_RANK:] = torch.tensor(addresses)
            table.entries.copy_(entries)
            table.counts.zero_()
            memory.clear(addresses[rank], PEER_BYTES)
        torch.cuda.synchronize()
        # Streams that the driver runs one behind the other would wait for each other for ever.
        watchdog = threading.Timer(_WATCHDOG_S, lambda: abort_word.numpy().__setitem__(0, 1))
        watchdog.start()
        times = []
        for _ in range(_REPLAYS):
            start, ends = torch.cuda.Event(enable_timing=True), []
            start.record(streams[0])
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record(stream)
            torch.cuda.synchronize()
            times.append(max(start.elapsed_time(end) for end in ends) * 1e3 / _CALLS)
        watchdog.cancel()
        if int(abort_word):
            raise RuntimeError("the streams did not run beside each other: nothing was measured")
        found[str(rows)] = round(min(times), 2)
    return found


def sums_of_processes(num_ranks: int, transport: str) -> dict[str, float]:
    """Microseconds by rows, of ranks that are processes with a GPU each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "rank", "--ranks", str(num_ranks), "--transport", transport]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank), "--port", str(port)], stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    try:
        outputs = [rank.communicate(timeout=120.0)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [json.loads(output) for output in outputs]
    return {rows: max(of_rank[rows] for of_rank in found) for rows in found[0]}


def run_rank(args: argparse.Namespace) -> None:
    """One of `sums_of_processes`. They tell each other where they meet through a file."""
    layout = RankLayout(tp_size=args.ranks, tp_rank=args.rank)
    member, device = CollectiveMember(layout, "127.0.0.1"), CudaDevice(args.rank)
    meeting = Path(f"/tmp/radixmesh-groups-{args.port}")
    if args.rank == 0:
        meeting.with_suffix(".new").write_text(member.rendezvous)
        meeting.with_suffix(".new").rename(meeting)
    deadline = time.monotonic() + 60.0
    while not meeting.exists():
        assert time.monotonic() < deadline, "rank 0 does not come"
        time.sleep(0.05)
    member.form(1, meeting.read_text(), [f"rank-{rank}" for rank in range(args.ranks)])
    found: dict[str, float] = {}
    with device.in_order(), torch.inference_mode():
        group = create_device_group(args.transport, member.group, device)
        group.form()
        for rows in _ROWS:
            _check_sum(group, rows, device.torch_device)
            x, residual = (torch.zeros(rows, _HIDDEN, dtype=torch.bfloat16, device=device.torch_device) for _ in "xr")

            def work(x: torch.Tensor = x, residual: torch.Tensor = residual) -> torch.Tensor:
                for _ in range(_CALLS):
                    group.add_reduced(x, residual)
                return residual

            work()
            replay = device.capture(work)
            replay()
            times = []
            for _ in range(_REPLAYS):
                member.group.stack(torch.zeros(1))
                # The ranks' hosts are apart by up to 0.1 s; behind a sum of both their devices are not.
                group.add_reduced(x, residual)
                start = device.record_event()
                replay()
                end = device.record_event()
                end.wait()
                times.append(end.seconds_since(start) * 1e6 / _CALLS)
            group.check()
            found[str(rows)] = round(min(times), 2)
    meeting.unlink(missing_ok=True)
    print(json.dumps(found), flush=True)
    # A communicator that graphs hold would be waited for.
    os._exit(0)


def _check_sum(group: DeviceGroup, rows: int, device: torch.device) -> None:
    """Of random parts: that of this project's kernels bit for bit."""
    parts = [
        torch.randn(rows, _HIDDEN, generator=torch.Generator(device).manual_seed(rank), device=device).bfloat16()
        for rank in range(group.size + 1)
    ]
    *of_ranks, got = parts
    want = got.float()
    got = got.clone()
    group.add_reduced(of_ranks[group.rank].clone(), got)
    total = torch.zeros_like(want)
    for part in of_ranks:
        total += part.float()
    want += total
    is_right = (
        torch.equal(got, want.bfloat16())
        if isinstance(group, PeerGroup)
        else torch.allclose(got.float(), want, rtol=0.05, atol=0.2)
    )
    assert is_right, f"{rows} rows: {(got.float() - want).abs().max()} off"


def sums(args: argparse.Namespace) -> dict[str, object]:
    has_all = torch.cuda.device_count() >= args.ranks
    micros: dict[str, object] = {}
    if has_all:
        for transport in ("peer", "nccl"):
            micros[transport] = sums_of_processes(args.ranks, transport)
    else:
        micros["peer, streams of one process on one GPU"] = sums_of_streams(args.ranks)
    return {"ranks": args.ranks, "hidden": _HIDDEN, "calls_in_a_graph": _CALLS, "micros_by_rows": micros}


def models(args: argparse.Namespace) -> dict[str, object]:
    shapes: dict[str, object] = {}
    for shape in args.shapes:
        by_ranks = {num: _mesh(shape, num, args) for num in (1, args.ranks) if num > 1 or shape not in _TOO_LARGE}
        gain = {}
        if 1 in by_ranks:
            of_one, of_all = (_speeds(by_ranks[num]) for num in (1, args.ranks))
            gain = {name: round(of_all[name] / of_one[name], 3) for name in of_one}
        shapes[shape] = {"gain": gain, **{f"{num} ranks": found for num, found in by_ranks.items()}}
        print(json.dumps({shape: shapes[shape]}), file=sys.stderr, flush=True)
    return {"shapes": shapes}


def _mesh(shape: str, num_ranks: int, args: argparse.Namespace) -> dict[str, object]:
    flags = [f"tp_collectives={args.transport}", *args.worker] if num_ranks > 1 else args.worker
    command = [sys.executable, str(_MESH), "--shape", shape, "--ranks", str(num_ranks), "--runs", str(args.runs)]
    command += ["--workloads", *args.workloads, *(("--worker", *flags) if flags else ())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=args.timeout_s)
    found = json.loads(done.stdout)
    return {key: found[key] for key in ("start_s", "memory", "workloads")}


def _speeds(found: dict[str, object]) -> dict[str, float]:
    workloads = found["workloads"]
    assert isinstance(workloads, dict)
    return {name: float(workload["out_tok_s"]) for name, workload in workloads.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sums", "models", "rank"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=["llama-3.1-8b", "llama-3.1-70b"])
    parser.add_argument("--workloads", nargs="+", default=list(_WORKLOADS))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--transport", default="peer", choices=("peer", "nccl"))
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of a mesh")
    parser.add_argument("--worker", nargs="*", default=[], metavar="FLAG=VALUE", help="flags of the workers")
    parser.add_argument("--rank", type=int, default=0, help="of this process (what: rank)")
    parser.add_argument("--port", type=int, default=0, help="names the file where ranks meet (what: rank)")
    args = parser.parse_args()
    if args.what == "rank":
        run_rank(args)
        return
    found = sums(args) if args.what == "sums" else models(args)
    about = {
        "command": " ".join(["python", "bench/gpu/groups.py", *sys.argv[1:]]),
        "machine": f"{gpu_name()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    print(json.dumps({**about, **found}, indent=1))


if __name__ == "__main__":
    main()
