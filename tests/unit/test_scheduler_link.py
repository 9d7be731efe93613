"""The link to a scheduler over a made-up stream: every part of a frame becomes the event that it stands for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
from support.router_mesh import MODEL
from support.router_requests import change, new_request

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.router.peers.frame_stream import FrameStream
from radixmesh.daemons.router.peers.schedulers.remote_prompt import RemotePrompt
from radixmesh.daemons.router.peers.schedulers.scheduler_events import SchedulerEvents
from radixmesh.daemons.router.peers.schedulers.scheduler_link import SchedulerLink
from radixmesh.daemons.router.requests.delivery import Delivery
from radixmesh.daemons.router.requests.journal import Ending, Journal, Output
from radixmesh.daemons.router.requests.logprob_track import LogprobTrack
from radixmesh.daemons.router.requests.wakeup_pacer import WakeupPacer
from radixmesh.daemons.runtime.arrays import pack_floats, pack_ints
from radixmesh.daemons.runtime.rpc.hello import make_hello
from radixmesh.daemons.runtime.steps.step import Task
from radixmesh.scheduler.v1 import scheduler_pb2

Frame = scheduler_pb2.ServeResponse


class Wire(FrameStream[scheduler_pb2.ServeRequest, Frame]):
    """Says what the test puts in; the hello first. None ends it."""

    def __init__(self) -> None:
        self.sent: list[scheduler_pb2.ServeRequest] = []
        self.said: asyncio.Queue[Frame | None] = asyncio.Queue()
        hello = scheduler_pb2.SchedulerHello(hello=make_hello("scheduler", "s", MODEL), page_size=1, num_pages=1000)
        load = scheduler_pb2.Load(group=scheduler_pb2.GROUP_STATE_SERVING)
        self.said.put_nowait(Frame(hello=hello, load=load))

    async def send(self, frame: scheduler_pb2.ServeRequest) -> None:
        self.sent.append(frame)

    async def receive(self) -> Frame | None:
        return await self.said.get()

    async def close(self) -> None:
        pass


class Events:
    """Names of events with what tells them apart."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*arguments: object, **options: object) -> None:
            self.told.append((name, *arguments))

        return tell

    def names(self) -> list[str]:
        return [cast("tuple[str, object]", event)[0] for event in self.told]

    def endings(self) -> list[Ending]:
        return [
            argument
            for event in self.told
            for argument in cast("tuple[object, ...]", event)
            if isinstance(argument, Ending)
        ]


class Talk:
    def __init__(self) -> None:
        self.wire, self.events, self.now = Wire(), Events(), 0.0
        self.link = SchedulerLink(
            "s",
            lambda address: self.wire,
            60.0,
            make_hello("router", "r"),
            cast("SchedulerEvents", self.events),
            lambda: self.now,
        )

    def output(self) -> Output:
        (output,) = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=10).outputs
        self.link.submit(output)
        return output

    async def hear(self, frame: Frame) -> list[str]:
        """The events of a frame."""
        self.events.told.clear()
        self.wire.said.put_nowait(frame)
        async with asyncio.timeout(30):
            while not self.wire.said.empty():
                await asyncio.sleep(0)
        for _ in range(3):
            await asyncio.sleep(0)
        return self.events.names()


@asynccontextmanager
async def talk() -> AsyncIterator[Talk]:
    made = Talk()
    made.link.start()
    try:
        async with asyncio.timeout(30):
            while not made.link.is_connected:
                await asyncio.sleep(0)
        yield made
    finally:
        await made.link.close()


def tokens(output: Output, ids: list[int]) -> scheduler_pb2.TokenBatch:
    return scheduler_pb2.TokenBatch(
        handles=pack_ints([output.scheduler_handle]),
        attempts=pack_ints([output.attempt]),
        first_output_indexes=pack_ints([len(output.ids)]),
        counts=pack_ints([len(ids)]),
        ids=pack_ints(ids),
    )


async def test_a_group_that_is_lost_under_outputs_counts_as_a_failure_and_starts_slowly() -> None:
    lost, serving = (
        Frame(load=scheduler_pb2.Load(group=group))
        for group in (scheduler_pb2.GROUP_STATE_CONNECTING, scheduler_pb2.GROUP_STATE_SERVING)
    )
    async with talk() as made:
        await made.hear(serving)
        assert made.link.health.state == "sound", "its first start is none that follows a loss"
        await made.hear(lost)
        await made.hear(serving)
        assert made.link.health.state == "slow start"
        assert not made.link.health.failed() and not made.link.health.failed(), "without outputs nothing was lost"
    async with talk() as made:
        made.output()
        for _ in range(3):
            await made.hear(serving)
            await made.hear(lost)
        assert made.link.health.is_passed_over


