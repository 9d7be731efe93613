"""Prompts that are computed elsewhere, from the router's side: whatever comes, the decode side is told in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.router_requests import change, new_request

from radixmesh.daemons.router.peers.schedulers import remote_prefills
from radixmesh.daemons.router.peers.schedulers.remote_prefills import RemotePrefills
from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.peers.schedulers.submit import prefill_of
from radixmesh.daemons.router.placement.move_costs import MoveWay
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Journal, Output, OutputState
from radixmesh.daemons.router.requests.logprob_track import LogprobTrack
from radixmesh.daemons.router.requests.updates import Logprobs
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.scheduler.v1 import scheduler_pb2

PREFILL, DECODE = scheduler_pb2.SCHEDULER_ROLE_PREFILL, scheduler_pb2.SCHEDULER_ROLE_DECODE


class FakeLink(SimpleNamespace):
    """The part of a link that remote prefills use."""

    __hash__ = object.__hash__

    def __init__(self, role: int, cached: int = 0, waiting: int = 0) -> None:
        load = scheduler_pb2.Load(waiting_tokens=waiting)
        super().__init__(role=role, cached=cached, load=load, page_size=4, kv_heads=b"", num_prefills=0)
        self.takes_kv_targets = False
        self.targets: list[str] = []
        self.is_connected = self.is_group_serving = self.is_without = True
        self.reservations: list[Any] = []
        self.prefills: list[str] = []
        self.cancelled: list[int] = []
        self.resubmitted: list[tuple[int, ...]] = []
        self.last_sequence = 8

    def reserve(self, reservation: scheduler_pb2.Reservation) -> None:
        self.reservations.append(reservation)

    def prefill(self, output: Output, transfer_id: str, target: scheduler_pb2.TransferTarget) -> None:
        self.prefills.append(transfer_id)

    def send_target(self, target: scheduler_pb2.TransferTarget) -> None:
        self.targets.append(target.transfer_id)

    def cancel(self, request: object, *, below_attempt: int, index: int) -> None:
        self.cancelled.append(below_attempt)

    def submit_again(self, output: Output) -> int:
        self.resubmitted.append(tuple(output.ids))
        return 7

    def is_without_tokens(self, output: Output) -> bool:
        return bool(self.is_without)


class World:
    def __init__(self, *prefills: FakeLink, decode: FakeLink | None = None) -> None:
        self.decode = decode or FakeLink(DECODE)
        table = SimpleNamespace(prefilling=lambda output: list(prefills), decode_room=lambda request: self.decode_room)
        self.decode_room = 0
        self.accounts: list[object] = []
        placement: Any = SimpleNamespace(
            table=table,
            matched_tokens=lambda output, link: link.cached,
            on_left=lambda link, sequence: self.accounts.append(("left", sequence)),
            take_sent=lambda link, decision: self.accounts.append("sent"),
        )
        self.now = 0.0
        self.remote = RemotePrefills(placement, least_tokens=8, clock=lambda: self.now)
        request = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=4)
        change(request, prompt_ids=pack_ints(range(20)))
        request.num_prompt = 20
        self.output = request.outputs[0]
        self.output.attempt_no = 0
        self.output.state = OutputState.RUNNING

    def begin(self) -> str:
        self.remote.begin(self.output, self.decode)  # type: ignore[arg-type]
        return self.output.transfer_id

    def answer(self, transfer_id: str, *, has_target: bool = True) -> None:
        target = scheduler_pb2.TransferTarget(transfer_id=transfer_id) if has_target else None
        result = scheduler_pb2.ReservationResult(transfer_id=transfer_id, target=target)
        self.remote.answered(self.decode, result)  # type: ignore[arg-type]

    def over(self, transfer_id: str, *ids: int, is_handed_over: bool = True, logprobs: int = 0) -> bool:
        """The prefill side is through, with these ids and as many logprobs."""
        prompt = RemotePrompt(transfer_id=transfer_id, output=self.output, attempt=0)
        prompt.ids.extend(ids)
        prompt.logprobs = [Logprobs(pack_floats([-0.5]))] * logprobs
        return self.remote.over(prompt, is_handed_over=is_handed_over)

    def told(self) -> list[tuple[bool, int]]:
        """Reservations that the decode side got: whether each is a cancellation, and its prompt's bytes."""
        return [(r.is_cancelled, len(r.prompt_ids)) for r in self.decode.reservations]


