"""The client notices any gap or repetition, and keeps what another router needs to go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from radixmesh.client import BrokenStreamError, InvalidRequestError
from radixmesh.client.options import request_from
from radixmesh.client.tracker import Tracker
from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_ints
from radixmesh.router.v1 import router_pb2

Response = router_pb2.GenerateResponse
RESOLVED = router_pb2.Resolved(request_id="r", model="m", prompt_ids=pack_ints([1, 2]), seeds=[7, 8])


def delta(index: int, first: int, offset: int, ids: list[int], text: str) -> router_pb2.Delta:
    return router_pb2.Delta(index=index, first_output_index=first, text_offset=offset, ids=pack_ints(ids), text=text)


def finished(index: int, num_output: int, text_bytes: int) -> router_pb2.OutputFinished:
    reason = common_pb2.FINISH_REASON_LENGTH
    return router_pb2.OutputFinished(index=index, reason=reason, num_output=num_output, text_bytes=text_bytes)


def begun() -> Tracker:
    tracker = Tracker()
    tracker.take(Response(resolved=RESOLVED))
    tracker.take(Response(deltas=[delta(0, 0, 0, [5, 6], "é!")]))
    return tracker


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ids repeated", Response(deltas=[delta(0, 1, 3, [6], "")])),
        ("ids missing", Response(deltas=[delta(0, 3, 3, [8], "")])),
        ("text repeated", Response(deltas=[delta(0, 2, 1, [7], "x")])),
        ("text missing (bytes, not letters, count)", Response(deltas=[delta(0, 2, 4, [7], "x")])),
        ("no such output", Response(deltas=[delta(2, 0, 0, [7], "x")])),
        ("finished short of ids", Response(finished=[finished(0, 1, 3)])),
        ("finished short of text", Response(finished=[finished(0, 2, 5)])),
        ("another request", Response(resolved=router_pb2.Resolved(request_id="other", seeds=[7, 8]))),
        ("other seeds", Response(resolved=router_pb2.Resolved(request_id="r", seeds=[7, 9]))),
    ],
)
def test_a_gap_or_repetition_raises(name: str, message: router_pb2.GenerateResponse) -> None:
    with pytest.raises(BrokenStreamError):
        begun().take(message)


def test_nothing_follows_a_finish() -> None:
    tracker = begun()
    (chunk,) = tracker.take(Response(finished=[finished(0, 2, 3)]))
    assert chunk.finish is not None and chunk.finish.reason == "length" and not tracker.is_complete
    with pytest.raises(BrokenStreamError):
        tracker.take(Response(deltas=[delta(0, 2, 3, [7], "x")]))
    tracker.take(Response(finished=[finished(1, 0, 0)]))
    assert tracker.is_complete


def test_the_resume_state_is_what_was_received_and_counts_up() -> None:
    tracker = begun()
    tracker.take(Response(finished=[finished(0, 2, 3)]))
    tracker.take(Response(deltas=[delta(1, 0, 0, [9], "")]))
    resume = tracker.resume()
    assert resume.resolved == RESOLVED and resume.resumption == 1
    assert [unpack_ints(output.output_ids, "ids").tolist() for output in resume.outputs] == [[5, 6], [9]]
    assert [(output.text_bytes, output.is_finished) for output in resume.outputs] == [(3, True), (0, False)]
    assert tracker.resume().resumption == 2


def test_zero_is_sent_and_what_is_left_out_is_not() -> None:
    request = request_from("x", None, {"temperature": 0.0, "seed": 0, "logprobs": 0})
    assert request.sampling.HasField("temperature") and request.sampling.HasField("seed")
    assert request.sampling.HasField("num_top_logprobs") and not request.sampling.HasField("top_p")
    assert not request.HasField("n") and not request.stop.HasField("max_tokens")


@pytest.mark.parametrize(
    "make",
    [
        lambda: request_from(None, None, {}),
        lambda: request_from("x", [{"role": "user"}], {}),
        lambda: request_from("x", None, {"n": -1}),
        lambda: request_from([2**40], None, {}),
        lambda: request_from("x", None, {"temprature": 1.0}),  # type: ignore[typeddict-unknown-key]
    ],
)
def test_options_that_cannot_be_sent_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequestError):
        make()


def test_prompt_logprobs_come_in_parts_again_after_a_resumption_and_never_with_a_gap() -> None:
    def part(start: int, *values: float) -> Response:
        return Response(
            prompt_logprobs=common_pb2.Logprobs(token_logprobs=pack_floats(values)), prompt_logprobs_start=start
        )

    tracker = begun()
    for response in (part(1, -1, -2), part(3, -3), part(0, -1, -2, -3, -4)):
        tracker.take(response)
    assert tracker.prompt_logprobs is not None
    assert tracker.prompt_logprobs.token_logprobs == [-1, -2, -3, -4]
    with pytest.raises(BrokenStreamError, match="from 6 came where 5 was due"):
        tracker.take(part(6, -6))


def test_prompt_logprobs_from_a_later_position_have_their_gaps_counted_from_there() -> None:
    def part(start: int, *values: float) -> Response:
        return Response(
            prompt_logprobs=common_pb2.Logprobs(token_logprobs=pack_floats(values)), prompt_logprobs_start=start
        )

    tracker = Tracker()
    resolved = router_pb2.Resolved(seeds=[1], sampling=common_pb2.SamplingParams(prompt_logprobs_start=5))
    tracker.take(Response(resolved=resolved))
    # The last part is of a router that does not know the field: it begins at the first position.
    for response in (part(5, -5), part(6, -6), part(1, -1, -2, -3, -4, -5, -6, -7)):
        tracker.take(response)
    assert tracker.prompt_logprobs is not None
    assert tracker.prompt_logprobs.token_logprobs == [-5, -6, -7]
    with pytest.raises(BrokenStreamError, match="from 9 came where 8 was due"):
        tracker.take(part(9, -9))
