"""Collectives over gloo: sums, and what ranks notice of one that dies, hangs, is late or leaves."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import torch
from support.rank_process import RankProcess

from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives import heartbeat
from radixmesh.daemons.worker.collectives import member as member_module
from radixmesh.daemons.worker.collectives.communicator import Communicator, Meeting
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.collectives.member import MOST_ATTEMPTS, CollectiveMember
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted, RankLost

T = TypeVar("T")
TIMEOUT_S = 60.0
# A rank that is lost is noticed within 5 s; on a loaded machine it may take longer to be told.
MOST_S = 25.0


def on_all(members: list[CollectiveMember], call: Callable[[CollectiveMember], T]) -> list[T]:
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(call, members))


def formed(layouts: list[RankLayout], generation: int = 1) -> list[CollectiveMember]:
    members = [CollectiveMember(layout, "127.0.0.1") for layout in layouts]
    form(members, generation)
    return members


def form(members: list[CollectiveMember], generation: int) -> None:
    names = [f"rank-{member.layout.rank}" for member in members]
    on_all(members, lambda member: member.form(generation, members[0].rendezvous, names))


def test_sums_are_those_in_the_order_of_the_ranks() -> None:
    size = 3
    members = formed([RankLayout(tp_size=size, tp_rank=rank) for rank in range(size)])
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        parts = [(torch.randn(7, 5, generator=generator) * 100**rank).to(dtype) for rank in range(size)]
        in_order = parts[0].float() if dtype.is_floating_point else parts[0]
        for part in parts[1:]:
            in_order = in_order + part
        for _ in range(5):
            sums = on_all(members, lambda member, parts=parts: member.group.all_reduce(parts[member.layout.rank]))  # type: ignore[misc]
            assert all(torch.equal(total, in_order.to(dtype)) for total in sums)
    widths = (2, 3, 1)
    pieces = [torch.randn(4, width, generator=generator) for width in widths]
    for whole in on_all(members, lambda member: member.group.all_gather(pieces[member.layout.rank], widths)):
        assert torch.equal(whole, torch.cat(pieces, dim=-1))


def test_data_parallel_ranks_have_groups_of_their_own() -> None:
    members = formed([RankLayout.of_rank(rank, tp_size=2, dp_size=2, ep_size=1) for rank in range(4)])
    sums = on_all(members, lambda member: member.group.all_reduce(torch.tensor([10**member.layout.rank])).item())
    assert sums == [11, 11, 1100, 1100]


def test_former_generations_leave_nothing() -> None:
    members = formed([RankLayout(tp_size=2, tp_rank=rank) for rank in range(2)])
    store = members[0].store
    assert store is not None
    num_keys = store.num_keys()
    for generation in range(2, 8):
        form(members, generation)
        assert on_all(members, lambda member: int(member.group.all_reduce(torch.tensor([1])))) == [2, 2]
    # A heartbeat of the generation before may come late.
    assert store.num_keys() <= num_keys + 2


def test_a_late_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a rank may be silent: it lives, and has not got its plan yet."""
    monkeypatch.setattr(heartbeat, "MISSED_ROUNDS", 3)
    members = formed([RankLayout(tp_size=2, tp_rank=rank) for rank in range(2)])

    def late(member: CollectiveMember) -> int:
        if member.layout.rank:
            time.sleep(4 * heartbeat.PERIOD_S)
        return int(member.group.all_reduce(torch.tensor([1])))

    assert on_all(members, late) == [2, 2]


