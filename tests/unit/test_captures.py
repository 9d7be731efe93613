"""A capture on a GPU, with a stand-in for CUDA's: what the thread that records must not be led to do meanwhile."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton")

from radixmesh.daemons.worker.cuda.device import CudaDevice


class _Graph:
    """torch.cuda.CUDAGraph. modes: error modes of the captures of all graphs; num_open: that have begun only."""

    modes: ClassVar[list[str]] = []
    num_open: ClassVar[int] = 0

    def __init__(self) -> None:
        self.num_replays = 0

    def capture_begin(self, pool: object, *, capture_error_mode: str) -> None:
        self.modes.append(capture_error_mode)
        _Graph.num_open += 1

    def capture_end(self) -> None:
        _Graph.num_open -= 1

    def replay(self) -> None:
        assert not _Graph.num_open
        self.num_replays += 1


class _Stream:
    """torch.cuda.Stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def synchronize(self) -> None:
        assert not _Graph.num_open


class _Runner:
    """Is part of a cycle, as runners are, and calls the driver when it goes."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Error modes of the captures."""
    monkeypatch.setattr(_Graph, "modes", [])
    monkeypatch.setattr(_Graph, "num_open", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", _Graph)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    for name in ("graph_pool_handle", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: None)
    return _Graph.modes


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_collected_while_a_graph_is_recorded(modes: list[str], is_on: bool) -> None:
    device = CudaDevice()
    result = torch.ones(1)
    gone = weakref.ref(_Runner())
    assert gone() is not None, "an earlier collection came first"

    def work() -> torch.Tensor:
        # More objects than a collection of the youngest, and of the next older ones, waits for.
        kept = [[number] for number in range(20_000)]
        assert len(kept) and gone() is not None
        return result

    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        replay = device.capture(work)
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
    # Threads beside it may allocate, lock and free memory.
    assert replay() is result and modes == ["thread_local"]
    gc.collect()
    assert gone() is None


def test_the_collector_is_on_again_when_a_capture_fails(modes: list[str]) -> None:
    def work() -> torch.Tensor:
        raise RuntimeError("no such kernel")

    device = CudaDevice()
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="no such kernel"):
        device.capture(work)
    assert gc.isenabled() and not _Graph.num_open


def test_an_earlier_runner_is_gone_before_the_next_one_sizes_its_memory(modes: list[str]) -> None:
    CudaDevice()
    gone = weakref.ref(_Runner())
    CudaDevice()
    assert gone() is None
