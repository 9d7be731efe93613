"""Speed of the store of KV pages: `python bench/kv_store.py FOLDER [--pages N] [--gib N] [--write FILE]`; prints JSON.

    python bench/kv_store.py FOLDER --gib 0.25 --shared --write bench/results/kv-store-shared.json

Pages of 1 and 16 tokens of an 8B shape (32 layers, 8 KV heads of 128, bfloat16: 128 KiB a token) are put into a disk
store and read back, from the page cache and, where the file system lets go of it, from the disk; then a store is
started whose index has a million pages. FOLDER is of the disk that is measured, and is emptied of what this wrote.
With `--shared` the stores that replicas share are put beside the disk, each with servers of its own on this machine:
GB/s in batches of 32 MiB, and the time of calls for one page, medians of three rounds. Those that are not installed are
named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.kv_stores import SHARED, shared_store

from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend
from radixmesh.daemons.worker.kv_store.keys import PageFormat, page_keys
from radixmesh.daemons.worker.kv_store.opening import open_backend
from radixmesh.daemons.worker.kv_store.store import Got, KvStore, Page

TOKEN_BYTES = 32 * 2 * 8 * 128 * 2
BATCH_BYTES = 32 << 20
_ROUNDS = 3


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of KV for each page size")
    parser.add_argument("--pages", type=int, default=1_000_000, help="pages of the index")
    parser.add_argument(
        "--shared", action="store_true", help="disk, Redis, NIXL and Mooncake beside each other instead"
    )
    parser.add_argument("--write", type=Path, help="file for the results")
    flags = parser.parse_args(argv)
    folder = flags.folder / "kv-store-bench"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        results: dict[str, object] = {
            "command": " ".join(["python", "bench/kv_store.py", *(argv or sys.argv[1:])]),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
            "python": platform.python_version(),
            "load_average": round(os.getloadavg()[0], 1),
        }
        if flags.shared:
            results["stores"] = [shared(folder, size, int(flags.gib * 2**30)) for size in (1, 16)]
        else:
            results["pages"] = [transfer(folder / str(size), size, int(flags.gib * 2**30)) for size in (1, 16)]
            results["start"] = start(folder / "index", flags.pages)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(results, indent=1)
    print(text)
    if flags.write is not None:
        flags.write.write_text(text + "\n")


def batches_of(page_size: int, num_bytes: int) -> tuple[Callable[[], list[list[Page]]], int, int]:
    """Batches of 32 MiB, whose memory is the same for all, the number of pages, and the bytes of one."""
    page_bytes = page_size * TOKEN_BYTES
    per_batch, num = BATCH_BYTES // page_bytes, num_bytes // page_bytes
    memory = np.random.default_rng(0).integers(0, 256, (per_batch, page_bytes), np.uint8)
    ids = np.arange(num * page_size, dtype=np.int32)
    layout = PageFormat(weights_digest="w", compute="c", kv_dtype="bfloat16", kv_layout="8B", page_size=page_size)
    keys = page_keys(layout.root(), ids, page_size)

    def batches() -> list[list[Page]]:
        return [
            [
                Page(keys[at], ids[at * page_size : (at + 1) * page_size], memory[at - first].data)
                for at in range(first, min(first + per_batch, num))
            ]
            for first in range(0, num, per_batch)
        ]

    return batches, num, page_bytes


def shared(folder: Path, page_size: int, num_bytes: int) -> dict[str, object]:
    """Stores by scheme, one after the other, three times: medians of what calls() measured."""
    batches, num, page_bytes = batches_of(page_size, num_bytes)
    rounds: dict[str, list[dict[str, float]]] = {}
    found: dict[str, object] = {"page_size": page_size, "page_bytes": page_bytes, "num_pages": num}
    for _ in range(_ROUNDS):
        for scheme in ("disk", *SHARED):
            if scheme == "nixl-obj" or scheme in found:
                continue  # The object server here is a stand-in in Python: that is what would be measured.
            place = folder / scheme
            place.mkdir(parents=True)
            try:
                with contextlib.ExitStack() as servers:
                    url = f"disk://{place}?budget={4 * num_bytes}"
                    if scheme != "disk":
                        url = servers.enter_context(shared_store(scheme, place))
                    os.sync()  # The next one does not pay for what the last one left to be written.
                    one = calls(KvStore(open_backend(url)), batches, num * page_bytes / 1e9)
                    rounds.setdefault(scheme, []).append(one)
            except pytest.skip.Exception as skipped:
                found[scheme] = f"not here: {skipped}"
            shutil.rmtree(place)
    for scheme, all_ in rounds.items():
        found[scheme] = {name: round(float(np.median([one[name] for one in all_])), 3) for name in all_[0]}
    return found


def calls(store: KvStore, batches: Callable[[], list[list[Page]]], gigabytes: float) -> dict[str, float]:
    """GB/s of payload in batches, and ms of 200 calls for one page and of 200 look-ups of 16 keys."""
    put_s = timed(lambda: [store.put(batch).result() for batch in batches()])

    def read() -> None:
        futures = [store.get(batch) for batch in batches()]
        assert all(set(future.result()) == {Got.HIT} for future in futures)

    get_s = timed(read)
    pages = [page for batch in batches() for page in batch]
    one_s = [timed(lambda page=page: store.get([page]).result()) for page in (pages * 200)[:200]]  # type: ignore[misc]
    keys = [page.key for page in pages[:16]]
    look_s = [timed(lambda: store.contains(keys).result()) for _ in range(200)]
    assert store.counters().failed == store.counters().corrupt == 0
    store.close()
    return {
        "put_gb_per_s": gigabytes / put_s,
        "get_gb_per_s": gigabytes / get_s,
        "get_one_page_median_ms": 1000 * float(np.median(one_s)),
        "get_one_page_p99_ms": 1000 * float(np.percentile(one_s, 99)),
        "contains_16_median_ms": 1000 * float(np.median(look_s)),
        "contains_16_p99_ms": 1000 * float(np.percentile(look_s, 99)),
    }


def transfer(folder: Path, page_size: int, num_bytes: int) -> dict[str, float]:
    """GB/s of payload put and read, of pages of so many tokens, in batches of 32 MiB."""
    batches, num, page_bytes = batches_of(page_size, num_bytes)
    store = KvStore(DiskBackend(folder, budget_bytes=2 * num_bytes))
    put_s = timed(lambda: [store.put(batch).result() for batch in batches()])
    counters = store.counters()
    store.close()
    opened_s = timed(lambda: KvStore(DiskBackend(folder, budget_bytes=2 * num_bytes)).close())
    store = KvStore(DiskBackend(folder, budget_bytes=2 * num_bytes))

    def read() -> None:
        futures = [store.get(batch) for batch in batches()]
        assert all(set(future.result()) == {Got.HIT} for future in futures)

    drop_cache(folder)
    cold_s, warm_s = timed(read), timed(read)
    store.close()
    shutil.rmtree(folder)
    total = num * page_bytes / 1e9
    return {
        "page_size": page_size,
        "page_bytes": page_bytes,
        "num_pages": num,
        "put_gb_per_s": round(total / put_s, 2),
        "get_cold_gb_per_s": round(total / cold_s, 2),
        "get_cached_gb_per_s": round(total / warm_s, 2),
        "write_amplification": round(counters.write_amplification, 4),
        "open_s": round(opened_s, 4),
    }


def start(folder: Path, num: int) -> dict[str, float]:
    """Seconds until a store with so many pages is open, by the indexes of its segments, and by a scan of the last one.

    Payloads are of 64 bytes: a start reads none.
    """
    ids = np.arange(num, dtype=np.int32)
    layout = PageFormat(weights_digest="w", compute="c", kv_dtype="bfloat16", kv_layout="8B", page_size=1)
    keys = page_keys(layout.root(), ids, 1)
    payload = memoryview(bytes(64))
    budget = num * 400

    def opened() -> DiskBackend:
        return DiskBackend(folder, budget_bytes=budget)

    store = KvStore(opened())
    for first in range(0, num, 10_000):
        store.put([Page(keys[at], ids[at : at + 1], payload) for at in range(first, min(first + 10_000, num))]).result()
    store.close()
    drop_cache(folder)
    backends: list[DiskBackend] = []
    indexed_s = timed(lambda: backends.append(opened()))
    num_pages = backends[0].usage().num_pages
    backends[0].close()
    return {
        "num_pages": num_pages,
        "num_segments": len(list(folder.glob("*.seg"))),
        "open_s": round(indexed_s, 3),
    }


def drop_cache(folder: Path) -> None:
    """Has the system write the folder's files and forget them."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    main(sys.argv[1:])