async def test_a_group_that_is_claimed_in_vain_has_not_served_since_it_was_lost() -> None:
    """Outputs leave it after a time: claims that fail again and again must not put that off."""
    connecting, adopting, serving = (
        Frame(load=scheduler_pb2.Load(group=group))
        for group in (
            scheduler_pb2.GROUP_STATE_CONNECTING,
            scheduler_pb2.GROUP_STATE_ADOPTING,
            scheduler_pb2.GROUP_STATE_SERVING,
        )
    )
    async with talk() as made:
        made.now = 5.0
        await made.hear(connecting)
        for made.now in (5.5, 6.0, 6.5):
            await made.hear(adopting)
            await made.hear(Frame(load=scheduler_pb2.Load(group=connecting.load.group, is_draining=True)))
        assert made.link.group_since == 5.0
        made.now = 7.0
        await made.hear(serving)
        assert made.link.group_since == 7.0


async def test_a_speed_that_is_no_number_counts_as_not_known() -> None:
    async with talk() as made:
        for token_us, taken in ((12.5, 12.5), (float("nan"), 0.0), (float("inf"), 0.0), (-3.0, 0.0)):
            await made.hear(Frame(load=scheduler_pb2.Load(token_us=token_us)))
            assert made.link.replica_load().token_us == taken


async def test_every_change_of_what_can_go_there_is_told() -> None:
    serving = scheduler_pb2.Load(group=scheduler_pb2.GROUP_STATE_SERVING)
    drained = scheduler_pb2.Load(group=scheduler_pb2.GROUP_STATE_SERVING, is_draining=True)
    async with talk() as made:
        told: list[tuple[bool, bool]] = []
        made.link.on_facts = lambda link: told.append((link.takes_submits, link.is_group_serving))
        await made.hear(Frame(load=drained))
        await made.hear(Frame(load=serving))
        made.link.is_draining = True
        made.link.is_draining = False
        made.wire.said.put_nowait(None)
        async with asyncio.timeout(30):
            while made.link.is_connected:
                await asyncio.sleep(0)
        assert told == [(False, True), (True, True), (False, True), (True, True), (False, False)]


async def test_the_first_tokens_of_a_submit_are_told_once() -> None:
    async with talk() as made:
        output = made.output()
        assert made.link.is_without_tokens(output)
        assert await made.hear(Frame(tokens=tokens(output, [5]))) == ["on_first_token", "on_tokens"]
        assert not made.link.is_without_tokens(output)
        assert await made.hear(Frame(tokens=tokens(output, [6]))) == ["on_tokens"]
        assert list(output.ids) == [5, 6]


async def test_prompt_logprobs_and_vectors_are_told() -> None:
    async with talk() as made:
        output = made.output()
        output.request.prompt_logprobs = LogprobTrack(1)
        values = common_pb2.Logprobs(token_logprobs=pack_floats([-1.0]))
        frame = Frame()
        frame.prompt_logprobs.add(handle=output.scheduler_handle, first_position=1, logprobs=values)
        assert await made.hear(frame) == ["on_prompt_logprobs"]
        assert await made.hear(frame) == [], "known"
        change(output.request, task=Task.EMBED)
        frame = Frame()
        frame.vectors.add(handle=output.scheduler_handle, values=pack_floats([1.0]))
        assert await made.hear(frame) == ["on_vector"]


async def test_a_load_is_told_and_a_change_of_group_or_draining_apart() -> None:
    async with talk() as made:
        serving = scheduler_pb2.Load(group=scheduler_pb2.GROUP_STATE_SERVING)
        assert await made.hear(Frame(load=serving)) == ["on_load"]
        away = scheduler_pb2.Load(group=scheduler_pb2.GROUP_STATE_CONNECTING)
        assert await made.hear(Frame(load=away)) == ["on_load", "on_scheduler_changed"]
        drains = scheduler_pb2.Load(group=scheduler_pb2.GROUP_STATE_CONNECTING, is_draining=True)
        assert await made.hear(Frame(load=drains)) == ["on_load", "on_scheduler_changed"]
        assert not made.link.takes_submits


@pytest.mark.parametrize("reason", [common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH])
async def test_a_regular_end_counts_the_tokens_that_came(reason: common_pb2.FinishReason) -> None:
    async with talk() as made:
        output = made.output()
        await made.hear(Frame(tokens=tokens(output, [5, 6])))
        frame = Frame()
        usage = common_pb2.Usage(cached_tokens=3)
        frame.finished.add(
            handle=output.scheduler_handle, attempt=output.attempt, reason=reason, num_output=2, stop_id=6, usage=usage
        )
        assert await made.hear(frame) == ["on_left", "on_finished"]
        assert made.events.endings() == [Ending(reason=reason, num_output=2, stop_id=6, cached_tokens=3)]
        assert not made.link.num_running


async def test_an_end_that_is_none_of_the_models_is_an_error_with_what_there_is() -> None:
    async with talk() as made:
        output = made.output()
        await made.hear(Frame(tokens=tokens(output, [5, 6])))
        frame = Frame()
        reason = common_pb2.FINISH_REASON_ERROR
        frame.finished.add(handle=output.scheduler_handle, attempt=output.attempt, reason=reason, num_output=1)
        await made.hear(frame)
        (ending,) = made.events.endings()
        assert ending.error is not None and ending.num_output == 2


