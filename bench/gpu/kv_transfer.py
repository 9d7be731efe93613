"""KV handed over by one process to another: gathered, carried to the other's staging region, scattered.

    python bench/gpu/kv_transfer.py --runs 10 > transfer.json
    python bench/gpu/kv_transfer.py --devices 0 1 --pieces 1 2 4 8 --tokens 2048 4096 8192 --both-ways
    python bench/gpu/kv_transfer.py --backend cpu --shapes tiny --tokens 1024 --pieces 1 4 --runs 3

Two processes, one for each of --devices (default: two GPUs where the machine has them, otherwise one that both use).
They copy as workers do, by the same class: a region is plain memory of the receiver's GPU that the sender maps by its
CUDA IPC handle, gathers run on a stream of high priority, scatters on another, and threads wait for their events. Ways:
`direct`: the gather kernel writes to the region; `staged`: it writes to memory of the sender, which one copy carries
over; `rows`: an index operation a layer and plane, as torch has it, then one copy; `host`: through pinned memory that
both processes map, where /dev/shm has room.

The gathers are launched behind a step that still runs, as a worker's are: the step ends when the transfer begins.
--at-once: they are launched then, one after the other, by a process that has waited.

--pieces: a transfer is cut into as many; each is told as it is there, and is scattered while the next is gathered. 1:
one behind the other. --both-ways: also with one transfer in each direction at the same time (`direct` alone).

Times are medians, on the host's monotonic clock: from when the transfer begins until the receiver has compared the
stamps behind its scatter; messages between the processes (a pipe) are part of it. gb_s: bytes of KV a second, both
copies included; both ways: of both transfers together, from the first begin to the last end. stages_ms: of a transfer,
each behind the one before: the last gather seen to be over; its receiver told; the last scatter launched; stamps
compared. gather_ms and scatter_ms: device time of the copies. The receiver's KV is compared with the sender's.
--results: file of what is known so far, after each case.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import shutil
import statistics
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import numpy as np
import torch
from gpu.kept import Kept
from torch import multiprocessing

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import CudaDevice, Device, HostDevice
from radixmesh.daemons.worker.cuda.kv_device import PoolDevice
from radixmesh.daemons.worker.cuda.ranks.peer_memory import CudaPeerMemory, PeerMemory
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, TokenNumbers
from radixmesh.daemons.worker.kv_transfer.staging import CHUNK_TOKENS, STAMP_BYTES
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.daemons.worker.step_handle import DONE, DeviceEvent

_POOL_TOKENS = 16384
_WARM_UP = 2
_MIB = 1 << 20
# As in a worker whose threads wait for events.
_SWITCH_S = 0.0002
_STAGES = ("gathered", "told", "scattering", "ended")
_END = struct.Struct("<qqq?d")
"""Of a transfer, at its receiver: when it was told of the last piece, when that was launched, when all was over;
whether the stamps are right, seconds of the scatter."""


class Shape(NamedTuple):
    """layers; numbers of a token's row in each plane, bfloat16."""

    layers: int
    rows: tuple[int, ...]

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * sum(self.rows)

    @property
    def layout(self) -> KvLayout:
        planes = tuple(KvPlane(name=f"p{number}", row_shape=(row,)) for number, row in enumerate(self.rows))
        return KvLayout(num_layers=self.layers, planes=planes)


SHAPES = {
    "llama-3.1-8b": Shape(32, (1024, 1024)),
    "deepseek-v2-lite": Shape(27, (576,)),
    "tiny": Shape(2, (64, 64)),
}