def test_the_prefill_with_the_least_to_compute_gets_the_prompt() -> None:
    busy, cached, idle = FakeLink(PREFILL, waiting=100), FakeLink(PREFILL, cached=12), FakeLink(PREFILL)
    world = World(busy, idle, cached)
    transfer_id = world.begin()
    assert world.told() == [(False, 80)] and world.decode.reservations[0].granule == 4
    assert not cached.prefills, "there is no place for it yet"
    world.answer(transfer_id)
    assert cached.prefills == [transfer_id] and not (busy.prefills or idle.prefills)
    world.answer(transfer_id)
    assert len(cached.prefills) == 1, "an answer counts once"
    world.over(transfer_id)
    world.decode.is_without = False
    world.now = 2.0
    world.remote.tick(world.now)
    assert not len(world.remote) and world.told() == [(False, 80)]


@pytest.mark.parametrize("event", ["no place", "lost", "unserving"])
def test_a_prefill_that_will_not_come_is_told_at_once(event: str) -> None:
    link = FakeLink(PREFILL)
    world = World(link)
    transfer_id = world.begin()
    if event == "unserving":
        link.is_group_serving = False
    world.answer(transfer_id, has_target=event != "no place")
    if event == "lost":
        world.over(transfer_id, is_handed_over=False)
    assert not len(world.remote)
    assert world.told()[1:] == ([] if event == "no place" else [(True, 0)])


def test_leases_are_renewed_while_the_prefill_runs_and_no_longer() -> None:
    world = World(FakeLink(PREFILL))
    transfer_id = world.begin()
    world.answer(transfer_id)
    for world.now in (1.0, 1.5, 2.0):
        world.remote.tick(world.now)
    assert world.told()[1:] == [(False, 0), (False, 0)]
    world.over(transfer_id)
    world.remote.tick(9.0)
    assert len(world.told()) == 3, "from now on it arrives, or the decode side computes it"


def test_a_prefill_that_takes_too_long_is_given_up_and_ended() -> None:
    link = FakeLink(PREFILL)
    world = World(link)
    transfer_id = world.begin()
    world.answer(transfer_id)
    world.now = 59.9
    world.remote.tick(world.now)
    assert world.told()[1:] == [(False, 0)] and not link.cancelled
    world.now = 60.0
    world.remote.tick(world.now)
    assert world.told()[2:] == [(True, 0)] and link.cancelled == [1] and not len(world.remote)


def test_a_prefill_whose_worker_is_lost_is_given_up_at_once() -> None:
    link = FakeLink(PREFILL)
    world = World(link)
    transfer_id = world.begin()
    link.is_group_serving = False
    world.remote.tick(0.1)
    assert world.told()[1:] == [], "the answer to the reservation finds out"
    link.is_group_serving = True
    world.answer(transfer_id)
    world.remote.tick(0.2)
    link.is_group_serving = False
    world.remote.tick(0.3)
    assert world.told()[1:] == [(True, 0)] and link.cancelled == [1] and not len(world.remote)


def test_what_is_being_sent_outlives_the_group() -> None:
    link = FakeLink(PREFILL)
    world = World(link)
    transfer_id = world.begin()
    world.answer(transfer_id)
    world.over(transfer_id)
    link.is_group_serving = False
    world.remote.tick(0.1)
    assert len(world.remote) == 1 and not link.cancelled, "its worker may live and write"


def test_an_output_that_leaves_ends_its_prefill() -> None:
    link = FakeLink(PREFILL)
    world = World(link)
    transfer_id = world.begin()
    world.answer(transfer_id)
    world.remote.end(world.output)
    assert world.told()[1:] == [(True, 0)] and link.cancelled == [1] and not world.output.transfer_id
    world.remote.end(world.output)
    world.over(transfer_id)
    assert len(world.told()) == 2


def test_what_runs_in_place() -> None:
    for case in ("cached", "short", "resumed", "sibling", "role", "alone"):
        world = World(*([] if case == "alone" else [FakeLink(PREFILL)]))
        if case == "cached":
            world.decode.cached = 13
        elif case == "short":
            world.output.request.num_prompt = 7
        elif case == "resumed":
            world.output.ids.append(3)
        elif case == "sibling":
            world.output.index = 1
        elif case == "role":
            world.decode.role = 0
        assert not world.begin() and not world.decode.reservations, case


