"""Posts of the host against the reference."""

from __future__ import annotations

import pytest
import torch

from radixmesh.kernels.receive import receive, receive_reference

_ROWS, _HEAD, _MOST_PAIRS = 3, 24, 2100


@pytest.mark.parametrize("num_head", [4, 7, _HEAD])
def test_posts_are_taken_in_turn_with_their_pairs_and_nothing_else(num_head: int, device: torch.device) -> None:
    is_cuda = device.type == "cuda"
    posts = torch.zeros(_ROWS, _HEAD + 2 * _MOST_PAIRS, dtype=torch.int32, pin_memory=is_cuda)
    count, expected_count = (torch.zeros(1, dtype=torch.int32, device=where) for where in (device, "cpu"))
    buffer, expected = (torch.full((posts.shape[1],), -5, dtype=torch.int32, device=where) for where in (device, "cpu"))
    for number, num_pairs in enumerate([0, 3, _MOST_PAIRS, 1, 0, 1024, 1025]):
        posts[number % _ROWS] = torch.arange(posts.shape[1]) + 10_000 * number
        posts[number % _ROWS, 0] = num_pairs
        receive_reference(posts, expected_count, expected, num_head)
        assert receive(posts, count, buffer, num_head) is buffer
        assert torch.equal(buffer.cpu(), expected) and int(count) == int(expected_count) == number + 1
