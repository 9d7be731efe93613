"""Rows of a scheduler's frames: only the next ones of the current attempt reach the journal, whatever is sent."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_requests import change, new_request

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.peers.schedulers.serve_checks import ServeChecks
from radixmesh.daemons.router.peers.schedulers.serve_rows import ServeRows
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal, Output, OutputState
from radixmesh.daemons.router.requests.logprob_track import LogprobTrack
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.scheduler.v1 import scheduler_pb2

VOCAB = 100


def running(count: int, *, max_tokens: int = 10) -> dict[int, Output]:
    """Handles from 1 on, outputs at attempt 0."""
    outputs: dict[int, Output] = {}
    for handle in range(1, count + 1):
        request = new_request(f"r{handle}", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=max_tokens)
        (output,) = request.outputs
        output.attempt_no, output.max_ids, output.scheduler_handle = 0, max_tokens, handle
        output.move_to(OutputState.RUNNING)
        outputs[handle] = output
    return outputs


def rows_of(outputs: dict[int, Output]) -> ServeRows:
    return ServeRows(outputs, {}, ServeChecks("s"))


def batch(*rows: tuple[int, int, int, list[int]], version: int = 0) -> scheduler_pb2.TokenBatch:
    """Rows: handle, attempt, first output index, ids."""
    return scheduler_pb2.TokenBatch(
        handles=pack_ints([row[0] for row in rows]),
        attempts=pack_ints([row[1] for row in rows]),
        first_output_indexes=pack_ints([row[2] for row in rows]),
        counts=pack_ints([len(row[3]) for row in rows]),
        ids=pack_ints([token for row in rows for token in row[3]]),
        weights_version=version,
    )


def logprobs(*values: float, num_top: int = 0) -> common_pb2.Logprobs:
    tops = pack_ints([1] * num_top * len(values)), pack_floats([0.0] * num_top * len(values))
    return common_pb2.Logprobs(
        token_logprobs=pack_floats(list(values)), num_top=num_top, top_ids=tops[0], top_logprobs=tops[1]
    )


def test_new_ids_are_appended_and_told() -> None:
    outputs = running(3)
    rows = rows_of(outputs)
    changed, num = rows.take_tokens(batch((1, 0, 0, [5]), (3, 0, 0, [6, 7]), version=4), VOCAB)
    assert (changed, num) == ([outputs[1], outputs[3]], 3)
    assert [list(outputs[handle].ids) for handle in (1, 2, 3)] == [[5], [], [6, 7]]
    assert [outputs[handle].weights_version for handle in (1, 2, 3)] == [4, 0, 4]
    assert rows.take_tokens(batch((1, 0, 1, [8])), VOCAB) == ([outputs[1]], 1)
    assert list(outputs[1].ids) == [5, 8]


@pytest.mark.parametrize("row", [(9, 0, 0, [1]), (1, 1, 0, [1]), (1, 0, 0, [1])], ids=["unknown", "attempt", "known"])
def test_rows_of_others_of_other_attempts_and_old_ones_are_dropped_alone(row: tuple[int, int, int, list[int]]) -> None:
    outputs = running(2)
    rows = rows_of(outputs)
    rows.take_tokens(batch((1, 0, 0, [5])), VOCAB)
    changed, num = rows.take_tokens(batch(row, (2, 0, 0, [7])), VOCAB)
    assert (changed, num) == ([outputs[2]], 1)
    assert list(outputs[1].ids) == [5] and list(outputs[2].ids) == [7], "ids of the next row are its own"


def test_rows_of_an_output_that_stops_are_dropped() -> None:
    outputs = running(1)
    outputs[1].move_to(OutputState.STOPPING)
    assert rows_of(outputs).take_tokens(batch((1, 0, 0, [5])), VOCAB) == ([], 0)
    assert not outputs[1].ids


@pytest.mark.parametrize(
    ("row", "message"), [((1, 0, 1, [5]), "tokens from 1 where 0 was due"), ((1, 0, 0, [5] * 11), "11 tokens where 10")]
)
def test_a_gap_and_more_than_was_asked_for_break_the_stream(row: tuple[int, int, int, list[int]], message: str) -> None:
    outputs = running(1)
    with pytest.raises(MeshError, match=message):
        rows_of(outputs).take_tokens(batch(row), VOCAB)
    assert not outputs[1].ids


def test_as_many_as_were_asked_for_are_taken() -> None:
    outputs = running(1)
    assert rows_of(outputs).take_tokens(batch((1, 0, 0, [5] * 10)), VOCAB)[1] == 10


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=12))
def test_ids_are_a_prefix_of_what_was_sent_whatever_is_sent_twice(cuts: list[tuple[int, int]]) -> None:
    """The scheduler's own output is 0, 1, 2, ...; rows begin anywhere in it."""
    outputs = running(1, max_tokens=50)
    rows, expected = rows_of(outputs), 0
    for first, count in cuts:
        row = batch((1, 0, first, list(range(first, first + count))))
        if first > expected:
            with pytest.raises(MeshError):
                rows.take_tokens(row, VOCAB)
        else:
            rows.take_tokens(row, VOCAB)
            expected += count if first == expected else 0
        assert outputs[1].ids == array("i", range(expected))


