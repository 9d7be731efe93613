"""Content keys of pages, digests of weights and the form of records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xxhash")

from radixmesh.daemons.runtime.cache_namespace import cache_name
from radixmesh.daemons.runtime.errors import ErrorReason, MeshError
from radixmesh.daemons.runtime.model_folder.fingerprint import model_fingerprint
from radixmesh.daemons.runtime.model_folder.weights_digest import weights_digest
from radixmesh.daemons.worker.kv_store.keys import PageFormat, page_keys
from radixmesh.daemons.worker.kv_store.records import encode_head, encode_removal, head_bytes, is_page, parse_head

FORMAT = PageFormat(weights_digest="w", compute="c", kv_dtype="float16", kv_layout="layers=2;page=4", page_size=4)


def test_whatever_changes_kv_changes_the_root() -> None:
    others = [
        replace(FORMAT, weights_digest="v"),
        replace(FORMAT, compute="d"),
        replace(FORMAT, kv_dtype="bfloat16"),
        replace(FORMAT, kv_layout="layers=3;page=4"),
        replace(FORMAT, page_size=8),
        replace(FORMAT, num_shards=2),
        replace(FORMAT, num_shards=2, shard=1),
        # Fields do not run into each other.
        replace(FORMAT, weights_digest="wc", compute=""),
    ]
    roots = {FORMAT.root(), *(other.root() for other in others)}
    roots |= {FORMAT.root(cache_name(*pair)) for pair in (("", "s"), ("a", ""), ("a", "s"), ("as", ""))}
    assert len(roots) == 1 + len(others) + 4
    assert FORMAT.root() == replace(FORMAT).root() and len(FORMAT.root()) == 32


def test_keys_do_not_change_with_releases() -> None:
    """Whoever changes how keys are made raises their format, or replicas of two releases share by accident."""
    assert FORMAT.root().hex() == "6cde8f70836066bf30d12bfa4b16505a96bfeeaa6e736cdef71c55c3a832ab8b"
    assert (
        page_keys(FORMAT.root(), [1, 2, 3, 4], 4)[0].hex()
        == "fea208128772e1c944cfac966b3d8fd8efba3f74e2537608769b995e81141211"
    )


@given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 2), max_size=24), st.sampled_from([1, 2, 4]))
def test_pages_have_equal_keys_exactly_where_all_tokens_up_to_their_end_are_equal(
    a: list[int], b: list[int], page_size: int
) -> None:
    ours, theirs = page_keys(FORMAT.root(), a, page_size), page_keys(FORMAT.root(), b, page_size)
    assert len(ours) == len(a) // page_size and len({*ours}) == len(ours)
    for at, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (at + 1) * page_size
        assert (one == other) == (a[:end] == b[:end])


@given(st.lists(st.integers(0, 2**31 - 1), max_size=24), st.integers(0, 6))
def test_a_chain_goes_on_from_any_page(ids: list[int], num: int) -> None:
    keys = page_keys(FORMAT.root(), np.array(ids, np.int32), 4)
    num = min(num, len(keys))
    parent = keys[num - 1] if num else FORMAT.root()
    assert page_keys(parent, ids[4 * num :], 4) == keys[num:]


def test_fine_tunes_of_one_base_have_other_digests(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for name, value in (("base", 1.0), ("tuned", 1.001), ("copy", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save_file({"w": torch.full((100,), value)}, folder / "model.safetensors")
    assert model_fingerprint(tmp_path / "base") == model_fingerprint(tmp_path / "tuned"), "headers alone"
    digests = {name: weights_digest(tmp_path / name) for name in ("base", "tuned", "copy")}
    assert digests["base"] == digests["copy"] != digests["tuned"]
    (tmp_path / "copy/model.safetensors").rename(tmp_path / "copy/other.safetensors")
    assert weights_digest(tmp_path / "copy") != digests["base"]


def test_all_blocks_of_weights_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from radixmesh.daemons.runtime.model_folder import weights_digest as module

    monkeypatch.setattr(module, "_BLOCK_BYTES", 100)
    data, file = bytearray(1050), tmp_path / "model.safetensors"
    seen = set()
    for at in (None, 0, 99, 100, 1000, 1049):
        changed = data[:]
        if at is not None:
            changed[at] = 1
        file.write_bytes(changed)
        seen.add(weights_digest(tmp_path, num_threads=2))
    assert len(seen) == 6


def test_no_weights_no_digest(tmp_path: Path) -> None:
    with pytest.raises(MeshError) as refused:
        weights_digest(tmp_path)
    assert refused.value.reason == ErrorReason.ERROR_REASON_BAD_CHECKPOINT


@given(st.binary(min_size=32, max_size=32), st.lists(st.integers(0, 2**31 - 1), max_size=5), st.binary(max_size=50))
def test_records_read_back(key: bytes, tokens: list[int], payload: bytes) -> None:
    ids = np.array(tokens, np.int32)
    head = encode_head(key, ids, memoryview(payload))
    assert len(head) == head_bytes(len(ids))
    found = parse_head(head)
    assert found is not None and (found.key, found.num_tokens) == (key, len(ids))
    assert found.num_bytes == len(head) + len(payload)
    assert is_page(memoryview(head), memoryview(payload), key, ids)
    assert not is_page(memoryview(head), memoryview(payload + b"x"), key, ids)
    assert not is_page(memoryview(head), memoryview(payload), key[:-1] + bytes([key[-1] ^ 1]), ids)
    assert not is_page(memoryview(encode_removal(key)), memoryview(b""), key, np.empty(0, np.int32))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_record(data: bytes) -> None:
    assert parse_head(data) is None