def test_a_rank_that_comes_late_to_the_meeting_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a rank may be silent: it may be clearing a large pool."""
    monkeypatch.setattr(heartbeat, "MISSED_ROUNDS", 3)
    members = [CollectiveMember(RankLayout(tp_size=2, tp_rank=rank), "127.0.0.1") for rank in range(2)]

    def late(member: CollectiveMember) -> int:
        if member.layout.rank:
            time.sleep(4 * heartbeat.PERIOD_S)
        member.form(1, members[0].rendezvous, ["a", "b"])
        return int(member.group.all_reduce(torch.tensor([1])))

    assert on_all(members, late) == [2, 2]


def test_an_attempt_that_was_abandoned_takes_nothing_from_a_later_one() -> None:
    members = formed([RankLayout(tp_size=2, tp_rank=rank) for rank in range(2)])
    store = members[0].store
    assert store is not None
    store.set("12/0/a,b/0/1", "the address of a rank")
    with pytest.raises(RankLost):
        members[0].connect = refuse
        members[0].form(9, members[0].rendezvous, ["a", "b"])
    assert "12/0/a,b/0/1" in store.list_keys()


def test_attempts_that_were_abandoned_are_bounded() -> None:
    is_over = threading.Event()

    def connect(meeting: Meeting) -> Communicator:
        is_over.wait(TIMEOUT_S)
        return refuse(meeting)

    member = CollectiveMember(RankLayout(tp_size=2, tp_rank=1), "127.0.0.1", connect)

    def attempt(generation: int) -> str:
        with pytest.raises(CollectiveAborted) as caught:
            member.form(generation, "127.0.0.1:1", ["a", "b"])
        return str(caught.value)

    with ThreadPoolExecutor(1) as thread:
        for generation in range(MOST_ATTEMPTS):
            forming = thread.submit(attempt, generation)
            while not forming.done():  # It may not have begun.
                member.abort()
                time.sleep(0.001)
            assert "was left while it formed" in forming.result()
        assert "form the group in a minute" in thread.submit(attempt, 100).result(TIMEOUT_S)
    is_over.set()
    deadline = time.monotonic() + TIMEOUT_S
    while "nobody comes" not in attempt(101):
        assert time.monotonic() < deadline


def test_an_attempt_that_has_ended_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "MOST_ATTEMPTS", 1)
    member = CollectiveMember(RankLayout(tp_size=2, tp_rank=1), "127.0.0.1", refuse)
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for generation in range(500):
            with pytest.raises(RankLost, match="nobody comes"):
                member.form(generation, "127.0.0.1:1", ["a", "b"])
    finally:
        sys.setswitchinterval(switch_s)


def test_a_collective_that_begins_as_the_group_is_left_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group waits for its collectives when it goes: whoever drops one that is left must not wait with it."""
    members = formed([RankLayout(tp_size=2, tp_rank=rank) for rank in range(2)])
    member, check = members[0], GlooCommunicator.check

    def leave_behind(communicator: GlooCommunicator) -> None:
        check(communicator)
        monkeypatch.undo()
        member.abort()
        for thread in threading.enumerate():
            if thread.name == "group-leaves":
                thread.join(TIMEOUT_S)

    monkeypatch.setattr(GlooCommunicator, "check", leave_behind)
    with pytest.raises(CollectiveAborted, match="was left"):
        member.group.all_reduce(torch.ones(4))

    def drop() -> None:
        member.group.communicator = None
        gc.collect()  # Errors have frames, which have it too.

    dropping = threading.Thread(target=drop, daemon=True)
    dropping.start()
    dropping.join(MOST_S)
    is_held_up = dropping.is_alive()
    members[1].abort()
    members[1].group.communicator = None
    assert not is_held_up


def refuse(meeting: Meeting) -> Communicator:
    raise RankLost(f"nobody comes to {meeting.name}")


