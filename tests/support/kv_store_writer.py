"""A process that writes pages to a disk store until it is killed: `python -m support.kv_store_writer FOLDER SEED`.

Prints the number of each chain of 30 pages once it is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from radixmesh.daemons.worker.kv_store.disk_backend import DiskBackend
from radixmesh.daemons.worker.kv_store.store import KvStore
from support.kv_stores import pages_of, targets_of


def main(folder: Path, seed: int) -> None:
    store = KvStore(DiskBackend(folder, budget_bytes=4 << 20, segment_bytes=1 << 20))
    rng = np.random.default_rng(seed)
    chain = seed * 1_000_000
    while True:
        chain += 1
        pages = pages_of(chain, 30, 4000)
        store.put(pages).result()
        print(chain, flush=True)
        if rng.random() < 0.3:
            old = pages_of(chain - int(rng.integers(0, 5)), 30, 4000)
            store.get(targets_of(old)).result()
        if rng.random() < 0.1:
            store.remove([pages_of(chain - 20, 30, 4000)[0].key]).result()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
