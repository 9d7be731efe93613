"""Staging slots of the host against the reference."""

from __future__ import annotations

import pytest
import torch

from radixmesh.kernels.fetch_step_inputs import fetch_step_inputs, fetch_step_inputs_reference

_ROWS, _HEAD, _MOST_PAIRS = 3, 24, 2100


@pytest.mark.parametrize("num_head", [4, 8, _HEAD])
def test_staging_slots_are_fetched_in_order_with_their_pairs_and_nothing_else(
    num_head: int, device: torch.device
) -> None:
    is_cuda = device.type == "cuda"
    staging = torch.zeros(_ROWS, _HEAD + 2 * _MOST_PAIRS, dtype=torch.int32, pin_memory=is_cuda)
    row, expected_row = (torch.zeros(1, dtype=torch.int32, device=where) for where in (device, "cpu"))
    buffer, expected = (
        torch.full((staging.shape[1],), -5, dtype=torch.int32, device=where) for where in (device, "cpu")
    )
    for number, num_pairs in enumerate([0, 3, _MOST_PAIRS, 1, 0, 1024, 1025]):
        staging[number % _ROWS] = torch.arange(staging.shape[1]) + 10_000 * number
        staging[number % _ROWS, 0] = num_pairs
        fetch_step_inputs_reference(staging, expected_row, expected, num_head)
        assert fetch_step_inputs(staging, row, buffer, num_head) is buffer
        # No count that would pass 2^31 after some weeks.
        assert torch.equal(buffer.cpu(), expected) and int(row) == int(expected_row) == (number + 1) % _ROWS
