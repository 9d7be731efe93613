"""Streams, memory and graphs of one GPU."""

from __future__ import annotations

import pytest
import torch

from radixmesh.daemons.worker.cuda.device import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@torch.inference_mode()
def test_graphs_are_captured_anew_when_all_are_gone() -> None:
    """As by ranks that meet again. Memory of the graphs that are gone is given back, and taken again."""
    device = CudaDevice(0)
    with device.in_order():
        ones = torch.ones(1 << 24, device=device.torch_device)
        (2 * ones).sum().item()  # Compiles, and loads, what is captured.
        reserved = []
        for _ in range(4):
            replays = [device.capture(lambda: (2 * ones).sum()) for _ in range(2)]
            totals = [replay() for replay in replays]
            device.record_event().wait()
            assert [total.item() for total in totals] == [2 << 24] * 2
            reserved.append(torch.cuda.memory_reserved())
            del replays, totals
        assert reserved[-1] == reserved[0]
