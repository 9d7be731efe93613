"""The beginning of a decode step against its reference."""

from __future__ import annotations

import pytest
import torch

from radixmesh.kernels.scatter_embed import scatter_embed, scatter_embed_reference

_TABLE_LEN, _VOCAB = 40, 30


@pytest.mark.parametrize("num_entries", [0, 1, 3, 300])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize(("dtype", "num_features"), [(torch.float32, 24), (torch.bfloat16, 1100)])
def test_a_step_begins_as_the_reference(
    num_entries: int, num_rows: int, dtype: torch.dtype, num_features: int, device: torch.device
) -> None:
    num_slots = 9
    embedding = torch.randn(_VOCAB, num_features, device=device).to(dtype)
    tables = torch.randint(0, 99, (num_slots, _TABLE_LEN), dtype=torch.int32, device=device)
    last = torch.randint(0, _VOCAB, (num_slots,), dtype=torch.int32, device=device)
    # The last slot is the rows' of padding, any number of them; the others come once.
    slots = torch.randperm(num_slots - 1, device=device)[:num_rows].int()
    slots[3:] = num_slots - 1
    tokens = torch.tensor([7, -1, 0, -1, -1][:num_rows], dtype=torch.int32, device=device)
    indexes = torch.randperm(num_slots * _TABLE_LEN, device=device)[:320].int()
    entries = torch.stack((indexes, torch.arange(100, 420, dtype=torch.int32, device=device)), dim=1)
    count = torch.tensor([num_entries], dtype=torch.int32, device=device)
    state, expected_state = (tables.clone(), last.clone()), (tables.clone(), last.clone())
    expected = scatter_embed_reference(slots, tokens, entries, count, *expected_state, embedding)
    assert torch.equal(scatter_embed(slots, tokens, entries, count, *state, embedding), expected)
    assert torch.equal(state[0], expected_state[0]) and torch.equal(state[1], expected_state[1])
    assert (state[0] != tables).sum() == num_entries and state[1][slots[0]] == 7
