"""A process that writes pages to a shared folder until it is killed.

`python -m support.kv_file_writer FOLDER BUDGET SEED`

Prints the number of each chain of 30 pages once it is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from radixmesh.daemons.worker.kv_store.nixl_file_backend import NixlFileBackend
from radixmesh.daemons.worker.kv_store.store import Got, KvStore
from support.kv_stores import pages_of, targets_of


def main(folder: Path, budget: int, seed: int) -> None:
    store = KvStore(NixlFileBackend(folder, budget_bytes=budget, pool_bytes=4 << 20))
    rng = np.random.default_rng(seed)
    chain = seed * 1_000_000
    while True:
        chain += 1
        store.put(pages_of(chain, 30, 4000)).result()
        print(chain, flush=True)
        if rng.random() < 0.3:
            got = store.get(targets_of(pages_of(chain - int(rng.integers(0, 5)), 30, 4000))).result()
            assert set(got) <= {Got.HIT, Got.MISS}, got
        if rng.random() < 0.1:
            store.remove([pages_of(chain - 20, 30, 4000)[0].key]).result()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