def test_a_prefill_samples_as_the_output_does_and_keeps_no_room_for_it() -> None:
    world = World(FakeLink(PREFILL))
    change(world.output.request, seeds=(77,), sampling={"temperature": 0.5}, stop={"max_tokens": 9, "min_tokens": 4})
    world.output.transfer_id = "t"
    submit = prefill_of(world.output, 7, 8, scheduler_pb2.TransferTarget(transfer_id="t", num_tokens=20))
    assert (submit.handle, submit.sequence, submit.attempt, submit.send_kv_to.transfer_id) == (7, 8, 0, "t")
    assert submit.prompt_ids == pack_ints(range(20)) and not submit.transfer_id
    assert (submit.sampling.seed, submit.sampling.temperature) == (77, 0.5)
    assert (submit.stop.max_tokens, submit.stop.min_tokens, submit.stop.ignore_eos) == (2, 2, False)


def test_the_output_goes_on_behind_the_prefills_first_token() -> None:
    world = World(FakeLink(PREFILL))
    transfer_id = world.begin()
    world.answer(transfer_id)
    assert world.over(transfer_id, 5)
    assert world.decode.resubmitted == [(5,)] and world.accounts == [("left", 7), "sent"]
    assert len(world.remote) == 1 and world.output.transfer_id == transfer_id, "its KV is still on its way"
    assert world.told()[1:] == []


def test_a_token_of_the_decode_sides_own_is_kept() -> None:
    world = World(FakeLink(PREFILL))
    transfer_id = world.begin()
    world.answer(transfer_id)
    world.decode.is_without = False
    assert not world.over(transfer_id, 5) and not world.output.ids and not world.decode.resubmitted


@pytest.mark.parametrize("num_logprobs", [0, 1])
def test_a_token_counts_with_its_logprobs_alone(num_logprobs: int) -> None:
    world = World(FakeLink(PREFILL))
    world.output.logprobs = LogprobTrack(0)
    transfer_id = world.begin()
    world.answer(transfer_id)
    assert world.over(transfer_id, 5, logprobs=num_logprobs) == bool(num_logprobs)
    assert len(world.output.ids) == world.output.logprobs.end == num_logprobs == len(world.decode.resubmitted)


@pytest.mark.parametrize("ends", [True, False])
def test_an_output_that_the_first_token_ends_goes_nowhere(ends: bool) -> None:
    world = World(FakeLink(PREFILL))
    world.output.request.end_ids = frozenset([5] if ends else [6])
    transfer_id = world.begin()
    world.answer(transfer_id)
    assert world.over(transfer_id, 5, is_handed_over=False)
    assert world.decode.resubmitted == ([] if ends else [(5,)])
    assert len(world.remote) == ends, "whoever ends the output ends its prefill"


def moving(num_ids: int = 3) -> tuple[World, FakeLink]:
    """An output with some tokens that leaves a scheduler whose cache has all of it."""
    world = World()
    world.output.ids.extend(range(100, 100 + num_ids))
    source = FakeLink(DECODE, cached=20)
    source.kv_heads = b"heads"
    return world, source


def move(world: World, source: FakeLink) -> MoveWay:
    return world.remote.begin_move(world.output, source, world.decode)  # type: ignore[arg-type]


def test_an_output_that_moves_gets_its_kv_from_where_it_was() -> None:
    world, source = moving(num_ids=2)
    assert move(world, source) is MoveWay.KV
    transfer_id = world.output.transfer_id
    (reservation,) = world.decode.reservations
    assert (reservation.kv_heads, len(reservation.prompt_ids)) == (b"heads", 4 * 22), "the ids that it has, too"
    world.answer(transfer_id)
    assert source.prefills == [transfer_id]
    prompt = RemotePrompt(transfer_id=transfer_id, output=world.output, attempt=0, num_before=2)
    prompt.ids.append(7)
    assert world.remote.over(prompt, is_handed_over=True)
    assert list(world.output.ids) == [100, 101, 7] and world.decode.resubmitted == [(100, 101, 7)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_connected", False),
        ("is_group_serving", False),
        ("kv_heads", b""),
        ("load", scheduler_pb2.Load(is_leaving=True)),
    ],
)
def test_kv_comes_only_from_a_scheduler_that_can_send_it(name: str, value: object) -> None:
    world, source = moving()
    setattr(source, name, value)
    assert move(world, source) is MoveWay.PREFILL and not world.output.transfer_id and not world.told()


