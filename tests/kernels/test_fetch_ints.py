"""Integers that the device fetches against the reference."""

from __future__ import annotations

import pytest
import torch

from radixmesh.kernels.fetch_ints import fetch_ints, fetch_ints_reference


@pytest.mark.parametrize("num", [1, 3, 16, 1024, 1025, 5000])
@pytest.mark.parametrize("start", [0, 1])
def test_integers_are_fetched_and_nothing_else_is_written(num: int, start: int, device: torch.device) -> None:
    """To places of any alignment."""
    source = torch.arange(6000, dtype=torch.int32, pin_memory=device.type == "cuda")
    target, expected = (torch.full((6000,), -5, dtype=torch.int32, device=where) for where in (device, "cpu"))
    fetch_ints(source[start : start + num], target[start : start + num])
    fetch_ints_reference(source[start : start + num], expected[start : start + num])
    assert torch.equal(target.cpu(), expected)
