"""Ways of copying pages, with a stand-in of the driver that copies the memory that it is told of."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from radixmesh.daemons.worker.cuda.host_tier import page_copies
from radixmesh.daemons.worker.cuda.host_tier.copy_calls import one_by_one
from radixmesh.daemons.worker.cuda.host_tier.page_copies import (
    EngineCopies,
    KernelCopies,
    StagedCopies,
    Turns,
    ways_for,
)


class Driver:
    """Copies rows as CUDA_MEMCPY2D says; `sizes`: rows of each copy, so far."""

    def __init__(self) -> None:
        self.heights: list[int] = []

    def __call__(self, address: int, stream: int) -> None:
        fields = (ctypes.c_int64 * 16).from_address(address)
        source, target = (self._place(fields, first) for first in (0, 7))
        width, height = fields[14], fields[15]
        assert stream == 7 and source[1] >= width and target[1] >= width and height > 0
        for row in range(height):
            ctypes.memmove(target[0] + row * target[1], source[0] + row * source[1], width)
        self.heights.append(height)

    @staticmethod
    def _place(fields: ctypes.Array[ctypes.c_int64], first: int) -> tuple[int, int]:
        """Address and pitch."""
        kind, on_host, on_device, pitch = (fields[first + field] for field in (2, 3, 4, 6))
        assert not (fields[first] or fields[first + 1] or fields[first + 5])
        assert kind in (1, 2) and not (on_device if kind == 1 else on_host)
        return (on_host if kind == 1 else on_device), pitch


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _reference(
    planes: list[torch.Tensor], host: torch.Tensor, device_pages: np.ndarray, host_pages: np.ndarray, to_host: bool
) -> None:
    for device_page, host_page in zip(device_pages.tolist(), host_pages.tolist(), strict=True):
        rows, start = host[host_page], 0
        for plane in planes:
            part = rows[start : start + plane.shape[0] * plane.shape[2]].view(plane.shape[0], plane.shape[2])
            if to_host:
                part.copy_(plane[:, device_page])
            else:
                plane[:, device_page] = part
            start += part.numel()


WAYS = {
    "engines": EngineCopies,
    "staged": StagedCopies,
    "kernel": lambda planes, host, pages_together, driver: KernelCopies(planes, host, 3),
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), to_host=st.booleans())
def test_pages_go_as_they_are_told(
    monkeypatch: pytest.MonkeyPatch, way: str, data: st.DataObject, to_host: bool
) -> None:
    # Room for three pages: most copies go through the buffer in several parts.
    monkeypatch.setattr(page_copies, "_STAGE_BYTES", 3 * 4 * 3 * 7)
    num_layers, num_pages, num_host = 3, 12, 14
    planes = [_words(num_layers, num_pages, 5), _words(num_layers, num_pages, 2)]
    host = _words(num_host, num_layers * 7)
    num = data.draw(st.integers(1, num_pages))
    device_pages = np.array(data.draw(st.permutations(range(num_pages)))[:num], np.int32)
    host_pages = np.array(data.draw(st.permutations(range(num_host)))[:num], np.int32)
    if data.draw(st.booleans()):
        # Runs of pages, as prefixes have them.
        device_pages, host_pages = np.sort(device_pages), np.sort(host_pages)
    wanted_planes, wanted_host = [plane.clone() for plane in planes], host.clone()
    _reference(wanted_planes, wanted_host, device_pages, host_pages, to_host)
    driver, pages_together = Driver(), data.draw(st.integers(1, num_host))
    WAYS[way](planes, host, pages_together, one_by_one(driver)).copy(device_pages, host_pages, 7, to_host=to_host)
    assert torch.equal(host, wanted_host)
    assert all(torch.equal(plane, wanted) for plane, wanted in zip(planes, wanted_planes, strict=True))


def test_pages_that_follow_each_other_are_a_copy_a_layer() -> None:
    planes, host, driver = [_words(4, 100, 8)], _words(100, 32), Driver()
    device_pages = np.concatenate([np.arange(60, 90), [3, 5]]).astype(np.int32)
    host_pages = np.concatenate([np.arange(10, 40), [3, 5]]).astype(np.int32)
    order = np.random.default_rng(0).permutation(len(device_pages))
    EngineCopies(planes, host, 100, one_by_one(driver)).copy(device_pages[order], host_pages[order], 7, to_host=True)
    assert sorted(driver.heights) == [4, 4, 30, 30, 30, 30]
    driver.heights.clear()
    # Those behind host page 24 are locked apart.
    EngineCopies(planes, host, 25, one_by_one(driver)).copy(device_pages, host_pages, 7, to_host=False)
    assert sorted(driver.heights) == [4, 4, *[15] * 8]


def test_host_pages_that_follow_each_other_are_one_copy_through_a_buffer() -> None:
    planes, host, driver = [_words(4, 100, 8)], _words(100, 32), Driver()
    device_pages = np.random.default_rng(0).permutation(100)[:40].astype(np.int32)
    host_pages = np.concatenate([np.arange(30), np.arange(90, 100)]).astype(np.int32)
    wanted = host.clone()
    _reference(planes, wanted, device_pages, host_pages, to_host=True)
    StagedCopies(planes, host, 20, one_by_one(driver)).copy(device_pages, host_pages, 7, to_host=True)
    # Pages 0-19, 20-29 and 90-99: pages are locked 20 at a time.
    assert driver.heights == [1, 1, 1] and torch.equal(host, wanted)


def test_ways_go_by_the_rows() -> None:
    def ways(num_pages: int, num_words: int, pages_together: int = 8) -> list[type]:
        planes = [torch.empty(2, num_pages, words, dtype=torch.int32, device="meta") for words in (4096, num_words)]
        words = torch.empty(9, 2 * (4096 + num_words), dtype=torch.int32, device="meta")
        return [type(way) for way in ways_for(planes, words, pages_together, one_by_one(Driver()))]

    assert ways(100, 2048) == [EngineCopies, StagedCopies] and ways(100, 2047) == [StagedCopies, KernelCopies]
    # Rows that are further apart than the engines can go.
    assert ways((1 << 17) - 1, 2048) == [EngineCopies, StagedCopies]
    assert ways(1 << 17, 2048) == [StagedCopies, KernelCopies]
    # Pages that lie in two parts of locked memory.
    assert ways(100, 2048, 0) == [KernelCopies]


class Stream:
    """Work waits in it until somebody runs it. A wait is for what another stream was given by then."""

    current: Stream

    def __init__(self, *_: object) -> None:
        self.queue: list[Callable[[], bool]] = []
        """Each is done if it says so."""
        self.num_given = self.num_done = 0

    def give(self, work: Callable[[], object]) -> None:
        def run() -> bool:
            work()
            return True

        self._give(run)

    def _give(self, work: Callable[[], bool]) -> None:
        self.queue.append(work)
        self.num_given += 1

    def step(self) -> bool:
        """Runs the first of its work, if it need not wait."""
        if not self.queue or not self.queue[0]():
            return False
        del self.queue[0]
        self.num_done += 1
        return True

    def wait_stream(self, other: Stream) -> None:
        num = other.num_given
        self._give(lambda: other.num_done >= num)

    def record_event(self, event: Event) -> Event:
        event.stream, event.num = self, self.num_given
        return event

    def wait_event(self, event: Event) -> None:
        stream, num = event.stream, event.num
        self._give(lambda: stream.num_done >= num)

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before


class Event:
    stream: Stream
    num: int
    streams: list[Stream]

    def __init__(self, *, blocking: bool) -> None:
        assert blocking

    def synchronize(self) -> None:
        while self.stream.num_done < self.num:
            assert sum(stream.step() for stream in self.streams)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), nums=st.lists(st.integers(1, 24), min_size=1, max_size=3), fills_beside=st.booleans())
def test_two_streams_hand_a_buffer_to_each_other(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, nums: list[int], fills_beside: bool
) -> None:
    """Whenever each stream does its work, what was filled is what is emptied, and in the end all of it is."""
    here = Stream.current = Stream()
    for name, stand_in in {"Stream": Stream, "Event": Event, "stream": lambda stream: stream}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
    turns = Turns(torch.device("cuda"))
    Event.streams = [here, turns._beside]
    buffer: list[object] = [None, None]
    target: list[object] = []

    def run_some() -> None:
        for stream in data.draw(st.lists(st.sampled_from(Event.streams), max_size=6)):
            stream.step()

    for call, num in enumerate(nums):
        first = turns.num

        def fill(part: int, call: int = call, first: int = first) -> None:
            assert Stream.current is Event.streams[fills_beside]
            Stream.current.give(lambda: buffer.__setitem__((first + part) % 2, (call, part)))
            run_some()

        def empty(part: int, first: int = first) -> None:
            assert Stream.current is Event.streams[not fills_beside]
            Stream.current.give(lambda: target.append(buffer[(first + part) % 2]))
            run_some()

        turns.run(num, fill, empty, fills_beside=fills_beside)
        # A part is an operation or two, and what the streams tell each other of it.
        assert all(len(stream.queue) <= 9 * 4 for stream in Event.streams)
        here.give(lambda call=call: target.append(call))
    while sum(stream.step() for stream in Event.streams):
        pass
    wanted = [[*((call, part) for part in range(num)), call] for call, num in enumerate(nums)]
    assert target == [each for part in wanted for each in part]
