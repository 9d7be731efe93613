"""KV copied between pages and a staging region, against the reference."""

from __future__ import annotations

import pytest
import torch

from radixmesh.daemons.worker.kv_pool import KvPool
from radixmesh.daemons.worker.kv_transfer import staging
from radixmesh.daemons.worker.models.kv_layout import KvLayout, KvPlane
from radixmesh.kernels.kv_copy import (
    CHUNK_TOKENS,
    RowCopies,
    can_copy,
    gather_rows_reference,
    token_bytes_of,
)


@pytest.mark.parametrize("num_tokens", [1, 70, CHUNK_TOKENS, CHUNK_TOKENS + 3])
@pytest.mark.parametrize(
    ("shapes", "padding", "dtype"),
    [
        ([(2, 16), (2, 16)], 0, torch.bfloat16),
        ([(36,)], 28, torch.bfloat16),
        ([(3,), (5,)], 0, torch.uint8),
        ([(5,), (3,), (3,), (3,)], 0, torch.bfloat16),
        ([(600,)], 0, torch.float32),
    ],
)
def test_tokens_are_gathered_and_scattered_as_by_the_reference(num_tokens, shapes, padding, dtype, device) -> None:
    num_layers, num_slots = 2, 300
    pools = [
        torch.randint(0, 99, (num_layers, num_slots, *shape[:-1], shape[-1] + padding), device=device).to(dtype)
        for shape in shapes
    ]
    planes = [pool[..., : shape[-1]] for pool, shape in zip(pools, shapes, strict=True)]
    indexes = torch.randperm(num_slots, device=device)[:num_tokens].int()
    expected = torch.empty(num_tokens * token_bytes_of(planes), dtype=torch.uint8, device=device)
    gather_rows_reference(planes, indexes, expected)
    region = torch.full_like(expected, 255)
    before = [pool.clone() for pool in pools]
    copies = RowCopies(planes)
    # By its address too, as of another process's memory: a launch of a kernel that was found before.
    for place in (region, region.data_ptr()):
        region.fill_(255)
        copies.gather(indexes, place)
        assert torch.equal(region, expected)
        for plane in planes:
            plane[:, indexes.long()] = 0
        copies.scatter(indexes, place)
        # Nothing else of the pool was touched: neither other tokens nor padding.
        assert all(torch.equal(pool, old) for pool, old in zip(pools, before, strict=True))


def test_rows_with_gaps_are_not_copied_by_kernels() -> None:
    pool = torch.zeros(1, 4, 2, 20)
    assert can_copy([pool]) and not can_copy([pool[..., :16]]), "padding behind each head"


def test_a_pool_reads_and_writes_in_the_layout_of_the_kernels() -> None:
    """Workers with and without the kernels send each other KV."""
    layout = KvLayout(num_layers=3, planes=(KvPlane(name="k", row_shape=(2, 16)), KvPlane(name="v", row_shape=(5,))))
    sizes = {"num_pages": 100, "page_size": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    pools = [KvPool(layout, **sizes) for _ in range(2)]
    for plane in pools[0].planes.values():
        plane.normal_()
    indexes = torch.randperm(800)[: 2 * CHUNK_TOKENS + 9].int()
    data = pools[0].read_tokens(indexes)
    expected = torch.empty_like(data)
    gather_rows_reference(pools[0].copied, indexes, expected)
    assert torch.equal(data, expected) and CHUNK_TOKENS == staging.CHUNK_TOKENS
    pools[1].write_tokens(indexes, data)
    assert torch.equal(pools[1].read_tokens(indexes), data)
