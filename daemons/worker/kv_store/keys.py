"""Content keys of KV pages: equal in every process that would compute the same KV, different otherwise.

  root  = SHA-256 of (format, weights, compute, KV dtype, KV layout, shard, cache namespace), lengths first
  key_0 = SHA-256 of (root, ids of page 0)          ids: int32, little-endian
  key_i = SHA-256 of (key_{i-1}, ids of page i)

So a key stands for all tokens from the start of the sequence to the end of its page. Nothing counted enters: no version
of weights, no generation of a page, no epoch. Only full pages have a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixmesh.daemons.runtime.arrays import IntArray

KEY_BYTES = 32
# Raised whenever what is stored for a page changes its meaning: older pages are then never found.
_FORMAT = b"radixmesh kv page 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFormat:
    """Everything besides tokens that the bytes of a page depend on.

    weights_digest: of the weights' bytes (`weights_digest()`), not of file names and headers alone: fine-tunes of one
    base differ in nothing else. compute: the model fingerprint of the worker, which covers config.json, quantisation
    and the type of sums. kv_dtype, kv_layout: the runner's (`kv_layout` names the page size). shard, num_shards: the
    part of the KV heads that a TP rank holds; 0 of 1 where every rank holds the same KV, as with MLA, so that one copy
    serves all.
    """

    weights_digest: str
    compute: str
    kv_dtype: str
    kv_layout: str
    page_size: int
    shard: int = 0
    num_shards: int = 1

    def root(self, namespace: str = "") -> bytes:
        """32 bytes that the chains of a cache namespace (`cache_name()`: adapter and salt) begin with.

        An adapter's name is not its content: who serves adapters puts a digest of theirs into the namespace.
        """
        assert 0 <= self.shard < self.num_shards and self.page_size >= 1, self
        digest = hashlib.sha256()
        for part in (
            _FORMAT,
            self.weights_digest.encode(),
            self.compute.encode(),
            self.kv_dtype.encode(),
            self.kv_layout.encode(),
            f"{self.page_size}/{self.shard}/{self.num_shards}".encode(),
            namespace.encode(),
        ):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def page_keys(parent: bytes, ids: Sequence[int] | IntArray, page_size: int) -> list[bytes]:
    """Keys of the full pages of tokens `ids`, which continue the page with key `parent` (or a root)."""
    assert len(parent) == KEY_BYTES, len(parent)
    data = np.ascontiguousarray(ids, "<i4").tobytes()
    keys, step = [], 4 * page_size
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(parent + data[start : start + step]).digest()
        keys.append(parent)
    return keys
