"""KV of a device's pages to and from memory that other processes map, by the device's own copies."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.device_settings import TINY_SETTINGS
from support.host_peer_memory import HostPeerMemory
from support.runner_contract import MODEL

from radixmesh.daemons.runtime.kv_share import KvShare
from radixmesh.daemons.worker.cuda.device import HostDevice, HostEvent
from radixmesh.daemons.worker.cuda.kv_device import PoolDevice
from radixmesh.daemons.worker.cuda.load import load_device_runner
from radixmesh.daemons.worker.kv_transfer.device_memory import Copied, DevicePiece, TokenNumbers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_kv_device_on_gpu.py is for the GPU")


@pytest.mark.parametrize("share", [None, KvShare(1, 2, 2)])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_tokens_come_back_as_read_kv_has_them(share: KvShare | None, by_kernels: bool) -> None:
    settings = replace(TINY_SETTINGS, attention_backend="torch", page_size=4, num_pages=150, max_total_len=64)
    runner = load_device_runner(MODEL, settings, HostDevice())
    with torch.inference_mode():
        for plane in runner.pool.planes.values():
            plane.normal_()
    runner.pool.has_kernels = by_kernels
    received: list[torch.Tensor] = []
    device = PoolDevice(runner.device, runner.pool, HostPeerMemory(), received.append)
    token_bytes = runner.pool.part_bytes(share)
    slab = DevicePiece(address := device.allocate(1 << 24), 1 << 24)
    mapped = device.open(device.handle(address))
    assert mapped.num_bytes == slab.num_bytes
    sources, targets = (np.arange(first, first + 300, dtype=np.int32)[::-1].copy() for first in (0, 300))
    expected = runner.read_kv(sources, share).tobytes()
    piece = slab.part(32, 300 * token_bytes)
    with_tail = slab.part(32, piece.num_bytes + 5)
    device.gather(TokenNumbers(sources), with_tail, share, tail=b"stamp").event.wait()
    # The other process sees the same.
    assert device.read(mapped.address + 32, with_tail.num_bytes) == expected + b"stamp"
    before = runner.read_kv(sources).tobytes()
    copied = device.scatter(TokenNumbers(targets), mapped.part(32, 300 * token_bytes), share)
    assert copied.event.is_done and copied.seconds() > 0
    assert runner.read_kv(targets, share).tobytes() == expected and runner.read_kv(sources).tobytes() == before
    assert received[0].tolist() == targets.tolist()
    tail = mapped.part(with_tail.num_bytes + 27, 5)
    for after in (None, HostEvent()):
        assert device.fetch([tail, mapped.part(32, 8)], copied, after).data() == [b"stamp", expected[:8]]
    device.write(address, b"stamp")
    assert device.read(mapped.address, 5) == b"stamp"
    device.close(mapped.address)
    runner.clear()
    device.warm_up(slab)
    # Staging may be too small for a token.
    device.warm_up(slab.part(0, runner.pool.token_bytes))


class _Running(HostEvent):
    """A copy that still runs."""

    is_done = False


def test_what_is_granted_pages_that_are_read_waits_for_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(TINY_SETTINGS, attention_backend="torch", page_size=4, num_pages=150, max_total_len=64)
    runner = load_device_runner(MODEL, settings, HostDevice())
    device = PoolDevice(runner.device, runner.pool, HostPeerMemory())
    piece, ends, held = DevicePiece(device.allocate(1 << 20), 1 << 20), [_Running(), _Running()], []
    monkeypatch.setattr(runner.device, "hold", held.append)
    for end, first in zip(ends, (0, 40), strict=True):
        monkeypatch.setattr(runner.device, "run_beside", lambda work, after, is_urgent, end=end: (HostEvent(), end))
        device.gather(
            TokenNumbers(np.arange(first, first + 10, dtype=np.int32)),
            piece.part(0, 10 * runner.pool.token_bytes),
            None,
        )
    device.overwritten(np.array([3, 9, 13], np.int32))
    assert not held
    # Tokens 40 to 49 of pages of 4: the last one is read in part.
    device.overwritten(np.array([12, 90], np.int32))
    assert held == [ends[1]]
    monkeypatch.setattr(_Running, "is_done", True)
    device.overwritten(np.arange(20, dtype=np.int32))
    assert held == [ends[1]]


def test_numbers_of_pieces_are_sent_once_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(TINY_SETTINGS, attention_backend="torch", page_size=4, num_pages=150, max_total_len=64)
    runner = load_device_runner(MODEL, settings, HostDevice())
    device, sent = PoolDevice(runner.device, runner.pool, HostPeerMemory()), list[int]()
    upload, token_bytes = runner.device.upload, runner.pool.token_bytes
    monkeypatch.setattr(runner.device, "upload", lambda values, to: (sent.append(len(values)), upload(values, to)))
    with torch.inference_mode():
        for plane in runner.pool.planes.values():
            plane.normal_()
    memory = DevicePiece(device.allocate(1 << 24), 300 * token_bytes)
    sources, targets = (TokenNumbers(np.arange(first, first + 300, dtype=np.int32)[::-1].copy()) for first in (0, 300))
    for start, stop in ((0, 256), (256, 300)):
        piece = memory.part(start * token_bytes, (stop - start) * token_bytes)
        device.gather(sources.part(start, stop), piece, None)
        for after in (HostEvent(), None):
            device.scatter(targets.part(start, stop), piece, None, after)
    assert sent == [300, 300, 300]
    assert runner.read_kv(targets.numbers).tobytes() == runner.read_kv(sources.numbers).tobytes()


def test_what_a_device_has_of_numbers_goes_with_the_last_of_them() -> None:
    """Not with a collection, which may be minutes away."""
    gc.disable()
    try:
        whole = TokenNumbers(np.arange(8, dtype=np.int32))
        part, sent = whole.part(2, 5), _Sent()
        whole.sent["out"], gone = sent, weakref.ref(sent)
        assert part.whole is whole.whole is whole and part.start == 2
        del whole, sent
        assert gone() is not None
        del part
        assert gone() is None
    finally:
        gc.enable()


class _Sent:
    pass


def test_pinned_memory_is_used_again_once_the_device_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(TINY_SETTINGS, attention_backend="torch", page_size=4, num_pages=150, max_total_len=64)
    runner = load_device_runner(MODEL, settings, HostDevice())
    device, made = PoolDevice(runner.device, runner.pool, HostPeerMemory()), list[tuple[int, ...]]()
    host_ints, piece = runner.device.host_ints, DevicePiece(device.allocate(1 << 20), 32)
    monkeypatch.setattr(runner.device, "host_ints", lambda *shape: (made.append(shape), host_ints(*shape))[1])
    copied, end = Copied(HostEvent()), _Running()
    monkeypatch.setattr(runner.device, "run_beside", lambda work, after, is_urgent: (HostEvent(), end))
    for _ in range(40):  # Nobody asks what they are.
        device.fetch([piece], copied, HostEvent())
    assert len(made) == 2
    monkeypatch.setattr(_Running, "is_done", True)
    kept = [device.fetch([piece], copied, HostEvent()) for _ in range(64)]
    assert len(made) == 2 and len({id(one) for one in kept}) == 64
    device.fetch([piece], copied, HostEvent())
    assert len(made) == 3, "they are read"


def test_steps_wait_for_a_scatter_that_their_plan_has_named(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(TINY_SETTINGS, attention_backend="torch", page_size=4, num_pages=150, max_total_len=64)
    runner = load_device_runner(MODEL, settings, HostDevice())
    device, held, end = PoolDevice(runner.device, runner.pool, HostPeerMemory()), [], _Running()
    monkeypatch.setattr(runner.device, "hold", held.append)
    monkeypatch.setattr(runner.device, "run_beside", lambda work, after, is_urgent: (HostEvent(), end))
    piece = DevicePiece(device.allocate(1 << 20), 10 * runner.pool.token_bytes)
    copied = device.scatter(TokenNumbers(np.arange(10, dtype=np.int32)), piece, None, HostEvent())
    assert not held and copied.event is end
    device.hold(copied)
    assert held == [end]
