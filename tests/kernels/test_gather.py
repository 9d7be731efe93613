"""Last tokens, lengths and page lists on the device against torch."""

from __future__ import annotations

import pytest
import torch

from radixmesh.kernels.gather import gather_last, page_lists, page_lists_reference, scatter_last

_SLOTS, _LEN, _DUMMY = 6, 10, 5


def test_a_step_reads_the_last_tokens_and_appends_the_drawn(device: torch.device) -> None:
    tokens, lens = _state(device)
    slots = _ints([3, 0, _DUMMY, 1, _DUMMY], device)
    ids, positions, kv_lens = (torch.full((5,), -7, dtype=torch.int32, device=device) for _ in range(3))
    gather_last(tokens, lens, slots, ids, positions, kv_lens)
    assert positions.tolist() == [3, 0, 0, 8, 0]
    assert ids.tolist() == [int(tokens[3, 3]), int(tokens[0, 0]), 0, int(tokens[1, 8]), 0]
    assert kv_lens.tolist() == [4, 1, 1, 9, 1]
    expected_tokens, expected_lens = tokens.clone(), lens.clone()
    for row, slot in ((0, 3), (1, 0), (3, 1)):
        expected_tokens[slot, lens[slot]] = 100 + row
        expected_lens[slot] += 1
    scatter_last(torch.arange(100, 105, dtype=torch.int32, device=device), tokens, lens, slots)
    assert torch.equal(tokens, expected_tokens) and torch.equal(lens, expected_lens)


def test_a_full_slot_is_left_alone(device: torch.device) -> None:
    tokens, lens = _state(device)
    before = tokens.clone(), lens.clone()
    scatter_last(_ints([1], device), tokens, lens, _ints([4], device))
    assert torch.equal(tokens, before[0]) and torch.equal(lens, before[1])


@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
def test_page_lists_equal_the_reference(num_rows: int, device: torch.device) -> None:
    page_size, max_pages = 4, 9
    tables = torch.randperm(_SLOTS * max_pages).reshape(_SLOTS, max_pages).to(torch.int32).to(device)
    slots = torch.randint(0, _SLOTS, (num_rows,), dtype=torch.int32, device=device)
    lens = torch.randint(0, page_size * max_pages + 1, (num_rows,), dtype=torch.int32, device=device)
    indptr = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)
    indices = torch.full((num_rows * max_pages + 1,), -1, dtype=torch.int32, device=device)
    last_lens = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    page_lists(tables, slots, lens, page_size, indptr, indices, last_lens)
    if num_rows == 0:
        assert indptr.tolist() == [0]
        return
    expected_indptr, expected_indices, expected_last = page_lists_reference(tables, slots, lens, page_size)
    assert torch.equal(indptr, expected_indptr) and torch.equal(last_lens, expected_last)
    assert torch.equal(indices[: len(expected_indices)], expected_indices)
    assert (indices[len(expected_indices) :] == -1).all()


def _state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(_SLOTS * _LEN, dtype=torch.int32, device=device).reshape(_SLOTS, _LEN)
    return tokens, _ints([1, 9, 5, 4, _LEN, 0], device)


def _ints(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
