"""Speed of KV pages between GPU and host memory, one direction at a time, and the cost to what computes meanwhile.

`python bench/gpu/host_copies.py`: pages of 16 tokens and of one of an 8B shape (32 layers, 8 KV heads of 128, bf16:
128 KiB a token). Ways: see page_copies.py; a number is the programs of a kernel. `apart`: pages in random order on both
sides; `runs`: as prefixes have them, 256 that follow each other; `chat`: as a chat of 4k tokens comes back, from one
run of host pages to runs of a dozen device pages. Prints JSON after each way, GB/s as 1e9 bytes; the last line is the
result. `slower`: time of reading 2 GB again and again, and of a GEMM of 2048 rows, beside copies, over that without.
`is_equal`: what was saved and loaded is what it was. `cpu_ms_a_gb`: of the thread that starts copies; `call_us`: of the
caller. `started`: what a worker measures at its start; `chosen`: what it takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
import torch

from radixmesh.daemons.runtime.arrays import IntArray
from radixmesh.daemons.worker.cuda.device import CudaDevice
from radixmesh.daemons.worker.cuda.host_tier.choice import probed_pages
from radixmesh.daemons.worker.cuda.host_tier.copy_calls import driver_calls
from radixmesh.daemons.worker.cuda.host_tier.copy_thread import CopyEnd
from radixmesh.daemons.worker.cuda.host_tier.host_pool import Copies, CudaHostPool
from radixmesh.daemons.worker.cuda.host_tier.page_copies import (
    EngineCopies,
    KernelCopies,
    PageCopies,
    StagedCopies,
)
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane

LAYOUT = KvLayout(
    num_layers=32, planes=(KvPlane(name="keys", row_shape=(8, 128)), KvPlane(name="values", row_shape=(8, 128)))
)
RUN_TOKENS = 256 * 16


def copies(
    device: CudaDevice,
    page_size: int,
    num_tokens: int,
    host_bytes: int,
    ways: Sequence[str],
    found: dict[str, object],
    tell: Callable[[], None],
) -> None:
    """Adds GB/s of saves and loads by the way, and what they cost others; tells after each way."""
    num_pages = num_tokens // page_size
    pool = KvPool(LAYOUT, num_pages=num_pages, page_size=page_size, dtype=torch.bfloat16, device=device.torch_device)
    start = time.perf_counter()
    host = CudaHostPool(device, pool.page_words(), host_bytes, spare_page=num_pages)
    found |= {"page_size": page_size, "start_s": round(time.perf_counter() - start, 2)}
    found["started"] = {way: {name: trial._asdict() for name, trial in of.items()} for way, of in host.trials.items()}
    found["chosen"] = {"saves": type(host.copies.save).__name__, "loads": type(host.copies.load).__name__}
    random = np.random.default_rng(0)
    num = min(num_pages, host.num_pages) // 2
    apart = (
        random.permutation(num_pages)[:num].astype(np.int32),
        random.permutation(host.num_pages)[:num].astype(np.int32),
    )
    runs = (_runs(num_pages, RUN_TOKENS // page_size, num), _runs(host.num_pages, RUN_TOKENS // page_size, num))
    forms = {"apart": apart, "runs": runs, "chat": probed_pages(num_pages, host.num_pages, host.page_bytes)}
    for name in ways:
        way = _way(name, host)
        host.copies = Copies(way, way)
        of_way: dict[str, object] = {}
        found[name] = of_way
        for form, (device_pages, host_pages) in forms.items():
            gigabytes = len(host_pages) * host.page_bytes / 1e9
            of_way[f"{form}_is_equal"] = _is_equal(device, pool, host, device_pages, host_pages)
            for kind, copy in _both(host, device_pages, host_pages).items():
                seconds, cpu_s = min(_seconds(copy, host) for _ in range(3))
                of_way[f"{form}_{kind}_gbps"] = round(gigabytes / seconds, 1)
                of_way[f"{form}_{kind}_cpu_ms_a_gb"] = round(1000 * cpu_s / gigabytes, 2)
        for kind, copy in _both(host, *runs).items():
            of_way[f"{kind}_slower"] = slower(device, host, copy)
        # One page at a time, as decodes fill them: the time that a call takes of the step thread.
        start = time.perf_counter()
        for _ in range(200):
            host.save(apart[0][:1], apart[1][:1])
        of_way["call_us"] = round((time.perf_counter() - start) / 200 * 1e6, 1)
        host.wait()
        tell()


def _way(name: str, host: CudaHostPool) -> PageCopies:
    planes, words, pages_together = host._planes, host._words, host._memory.part_words // host._words.shape[1]
    if name.isdigit():
        return KernelCopies(planes, words, int(name))
    return {"engines": EngineCopies, "staged": StagedCopies}[name](planes, words, pages_together, driver_calls())


def _both(host: CudaHostPool, device_pages: IntArray, host_pages: IntArray) -> dict[str, Callable[[], CopyEnd]]:
    def save() -> CopyEnd:
        host.save(device_pages, host_pages)
        return cast(CopyEnd, host.saved())

    return {"save": save, "load": partial(host.load, host_pages, device_pages)}


def _runs(num_pages: int, length: int, num: int) -> IntArray:
    """Pages in runs, far apart from each other."""
    starts = np.random.default_rng(1).permutation(num_pages // length)[: -(-num // length)] * length
    return (starts[:, None] + np.arange(length)).reshape(-1)[:num].astype(np.int32)


def _is_equal(
    device: CudaDevice, pool: KvPool, host: CudaHostPool, device_pages: IntArray, host_pages: IntArray
) -> bool:
    """Saves random pages, wipes them and loads them."""
    planes = list(pool.page_words().values())
    with device.in_order(), torch.inference_mode():
        for plane in planes:
            plane[:, :-1].random_()
        index = torch.from_numpy(device_pages).to(device.torch_device).long()
        before = [plane[:, index] for plane in planes]
        host.save(device_pages, host_pages)
        host.overwritten(device_pages)
        for plane in planes:
            plane[:, index] = 0
        host.load(host_pages, device_pages).wait()
        return all(torch.equal(plane[:, index], old) for plane, old in zip(planes, before, strict=True))


def _seconds(copy: Callable[[], CopyEnd], host: CudaHostPool) -> tuple[float, float]:
    """Of the copy, and CPU time of the thread that starts it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    end = copy()
    host.wait()
    return time.perf_counter() - start, end.cpu_s