def test_what_the_target_has_cached_or_cannot_take_is_not_sent() -> None:
    world, source = moving()
    world.decode.cached = 16
    assert move(world, source) is MoveWay.PREFILL, "seven tokens are fewer than eight"
    world.decode.cached, world.decode.role = 0, 0
    assert move(world, source) is MoveWay.PREFILL
    world.decode.role = DECODE
    assert move(world, source) is MoveWay.KV


def test_a_token_of_another_position_is_not_the_outputs() -> None:
    world, source = moving()
    move(world, source)
    transfer_id = world.output.transfer_id
    world.answer(transfer_id)
    prompt = RemotePrompt(transfer_id=transfer_id, output=world.output, attempt=0, num_before=2)
    prompt.ids.append(7)
    assert not world.remote.over(prompt, is_handed_over=True) and list(world.output.ids) == [100, 101, 102]


def test_the_request_of_a_moved_output_asks_for_one_more_token() -> None:
    world, _ = moving(num_ids=3)
    submit = prefill_of(world.output, 1, 1, scheduler_pb2.TransferTarget(transfer_id="t"))
    assert len(submit.resumed_output_ids) == 12 and submit.stop.max_tokens == 4, "its own end comes first"
    change(world.output.request, stop={"max_tokens": 100})
    assert prefill_of(world.output, 1, 1, scheduler_pb2.TransferTarget(transfer_id="t")).stop.max_tokens == 5


