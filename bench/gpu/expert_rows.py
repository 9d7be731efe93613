"""Rows to the experts of other ranks and back, by transport, beside the transport's own kernels alone.

    python bench/gpu/expert_rows.py --ranks 4 --transports nccl nixl deepep
    python bench/gpu/expert_rows.py --ranks 2 --transports host --device cpu --hidden 256 --experts 16

Microseconds of dispatch and combine of one layer at low latency, by rows of a rank. ours: as a layer of a model does
it, with experts that take no time. own: nothing but the collectives of the wire with these bytes, or the
two calls of the library. In CUDA graphs of --calls layers, or on CPUs call by call; the slowest rank's, the least of
some repeats. --results: file of what is known so far, after each transport.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.kept import Kept
from gpu.mesh import gpu_name

from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives.expert_all_to_all import AllToAllDispatch
from radixmesh.daemons.worker.collectives.member import CollectiveMember
from radixmesh.daemons.worker.cuda.device import CudaDevice, Device, HostDevice
from radixmesh.daemons.worker.cuda.expert_parallel.buffer_dispatch import BufferDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.choice import EP_TRANSPORTS, create_device_dispatch
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch, DispatchedExperts
from radixmesh.daemons.worker.cuda.expert_parallel.wire_dispatch import WireDispatch
from radixmesh.daemons.worker.cuda.experts import Experts
from radixmesh.daemons.worker.cuda.ops import Ops, TorchOps, TritonOps
from radixmesh.kernels.moe.grouped_gemm import SlotRows
from radixmesh.kernels.moe.route import Routes

_REPEATS = 20
_MEET_S = 120.0
_RANK_S = 240.0
# Characters of either end of an error.
_TOLD = 1000


class _Free(Experts):
    """Takes no time: results of rows with their picks lie there from the first call on; rows by slot are theirs."""

    def __init__(self) -> None:
        self._results: dict[torch.Size, torch.Tensor] = {}

    def add_to(self, residual_TD: torch.Tensor, x_TD: torch.Tensor, routes: Routes) -> None:
        raise AssertionError("all experts are divided among ranks")

    def sums(self, x_TD: torch.Tensor, routes: Routes, num_expected: int) -> torch.Tensor:
        if x_TD.shape not in self._results:
            self._results[x_TD.shape] = x_TD.contiguous()
        return self._results[x_TD.shape]

    def of_slots(self, rows: SlotRows) -> torch.Tensor:
        return rows.x_PXD


def run_rank(args: argparse.Namespace) -> None:
    """Writes microseconds by rows, ours and own, as they come."""
    device: Device = HostDevice() if args.device == "cpu" else CudaDevice(args.rank)
    member = _met(args)
    found: dict[str, dict[str, float]] = {"ours": {}, "own": {}}
    with device.in_order(), torch.inference_mode():
        placed, most = member.experts, max(args.rows)
        assert isinstance(placed, AllToAllDispatch)
        dispatch = create_device_dispatch(args.transports[0], placed.group, device, max_room=most)
        ops: Ops = TorchOps() if args.device == "cpu" else TritonOps()
        norm_D = torch.ones(args.hidden, dtype=torch.bfloat16, device=device.torch_device)
        experts = DispatchedExperts(_Free(), dispatch, placed, args.experts, norm_D, ops)
        dispatch.form()
        for rows in args.rows:
            dispatch.room = rows
            x_TD, routes = _rows(rows, args, device)
            layer = _layer(experts, x_TD, routes)
            own = _own(dispatch, x_TD, routes, placed.slots_per_rank(args.experts))
            for name, work in (("ours", layer), ("own", own)):
                found[name][str(rows)] = _micros(work, member, device, args.calls)
            dispatch.check()
            new = Path(args.folder) / f"{args.rank}.new"
            new.write_text(json.dumps(found))
            new.rename(new.with_suffix(".found"))


def _met(args: argparse.Namespace) -> CollectiveMember:
    """A rank that has met the others, by a file that rank 0 writes."""
    layout = RankLayout.of_rank(args.rank, tp_size=1, dp_size=args.ranks, ep_size=args.ranks)
    member, place = CollectiveMember(layout, "127.0.0.1"), Path(args.folder) / "place"
    if args.rank == 0:
        place.with_suffix(".new").write_text(member.rendezvous)
        place.with_suffix(".new").rename(place)
    deadline = time.monotonic() + _MEET_S
    while not place.exists():
        assert time.monotonic() < deadline, "rank 0 does not come"
        time.sleep(0.02)
    member.form(1, place.read_text(), [f"rank-{rank}" for rank in range(args.ranks)])
    return member


def _rows(rows: int, args: argparse.Namespace, device: Device) -> tuple[torch.Tensor, Routes]:
    generator = torch.Generator().manual_seed(args.rank)
    x_TD = torch.randn(rows, args.hidden, generator=generator).bfloat16().to(device.torch_device)
    ids_TA = torch.rand(rows, args.experts, generator=generator).argsort(dim=1)[:, : args.picks].int()
    weights_TA = torch.full((rows, args.picks), 1 / args.picks)
    return x_TD, Routes(ids_TA.contiguous().to(device.torch_device), weights_TA.to(device.torch_device))


def _layer(experts: DispatchedExperts, x_TD: torch.Tensor, routes: Routes) -> Callable[[], torch.Tensor]:
    residual_TD = torch.zeros_like(x_TD)

    def work() -> torch.Tensor:
        experts.add_to(residual_TD, x_TD, routes)
        return residual_TD

    return work


def _own(dispatch: DeviceDispatch, x_TD: torch.Tensor, routes: Routes, slots: int) -> Callable[[], torch.Tensor]:
    """The calls of the transport itself for these rows."""
    if isinstance(dispatch, BufferDispatch):
        buffer = dispatch.buffer
        assert buffer is not None
        slots_TA = routes.expert_ids_TA.to(buffer.id_dtype)

        def calls() -> torch.Tensor:
            x_PXD, _, handle, _ = buffer.dispatch(x_TD, slots_TA, is_split=False)
            return buffer.combine(x_PXD, slots_TA, routes.weights_TA, handle, is_split=False)[0]

        return calls
    assert isinstance(dispatch, WireDispatch)
    wire, size, rows = dispatch._wire, dispatch.size, len(x_TD)
    packed_TB = torch.zeros(rows, 2 * x_TD.shape[1] + 8 * routes.weights_TA.shape[1], dtype=torch.uint8)
    packed_TB, back_XD = packed_TB.to(x_TD.device), x_TD.repeat(size, 1)

    def collectives() -> torch.Tensor:
        wire.gather(packed_TB)
        return wire.all_to_all(back_XD, [rows] * size, [rows] * size)

    return collectives


def _micros(work: Callable[[], torch.Tensor], member: CollectiveMember, device: Device, calls: int) -> float:
    def all_calls() -> torch.Tensor:
        for _ in range(calls):
            result = work()
        return result

    all_calls()
    run = device.capture(all_calls) if device.can_capture else all_calls
    run()
    times = []
    for _ in range(_REPEATS if device.can_capture else 3):
        device.record_event().wait()
        # All begin together.
        member.expert_group.stack(torch.zeros(1))
        started = time.monotonic()
        run()
        device.record_event().wait()
        times.append((time.monotonic() - started) / calls * 1e6)
    return round(min(times), 2)


def run_all(args: argparse.Namespace, kept: Kept) -> None:
    """By transport; one that fails says why, beside what it had measured by then."""
    found: dict[str, object] = {}
    for transport in args.transports:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            error = _run_ranks(transport, args, folder)
            of_ranks = [_found_by(folder, rank) for rank in range(args.ranks)]
        slowest = {
            name: {rows: max(of[name][rows] for of in of_ranks) for rows in by_rows if _all_have(of_ranks, name, rows)}
            for name, by_rows in of_ranks[0].items()
        }
        found[transport] = {**slowest, **({"error": _ends_of(error)} if error else {})}
        kept.note(micros_by_rows=found)
        print(json.dumps({transport: found[transport]}), file=sys.stderr, flush=True)


def _ends_of(said: str) -> str:
    """Python's own error comes ahead of what libraries say at the end of their process."""
    error = said[max(0, said.find("Traceback")) :]
    return error if len(error) <= 2 * _TOLD else f"{error[:_TOLD]} ... {error[-_TOLD:]}"