def with_logprobs(outputs: dict[int, Output], num_top: int = 0) -> None:
    for output in outputs.values():
        output.logprobs = LogprobTrack(0)
        change(output.request, sampling={"num_top_logprobs": num_top})


def test_logprobs_go_with_their_rows() -> None:
    outputs = running(2)
    with_logprobs(outputs, num_top=1)
    frame = batch((1, 0, 0, [5]), (2, 0, 0, [6, 7]))
    frame.logprobs.add(row=0, logprobs=logprobs(-1.0, num_top=1))
    frame.logprobs.add(row=1, logprobs=logprobs(-2.0, -3.0, num_top=1))
    rows_of(outputs).take_tokens(frame, VOCAB)
    tracks = [output.logprobs for output in outputs.values()]
    assert [track.take(9).token_logprobs for track in tracks if track is not None] == [
        pack_floats([-1.0]),
        pack_floats([-2.0, -3.0]),
    ]


@pytest.mark.parametrize("fault", ["missing", "too many", "too wide"])
def test_ids_without_their_logprobs_break_the_stream_and_are_asked_for_again(fault: str) -> None:
    """Of both outputs the ids stay that have a logprob: what comes after the next submit is none off."""
    outputs = running(2)
    with_logprobs(outputs)
    frame = batch((1, 0, 0, [5]), (2, 0, 0, [6, 7]))
    frame.logprobs.add(row=0, logprobs=logprobs(-1.0))
    if fault == "too many":
        frame.logprobs.add(row=1, logprobs=logprobs(-2.0, -3.0, -4.0))
    elif fault == "too wide":
        frame.logprobs.add(row=1, logprobs=logprobs(-2.0, -3.0, num_top=1))
    with pytest.raises(MeshError):
        rows_of(outputs).take_tokens(frame, VOCAB)
    for output in outputs.values():
        assert output.logprobs is not None and output.logprobs.end == len(output.ids)
    assert list(outputs[1].ids) == [5]


def prompt_logprobs(first: int, *values: float) -> scheduler_pb2.PromptLogprobs:
    return scheduler_pb2.PromptLogprobs(handle=1, first_position=first, logprobs=logprobs(*values))


def test_prompt_logprobs_are_appended_in_order_and_no_further_than_the_prompt() -> None:
    outputs = running(1)
    request = outputs[1].request
    rows = rows_of(outputs)
    assert rows.take_prompt_logprobs(prompt_logprobs(1, -1.0)) is None, "nobody asked"
    request.prompt_logprobs = LogprobTrack(1)
    assert rows.take_prompt_logprobs(prompt_logprobs(1, -1.0)) is outputs[1]
    assert rows.take_prompt_logprobs(prompt_logprobs(1, -1.0)) is None, "known"
    with pytest.raises(MeshError, match="from 3 where 2 was due"):
        rows.take_prompt_logprobs(prompt_logprobs(3, -3.0))
    with pytest.raises(MeshError, match="after the prompt's 4 tokens"):
        rows.take_prompt_logprobs(prompt_logprobs(2, -2.0, -3.0, -4.0))
    assert rows.take_prompt_logprobs(prompt_logprobs(2, -2.0, -3.0)) is outputs[1]
    assert request.prompt_logprobs.end == request.num_prompt == 4
    other = prompt_logprobs(1, -1.0)
    other.handle = 9
    assert rows.take_prompt_logprobs(other) is None


def test_a_vector_belongs_to_an_output_that_asked_for_one() -> None:
    outputs = running(1)
    rows = rows_of(outputs)
    vector = scheduler_pb2.OutputVector(handle=1, values=pack_floats([1.0, 2.0]))
    with pytest.raises(MeshError, match="not what was asked for"):
        rows.output_of_vector(vector)
    change(outputs[1].request, task=Task.EMBED)
    assert rows.output_of_vector(vector) is outputs[1]
    vector.handle = 9
    assert rows.output_of_vector(vector) is None


def test_rows_of_a_prompt_for_elsewhere_are_kept_apart() -> None:
    (output,) = running(1).values()
    prompt = RemotePrompt(transfer_id="t", output=output, attempt=0)
    rows = ServeRows({}, {3: prompt}, ServeChecks("s"))
    message = batch((3, 0, 0, [7]), (4, 0, 0, [8]), version=2)
    message.logprobs.add(row=0, logprobs=logprobs(-0.25))
    assert rows.take_tokens(message, VOCAB) == ([], 0) and not output.ids
    assert (list(prompt.ids), prompt.weights_version, len(prompt.logprobs)) == ([7], 2, 1)
    for row in ((3, 0, 0, [9]), (3, 1, 1, [9])):
        rows.take_tokens(batch(row), VOCAB)
    assert list(prompt.ids) == [7], "a repeated row, and one of another attempt"
    with pytest.raises(MeshError, match="than were asked for"):
        rows.take_tokens(batch((3, 0, 1, [9] * 10)), VOCAB)
    wide = batch((3, 0, 1, [9]))
    wide.logprobs.add(row=0, logprobs=logprobs(-0.25, num_top=3))
    with pytest.raises(MeshError, match="alternatives"):
        rows.take_tokens(wide, VOCAB)