def test_it_says_why_a_prefill_group_runs_whole_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode groups with fewer pages than prompt and max_tokens want are never chosen: nothing is transferred."""
    world, told = World(FakeLink(PREFILL), decode=FakeLink(PREFILL)), []
    monkeypatch.setattr(remote_prefills, "log", SimpleNamespace(warning=lambda event, **fields: told.append(fields)))
    output = world.output
    for room in (0, output.request.max_total_len, output.request.max_total_len - 1):
        world.decode_room = room
        for _ in range(3):
            world.remote.begin(output, world.decode)
        assert len(told) == (0 < room < output.request.max_total_len), room
    world.now += 100.0
    world.remote.begin(output, world.decode)
    assert len(told) == 2 and told[1]["most"] == output.request.max_total_len - 1
    assert not output.transfer_id and not world.decode.reservations


def test_a_prompt_whose_prefill_side_is_lost_while_it_waits_for_room_goes_to_another_one() -> None:
    first, other, unlike = FakeLink(PREFILL), FakeLink(PREFILL, waiting=100), FakeLink(PREFILL)
    unlike.page_size = 16
    world = World(first, other, unlike)
    transfer_id = world.begin()
    first.is_group_serving = False
    world.remote.tick(0.5)
    world.answer(transfer_id)
    assert other.prefills == [transfer_id] and not (first.prefills or unlike.prefills)
    assert not any(is_cancelled for is_cancelled, _ in world.told())


def test_a_reservation_that_waits_for_room_is_renewed_and_given_up_in_time() -> None:
    link = FakeLink(PREFILL)
    world = World(link)
    world.begin()
    for world.now in (1.0, 2.0, 3.0):
        world.remote.tick(world.now)
    assert world.told()[1:] == [(False, 0)] * 3
    world.now = 60.0
    world.remote.tick(world.now)
    assert not len(world.remote) and world.told()[-1] == (True, 0) and not link.cancelled


def test_a_move_that_waits_for_room_ends_with_the_group_that_has_its_kv() -> None:
    """Another one could send nothing of it: the target computes what it lacks at once."""
    world, source = moving(num_ids=2)
    assert move(world, source) is MoveWay.KV
    source.is_group_serving = False
    world.remote.tick(0.1)
    assert not len(world.remote) and world.told()[-1] == (True, 0) and not source.prefills


def early(world: World, transfer_id: str, *ids: int) -> RemotePrompt:
    """The token has come, and not yet that the prefill is over."""
    prompt = RemotePrompt(transfer_id=transfer_id, output=world.output, attempt=0)
    prompt.ids.extend(ids)
    return prompt


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_a_token_that_comes_ahead_of_the_prefills_end_is_given_once(is_handed_over: bool) -> None:
    world = World(FakeLink(PREFILL))
    transfer_id = world.begin()
    world.answer(transfer_id)
    prompt = early(world, transfer_id, 5)
    assert world.remote.token_came(prompt) and not world.remote.token_came(prompt)
    assert world.decode.resubmitted == [(5,)] and world.accounts == [("left", 7), "sent"]
    assert not world.remote.over(prompt, is_handed_over=is_handed_over), "it has been said"
    assert list(world.output.ids) == [5] and world.decode.resubmitted == [(5,)]
    assert world.told()[1:] == ([] if is_handed_over else [(True, 0)]), "where no KV comes, the decode side is told"


@pytest.mark.parametrize("why", ["ends", "last", "without logprobs", "own", "unknown"])
def test_a_token_that_waits_for_the_prefills_end(why: str) -> None:
    world = World(FakeLink(PREFILL))
    transfer_id = world.begin()
    world.answer(transfer_id)
    if why == "ends":
        world.output.request.end_ids = frozenset([5])
    elif why == "last":
        change(world.output.request, stop={"max_tokens": 1})
    elif why == "without logprobs":
        world.output.logprobs = LogprobTrack(0)
    elif why == "own":
        world.decode.is_without = False
    prompt = early(world, "?" if why == "unknown" else transfer_id, 5)
    assert not world.remote.token_came(prompt)
    assert not world.output.ids and not world.decode.resubmitted
    assert world.remote.over(prompt, is_handed_over=True) == (why in ("ends", "last"))


def ahead() -> tuple[World, FakeLink, str]:
    """A prompt that is computed while a place for its KV is made."""
    link = FakeLink(PREFILL)
    link.takes_kv_targets = True
    world = World(link)
    transfer_id = world.begin()
    assert not link.prefills, "the output is nowhere yet"
    world.remote.submitted(world.output)
    assert link.prefills == [transfer_id] and not link.targets
    return world, link, transfer_id


def test_a_prompt_is_submitted_while_its_place_is_made_and_the_target_follows() -> None:
    world, link, transfer_id = ahead()
    for _ in range(2):
        world.answer(transfer_id)
    world.remote.submitted(world.output)
    assert (link.prefills, link.targets) == ([transfer_id], [transfer_id])
    assert world.over(transfer_id, 5) and world.told()[1:] == []


@pytest.mark.parametrize("why", ["no place", "lost", "late", "over", "left"])
def test_a_prompt_that_was_submitted_ahead_and_gets_no_place_is_ended(why: str) -> None:
    world, link, transfer_id = ahead()
    if why == "over":
        assert world.over(transfer_id, 5, is_handed_over=False), "its token is as good"
    elif why == "late":
        world.remote.tick(60.0)
    elif why == "left":
        world.remote.end(world.output)
    else:
        link.is_group_serving = why != "lost"
        world.answer(transfer_id, has_target=why == "lost")
    assert not len(world.remote) and not link.targets
    assert link.cancelled == ([] if why == "over" else [1])
    assert world.told()[1:] == ([] if why == "no place" else [(True, 0)])
    world.answer(transfer_id)
    assert not link.targets, "nobody waits for it"


def test_a_prompt_that_is_computed_ahead_goes_nowhere_else() -> None:
    world, link, _ = ahead()
    link.is_group_serving = False
    world.remote.tick(0.1)
    assert world.told()[1:] == [(True, 0)] and link.cancelled == [1] and not len(world.remote)


@pytest.mark.parametrize("why", ["waits", "older", "lost"])
def test_a_prompt_that_is_not_submitted_ahead(why: str) -> None:
    link = FakeLink(PREFILL)
    link.takes_kv_targets = why != "older"
    link.is_group_serving = why != "lost"
    world = World(link)
    first = world.begin() if why == "waits" else ""
    transfer_id = world.begin()
    world.remote.submitted(world.output)
    assert not link.prefills
    link.is_group_serving = True
    world.answer(transfer_id)
    assert link.prefills == [transfer_id] and not link.targets
    if first:
        world.answer(first)
        world.begin()
        world.remote.submitted(world.output)
        assert len(link.prefills) == 3, "none waits any more"