async def test_the_end_of_a_former_attempt_ends_nothing() -> None:
    async with talk() as made:
        output = made.output()
        frame = Frame()
        frame.finished.add(
            handle=output.scheduler_handle, attempt=output.attempt + 1, reason=common_pb2.FINISH_REASON_STOP
        )
        frame.rejected.add(handle=output.scheduler_handle, attempt=output.attempt + 1)
        assert await made.hear(frame) == [] and made.link.num_running == 1


async def test_an_end_with_another_count_than_came_breaks_the_stream_and_the_output_is_lost() -> None:
    async with talk() as made:
        output = made.output()
        await made.hear(Frame(tokens=tokens(output, [5, 6])))
        frame = Frame()
        reason = common_pb2.FINISH_REASON_LENGTH
        frame.finished.add(handle=output.scheduler_handle, attempt=output.attempt, reason=reason, num_output=3)
        await made.hear(frame)
        async with asyncio.timeout(30):
            while "on_scheduler_lost" not in made.events.names():
                await asyncio.sleep(0)
        assert not made.link.num_running


async def test_an_output_that_is_submitted_again_is_a_new_attempt_and_the_old_ones_rows_are_dropped() -> None:
    async with talk() as made:
        output = made.output()
        old = tokens(output, [5])
        output.ids.append(9)
        assert made.link.submit_again(output) == 1
        assert (output.attempt_no, made.link.num_running, made.link.is_without_tokens(output)) == (1, 1, True)
        assert await made.hear(Frame(tokens=old)) == [] and list(output.ids) == [9]
        assert await made.hear(Frame(tokens=tokens(output, [6]))) == ["on_first_token", "on_tokens"]
        assert list(output.ids) == [9, 6]
        sent = [submit for frame in made.wire.sent for submit in frame.submits]
        assert [(s.attempt, s.resumed_output_ids) for s in sent] == [(1, pack_ints([9]))], (
            "the first is not sent any more"
        )


async def test_a_prompt_for_elsewhere_ends_with_its_token() -> None:
    async with talk() as made:
        (output,) = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=10).outputs
        output.attempt_no = 2
        made.link.prefill(output, "t", scheduler_pb2.TransferTarget(transfer_id="t"))
        batch = scheduler_pb2.TokenBatch(
            handles=pack_ints([1]),
            attempts=pack_ints([2]),
            first_output_indexes=pack_ints([0]),
            counts=pack_ints([1]),
            ids=pack_ints([8]),
        )
        finished = scheduler_pb2.Finished(handle=1, attempt=2, reason=common_pb2.FINISH_REASON_HANDED_OVER)
        assert await made.hear(Frame(tokens=batch, finished=[finished])) == ["on_prompt_token", "on_prefill_over"]
        ((_, early), (_, prompt)) = cast("list[tuple[object, RemotePrompt]]", made.events.told)
        assert early is prompt
        assert (prompt.transfer_id, list(prompt.ids), made.link.num_prefills) == ("t", [8], 0)
        assert not output.ids


async def test_a_target_follows_the_prompt_that_it_is_for() -> None:
    async with talk() as made:
        assert not made.link.takes_kv_targets, "a hello that does not say so"
        (output,) = new_request("r", Delivery(Journal(1 << 20), WakeupPacer()), max_tokens=10).outputs
        # An abort goes ahead of prompts, in a frame of its own.
        made.link.cancel(output.request, below_attempt=1)
        made.link.prefill(output, "t", scheduler_pb2.TransferTarget(transfer_id="t"))
        made.link.send_target(scheduler_pb2.TransferTarget(transfer_id="t", num_tokens=5))
        await made.hear(Frame())
        frames = [frame for frame in made.wire.sent if frame.submits or frame.kv_targets or frame.aborts]
        assert [(len(f.aborts), len(f.submits), len(f.kv_targets)) for f in frames] == [(1, 0, 0), (0, 1, 1)]
        assert frames[1].submits[0].send_kv_to == scheduler_pb2.TransferTarget(transfer_id="t")
        made.link.send_target(scheduler_pb2.TransferTarget(transfer_id="u", num_tokens=5))
        await made.hear(Frame())
        assert [target.transfer_id for target in made.wire.sent[-1].kv_targets] == ["u"]


async def test_a_role_is_that_of_the_latest_load_that_names_one() -> None:
    async with talk() as made:
        assert made.link.role == scheduler_pb2.SCHEDULER_ROLE_UNSPECIFIED
        facts: list[int] = []
        made.link.on_facts = lambda link: facts.append(link.role)
        serving = scheduler_pb2.GROUP_STATE_SERVING
        await made.hear(Frame(load=scheduler_pb2.Load(group=serving, role=scheduler_pb2.SCHEDULER_ROLE_PREFILL)))
        await made.hear(Frame(load=scheduler_pb2.Load(group=serving)))
        assert facts == [scheduler_pb2.SCHEDULER_ROLE_PREFILL] * 2
