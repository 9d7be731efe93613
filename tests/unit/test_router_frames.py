"""Frames to schedulers and detokenizers: bounded in bytes and entries, nothing lost, what is shared sent once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.router_requests import change, new_request

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.router.peers.detokenizer_link import DetokenizerLink
from radixmesh.daemons.router.peers.schedulers.serve_frames import ServeFrames
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal, Output, Request
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime.detokenize.frames import read_opens
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rpc.frames import MAX_ENTRY_BYTES, MAX_FRAME_BYTES, MAX_FRAME_ENTRIES
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.scheduler.messages import submission_from_proto
from radixmesh.daemons.scheduler.sequence import Submission
from radixmesh.detokenizer.v1 import detokenizer_pb2
from radixmesh.scheduler.v1 import scheduler_pb2

MOST_BYTES = MAX_FRAME_BYTES + 1024  # Tags and lengths around the entries.


def large_request(request_id: str, n: int = 128) -> Request:
    """Stop strings, biases and stop ids as large as they may be."""
    request = new_request(request_id, Delivery(Journal(1 << 30), WakeupPacer()), n=n)
    stops = tuple(f"{i:02}" + "~" * 1022 for i in range(64))
    change(
        request,
        stop={"stop": stops, "stop_ids": tuple(range(256))},
        sampling={"logit_bias": tuple((token, 0.0) for token in range(1024))},
    )
    for output in request.outputs:
        output.attempt_no = 0
        output.ids.extend([output.index] * 3)
    return request


def frames_of(queue: ServeFrames, handles: Callable[[], set[int]]) -> list[scheduler_pb2.ServeRequest]:
    frames = []
    while not queue.is_empty:
        frame, refused = queue.next(handles())
        assert not refused
        frames.append(frame)
    return frames


@pytest.mark.parametrize("can_share", [False, True])
def test_frames_to_a_scheduler_are_bounded_and_hold_everything(can_share: bool) -> None:
    requests = [large_request(f"r{i}") for i in range(12)]
    queue = ServeFrames()
    queue.can_share = can_share
    outputs = [output for request in requests for output in request.outputs]
    for handle, output in enumerate(outputs, start=1):
        queue.submit(output, handle, handle)
    for number in range(9000):
        queue.stop(scheduler_pb2.FinishedByStop(handle=number, num_output=1))
        queue.add_abort(scheduler_pb2.Abort(request_id=f"gone-{number}"))
    frames = frames_of(queue, lambda: set(range(1, len(outputs) + 1)))
    assert max(frame.ByteSize() for frame in frames) <= MOST_BYTES
    assert max(len(f.submits) + len(f.stops) + len(f.aborts) for f in frames) <= MAX_FRAME_ENTRIES
    assert [stop.handle for frame in frames for stop in frame.stops] == list(range(9000))
    assert len([abort for frame in frames for abort in frame.aborts]) == 9000
    assert [submit.handle for frame in frames for submit in frame.submits] == list(range(1, len(outputs) + 1))
    total = sum(frame.ByteSize() for frame in frames)
    assert total < (2 << 20 if can_share else 24 << 20), total
    for frame in frames:
        earlier: dict[int, Submission] = {}
        for submit in frame.submits:
            read = submission_from_proto(submit, owner=1, router="r", now=0.0, earlier=earlier)
            earlier[submit.handle] = read
            if submit.handle % 37:
                continue
            output = outputs[submit.handle - 1]
            alone = ServeFrames()
            alone.submit(output, submit.handle, submit.sequence)
            (whole,) = frames_of(alone, lambda handle=submit.handle: {handle})  # type: ignore[misc]
            expected = submission_from_proto(whole.submits[0], owner=1, router="r", now=0.0)
            assert same(read, expected), submit.handle


def same(one: Submission, other: Submission) -> bool:
    arrays = ("prompt_ids", "resumed_output_ids")
    fields = [name for name in Submission.__slots__ if name not in arrays]
    return all(getattr(one, name) == getattr(other, name) for name in fields) and all(
        getattr(one, name).tolist() == getattr(other, name).tolist() for name in arrays
    )


def test_what_no_frame_can_carry_is_refused_alone() -> None:
    small, huge, last = (large_request(name, n=1) for name in ("small", "huge", "last"))
    change(huge, prompt_ids=bytes(MAX_ENTRY_BYTES))
    queue = ServeFrames()
    for handle, request in enumerate((small, huge, last), start=1):
        queue.submit(request.outputs[0], handle, handle)
    frame, refused = queue.next({1, 2, 3})
    assert [submit.request_id for submit in frame.submits] == ["small", "last"]
    ((output, error),) = refused
    assert output is huge.outputs[0] and error.reason == ErrorReason.ERROR_REASON_TOO_LARGE
    assert queue.is_empty


def test_an_abort_leaves_before_the_same_id_is_submitted_again() -> None:
    request = large_request("again", n=1)
    queue = ServeFrames()
    for number in range(MAX_FRAME_ENTRIES + 1):
        queue.add_abort(scheduler_pb2.Abort(request_id="again", abort_id=number + 1))
    queue.submit(request.outputs[0], 1, 1)
    kinds = ["submit" if frame.submits else "abort" for frame in frames_of(queue, lambda: {1})]
    assert kinds == ["abort", "abort", "submit"]


class Heard:
    """Events of a link, of which only failures matter here."""

    def __init__(self) -> None:
        self.failed: list[tuple[Output, MeshError]] = []

    def on_entry_failed(self, output: Output, error: MeshError) -> None:
        self.failed.append((output, error))


@pytest.mark.parametrize("can_share", [False, True])
async def test_frames_to_a_detokenizer_are_bounded_and_hold_everything(can_share: bool) -> None:
    heard = Heard()
    link = DetokenizerLink("d", lambda address: None, 5.0, make_hello("r", "router"), heard)  # type: ignore
    link.can_share = can_share
    requests = [large_request(f"r{i}") for i in range(9)]
    outputs = [output for request in requests for output in request.outputs]
    huge = large_request("huge", n=1).outputs[0]
    huge.ids.frombytes(bytes(MAX_ENTRY_BYTES))
    for output in (*outputs, huge):
        link.open(output)
    frames: list[detokenizer_pb2.DetokenizeRequest] = []
    while (frame := link.next_frame()) is not None:
        frames.append(frame)
    assert max(frame.ByteSize() for frame in frames) <= MOST_BYTES
    total = sum(frame.ByteSize() for frame in frames)
    assert total < 2 << 20 if can_share else total > 64 << 20
    assert [output for output, _ in heard.failed] == [huge]
    entries = [entry for frame in frames for entry in read_opens(frame.opens)]
    assert len(entries) == len(outputs)
    for entry, output in zip(entries, outputs, strict=True):
        assert entry.request_id == output.request.request_id
        assert entry.output_ids == output.ids.tolist()
        assert list(entry.stops) == list(output.request.resolved.stop.stop)
    # New tokens since then: as many rows as there are, in as many frames as it takes.
    for output in outputs:
        output.ids.extend([7] * 20_000)
        assert output.entry is not None
        link.mark(output.entry)
    frames = []
    while (frame := link.next_frame()) is not None:
        frames.append(frame)
    assert max(frame.ByteSize() for frame in frames) <= MOST_BYTES
    assert sum(len(frame.tokens.ids) for frame in frames) == 4 * 20_000 * len(outputs)
