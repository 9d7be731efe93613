"""The KV pool: its default size, its zero token, copies, and what clearing leaves."""

from __future__ import annotations

import pytest
import torch

from radixmesh.daemons.worker import kv_pool
from radixmesh.daemons.worker.kv_pool import KvPool, default_num_pages
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane

# 3 layers x (2 x 4 + 5) numbers of 4 bytes = 156 bytes a token.
_LAYOUT = KvLayout(
    num_layers=3, planes=(KvPlane(name="keys", row_shape=(2, 4)), KvPlane(name="latent", row_shape=(5,)))
)


def _pool(page_size: int = 4, num_pages: int = 6) -> KvPool:
    torch.set_num_threads(1)
    return KvPool(_LAYOUT, num_pages=num_pages, page_size=page_size, dtype=torch.float32, device=torch.device("cpu"))


def test_bytes_per_token_counts_all_planes_and_layers() -> None:
    assert _LAYOUT.bytes_per_token(torch.float32) == 156
    assert _LAYOUT.bytes_per_token(torch.bfloat16) == 78


def test_padding_takes_memory_and_stays_zero() -> None:
    keys = KvLayout(num_layers=3, planes=(KvPlane(name="keys", row_shape=(2, 5)),))
    layout = keys.padded(8)
    assert (
        keys.bytes_per_token(torch.float32) == 3 * 2 * 5 * 4 and layout.bytes_per_token(torch.float16) == 3 * 2 * 8 * 2
    )
    pool = KvPool(layout, num_pages=6, page_size=4, dtype=torch.float32, device=torch.device("cpu"))
    plane = pool.tokens("keys", 1)
    assert plane.shape == (28, 2, 5) and plane.stride() == (16, 8, 1)
    stored = plane.as_strided((28, 2, 8), (16, 8, 1))
    pool.clear()
    plane[4:8] = 3.0
    pool.copy_page(1, 2, 3)
    assert (stored[8:11, :, :5] == 3.0).all() and stored[11, :, :5].isnan().all()
    assert (stored[..., 5:] == 0).all() and (stored[pool.zero_slot :] == 0).all()


@pytest.mark.parametrize(
    ("available", "page_size", "expected"),
    [
        (156 * 4 * 5000, 1, 5000),  # a quarter of the memory
        (156 * 4 * 5000, 16, 312),  # whole pages only
        (10**12, 16, 32 * 1000 // 16),  # no more than 32 full contexts
        (156, 16, 63),  # one full context at least, rounded up, with a warning
    ],
)
def test_default_size(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    available: int,
    page_size: int,
    expected: int,
) -> None:
    monkeypatch.setattr(kv_pool, "available_bytes", lambda: available)
    pages = default_num_pages(_LAYOUT, page_size=page_size, dtype=torch.float32, max_total_len=1000)
    assert pages == expected
    assert ("kv_pool_larger_than_its_share" in caplog.text) == (available == 156)


def test_available_memory_is_bounded_by_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "free_bytes", lambda: 1000)
    for container, expected in ((None, 1000), (400, 400), (-5, 0), (5000, 1000)):
        monkeypatch.setattr(kv_pool, "container_bytes", lambda bound=container: bound)
        assert kv_pool.available_bytes() == expected


def test_tokens_are_a_view_numbered_by_page_and_offset() -> None:
    pool = _pool()
    pool.clear()
    pool.tokens("keys", 1)[2 * 4 + 3] = 7.0
    pool.copy_page(2, 5, 4)
    assert torch.equal(pool.tokens("keys", 1)[5 * 4 + 3], torch.full((2, 4), 7.0))
    assert torch.isnan(pool.tokens("keys", 0)[5 * 4 + 3]).all()
    assert pool.tokens("latent", 2).shape == ((6 + 1) * 4, 5)


def test_a_partial_copy_leaves_the_rest_of_the_page() -> None:
    pool = _pool()
    pool.clear()
    pool.tokens("latent", 0)[4:8] = torch.arange(4.0)[:, None]
    pool.tokens("latent", 0)[12:16] = -1.0
    pool.copy_page(1, 3, 2)
    assert pool.tokens("latent", 0)[12:16, 0].tolist() == [0.0, 1.0, -1.0, -1.0]


def test_the_zero_token_survives_clearing() -> None:
    pool = _pool()
    pool.clear()
    for plane in ("keys", "latent"):
        for layer in range(3):
            tokens = pool.tokens(plane, layer)
            assert torch.isnan(tokens[: pool.zero_slot]).all()
            assert (tokens[pool.zero_slot :] == 0).all()