@torch.inference_mode()
def slower(device: CudaDevice, host: CudaHostPool, copy: Callable[[], object]) -> dict[str, float]:
    """Time of work while pages are copied, over that without; the work is over before the copies are."""
    with device.in_order():
        matrix = torch.ones(16384, 65536, dtype=torch.bfloat16, device=device.torch_device)
        vector = torch.ones(65536, 1, dtype=torch.bfloat16, device=device.torch_device)
        rows = torch.ones(2048, 4096, dtype=torch.bfloat16, device=device.torch_device)
        weights = torch.ones(4096, 28672, dtype=torch.bfloat16, device=device.torch_device)
    ratios = {}
    for name, work in {"reads": (matrix, vector, 12), "gemm": (rows, weights, 12)}.items():
        first, second, times = *work[:2], []
        for is_copying in (False, False, True):
            torch.cuda.synchronize()
            if is_copying:
                copy()
                time.sleep(0.001)
            with device.in_order():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                for _ in range(work[2]):
                    first @ second
                end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
            host.wait()
        ratios[name] = round(times[2] / times[1], 3)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of the device's pool")
    parser.add_argument("--host-bytes", type=int, default=3 << 30)
    parser.add_argument(
        "--ways", nargs="+", default=["engines", "staged", "16", "48"], help="engines, staged, or programs of a kernel"
    )
    args = parser.parse_args()
    device = CudaDevice()
    results: list[object] = []
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copies": results}
    for page_size in (16, 1):
        found: dict[str, object] = {}
        results.append(found)
        copies(
            device,
            page_size,
            args.tokens,
            args.host_bytes,
            args.ways,
            found,
            lambda: print(json.dumps(report), flush=True),
        )
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
