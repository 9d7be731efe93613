"""Speed of KV pages between GPU and host memory, one direction at a time, and the cost of saves to a kernel that reads.

`python bench/gpu/host_copies.py`: pages of 1 and 16 tokens of an 8B shape (32 layers, 8 KV heads of 128, bf16: 128 KiB
a token), scattered on both sides. Prints JSON, GB/s as 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from radixmesh.daemons.worker.cuda.device import CudaDevice
from radixmesh.daemons.worker.cuda.host_pool import CudaHostPool
from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane

LAYOUT = KvLayout(
    num_layers=32, planes=(KvPlane(name="keys", row_shape=(8, 128)), KvPlane(name="values", row_shape=(8, 128)))
)
PROGRAMS = (16, 32, 48, 96)


def copies(device: CudaDevice, page_size: int, num_tokens: int, host_bytes: int) -> dict[str, object]:
    """GB/s of saves and loads by the number of programs."""
    num_pages = num_tokens // page_size
    pool = KvPool(LAYOUT, num_pages=num_pages, page_size=page_size, dtype=torch.bfloat16, device=device.torch_device)
    start = time.perf_counter()
    host = CudaHostPool(device, pool.page_words(), host_bytes, spare_page=num_pages)
    found: dict[str, object] = {"page_size": page_size, "start_s": round(time.perf_counter() - start, 2)}
    random = np.random.default_rng(0)
    num = min(num_pages, host.num_pages) // 2
    device_pages = random.permutation(num_pages)[:num].astype(np.int32)
    host_pages = random.permutation(host.num_pages)[:num].astype(np.int32)
    gigabytes = num * host.page_bytes / 1e9
    for programs in PROGRAMS:
        host.num_programs = programs
        for name, copy in (
            ("save", lambda: host.save(device_pages, host_pages)),
            ("load", lambda: host.load(host_pages, device_pages)),
        ):
            seconds = min(_seconds(copy, host) for _ in range(3))
            found[f"{name}_{programs}_gbps"] = round(gigabytes / seconds, 1)
    # One page at a time, as a decode fills them: what a call costs the step thread.
    one = device_pages[:1], host_pages[:1]
    start = time.perf_counter()
    for _ in range(200):
        host.save(*one)
    found["call_us"] = round((time.perf_counter() - start) / 200 * 1e6, 1)
    host.wait()
    found["slowdown_of_reads"] = {str(n): slowdown(device, host, device_pages, host_pages, n) for n in PROGRAMS}
    return found


def _seconds(copy: object, host: CudaHostPool) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    copy()  # type: ignore[operator]
    host.wait()
    return time.perf_counter() - start


def slowdown(
    device: CudaDevice, host: CudaHostPool, device_pages: np.ndarray, host_pages: np.ndarray, programs: int
) -> float:
    """Time of reading 2 GB again and again while pages are saved, over that without."""
    host.num_programs = programs
    with device.in_order():
        matrix = torch.ones(16384, 65536, dtype=torch.bfloat16, device=device.torch_device)
        vector = torch.ones(65536, 1, dtype=torch.bfloat16, device=device.torch_device)
    times = []
    for is_saving in (False, True):
        torch.cuda.synchronize()
        if is_saving:
            host.save(device_pages, host_pages)
        with device.in_order():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(30):
                matrix @ vector
            end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        host.wait()
    return round(times[1] / times[0], 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="of the device's pool")
    parser.add_argument("--host-bytes", type=int, default=5 << 30)
    args = parser.parse_args()
    device = CudaDevice()
    results = [copies(device, page_size, args.tokens, args.host_bytes) for page_size in (1, 16)]
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copies": results}))


if __name__ == "__main__":
    main()
