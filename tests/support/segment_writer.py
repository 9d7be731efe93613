"""A process that saves and loses pages in a segment of host memory until it is killed:

    python -m support.segment_writer PATH SEED

Pages are granted, filled byte by byte and committed as a worker does; what a page holds follows from its prefix.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray, as_ints
from radixmesh.daemons.worker.host_memory.host_segment import HostSegment
from radixmesh.daemons.worker.limits import Limits
from radixmesh.daemons.worker.plans.tiers.host_records import HostRecords

NUM_PAGES, PAGE_BYTES, PAGE_SIZE = 60, 8_000, 2
IDENTITY = b"i" * 32
LIMITS = Limits(
    page_size=PAGE_SIZE,
    num_pages=NUM_PAGES,
    num_slots=1,
    max_tokens_per_step=1,
    vocab_size=1 << 30,
    max_total_len=1 << 20,
)


def segment_at(path: Path, **changes: object) -> HostSegment:
    values: dict[str, object] = {"identity": IDENTITY, "page_size": PAGE_SIZE, **changes}
    return HostSegment(path, **values)  # type: ignore[arg-type]


def records_on(segment: HostSegment) -> HostRecords:
    return HostRecords(LIMITS, segment)


def bytes_of(prefix: IntArray, name: str) -> bytes:
    """Content of the page that a prefix ends with."""
    return hashlib.shake_128(name.encode() + b"/" + prefix.tobytes()).digest(PAGE_BYTES)


def save(
    records: HostRecords, memory: np.ndarray, pages: IntArray, ids: IntArray, previous: int, prefix: IntArray, name: str
) -> None:
    """Saves pages that continue a prefix, as HostTier.save() does."""
    records.grant(
        pages, np.array([len(pages)]), previous_pages=as_ints([previous]), namespaces=[name], weights_version=1
    )
    records.ids[pages] = ids.reshape(-1, PAGE_SIZE)
    records.filled[pages] = PAGE_SIZE
    generations = records.generations[pages]
    for at, page in enumerate(pages.tolist()):
        end = (at + 1) * PAGE_SIZE
        memory[page] = np.frombuffer(bytes_of(np.concatenate([prefix, ids[:end]]), name), np.uint8)
    records.commit(pages, generations)


def main(path: Path, seed: int) -> None:
    segment, rng = segment_at(path), np.random.default_rng(seed)
    memory = segment.open(NUM_PAGES, PAGE_BYTES)
    records = records_on(segment)
    print("ready", flush=True)
    none = np.zeros(0, np.int32)
    while True:
        name = str(rng.choice(["", "0:salt", "3:abc"]))
        first = rng.choice(NUM_PAGES, 8, replace=False).astype(np.int32)
        ids = rng.integers(0, 1 << 20, 16).astype(np.int32)
        save(records, memory, first[:5], ids[:10], -1, none, name)
        save(records, memory, first[5:], ids[10:], int(first[4]), ids[:10], name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