def test_abort_ends_a_collective_and_a_forming() -> None:
    members = formed([RankLayout(tp_size=2, tp_rank=rank) for rank in range(2)])
    errors: list[BaseException] = []

    def waits(call: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            try:
                call()
            except CollectiveAborted as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    waiting = waits(lambda: members[0].group.all_reduce(torch.zeros(1)))
    members[0].abort()
    waiting.join(TIMEOUT_S)
    assert [type(error) for error in errors] == [CollectiveAborted] and not members[0].is_whole
    with pytest.raises(CollectiveAborted):
        members[0].group.all_reduce(torch.zeros(1))
    waiting = waits(lambda: members[1].form(2, members[0].rendezvous, ["a", "b"]))
    deadline = time.monotonic() + TIMEOUT_S
    while waiting.is_alive() and time.monotonic() < deadline:  # It may not have begun.
        members[1].abort()
        waiting.join(0.1)
    assert len(errors) == 2
    form(members, 3)
    assert on_all(members, lambda member: int(member.group.all_reduce(torch.tensor([1])))) == [2, 2]


def test_a_place_to_meet_that_is_none() -> None:
    member = CollectiveMember(RankLayout(tp_size=2, tp_rank=1), "127.0.0.1")
    for place in ("", "nowhere", "unix:/x"):
        with pytest.raises(RankLost, match="place to meet"):
            member.form(1, place, ["a", "b"])
    with pytest.raises(RankLost, match="3 members"):
        member.form(1, "127.0.0.1:1", ["a", "b", "c"])


@asynccontextmanager
async def processes(size: int) -> AsyncIterator[list[RankProcess]]:
    ranks = await asyncio.gather(*(RankProcess.start(rank, size) for rank in range(size)))
    try:
        yield ranks
    finally:
        await asyncio.gather(*(rank.kill() for rank in ranks))


async def lose(size: int, rank: int, number: signal.Signals) -> None:
    """A rank is lost while the others wait for it in a collective; then another takes its place."""
    async with asyncio.timeout(3 * TIMEOUT_S), processes(size) as ranks:
        names = [f"a{n}" for n in range(size)]
        await asyncio.gather(*(each.tell("form", 1, ranks[0].rendezvous, names) for each in ranks))
        answers = await asyncio.gather(*(each.tell("sum", n, 1) for n, each in enumerate(ranks)))
        assert all(answer["result"] == [sum(range(size)), size] for answer in answers)
        survivors = [each for each in ranks if each is not ranks[rank]]
        if number == signal.SIGSTOP:
            await ranks[rank].kill(number)
            waiting = [asyncio.ensure_future(each.tell("sum", 1)) for each in survivors]
        else:
            waiting = [asyncio.ensure_future(each.tell("sum", 1)) for each in survivors]
            await ranks[rank].kill(number)
        for answer in await asyncio.gather(*waiting):
            print(number.name, answer)
            assert answer["error"] == "RankLost" and answer["is_whole"] is False
            assert float(str(answer["seconds"])) < MOST_S
        # Whoever hangs is killed before anything else can be done with it.
        await ranks[rank].kill()
        ranks[rank] = await RankProcess.start(rank, size)
        names[rank] += "-again"
        answers = await asyncio.gather(*(each.tell("form", 2, ranks[0].rendezvous, names) for each in ranks))
        assert all(answer["is_whole"] for answer in answers), answers
        answers = await asyncio.gather(*(each.tell("sum", 1) for each in ranks))
        assert all(answer["result"] == [size] for answer in answers)


@pytest.mark.parametrize(
    ("size", "rank", "number"),
    [
        (2, 1, signal.SIGSTOP),
        pytest.param(2, 0, signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(4, 2, signal.SIGSTOP, marks=pytest.mark.full),
        pytest.param(3, 1, signal.SIGKILL, marks=pytest.mark.full),
        pytest.param(2, 0, signal.SIGKILL, marks=pytest.mark.full),
    ],
)
async def test_survivors_leave_their_collective_and_meet_the_next(size: int, rank: int, number: signal.Signals) -> None:
    await lose(size, rank, number)


_ENDS = """
import threading, time
from radixmesh.daemons.runtime.rank_layout import RankLayout
from radixmesh.daemons.worker.collectives import heartbeat
from radixmesh.daemons.worker.collectives.member import CollectiveMember
from radixmesh.daemons.worker.ranks.group_member import CollectiveAborted

def form(rank, generation):
    try:
        members[rank].form(generation, members[0].rendezvous, ["a", "b"])
    except CollectiveAborted:
        pass

class Slow:
    def __del__(self):
        sleep(0.5)

sleep = time.sleep
members = [CollectiveMember(RankLayout(tp_size=2, tp_rank=rank), "127.0.0.1") for rank in range(2)]
{what}
# The interpreter takes names away in their order: the store goes, which wakes whoever waits for it, and then more.
slow = Slow()
"""
_BOTH = """
threads = [threading.Thread(target=form, args=(rank, 1)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
_MEETS_NOBODY = f"""{_BOTH}
thread = threading.Thread(target=form, args=(1, 2))
thread.start()
sleep(0.5)
members[0].abort()
members[1].abort()
thread.join()
"""
_BEATS = f"""
heartbeat.PERIOD_S = 1e-4
heartbeat.MISSED_ROUNDS = 100_000
{_BOTH}
sleep(0.3)
"""


@pytest.mark.parametrize("what", [_MEETS_NOBODY, _BEATS], ids=["a meeting that was left", "heartbeats"])
def test_a_process_that_ends_amid_calls_of_a_library_ends_well(what: str) -> None:
    """Threads that come back from C++ to an interpreter that has ended would abort the process."""
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", _ENDS.format(what=what)], capture_output=True, timeout=TIMEOUT_S)
        assert ended.returncode == 0, ended.stderr.decode()[-2000:]