class Case(NamedTuple):
    shape: str
    num_tokens: int
    page_size: int
    way: str
    pieces: int = 1
    both_ways: bool = False
    at_once: bool = False

    @property
    def kv_bytes(self) -> int:
        return self.num_tokens * SHAPES[self.shape].token_bytes

    def tokens_of_pieces(self) -> list[slice]:
        """Of whole chunks of a region."""
        step = -(-self.num_tokens // (self.pieces * CHUNK_TOKENS)) * CHUNK_TOKENS
        return [slice(start, min(start + step, self.num_tokens)) for start in range(0, self.num_tokens, step)]


class Told(NamedTuple):
    """One transfer, as its sender knows it: times by the host's monotonic clock, in nanoseconds and in this order;
    seconds of its copies."""

    began_ns: int
    gathered_ns: int
    """The sender knows that the last one has run."""
    told_ns: int
    """The receiver knows."""
    scattering_ns: int
    """It has launched the last scatter."""
    ended_ns: int
    gather_s: float
    scatter_s: float

    def stages_ms(self) -> list[float]:
        """Of _STAGES, each from the end of the one before."""
        times = self[: Told._fields.index("ended_ns") + 1]
        return [(end - start) / 1e6 for start, end in itertools.pairwise(times)]


class HeldStep:
    """Work on a device's stream that is over when the host says so."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ended = device.host_ints(1)
        self._number = 0

    def begin(self) -> DeviceEvent:
        """The event of its end."""
        self._number += 1
        if isinstance(self._device, CudaDevice):
            stream = ctypes.c_void_p(self._device.stream.cuda_stream)
            address, number = ctypes.c_uint64(self._ended.data_ptr()), ctypes.c_uint32(self._number)
            # 0: until the memory has this number, or a later one.
            wait = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
            assert wait(stream, address, number, ctypes.c_uint(0)) == 0
        return self._device.record_event()

    def end(self) -> int:
        """When that was."""
        now_ns = time.monotonic_ns()
        self._ended[0] = self._number
        return now_ns


class End:
    """A process with a pool on its device, and memory of region_bytes for what comes. host: memory of both processes,
    which is pinned."""

    def __init__(self, backend: str, number: int, region_bytes: int, host: SharedMemory | None) -> None:
        self.device: Device
        self._memory: PeerMemory
        if backend == "cuda":
            self.device, self._memory = CudaDevice(number), CudaPeerMemory("bench", "the GPUs cannot reach each other")
        else:
            from support.host_peer_memory import HostPeerMemory

            self.device, self._memory = HostDevice(), HostPeerMemory()
        self._is_gpu, self._host = backend == "cuda", host
        self._host_address = ctypes.addressof(ctypes.c_char.from_buffer(host.buf)) if host is not None else 0
        if host is not None and self._is_gpu:
            error = torch.cuda.cudart().cudaHostRegister(self._host_address, host.size, 0)
            assert int(error) == 0, error
        with self.device.in_order():
            self._address = self._memory.allocate(region_bytes)
            self.handle = self._memory.handle(self._address)
        self._step = HeldStep(self.device)
        self._own = torch.zeros(region_bytes, dtype=torch.uint8, device=self.device.torch_device)
        self.kv: PoolDevice
        self.pool: KvPool

    def reach(self, handle: bytes) -> None:
        """The other end's region, mapped for this device."""
        with self.device.in_order():
            self._target = self._memory.open(handle)

    @torch.inference_mode()
    def begin(self, case: Case) -> None:
        """A pool of random KV, and the case's tokens: those to send, and those to receive to."""
        self.kv = self.pool = None  # type: ignore[assignment]
        if self._is_gpu:
            torch.cuda.empty_cache()
        self.pool = KvPool(
            SHAPES[case.shape].layout,
            num_pages=2 * max(_POOL_TOKENS, case.num_tokens) // case.page_size,
            page_size=case.page_size,
            dtype=torch.bfloat16,
            device=self.device.torch_device,
        )
        for plane in self.pool.planes.values():
            plane.normal_()
        self.kv = PoolDevice(self.device, self.pool, self._memory)
        pages = np.random.default_rng(22).permutation(self.pool.num_pages).astype(np.int32)
        tokens = (pages[:, None] * np.int32(case.page_size) + np.arange(case.page_size, dtype=np.int32)).reshape(-1)
        self.sources, self.targets = tokens[: case.num_tokens], tokens[-case.num_tokens :]
        if self._is_gpu:
            torch.cuda.synchronize()

    def send(self, case: Case, words: Connection, stamp: bytes) -> Told:
        """One transfer. The receiver is ready; it is told of each piece."""
        self.device.stay_in_order()  # As the step thread of a worker.
        target = DevicePiece(self._target, case.kv_bytes + 2 * STAMP_BYTES)
        self.kv.write(target.address, stamp)
        words.send_bytes(stamp)
        words.recv_bytes()
        pieces, token_bytes = case.tokens_of_pieces(), self.pool.token_bytes
        computed = DONE if case.at_once else self._step.begin()
        began_ns = time.monotonic_ns()
        copies, tokens = [], TokenNumbers(self.sources)
        try:
            for piece in pieces:
                tail = stamp if piece is pieces[-1] else b""
                num_bytes = (piece.stop - piece.start) * token_bytes + len(tail)
                place = target.part(STAMP_BYTES + piece.start * token_bytes, num_bytes)
                copies.append(self._carry(case, tokens.part(piece.start, piece.stop), place, tail, computed))
        finally:
            began_ns = began_ns if case.at_once else self._step.end()
        for copied in copies:
            copied.event.wait()
            gathered_ns = time.monotonic_ns()
            words.send_bytes(b"piece")
        *ended_ns, is_sound, scatter_s = _END.unpack(words.recv_bytes())
        assert is_sound, case
        gather_s = sum(copied.seconds() for copied in copies)
        return Told(began_ns, gathered_ns, *ended_ns, gather_s, scatter_s)

    def receive(self, case: Case, words: Connection) -> None:
        """One transfer: each piece is scattered when it is told of."""
        self.device.stay_in_order()
        region = DevicePiece(self._address, case.kv_bytes + 2 * STAMP_BYTES)
        stamp, token_bytes, copies = words.recv_bytes(), self.pool.token_bytes, []
        tokens = TokenNumbers(self.targets)
        words.send_bytes(b"ready")
        for piece in case.tokens_of_pieces():
            words.recv_bytes()
            told_ns = time.monotonic_ns()
            body = region.part(STAMP_BYTES + piece.start * token_bytes, (piece.stop - piece.start) * token_bytes)
            if case.way == "host":
                in_host = self._host_address + piece.start * token_bytes
                self._beside(body.address, in_host, body.num_bytes).event.wait()
            copies.append(self.kv.scatter(tokens.part(piece.start, piece.stop), body, None, DONE))
        launched_ns = time.monotonic_ns()
        ends = [region.part(start, STAMP_BYTES) for start in (0, region.num_bytes - STAMP_BYTES)]
        is_sound = self.kv.fetch(ends, copies[-1], DONE).data() == [stamp, stamp]
        now_ns = time.monotonic_ns()
        seconds = sum(copied.seconds() for copied in copies)
        words.send_bytes(_END.pack(told_ns, launched_ns, now_ns, is_sound, seconds))

    @torch.inference_mode()
    def checksum(self, tokens: IntArray) -> int:
        """Of the KV of tokens, which tells their order too: words weighted by their places, modulo 2^64."""
        indexes = torch.from_numpy(tokens).to(self.device.torch_device)
        words = self.pool.read_tokens(indexes).view(torch.int64)
        places = torch.arange(1, 2 * len(words), 2, device=words.device)
        return int((words * places).sum())

    @torch.inference_mode()
    def _carry(
        self, case: Case, tokens: TokenNumbers, place: DevicePiece, tail: bytes, computed: DeviceEvent
    ) -> Copied:
        """Launches what brings tokens to a region, or to the host's memory, and the tail to the region, behind the step
        that computes them."""
        if case.way == "direct":
            return self.kv.gather(tokens, place, None, computed, tail=tail)
        target = place.part(0, place.num_bytes - len(tail))
        if tail:
            # The receiver looks at it once it is told of the last piece.
            self.kv.write(target.address + target.num_bytes, tail)
        own = DevicePiece(self._own.data_ptr(), target.num_bytes)
        gathered = (
            self._rows(tokens.numbers, computed) if case.way == "rows" else self.kv.gather(tokens, own, None, computed)
        )
        in_host = self._host_address + target.address - self._target - STAMP_BYTES
        copied = self._beside(in_host if case.way == "host" else target.address, own.address, own.num_bytes)
        return Copied(copied.event, lambda: gathered.seconds() + copied.seconds())

    def _rows(self, indexes: IntArray, computed: DeviceEvent) -> Copied:
        def work() -> None:
            pinned = torch.from_numpy(indexes).pin_memory() if self._is_gpu else torch.from_numpy(indexes)
            # Not a copy that waits for the step, which ends when this is launched.
            chunks = pinned.to(self.device.torch_device, non_blocking=True).long().split(CHUNK_TOKENS)
            planes = self.pool.copied
            parts = [
                plane[layer][chunk].flatten() for chunk in chunks for plane in planes for layer in range(len(plane))
            ]
            data = torch.cat(parts).view(torch.uint8)
            self._own[: len(data)].copy_(data)

        start, end = self.device.run_beside(work, computed, is_urgent=True)
        return Copied(end, lambda: end.seconds_since(start))

    def _beside(self, target: int, source: int, num_bytes: int) -> Copied:
        """One copy, behind gathers."""

        def work() -> None:
            if not self._is_gpu:
                ctypes.memmove(target, source, num_bytes)
                return
            arguments = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            status = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync(*arguments, stream)
            assert status == 0, f"CUDA error {status}"

        start, end = self.device.run_beside(work, DONE, is_urgent=True)
        return Copied(end, lambda: end.seconds_since(start))


class Channels(NamedTuple):
    """Of one process: orders and answers, words of transfers that the first process sends, and of those it receives."""

    control: Connection
    there: Connection
    back: Connection


def serve(channels: Channels, backend: str, number: int, region_bytes: int, host_name: str | None) -> None:
    """The second process: receives, and sends where both do."""
    sys.setswitchinterval(_SWITCH_S)
    host = SharedMemory(host_name) if host_name is not None else None
    end = End(backend, number, region_bytes, host)
    channels.control.send(end.handle)
    end.reach(channels.control.recv())
    while (case := channels.control.recv()) is not None:
        end.begin(case)
        channels.control.send("begun")
        while (of_run := channels.control.recv()) is not None:
            if not case.both_ways:
                end.receive(case, channels.there)
                channels.control.send([])
                continue
            with ThreadPoolExecutor(1) as threads:
                sending = threads.submit(end.send, of_run, channels.back, os.urandom(STAMP_BYTES))
                end.receive(case, channels.there)
                channels.control.send([sending.result()])
        channels.control.send((end.checksum(end.sources), end.checksum(end.targets)))
    # Freed with the process: the other one has it mapped.


def measure(case: Case, end: End, channels: Channels, runs: int) -> dict[str, object]:
    """One case, from the first process."""
    channels.control.send(case)
    end.begin(case)
    channels.control.recv()
    times, gathers, scatters, walls, stages = [], [], [], [], []
    for run in range(runs + _WARM_UP):
        # The driver loads kernels and allocates memory in the first runs, which waits for what a held step holds up.
        of_run = case if run >= _WARM_UP else case._replace(at_once=True)
        channels.control.send(of_run)
        with ThreadPoolExecutor(1) as threads:
            receiving = threads.submit(end.receive, case, channels.back) if case.both_ways else None
            told = [end.send(of_run, channels.there, os.urandom(STAMP_BYTES)), *channels.control.recv()]
            if receiving is not None:
                receiving.result()
        if run >= _WARM_UP:
            times += [(one.ended_ns - one.began_ns) / 1e9 for one in told]
            gathers += [one.gather_s for one in told]
            scatters += [one.scatter_s for one in told]
            stages += [one.stages_ms() for one in told]
            walls.append((max(one.ended_ns for one in told) - min(one.began_ns for one in told)) / 1e9)
    channels.control.send(None)
    theirs_sent, theirs_received = channels.control.recv()
    assert theirs_received == end.checksum(end.sources), case
    assert not case.both_ways or theirs_sent == end.checksum(end.targets), case
    num_bytes = case.kv_bytes * (1 + case.both_ways)
    return {
        **case._asdict(),
        "mib": round(case.kv_bytes / _MIB, 1),
        "ms": round(1e3 * statistics.median(times), 3),
        "ms_max": round(1e3 * max(times), 3),
        "gb_s": round(num_bytes / statistics.median(walls) / 1e9, 1),
        "gather_ms": round(1e3 * statistics.median(gathers), 3),
        "scatter_ms": round(1e3 * statistics.median(scatters), 3),
        "stages_ms": {
            name: round(statistics.median(times), 3)
            for name, times in zip(_STAGES, zip(*stages, strict=True), strict=True)
        },
    }


def cases_of(args: argparse.Namespace) -> list[Case]:
    """As asked for; without --ways, --pieces and --tokens what docs/gpu-results.md has."""
    if args.pieces or args.tokens or args.ways:
        tokens, ways, pieces = args.tokens or [4096], args.ways or ["direct"], args.pieces or [1]
        cases = list(itertools.starmap(Case, itertools.product(args.shapes, tokens, args.page_sizes, ways, pieces)))
        if args.both_ways:
            cases = [
                case._replace(both_ways=both_ways)
                for case in cases
                for both_ways in ((False, True) if case.way == "direct" else (False,))
            ]
    else:
        ways = ["direct", "staged"]
        llama, *_ = SHAPES
        cases = [
            *(Case(llama, 2048, page_size, way) for page_size in (1, 16) for way in ways),
            *(Case(llama, 8192, 1, way) for way in ways),
            *(Case(shape, 4096, 1, way) for shape in args.shapes for way in (*ways, "rows", "host")),
        ]
    return [case._replace(at_once=args.at_once) for case in cases]


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--devices", type=int, nargs=2, default=None, help="numbers of the GPUs, of either process")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["llama-3.1-8b", "deepseek-v2-lite"])
    parser.add_argument("--ways", nargs="+", choices=("direct", "staged", "rows", "host"), default=[])
    parser.add_argument("--tokens", type=int, nargs="+", default=[], help="of a transfer")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--pieces", type=int, nargs="+", default=[], help="of a transfer")
    parser.add_argument("--at-once", action="store_true", help="gathers are launched when the transfer begins")
    parser.add_argument("--both-ways", action="store_true", help="transfers in both directions, too")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE")
    args = parser.parse_args()
    with Kept(args.results) as kept:
        run(args, kept)


def _devices(args: argparse.Namespace) -> tuple[list[int], str]:
    """Numbers of the GPUs, and their names. Exits where one cannot reach the other."""
    if args.backend == "cpu":
        return [0, 0], "CPU"
    num_gpus = torch.cuda.device_count()
    devices = args.devices or [0, min(1, num_gpus - 1)]
    if max(devices) >= num_gpus or min(devices) < 0:
        sys.exit(f"--devices {devices[0]} {devices[1]}: the machine has {num_gpus} GPUs")
    for one, other in (devices, devices[::-1]):
        if one != other and not torch.cuda.can_device_access_peer(one, other):
            sys.exit(f"GPU {one} cannot reach memory of GPU {other}: choose others by --devices")
    return devices, " and ".join(torch.cuda.get_device_name(number) for number in dict.fromkeys(devices))


def run(args: argparse.Namespace, kept: Kept) -> None:
    devices, names = _devices(args)
    cases = cases_of(args)
    sys.setswitchinterval(_SWITCH_S)
    region_bytes = max(case.kv_bytes for case in cases) + 2 * STAMP_BYTES
    host_bytes = max((case.kv_bytes for case in cases if case.way == "host"), default=0)
    if shutil.disk_usage("/dev/shm").free < 2 * host_bytes:
        cases, host_bytes = [case for case in cases if case.way != "host"], 0
    host = SharedMemory(create=True, size=host_bytes) if host_bytes else None
    kept.note(
        command=" ".join(["python", *sys.argv]),
        machine=f"{names}, {os.cpu_count()} cores",
        versions={"python": sys.version.split()[0], "torch": torch.__version__},
        gpus=len(set(devices)),
        devices=devices,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = (Channels(*ends) for ends in zip(*(context.Pipe() for _ in Channels._fields), strict=True))
    arguments = theirs, args.backend, devices[1], region_bytes, None if host is None else host.name
    other = context.Process(target=serve, args=arguments)
    other.start()
    # Without ends here, what waits for a process that has failed is told so.
    for channel in theirs:
        channel.close()
    found: list[dict[str, object]] = []
    try:
        end = End(args.backend, devices[0], region_bytes, host)
        ours.control.send(end.handle)
        end.reach(ours.control.recv())
        for case in cases:
            found.append(measure(case, end, ours, args.runs))
            kept.note(cases=found)
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
        ours.control.send(None)
        other.join(30)
    finally:
        other.kill()
        if host is not None:
            # Their addresses are in use until the process ends.
            with suppress(BufferError):
                host.close()
            host.unlink()


if __name__ == "__main__":
    main()
