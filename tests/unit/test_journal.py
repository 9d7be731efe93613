"""The journal: bounded, exact, and sure of how outputs end."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.router_requests import new_request

from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal, Output, OutputState, journal_size
from radixmesh.daemons.router.requests.logprob_track import LogprobTrack
from radixmesh.daemons.router.requests.updates import Logprobs
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints, unpack_floats, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.finish_reason import FinishReason


def test_room_is_given_up_to_the_bound_and_comes_back() -> None:
    size = journal_size(4 * 4, 1)
    journal = Journal(2 * size)
    requests = [new_request(f"r{i}", Delivery(journal, WakeupPacer())) for i in range(3)]
    for request in requests[:2]:
        journal.add(request)
    with pytest.raises(MeshError) as raised:
        journal.add(requests[2])
    assert raised.value.reason_name == "JOURNAL_FULL" and int(raised.value.metadata["retry_after_ms"]) > 0
    assert journal.num_bytes == 2 * size
    journal.charge(requests[0], 1000)
    journal.drop(requests[0])
    journal.drop(requests[0])
    assert journal.num_bytes == size and len(journal) == 1
    journal.add(requests[2])


def test_dropping_a_superseded_request_leaves_its_successor() -> None:
    journal = Journal(1 << 20)
    old, new = (new_request("same", Delivery(journal, WakeupPacer())) for _ in range(2))
    journal.add(old)
    journal.drop(old)
    journal.add(new)
    journal.drop(old)
    assert journal.get("same") is new and journal.num_bytes == new.num_bytes


@pytest.mark.parametrize(
    ("ids", "reason", "stop_id"),
    [
        ([], None, None),
        ([7, 8], None, None),
        ([7, 2], FinishReason.STOP, 2),
        ([7, 8, 9, 10], FinishReason.LENGTH, None),
        ([7, 8, 9, 2], FinishReason.STOP, 2),
    ],
)
def test_known_ids_tell_how_an_output_ended(ids: list[int], reason: int | None, stop_id: int | None) -> None:
    request = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=4, end_ids=(2,))
    ending = Output(request=request, index=0, ids=array("i", ids)).known_ending
    assert (ending.reason if ending else None) == reason
    assert ending is None or (ending.num_output, ending.stop_id) == (len(ids), stop_id)


def test_a_clients_resumption_beats_every_attempt_of_an_earlier_router() -> None:
    request = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()))
    earlier = Output(request=request, index=0, attempt_no=(1 << 16) - 1)
    resumed = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), resumption=1)
    assert Output(request=resumed, index=0, attempt_no=0).attempt > earlier.attempt
    last = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), resumption=32_767)
    assert Output(request=last, index=0, attempt_no=(1 << 16) - 1).attempt < 1 << 31


def test_a_finished_output_moves_no_more() -> None:
    output = Output(
        request=new_request("r", Delivery(Journal(1 << 20), WakeupPacer())), index=0, state=OutputState.FINISHED
    )
    with pytest.raises(AssertionError, match="is finished"):
        output.move_to(OutputState.WAITING)


@given(parts=st.lists(st.integers(0, 5), max_size=8), num_top=st.integers(0, 3), data=st.data())
def test_logprobs_come_out_as_they_went_in_whatever_the_cuts(
    parts: list[int], num_top: int, data: st.DataObject
) -> None:
    track, total = LogprobTrack(10), sum(parts)
    values, tops = list(range(total)), list(range(total * num_top))
    at = 0
    taken: list[float] = []
    taken_tops: list[int] = []
    for part in parts:
        track.append(
            Logprobs(
                token_logprobs=pack_floats(values[at : at + part]),
                num_top=num_top,
                top_ids=pack_ints(tops[at * num_top : (at + part) * num_top]),
                top_logprobs=pack_floats(tops[at * num_top : (at + part) * num_top]),
            )
        )
        at += part
        assert track.end == 10 + at
        out = track.take(data.draw(st.integers(0, 10 + total + 5)))
        taken += unpack_floats(out.token_logprobs, "t").tolist()
        taken_tops += unpack_ints(out.top_ids, "t").tolist()
    out = track.take(10 + total)
    assert taken + unpack_floats(out.token_logprobs, "t").tolist() == values
    assert taken_tops + unpack_ints(out.top_ids, "t").tolist() == tops
    assert track.num_bytes == 0


def test_logprobs_that_do_not_fit_their_arrays_are_refused() -> None:
    with pytest.raises(MeshError, match="do not fit"):
        LogprobTrack(0).append(Logprobs(token_logprobs=pack_floats([1.0]), num_top=2))