def _all_have(of_ranks: list[dict[str, dict[str, float]]], name: str, rows: str) -> bool:
    return all(rows in of.get(name, {}) for of in of_ranks)


def _found_by(folder: Path, rank: int) -> dict[str, dict[str, float]]:
    path = folder / f"{rank}.found"
    return json.loads(path.read_text()) if path.exists() else {}


def _run_ranks(transport: str, args: argparse.Namespace, folder: Path) -> str:
    """Nothing, or what a rank that failed has said, for which the others would wait. They write what they found to the
    folder."""
    command = [sys.executable, __file__, "--transports", transport, "--ranks", str(args.ranks), "--folder", str(folder)]
    for name in ("hidden", "experts", "picks", "device", "calls"):
        command += [f"--{name}", str(getattr(args, name))]
    command += ["--rows", *map(str, args.rows)]
    logs = [folder / f"{rank}.log" for rank in range(args.ranks)]
    ranks = []
    for rank, log in enumerate(logs):
        # A file: libraries say more than a pipe holds that nobody reads.
        with log.open("wb") as said:
            ranks.append(subprocess.Popen([*command, "--rank", str(rank)], stdout=said, stderr=subprocess.STDOUT))
    deadline, wrong = time.monotonic() + _RANK_S, ""
    while not wrong and any(rank.poll() is None for rank in ranks):
        time.sleep(0.05)
        failed = [number for number, rank in enumerate(ranks) if rank.poll()]
        if failed:
            wrong = logs[failed[0]].read_text(errors="replace")
        elif time.monotonic() > deadline:
            ends = " | ".join(log.read_text(errors="replace")[-500 // args.ranks :] for log in logs)
            wrong = f"the ranks did not end within {_RANK_S:g} s: {ends}"
    for rank in ranks:
        rank.kill()
        rank.wait()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    return wrong or (logs[failed[0]].read_text(errors="replace") if failed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--transports", nargs="+", default=["nccl", "nixl", "deepep"], choices=EP_TRANSPORTS)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 128, 512])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--picks", type=int, default=8)
    parser.add_argument("--calls", type=int, default=32, help="layers in a graph")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rank", type=int, default=None, help="of this process, which is one of them")
    parser.add_argument("--folder", default="", help="folder where ranks meet")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args)
        # A communicator that graphs hold would be waited for.
        os._exit(0)
    with Kept(args.results) as kept:
        kept.note(
            command=" ".join(["python", "bench/gpu/expert_rows.py", *sys.argv[1:]]),
            machine=f"{gpu_name()}, {os.cpu_count()} cores",
            versions={"python": platform.python_version(), "torch": torch.__version__},
            ranks=args.ranks,
        )
        run_all(args, kept)


if __name__ == "__main__":
    main()
